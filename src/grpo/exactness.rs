//! Checks whether the trainer's log-probabilities equal the sampler's.

use tch::Tensor;

use super::loss::LossInput;
use super::stats::{Aggregate, DeviceStats, LossStats, StatsRecorder};
use crate::error::{Error, Result};

const MAX: &str = "sampling/sampling_logp_difference/max";

/// Mean and maximum of |logprob - rollout| over the tokens `[C]` of age 0 in the first update from these samples: those that the current weights
/// sampled. Other tokens were sampled by other weights, so nothing is known about them. A NaN counts as an infinite difference, so that the run ends
/// instead of skipping the update.
///
/// # Errors
/// Errors of the device.
pub(crate) fn exactness_stats(
    input: &LossInput<'_>,
    token_ages: Option<&Tensor>, // [C] i64; `None` means that all have age 0
    is_first_update: bool,
) -> Result<DeviceStats> {
    let nothing = || input.logprobs.f_full_like(f64::NAN);
    let differences = match input.rollout_logprobs.filter(|_| is_first_update) {
        Some(rollout) => {
            let differences = (input.logprobs - rollout.to_kind(input.logprobs.kind())).abs();
            differences.masked_fill(&differences.isnan(), f64::INFINITY)
        }
        None => nothing()?,
    };
    let differences = match token_ages {
        Some(ages) => differences.masked_fill(&ages.gt(0), f64::NAN),
        None => differences,
    };
    let mut recorder = StatsRecorder::new(input.logprobs.device());
    recorder.mean_of("sampling/sampling_logp_difference/mean", &differences);
    recorder.max(MAX, &differences);
    recorder.finish()
}

/// Ends a run whose statistics show a difference.
///
/// # Errors
/// [`Error::Unequal`] with the largest difference.
pub(crate) fn check_exactness(stats: &LossStats) -> Result<()> {
    let greatest = stats.entries().iter().find(|(name, _)| *name == MAX).map(|(_, value)| *value);
    match greatest {
        Some(Aggregate::Max(difference)) if difference > 0.0 => Err(Error::Unequal {
            message: format!("log-probabilities of the trainer and of the sampler differ by up to {difference:e} nats"),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn stats(rollout: &[f32], ages: Option<&[i64]>, is_first_update: bool) -> LossStats {
        stats_of(&[-1.0, -2.0, -3.0], rollout, ages, is_first_update)
    }

    fn stats_of(logprobs: &[f32], rollout: &[f32], ages: Option<&[i64]>, is_first_update: bool) -> LossStats {
        let [logprobs, rollout] = [logprobs, rollout].map(Tensor::from_slice);
        let input = LossInput {
            logprobs: &logprobs,
            old_logprobs: Some(&rollout),
            ref_logprobs: None,
            teacher_logprobs: None,
            top: None,
            rollout_logprobs: Some(&rollout),
            advantages: &Tensor::zeros([1], (Kind::Float, Device::Cpu)),
            bnpo_divisors: None,
            sequence_of_token: &Tensor::zeros([3], (Kind::Int64, Device::Cpu)),
            entropy: None,
            entropy_term: None,
        };
        let ages = ages.map(Tensor::from_slice);
        exactness_stats(&input, ages.as_ref(), is_first_update).unwrap().read().unwrap()
    }

    #[test]
    fn exactness_compares_only_tokens_sampled_by_current_weights() {
        let off = [-1.0, -2.5, -3.0];
        let error = check_exactness(&stats(&off, None, true)).unwrap_err();
        assert!(error.to_string().contains("by up to 5e-1 nats"), "{error}");
        assert!(check_exactness(&stats(&off, Some(&[0, 0, 1]), true)).is_err());
        for equal in [
            stats(&off, Some(&[0, 1, 0]), true),
            stats(&off, None, false),
            stats(&[-1.0, -2.0, -3.0], None, true),
            stats(&[-1.0, f32::NAN, -3.0], Some(&[0, 1, 0]), true),
        ] {
            check_exactness(&equal).unwrap();
        }
    }

    #[test]
    fn nan_logprobs_count_as_unequal() {
        let sound = [-1.0, -2.0, -3.0];
        for wrong in [f32::NAN, f32::NEG_INFINITY] {
            let spoilt = [-1.0, wrong, -3.0];
            for stats in [stats(&spoilt, None, true), stats_of(&spoilt, &sound, None, true)] {
                let error = check_exactness(&stats).unwrap_err();
                assert!(error.to_string().contains("by up to inf nats"), "{error}");
            }
        }
    }
}
