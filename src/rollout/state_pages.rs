//! States of gated delta nets: a page for every sequence that runs, beside the KV blocks of the attention layers.

use std::collections::HashMap;

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::model::{DeltaNetSpec, Mixer, ModelSpec};
use crate::ops::delta_net::DeltaState;
use crate::torch;

/// Bytes of one sequence's states in all layers, on one rank; 0 of a model without gated delta nets.
pub fn state_page_bytes(spec: &ModelSpec, tp_size: usize, kind: Kind) -> usize {
    delta_nets(spec, tp_size).map(|(_, delta_net)| DeltaState::bytes(delta_net.heads, kind)).sum()
}

/// One state a page, by layer.
#[derive(Debug)]
pub(super) struct StatePages {
    layers: HashMap<usize, DeltaState>,
}

impl StatePages {
    /// Pages of zeros; `None` for a model without gated delta nets.
    pub(super) fn new(
        spec: &ModelSpec,
        tp_size: usize,
        num_pages: usize,
        (kind, device): (Kind, Device),
    ) -> Result<Option<Self>> {
        let state = |(layer, delta_net): (usize, DeltaNetSpec)| {
            Ok((layer, DeltaState::zeros(delta_net.heads, num_pages, kind, device)?))
        };
        let layers = delta_nets(spec, tp_size).map(state).collect::<Result<HashMap<_, _>>>()?;
        Ok((!layers.is_empty()).then_some(Self { layers }))
    }

    /// Copies of a layer's states in these pages.
    pub(super) fn read(&self, layer: usize, pages: &Tensor /* [N] i64 */) -> Result<DeltaState> {
        self.layers[&layer].fork(pages)
    }

    /// Replaces a layer's states in these pages.
    pub(super) fn write(&self, layer: usize, pages: &Tensor /* [N] i64 */, states: &DeltaState) -> Result<()> {
        let own = &self.layers[&layer];
        for (all, new) in [(&own.conv, &states.conv), (&own.rule, &states.rule)] {
            let _ = all.shallow_clone().f_index_copy_(0, pages, &new.f_to_kind(all.kind())?)?;
        }
        Ok(())
    }

    /// Copies whole pages (from, to), all layers.
    pub(super) fn copy(&self, copies: &[(u32, u32)], device: Device) -> Result<()> {
        let (from, to): (Vec<_>, Vec<_>) = copies.iter().map(|&(from, to)| (i64::from(from), i64::from(to))).unzip();
        let (from, to) = (torch::tensor_on(&from, device)?, torch::tensor_on(&to, device)?);
        self.layers.keys().try_for_each(|&layer| self.write(layer, &to, &self.read(layer, &from)?))
    }
}

fn delta_nets(spec: &ModelSpec, tp_size: usize) -> impl Iterator<Item = (usize, DeltaNetSpec)> + '_ {
    (0..spec.num_layers).filter_map(move |layer| match spec.block(layer).tp_slice(tp_size).mixer {
        Mixer::DeltaNet(delta_net) => Some((layer, delta_net)),
        Mixer::Attention(_) => None,
    })
}
