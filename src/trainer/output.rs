//! Outputs of a run: metrics, completions, progress, report. Ranks other than rank 0 take part in reductions but write nothing.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

use crate::checkpoint::Checkpoint;
use crate::config::ImportanceSamplingMode::{SequenceMask, SequenceTruncate};
use crate::config::{Config, DynamicSampling, Mode};
use crate::data::Tokenizer;
use crate::error::{Error, Result};
use crate::eval::EvalOutcome;
use crate::metrics::ranks::RankReporter;
use crate::metrics::{
    CompletionsWriter, FirstAndNewest, LogOptions, LoggedGroup, MetricValues, RunLog, Services, StepMetrics,
};
use crate::phase::{self, Phase};
use crate::ranks::{Collective, World, all_gather_f64};
use crate::rollout::EngineStats;
use crate::train::Sequence;
use crate::types::Place;
use crate::untrusted::Folder;
use crate::update::UpdateProgress;

/// Folder of the time-line of phases.
const TRACE_FOLDER: &str = "trace";
/// Mean importance weight below which most sampled tokens hardly count.
const LOW_WEIGHT: f64 = 0.5;

/// The run's outputs on this rank.
#[derive(Debug)]
pub(super) struct RunOutput {
    group: Arc<dyn Collective>,
    output_dir: PathBuf,
    ranks_per_engine: usize,
    traces: bool,
    log: RunLog,
    completions: Option<CompletionsWriter>,
    /// Reports this rank's activity to `watch`; `None` if no files are written.
    reporter: Option<RankReporter>,
    said_no_signal: bool,
    /// Whether the importance correction weighs whole sequences.
    weighs_sequences: bool,
    said_low_weight: bool,
    /// Mean rewards of the first and the newest evaluation, including those before a resume.
    eval_rewards: Option<EvalRewards>,
}

/// Mean rewards of evaluations; `None` for one in which no sample was scored.
#[derive(Debug, Clone, Copy)]
struct EvalRewards {
    first: Option<f64>,
    newest: Option<f64>,
}

impl RunOutput {
    /// Opens the output files on rank 0, if any are to be written. A resumed run continues the files of the earlier one.
    pub(super) fn new(
        config: &Config,
        world: &World,
        max_steps: u64,
        checkpoint: Option<&Checkpoint>,
        tokenizer: &Arc<Tokenizer>,
        writes_files: bool,
    ) -> Result<Self> {
        let group = world.group();
        let is_first = writes_files && group.rank() == 0;
        let output_dir = config.output.output_dir.clone();
        let options = LogOptions { logging_steps: config.logging_steps, max_steps };
        let services = Services::of(&config.report, &output_dir, &config.reward.python);
        let earlier = checkpoint.map(Checkpoint::earlier_log);
        let log = RunLog::open(&output_dir, config, options, is_first, earlier, &services)?;
        if config.trace {
            let folder = output_dir.join(TRACE_FOLDER);
            Folder::new(&output_dir).folder(TRACE_FOLDER).make().map_err(Error::io(&folder))?;
            let (label, ahead_us) = (label(config, &*group)?, clock_ahead_us(world, now_us)?);
            phase::trace_to(&folder, group.rank(), &label, ahead_us, checkpoint.is_some())?;
        }
        let place = Place { rank: group.rank(), size: group.size() };
        let reporter =
            writes_files.then(|| RankReporter::start(&output_dir, place, max_steps, group.device())).transpose()?;
        let tells_dropped = config.dynamic_sampling != DynamicSampling::None;
        let writer = || {
            let writer = CompletionsWriter::new(&output_dir, &config.reward_names(), tells_dropped)?;
            if config.tools.has_turns() { writer.with_messages(tokenizer) } else { Ok(writer) }
        };
        let completions = config.log_completions.then(writer);
        let resumed =
            |numbers: FirstAndNewest| EvalRewards { first: Some(numbers.first), newest: Some(numbers.newest) };
        Ok(Self {
            eval_rewards: log.first_and_newest("eval_reward").map(resumed),
            log,
            completions: completions.transpose()?,
            reporter,
            group,
            output_dir,
            ranks_per_engine: config.engine_shape().num_ranks(),
            traces: config.trace,
            said_no_signal: false,
            weighs_sequences: matches!(config.importance_sampling_mode, SequenceMask | SequenceTruncate),
            said_low_weight: false,
        })
    }

    /// Reports the outcome of the run to `watch`.
    pub(super) fn end<T>(&mut self, outcome: &Result<T>) {
        self.reporter.iter_mut().for_each(|reporter| reporter.end(outcome));
    }

    /// The run's log.
    pub(super) fn log(&self) -> &RunLog {
        &self.log
    }

    /// Prints a line above the progress bars.
    pub(super) fn say(&self, text: &str) {
        self.log.display().say(text);
    }

    /// Shows the progress bar of a phase with `total` parts.
    pub(super) fn begin_phase(&self, name: &str, total: usize) {
        self.log.display().begin_phase(name, total);
    }

    /// A callback, for each engine step, that shows how many tokens this rank's engine has sampled in the phase.
    pub(super) fn sampling_progress(&self) -> impl FnMut(&EngineStats) + use<> {
        let (display, num_ranks) = (self.log.display().clone(), self.ranks_per_engine);
        move |stats| display.sampled(stats.num_generated_tokens / num_ranks)
    }

    /// Advances the phase's progress by one part.
    pub(super) fn advance(&self) {
        phase::beat();
        self.log.display().advance();
    }

    /// Reduces the metrics of a step over ranks (collective), writes a line at each logging interval and at the end, and returns the values.
    pub(super) fn step(
        &mut self,
        metrics: &StepMetrics,
        step: u64,
        epoch: f64,
        num_tokens: u64,
    ) -> Result<MetricValues> {
        let mut values = metrics.reduce(&*self.group)?;
        let rates = [
            ("perf/tokens_per_second_per_gpu", "tokens/trained", "step_time", self.group.size()),
            ("perf/generation_tokens_per_second", "tokens/generated", "timing_s/generate", 1),
        ];
        for (name, counted, timed, num_ranks) in rates {
            let count = values.remove(counted).unwrap_or(f64::NAN);
            let seconds = values.get(timed).copied().unwrap_or(f64::NAN);
            values.insert(name.to_owned(), count / (seconds * num_ranks as f64));
        }
        phase::flush_trace();
        values.insert("num_tokens".to_owned(), num_tokens as f64);
        values.insert("epoch".to_owned(), epoch);
        let has_teacher = values.contains_key("distillation/kl");
        let is = |name: &str, value: f64| values.get(name) == Some(&value);
        // Samples without a score have a separate warning.
        let is_scored = values.get("reward").is_some_and(|reward| reward.is_finite());
        let has_no_signal = is_scored && !has_teacher && (is("frac_reward_zero_std", 1.0) || is("grad_norm", 0.0));
        let weight = values.get("sampling/importance_sampling_ratio/mean").copied().unwrap_or(1.0);
        self.log.step(step, values.clone());
        if self.weighs_sequences && weight < LOW_WEIGHT && !std::mem::replace(&mut self.said_low_weight, true) {
            let why = "the ratio of a sequence is the product over its tokens, and sequences above \
                       importance_sampling_clip_max have little or no weight";
            self.say(&format!(
                "step {step}: warning: the importance sampling correction weights samples by {weight:.2} on average: \
                 {why}; importance_sampling_mode = token_truncate clips each token instead (reported once)"
            ));
        }
        if has_no_signal && !std::mem::replace(&mut self.said_no_signal, true) {
            let text = "all groups have equal rewards, so advantages and gradients are 0";
            self.say(&format!(
                "step {step}: warning: {text} (reported once; frac_reward_zero_std is the fraction of such groups in \
                 each step)"
            ));
        }
        Ok(values)
    }

    /// Writes an evaluation's metrics, which are already reduced, and returns the mean reward; `None` if no sample was scored.
    pub(super) fn evaluation(
        &mut self,
        outcome: &EvalOutcome,
        reward_names: &[String],
        failures: MetricValues,
        step: u64,
        epoch: f64,
    ) -> Option<f64> {
        let mut values = outcome.metrics(reward_names);
        values.extend(failures.into_iter().map(|(name, value)| (format!("eval_{name}"), value)));
        values.insert("epoch".to_owned(), epoch);
        let solved_by: Vec<&str> = outcome.solved_by.iter().map(|&index| reward_names[index].as_str()).collect();
        self.say(&format!("step {step}: {outcome} (solved by {})", solved_by.join(" and ")));
        self.log.write(step, values);
        let newest = (outcome.reward.count > 0.0).then(|| outcome.reward.mean());
        self.eval_rewards.get_or_insert(EvalRewards { first: newest, newest }).newest = newest;
        newest
    }

    /// Whether there was an evaluation, including those before a resume.
    pub(super) fn has_evaluated(&self) -> bool {
        self.eval_rewards.is_some()
    }

    /// Mean rewards of the first evaluation and of the model from `model_step`; if that step was not evaluated, the second is that of the newest
    /// evaluation.
    pub(super) fn rewards_before_and_after(&self, model_step: u64) -> [Option<f64>; 2] {
        let of_model = self.evaluated("eval_reward").rfind(|(step, _)| *step == model_step).map(|(_, reward)| reward);
        let [first, newest] = self.eval_rewards.map_or([None; 2], |rewards| [rewards.first, rewards.newest]);
        [first, of_model.or(newest)]
    }

    /// The values of a metric in all evaluations, with their steps, including those before a resume.
    pub(super) fn evaluated(&self, name: &str) -> impl DoubleEndedIterator<Item = (u64, f64)> {
        self.log.evaluations().points(name)
    }

    /// Names of the metrics of evaluations; empty before the first one.
    pub(super) fn names_of_evaluations(&self) -> Vec<String> {
        self.log.names_of_evaluations()
    }

    /// Writes the completions of a step, if they are logged (collective in that case).
    pub(super) fn completions(&mut self, groups: &[LoggedGroup<'_>], step: u64) -> Result<()> {
        self.completions.as_mut().map_or(Ok(()), |writer| writer.write(step, groups, &*self.group))
    }

    /// Merges the ranks' time-lines, if there are any; collective over the world.
    pub(super) fn finish_trace(&self) -> Result<()> {
        if !self.traces {
            return Ok(());
        }
        phase::flush_trace();
        self.group.barrier()?;
        let is_first = self.group.rank() == 0;
        if is_first { phase::merge_traces(&self.output_dir.join(TRACE_FOLDER), self.group.size()) } else { Ok(()) }
    }

    /// Removes the progress bars and writes the report on rank 0.
    pub(super) fn finish(&mut self) -> Result<Option<PathBuf>> {
        self.finish_trace()?;
        self.log.finish()
    }
}

impl UpdateProgress for RunOutput {
    fn begin(&self, phase: Phase, total: usize) {
        self.begin_phase(phase.name(), total);
    }

    fn advance(&self) {
        RunOutput::advance(self);
    }

    /// Writes the batch of a skipped update to `non_finite/`, one file per rank.
    fn skipped(&self, update: u64, sequences: &[Sequence]) -> Result<()> {
        let folder = Folder::new(&self.output_dir).folder("non_finite");
        let name = format!("update_{update:05}_rank_{:05}.json", self.group.rank());
        let sequences: Vec<_> = sequences.iter().map(describe).collect();
        let text = format!("{:#}\n", json!({"update": update, "sequences": sequences}));
        folder.write(&name, text).map_err(Error::io(folder.path().join(name)))
    }
}

/// Microseconds since 1970.
fn now_us() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as i64)
}

/// Microseconds by which the clock of this rank's node is ahead of rank 0's, up to the latency of a message: ranks read their clocks as they leave a
/// barrier. 0 on a single node. Collective over the world.
fn clock_ahead_us(world: &World, now_us: impl Fn() -> i64) -> Result<i64> {
    if world.num_nodes() == 1 {
        return Ok(0);
    }
    let group = world.group();
    group.barrier()?;
    let all = all_gather_f64(&*group, &[now_us() as f64])?;
    Ok((all[world.rank() - world.local_rank()][0] - all[0][0]) as i64)
}

/// The name of a rank in the time-line.
fn label(config: &Config, group: &dyn Collective) -> Result<String> {
    let num_trainers = config.roles(group.size())?.num_trainers;
    let role = match config.mode {
        Mode::Colocated => "",
        Mode::Split if group.rank() < num_trainers => ", trains",
        Mode::Split => ", generates",
    };
    Ok(format!("rank {}{role}", group.rank()))
}

fn describe(sequence: &Sequence) -> serde_json::Value {
    json!({
        "token_ids": sequence.token_ids,
        "prompt_len": sequence.prompt_len,
        "loss_mask": sequence.loss_mask,
        "advantage": sequence.advantage,
        "masked": sequence.masked,
        "rollout_logprobs": sequence.rollout_logprobs,
        "old_logprobs": sequence.old_logprobs,
        "ref_logprobs": sequence.ref_logprobs,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::testing;

    #[test]
    fn clock_offsets_of_nodes_to_rank_0_are_measured() {
        let hour_us = 3_600_000_000;
        let ahead = testing::worlds_on_nodes(2, 2, std::time::Duration::from_secs(20), |world| {
            let apart = if world.rank() >= 2 { hour_us } else { 0 };
            clock_ahead_us(&world, || now_us() + apart).unwrap()
        });
        assert_eq!((ahead[0], ahead[1], ahead[2]), (0, 0, ahead[3]));
        assert!((ahead[2] - hour_us).abs() < 20_000_000, "{ahead:?}");
        assert_eq!(testing::worlds(2, |world| clock_ahead_us(&world, || world.rank() as i64).unwrap()), [0, 0]);
    }
}
