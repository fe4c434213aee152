//! Routing of a pass: which experts the tokens use, taken from the sampler's record if replayed, and the load-balancing loss.
//!
//! T tokens, E experts, K experts per token, R = K times the number of layers with experts.

use std::cell::RefCell;

use tch::{Device, Kind, Tensor};

use super::load_balance::LoadBalance;
use super::micro_batch::MicroBatch;
use super::row_part::RowPart;
use crate::error::Result;
use crate::model::{ModelSpec, Routes};
use crate::ops::router::Routing;

/// Routing of one pass over a micro-batch.
#[derive(Debug)]
pub(super) struct PassRoutes {
    /// Recorded experts, -1 where none is recorded.
    recorded: Option<Tensor>, // [T, R / K, K] int16
    /// For each layer, its index among the layers with experts.
    places: Vec<i64>,
    /// Number of recorded choices that differ from the router's own, and number of recorded choices.
    differing: RefCell<Option<Tensor>>, // [2] int64
    /// The load-balancing loss, if it is computed.
    balance: Option<LoadBalance>,
}

impl PassRoutes {
    /// Prepares the routing; `None` for a model without experts. If the pass `replays`, it uses recorded experts where the micro-batch has them.
    /// If it `balances`, it computes the load-balancing loss.
    pub(super) fn new(
        spec: &ModelSpec,
        (micro_batch, part): (&MicroBatch, &RowPart),
        (kind, device): (Kind, Device),
        replays: bool,
        balances: bool,
    ) -> Result<Option<Self>> {
        let Some(experts) = spec.experts() else { return Ok(None) };
        let k = experts.router.num_experts_per_tok as i64;
        let recorded = micro_batch.routed_experts.as_ref().filter(|_| replays);
        let recorded = recorded.map(|experts| part.rows(experts, -1.0)).transpose()?;
        let recorded = recorded.map(|experts| experts.f_view([experts.size()[0], -1, k])).transpose()?;
        let places = spec.places_among_expert_layers();
        let balance = if balances { Some(LoadBalance::new(spec, (micro_batch, part), kind, device)?) } else { None };
        Ok(Some(Self { recorded, places, differing: RefCell::default(), balance }))
    }

    /// The load-balancing loss over all parts, if it is computed. Collective over the ranks that share the micro-batch.
    pub(super) fn aux_loss(&self, part: &RowPart) -> Result<Option<Tensor>> {
        self.balance.as_ref().map(|balance| balance.value(part)).transpose()
    }

    /// Sets the gradient of the total loss with respect to [`PassRoutes::aux_loss`].
    pub(super) fn set_gradient(&self, gradient: f64) -> Result<()> {
        self.balance.as_ref().map_or(Ok(()), |balance| balance.set_gradient(gradient))
    }

    /// Number of recorded choices that differ from the router's own, and number of recorded choices, over all parts; [2]. Collective over the ranks
    /// that share the micro-batch.
    pub(super) fn differing(&self, part: &RowPart) -> Result<Option<Tensor>> {
        self.differing.borrow().as_ref().map(|counts| part.sum(counts.copy())).transpose()
    }

    /// The recorded experts of a layer. [T, K] int64
    fn recorded(&self, layer: usize) -> Result<Option<Tensor>> {
        let of_layer = |all: &Tensor| Ok(all.f_select(1, self.places[layer])?.f_to_kind(Kind::Int64)?);
        self.recorded.as_ref().map(of_layer).transpose()
    }
}

impl Routes for PassRoutes {
    fn choose(&self, layer: usize, own: Tensor) -> Result<Tensor> {
        let Some(recorded) = self.recorded(layer)? else { return Ok(own) };
        Ok(recorded.f_where_self(&recorded.f_ge(0)?, &own)?)
    }

    fn observe(&self, layer: usize, routing: &Routing, own: &Tensor) -> Result<()> {
        if let Some(balance) = &self.balance {
            balance.observe(routing)?;
        }
        let Some(recorded) = self.recorded(layer)? else { return Ok(()) };
        let all = recorded.f_ge(0)?.f_sum(Kind::Int64)?;
        let equal = own.f_unsqueeze(2)?.f_eq_tensor(&recorded.f_unsqueeze(1)?)?.f_sum(Kind::Int64)?;
        let counts = Tensor::f_stack(&[all.f_sub(&equal)?, all], 0)?;
        let sum = &mut *self.differing.borrow_mut();
        *sum = Some(match sum.take() {
            Some(mut sum) => sum.f_add_(&counts)?,
            None => counts,
        });
        Ok(())
    }

    fn d_probs(&self, _layer: usize) -> Result<Option<Tensor>> {
        self.balance.as_ref().map_or(Ok(None), LoadBalance::d_probs)
    }
}
