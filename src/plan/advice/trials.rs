//! Plans of the run with changed keys, each computed once.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use serde_json::Value;

use super::{KeySetting, settings};
use crate::config::Config;
use crate::error::Result;
use crate::plan::choices::choose;
use crate::plan::shortage::MemoryShortage;
use crate::plan::{MemoryPlan, PlanInput};

/// Computes the plan for each set of changes once, because several concessions try the same changes.
pub(super) struct Trials<'a> {
    input: &'a PlanInput<'a>,
    engine_weights: &'a dyn Fn(&Config) -> Result<usize>,
    known: RefCell<HashMap<String, Rc<TrialResult>>>,
}

/// The result of trying changes.
pub(super) enum TrialResult {
    Fits,
    Lacks(Box<MemoryPlan>),
    /// The configuration does not allow the changes.
    Refused,
}

impl TrialResult {
    pub(super) fn fits(&self) -> bool {
        matches!(self, Self::Fits)
    }

    pub(super) fn has_room_to_generate(&self) -> bool {
        match self {
            Self::Fits => true,
            Self::Lacks(plan) => plan.generation_fits(),
            Self::Refused => false,
        }
    }
}

impl<'a> Trials<'a> {
    pub(super) fn new(input: &'a PlanInput<'a>, engine_weights: &'a dyn Fn(&Config) -> Result<usize>) -> Self {
        Self { input, engine_weights, known: RefCell::default() }
    }

    /// Tries the run with `changes`.
    pub(super) fn of(&self, changes: &[KeySetting]) -> Rc<TrialResult> {
        let key = settings(changes);
        let known = self.known.borrow().get(&key).cloned();
        known.unwrap_or_else(|| {
            let result = Rc::new(self.plan(changes));
            self.known.borrow_mut().insert(key, result.clone());
            result
        })
    }

    fn plan(&self, changes: &[KeySetting]) -> TrialResult {
        let Some(config) = self.config(changes) else { return TrialResult::Refused };
        let Ok(engine_weight_bytes) = (self.engine_weights)(&config) else { return TrialResult::Refused };
        let Ok(batch) = config.validate_world(self.input.batch.world_size) else { return TrialResult::Refused };
        match choose(&PlanInput { config: &config, batch, engine_weight_bytes, ..*self.input }) {
            Ok(_) => TrialResult::Fits,
            Err(MemoryShortage::Memory(plan)) => TrialResult::Lacks(plan),
            Err(MemoryShortage::Value(_)) => TrialResult::Refused,
        }
    }

    /// The configuration with `changes`, if it is valid and the model can be divided accordingly.
    pub(super) fn config(&self, changes: &[KeySetting]) -> Option<Config> {
        let changed = |(key, value): (String, Value)| {
            let change = changes.iter().find(|(changed, _)| *changed == key);
            (key, change.map_or(value, |(_, value)| value.clone()))
        };
        let config = Config::from_entries(self.input.config.entries().into_iter().map(changed)).ok()?;
        self.input.table.spec.validate_tp(config.tensor_parallel_size).is_ok().then_some(config)
    }
}
