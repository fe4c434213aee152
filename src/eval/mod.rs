//! Evaluation on held-out problems: avg@n, pass@k, maj@n and the mean reward, with standard errors. The deciding rewards determine whether a sample
//! is solved, whatever their weights.

mod references;

use std::collections::BTreeMap;
use std::fmt;

pub use references::unreadable_notice;
use serde::Serialize;

use crate::data::Dataset;
use crate::error::Result;
use crate::grpo::BatchStats;
use crate::metrics::MetricValues;
use crate::ranks::{Collective, ReduceOp, World, all_gather_json, all_reduce_f64};
use crate::types::{Prompt, RolloutGroup, Trajectory};

/// The generation step in random keys of evaluations. Training never reaches it, and it is constant, so that two evaluations of the same weights
/// sample the same tokens.
pub const SAMPLING_STEP: u64 = u64::MAX;

/// A deciding reward of at least this value counts as 1.
const SOLVED: f32 = 0.999;

/// The rows that this rank evaluates.
pub fn share_of(dataset: &Dataset, world: &World) -> Vec<Prompt> {
    world.place().share(dataset.len()).map(|row| dataset.prompt(row).clone()).collect()
}

/// The results of one evaluation, summed over all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct EvalOutcome {
    /// Statistics of the weighted reward over all samples; its mean is avg@n.
    pub reward: BatchStats,
    /// Statistics of each reward over all samples.
    pub rewards: Vec<BatchStats>,
    /// Statistics of each problem's mean reward over problems, for the standard error.
    pub problems: BatchStats,
    /// Indices of the rewards that decide whether a sample is solved.
    pub solved_by: Vec<usize>,
    /// pass@k over problems for k = 1, 2, 4 .. n.
    pub pass: Vec<(usize, BatchStats)>,
    /// Statistics of completion lengths in tokens, over all samples.
    pub lengths: BatchStats,
    /// Number of samples that were cut off by a length limit.
    pub num_truncated: f64,
}

/// A mean with its standard error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// Mean of a metric over problems.
    pub mean: f64,
    /// Standard error of that mean over problems; NaN below two problems.
    pub standard_error: f64,
}

impl Estimate {
    /// Computes the estimate from statistics over problems.
    pub fn of(stats: &BatchStats) -> Self {
        Self { mean: stats.mean(), standard_error: stats.std() / stats.count.sqrt() }
    }
}

impl EvalOutcome {
    /// Computes the outcome from the scored groups of all ranks; collective over `group`. Completions whose reward failed are left out. A sample is
    /// solved if all rewards of `solved_by` that apply to it are 1.
    pub fn of(groups: &[RolloutGroup], solved_by: &[usize], group: &dyn Collective) -> Result<Self> {
        let verdicts: Vec<Vec<bool>> = groups.iter().map(|group| verdicts(group, solved_by)).collect();
        let completions = || groups.iter().flat_map(|group| &group.completions);
        let num = |count: fn(&RolloutGroup) -> usize| groups.iter().map(count).max().unwrap_or(0) as f64;
        let mut sizes = [num(|group| group.completions.len()), num(|group| group.completions[0].rewards.len())];
        all_reduce_f64(group, &mut sizes, ReduceOp::Max)?;
        let [num_generations, num_rewards] = sizes.map(|size| size as usize);
        let ks = std::iter::successors(Some(1), |k| Some(k * 2)).take_while(|k| *k <= num_generations);
        let ks: Vec<usize> = ks.collect();
        let mut values: Vec<SampleValues> = vec![
            completions().map(|completion| completion.reward).collect(),
            groups.iter().map(mean_reward).collect(),
            completions().map(|completion| Some(completion.num_sampled() as f32)).collect(),
        ];
        values
            .extend((0..num_rewards).map(|index| completions().map(|completion| completion.rewards[index]).collect()));
        values.extend(ks.iter().map(|&k| verdicts.iter().map(|solved| pass_at_k(solved, k)).collect()));
        let mut stats = stats_of_all_ranks(&values, group)?.into_iter();
        let mut next = || stats.next().unwrap_or_default();
        let is_truncated = |completion: &&Trajectory| completion.is_truncated();
        let mut num_truncated = [completions().filter(is_truncated).count() as f64];
        all_reduce_f64(group, &mut num_truncated, ReduceOp::Sum)?;
        Ok(Self {
            reward: next(),
            problems: next(),
            lengths: next(),
            rewards: (0..num_rewards).map(|_| next()).collect(),
            solved_by: solved_by.to_vec(),
            pass: ks.into_iter().map(|k| (k, next())).collect(),
            num_truncated: num_truncated[0],
        })
    }

    /// The metrics of the evaluation, with TRL's names and the prefix `eval_`.
    pub fn metrics(&self, reward_names: &[String]) -> MetricValues {
        let mut values = MetricValues::new();
        let mut set = |name: String, value: f64| _ = values.insert(format!("eval_{name}"), value);
        set("reward".into(), self.reward.mean());
        set("reward_std".into(), self.reward.std());
        set("reward_stderr".into(), Estimate::of(&self.problems).standard_error);
        for (name, stats) in reward_names.iter().zip(&self.rewards) {
            set(format!("rewards/{name}/mean"), stats.mean());
            set(format!("rewards/{name}/std"), stats.std());
        }
        for (k, stats) in &self.pass {
            set(format!("pass@{k}"), stats.mean());
        }
        set("completions/mean_length".into(), self.lengths.mean());
        set("completions/clipped_ratio".into(), self.num_truncated / self.lengths.count);
        values
    }
}

/// One value per sample or problem of a rank; `None` where there is none.
type SampleValues = Vec<Option<f32>>;

/// Statistics of each list over all ranks; collective over `group`. As ranks have consecutive problems, the values are summed in one order, and the
/// result does not depend on the number of ranks.
fn stats_of_all_ranks(values: &[SampleValues], group: &dyn Collective) -> Result<Vec<BatchStats>> {
    let mut all = vec![SampleValues::new(); values.len()];
    for of_rank in all_gather_json::<_, Vec<SampleValues>>(group, "gather an evaluation", values)? {
        all.iter_mut().zip(of_rank).for_each(|(all, of_rank)| all.extend(of_rank));
    }
    Ok(all.into_iter().map(BatchStats::of).collect())
}

/// Mean reward of a problem's samples; `None` if all rewards failed.
fn mean_reward(group: &RolloutGroup) -> Option<f32> {
    let rewards = BatchStats::of_group(group);
    (rewards.count > 0.0).then(|| rewards.mean() as f32)
}

/// Whether a sample is solved; `None` if a reward failed or none of `solved_by` applies.
fn is_solved(completion: &Trajectory, solved_by: &[usize]) -> Option<bool> {
    completion.reward?;
    let mut marks = solved_by.iter().filter_map(|&index| completion.rewards[index]).peekable();
    marks.peek()?;
    Some(marks.all(|mark| mark >= SOLVED))
}

/// Whether each sample is solved, for samples where this is known.
pub fn verdicts(group: &RolloutGroup, solved_by: &[usize]) -> Vec<bool> {
    group.completions.iter().filter_map(|completion| is_solved(completion, solved_by)).collect()
}

/// Unbiased estimate of the probability that at least one of k samples solves the problem, from n samples of which c do: `1 - C(n - c, k) / C(n, k)`
/// (arXiv 2107.03374). `None` with fewer than k samples.
pub fn pass_at_k(is_solved: &[bool], k: usize) -> Option<f32> {
    let (n, solved) = (is_solved.len(), is_solved.iter().filter(|is_solved| **is_solved).count());
    if n < k {
        return None;
    }
    let all_fail: f64 =
        (0..k).map(|drawn| (n as f64 - solved as f64 - drawn as f64).max(0.0) / (n - drawn) as f64).product();
    Some((1.0 - all_fail) as f32)
}

/// Statistics of maj@n over the problems of all ranks; collective over `group`.
pub fn majority(
    groups: &[RolloutGroup],
    solved_by: &[usize],
    answer_of: &impl Fn(&str) -> Option<String>,
    group: &dyn Collective,
) -> Result<BatchStats> {
    let values = groups.iter().map(|group| maj_at_n(group, solved_by, answer_of)).collect();
    Ok(stats_of_all_ranks(&[values], group)?.remove(0))
}

/// Whether the most frequent answer solves the problem; with equally frequent answers, the fraction of them that does. Samples without an answer do
/// not vote. `None` if no sample is known to be solved or not.
fn maj_at_n(group: &RolloutGroup, solved_by: &[usize], answer_of: &impl Fn(&str) -> Option<String>) -> Option<f32> {
    let mut votes: BTreeMap<String, (usize, bool)> = BTreeMap::new();
    let verdict = |completion| Some((completion, is_solved(completion, solved_by)?));
    let mut judged = group.completions.iter().filter_map(verdict).peekable();
    judged.peek()?;
    for (completion, verdict) in judged {
        let Some(answer) = answer_of(completion.newest_text()) else { continue };
        let (count, is_solved) = votes.entry(answer).or_default();
        (*count, *is_solved) = (*count + 1, verdict);
    }
    let most = votes.values().map(|(count, _)| *count).max();
    let winners = || votes.values().filter(|(count, _)| Some(*count) == most);
    let num_solved = winners().filter(|(_, is_solved)| *is_solved).count();
    Some(num_solved as f32 / winners().count().max(1) as f32)
}

impl fmt::Display for EvalOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.reward.count == 0.0 {
            return write!(f, "no held-out sample could be scored");
        }
        let Estimate { mean, standard_error } = Estimate::of(&self.problems);
        write!(f, "held-out reward {mean:.3}")?;
        if standard_error.is_finite() {
            write!(f, " +- {standard_error:.3}")?;
        }
        self.pass.iter().try_for_each(|(k, stats)| write!(f, ", pass@{k} {:.3}", stats.mean()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::SingleRank;
    use crate::types::fixtures::{completion, scored};

    #[test]
    fn pass_at_k_is_the_unbiased_estimate() {
        let three_of_eight = [true, false, false, true, false, false, true, false];
        let near = |k, expected: f64| {
            let got = f64::from(pass_at_k(&three_of_eight, k).unwrap());
            assert!((got - expected).abs() < 1e-6, "pass@{k} = {got}, expected {expected}");
        };
        near(1, 3.0 / 8.0);
        near(2, 1.0 - (5.0 * 4.0) / (8.0 * 7.0)); // 1 - C(5, 2) / C(8, 2)
        near(4, 1.0 - 5.0 / 70.0); // 1 - C(5, 4) / C(8, 4)
        near(8, 1.0);
        assert_eq!(pass_at_k(&[true], 2), None);
    }

    /// With the rewards [format, answer], the answer decides whatever the weighted sum is.
    #[test]
    fn a_sample_is_solved_if_the_deciding_rewards_give_1() {
        let sample = |rewards: [Option<f32>; 2]| Trajectory {
            rewards: rewards.to_vec(),
            reward: Some(rewards.iter().flatten().sum()),
            ..completion("x")
        };
        let (full, none) = (Some(1.0), Some(0.0));
        assert_eq!(is_solved(&sample([full, none]), &[1]), Some(false));
        assert_eq!(is_solved(&sample([none, full]), &[1]), Some(true));
        assert_eq!(is_solved(&sample([none, full]), &[0, 1]), Some(false));
        assert_eq!(is_solved(&sample([full, None]), &[0, 1]), Some(true), "what does not apply decides nothing");
        assert_eq!(is_solved(&sample([full, None]), &[1]), None);
        assert_eq!(is_solved(&Trajectory { reward: None, ..sample([full, full]) }, &[1]), None, "one failed");

        let group = RolloutGroup { completions: vec![sample([full, none]), sample([none, full])], ..scored(&[]) };
        let outcome = EvalOutcome::of(&[group], &[1], &SingleRank::default()).unwrap();
        assert_eq!(outcome.metrics(&["format".to_owned(), "answer".to_owned()])["eval_pass@1"], 0.5);
    }

    #[test]
    fn maj_at_n_takes_the_most_frequent_answer() {
        let votes = |answers: &[(&str, Option<f32>)]| {
            let mut group = scored(&answers.iter().map(|(_, reward)| *reward).collect::<Vec<_>>());
            for (completion, (answer, _)) in group.completions.iter_mut().zip(answers) {
                completion.text = (*answer).to_owned();
            }
            maj_at_n(&group, &[0], &|text: &str| (!text.is_empty()).then(|| text.to_owned()))
        };
        let (right, wrong) = (Some(1.0), Some(0.0));
        assert_eq!(votes(&[("7", right), ("8", wrong), ("7", right), ("9", wrong)]), Some(1.0));
        assert_eq!(votes(&[("8", wrong), ("7", right), ("8", wrong)]), Some(0.0));
        assert_eq!(votes(&[("8", wrong), ("7", right)]), Some(0.5));
        assert_eq!(votes(&[("", wrong), ("", wrong), ("7", right)]), Some(1.0), "no answer is no vote");
        assert_eq!(votes(&[("", wrong)]), Some(0.0));
        assert_eq!(votes(&[("7", None), ("8", wrong)]), Some(0.0), "what was not scored has no vote");
        assert_eq!(votes(&[("7", None)]), None);
    }

    #[test]
    fn evaluation_outcome_reports_counts_and_standard_errors() {
        let groups = [scored(&[Some(1.0), Some(0.0)]), scored(&[Some(1.0), Some(1.0)]), scored(&[None, Some(0.0)])];
        let outcome = EvalOutcome::of(&groups, &[0], &SingleRank::default()).unwrap();
        assert_eq!((outcome.reward.count, outcome.reward.sum), (5.0, 3.0));
        assert_eq!(outcome.problems.count, 3.0);
        let estimate = Estimate::of(&outcome.problems);
        assert!((estimate.mean - 0.5).abs() < 1e-12 && (estimate.standard_error - 0.5 / 3f64.sqrt()).abs() < 1e-12);
        assert!(outcome.to_string().starts_with("held-out reward 0.500 +- 0.289, pass@1"), "{outcome}");
        let one = EvalOutcome::of(&groups[..1], &[0], &SingleRank::default()).unwrap();
        assert!(
            one.to_string().starts_with("held-out reward 0.500, pass@1"),
            "one problem has no standard error: {one}"
        );
        assert_eq!(outcome.metrics(&["answer".to_owned()])["eval_rewards/answer/mean"], 0.6);
        assert_eq!(outcome.pass.iter().map(|(k, stats)| (*k, stats.count)).collect::<Vec<_>>(), [(1, 3.0), (2, 2.0)]);
    }
}
