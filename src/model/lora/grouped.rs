//! GEMMs of the experts' adapters: every row uses the adapter of its expert.
//!
//! R rows of a dispatch, k columns of an expert's expanded B.

use tch::Tensor;

use super::layout::Lora;
use crate::error::Result;
use crate::ops::grouped::Dispatch;
use crate::ops::linear::Onto;
use crate::ops::swiglu::GateUp;

impl Lora {
    /// Adds the adapters' part to y in place: y + (x A^T) B^T.
    pub(in crate::model) fn add_rows(
        &self,
        dispatch: &Dispatch,
        x: &Tensor,    // [R, K]
        mut y: Tensor, // [R, N]
    ) -> Result<Tensor> {
        dispatch.accumulate(&self.low_of_rows(dispatch, x)?, &self.b, &mut y)?;
        Ok(y)
    }

    /// Adds the adapters' part to gate and up in place.
    pub(in crate::model) fn add_gate_up(
        &self,
        dispatch: &Dispatch,
        x: &Tensor, // [R, D]
        mut gate_up: GateUp,
    ) -> Result<GateUp> {
        dispatch.accumulate_into_gate_up(&self.low_of_rows(dispatch, x)?, &self.b, &mut gate_up)?;
        Ok(gate_up)
    }

    /// Adds to the gradients of A and of the expanded B, given the gradient `dy` of the experts' outputs.
    pub(in crate::model) fn accumulate_rows(
        &self,
        dispatch: &Dispatch,
        (dy, d_low): (&Tensor, &Tensor), // [R, N], [R, k]
        x: &Tensor,                      // [R, K]
        gradient: &mut Lora,
    ) -> Result<()> {
        dispatch.weight_gradient(dy, &self.low_of_rows(dispatch, x)?, &mut gradient.b, Onto::Sum)?;
        dispatch.weight_gradient(d_low, x, &mut gradient.a, Onto::Sum)
    }

    /// Adds to the gradients of the input of gate and up, of A and of the expanded B.
    pub(in crate::model) fn gate_up_backward(
        &self,
        dispatch: &Dispatch,
        d: &GateUp,
        x: &Tensor,      // [R, D]
        dx: &mut Tensor, // [R, D]
        gradient: &mut Lora,
    ) -> Result<()> {
        dispatch.gate_up_weight_gradient(d, &self.low_of_rows(dispatch, x)?, &mut gradient.b, Onto::Sum)?;
        let d_low = dispatch.gate_up_backward_input(d, &self.b)?; // [R, k]
        dispatch.weight_gradient(&d_low, x, &mut gradient.a, Onto::Sum)?;
        dispatch.accumulate_input(&d_low, &self.a, dx)
    }

    /// Returns x A^T with each row's expert; zero in the columns of adapters that are not the row's own. [R, k]
    fn low_of_rows(&self, dispatch: &Dispatch, x: &Tensor /* [R, K] */) -> Result<Tensor> {
        let mut low = dispatch.forward(x, &self.a)?;
        if let Some(others) = &self.others {
            let _ = low.f_masked_fill_(&dispatch.scatter(others)?, 0.0)?;
        }
        Ok(low)
    }
}
