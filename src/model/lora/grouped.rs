//! The product of experts' adapters, beside that of their matrices: every row with the adapter of its expert.
//!
//! R rows of a dispatch, k columns of an expert's expanded B.

use tch::Tensor;

use super::layout::Lora;
use crate::error::Result;
use crate::ops::grouped::Dispatch;
use crate::ops::swiglu::GateUp;

impl Lora {
    /// y + (x A^T) B^T, in y's memory.
    pub(in crate::model) fn add_rows(
        &self,
        dispatch: &Dispatch,
        x: &Tensor,    // [R, K]
        mut y: Tensor, // [R, N]
    ) -> Result<Tensor> {
        dispatch.accumulate(&self.low_of_rows(dispatch, x)?, &self.b, &mut y)?;
        Ok(y)
    }

    /// Gate and up with the adapters' part, in their memory.
    pub(in crate::model) fn add_gate_up(
        &self,
        dispatch: &Dispatch,
        x: &Tensor, // [R, D]
        mut gate_up: GateUp,
    ) -> Result<GateUp> {
        dispatch.accumulate_into_gate_up(&self.low_of_rows(dispatch, x)?, &self.b, &mut gate_up)?;
        Ok(gate_up)
    }

    /// Adds to the gradient of A and of the expanded B, for rows whose products have the gradient `dy`.
    pub(in crate::model) fn accumulate_rows(
        &self,
        dispatch: &Dispatch,
        (dy, d_low): (&Tensor, &Tensor), // [R, N], [R, k]
        x: &Tensor,                      // [R, K]
        gradient: &mut Lora,
    ) -> Result<()> {
        dispatch.accumulate_weight(dy, &self.low_of_rows(dispatch, x)?, &mut gradient.b)?;
        dispatch.accumulate_weight(d_low, x, &mut gradient.a)
    }

    /// Adds to the gradients of gate's and up's input, of A and of the expanded B.
    pub(in crate::model) fn gate_up_backward(
        &self,
        dispatch: &Dispatch,
        d: &GateUp,
        x: &Tensor,      // [R, D]
        dx: &mut Tensor, // [R, D]
        gradient: &mut Lora,
    ) -> Result<()> {
        dispatch.accumulate_gate_up(d, &self.low_of_rows(dispatch, x)?, &mut gradient.b)?;
        let d_low = dispatch.gate_up_backward_input(d, &self.b)?; // [R, k]
        dispatch.accumulate_weight(&d_low, x, &mut gradient.a)?;
        dispatch.accumulate_input(&d_low, &self.a, dx)
    }

    /// x A^T of each row's expert, zero beside adapters that are not its token's. [R, k]
    fn low_of_rows(&self, dispatch: &Dispatch, x: &Tensor /* [R, K] */) -> Result<Tensor> {
        let mut low = dispatch.forward(x, &self.a)?;
        if let Some(others) = &self.others {
            let _ = low.f_masked_fill_(&dispatch.scatter(others)?, 0.0)?;
        }
        Ok(low)
    }
}
