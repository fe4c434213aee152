//! The factors of a product: rows of activations and of their gradients, and neighbouring rows of a matrix.

use tch::Tensor;

use crate::cuda::kernels::ScaledRows;
use crate::ops::swiglu::GateUp;

/// Rows that a product reads.
#[derive(Debug)]
pub enum Rows {
    /// Rows that nothing has rounded.
    Plain(Tensor), // [T, K]
    /// Rounded by what made them.
    Rounded {
        /// The rows that products of a format read.
        rows: ScaledRows, // [T, K]
        /// The unrounded rows, where other products read them.
        plain: Option<Tensor>, // [T, K]
    },
}

impl Rows {
    /// How many there are.
    pub fn num_rows(&self) -> i64 {
        match self {
            Rows::Plain(rows) => rows.size()[0],
            Rows::Rounded { rows, .. } => rows.values.size()[0],
        }
    }

    /// The rows as they are.
    ///
    /// # Panics
    /// If they were made for products that read rounded ones alone.
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

/// Results of going back through activation(gate) * up.
#[derive(Debug)]
pub struct ActivationGradient {
    /// The gradients of gate and up.
    pub d_gate_up: GateUp, // [T, F] each
    /// The activation again.
    pub act: Tensor, // [T, F]
    /// The gradients as the next product reads them, where they are rounded already.
    pub rounded: Option<ScaledRows>, // [T, 2 F]
}

/// Neighbouring rows of a matrix.
#[derive(Debug)]
pub struct Piece {
    /// [N, K], or [E, N, K] of experts; strides are kept in a slice
    pub weight: Tensor,
    /// `[N]`
    pub bias: Option<Tensor>,
    /// The weight as the format of an engine has prepared it, which its products then read: forward only.
    pub prepared: Option<ScaledRows>,
}

impl Piece {
    /// Rows of weights that are read as they are.
    pub fn plain(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias, prepared: None }
    }

    /// The weight of an engine whose format rounds.
    pub(super) fn rounded(&self) -> &ScaledRows {
        self.prepared.as_ref().expect("a weight that was prepared at wake")
    }

    /// The tensor that an engine's products read.
    pub fn multiplied(&self) -> &Tensor {
        self.prepared.as_ref().map_or(&self.weight, |rounded| &rounded.values)
    }
}
