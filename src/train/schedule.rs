//! Learning-rate schedules with linear warm-up, as `transformers.get_scheduler` defines them.

use crate::config::{LrSchedulerType, OptimizerConfig};

/// A learning rate as a function of the update's index.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Shape after warm-up.
    pub kind: LrSchedulerType,
    /// Learning rate at the end of warm-up.
    pub peak: f64,
    /// Number of updates of linear warm-up from 0.
    pub warmup_steps: usize,
    /// Total number of updates.
    pub total_steps: usize,
    /// Learning rate at the last update, as a share of `peak`, for shapes with a minimum.
    pub min_rate: f64,
}

impl Schedule {
    /// The schedule of a run of `max_steps` updates or, if that is not set, of `epochs_updates`, the number of updates in its epochs.
    pub fn new(peak: f64, config: &OptimizerConfig, epochs_updates: usize) -> Self {
        let total_steps = config.max_steps.unwrap_or(epochs_updates);
        let of_ratio = (config.warmup_ratio * total_steps as f64).ceil() as usize;
        Self {
            kind: config.lr_scheduler_type,
            peak,
            warmup_steps: if config.warmup_steps > 0 { config.warmup_steps } else { of_ratio },
            total_steps,
            min_rate: config.lr_scheduler_kwargs.min_lr_rate.unwrap_or(0.0),
        }
    }
}

/// The learning rate of update `step`, counted from 0.
///
/// With `w` warm-up and `n` total updates: `peak * t / max(1, w)` while `t < w`; then constant: `peak`; linear: `peak * max(0, (n - t) / max(1, n -
/// w))`; cosine: `peak * c` with `c = (1 + cos(pi * (t - w) / max(1, n - w))) / 2`; cosine with a minimum m: `peak * (c * (1 - m) + m)`. After the
/// last update the cosine stays at its end value; transformers would let it rise again.
pub fn learning_rate(schedule: &Schedule, step: u64) -> f64 {
    let (step, warmup, total) = (step as f64, schedule.warmup_steps as f64, schedule.total_steps as f64);
    if step < warmup {
        return schedule.peak * step / warmup;
    }
    let progress = ((step - warmup) / (total - warmup).max(1.0)).min(1.0);
    let factor = match schedule.kind {
        LrSchedulerType::Constant => 1.0,
        LrSchedulerType::Linear => ((total - step) / (total - warmup).max(1.0)).max(0.0),
        LrSchedulerType::Cosine | LrSchedulerType::CosineWithMinLr => {
            let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
            cosine * (1.0 - schedule.min_rate) + schedule.min_rate
        }
    };
    schedule.peak * factor
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(kind: LrSchedulerType, warmup_steps: usize, total_steps: usize) -> Vec<f64> {
        let min_rate = if kind == LrSchedulerType::CosineWithMinLr { 0.1 } else { 0.0 };
        let schedule = Schedule { kind, peak: 10.0, warmup_steps, total_steps, min_rate };
        (0..=total_steps as u64).map(|step| learning_rate(&schedule, step)).collect()
    }

    fn assert_close(got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 5e-4, "{got} against {expected}");
        }
    }

    // Numbers of transformers' tests/optimization/test_optimization.py (peak 10, 2 warm-up, 10 updates).
    #[test]
    fn learning_rate_schedules_equal_transformers() {
        let constant = [0.0, 5.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0];
        assert_close(&rates(LrSchedulerType::Constant, 2, 10), &constant);
        let linear = [0.0, 5.0, 10.0, 8.75, 7.5, 6.25, 5.0, 3.75, 2.5, 1.25, 0.0];
        assert_close(&rates(LrSchedulerType::Linear, 2, 10), &linear);
        let cosine = [0.0, 5.0, 10.0, 9.6194, 8.5355, 6.9134, 5.0, 3.0866, 1.4645, 0.3806, 0.0];
        assert_close(&rates(LrSchedulerType::Cosine, 2, 10), &cosine);
        // get_scheduler("cosine_with_min_lr", .., scheduler_specific_kwargs={"min_lr_rate": 0.1}) of transformers 5.23.
        let with_minimum = [0.0, 5.0, 10.0, 9.65746, 8.68198, 7.22208, 5.5, 3.77792, 2.31802, 1.34254, 1.0];
        assert_close(&rates(LrSchedulerType::CosineWithMinLr, 2, 10), &with_minimum);
    }

    /// Warm-up is counted like in transformers: `warmup_steps` if set, else the ratio of all updates, rounded up.
    #[test]
    fn warmup_is_a_number_or_a_fraction_of_updates() {
        let rows = "model_name_or_path = 'm'\ntrain_file = 'f'\nreward_funcs = ['format']";
        let optimizer = crate::config::Config::from_toml(rows).unwrap().optimizer;
        let warmup = |warmup_steps, warmup_ratio, max_steps| {
            let config = OptimizerConfig { warmup_steps, warmup_ratio, max_steps, ..optimizer.clone() };
            Schedule::new(1.0, &config, 25).warmup_steps
        };
        assert_eq!(warmup(0, 0.1, Some(101)), 11);
        assert_eq!(warmup(0, 0.1, None), 3);
        assert_eq!(warmup(5, 0.0, None), 5);
    }

    #[test]
    fn without_warmup_the_schedule_starts_at_the_peak() {
        assert_close(&rates(LrSchedulerType::Linear, 0, 2), &[10.0, 5.0, 0.0]);
        for kind in [LrSchedulerType::Linear, LrSchedulerType::Cosine] {
            let schedule = Schedule { kind, peak: 1.0, warmup_steps: 3, total_steps: 3, min_rate: 0.0 };
            assert_eq!(learning_rate(&schedule, 9), 0.0);
        }
    }
}
