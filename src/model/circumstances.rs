//! Which settings can be combined with a model, given its kind and family.

use serde_json::Value;

use super::spec::ModelSpec;
use crate::config::{Circumstance, Combination};
use crate::error::Result;

impl ModelSpec {
    /// Weight of the auxiliary loss that balances experts: the configured one, or else the model's own.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for `router_aux_loss_coef` if the model has no experts.
    pub fn router_aux_loss_coef(&self, configured: Option<f64>) -> Result<f64> {
        let settings = configured.map(|coef| ("router_aux_loss_coef", coef.into()));
        self.check_with(settings)?;
        let own = if self.experts().is_some() { self.router_aux_loss_coef } else { 0.0 };
        Ok(configured.unwrap_or(own))
    }

    /// Properties of the model that the table of combinations refers to.
    pub(crate) fn circumstances(&self) -> impl Iterator<Item = Circumstance> + use<> {
        let (num_experts, has_nets) = (self.num_expert_layers(), self.delta_net().is_some());
        let is_fused = has_nets && self.family.traits().interleaves_delta_nets;
        let experts = if num_experts > 0 { Circumstance::Experts } else { Circumstance::NoExperts };
        let nets = if has_nets { Circumstance::DeltaNets } else { Circumstance::NoDeltaNets };
        let some = (1..self.num_layers()).contains(&num_experts).then_some(Circumstance::SomeExperts);
        let fused = [
            (is_fused, Circumstance::FusedDeltaNets),
            (self.family.traits().stacks_experts, Circumstance::StackedExperts),
        ];
        let fused = fused.into_iter().filter_map(|(is_so, fused)| is_so.then_some(fused));
        let headless = self.draft_head.is_none().then_some(Circumstance::NoDraftHead);
        [experts, nets].into_iter().chain(headless).chain(some).chain(fused)
    }

    /// Refuses settings that cannot be combined with each other or with this kind of model.
    ///
    /// # Errors
    /// The errors of [`Combination::check`].
    pub(crate) fn check_with<'a>(&self, settings: impl IntoIterator<Item = (&'a str, Value)>) -> Result<()> {
        Combination::of(settings).in_circumstances(self.circumstances()).check()
    }

    /// Returns this spec with expert parallelism in the engine (whole experts on each rank) switched on or off.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for `enable_expert_parallel` if the model has no experts.
    pub fn with_expert_parallel(self, is_parallel: bool) -> Result<Self> {
        self.check_with([("enable_expert_parallel", is_parallel.into())])?;
        Ok(self.map_experts(|experts| experts.is_parallel = is_parallel))
    }

    /// Whether the model's files may have additional layers, which are copied unchanged.
    pub(super) fn keeps_further_layers(&self) -> bool {
        self.family.traits().keeps_further_layers
    }
}
