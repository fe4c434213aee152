//! A run and its model before planning, and plans of engines of other sizes.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::preflight::{MakePlan, OpenModel, Preflight, combination, open_model, validate_gpu};
use super::rows::TrainingRows;
use super::sizing::{self, ExpectedStep};
use crate::config::{Config, EngineShape, Mode, WorldSize, divisors};
use crate::console::rows_progress;
use crate::cuda::Placement;
use crate::data::Tokenizer;
use crate::error::{Error, Result};
use crate::model::{ModelSpec, Stages};
use crate::plan::{MemoryPlan, Room, StepSeconds, human};
use crate::tools::ToolProcess;

/// A configured run and its model, before planning.
#[derive(Debug)]
pub struct PlannedRun {
    pub(super) config: Config,
    pub(super) model: OpenModel,
}

impl PlannedRun {
    /// Reads the model and the rows. Without `max_prompt_length`, the longest prompt of the rows is the limit.
    ///
    /// # Errors
    /// Errors of the model's folder or the rows.
    pub fn with_rows(config: &Config, placement: Placement) -> Result<Self> {
        let run = Self::without_rows(config, placement)?;
        config.validate_context(run.model.spec.max_position_embeddings)?;
        if config.max_prompt_length.is_some() {
            return Ok(run);
        }
        let tools = ToolProcess::start(config)?;
        let rows = TrainingRows::read(config, &run.model, Vec::new(), tools.as_ref(), rows_progress("plan"))?;
        Ok(Self { config: rows.planned(config), ..run })
    }

    /// Reads only the model, for a run whose rows are not there yet. Without `max_prompt_length`, prompts may be as long as the context.
    ///
    /// # Errors
    /// Errors of the model's folder.
    pub fn without_rows(config: &Config, placement: Placement) -> Result<Self> {
        Ok(Self { config: config.clone(), model: open_model(config, placement)? })
    }

    /// A run with a model of this shape, without files; its tokens are numbers.
    ///
    /// # Errors
    /// [`Error::InvalidValue`](crate::Error::InvalidValue) for a shape that the configuration does not support.
    pub fn of_shape(config: &Config, spec: &ModelSpec, placement: Placement) -> Result<Self> {
        let spec = Arc::new(spec.clone().with_expert_parallel(config.enable_expert_parallel)?);
        let tokenizer = Arc::new(Tokenizer::of_ids(spec.vocab_size)?);
        validate_gpu(&spec, placement, Some(config.tensor_parallel_size), Path::new(""))?;
        Ok(Self { config: config.clone(), model: OpenModel { spec, tokenizer, has_adapters: false } })
    }

    /// Most tokens of a prompt with its completion.
    pub fn context_len(&self) -> usize {
        self.config.context_len(self.model.spec.max_position_embeddings)
    }

    /// Checks and plans the run for the number of ranks in `world_size`, at `placement`, within the memory of `room`.
    ///
    /// # Errors
    /// Errors of the configuration or the machine.
    pub fn preflight(&self, placement: Placement, world_size: WorldSize, room: Room) -> Result<Preflight> {
        Preflight::of_model(&self.config, self.model.clone(), placement, world_size, room)
    }

    /// Like [`PlannedRun::preflight`]. If the run does not fit on the GPUs of one machine, the error says with how many it would, up to eight.
    ///
    /// # Errors
    /// The errors of [`PlannedRun::preflight`].
    pub fn advised_preflight(&self, placement: Placement, world_size: WorldSize, room: Room) -> Result<Preflight> {
        let WorldSize { ranks, local_ranks } = world_size;
        let more = [2, 4, 8].into_iter().filter(|&gpus| placement.on_cuda && ranks == local_ranks && gpus > ranks);
        self.preflight(placement, world_size, room).map_err(|error| match error {
            Error::Environment { message } => {
                let fits = |ranks| self.preflight(placement, WorldSize { ranks, local_ranks: ranks }, room).is_ok();
                let fitting = more.clone().find(|&gpus| fits(gpus));
                let fits = fitting.map(|gpus| format!("with {gpus} GPUs (--nproc {gpus}) this run fits; as it is, "));
                Error::Environment { message: fits.unwrap_or_default() + &message }
            }
            other => other,
        })
    }

    /// Plans the run with every tensor-parallel size and number of stages that divide the model and the ranks of a node.
    ///
    /// # Errors
    /// [`Error::InvalidValue`](crate::Error::InvalidValue) for a batch that cannot be divided among the ranks.
    pub fn compare(
        &self,
        placement: Placement,
        world_size: WorldSize,
        room: Room,
        expected: Option<ExpectedStep>,
    ) -> Result<EngineTable> {
        let of_one = Config { tensor_parallel_size: 1, pipeline_parallel_size: 1, ..self.config.clone() };
        let num_generators = of_one.validate_world(world_size.ranks)?.roles.num_generators;
        let shapes = divisors(num_generators).into_iter().flat_map(|tensor_parallel_size| {
            divisors(num_generators / tensor_parallel_size)
                .into_iter()
                .map(move |pipeline_parallel_size| EngineShape { tensor_parallel_size, pipeline_parallel_size })
        });
        let mut choices = Vec::new();
        let is_on_a_node =
            |shape: &EngineShape| world_size.check_engines(world_size.ranks - num_generators, *shape).is_ok();
        for shape in shapes.filter(is_on_a_node) {
            let config = self.with_engine(shape);
            if self.can_be(&config, placement, world_size) {
                let plan = self.planned(&config, placement, world_size, room, expected);
                choices.push(EngineChoice { shape, num_engines: num_generators / shape.num_ranks(), plan });
            }
        }
        Ok(EngineTable { choices, own: self.config.engine_shape() })
    }

    /// Whether the model and the configuration allow the engines of `config`, apart from memory.
    pub(super) fn can_be(&self, config: &Config, placement: Placement, world_size: WorldSize) -> bool {
        let EngineShape { tensor_parallel_size, pipeline_parallel_size } = config.engine_shape();
        let spec = &self.model.spec;
        combination(config, spec, placement, world_size).check().is_ok()
            && spec.validate_tp(tensor_parallel_size).is_ok()
            && Stages::new(spec, pipeline_parallel_size, &[]).is_ok()
            && validate_gpu(spec, placement, Some(tensor_parallel_size), Path::new("")).is_ok()
    }

    /// The configuration with engines of this shape. Several stages need sharded weights or, in split mode, weights of their own.
    fn with_engine(&self, EngineShape { tensor_parallel_size, pipeline_parallel_size }: EngineShape) -> Config {
        let mut config = Config { tensor_parallel_size, pipeline_parallel_size, ..self.config.clone() };
        if pipeline_parallel_size > 1 && config.mode == Mode::Colocated {
            config.zero.stage = 3;
        }
        config.pipeline_partition.take_if(|partition| partition.0.len() != pipeline_parallel_size);
        config
    }

    /// Plans the run with another configuration.
    fn planned(
        &self,
        config: &Config,
        placement: Placement,
        world_size: WorldSize,
        room: Room,
        expected: Option<ExpectedStep>,
    ) -> Result<PlannedEngine> {
        let plan: &MakePlan<'_> = &|input, _| MemoryPlan::without_advice(input);
        let planned = Preflight::planned(config, self.model.clone(), placement, world_size, room, plan)?;
        let layers = planned.stages.iter().map(|stage| stage.layers.len().to_string()).collect::<Vec<_>>().join(",");
        let seconds = expected.and_then(|expected| sizing::seconds(config, &planned, expected).ok());
        let plan = planned.engine_plan.unwrap_or(planned.plan);
        Ok(PlannedEngine { zero_stage: config.zero.stage, layers, plan, seconds })
    }
}

/// The plan for engines of one shape.
#[derive(Debug)]
struct EngineChoice {
    shape: EngineShape,
    num_engines: usize,
    plan: Result<PlannedEngine>,
}

#[derive(Debug)]
struct PlannedEngine {
    zero_stage: u8,
    layers: String,
    plan: MemoryPlan,
    seconds: Option<StepSeconds>,
}

/// The plans for engines of each shape, to print as a table.
#[derive(Debug)]
pub struct EngineTable {
    choices: Vec<EngineChoice>,
    own: EngineShape,
}

impl fmt::Display for EngineTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = [
            "tp",
            "pp",
            "engines",
            "zero.stage",
            "layers",
            "# KV blocks",
            "tokens",
            "at full length",
            "asked for",
            "peak a rank",
            "generate s",
            "step s",
        ];
        writeln!(f, "{}", row(header.map(str::to_owned), ' '))?;
        for EngineChoice { shape, num_engines, plan } in &self.choices {
            let mark = if *shape == self.own { '*' } else { ' ' };
            let [tp, pp] = [shape.tensor_parallel_size, shape.pipeline_parallel_size].map(|size| size.to_string());
            match plan {
                Ok(PlannedEngine { zero_stage, layers, plan, seconds }) => {
                    let tokens = plan.num_kv_blocks * plan.kv_block_size;
                    let at_once = tokens as f64 / plan.max_model_length.max(1) as f64;
                    let cells = [
                        tp,
                        pp,
                        num_engines.to_string(),
                        zero_stage.to_string(),
                        layers.clone(),
                        plan.num_kv_blocks.to_string(),
                        tokens.to_string(),
                        format!("{at_once:.1}"),
                        plan.num_seqs.to_string(),
                        human(plan.peak_bytes()),
                        seconds.map_or("-".to_owned(), |all| format!("{:.2}", all.generate_s)),
                        seconds.map_or("-".to_owned(), |all| format!("{:.2}", all.step_s)),
                    ];
                    writeln!(f, "{}", row(cells, mark))?;
                }
                Err(error) => writeln!(f, "{mark}{tp:>3} {pp:>3} {num_engines:>8}  {error}")?,
            }
        }
        let of = "columns for one engine: KV blocks, tokens they hold, sequences of max_model_length they hold, \
                  sequences in a batch; * marks the configured row";
        write!(f, "{of}")
    }
}

fn row(
    [tp, pp, engines, zero, layers, blocks, tokens, sequences, wanted, peak, generate, step]: [String; 12],
    mark: char,
) -> String {
    format!(
        "{mark}{tp:>3} {pp:>3} {engines:>8} {zero:>11} {layers:>20} {blocks:>12} {tokens:>10} {sequences:>15} {wanted:>10} {peak:>12} \
         {generate:>11} {step:>8}"
    )
}
