//! The caller's functions that a trainer calls.

use std::fmt;

use crate::error::Result;
use crate::grpo::LossFunction;
use crate::metrics::MetricValues;
use crate::types::RolloutGroup;

/// A finished step, as passed to the function of [`TrainerBuilder::on_step`](super::TrainerBuilder::on_step).
#[derive(Debug, Clone, Copy)]
pub struct StepReport<'a> {
    /// Optimizer updates so far.
    pub step: u64,
    /// Total updates of the run.
    pub max_steps: u64,
    /// Passes over the data so far.
    pub epoch: f64,
    /// The step's metrics, reduced over all ranks and equal on each.
    pub metrics: &'a MetricValues,
}

type AdvantageFunction = dyn Fn(&mut [RolloutGroup]) -> Result<()>;
type StepFunction = dyn FnMut(&StepReport<'_>) -> Result<()>;

/// The caller's functions, except rewards.
#[derive(Default)]
pub(super) struct Functions {
    pub advantages: Option<Box<AdvantageFunction>>,
    pub loss: Option<LossFunction>,
    pub on_step: Option<Box<StepFunction>>,
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Functions")
            .field("advantages", &self.advantages.is_some())
            .field("loss", &self.loss)
            .field("on_step", &self.on_step.is_some())
            .finish()
    }
}
