//! Statistics of the sampler correction by token age: the number of generation steps between the weights that sampled a token and the weights that
//! are trained on it.

use tch::{Kind, Tensor};

use super::importance::SamplerCorrection;
use super::loss::LossInput;
use super::options::LossConfig;
use super::segments::Segments;
use super::stats::{DeviceStats, StatsRecorder};
use crate::config::MAX_ASYNC_STEPS;
use crate::error::{Error, Result};

macro_rules! names {
    ($($age:literal)*) => {
        [$([
            concat!("staleness/age_", $age, "/token_share"),
            concat!("staleness/age_", $age, "/sampling_logp_difference"),
            concat!("staleness/age_", $age, "/importance_sampling_ratio"),
        ]),*]
    };
}

const NAMES: [[&str; 3]; MAX_ASYNC_STEPS + 1] = names!(0 1 2 3 4 5 6 7 8);

/// Statistics of a micro-batch by the age of its tokens `[C]` i64, from 0 to `max_age`: the share of tokens, the mean of |old - rollout| and the mean
/// of the correction's weight for a token. Also the mean and maximum age, in which alone ages above `max_age` are not counted as `max_age`. If the
/// sampler's log-probabilities are missing, or the correction is off, only ages are recorded.
///
/// # Errors
/// [`Error::InvalidArgument`] if tokens have no ages or there are no metric names for `max_age`; errors of the device.
pub fn age_stats(
    input: &LossInput<'_>,
    config: &LossConfig,
    token_ages: Option<&Tensor>,
    max_age: usize,
) -> Result<DeviceStats> {
    let kind = input.logprobs.kind();
    let Some(ages) = token_ages.filter(|ages| ages.size() == input.logprobs.size() && max_age <= MAX_ASYNC_STEPS)
    else {
        let expected = format!("one age per token of {:?}, each at most {MAX_ASYNC_STEPS}", input.logprobs.size());
        let got = format!("ages of shape {:?}, up to {max_age}", token_ages.map(Tensor::size));
        return Err(Error::InvalidArgument { op: "age_stats", expected, got });
    };
    let segments = Segments::new(input.sequence_of_token, input.advantages.size()[0], kind);
    let old_logprobs = input.old_logprobs.unwrap_or(input.logprobs).to_kind(kind);
    let rollout_logprobs = input.rollout_logprobs.filter(|_| config.importance_sampling_correction);
    let correction = rollout_logprobs
        .map(|rollout| SamplerCorrection::new(&old_logprobs, &rollout.to_kind(kind), config, &segments));
    let mut recorder = StatsRecorder::new(input.logprobs.device());
    recorder.mean_of("staleness/mean", &ages.to_kind(Kind::Double));
    recorder.max("staleness/max", &ages.to_kind(Kind::Double));
    let bounded = ages.clamp_max(max_age as i64);
    for (age, [share, difference, ratio]) in NAMES.into_iter().take(max_age + 1).enumerate() {
        let is_of_age = bounded.eq(age as i64);
        recorder.mean_of(share, &is_of_age.to_kind(Kind::Double));
        if let Some(SamplerCorrection { per_token, differences, .. }) = &correction {
            let others = is_of_age.logical_not();
            recorder.mean_of(difference, &differences.masked_fill(&others, f64::NAN));
            recorder.mean_of(ratio, &per_token.masked_fill(&others, f64::NAN));
        }
    }
    recorder.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ImportanceSamplingMode;
    use crate::grpo::Aggregate;

    #[test]
    fn staleness_metrics_are_grouped_by_weight_age() {
        let [logprobs, rollout] =
            [[-1.0, -2.0, -3.0, -1.0], [-1.0, -1.5, f64::NAN, -1.25]].map(|it| Tensor::from_slice(&it));
        let (advantages, sequences) = (Tensor::from_slice(&[1.0, -1.0]), Tensor::from_slice(&[0i64, 0, 1, 1]));
        let input = LossInput {
            logprobs: &logprobs,
            old_logprobs: None,
            ref_logprobs: None,
            teacher_logprobs: None,
            top: None,
            rollout_logprobs: Some(&rollout),
            advantages: &advantages,
            bnpo_divisors: None,
            sequence_of_token: &sequences,
            entropy: None,
            entropy_term: None,
        };
        let config =
            LossConfig { importance_sampling_mode: ImportanceSamplingMode::TokenTruncate, ..LossConfig::default() };
        let ages = Tensor::from_slice(&[0i64, 2, 2, 5]);
        let stats = age_stats(&input, &config, Some(&ages), 2).unwrap().read().unwrap();
        let value = |name: &str| stats.entries().iter().find(|(own, _)| *own == name).unwrap().1;
        assert_eq!(value("staleness/mean"), Aggregate::Mean { sum: 9.0, count: 4.0 });
        assert_eq!(value("staleness/max"), Aggregate::Max(5.0));
        assert_eq!(value("staleness/age_1/token_share"), Aggregate::Mean { sum: 0.0, count: 4.0 });
        assert_eq!(value("staleness/age_2/token_share"), Aggregate::Mean { sum: 3.0, count: 4.0 });
        let difference = value("staleness/age_2/sampling_logp_difference");
        assert_eq!(difference, Aggregate::Mean { sum: 0.75, count: 2.0 }, "the sampler did not score one");
        let Aggregate::Mean { sum, count } = value("staleness/age_2/importance_sampling_ratio") else { panic!() };
        assert!((sum - ((-0.5f64).exp() + 1.0 + 0.25f64.exp())).abs() < 1e-12 && count == 3.0);
        assert!(age_stats(&input, &config, None, 2).unwrap_err().to_string().contains("one age per token of [4]"));
    }
}
