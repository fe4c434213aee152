//! Converts groups into sequences for the trainer and into metrics.

use std::time::Duration;

use crate::error::Result;
use crate::grpo::{AdvantageStats, Aggregate, BatchStats};
use crate::memory;
use crate::metrics::{Reduce, StepMetrics};
use crate::phase::{self, Phase};
use crate::ranks::{Collective, ReduceOp, all_reduce_f64};
use crate::reward::FailureCount;
use crate::rollout::{DraftCounts, StageTimes};
use crate::tools::SessionCosts;
use crate::train::{Sequence, Transitions};
use crate::types::{RolloutGroup, Trajectory};
use crate::update::UpdateOutcome;

/// One sequence per completion with a reward, in order; truncated ones are masked if configured. A completion whose rewards failed is in no update,
/// no denominator and no mean: the others train as if it had not been sampled. `places` has the place of each group among those of all ranks; it is
/// empty if the order of ranks is the order of the data. If `ages_at` is a generation step, each token gets its age at that step.
pub(super) fn sequences(
    groups: &[RolloutGroup],
    places: &[u32],
    mask_truncated: bool,
    ages_at: Option<u64>,
) -> Vec<Sequence> {
    let of_group = |(group, place): (&RolloutGroup, u32)| -> Vec<Sequence> {
        let scored = group.completions.iter().filter(|completion| completion.reward.is_some());
        let of_completion = |completion: &Trajectory| Sequence {
            masked: mask_truncated && completion.is_truncated(),
            place,
            token_ages: ages_at.map(|step| token_ages(completion, step)),
            ..Sequence::of_trajectory(&group.prompt.token_ids, completion)
        };
        scored.map(of_completion).collect()
    };
    placed(groups, places).flat_map(of_group).collect()
}

/// For each sampled token, the number of generation steps from its sampling to `step`.
fn token_ages(completion: &Trajectory, step: u64) -> Vec<u32> {
    let sampled = completion.weight_versions.iter().zip(&completion.loss_mask).filter(|(_, is_sampled)| **is_sampled);
    sampled.map(|(version, _)| step.saturating_sub(*version) as u32).collect()
}

/// Groups with their places among those of all ranks. If `places` is empty, all get 0, so that they stay in the order of ranks.
pub(super) fn placed<'a>(
    groups: &'a [RolloutGroup],
    places: &'a [u32],
) -> impl Iterator<Item = (&'a RolloutGroup, u32)> {
    groups.iter().zip(places.iter().copied().chain(std::iter::repeat(0)))
}

/// Sums the statistics of all ranks; collective over `group`.
pub(super) fn reduce_advantages(stats: &mut AdvantageStats, group: &dyn Collective) -> Result<()> {
    let mut counts = [stats.num_groups, stats.num_zero_std_groups, stats.num_failed];
    all_reduce_f64(group, &mut counts, ReduceOp::Sum)?;
    [stats.num_groups, stats.num_zero_std_groups, stats.num_failed] = counts;
    let mut of_rewards: Vec<_> = std::iter::once(&mut stats.reward).chain(&mut stats.rewards).collect();
    BatchStats::merge_ranks(&mut of_rewards, group)
}

/// TRL's metrics of one step for this rank's part. Reward metrics are already those of the whole batch.
pub(super) fn step_metrics(
    reward_names: &[String],
    groups: &[RolloutGroup],
    advantages: &AdvantageStats,
    outcome: &UpdateOutcome,
) -> StepMetrics {
    let mut metrics = StepMetrics::default();
    metrics.set("loss", outcome.loss, Reduce::Sum);
    metrics.set("grad_norm", outcome.grad_norm, Reduce::Last);
    if let Some(aux_loss) = outcome.aux_loss {
        metrics.set("aux_loss", aux_loss, Reduce::Sum);
        let [differing, all] = outcome.differing_experts;
        metrics.set_mean("router_replay/differing_share", differing, all);
    }
    metrics.set("learning_rate", outcome.learning_rate, Reduce::Last);
    metrics.set("num_skipped_updates", outcome.num_skipped as f64, Reduce::Last);
    metrics.set("tokens/trained", outcome.num_trained_tokens as f64, Reduce::Sum);
    metrics.set("timing_s/exposed_communication", outcome.exposed_communication.as_secs_f64(), Reduce::Max);
    if let Some(exposed) = outcome.exposed_exchange {
        metrics.set("timing_s/exposed_exchange", exposed.as_secs_f64(), Reduce::Max);
    }
    transition_metrics(&mut metrics, "activation_", outcome.offloaded);
    for (name, aggregate) in outcome.stats.entries() {
        match *aggregate {
            Aggregate::Mean { sum, count } => metrics.set_mean(*name, sum, count),
            Aggregate::Min(_) => metrics.set(*name, aggregate.value(), Reduce::Min),
            Aggregate::Max(_) => metrics.set(*name, aggregate.value(), Reduce::Max),
        }
    }
    reward_metrics(&mut metrics, reward_names, advantages);
    completion_metrics(&mut metrics, groups);
    metrics
}

/// Adds TRL's metrics of an entropy bonus.
pub(super) fn bonus_metrics(metrics: &mut StepMetrics, outcome: &UpdateOutcome) {
    metrics.set("policy_loss", outcome.policy_loss, Reduce::Sum);
    metrics.set("entropy_coef", outcome.entropy_control.coef, Reduce::Last);
}

/// Adds the costs of the step: time by phase; for copies between device and host the bytes (over all ranks), the rate (GB/s of the slowest rank) and
/// the share of their time during which nothing waited; memory in GB. On ranks with a `role`, idle time is reported per role.
pub(super) fn cost_metrics(
    metrics: &mut StepMetrics,
    step_time: Duration,
    transitions: Transitions,
    role: Option<&str>,
) -> Result<()> {
    for (phase, duration) in phase::take_timings() {
        let whose = role.filter(|_| phase == Phase::Idle).map(|role| format!("_{role}")).unwrap_or_default();
        metrics.set(format!("timing_s/{}{whose}", phase.name()), duration.as_secs_f64(), Reduce::Max);
    }
    transition_metrics(metrics, "", transitions);
    metrics.set("perf/max_resident_gb", memory::peak_resident_bytes()? as f64 / 1e9, Reduce::Max);
    metrics.set("step_time", step_time.as_secs_f64(), Reduce::Max);
    Ok(())
}

/// Adds bytes copied between device and host over all ranks, the rate of the slowest rank in GB/s, and the share of the copies' time during which
/// nothing waited.
fn transition_metrics(metrics: &mut StepMetrics, what: &str, transitions: Transitions) {
    let Transitions { bytes, copying, .. } = transitions;
    if bytes > 0 {
        metrics.set(format!("transition/{what}bytes"), bytes as f64, Reduce::Sum);
        metrics.set(format!("transition/{what}gbps"), bytes as f64 / 1e9 / copying.as_secs_f64(), Reduce::Min);
        metrics.set(format!("transition/{what}hidden_share"), transitions.hidden_share(), Reduce::Min);
    }
}

/// Adds model FLOP utilisation: the operations of forward and backward over the time of `forward_backward` and `optimizer`, relative to the GPU's
/// peak rate. Adds nothing if that rate is unknown.
pub(super) fn utilisation_metric(metrics: &mut StepMetrics, training_flop: f64, chip_flop_per_s: Option<f64>) {
    let seconds = [Phase::ForwardBackward, Phase::Optimizer]
        .iter()
        .filter_map(|phase| metrics.value(&format!("timing_s/{}", phase.name())))
        .sum::<f64>();
    if let Some(flop_per_s) = chip_flop_per_s.filter(|_| training_flop > 0.0 && seconds > 0.0) {
        metrics.set_mean("perf/mfu", training_flop, seconds * flop_per_s);
    }
}

/// Adds the number of missing scores by reward and kind of failure.
pub(super) fn failure_metrics(metrics: &mut StepMetrics, failures: Vec<FailureCount>) {
    for FailureCount { reward, kind, count } in failures {
        metrics.set(format!("rewards/{reward}/failed/{}", kind.name()), count as f64, Reduce::Sum);
    }
}

fn reward_metrics(metrics: &mut StepMetrics, names: &[String], advantages: &AdvantageStats) {
    let mut moments = |mean: String, std: String, stats: &BatchStats| {
        metrics.set(mean, stats.mean(), Reduce::Last);
        metrics.set(std, stats.std(), Reduce::Last);
    };
    moments("reward".into(), "reward_std".into(), &advantages.reward);
    for (name, stats) in names.iter().zip(&advantages.rewards) {
        moments(format!("rewards/{name}/mean"), format!("rewards/{name}/std"), stats);
    }
    let frac_zero = match advantages.num_groups {
        0.0 => 1.0, // all groups were left out
        num_groups => advantages.num_zero_std_groups / num_groups,
    };
    metrics.set("frac_reward_zero_std", frac_zero, Reduce::Last);
    metrics.set("rewards/num_failed", advantages.num_failed, Reduce::Last);
}

/// Adds the share of time that this rank's pipeline stage waited for the others, if its engine has several stages.
pub(super) fn stage_metrics(metrics: &mut StepMetrics, times: Option<StageTimes>) {
    let Some(StageTimes { computing, waiting }) = times else { return };
    let (waited, total) = (waiting.as_secs_f64(), (computing + waiting).as_secs_f64());
    metrics.set_mean("pipeline/idle_share", waited, total);
    metrics.set("pipeline/idle_share_max", waited / total, Reduce::Max);
}

/// Adds this rank's part of the draft token counts of an engine with `num_ranks` ranks.
pub(super) fn draft_metrics(metrics: &mut StepMetrics, counts: Option<DraftCounts>, num_ranks: usize) {
    let Some(DraftCounts { computed, accepted, drafted }) = counts else { return };
    let [computed, accepted, drafted] = [computed, accepted, drafted].map(|count| count as f64 / num_ranks as f64);
    metrics.set("speculation/draft_tokens", computed, Reduce::Sum);
    metrics.set("speculation/accepted_tokens", accepted, Reduce::Sum);
    metrics.set_mean("speculation/acceptance", accepted, computed);
    metrics.set_mean("speculation/mean_accepted", accepted, drafted);
}

/// Adds the costs of turns in the engine's sessions.
pub(super) fn session_metrics(metrics: &mut StepMetrics, of: &str, costs: &SessionCosts) {
    let SessionCosts { num_kept_tokens, num_recomputed_tokens, idle, total } = costs;
    metrics.set(format!("{of}/kept_tokens"), *num_kept_tokens as f64, Reduce::Sum);
    metrics.set(format!("{of}/recomputed_tokens"), *num_recomputed_tokens as f64, Reduce::Sum);
    metrics.set_mean(format!("{of}/idle_share"), idle.as_secs_f64(), total.as_secs_f64());
}

fn completion_metrics(metrics: &mut StepMetrics, groups: &[RolloutGroup]) {
    let completions: Vec<&Trajectory> = groups.iter().flat_map(|group| &group.completions).collect();
    let lengths = |ended_only: bool| -> Vec<f64> {
        let counted = completions.iter().filter(|completion| !(ended_only && completion.is_truncated()));
        counted.map(|completion| completion.num_sampled() as f64).collect()
    };
    for (prefix, lengths) in [("", lengths(false)), ("terminated_", lengths(true))] {
        let total: f64 = lengths.iter().sum();
        let name = |what: &str| format!("completions/{what}_{prefix}length");
        metrics.set_mean(name("mean"), total, lengths.len() as f64);
        metrics.set(name("min"), lengths.iter().copied().fold(f64::NAN, f64::min), Reduce::Min);
        metrics.set(name("max"), lengths.iter().copied().fold(f64::NAN, f64::max), Reduce::Max);
        if prefix.is_empty() {
            metrics.set("tokens/generated", total, Reduce::Sum);
        }
    }
    let truncated = completions.iter().filter(|completion| completion.is_truncated()).count();
    metrics.set_mean("completions/clipped_ratio", truncated as f64, completions.len() as f64);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{FinishReason, fixtures};

    fn group(finish_reasons: &[FinishReason]) -> RolloutGroup {
        let completion = |(index, finish_reason): (usize, &FinishReason)| Trajectory {
            finish_reason: Some(*finish_reason),
            reward: (index != 1).then_some(1.0),
            ..fixtures::completion(&"abc"[..=index])
        };
        let completions = finish_reasons.iter().enumerate().map(completion).collect();
        RolloutGroup { completions, ..RolloutGroup::new(fixtures::prompt(0)) }
    }

    #[test]
    fn mfu_uses_update_time_and_known_gpus_only() {
        let mut metrics = StepMetrics::default();
        metrics.set("timing_s/forward_backward", 3.0, Reduce::Max);
        metrics.set("timing_s/optimizer", 1.0, Reduce::Max);
        metrics.set("timing_s/generate", 100.0, Reduce::Max);
        utilisation_metric(&mut metrics, 2e12, None);
        assert_eq!(metrics.value("perf/mfu"), None);
        utilisation_metric(&mut metrics, 2e12, Some(1e12));
        assert_eq!(metrics.value("perf/mfu"), Some(0.5));
    }

    #[test]
    fn failed_completions_are_excluded_and_truncated_ones_masked() {
        let groups = [group(&[FinishReason::Eos, FinishReason::Eos, FinishReason::Length])];
        let masked =
            |mask| sequences(&groups, &[], mask, None).iter().map(|sequence| sequence.masked).collect::<Vec<_>>();
        assert_eq!(masked(false), [false, false]);
        assert_eq!(masked(true), [false, true]);
        let all = sequences(&groups, &[], false, None);
        assert_eq!((all[1].token_ids.as_slice(), all[1].prompt_len), (&[1, 2, 97, 98, 99][..], 2));
        assert_eq!(all[1].completion_len(), 3);
        let mut without = groups;
        without[0].completions.remove(1); // remove the one that failed
        assert_eq!(
            sequences(&without, &[], true, None),
            sequences(&[group(&[FinishReason::Eos, FinishReason::Eos, FinishReason::Length])], &[], true, None)
        );
    }
}
