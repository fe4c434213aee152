//! Loads a model's folder into an engine that serves it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};
use tch::{Kind, Tensor};

use super::Served;
use crate::config::{Device, EngineShape, Quantization, Speculation};
use crate::console;
use crate::cuda;
use crate::data::Tokenizer;
use crate::error::{Error, Result};
use crate::memory;
use crate::model::{
    AdapterFiles, BaseRounding, ModelSource, ModelSpec, ParamTable, Stages, UnitLayout, WeightFiles, model_within,
};
use crate::phase;
use crate::ranks::World;
use crate::rollout::{
    Engine, EngineFormats, EngineOptions, EngineRanks, SpeculationOptions, cache_kind, fullest_stage, kv_block_bytes,
    weight_copy_bytes,
};

/// Tokens per KV block.
const KV_BLOCK_SIZE: usize = 16;
/// Most sequences decoded at once.
const MAX_NUM_SEQS: usize = 256;

/// The model that is served, and its engine's settings.
#[derive(Debug, Clone, Copy)]
pub struct ServeOptions<'a> {
    /// A model's folder, or one of LoRA adapters.
    pub model: &'a Path,
    /// The adapters' model folder, where they do not name it.
    pub base_model: Option<&'a Path>,
    /// Adapters that requests choose by their place in this list: names and folders.
    pub adapters: &'a [NamedAdapter],
    /// How the base's weights are rounded as they are loaded; `None` is as they were while its adapters were trained.
    pub quantization: Option<Quantization>,
    /// Variables that the chat template is given.
    pub template_variables: &'a Map<String, Value>,
    /// How the ranks of an engine share the model.
    pub division: EngineDivision<'a>,
    /// Longest prompt and completion together in tokens; `None` is the model's context.
    pub max_model_length: Option<usize>,
    /// Type of weights, activations and cache.
    pub kind: Kind,
    /// Type of the residual stream.
    pub residual: Kind,
    /// How products read weights, and how keys, values and states are stored.
    pub formats: EngineFormats,
    /// How tokens are drafted.
    pub speculation: SpeculationOptions,
}

/// How the ranks of an engine share a model.
#[derive(Debug, Clone, Copy)]
pub struct EngineDivision<'a> {
    /// Ranks that share one engine.
    pub shape: EngineShape,
    /// Layers of each of its stages; empty to cut by planned time.
    pub pipeline_partition: &'a [usize],
    /// Each of them has some experts whole, of a model with experts.
    pub enable_expert_parallel: bool,
}

/// A model and its stages.
pub struct DividedModel {
    pub spec: Arc<ModelSpec>,
    pub stages: Stages,
}

impl EngineDivision<'_> {
    /// The model in `folder`, divided, by its `config.json` alone.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::BadFile`] for a `config.json` that cannot be read or is not served; [`Error::InvalidValue`] for a division
    /// that the model does not allow.
    pub fn of_model(&self, folder: &Path, on_gpu: bool) -> Result<DividedModel> {
        let EngineShape { tensor_parallel_size, pipeline_parallel_size } = self.shape;
        let spec = ModelSpec::from_folder(folder)?.with_expert_parallel(self.enable_expert_parallel)?;
        spec.validate_tp(tensor_parallel_size)?;
        let device = if on_gpu { Device::Cuda } else { Device::Cpu };
        spec.check_with([("pipeline_parallel_size", pipeline_parallel_size.into()), ("device", device.name().into())])?;
        let stages = Stages::new(&spec, pipeline_parallel_size, self.pipeline_partition)?;
        Ok(DividedModel { spec: Arc::new(spec), stages })
    }
}

/// Adapters that are served under a name beside their base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedAdapter {
    /// The name that requests choose them by.
    pub name: String,
    /// A folder of LoRA adapters, or a name on the Hub.
    pub folder: PathBuf,
}

/// A model that is served, with what its prompts are made of.
#[derive(Debug)]
pub struct ModelService {
    /// Weights and engine.
    pub served: Served,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Longest prompt and completion together, in tokens.
    pub max_model_length: usize,
    /// Ids that end a completion.
    pub eos_token_ids: Vec<u32>,
}

impl ModelService {
    /// Loads model, adapters and tokenizer, and makes an engine whose KV cache takes up to a quarter of the free memory; collective
    /// over the world.
    ///
    /// # Errors
    /// What is wrong with the folders or the machine.
    pub fn load(options: &ServeOptions<'_>, world: &Arc<World>) -> Result<Self> {
        let ServeOptions { division: division @ EngineDivision { shape, .. }, kind, residual, .. } = *options;
        let source = ModelSource::new(options.model, options.base_model)?;
        let folder = &source.base;
        let DividedModel { mut spec, stages } = division.of_model(folder, world.device().is_cuda())?;
        if options.speculation.method == Speculation::Mtp {
            spec = Arc::new(spec.as_ref().clone().with_draft_head());
        }
        let tokenizer = Arc::new(Tokenizer::from_folder(folder)?.with_template_variables(options.template_variables)?);
        tokenizer.check_against(spec.vocab_size, &spec.eos_token_ids)?;
        tokenizer.notice().filter(|_| world.rank() == 0).iter().for_each(console::say);
        let mesh = world.mesh(shape, world.size())?;
        let device = world.device();
        let max_model_length = options.max_model_length.unwrap_or(usize::MAX).min(spec.max_position_embeddings);
        let longest_blocks = max_model_length.div_ceil(KV_BLOCK_SIZE);
        let EngineFormats { quantization, kv_cache_dtype, state_dtype } = options.formats;
        let (fullest, tp_size) = (fullest_stage(&spec, &stages), shape.tensor_parallel_size);
        let copy_bytes = weight_copy_bytes(quantization.format(), &fullest, tp_size);
        let available = match device.is_cuda() {
            true => cuda::available_bytes()?.saturating_sub(spec.num_params() * kind.elt_size_in_bytes() + copy_bytes),
            false => memory::available_host_bytes()? / world.local_size(),
        };
        let block_bytes = kv_block_bytes(&fullest, tp_size, KV_BLOCK_SIZE, cache_kind(kv_cache_dtype, kind));
        let engine_options = EngineOptions {
            kv_cache_bytes: (MAX_NUM_SEQS * longest_blocks * block_bytes).min(available / 4),
            block_size: KV_BLOCK_SIZE,
            max_num_seqs: MAX_NUM_SEQS,
            max_num_batched_tokens: 8192,
            max_model_length,
            kind,
            residual,
            quantization,
            kv_cache_dtype,
            state_dtype,
            device,
            strict: false,
            exact: false,
            records_experts: false,
            speculation: options.speculation,
        };
        let ranks = EngineRanks::new(&mesh, stages);
        let engine = Engine::in_stages(spec.clone(), tokenizer.clone(), engine_options, ranks)?;
        let files = WeightFiles::open(folder, spec.clone())?;
        let table = Arc::new(ParamTable::new(spec.clone(), 1));
        let adapters = source.adapters.as_ref().map(|folder| AdapterFiles::open(folder, spec.clone())).transpose()?;
        let named = (options.adapters.iter())
            .map(|adapter| AdapterFiles::open(&adapter.folder_beside(&source)?, spec.clone()))
            .collect::<Result<Vec<_>>>()?;
        let quantization = base_quantization(options.quantization, adapters.as_ref(), &named, world.rank() == 0);
        let rounding = BaseRounding::new(&spec, quantization)?;
        let read = |layout: &UnitLayout| {
            phase::beat();
            let flat = files.read_unit(layout, kind)?;
            rounding.apply(&spec, layout, &flat)?;
            Ok(flat)
        };
        let mut served = Served::new(world.clone(), table, engine, &read)?;
        if let Some(files) = &adapters {
            served = served.with_adapters(files.lora().clone(), &|layout| files.read_unit(layout, kind))?;
        }
        for files in &named {
            served = served.with_choice(files.lora().clone(), &|layout| read_finite(files, layout, kind))?;
        }
        let eos_token_ids = tokenizer.eos_token_ids(&spec.eos_token_ids);
        Ok(Self { served, tokenizer, max_model_length, eos_token_ids })
    }
}

/// How the base is rounded: as asked for, else as its adapters were trained; says which where they were trained beside a rounded one. Adapters that
/// requests choose leave the base, which answers, too, as its files have it.
fn base_quantization(
    asked: Option<Quantization>,
    adapters: Option<&AdapterFiles>,
    named: &[AdapterFiles],
    speaks: bool,
) -> Quantization {
    let is_rounded = |files: &AdapterFiles| files.base_quantization() != Quantization::None;
    let quantization = asked.unwrap_or(adapters.map_or(Quantization::None, AdapterFiles::base_quantization));
    let trained = adapters.into_iter().chain(named).find(|files| is_rounded(files));
    if let Some(files) = trained.filter(|_| speaks) {
        let stored = files.base_quantization();
        let (key, name) = (stored.name(), stored.name().to_uppercase());
        let how = match quantization == stored {
            true => format!("the base is rounded to {name} here as well; --quantization none uses it as stored"),
            false => format!(
                "here the base is used as stored, so probabilities differ from training; --quantization {key} rounds it"
            ),
        };
        console::say(format_args!("{} was trained on its base in {name}: {how}", files.path().display()));
    }
    quantization
}

impl NamedAdapter {
    /// The folder of the adapters, to be served beside a base model.
    fn folder_beside(&self, model: &ModelSource) -> Result<PathBuf> {
        let refuse =
            |expected: String| Err(Error::invalid_value("--adapter", self.folder.display().to_string(), expected));
        if model.adapters.is_some() {
            let expected = "a base model as --model, as --model names adapters itself; name each folder of adapters \
                            with --adapter NAME=FOLDER";
            return refuse(expected.to_owned());
        }
        match ModelSource::new(&self.folder, Some(&model.base))?.adapters {
            Some(folder) => Ok(folder),
            None => {
                let within =
                    model_within(&self.folder).map(|model| format!("; the adapters are in {}", model.display()));
                let within = within.unwrap_or_default();
                refuse(format!("a folder of LoRA adapters, which has an adapter_config.json{within}"))
            }
        }
    }
}

/// One unit of adapters. A number that is not finite would reach the rows of other adapters, as 0 times it is not 0.
fn read_finite(files: &AdapterFiles, layout: &UnitLayout, kind: Kind) -> Result<Tensor> {
    let unit = files.read_unit(layout, kind)?;
    if unit.isfinite().all().int64_value(&[]) == 0 {
        return Err(Error::bad_file(
            files.path(),
            format!("the adapters of the {} contain values that are not finite", layout.unit),
        ));
    }
    Ok(unit)
}
