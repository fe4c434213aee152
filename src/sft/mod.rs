//! Supervised fine-tuning with the trainer's policy, on completions or on the assistant's turns of conversations, as warm-up before GRPO. `load`
//! reads and checks.

mod load;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use tch::{Device, Kind, Tensor};

use crate::checkpoint::{self, Claim, Models, SavedConfig, Saver, TrainerState};
use crate::config::SftConfig;
use crate::data::{PromptSampler, SftExample};
use crate::error::{Error, Result};
use crate::metrics::ranks::RankReporter;
use crate::metrics::{MetricValues, RunLog};
use crate::phase::{self, Phase};
use crate::ranks::{Mesh, ReduceOp, World, all_reduce_f64, any_rank};
use crate::torch;
use crate::train::{
    MicroBatch, PackOptions, Policy, Schedule, Sequence, TokenGradients, learning_rate, pack, pad_to_agreed_count,
};
use crate::types::Place;

/// A supervised run on this rank.
#[derive(Debug)]
pub struct Sft {
    config: SftConfig,
    world: Arc<World>,
    mesh: Mesh,
    policy: Policy,
    examples: Vec<SftExample>,
    rows_digest: String,                      // of the rows that the examples are from
    frozen_weights: BTreeMap<String, String>, // identities of weights that are read but not trained, by key
    eval_examples: Vec<SftExample>,
    sampler: PromptSampler,
    schedule: Schedule,
    device: Device,
    log: RunLog,
    reporter: RankReporter,
    loss: f64,     // of the newest update, in nats; NaN before the first
    last: Instant, // end time of the newest update
    saver: Saver,
    claim: Option<Claim>, // on the output folder, on rank 0
    global_step: u64,     // number of updates
    num_tokens: u64,      // tokens trained on, over all ranks
    chip_flop_per_s: Option<f64>,
}

/// Results of a supervised run.
#[derive(Debug, Clone, PartialEq)]
pub struct SftSummary {
    /// Loss of the last update: the mean negative log-likelihood of a completion token, in nats, and the weighted load-balancing loss of experts.
    pub loss: f64,
    /// The loss with the same terms on the held-out rows, if there are any.
    pub eval_loss: Option<f64>,
    /// Folder of the final model.
    pub model_dir: PathBuf,
}

/// Micro-batches of this rank, and token counts over all ranks.
struct SftBatch {
    micro_batches: Vec<MicroBatch>,
    num_completion_tokens: f64,
    num_tokens: f64,
}

impl Sft {
    /// Loads model and rows, and resumes if the configuration says so; collective over the world.
    ///
    /// # Errors
    /// All errors of configuration, files or memory, before anything is trained.
    pub fn new(config: SftConfig, world: Arc<World>) -> Result<Self> {
        let loaded = phase::scope(Phase::Load, || {
            let shard_group = config.zero.shard_group(world.size(), world.local_size());
            let changes = |checkpoint: &_| load::unsafe_changes(&config, world.size(), checkpoint);
            let opened = checkpoint::open_output(&config.output, &config.saving, &world, shard_group, &changes)?;
            load::load(config, world.clone(), opened)
        });
        world.agree(loaded)
    }

    /// Trains to the end, and writes metrics and the final model; collective over the world.
    ///
    /// # Errors
    /// [`Error::Preempted`], after saving, if a stop was requested before the last step; [`Error::NonFinite`], on every rank, for a non-finite
    /// gradient, before it changes any weight.
    pub fn run(&mut self) -> Result<SftSummary> {
        let outcome = self.run_to_the_end();
        self.reporter.end(&outcome);
        outcome
    }

    fn run_to_the_end(&mut self) -> Result<SftSummary> {
        let total = self.schedule.total_steps as u64;
        while self.global_step < total {
            phase::set_step(self.global_step);
            self.step()?;
            let finished = self.global_step == total;
            let stop = any_rank(&*self.mesh.world, phase::stop_requested())? && !finished;
            let is_due = |every: usize| finished || self.global_step.is_multiple_of(every as u64);
            if stop || self.config.saving.save_steps.is_some_and(is_due) {
                let saved = self.save()?;
                if stop {
                    self.saver.finish(&self.world)?;
                    return Err(Error::Preempted { step: self.global_step, saved });
                }
            }
        }
        self.saver.finish(&self.world)?;
        let eval_loss = if self.eval_examples.is_empty() { None } else { Some(self.evaluate()?) };
        let model_dir = checkpoint::export(self.saver.options(), &self.world, Some(&self.policy))?;
        if let Some(loss) = eval_loss {
            self.log.write(total, MetricValues::from([("eval_loss".to_owned(), loss)]));
        }
        self.log.finish()?;
        Ok(SftSummary { loss: self.loss, eval_loss, model_dir })
    }

    /// Makes one update.
    fn step(&mut self) -> Result<()> {
        let lr = learning_rate(&self.schedule, self.global_step);
        let per_rank = self.config.per_device_train_batch_size * self.config.gradient_accumulation_steps;
        let Place { rank: group, size: num_groups } = self.mesh.sequence_group();
        let rows = self.sampler.next_batch(per_rank * num_groups)?;
        let own = &rows[group * per_rank..][..per_rank];
        let batch = self.batch(own.iter().map(|&row| &self.examples[row]))?;
        let begin = Instant::now();
        let [nll, balance] = phase::scope(Phase::ForwardBackward, || self.forward_backward(&batch))?;
        let max_grad_norm = self.config.optimizer.max_grad_norm;
        let outcome = phase::scope(Phase::Optimizer, || self.policy.optimizer_step(lr, max_grad_norm))?;
        if outcome.skipped {
            let message = "the gradient is not finite; lower learning_rate, or look for damaged weights".to_owned();
            return Err(Error::NonFinite { message });
        }
        let [nll, balance] = [nll, balance].map(|sum| sum.double_value(&[]) * self.counted());
        let mut sums = [nll, balance, self.training_flop(&batch), begin.elapsed().as_secs_f64()];
        all_reduce_f64(&*self.mesh.world, &mut sums, ReduceOp::Sum)?;
        let [nll, balance, flop, seconds] = sums;
        self.loss = nll / batch.num_completion_tokens + balance;
        self.global_step += 1;
        self.num_tokens += batch.num_tokens as u64;
        let offloaded = self.policy.take_offloaded()?;
        let hidden = (offloaded.bytes > 0).then(|| ("transition/activation_hidden_share", offloaded.hidden_share()));
        let utilisation = self.chip_flop_per_s.map(|flop_per_s| ("perf/mfu", flop / (seconds * flop_per_s)));
        let numbers = [
            ("loss", self.loss),
            ("grad_norm", outcome.grad_norm),
            ("learning_rate", lr),
            ("num_tokens", self.num_tokens as f64),
            ("epoch", self.sampler.epochs()),
            ("step_time", self.last.elapsed().as_secs_f64()),
        ];
        self.last = Instant::now();
        let renewed = self.claim.as_mut().map_or(Ok(false), Claim::renew);
        if self.world.agree(renewed)? {
            self.log.begin_again(&self.config)?;
        }
        let numbers = numbers.into_iter().chain(utilisation).chain(hidden);
        self.log.step(self.global_step, numbers.map(|(name, value)| (name.to_owned(), value)).collect());
        Ok(())
    }

    /// FLOPs of this rank's forward and backward passes over a batch.
    fn training_flop(&self, batch: &SftBatch) -> f64 {
        let (spec, is_frozen) = (&self.policy.table().spec, self.policy.lora().is_some());
        let of_group: f64 = batch.micro_batches.iter().map(|it| it.training_flop(spec, is_frozen)).sum();
        of_group / self.mesh.sequence.size() as f64
    }

    /// The factor of this rank's sums: 1 on one of the ranks that share micro-batches, 0 on the others.
    fn counted(&self) -> f64 {
        f64::from(u8::from(self.mesh.speaks_for_sequences()))
    }

    /// Adds the gradients of the mean over all ranks' completion tokens. Returns this rank's sum of negative log-likelihoods and its contribution to
    /// the weighted load-balancing loss of experts, which is part of the loss as in TRL. Both are float64 scalars that the device may still be
    /// computing.
    fn forward_backward(&mut self, batch: &SftBatch) -> Result<[Tensor; 2]> {
        self.policy.keep_block_for(&batch.micro_batches, self.config.max_tokens_per_micro_batch)?;
        let coef = self.policy.table().spec.router_aux_loss_coef(self.config.router_aux_loss_coef)?;
        let mut nll = Tensor::f_zeros([], (Kind::Double, self.device))?;
        let mut balance = nll.f_zeros_like()?;
        for (index, micro_batch) in batch.micro_batches.iter().enumerate() {
            phase::beat();
            if index + 1 == batch.micro_batches.len() {
                self.policy.finish_gradients_with_next_backward();
            }
            self.policy.forward_backward(micro_batch, 1.0, &mut |scores| {
                let _ = nll.f_sub_(&scores.logprobs.f_sum(Kind::Double)?)?;
                let dlogprobs = scores.logprobs.f_empty_like()?.f_fill_(-1.0 / batch.num_completion_tokens)?;
                let daux_loss = coef * micro_batch.num_sequence_tokens() / batch.num_tokens;
                if let Some(aux_loss) = &scores.aux_loss {
                    let _ = balance.f_add_(&aux_loss.to_kind(Kind::Double).f_mul_scalar(daux_loss)?)?;
                }
                Ok(TokenGradients { dlogprobs, dentropy: None, dtop: None, daux_loss })
            })?;
        }
        Ok([nll, balance])
    }

    /// The loss on the held-out rows, with the same terms as in training: the mean negative log-likelihood of a completion token, in nats, and the
    /// weighted load-balancing loss of experts.
    fn evaluate(&mut self) -> Result<f64> {
        let Place { rank: group, size: num_groups } = self.mesh.sequence_group();
        let batch = self.batch(self.eval_examples.iter().skip(group).step_by(num_groups))?;
        let coef = self.policy.table().spec.router_aux_loss_coef(self.config.router_aux_loss_coef)?;
        let [mut nll, mut balance] = [0.0; 2];
        for micro_batch in &batch.micro_batches {
            phase::beat();
            let scores = self.policy.balanced_logprobs(micro_batch, 1.0)?;
            nll -= torch::f64_vec(&scores.logprobs.f_sum(Kind::Double)?)?[0];
            if let Some(aux_loss) = &scores.aux_loss {
                let weight = coef * micro_batch.num_sequence_tokens() / batch.num_tokens;
                balance += weight * torch::f64_vec(&aux_loss.to_kind(Kind::Double))?[0];
            }
        }
        let mut sums = [nll, balance].map(|sum| sum * self.counted());
        all_reduce_f64(&*self.mesh.world, &mut sums, ReduceOp::Sum)?;
        let [nll, balance] = sums;
        Ok(nll / batch.num_completion_tokens + balance)
    }

    /// This rank's examples, in the same number of micro-batches as on every other rank.
    fn batch<'a>(&self, own: impl Iterator<Item = &'a SftExample>) -> Result<SftBatch> {
        let sequences: Vec<Sequence> =
            own.map(|example| Sequence::of_tokens(example.token_ids.clone(), example.prompt_len)).collect();
        let max_tokens = self.config.max_tokens_per_micro_batch;
        let options = PackOptions { max_tokens, share_prompts: false, device: self.device };
        let mut micro_batches = pack(&sequences, &options)?;
        pad_to_agreed_count(&mut micro_batches, &*self.mesh.world)?;
        let sum = |count: fn(&Sequence) -> usize| sequences.iter().map(count).sum::<usize>() as f64 * self.counted();
        let mut sums = [sum(Sequence::num_scored), sum(|sequence| sequence.token_ids.len())];
        all_reduce_f64(&*self.mesh.world, &mut sums, ReduceOp::Sum)?;
        let [num_completion_tokens, num_tokens] = sums;
        Ok(SftBatch { micro_batches, num_completion_tokens, num_tokens })
    }

    /// Begins to save a checkpoint; it is complete when the next one begins or the saver has finished.
    fn save(&mut self) -> Result<PathBuf> {
        let state = TrainerState {
            run_id: String::new(), // set by the saver
            global_step: self.global_step,
            num_updates: self.policy.num_updates(),
            generation_step: self.global_step,
            epoch: self.sampler.epochs(),
            max_steps: self.schedule.total_steps as u64,
            num_input_tokens_seen: self.num_tokens,
            world_size: self.world.size(),
            num_rows: self.examples.len(),
            rows_digest: Some(self.rows_digest.clone()),
            frozen_weights: self.frozen_weights.clone(),
            sampler: self.sampler.state().clone(),
            carried: Vec::new(),
            ahead: Vec::new(),
            entropy_control: None,
            best_global_step: None,
            config: SavedConfig::of(self.config.entries()),
            log_history: self.log.history().clone(),
            unlogged: self.log.unlogged(),
        };
        self.saver.save(&self.world, Some(Models { policy: &self.policy, reference: None }), state)
    }
}

#[cfg(test)]
mod tests;
