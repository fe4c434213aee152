//! The dense MLP: D(silu(G x) * (U x)).
//!
//! T tokens, D hidden, F its width; in a tensor-parallel slice this rank's share.

use tch::Tensor;

use super::linear::{Linear, LinearSpec, Matrix, Split};
use super::{BlockContext, ElementBytes, Norms};
use crate::config::TargetModule::{DownProj, GateProj, UpProj};
use crate::error::Result;
use crate::model::params::UnitLayout;
use crate::ops::linear;
use crate::ops::swiglu::GateUp;

/// The shape of a dense MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DenseSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width between its products.
    pub intermediate: usize,
}

impl DenseSpec {
    /// The share of a rank.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        Self { intermediate: self.intermediate / tp_size, ..self }
    }

    /// Its matrices.
    pub fn linears(self) -> [LinearSpec; 2] {
        let gate_up = LinearSpec {
            matrix: Matrix::GateUp,
            groups: self.intermediate,
            inner: 1,
            columns: self.hidden,
            projections: vec![(GateProj, 1), (UpProj, 1)],
            split: Split::Rows,
            bias: None,
        };
        let down = LinearSpec {
            matrix: Matrix::Down,
            groups: 1,
            inner: self.hidden,
            columns: self.intermediate,
            projections: vec![(DownProj, 1)],
            split: Split::Columns,
            bias: None,
        };
        [gate_up, down]
    }

    /// Bytes a token of gate and up, which backward reads.
    pub(super) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        2 * bytes.narrow * self.intermediate
    }

    /// Bytes a token of the fullest moment of forward: gate and up, and the activation.
    pub(super) fn forward_bytes(self, bytes: ElementBytes) -> usize {
        3 * bytes.narrow * self.intermediate
    }

    /// Bytes a token of the fullest moment of backward: the gradient that comes in and the normalised rows; gate and up, which become
    /// their gradients in place, unless they were kept; the activation and its gradient. An adapter with dropout drops a copy of
    /// the activation, and its own part of the gradient comes in two tensors more.
    pub(super) fn backward_bytes(self, bytes: ElementBytes, keeps_gate_up: bool, drops: bool) -> usize {
        let row = bytes.narrow * self.intermediate;
        let gate_up = if keeps_gate_up { 0 } else { 2 * row };
        let dropped = if drops { 3 * row } else { 0 };
        2 * bytes.narrow * self.hidden + gate_up + 2 * row + dropped
    }
}

/// Parameters of a dense MLP.
#[derive(Debug, Default)]
pub struct DenseParams {
    /// Around it.
    pub norms: Norms,
    /// Gate and up, rows g0 u0 g1 u1 ..
    pub gate_up: Linear, // [2 F, D]
    /// Output.
    pub down: Linear, // [D, F]
}

impl DenseParams {
    pub(super) fn view(spec: DenseSpec, norms: Norms, layout: &UnitLayout, flat: &Tensor) -> Self {
        let [gate_up, down] = spec.linears().map(|linear| Linear::view(&linear, layout, flat));
        Self { norms, gate_up, down }
    }

    pub(super) fn tp_slice(&self, spec: DenseSpec, tp_rank: usize, tp_size: usize) -> Result<Self> {
        let [gate_up, down] = spec.linears();
        Ok(Self {
            norms: self.norms.shallow_clone(),
            gate_up: self.gate_up.tp_slice(&gate_up, tp_rank, tp_size)?,
            down: self.down.tp_slice(&down, tp_rank, tp_size)?,
        })
    }

    pub(super) fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self { norms: self.norms.try_map(f)?, gate_up: self.gate_up.try_map(f)?, down: self.down.try_map(f)? })
    }

    /// (the block's output [T, D]; gate and up; the MLP's output before the norm behind it, if there is one).
    pub(super) fn forward(&self, ctx: &BlockContext<'_>, h: &Tensor) -> Result<(Tensor, GateUp, Option<Tensor>)> {
        let gate_up = self.project(&self.norms.enter(ctx, h, self.gate_up.kind())?.0)?;
        let (y, output) = self.norms.leave(ctx, &self.down, &gate_up.activate()?, h)?;
        Ok((y, gate_up, output))
    }

    /// dh, the gradient of the residual stream before it, from that of the block's output. What is not kept is computed again.
    pub(super) fn backward(
        &self,
        ctx: &BlockContext<'_>,
        dy: &Tensor, // [T, D]
        h: &Tensor,  // [T, D]
        (gate_up, output): (Option<GateUp>, Option<Tensor>),
        grads: &mut DenseParams,
    ) -> Result<Tensor> {
        let (normed, rstd) = self.norms.enter(ctx, h, self.gate_up.kind())?;
        let gate_up = gate_up.map_or_else(|| self.project(&normed), Ok)?;
        let output = match output {
            None if self.norms.post.is_some() => Some(self.down.forward(&gate_up.activate()?)?),
            kept => kept,
        };
        let d_output = self.norms.leave_backward(ctx, dy, output.as_ref(), &grads.norms)?;
        drop(output);
        let d_gate_up = match grads.down.pieces.first_mut() {
            Some(piece) => {
                let (d_gate_up, act) = gate_up.backward(&linear::backward_input(&d_output, self.down.weight())?)?;
                linear::accumulate_weight(&d_output, &act, &mut piece.weight)?;
                d_gate_up
            }
            // An adapter adds to the activation's gradient, and needs the activation for that.
            None => {
                let d_act = self.down.backward(&d_output, &gate_up.activate()?, &mut grads.down)?;
                gate_up.backward(&d_act)?.0
            }
        };
        let d_normed = self.project_backward(&d_gate_up, &normed, &mut grads.gate_up)?;
        self.norms.enter_backward(&d_normed, dy, h, rstd.as_ref(), &grads.norms)
    }

    /// Gate and up of x, with the adapter's part.
    fn project(&self, x: &Tensor /* [T, D] */) -> Result<GateUp> {
        Ok(match (GateUp::project(x, self.gate_up.weight())?, &self.gate_up.lora) {
            (gate_up, None) => gate_up,
            (GateUp::Interleaved(pairs), Some(lora)) => GateUp::Interleaved(lora.add(x, pairs)?),
            (GateUp::Split { gate, up }, Some(lora)) => {
                let [lora_gate, lora_up] = lora.every_second_row();
                GateUp::Split { gate: lora_gate.add(x, gate)?, up: lora_up.add(x, up)? }
            }
        })
    }

    /// dx of [`DenseParams::project`]; the gradient of the weight, or of A and B, is added to `grads`.
    fn project_backward(&self, d: &GateUp, x: &Tensor /* [T, D] */, grads: &mut Linear) -> Result<Tensor> {
        let mut dx = d.backward_input(self.gate_up.weight())?;
        if let Some(piece) = grads.pieces.first_mut() {
            d.accumulate_weight(x, &mut piece.weight)?;
        }
        match (&self.gate_up.lora, &mut grads.lora, d) {
            (Some(lora), Some(gradient), GateUp::Interleaved(d)) => lora.backward(d, x, &mut dx, gradient)?,
            (Some(lora), Some(gradient), GateUp::Split { gate, up }) => {
                let (loras, gradients) = (lora.every_second_row(), gradient.every_second_row());
                for ((d, lora), mut gradient) in [gate, up].into_iter().zip(&loras).zip(gradients) {
                    lora.backward(d, x, &mut dx, &mut gradient)?;
                }
            }
            _ => {}
        }
        Ok(dx) // [T, D]
    }
}
