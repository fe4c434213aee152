//! How tokens of a sequence see one another: what a block asks for, and packed sequences in training.

use tch::{Device, Tensor};

use super::exchange::TokenExchange;
use crate::cuda::{OpCost, timed};
use crate::error::{Error, Result};
use crate::model::distinct::ByWindow;
use crate::model::spec::{AttentionSpec, ModelSpec};
use crate::ops::attention::{Attended, Bounds, PackedLayout, packed_forward};
use crate::ops::delta_net::{DeltaOptions, DeltaRows, DeltaWeights, PackedChunks, PackedSequences};
use crate::ops::exact::ExactAttention;

/// How tokens of a sequence see one another: packed sequences in training, paged keys, values and states in generation.
pub trait SequenceMixer {
    /// Attention output [T, H, hd] and, where a backward may follow, the log-sum-exp of the scores [T, H].
    ///
    /// # Errors
    /// What the implementation meets, [`crate::Error::OutOfMemory`] among it.
    fn attention(
        &self,
        layer: usize,
        attention: AttentionSpec, // this rank's share
        qkv: [&Tensor; 3],        // [T, H, hd], [T, Hkv, hd] twice
    ) -> Result<(Tensor, Option<Tensor>)>;

    /// Output of a gated delta net before its last projection [T, H dv]; and what a backward reads of chunks, where `keeps_chunks` asks
    /// for it and one may follow.
    ///
    /// # Errors
    /// Any error of the implementation; [`crate::Error::InvalidArgument`] where it keeps no states.
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

    /// The ranks that have the other rows of the same sequences: a sublayer gives its rows away for all rows of some heads, mixes these, and
    /// gets its rows back.
    fn exchange(&self) -> Option<&TokenExchange> {
        None
    }
}

/// Causal attention and gated delta nets within each sequence of a packed micro-batch.
#[derive(Debug)]
pub struct PackedMixer {
    pub(super) layouts: ByWindow<PackedLayout>,
    /// Where the model has gated delta nets.
    sequences: Option<PackedSequences>,
    /// By the windows of layers, where the forward is exact.
    exact: Option<ByWindow<ExactAttention>>,
    /// Who has the other rows.
    exchange: Option<TokenExchange>,
}

impl PackedMixer {
    /// For sequences `cu_seqlens[n]..cu_seqlens[n + 1]` of a whole model (all key/value heads).
    pub fn new(spec: &ModelSpec, cu_seqlens: &[i64], device: Device) -> Self {
        Self::of(spec, &Bounds::Separate(cu_seqlens.to_vec()), device)
    }

    /// For a micro-batch, whose completions may share prompts.
    pub fn of(spec: &ModelSpec, bounds: &Bounds, device: Device) -> Self {
        Self::shared(spec, bounds, device, None)
    }

    /// For a micro-batch whose rows several ranks share; `bounds` are those of all rows.
    pub fn shared(spec: &ModelSpec, bounds: &Bounds, device: Device, exchange: Option<TokenExchange>) -> Self {
        let kv_heads = spec.attention().own_kv_heads(exchange.as_ref());
        let layouts = ByWindow::new(spec.windows(), |window| PackedLayout::of(bounds, kv_heads, window, device));
        let width = spec.delta_net().map(|delta_net| delta_net.heads.conv_width);
        let sequences = width.map(|width| PackedSequences::new(bounds, width, device));
        Self { layouts, sequences, exact: None, exchange }
    }

    /// [`PackedMixer::of`] whose forward gives a token the bits that the engine gives it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn exact(spec: &ModelSpec, bounds: &Bounds, device: Device) -> Result<Self> {
        let attention = |window| ExactAttention::new(bounds, window, device);
        Ok(Self { exact: Some(ByWindow::try_new(spec.windows(), attention)?), ..Self::of(spec, bounds, device) })
    }

    /// The sequences of a model with gated delta nets.
    ///
    /// # Panics
    /// If it is for a model without.
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
