//! The GRPO trainer. [`Trainer::train_step`] is one step on one screen; `setup` loads, `sampling` asks the engines,
//! `records` turns groups into sequences and metrics, `output` writes.

mod best;
mod build;
mod carry;
mod model;
mod output;
mod records;
mod replace;
mod rows;
mod sampling;
mod scores;
mod setup;
mod signal;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::checkpoint::{self, CarriedGroup, Claim, SavedConfig, Saver, TrainerState};
use crate::config::{BatchPlan, Config, Mode};
use crate::cuda::Placement;
use crate::data::{Dataset, PromptSampler};
use crate::dist::{HostGroup, ReduceOp, World, all_reduce_f64, any_rank};
use crate::error::{Error, ExitCode, Result, panic_message};
use crate::grpo::{self, AdvantageConfig, AdvantageStats, BatchStats, EntropyControl, LossConfig};
use crate::memory;
use crate::metrics::StepMetrics;
use crate::model::{ModelSource, ModelSpec, init_unit_on};
use crate::phase::{self, Phase};
use crate::plan::MemoryPlan;
use crate::reward::{RewardFunction, RewardPool};
use crate::rollout::RolloutEngine;
use crate::train::{Policy, Schedule, Sequence, Transitions};
use crate::types::{LengthSpread, Prompt, RolloutGroup};
use crate::update::{UpdateOptions, UpdateOutcome};

use model::PolicyAndEngine;
use output::RunOutput;
use sampling::{SampledBatch, context};
use scores::Unscored;
pub use setup::Preflight;
use signal::Signal;

/// A GRPO run on this rank.
#[derive(Debug)]
pub struct Trainer {
    config: Config,
    world: Arc<World>,
    base_dir: PathBuf,
    batch: BatchPlan,
    plan: MemoryPlan,
    model: PolicyAndEngine,
    rewards: RewardPool,
    dataset: Dataset,
    sampler: PromptSampler,
    carried: Vec<CarriedGroup>, // of all ranks, the same on each
    eval_set: Option<Dataset>,
    schedule: Schedule,
    output: RunOutput,
    saver: Saver,
    claim: Option<Claim>, // of the output folder, on the first rank
    /// The newest step in a checkpoint.
    saved_step: u64,
    progress: TrainingProgress,
    ahead: Option<SampledBatch>,
    unscored: Unscored,
    signal: Signal,
    /// Ranks with engines, where groups are replaced.
    engines: Option<HostGroup>,
    /// Lengths of completions of random weights.
    spread_lengths: Option<LengthSpread>,
}

/// How far the run is.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct TrainingProgress {
    /// Optimizer updates made or skipped.
    global_step: u64,
    /// Generation batches sampled.
    generation_step: u64,
    /// Tokens trained on, over all ranks.
    num_tokens: u64,
    /// Weight of the entropy bonus; on ranks that only generate it stays what it was.
    entropy_control: EntropyControl,
}

/// What a finished run reached.
#[derive(Debug, Clone, PartialEq)]
pub struct RunSummary {
    /// Mean reward on the held-out rows before training; none without rows, or where none could be scored.
    pub eval_reward_before: Option<f64>,
    /// The same after training.
    pub eval_reward_after: Option<f64>,
    /// The final model's folder.
    pub model_dir: PathBuf,
    /// The report, where one was written (rank 0).
    pub report: Option<PathBuf>,
}

impl Trainer {
    /// Loads model, data and tokenizer, and resumes where the configuration says so; collective over the world.
    ///
    /// # Errors
    /// Whatever is wrong with configuration, files or memory, before anything is trained.
    pub fn new(config: Config, world: Arc<World>) -> Result<Self> {
        Self::with_rewards(config, world, &[])
    }

    /// The same, where `reward_funcs` may also name the caller's own functions. Rewards in processes of their own are started
    /// now, after the world was joined.
    ///
    /// # Errors
    /// As [`Trainer::new`].
    pub fn with_rewards(config: Config, world: Arc<World>, functions: &[(&str, RewardFunction)]) -> Result<Self> {
        let rewards = RewardPool::with_functions(&config, functions);
        let rewards = world.agree(rewards.and_then(|rewards| rewards.start().map(|()| rewards)))?;
        Self::with_pool(config, world, rewards)
    }

    /// The same with a pool of the configuration's rewards, whose processes can so be started before the world is joined.
    ///
    /// # Errors
    /// As [`Trainer::new`].
    pub fn with_pool(config: Config, world: Arc<World>, rewards: RewardPool) -> Result<Self> {
        setup::arm_fault(&config, &world);
        let loaded = phase::scope(Phase::Load, || {
            let claim = checkpoint::claim(&config.output_dir, &world)?;
            let checkpoint = setup::find_checkpoint(&config, &world)?;
            setup::load(config, rewards, world.clone(), checkpoint, claim)
        });
        world.agree(loaded)
    }

    /// A trainer of random weights on the given prompts, which writes no files; for benchmarks. The model's tokens are
    /// numbers. Collective over the world.
    pub(crate) fn on_random(
        config: Config,
        spec: Arc<ModelSpec>,
        prompts: Vec<Prompt>,
        functions: &[(&str, RewardFunction)],
        world: Arc<World>,
    ) -> Result<Self> {
        let placement = Placement::in_world(config.device, config.dtype, world.device())?;
        let room = setup::common_room(placement, &world)?;
        let preflight = Preflight::of_shape(&config, spec, placement, world.size(), room)?;
        let (seed, kind, device) = (config.seed, preflight.kind, world.device());
        let parts = setup::TrainerParts {
            preflight,
            weights: &|layout| init_unit_on(layout, seed, kind, device),
            rewards: RewardPool::with_functions(&config, functions)?,
            rows: rows::TrainingRows::made(Dataset::new(prompts)),
            source: ModelSource { base: config.model_name_or_path.clone(), adapters: None },
            checkpoint: None,
            claim: None,
            writes_files: false,
        };
        let assembled = setup::assemble(config, world.clone(), parts);
        world.agree(assembled)
    }

    /// The trained model, between steps, on a rank that trains.
    pub(crate) fn policy(&self) -> Option<&Policy> {
        self.model.policy()
    }

    /// Ends completions at drawn lengths; for benchmarks.
    pub(crate) fn spread_lengths(&mut self, spread: Option<LengthSpread>) {
        self.spread_lengths = spread;
    }

    /// Puts the ranks' time-lines of phases together, where `trace` is on; collective over the world.
    pub(crate) fn finish_trace(&self) -> Result<()> {
        self.output.finish_trace()
    }

    /// What the run holds on each rank.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Trains to the end: evaluates, saves and reports as configured; collective over the world.
    ///
    /// # Errors
    /// [`Error::Preempted`] after a save if a stop was asked for before the last step; else the first failure of any rank,
    /// panics included.
    pub fn run(&mut self) -> Result<RunSummary> {
        let outcome =
            catch_unwind(AssertUnwindSafe(|| self.run_to_the_end().or_else(|error| self.save_without_rewards(error))));
        let outcome = outcome.unwrap_or_else(|panic| Err(Error::of_panic("training", panic_message(&*panic))));
        let outcome = outcome.map_err(memory::explain_out_of_memory);
        if let Err(error) = &outcome {
            self.world.post_failure(error); // peers may be waiting in a collective
        }
        outcome
    }

    fn run_to_the_end(&mut self) -> Result<RunSummary> {
        let (eval_reward_before, mut eval_reward_after) = match self.output.evaluations() {
            Some((first, newest)) => (Some(first), Some(newest)), // the resumed run's
            None => {
                let reward = self.evaluate()?;
                (reward, reward)
            }
        };
        if self.progress.global_step >= self.schedule.total_steps as u64 {
            self.output.say(&format!(
                "nothing is left to train: step {} of {}",
                self.progress.global_step, self.schedule.total_steps
            ));
        }
        self.check_metric()?;
        while self.progress.global_step < self.schedule.total_steps as u64 && !self.is_exhausted() {
            let before = self.progress.global_step;
            let metrics = self.train_step()?;
            let renewed = self.claim.as_mut().map_or(Ok(false), Claim::renew);
            if self.world.agree(renewed)? {
                self.output.log().begin_again(&self.config)?;
            }
            self.output.step(&metrics, self.progress.global_step, self.sampler.epochs(), self.progress.num_tokens)?;
            self.unscored.check()?;
            let mut finished = self.progress.global_step >= self.schedule.total_steps as u64;
            let evaluates = finished || passes(self.config.eval_steps, before, self.progress.global_step);
            if evaluates {
                eval_reward_after = self.evaluate()?;
            }
            if !finished && self.is_exhausted() {
                self.tell_early_stop();
                finished = true;
            }
            let stop = any_rank(&*self.world.group(), phase::stop_requested())? && !finished; // what is left is no more than a save
            let save_steps = self.config.save_steps;
            let is_due = passes(save_steps, before, self.progress.global_step)
                || (finished && save_steps.is_some())
                || (evaluates && self.is_best());
            if stop || is_due {
                let saved = self.save()?;
                if stop {
                    self.saver.finish(&self.world)?;
                    self.output.finish()?;
                    return Err(Error::Preempted { step: self.progress.global_step, saved });
                }
            }
        }
        self.saver.finish(&self.world)?;
        let model_step = self.load_best()?;
        let of_model = self.output.evaluated("eval_reward").rfind(|(step, _)| *step == model_step);
        let eval_reward_after = of_model.map(|(_, reward)| reward).or(eval_reward_after);
        let policy = self.model.policy();
        let model_dir = checkpoint::export(&self.config.output_dir, &self.base_dir, &self.world, policy)?;
        let report = self.output.finish()?;
        Ok(RunSummary { eval_reward_before, eval_reward_after, model_dir, report })
    }

    /// One generation batch and its updates; collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank. Where rewards failed, the batch is the next one again.
    pub fn train_step(&mut self) -> Result<StepMetrics> {
        phase::set_step(self.progress.generation_step);
        let start = Instant::now();
        let _ = phase::take_timings(); // of loading, evaluation and saving
        self.take_transitions()?;
        let sampled = match self.ahead.take() {
            Some(ahead) => ahead,
            None => self.sample()?,
        };
        let SampledBatch { mut groups, places, dropped, tally, carry, .. } = self.score(sampled)?;
        let advantages = self.assign_advantages(&mut groups)?;
        let sequences = records::sequences(&groups, &places, self.config.mask_truncated_completions);
        let outcome = self.update(&sequences)?;
        self.progress.global_step += outcome.num_updates;
        self.progress.entropy_control = outcome.entropy_control;
        self.progress.generation_step += 1;
        self.progress.num_tokens += self.count_tokens(&groups)?;
        self.output.completions(&signal::logged(&groups, &places, &dropped), self.progress.global_step)?;
        let mut metrics = records::step_metrics(self.rewards.names(), &groups, &advantages, &outcome);
        if LossConfig::from(&self.config).has_entropy_bonus() {
            records::bonus_metrics(&mut metrics, &outcome);
        }
        records::failure_metrics(&mut metrics, self.rewards.take_failures());
        self.tell_failures(&advantages)?;
        self.add_signal_metrics(&mut metrics, tally, &groups, &dropped);
        carry.add_metrics(&mut metrics, &self.config);
        let transitions = self.take_transitions()?;
        let role = if self.model.policy().is_some() { "trainers" } else { "generators" };
        let role = Some(role).filter(|_| self.config.mode == Mode::Split);
        records::cost_metrics(&mut metrics, start.elapsed(), transitions, role)?;
        Ok(metrics)
    }

    /// Trains on a batch. Engines that have nothing else to do sample the next one meanwhile, unless a checkpoint or an
    /// evaluation is due: a batch under way is in no checkpoint, and its failed rewards are not the evaluation's.
    fn update(&mut self, sequences: &[Sequence]) -> Result<UpdateOutcome> {
        let options = self.update_options();
        let (before, after) = (self.progress.global_step, self.progress.global_step + options.num_updates());
        let is_due = |every| passes(every, before, after);
        let interrupted = is_due(self.config.save_steps) || is_due(self.config.eval_steps);
        if self.config.split.async_steps == 0 || interrupted || after >= self.schedule.total_steps as u64 {
            return Ok(self.model.update(sequences, &options, &self.output, None::<NoWork>)?.0);
        }
        let mut batch = self.next_batch(self.progress.generation_step + 1, after)?;
        let (work, model, mut context) = (batch.work(), &mut self.model, context!(self));
        let output = context.output;
        let next = |engine: &mut RolloutEngine<'_>| work.run(engine, &mut context);
        let (outcome, sampled) = model.update(sequences, &options, output, Some(next))?;
        self.ahead = Some(self.take(batch, sampled)?);
        Ok(outcome)
    }

    /// What moving optimizer state took since the last call.
    fn take_transitions(&self) -> Result<Transitions> {
        self.model.policy().map_or_else(|| Ok(Transitions::default()), Policy::take_transitions)
    }

    /// Saves what was reached, if `error` is that rewards failed for good or tell nothing; gives `error` back. Collective over the
    /// world.
    fn save_without_rewards(&mut self, error: Error) -> Result<RunSummary> {
        if error.exit_code() == ExitCode::RewardService || matches!(error, Error::NoSignal { .. }) {
            let begun = if self.progress.global_step > self.saved_step { self.save().map(drop) } else { Ok(()) };
            if let Err(failure) = begun.and_then(|()| self.saver.finish(&self.world)) {
                tracing::warn!("what was reached is not saved: {failure}");
            }
        }
        Err(error)
    }

    /// Tokens of a generation batch over all ranks.
    fn count_tokens(&self, groups: &[RolloutGroup]) -> Result<u64> {
        let of_group = |group: &RolloutGroup| -> usize {
            let prompt_len = group.prompt.token_ids.len();
            group.completions.iter().map(|completion| prompt_len + completion.num_sampled()).sum()
        };
        let own: usize = groups.iter().map(of_group).sum();
        let mut total = [own as f64];
        all_reduce_f64(&*self.world.group(), &mut total, ReduceOp::Sum)?;
        Ok(total[0] as u64)
    }

    fn assign_advantages(&self, groups: &mut [RolloutGroup]) -> Result<AdvantageStats> {
        let config = AdvantageConfig::from(&self.config);
        let mut stats = grpo::assign_advantages(groups, &config, Some(&*self.world.group()))?;
        stats.rewards.resize(self.config.reward_funcs.len(), BatchStats::default()); // of a rank without groups
        records::reduce_advantages(&mut stats, &*self.world.group())?;
        Ok(stats)
    }

    fn update_options(&self) -> UpdateOptions {
        UpdateOptions {
            loss: LossConfig::from(&self.config),
            entropy_control: self.progress.entropy_control,
            temperature: f64::from(self.config.temperature),
            num_iterations: self.config.num_iterations,
            updates_per_generation: self.batch.updates_per_generation,
            max_tokens_per_micro_batch: self.config.max_tokens_per_micro_batch,
            share_prompts: self.config.share_prompts,
            schedule: self.schedule,
            global_step: self.progress.global_step,
            max_grad_norm: self.config.optimizer.max_grad_norm,
            router_aux_loss_coef: self.config.objective.router_aux_loss_coef,
            device: self.world.device(),
        }
    }

    /// Begins a checkpoint; it is complete when the next one begins or the saver has finished.
    fn save(&mut self) -> Result<PathBuf> {
        if let Some(ahead) = self.ahead.take() {
            self.put_back(ahead.before)?; // a run that was asked to stop: the batch is sampled again
        }
        let state = TrainerState {
            global_step: self.progress.global_step,
            num_updates: self.model.policy().map_or(0, Policy::num_updates),
            generation_step: self.progress.generation_step,
            epoch: self.sampler.epochs(),
            max_steps: self.schedule.total_steps as u64,
            num_input_tokens_seen: self.progress.num_tokens,
            world_size: self.world.size(),
            num_rows: self.dataset.len(),
            sampler: self.sampler.state().clone(),
            carried: self.carried.clone(),
            entropy_control: Some(self.progress.entropy_control),
            best_global_step: self.best().filter(|_| self.config.best.load_best_model_at_end).map(|best| best.step),
            config: SavedConfig::of(self.config.entries()),
            log_history: self.output.log().history().clone(),
            unlogged: self.output.log().unlogged(),
        };
        self.saved_step = self.progress.global_step;
        self.saver.save(&self.world, self.model.policy(), state)
    }
}

/// Whether a multiple of `every` lies in (before, after].
fn passes(every: Option<usize>, before: u64, after: u64) -> bool {
    every.is_some_and(|every| after / every as u64 > before / every as u64)
}

/// Has a group scored, while others are generated.
fn submit(group: &RolloutGroup, rewards: &RewardPool, output: &RunOutput) {
    rewards.submit(group);
    output.advance();
}

/// The work of engines that do none beside an update.
type NoWork = fn(&mut RolloutEngine<'_>) -> Result<()>;
