//! Operands and results of GEMMs in an engine step on a GPU. No GEMM allocates memory, so a step can be captured in a CUDA graph; all are queued on
//! the engine's stream.

use tch::{Kind, Tensor};

use crate::cuda::kernels::{self, ExpertAdapter, ExpertTile, RoutedTokens, ScaledRows};
use crate::cuda::{Products, Tuning};
use crate::error::Result;
use crate::ops::rms_norm::NormOptions;
use crate::ops::swiglu::Activation;

/// The cost of a step's GEMMs in a format.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepCost {
    /// Bytes per element of a weight.
    pub weight_bytes: f64,
    /// Bytes per element of the rows that are multiplied, and of the result.
    pub row_bytes: f64,
    /// Throughput in operations per second, relative to plain GEMMs.
    pub speedup: f64,
}

/// Which GEMMs of blocks use the crate's own kernels, because cuBLASLt is slower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnProducts {
    /// No GEMM uses an own kernel.
    None,
    /// Only the gate and up GEMM, fused with SwiGLU (`kernels::gate_up`).
    GateUp,
    /// All GEMMs except gate and up that `kernels::wide_product_serves` supports.
    Wide,
    /// The union of [`OwnProducts::GateUp`] and [`OwnProducts::Wide`].
    WideAndGateUp,
    /// All GEMMs that `kernels::product_serves` supports: those of few rows, with gate and up fused with SwiGLU.
    FewRows,
}

/// The kernels and the library that compute a step's GEMMs.
#[derive(Debug, Clone, Copy)]
pub struct StepProducts<'a> {
    /// Which GEMMs use own kernels.
    pub own: OwnProducts,
    /// cuBLASLt, for all other GEMMs.
    pub products: &'a Products,
    /// How the own kernels were chosen.
    pub tuning: Tuning,
}

impl StepProducts<'_> {
    /// Computes out = x w^T + bias with unquantized operands.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for tensors that do not fit; [`Error::Cuda`](crate::Error::Cuda).
    pub fn plain(
        self,
        x: &Tensor,            // [T, K]
        w: &Tensor,            // [N, K]
        bias: Option<&Tensor>, // [N]
        out: &Tensor,          // [T, N]
    ) -> Result<()> {
        match self.own {
            OwnProducts::FewRows if kernels::product_takes(x, w, bias, out)? => kernels::product(x, w, bias, out),
            _ => self.products.run(x, &w.tr(), bias, out, 0.0, self.tuning),
        }
    }
}

/// The sizes of a step's GEMMs with one layer's experts.
#[derive(Debug, Clone, Copy)]
pub struct ExpertStep {
    /// Number of tokens.
    pub tokens: usize,
    /// Number of experts per token.
    pub choices: usize,
    /// Number of experts in the layer.
    pub experts: usize,
    /// Elements in a row of an expert's down matrix.
    pub width: usize,
    /// Type of the weights.
    pub kind: Kind,
    /// The GPU.
    pub gpu: usize,
}

impl ExpertStep {
    /// The tiles for gate and up and for down, of plain weights or of those in FP8. Only the former have other tiles for narrow slices.
    pub(super) fn plain_tiles(self, is_plain: bool) -> Result<[ExpertTile; 2]> {
        let Self { tokens, choices, experts, width, kind, gpu } = self;
        let tile = ExpertTile::of(tokens, choices, experts, kind, gpu)?;
        Ok([tile, if is_plain { tile.for_down(tokens, choices, experts, width, gpu)? } else { tile }])
    }
}

/// How a step's rows are sorted by expert, and the adapter of the experts' matrix.
#[derive(Debug, Clone, Copy)]
pub struct StepExperts<'a> {
    /// The tile size with which the kernels divide the work.
    pub tile: ExpertTile,
    /// The adapters' inner products x A^T, and their matrices B.
    pub adapter: Option<ExpertAdapter<'a>>,
    /// The tokens' rows, sorted by expert.
    pub routed: &'a RoutedTokens,
}

/// Input rows of a GEMM in a step.
#[derive(Debug)]
pub struct StepRows<'a> {
    /// The unquantized rows, if a previous operation wrote them.
    pub plain: &'a Tensor, // [T, K]
    /// The quantized rows, in a format that quantizes.
    pub rounded: Option<ScaledRows>, // [T, K]
}

impl StepRows<'_> {
    /// The quantized rows. Panics in a format that does not quantize.
    pub(super) fn rounded(&self) -> &ScaledRows {
        self.rounded.as_ref().expect("rows of a format that rounds")
    }
}

/// Output buffers for rows that a GEMM in a step reads.
#[derive(Debug)]
pub struct StepOutput<'a> {
    /// Buffer for the unquantized rows.
    pub plain: &'a mut Tensor, // [T, K]
    /// Buffer for the quantized rows, in a format that quantizes.
    pub rounded: Option<ScaledRows>, // [T, K]
    /// Whether unquantized rows must be written in addition to quantized ones.
    pub is_read: bool,
}

impl StepOutput<'_> {
    /// Computes x += delta and writes norm(x), quantized if there is a buffer for that.
    pub(super) fn norm(
        self,
        x: &mut Tensor,         // [T, D]
        delta: Option<&Tensor>, // [T, D]
        weight: &Tensor,        // [D]
        norm: NormOptions,
    ) -> Result<()> {
        match self.rounded {
            Some(to) => kernels::add_rms_norm_8bit(x, delta, weight, self.is_read.then_some(self.plain), &to, norm),
            None => kernels::add_rms_norm(x, delta, weight, self.plain, norm),
        }
    }

    /// Writes activation(gate) * up, quantized if there is a buffer for that.
    pub(super) fn activate(self, activation: Activation, gate_up: &Tensor /* [T, 2 F] */) -> Result<()> {
        match self.rounded {
            Some(to) => kernels::silu_mul_8bit(activation, gate_up, self.is_read.then_some(self.plain), &to),
            None => kernels::silu_mul(activation, gate_up, self.plain),
        }
    }
}
