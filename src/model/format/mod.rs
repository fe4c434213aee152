//! Formats of blocks' matrices. A format has a file, which owns what it takes to train and to sample in it: what it serves, its bytes, how
//! weights are prepared when an engine wakes, products and their gradients. All else asks the matrix or the format. A tensor-parallel
//! slice is one of the plain matrix, and prepared as a matrix of its own.
//!
//! | file | what it is |
//! |---|---|
//! | `choice` | which format a key asks for, and what it says where one does not serve |
//! | `plain` | rows in the type of the network |
//! | `exact` | the same rows, in products of which a row has the same bits in the engine and in training |
//! | `fp8` | rows of e4m3 with a scale each |
//! | `nf4` | 4 bits a weight, for blocks that are stored |
//! | `rows`, `step` | factors of products; those of a step on a GPU |
//! | `stored` | frozen blocks that are stored in one format and multiplied in another |

mod choice;
mod exact;
mod fp8;
mod nf4;
mod plain;
mod rows;
mod step;
mod stored;
#[cfg(test)]
mod tests;

use std::fmt::Debug;

use tch::{Device, Kind, Tensor};

pub use self::exact::{Exact, bytes_of_parts, trial_bytes};
pub use self::fp8::Fp8;
pub use self::nf4::Nf4;
pub use self::plain::Plain;
pub use self::rows::{ActivationGradient, Piece, Rows};
pub use self::step::{OwnProducts, StepCost, StepExperts, StepOutput, StepProducts, StepRows};
pub use self::stored::{BaseRounding, Encoded, Encoder, StoredBlock, StoredFormat};
use super::lora::Lora;
use super::spec::{ElementBytes, ModelSpec};
use crate::cuda::kernels::{self, NormedRows, ScaledRows};
use crate::error::Result;
use crate::ops::grouped::Dispatch;
use crate::ops::linear::{self, Onto};
use crate::ops::rms_norm::NormOptions;
use crate::ops::swiglu::{Activation, GateUp, SwigluGradient};

/// A use of a format.
#[derive(Debug, Clone, Copy)]
pub enum Use {
    /// Training.
    Training,
    /// An engine.
    Engine {
        /// Ranks that share its matrices.
        tp_size: usize,
    },
}

/// Shape and type of a tensor.
pub type Section = (Vec<i64>, Kind);

/// How products of blocks' matrices are made: of which rows, by which operations, in how many bytes. What a format leaves out is done as
/// plain rows have it.
pub trait Format: Debug + Sync {
    /// The name, as keys have it.
    fn name(&self) -> &'static str;

    /// The configuration key that asks for it.
    fn key(&self, of: Use) -> &'static str {
        match of {
            Use::Training => "mixed_precision",
            Use::Engine { .. } => "rollout_quantization",
        }
    }

    /// Whether it rounds what products read.
    fn rounds(&self) -> bool {
        true
    }

    /// Whether a row's bits depend on nothing but the row and the weights: all else of a forward is then computed so, too.
    fn is_exact(&self) -> bool {
        false
    }

    /// The reason why it does not serve matrices of a model's blocks, on a GPU or not; none if it does. Kinds of models are in the table of what
    /// goes together.
    fn refusal(&self, of: Use, spec: &ModelSpec, on_gpu: bool) -> Option<String>;

    /// The reason why a device does not multiply in it; none if it does. A CPU simulates it.
    ///
    /// # Errors
    /// [`crate::Error::Environment`] without the GPU.
    fn device_refusal(&self, _device: Device) -> Result<Option<String>> {
        Ok(None)
    }

    /// Bytes of an element in training, from those where nothing is rounded; adapters read rows as they are, too.
    fn element_bytes(&self, plain: ElementBytes, _adapts: bool) -> ElementBytes {
        plain
    }

    /// Bytes of the largest matrix as training has it beside the weight, for a product.
    fn matrix_bytes(&self, _spec: &ModelSpec) -> usize {
        0
    }

    /// Bytes of a GPU that training's products take for themselves, beside those of libtorch.
    fn workspace_bytes(&self, _spec: &ModelSpec) -> usize {
        0
    }

    /// Values and scales of rows [R, K] that are rounded.
    fn sections(&self, _size: [i64; 2]) -> [Section; 2] {
        [(vec![0], Kind::Uint8), (vec![0], Kind::Float)]
    }

    /// Rounds rows [R, K], of a weight that an engine multiplies by, into memory of [`Format::sections`].
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for a matrix that the kernel of a GPU does not take; [`crate::Error::OutOfMemory`].
    fn round(&self, _x: &Tensor, _to: &ScaledRows) -> Result<()> {
        Ok(())
    }

    /// The rows as products read them, for several that read the same.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn rows(&self, x: &Rows) -> Result<Rows> {
        Ok(Rows::Plain(x.plain().shallow_clone()))
    }

    /// x w^T + bias. [T, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn forward(&self, x: &Rows /* [T, K] */, w: &Piece) -> Result<Tensor>;

    /// residual + x w^T, of the residual's kind. [T, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn forward_onto(
        &self,
        residual: &Tensor, /* [T, N] */
        x: &Rows,          /* [T, K] */
        w: &Piece,
    ) -> Result<Tensor> {
        Ok(residual.f_add(&self.forward(x, w)?)?)
    }

    /// y + (x A^T) B^T of an adapter, in y's memory where it may be. [T, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn adapt(&self, x: &Rows /* [T, K] */, lora: &Lora, y: Tensor /* [T, N] */) -> Result<Tensor> {
        lora.add(x.plain(), y)
    }

    /// x w^T of a matrix that has gate and up.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn gate_up(&self, x: &Rows /* [T, D] */, w: &Piece) -> Result<GateUp> {
        GateUp::of_pairs(self.forward(x, w)?)
    }

    /// x w^T of rows that are sorted by expert, each with the matrix of its own. [R, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn experts_forward(&self, dispatch: &Dispatch, x: &Rows /* [R, K] */, w: &Piece) -> Result<Tensor> {
        dispatch.forward(x.plain(), &w.weight)
    }

    /// [`Format::experts_forward`] of matrices that have gate and up.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn experts_gate_up(&self, dispatch: &Dispatch, x: &Rows /* [R, D] */, w: &Piece) -> Result<GateUp> {
        dispatch.gate_up(x.plain(), &w.weight)
    }

    /// Each sorted row's copy of what its token has, as products of experts read it; as it is, too, where something else does (`is_read`). [R, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn experts_rows(&self, dispatch: &Dispatch, x: &Tensor /* [T, N] */, _is_read: bool) -> Result<Rows> {
        Ok(dispatch.scatter(x)?.into())
    }

    /// dx = dy w of rows that are sorted by expert. [R, K]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn experts_backward_input(&self, dispatch: &Dispatch, dy: &Rows /* [R, N] */, w: &Piece) -> Result<Tensor> {
        dispatch.backward_input(dy.plain(), &w.weight)
    }

    /// [`Format::experts_backward_input`] of matrices that have gate and up.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn experts_gate_up_backward(&self, dispatch: &Dispatch, d: &GateUp /* [R, I] */, w: &Piece) -> Result<Tensor> {
        dispatch.gate_up_backward_input(d, &w.weight)
    }

    /// dx = dy w. [T, K]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn backward_input(&self, dy: &Tensor /* [T, N] */, w: &Piece) -> Result<Tensor>;

    /// dx += dy w.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn accumulate_input(
        &self,
        dy: &Tensor, /* [T, N] */
        w: &Piece,
        dx: &mut Tensor, /* [T, K] */
    ) -> Result<()> {
        let _ = dx.f_add_(&self.backward_input(dy, w)?)?;
        Ok(())
    }

    /// dx of [`Format::gate_up`], whose gradients [`Format::activate_backward`] may have rounded. [T, D]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn gate_up_backward(&self, d: &GateUp, _rounded: Option<&ScaledRows>, w: &Piece) -> Result<Tensor> {
        self.backward_input(&d.pairs()?, w)
    }

    /// dw [N, K] = dy^T x, or dw += dy^T x, of dy [T, N] and x [T, K].
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, dw: &mut Tensor, onto: Onto) -> Result<()> {
        linear::weight_gradient(dy, x, dw, onto)
    }

    /// [`Format::weight_gradient`] of [`Format::gate_up`].
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], as of all products.
    fn gate_up_weight_gradient(&self, d: &GateUp, x: &Tensor, dw: &mut Tensor, onto: Onto) -> Result<()> {
        d.weight_gradient(x, dw, onto)
    }

    /// Normalised rows for products; as they are, too, where something else reads them (`is_read`). [T, D]
    ///
    /// # Errors
    /// The errors of [`NormOptions::forward`].
    fn norm(&self, norm: NormOptions, x: &Tensor, weight: &Tensor, _is_read: bool) -> Result<Rows> {
        Ok(norm.forward(x, weight)?.0.into())
    }

    /// activation(gate) * up for a product; as it is, too, where something else reads it (`is_read`). [T, F]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn activate(&self, activation: Activation, gate_up: &GateUp, _is_read: bool) -> Result<Rows> {
        Ok(gate_up.activate(activation)?.into())
    }

    /// Goes back through activation(gate) * up, and rounds the gradients for a product where a kernel does both.
    ///
    /// # Errors
    /// The errors of [`GateUp::backward`].
    fn activate_backward(&self, activation: Activation, gate_up: GateUp, d_act: &Tensor) -> Result<ActivationGradient> {
        let SwigluGradient { d_gate_up, act } = gate_up.backward(activation, d_act)?;
        Ok(ActivationGradient { d_gate_up, act, rounded: None })
    }

    /// The cost of products in a step on a GPU, where an element of a plain weight has `plain_bytes`.
    fn step_cost(&self, plain_bytes: f64) -> StepCost {
        StepCost { element_bytes: plain_bytes, speedup: 1.0 }
    }

    /// The form in which a step's sums over the group leave the rows that the next product reads; as they are, too, where something else
    /// reads them.
    fn step_sums(&self, _is_read: bool) -> NormedRows {
        NormedRows::Plain
    }

    /// Rounds a step's rows for the product that reads them next.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for rows that do not fit, as of all of a step; [`crate::Error::Cuda`].
    fn step_round(&self, _x: &Tensor /* [T, K] */, _to: &ScaledRows) -> Result<()> {
        Ok(())
    }

    /// In a step x += delta, out = its norm.
    ///
    /// # Errors
    /// The errors of [`Format::step_round`].
    fn step_norm(
        &self,
        x: &mut Tensor,         // [T, D]
        delta: Option<&Tensor>, // [T, D]
        weight: &Tensor,        // [D]
        out: StepOutput<'_>,    // [T, D]
        norm: NormOptions,
    ) -> Result<()> {
        kernels::add_rms_norm(x, delta, weight, out.plain, norm)
    }

    /// In a step out = activation(gate) * up.
    ///
    /// # Errors
    /// The errors of [`Format::step_round`].
    fn step_activate(
        &self,
        activation: Activation,
        gate_up: &Tensor,    // [T, 2 F]
        out: StepOutput<'_>, // [T, F]
    ) -> Result<()> {
        kernels::silu_mul(activation, gate_up, out.plain)
    }

    /// In a step act = silu(gate) * up of x w^T, by the own kernels that have SwiGLU within.
    ///
    /// # Errors
    /// The errors of [`Format::step_round`].
    fn step_gate_up(
        &self,
        own: OwnProducts,
        x: StepRows<'_>,
        w: &Piece,
        act: &mut Tensor, /* [T, F] */
    ) -> Result<()> {
        match own {
            OwnProducts::All => kernels::product_silu_mul(x.plain, &w.weight, act),
            _ => kernels::gate_up(x.plain, &w.weight, act),
        }
    }

    /// In a step act = silu(gate) * up of x w^T, or with biases the clamped SwiGLU, of each sorted row's token with the weight of its expert.
    ///
    /// # Errors
    /// The errors of [`Format::step_round`].
    fn step_experts_gate_up(
        &self,
        by: StepExperts<'_>,
        x: StepRows<'_>, // [T, D]
        w: &Piece,       // [E, 2 I, D]
        act: &Tensor,    // [T k, I]
    ) -> Result<()> {
        match &w.bias {
            Some(bias) => kernels::experts_gate_up_clamped(by.tile, x.plain, &w.weight, bias, by.routed, act),
            None => kernels::experts_gate_up(by.tile, x.plain, &w.weight, by.adapter, by.routed, act),
        }
    }

    /// In a step out = act w^T of each sorted row with its expert's weight, at the place of its choice. Formats that round do so within.
    ///
    /// # Errors
    /// The errors of [`Format::step_round`].
    fn step_experts_down(
        &self,
        by: StepExperts<'_>,
        act: StepRows<'_>, // [T k, I]
        w: &Piece,         // [E, D, I]
        out: &Tensor,      // [T k, D]
    ) -> Result<()> {
        match &w.bias {
            Some(bias) => kernels::experts_down_biased(by.tile, act.plain, &w.weight, bias, by.routed, out),
            None => kernels::experts_down(by.tile, act.plain, &w.weight, by.adapter, by.routed, out),
        }
    }

    /// In a step out = x w^T + bias.
    ///
    /// # Errors
    /// The errors of [`Format::step_round`].
    fn step_product(
        &self,
        by: StepProducts<'_>,
        x: StepRows<'_>,
        w: &Piece,
        out: &Tensor, /* [T, N] */
    ) -> Result<()> {
        by.plain(x.plain, &w.weight, w.bias.as_ref(), out)
    }
}

impl PartialEq for dyn Format {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}
