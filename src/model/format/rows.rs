//! Operands of GEMMs: rows of activations or of their gradients, and consecutive rows of a matrix.

use tch::Tensor;

use crate::cuda::kernels::ScaledRows;
use crate::ops::swiglu::GateUp;

/// Input rows of a GEMM, plain or quantized.
#[derive(Debug)]
pub enum Rows {
    /// Unquantized rows.
    Plain(Tensor), // [T, K]
    /// Rows that were quantized by the operation that computed them.
    Rounded {
        /// The quantized rows.
        rows: ScaledRows, // [T, K]
        /// The unquantized rows, if other operations read them.
        plain: Option<Tensor>, // [T, K]
    },
}

impl Rows {
    /// Number of rows.
    pub fn num_rows(&self) -> i64 {
        match self {
            Rows::Plain(rows) => rows.size()[0],
            Rows::Rounded { rows, .. } => rows.values.size()[0],
        }
    }

    /// The unquantized rows.
    ///
    /// # Panics
    /// If only quantized rows were kept.
    pub fn plain(&self) -> &Tensor {
        match self {
            Rows::Plain(rows) | Rows::Rounded { plain: Some(rows), .. } => rows,
            Rows::Rounded { plain: None, .. } => panic!("rows that were made for products of rounded ones alone"),
        }
    }
}

impl From<Tensor> for Rows {
    fn from(rows: Tensor) -> Self {
        Rows::Plain(rows)
    }
}

/// Results of the backward of activation(gate) * up.
#[derive(Debug)]
pub struct ActivationGradient {
    /// The gradients of gate and up.
    pub d_gate_up: GateUp, // [T, F] each
    /// The activation, recomputed.
    pub act: Tensor, // [T, F]
    /// The gradients of gate and up, quantized for the next GEMM, if the kernel did that.
    pub rounded: Option<ScaledRows>, // [T, 2 F]
}

/// Consecutive rows of a matrix.
#[derive(Debug)]
pub struct Piece {
    /// The weight's rows: [N, K], or [E, N, K] for experts. A slice keeps the strides of the whole matrix.
    pub weight: Tensor,
    /// The bias of these rows. `[N]`
    pub bias: Option<Tensor>,
    /// The weight as an engine's format prepared it for its GEMMs; forward only.
    pub prepared: Option<ScaledRows>,
}

impl Piece {
    /// Rows of a weight that is used unquantized.
    pub fn plain(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias, prepared: None }
    }

    /// The quantized weight of an engine.
    pub(super) fn rounded(&self) -> &ScaledRows {
        self.prepared.as_ref().expect("a weight that was prepared at wake")
    }

    /// The tensor that an engine's GEMMs read: the quantized weight if there is one.
    pub fn multiplied(&self) -> &Tensor {
        self.prepared.as_ref().map_or(&self.weight, |rounded| &rounded.values)
    }
}
