//! Functions of the caller that a trainer calls.

use std::fmt;

use crate::error::Result;
use crate::grpo::LossFunction;
use crate::metrics::MetricValues;
use crate::types::RolloutGroup;

/// A step that is over, as a function of [`TrainerBuilder::on_step`](super::TrainerBuilder::on_step) is told of it.
#[derive(Debug, Clone, Copy)]
pub struct StepReport<'a> {
    /// Optimizer updates made.
    pub step: u64,
    /// Updates of the whole run.
    pub max_steps: u64,
    /// Passes over the data so far.
    pub epoch: f64,
    /// The step's metrics over all ranks, the same on each.
    pub metrics: &'a MetricValues,
}

type AdvantageFunction = dyn Fn(&mut [RolloutGroup]) -> Result<()>;
type StepFunction = dyn FnMut(&StepReport<'_>) -> Result<()>;

/// Functions of the caller beside rewards.
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
