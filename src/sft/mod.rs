//! Supervised fine-tuning on prompt/completion rows, through the trainer's policy: the warm-up before GRPO.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use tch::{Device, Kind, Tensor};

use crate::checkpoint;
use crate::config::SftConfig;
use crate::cuda::Placement;
use crate::data::{PromptSampler, SftDataset, SftExample, Tokenizer};
use crate::dist::{Mesh, ReduceOp, World, all_reduce_f64};
use crate::error::{Error, Result};
use crate::metrics::{MetricValues, MetricsWriter, Progress, write_report, write_run_config};
use crate::model::{LoraSpec, ModelSource, ModelSpec, ParamTable, WeightFiles};
use crate::phase::{self, Phase};
use crate::train::{
    AdamOptions, GradientOptions, MicroBatch, NetworkOptions, OptimizerHome, PackOptions, Policy, PolicyOptions,
    PolicyStart, Schedule, Sequence, TokenGradients, learning_rate, pack, pad_to_agreed_count,
};

/// A supervised run on this rank.
#[derive(Debug)]
pub struct Sft {
    config: SftConfig,
    world: Arc<World>,
    mesh: Mesh,
    base_dir: PathBuf,
    policy: Policy,
    examples: Vec<SftExample>,
    too_long: usize,
    eval_examples: Vec<SftExample>,
    sampler: PromptSampler,
    schedule: Schedule,
    device: Device,
}

/// What a supervised run reached.
#[derive(Debug, Clone, PartialEq)]
pub struct SftSummary {
    /// Mean negative log-likelihood of a completion token in the last update, in nats.
    pub loss: f64,
    /// The same on the held-out rows, if there are any.
    pub eval_loss: Option<f64>,
    /// The final model's folder.
    pub model_dir: PathBuf,
}

impl Sft {
    /// Loads model and rows; collective over the world.
    pub fn new(config: SftConfig, world: Arc<World>) -> Result<Self> {
        let loaded = phase::scope(Phase::Load, || Self::load(config, world.clone()));
        world.agree(loaded)
    }

    fn load(config: SftConfig, world: Arc<World>) -> Result<Self> {
        let device = world.device();
        let kind = Placement::in_world(config.device, config.dtype, device)?.kind;
        let source = ModelSource::new(&config.model_name_or_path, None)?;
        let spec = Arc::new(ModelSpec::from_folder(&source.base)?);
        let tokenizer = Tokenizer::from_folder(&source.base)?;
        tokenizer.check_against(spec.vocab_size, &spec.eos_token_ids)?;
        let max_length = config.max_length.min(spec.max_position_embeddings);
        let read = |path: &PathBuf| SftDataset::from_jsonl(path, &tokenizer, max_length);
        let SftDataset { examples, too_long } = read(&config.train_file)?;
        let eval_examples =
            config.eval_file.as_ref().map(read).transpose()?.map_or_else(Vec::new, |rows| rows.examples);
        let mesh = world.mesh(1, config.zero.shard_group_size.unwrap_or(world.size()))?;
        let table = Arc::new(ParamTable::new(spec, mesh.shard.size()));
        let options = PolicyOptions {
            stage: config.zero.stage,
            network: NetworkOptions { kind, device },
            gradient_checkpointing: config.gradient_checkpointing,
            adam: AdamOptions::new(&config.optimizer),
            gradients: GradientOptions::new(config.zero.grad_accum_dtype, config.zero.reduce_dtype),
        };
        let files = WeightFiles::open(&source.base, table.spec.clone())?;
        let start = PolicyStart {
            lora: LoraSpec::new(&config.lora),
            quantization: config.quantization,
            seed: config.seed,
            adapters: source.adapters.as_deref(),
        };
        let policy = Policy::start(
            table,
            &mesh,
            options,
            OptimizerHome::Resident,
            &|layout| files.read_unit(layout, Kind::Float),
            start,
        )?;
        let sampler = PromptSampler::new(examples.len(), config.seed, config.shuffle_dataset);
        let rows_per_update = config.per_device_train_batch_size * config.gradient_accumulation_steps * world.size();
        if rows_per_update > examples.len() {
            let (file, rows) = (config.train_file.display(), examples.len());
            let expected = format!(
                "at most {rows} rows an update over all ranks and slices, not {rows_per_update}: {file} has no more"
            );
            let (key, got) = ("per_device_train_batch_size", config.per_device_train_batch_size);
            return Err(Error::invalid_value(key, got, expected));
        }
        let rows = (examples.len(), rows_per_update);
        let schedule = Schedule::new(config.learning_rate, &config.optimizer, rows, 1);
        let base_dir = source.base;
        Ok(Self { config, world, mesh, base_dir, policy, examples, too_long, eval_examples, sampler, schedule, device })
    }

    /// Trains to the end, writes metrics and the final model; collective over the world.
    ///
    /// # Errors
    /// [`Error::Preempted`] if a stop was asked for, after writing the model as it is: a supervised run is not resumed.
    pub fn run(&mut self) -> Result<SftSummary> {
        let total = self.schedule.total_steps as u64;
        let mut log = Log::new(&self.config, &self.world, total)?;
        log.display.say(&format!(
            "{}: {} rows; {} more are longer than max_length or the context",
            self.config.train_file.display(),
            self.examples.len(),
            self.too_long
        ));
        let mut loss = f64::NAN;
        let mut reached = total;
        for step in 0..total {
            phase::set_step(step);
            let lr = learning_rate(&self.schedule, step);
            let (step_loss, grad_norm) = self.step(lr)?;
            loss = step_loss;
            log.step(step + 1, &[("loss", loss), ("grad_norm", grad_norm), ("learning_rate", lr)]);
            if self.stop_asked()? && step + 1 < total {
                reached = step + 1;
                break;
            }
        }
        let eval_loss = if self.eval_examples.is_empty() { None } else { Some(self.evaluate()?) };
        let model_dir = checkpoint::export(&self.config.output_dir, &self.base_dir, &self.world, Some(&self.policy))?;
        log.finish(reached, eval_loss)?;
        match reached < total {
            true => Err(Error::Preempted { step: reached, saved: model_dir }),
            false => Ok(SftSummary { loss, eval_loss, model_dir }),
        }
    }

    /// Whether any rank was asked to stop.
    fn stop_asked(&self) -> Result<bool> {
        let mut asked = [f64::from(u8::from(phase::stop_requested()))];
        all_reduce_f64(&*self.mesh.world, &mut asked, ReduceOp::Max)?;
        Ok(asked[0] > 0.0)
    }

    /// One update; returns its loss and gradient norm.
    ///
    /// # Errors
    /// [`Error::NonFinite`], on every rank together, before anything is changed.
    fn step(&mut self, lr: f64) -> Result<(f64, f64)> {
        let per_rank = self.config.per_device_train_batch_size * self.config.gradient_accumulation_steps;
        let rows = self.sampler.next_batch(per_rank * self.world.size())?;
        let own = &rows[self.world.rank() * per_rank..][..per_rank];
        let sequences: Vec<Sequence> = own.iter().map(|&row| sequence(&self.examples[row])).collect();
        let (micro_batches, num_tokens) = self.micro_batches(&sequences)?;
        let mut nll = Tensor::zeros([], (Kind::Double, self.device));
        phase::scope(Phase::ForwardBackward, || {
            for (index, micro_batch) in micro_batches.iter().enumerate() {
                phase::beat();
                if index + 1 == micro_batches.len() {
                    self.policy.finish_gradients_with_next_backward();
                }
                self.policy.forward_backward(micro_batch, 1.0, &mut |scores| {
                    nll -= scores.logprobs.sum(Kind::Double); // read after the step: the host goes on meanwhile
                    let dlogprobs = Tensor::full_like(&scores.logprobs, -1.0 / num_tokens);
                    Ok(TokenGradients { dlogprobs, dentropy: None })
                })?;
            }
            Ok(())
        })?;
        let outcome =
            phase::scope(Phase::Optimizer, || self.policy.optimizer_step(lr, self.config.optimizer.max_grad_norm))?;
        if outcome.skipped {
            let message = "the gradient is not finite; lower learning_rate, or look for damaged weights".to_owned();
            return Err(Error::NonFinite { message });
        }
        Ok((self.mean(nll.double_value(&[]), num_tokens)?, outcome.grad_norm))
    }

    /// Mean negative log-likelihood of a held-out completion token, in nats.
    fn evaluate(&mut self) -> Result<f64> {
        let (rank, size) = (self.world.rank(), self.world.size());
        let own = self.eval_examples.iter().skip(rank).step_by(size);
        let sequences: Vec<Sequence> = own.map(sequence).collect();
        let (micro_batches, num_tokens) = self.micro_batches(&sequences)?;
        let mut nll = 0.0;
        for micro_batch in &micro_batches {
            phase::beat();
            nll -= self.policy.forward_logprobs(micro_batch, 1.0)?.logprobs.sum(Kind::Double).double_value(&[]);
        }
        self.mean(nll, num_tokens)
    }

    /// The same number of micro-batches on every rank, and the completion tokens of all ranks.
    fn micro_batches(&self, sequences: &[Sequence]) -> Result<(Vec<MicroBatch>, f64)> {
        let max_tokens = self.config.max_tokens_per_micro_batch;
        let options = PackOptions { max_tokens, share_prompts: false, device: self.device };
        let mut micro_batches = pack(sequences, &options)?;
        pad_to_agreed_count(&mut micro_batches, &*self.mesh.world)?;
        let mut num_tokens = [sequences.iter().map(Sequence::completion_len).sum::<usize>() as f64];
        all_reduce_f64(&*self.mesh.world, &mut num_tokens, ReduceOp::Sum)?;
        Ok((micro_batches, num_tokens[0]))
    }

    fn mean(&self, own_sum: f64, count: f64) -> Result<f64> {
        let mut sum = [own_sum];
        all_reduce_f64(&*self.mesh.world, &mut sum, ReduceOp::Sum)?;
        Ok(sum[0] / count)
    }
}

fn sequence(example: &SftExample) -> Sequence {
    Sequence::of_tokens(example.token_ids.clone(), example.prompt_len)
}

/// What the first rank writes and shows.
#[derive(Debug)]
struct Log {
    output_dir: PathBuf,
    writer: Option<MetricsWriter>,
    display: Progress,
    logging_steps: u64,
    last_step: u64,
    last: Instant,
}

impl Log {
    fn new(config: &SftConfig, world: &World, total: u64) -> Result<Self> {
        let is_first = world.rank() == 0;
        if is_first {
            write_run_config(&config.output_dir, config)?;
        }
        Ok(Self {
            output_dir: config.output_dir.clone(),
            writer: if is_first { Some(MetricsWriter::new(&config.output_dir, None)?) } else { None },
            display: Progress::new(total, 0, is_first),
            logging_steps: config.logging_steps as u64,
            last_step: total,
            last: Instant::now(),
        })
    }

    fn step(&mut self, step: u64, numbers: &[(&str, f64)]) {
        let mut values: MetricValues = numbers.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        values.insert("step_time".into(), self.last.elapsed().as_secs_f64());
        self.last = Instant::now();
        self.display.finish_step(step, &values);
        let is_due = step.is_multiple_of(self.logging_steps) || step == self.last_step;
        if let Some(writer) = self.writer.as_mut().filter(|_| is_due) {
            writer.write(step, &values);
        }
    }

    fn finish(&mut self, step: u64, eval_loss: Option<f64>) -> Result<()> {
        self.display.finish();
        let Some(writer) = &mut self.writer else { return Ok(()) };
        if let Some(loss) = eval_loss {
            writer.write(step, &MetricValues::from([("eval_loss".to_owned(), loss)]));
        }
        write_report(&self.output_dir).map(drop)
    }
}
