//! Buffers for the mixture of experts in a step on a GPU.
//!
//! R rows of a step, k experts of a token, D hidden, I an expert's width on this rank.

use std::ops::Range;

use tch::{Kind, Tensor};

use crate::cuda::kernels::{ExpertTile, RouteSizes, RoutedTokens};
use crate::error::Result;
use crate::model::{DenseSpec, ExpertsSpec, ModelSpec, Section};

/// The sizes that determine the experts' buffers.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpertShape {
    spec: ExpertsSpec,
    rows: usize,
    /// Chosen experts of a token, summed over all layers.
    per_token: usize,
    kind: Kind,
}

/// Views over the engine's arena, for the rows of its largest step.
#[derive(Debug)]
pub(super) struct ExpertBuffers {
    experts: Tensor,           // [R k] i32
    weights: Tensor,           // [R k] f32
    order: Tensor,             // [R k] i32
    tiles: Tensor,             // [tiles, 4] i32
    logits: Tensor,            // flat, f32
    counters: Tensor,          // flat, i32
    pub(super) act: Tensor,    // [R k, I]
    pub(super) out: Tensor,    // [R k, D]
    pub(super) record: Tensor, // flat, i16, experts token by token, in all layers; an even number of entries
    pub(super) shared: Tensor, // [R, D], output of the shared expert; no rows without one
    pub(super) per_token: usize,
}

impl ExpertShape {
    /// `None` for a model without experts.
    pub(super) fn new(spec: &ModelSpec, rows: usize, tp_size: usize, kind: Kind) -> Option<Self> {
        let experts = spec.experts()?.tp_slice(tp_size);
        Some(Self { spec: experts, rows, per_token: spec.routed_experts_per_token(), kind })
    }

    /// Shapes of the buffers, in the order of the fields of [`ExpertBuffers`].
    pub(super) fn sections(&self) -> Vec<Section> {
        let ExpertsSpec { expert: DenseSpec { hidden, intermediate, .. }, num_experts, router, .. } = self.spec;
        let sizes = RouteSizes::new(self.rows, num_experts, router.num_experts_per_tok);
        let choices = self.rows * router.num_experts_per_tok;
        let flat = |len: usize, kind| (vec![len as i64], kind);
        vec![
            flat(choices, Kind::Int),
            flat(choices, Kind::Float),
            flat(choices, Kind::Int),
            (vec![sizes.tiles as i64, 4], Kind::Int),
            flat(sizes.logits, Kind::Float),
            flat(sizes.counters, Kind::Int),
            (vec![choices as i64, intermediate as i64], self.kind),
            (vec![choices as i64, hidden as i64], self.kind),
            flat((self.rows * self.per_token).next_multiple_of(2), Kind::Int16),
            (vec![self.spec.shared.map_or(0, |_| self.rows as i64), hidden as i64], self.kind),
        ]
    }

    /// Chosen experts of a token in one layer.
    pub(super) fn choices(&self) -> usize {
        self.spec.router.num_experts_per_tok
    }

    /// 32-bit words for the recorded experts of the largest step.
    pub(super) fn record_words(&self) -> usize {
        (self.rows * self.per_token).div_ceil(2)
    }

    /// Creates the buffers; `next` returns the view of the next section.
    pub(super) fn buffers(&self, next: &mut dyn FnMut() -> Result<Tensor>) -> Result<ExpertBuffers> {
        Ok(ExpertBuffers {
            experts: next()?,
            weights: next()?,
            order: next()?,
            tiles: next()?,
            logits: next()?,
            counters: next()?,
            act: next()?,
            out: next()?,
            record: next()?,
            shared: next()?,
            per_token: self.per_token,
        })
    }
}

impl ExpertBuffers {
    /// The recorded experts of the last step's first `tokens` tokens, two i16 ids to a word. [words] i32
    pub(super) fn recorded(&self, tokens: usize) -> Tensor {
        let words = (tokens * self.per_token).div_ceil(2);
        self.record.narrow(0, 0, 2 * words as i64).view_dtype(Kind::Int)
    }

    /// The routing of the first `tokens` tokens of a step, in tiles of the experts in `own`.
    pub(super) fn routed(&self, tokens: i64, spec: ExpertsSpec, own: Range<usize>, tile: ExpertTile) -> RoutedTokens {
        let choices = spec.router.num_experts_per_tok as i64;
        let first = |tensor: &Tensor| tensor.narrow(0, 0, tokens * choices);
        RoutedTokens {
            experts: first(&self.experts).view([tokens, choices]),
            weights: first(&self.weights).view([tokens, choices]),
            order: first(&self.order),
            tiles: self.tiles.shallow_clone(),
            logits: self.logits.shallow_clone(),
            counters: self.counters.shallow_clone(),
            num_experts: spec.num_experts,
            own,
            tile_rows: tile.rows,
        }
    }
}
