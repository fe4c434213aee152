//! The interface by which a block lets tokens attend to each other, and its implementation for packed sequences in training.

use tch::{Device, Tensor};

use super::exchange::TokenExchange;
use crate::cuda::{OpCost, timed};
use crate::error::{Error, Result};
use crate::model::distinct::ByWindow;
use crate::model::spec::{AttentionSpec, ModelSpec};
use crate::ops::attention::{Attended, Bounds, PackedLayout, packed_forward};
use crate::ops::delta_net::{DeltaOptions, DeltaRows, DeltaWeights, PackedChunks, PackedSequences};
use crate::ops::exact::ExactAttention;

/// Attention and gated delta nets over the tokens of a batch: packed sequences in training; paged keys, values and states in generation.
pub trait SequenceMixer {
    /// Returns attention's output [T, H, hd] and, if a backward may follow, the log-sum-exp of the scores [T, H].
    ///
    /// # Errors
    /// Any error of the implementation, including [`crate::Error::OutOfMemory`].
    fn attention(
        &self,
        layer: usize,
        attention: AttentionSpec, // this rank's share
        qkv: [&Tensor; 3],        // [T, H, hd], [T, Hkv, hd] twice
    ) -> Result<(Tensor, Option<Tensor>)>;

    /// Returns a gated delta net's output before its last projection [T, H dv] and, if `keeps_chunks` is set and a backward may follow, the
    /// intermediate results per chunk.
    ///
    /// # Errors
    /// Any error of the implementation; [`crate::Error::InvalidArgument`] if it stores no states.
    fn delta_net(
        &self,
        layer: usize,
        _rows: &DeltaRows,
        _weights: &DeltaWeights,
        _options: DeltaOptions,
        _keeps_chunks: bool,
    ) -> Result<(Tensor, Option<PackedChunks>)> {
        let got = format!("a gated delta net in layer {layer}");
        Err(Error::InvalidArgument { op: "SequenceMixer::delta_net", expected: "attention".to_owned(), got })
    }

    /// The sequence-parallel ranks that have the other rows of the same sequences. A sublayer exchanges its rows for all rows of some heads,
    /// processes these, and exchanges them back.
    fn exchange(&self) -> Option<&TokenExchange> {
        None
    }
}

/// Causal attention and gated delta nets within each sequence of a packed micro-batch.
#[derive(Debug)]
pub struct PackedMixer {
    pub(super) layouts: ByWindow<PackedLayout>,
    /// Layout of the sequences for gated delta nets, if the model has any.
    sequences: Option<PackedSequences>,
    /// Bit-exact attention by sliding window, if the forward is exact.
    exact: Option<ByWindow<ExactAttention>>,
    /// The sequence-parallel ranks that have the other rows.
    exchange: Option<TokenExchange>,
}

impl PackedMixer {
    /// A mixer for the sequences `cu_seqlens[n]..cu_seqlens[n + 1]` of a whole model (all key/value heads).
    pub fn new(spec: &ModelSpec, cu_seqlens: &[i64], device: Device) -> Self {
        Self::of(spec, &Bounds::Separate(cu_seqlens.to_vec()), device)
    }

    /// A mixer for a micro-batch in which completions may share prompts.
    pub fn of(spec: &ModelSpec, bounds: &Bounds, device: Device) -> Self {
        Self::shared(spec, bounds, device, None)
    }

    /// A mixer for a micro-batch whose rows are split over the ranks of `exchange`; `bounds` cover all rows.
    pub fn shared(spec: &ModelSpec, bounds: &Bounds, device: Device, exchange: Option<TokenExchange>) -> Self {
        let exchange = exchange.map(|ranks| ranks.for_tokens(bounds.num_tokens()));
        let kv_heads = spec.attention().own_kv_heads(exchange.as_ref());
        let layouts = ByWindow::new(spec.windows(), |window| PackedLayout::of(bounds, kv_heads, window, device));
        let width = spec.delta_net().map(|delta_net| delta_net.heads.conv_width);
        let sequences = width.map(|width| PackedSequences::new(bounds, width, device));
        Self { layouts, sequences, exact: None, exchange }
    }

    /// A mixer like [`PackedMixer::of`] whose forward computes the same bits for a token as the engine does.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn exact(spec: &ModelSpec, bounds: &Bounds, device: Device) -> Result<Self> {
        let attention = |window| ExactAttention::new(bounds, window, device);
        Ok(Self { exact: Some(ByWindow::try_new(spec.windows(), attention)?), ..Self::of(spec, bounds, device) })
    }

    /// The layout of the sequences for gated delta nets.
    ///
    /// # Panics
    /// If the mixer was created for a model without gated delta nets.
    pub(super) fn sequences(&self) -> &PackedSequences {
        self.sequences.as_ref().expect("made for a model with gated delta nets")
    }
}

impl SequenceMixer for PackedMixer {
    fn attention(
        &self,
        _layer: usize,
        attention: AttentionSpec,
        [q, k, v]: [&Tensor; 3],
    ) -> Result<(Tensor, Option<Tensor>)> {
        let layout = self.layouts.of(attention.window);
        let run = || match &self.exact {
            Some(exact) => exact.of(attention.window).attend([q, k, v], layout, attention.scale),
            None => packed_forward(q, k, v, layout, attention.scale),
        };
        let Attended { o, lse } = timed("attention", OpCost::default, run)?;
        Ok((o, Some(lse)))
    }

    fn delta_net(
        &self,
        _layer: usize,
        rows: &DeltaRows,
        weights: &DeltaWeights,
        options: DeltaOptions,
        keeps_chunks: bool,
    ) -> Result<(Tensor, Option<PackedChunks>)> {
        let run = || self.sequences().forward(rows, weights, options, keeps_chunks);
        timed("gated delta net", OpCost::default, run)
    }

    fn exchange(&self) -> Option<&TokenExchange> {
        self.exchange.as_ref()
    }
}
