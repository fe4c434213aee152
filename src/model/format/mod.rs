//! Number formats of blocks' matrices. Each format has a file with all that it needs: which models it supports, its bytes, how weights are prepared when
//! an engine wakes, and its GEMMs with their gradients. A tensor-parallel slice is cut from the plain matrix and prepared like a matrix of its own.
//!
//! | file | content |
//! |---|---|
//! | `choice` | which format a configuration key requests, and the refusals |
//! | `plain` | rows in the type of the network |
//! | `exact` | plain rows, in GEMMs that give a row the same bits in the engine and in training |
//! | `fp8` | e4m3 rows with one scale each |
//! | `int8` | rotated int8 rows with one scale each, for engines |
//! | `mxfp4` | 4 bits per weight for matrices of experts, for engines |
//! | `nf4` | 4 bits per weight, for stored blocks |
//! | `rows`, `step` | operands of GEMMs; those of an engine step on a GPU |
//! | `uses` | training and engines |
//! | `stored` | frozen blocks that are stored in one format and computed with in another |

mod choice;
mod exact;
mod fp8;
mod int8;
mod mxfp4;
mod nf4;
mod plain;
mod rows;
mod step;
mod stored;
#[cfg(test)]
mod tests;
mod uses;

use std::fmt::Debug;

use tch::{Device, Kind, Tensor};

pub use self::exact::{Exact, bytes_of_parts, trial_bytes};
pub use self::fp8::Fp8;
pub use self::int8::Int8;
pub use self::mxfp4::Mxfp4;
pub use self::nf4::Nf4;
pub use self::plain::Plain;
pub use self::rows::{ActivationGradient, Piece, Rows};
pub use self::step::{ExpertStep, OwnProducts, StepCost, StepExperts, StepOutput, StepProducts, StepRows};
pub use self::stored::{BaseRounding, Encoded, Encoder, StoredBlock, StoredFormat};
pub use self::uses::Use;
use super::lora::Lora;
use super::spec::{ElementBytes, Matrix, ModelSpec};
use crate::cuda::kernels::{self, ExpertTile, NormedRows, ScaledRows};
use crate::error::Result;
use crate::ops::grouped::Dispatch;
use crate::ops::linear::{self, Onto};
use crate::ops::rms_norm::NormOptions;
use crate::ops::swiglu::{Activation, GateUp, SwigluGradient};

/// Shape and type of a tensor.
pub type Section = (Vec<i64>, Kind);

/// How the GEMMs of blocks' matrices are computed: their operands, kernels and memory. The default methods are those of the plain format.
pub trait Format: Debug + Sync {
    /// The format's name, as used in configuration values.
    fn name(&self) -> &'static str;

    /// The configuration key that selects the format.
    fn key(&self, of: Use) -> &'static str {
        match of {
            Use::Training => "mixed_precision",
            Use::Engine { .. } => "rollout_quantization",
        }
    }

    /// Whether the format quantizes the inputs of GEMMs.
    fn rounds(&self) -> bool {
        true
    }

    /// Whether engines keep a quantized copy of a matrix, or of all experts' matrices of this name, made at every wake.
    fn copies(&self, matrix: Matrix, _of_experts: bool) -> bool {
        self.rounds() && matrix.is_rounded()
    }

    /// Whether an engine's experts may have adapters.
    fn adapts_experts(&self) -> bool {
        true
    }

    /// Whether the bits of a row's result depend only on the row and the weights. If so, the whole forward is computed that way.
    fn is_exact(&self) -> bool {
        false
    }

    /// Whether an engine's GEMMs are the crate's own kernels alone, in which a row's bits do not depend on the number of rows.
    fn has_own_products(&self) -> bool {
        false
    }

    /// The reason why the format does not support a model's blocks, on a GPU or a CPU; `None` if it does. Exclusions of kinds of models are in the
    /// table of combinations.
    fn refusal(&self, of: Use, spec: &ModelSpec, on_gpu: bool) -> Option<String>;

    /// The reason why a device cannot compute in the format; `None` if it can. A CPU simulates the format.
    ///
    /// # Errors
    /// [`crate::Error::Environment`] without the GPU.
    fn device_refusal(&self, _device: Device) -> Result<Option<String>> {
        Ok(None)
    }

    /// Bytes per element in training, given those without quantization. Adapters also read unquantized rows.
    fn element_bytes(&self, plain: ElementBytes, _adapts: bool) -> ElementBytes {
        plain
    }

    /// Bytes of the quantized copy that training makes of the largest matrix for a GEMM.
    fn matrix_bytes(&self, _spec: &ModelSpec) -> usize {
        0
    }

    /// GPU memory in bytes that training's GEMMs use in addition to libtorch's.
    fn workspace_bytes(&self, _spec: &ModelSpec) -> usize {
        0
    }

    /// Shapes and types of the values and of the scales of a quantized matrix [N, K], or of matrices [E, N, K].
    fn sections(&self, _size: &[i64]) -> [Section; 2] {
        [(vec![0], Kind::Uint8), (vec![0], Kind::Float)]
    }

    /// Quantizes an engine's weight [N, K] or [E, N, K] into memory as described by [`Format::sections`].
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for a matrix that the GPU kernel does not support; [`crate::Error::OutOfMemory`].
    fn round(&self, _x: &Tensor, _to: &ScaledRows) -> Result<()> {
        Ok(())
    }

    /// Converts rows once into the form that GEMMs read, for several GEMMs with the same input.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn rows(&self, x: &Rows) -> Result<Rows> {
        Ok(Rows::Plain(x.plain().shallow_clone()))
    }

    /// Returns x w^T + bias. [T, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn forward(&self, x: &Rows /* [T, K] */, w: &Piece) -> Result<Tensor>;

    /// Returns residual + x w^T, in the residual's type. [T, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn forward_onto(
        &self,
        residual: &Tensor, /* [T, N] */
        x: &Rows,          /* [T, K] */
        w: &Piece,
    ) -> Result<Tensor> {
        Ok(residual.f_add(&self.forward(x, w)?)?)
    }

    /// Returns y + (x A^T) B^T for an adapter, in y's memory if possible. [T, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn adapt(&self, x: &Rows /* [T, K] */, lora: &Lora, y: Tensor /* [T, N] */) -> Result<Tensor> {
        lora.add(x.plain(), y)
    }

    /// Returns x w^T for the fused gate and up matrix.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn gate_up(&self, x: &Rows /* [T, D] */, w: &Piece) -> Result<GateUp> {
        GateUp::of_pairs(self.forward(x, w)?)
    }

    /// Returns x w^T for rows that are sorted by expert, each with its own expert's matrix. [R, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn experts_forward(&self, dispatch: &Dispatch, x: &Rows /* [R, K] */, w: &Piece) -> Result<Tensor> {
        dispatch.forward(x.plain(), &w.weight)
    }

    /// Returns x w^T like [`Format::experts_forward`], for the fused gate and up matrices.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn experts_gate_up(&self, dispatch: &Dispatch, x: &Rows /* [R, D] */, w: &Piece) -> Result<GateUp> {
        dispatch.gate_up(x.plain(), &w.weight)
    }

    /// Copies each token's values to its sorted rows, in the form that the experts' GEMMs read. If `is_read` is set, an unquantized copy is kept for
    /// other readers. [R, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn experts_rows(&self, dispatch: &Dispatch, x: &Tensor /* [T, N] */, _is_read: bool) -> Result<Rows> {
        Ok(dispatch.scatter(x)?.into())
    }

    /// Returns dx = dy w. [T, K]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn backward_input(&self, dy: &Tensor /* [T, N] */, w: &Piece) -> Result<Tensor>;

    /// Adds to dx: dx += dy w.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn accumulate_input(
        &self,
        dy: &Tensor, /* [T, N] */
        w: &Piece,
        dx: &mut Tensor, /* [T, K] */
    ) -> Result<()> {
        let _ = dx.f_add_(&self.backward_input(dy, w)?)?;
        Ok(())
    }

    /// Returns dx of [`Format::gate_up`]. [`Format::activate_backward`] may have quantized the gradients `d` already. [T, D]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn gate_up_backward(&self, d: &GateUp, _rounded: Option<&ScaledRows>, w: &Piece) -> Result<Tensor> {
        self.backward_input(&d.pairs()?, w)
    }

    /// Computes the weight gradient dw [N, K] = dy^T x, or dw += dy^T x, from dy [T, N] and x [T, K].
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, dw: &mut Tensor, onto: Onto) -> Result<()> {
        linear::weight_gradient(dy, x, dw, onto)
    }

    /// Computes the weight gradient of [`Format::gate_up`], like [`Format::weight_gradient`].
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn gate_up_weight_gradient(&self, d: &GateUp, x: &Tensor, dw: &mut Tensor, onto: Onto) -> Result<()> {
        d.weight_gradient(x, dw, onto)
    }

    /// Normalizes rows into the form that GEMMs read. If `is_read` is set, an unquantized copy is kept for other readers. [T, D]
    ///
    /// # Errors
    /// The errors of [`NormOptions::forward`].
    fn norm(&self, norm: NormOptions, x: &Tensor, weight: &Tensor, _is_read: bool) -> Result<Rows> {
        Ok(norm.forward(x, weight)?.0.into())
    }

    /// Computes activation(gate) * up in the form that a GEMM reads. If `is_read` is set, an unquantized copy is kept for other readers. [T, F]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn activate(&self, activation: Activation, gate_up: &GateUp, _is_read: bool) -> Result<Rows> {
        Ok(gate_up.activate(activation)?.into())
    }

    /// Computes the gradients of activation(gate) * up, and quantizes them for the next GEMM if one kernel can do both.
    ///
    /// # Errors
    /// The errors of [`GateUp::backward`].
    fn activate_backward(&self, activation: Activation, gate_up: GateUp, d_act: &Tensor) -> Result<ActivationGradient> {
        let SwigluGradient { d_gate_up, act } = gate_up.backward(activation, d_act)?;
        Ok(ActivationGradient { d_gate_up, act, rounded: None })
    }

    /// The cost of GEMMs in an engine step on a GPU, of experts or of other matrices, if an element of a plain weight has `plain_bytes`.
    fn step_cost(&self, plain_bytes: f64, _of_experts: bool) -> StepCost {
        StepCost { weight_bytes: plain_bytes, row_bytes: plain_bytes, speedup: 1.0 }
    }

    /// The form in which an all-reduce of an engine step leaves the rows for the next GEMM. If `is_read` is set, it also leaves unquantized rows.
    fn step_sums(&self, is_read: bool) -> NormedRows {
        let [(_, kind), _] = self.sections(&[0, 0]);
        NormedRows::new(self.rounds().then_some(kind), is_read)
    }

    /// Quantizes rows of an engine step for the GEMM that reads them next.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for rows that do not fit; [`crate::Error::Cuda`].
    fn step_round(&self, x: &Tensor /* [T, K] */, to: &ScaledRows) -> Result<()> {
        kernels::quantize_rows_of_step(x, to)
    }

    /// Computes x += delta and out = norm(x) in an engine step.
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
        out.norm(x, delta, weight, norm)
    }

    /// Computes out = activation(gate) * up in an engine step.
    ///
    /// # Errors
    /// The errors of [`Format::step_round`].
    fn step_activate(
        &self,
        activation: Activation,
        gate_up: &Tensor,    // [T, 2 F]
        out: StepOutput<'_>, // [T, F]
    ) -> Result<()> {
        out.activate(activation, gate_up)
    }

    /// Computes act = silu(gate) * up of x w^T in an engine step, by own kernels that fuse SwiGLU into the GEMM.
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
            OwnProducts::FewRows => kernels::product_silu_mul(x.plain, &w.weight, act),
            _ => kernels::gate_up(x.plain, &w.weight, act),
        }
    }

    /// The tiles for experts in an engine step on a GPU: those of gate and up, for which the router sorts, and of down.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    fn step_tiles(&self, sizes: ExpertStep) -> Result<[ExpertTile; 2]> {
        sizes.plain_tiles(!self.rounds())
    }

    /// Computes act = silu(gate) * up of x w^T, or the clamped SwiGLU with biases, in an engine step, for each sorted row with its expert's weight.
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

    /// Computes out = act w^T in an engine step, for each sorted row with its expert's weight, and writes it at the position of the token's choice.
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

    /// Computes out = x w^T + bias in an engine step.
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
