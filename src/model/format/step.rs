//! Factors and results of products in a step of an engine on a GPU. No product allocates, so that a step can be recorded, and all are queued
//! on the engine's stream.

use tch::Tensor;

use crate::cuda::kernels::{self, ExpertAdapter, ExpertTile, RoutedTokens, ScaledRows};
use crate::cuda::{Products, Tuning};
use crate::error::Result;

/// The cost of a step's products in a format.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepCost {
    /// Bytes of an element of a weight.
    pub element_bytes: f64,
    /// How many times as many operations a second as plain products make.
    pub speedup: f64,
}

/// Products of blocks by the crate's own kernels, where cuBLASLt's are slower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnProducts {
    /// None.
    None,
    /// Gate and up with SwiGLU, by `kernels::gate_up`.
    GateUp,
    /// All but gate and up, of those that `kernels::wide_product_serves`.
    Wide,
    /// [`OwnProducts::GateUp`] and [`OwnProducts::Wide`].
    WideAndGateUp,
    /// All, by `kernels::product`.
    All,
}

/// The kernels and the library that multiply in a step.
#[derive(Debug, Clone, Copy)]
pub struct StepProducts<'a> {
    /// The own kernels that are faster.
    pub own: OwnProducts,
    /// cuBLASLt, for products without a kernel of their own.
    pub products: &'a Products,
    /// How those were chosen.
    pub tuning: Tuning,
}

impl StepProducts<'_> {
    /// out = x w^T + bias of factors that are not rounded.
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
            OwnProducts::All => kernels::product(x, w, bias, out),
            _ => self.products.run(x, &w.tr(), bias, out, 0.0, self.tuning),
        }
    }
}

/// How a step's rows are sorted by expert, and what is beside the matrix of experts that they are multiplied with.
#[derive(Debug, Clone, Copy)]
pub struct StepExperts<'a> {
    /// How the kernels cut the work.
    pub tile: ExpertTile,
    /// The adapters' inner products and their other matrix.
    pub adapter: Option<ExpertAdapter<'a>>,
    /// The sorted rows.
    pub routed: &'a RoutedTokens,
}

/// Rows that a step's product reads.
#[derive(Debug)]
pub struct StepRows<'a> {
    /// The unrounded rows, where something has written them.
    pub plain: &'a Tensor, // [T, K]
    /// By a format that rounds.
    pub rounded: Option<ScaledRows>, // [T, K]
}

impl StepRows<'_> {
    /// The rows of a format that rounds.
    pub(super) fn rounded(&self) -> &ScaledRows {
        self.rounded.as_ref().expect("rows of a format that rounds")
    }
}

/// Where rows go that a step's product reads.
#[derive(Debug)]
pub struct StepOutput<'a> {
    /// The unrounded rows.
    pub plain: &'a mut Tensor, // [T, K]
    /// The rounded rows, of a format that rounds.
    pub rounded: Option<ScaledRows>, // [T, K]
    /// Whether a format that rounds leaves them as they are, too.
    pub is_read: bool,
}

impl<'a> StepOutput<'a> {
    /// Room for the unrounded rows, where something reads them, and for the rounded ones of a format that rounds.
    pub(super) fn parts(self) -> (Option<&'a mut Tensor>, ScaledRows) {
        (self.is_read.then_some(self.plain), self.rounded.expect("room of a format that rounds"))
    }
}
