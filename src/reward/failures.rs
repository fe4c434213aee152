//! Counts samples without a score, by reward and kind of failure.

use crate::error::Error;

/// Number of scores that a reward failed to give for one reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailureCount {
    /// The reward's name.
    pub reward: String,
    /// Why the scores are missing.
    pub kind: FailureKind,
    /// Number of missing scores.
    pub count: usize,
}

impl FailureCount {
    /// A count of missing scores of `reward` for one reason.
    pub fn new(reward: &str, kind: FailureKind, count: usize) -> Self {
        Self { reward: reward.to_owned(), kind, count }
    }
}

/// Why a reward gave no score.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// The reward returned an error.
    Error,
    /// The reward function panicked.
    Panic,
    /// The reward did not return within its time limit.
    Timeout,
    /// The reward returned NaN or an infinity.
    NonFinite,
    /// The reward's worker process ended.
    Died,
    /// The reward's worker process wrote malformed or too much output.
    Output,
    /// The reward's service was unreachable or overloaded in all attempts.
    Unavailable,
}

impl FailureKind {
    /// All kinds.
    pub const ALL: [Self; 7] =
        [Self::Error, Self::Panic, Self::Timeout, Self::NonFinite, Self::Died, Self::Output, Self::Unavailable];

    /// Name of the kind in the metric `rewards/{name}/failed/{kind}`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Panic => "panic",
            Self::Timeout => "timeout",
            Self::NonFinite => "non_finite",
            Self::Died => "died",
            Self::Output => "output",
            Self::Unavailable => "unavailable",
        }
    }
}

/// Missing scores of one reward, by kind of failure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RewardFailures([usize; FailureKind::ALL.len()]);

impl RewardFailures {
    /// Number of failures of this kind.
    pub fn of(&self, kind: FailureKind) -> usize {
        self.0[kind as usize]
    }

    /// Counts one failure of this kind.
    pub(super) fn add(&mut self, kind: FailureKind) {
        self.0[kind as usize] += 1;
    }
}

/// The failure of a reward for one completion.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RewardFailure {
    pub kind: FailureKind,
    pub cause: String,
}

impl RewardFailure {
    pub fn new(kind: FailureKind, cause: impl Into<String>) -> Self {
        Self { kind, cause: cause.into() }
    }
}

impl From<Error> for RewardFailure {
    fn from(error: Error) -> Self {
        Self::new(FailureKind::Error, error.to_string())
    }
}

/// The result of a reward for one completion.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Score {
    /// A finite number.
    Value(f32),
    /// The reward does not apply: only the other rewards score the sample.
    NotApplicable,
    /// The reward failed: the sample is masked.
    Failed,
}

impl Score {
    /// Converts a number to a score; NaN and infinities are failures.
    pub fn finite(value: f32) -> Result<Self, RewardFailure> {
        let failure = || RewardFailure::new(FailureKind::NonFinite, value.to_string());
        if value.is_finite() { Ok(Self::Value(value)) } else { Err(failure()) }
    }

    /// The number, if there is one.
    pub fn value(&self) -> Option<f32> {
        if let Self::Value(value) = self { Some(*value) } else { None }
    }
}

/// The weighted sum of the rewards that apply and have a weight. `None` masks the sample: one of these rewards failed, or none
/// applies.
pub(super) fn weighted_sum(scores: &[Score], weights: &[f64]) -> Option<f32> {
    let counted: Vec<_> = scores.iter().zip(weights).filter(|(_, weight)| **weight != 0.0).collect();
    let values = counted.iter().filter_map(|(score, weight)| Some(f64::from(score.value()?) * **weight));
    let is_masked = counted.iter().any(|(score, _)| **score == Score::Failed) || values.clone().next().is_none();
    (!is_masked).then(|| values.sum::<f64>() as f32)
}

#[cfg(test)]
mod tests {
    use super::Score::*;
    use super::*;

    #[test]
    fn rewards_of_weight_0_or_not_applicable_mask_nothing() {
        assert_eq!(weighted_sum(&[Failed, Value(2.0)], &[0.0, 0.5]), Some(1.0));
        assert_eq!(weighted_sum(&[Failed, Value(2.0)], &[1.0, 0.5]), None);
        assert_eq!(weighted_sum(&[NotApplicable, Value(2.0)], &[1.0, 0.5]), Some(1.0));
        assert_eq!(weighted_sum(&[NotApplicable, NotApplicable], &[1.0, 1.0]), None);
    }

    #[test]
    fn failures_are_counted_by_kind() {
        let mut failures = RewardFailures::default();
        let kinds = [FailureKind::Died, FailureKind::Died, Score::finite(f32::NAN).unwrap_err().kind];
        kinds.into_iter().for_each(|kind| failures.add(kind));
        assert_eq!(FailureKind::ALL.map(|kind| failures.of(kind)), [0, 0, 0, 1, 2, 0, 0]);
    }
}
