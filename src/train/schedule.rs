//! Learning-rate schedules with linear warm-up, as `transformers.get_scheduler` defines them.

use crate::config::{LrSchedulerType, OptimizerConfig};

/// A learning rate as a function of the update's index.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Shape after warm-up.
    pub kind: LrSchedulerType,
    /// Rate at the end of warm-up.
    pub peak: f64,
    /// Updates of linear warm-up from 0.
    pub warmup_steps: usize,
    /// Updates in all.
    pub total_steps: usize,
}

impl Schedule {
    /// The schedule of a run of `max_steps` updates, or without them of `epochs_updates`, those of its epochs.
    pub fn new(peak: f64, config: &OptimizerConfig, epochs_updates: usize) -> Self {
        let total_steps = config.max_steps.unwrap_or(epochs_updates);
        Self { kind: config.lr_scheduler_type, peak, warmup_steps: config.warmup_steps, total_steps }
    }
}

/// The rate of update `step`, counted from 0.
///
/// With `w` warm-up and `n` total updates: `peak * t / max(1, w)` while `t < w`; then constant: `peak`; linear:
/// `peak * max(0, (n - t) / max(1, n - w))`; cosine: `peak * (1 + cos(pi * (t - w) / max(1, n - w))) / 2`. Past the last
/// update the cosine stays at 0 instead of rising again, which transformers leaves to its caller.
pub fn learning_rate(schedule: &Schedule, step: u64) -> f64 {
    let (step, warmup, total) = (step as f64, schedule.warmup_steps as f64, schedule.total_steps as f64);
    if step < warmup {
        return schedule.peak * step / warmup;
    }
    let progress = ((step - warmup) / (total - warmup).max(1.0)).min(1.0);
    let factor = match schedule.kind {
        LrSchedulerType::Constant => 1.0,
        LrSchedulerType::Linear => ((total - step) / (total - warmup).max(1.0)).max(0.0),
        LrSchedulerType::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
    };
    schedule.peak * factor
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(kind: LrSchedulerType, warmup_steps: usize, total_steps: usize) -> Vec<f64> {
        let schedule = Schedule { kind, peak: 10.0, warmup_steps, total_steps };
        (0..=total_steps as u64).map(|step| learning_rate(&schedule, step)).collect()
    }

    fn assert_close(got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 5e-4, "{got} against {expected}");
        }
    }

    // The numbers of transformers' tests/optimization/test_optimization.py (peak 10, 2 warm-up, 10 updates).
    #[test]
    fn schedules_follow_transformers() {
        let constant = [0.0, 5.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0];
        assert_close(&rates(LrSchedulerType::Constant, 2, 10), &constant);
        let linear = [0.0, 5.0, 10.0, 8.75, 7.5, 6.25, 5.0, 3.75, 2.5, 1.25, 0.0];
        assert_close(&rates(LrSchedulerType::Linear, 2, 10), &linear);
        let cosine = [0.0, 5.0, 10.0, 9.6194, 8.5355, 6.9134, 5.0, 3.0866, 1.4645, 0.3806, 0.0];
        assert_close(&rates(LrSchedulerType::Cosine, 2, 10), &cosine);
    }

    #[test]
    fn no_warmup_starts_at_the_peak_and_nothing_follows_the_end() {
        assert_close(&rates(LrSchedulerType::Linear, 0, 2), &[10.0, 5.0, 0.0]);
        for kind in [LrSchedulerType::Linear, LrSchedulerType::Cosine] {
            let schedule = Schedule { kind, peak: 1.0, warmup_steps: 3, total_steps: 3 };
            assert_eq!(learning_rate(&schedule, 9), 0.0);
        }
    }
}
