//! Inputs from a micro-batch that all blocks and the head need, forward and backward.

use super::adapters::AdapterUse;
use super::micro_batch::MicroBatch;
use super::network_options::NetworkOptions;
use super::routes::PassRoutes;
use super::row_part::RowPart;
use crate::error::Result;
use crate::model::{BlockContext, ByRope, ModelSpec, PackedMixer, Ropes, Routes, Scoring};
use crate::ops::head::TopTokens;
use crate::ops::rope::RopeRows;

/// One pass over this rank's part of a micro-batch.
pub(super) struct Pass<'a> {
    pub micro_batch: &'a MicroBatch,
    pub part: &'a RowPart,
    ropes: ByRope<RopeRows>,
    pub mixer: PackedMixer,
    pub scoring: Scoring<'a>,
    pub adapter_use: AdapterUse,
    /// Whether tokens must have the same bits as in the engine.
    exact: bool,
    /// Routing, for a model with experts.
    pub routes: Option<PassRoutes>,
}

impl<'a> Pass<'a> {
    pub(super) fn new(
        (spec, ropes, options): (&ModelSpec, &Ropes, NetworkOptions),
        (micro_batch, part): (&'a MicroBatch, &'a RowPart),
        temperature: f64,
        adapter_use: AdapterUse,
    ) -> Result<Self> {
        let NetworkOptions { kind, device, format, .. } = options;
        let exact = format.is_exact();
        let RowPart { positions, bounds, targets, .. } = part;
        let temperature = temperature * spec.logits_scaling;
        Ok(Self {
            micro_batch,
            part,
            ropes: if exact { ropes.exact_rows(positions, kind)? } else { ropes.rows(positions, kind)? },
            mixer: match exact {
                true => PackedMixer::exact(spec, bounds, device)?,
                false => PackedMixer::shared(spec, bounds, device, part.exchange()),
            },
            scoring: Scoring {
                targets,
                top: TopTokens::Nothing,
                temperature,
                norm: spec.norm(),
                exact: exact.then_some(spec.logits_scaling),
            },
            exact,
            adapter_use,
            routes: None,
        })
    }

    pub(super) fn context<'p>(&'p self, spec: &'p ModelSpec) -> BlockContext<'p> {
        let routes = self.routes.as_ref().map(|routes| routes as &dyn Routes);
        BlockContext::new(spec, &self.ropes, None, routes).exactly(self.exact)
    }
}
