//! The products of a block with a matrix that is trained, or frozen with an adapter beside it.

use tch::Tensor;

use super::Lora;
use crate::error::Result;
use crate::ops::linear;
use crate::ops::swiglu::GateUp;

/// What a product's backward adds to beside the input's gradient.
#[derive(Debug)]
pub(in crate::model) enum Gradient<'a> {
    /// The matrix is trained. [N, K]
    Weight(&'a mut Tensor),
    /// The matrix is frozen: its adapter, if it has one, and that one's gradient.
    Adapter(Option<(&'a Lora, &'a mut Lora)>),
}

/// y + (x A^T) B^T, in y's memory, where there is an adapter.
pub(in crate::model) fn add(
    lora: Option<&Lora>,
    x: &Tensor, // [T, K]
    y: Tensor,  // [T, N]
) -> Result<Tensor> {
    match lora {
        None => Ok(y),
        Some(lora) => lora.add(x, y),
    }
}

/// dx of y = x w^T + (x A^T) B^T; the gradient of w, or of A and B, is added in place.
pub(in crate::model) fn backward(
    dy: &Tensor, // [T, N]
    x: &Tensor,  // [T, K]
    w: &Tensor,  // [N, K]
    gradient: Gradient<'_>,
) -> Result<Tensor> {
    let mut dx = linear::backward_input(dy, w)?;
    match gradient {
        Gradient::Weight(dw) => linear::accumulate_weight(dy, x, dw)?,
        Gradient::Adapter(Some((lora, gradient))) => lora.backward(dy, x, &mut dx, gradient)?,
        Gradient::Adapter(None) => {}
    }
    Ok(dx) // [T, K]
}

/// Gate and up of x, with the adapter's part.
pub(in crate::model) fn gate_up(
    lora: Option<&Lora>,
    x: &Tensor, // [T, D]
    w: &Tensor, // [2 F, D]
) -> Result<GateUp> {
    Ok(match (GateUp::project(x, w)?, lora) {
        (gate_up, None) => gate_up,
        (GateUp::Interleaved(pairs), Some(lora)) => GateUp::Interleaved(lora.add(x, pairs)?),
        (GateUp::Split { gate, up }, Some(lora)) => {
            let [lora_gate, lora_up] = lora.every_second_row();
            GateUp::Split { gate: lora_gate.add(x, gate)?, up: lora_up.add(x, up)? }
        }
    })
}

/// dx of [`gate_up`]; the gradient of w, or of A and B, is added in place.
pub(in crate::model) fn gate_up_backward(
    d: &GateUp,
    x: &Tensor, // [T, D]
    w: &Tensor, // [2 F, D]
    gradient: Gradient<'_>,
) -> Result<Tensor> {
    let mut dx = d.backward_input(w)?;
    match (gradient, d) {
        (Gradient::Weight(dw), _) => d.accumulate_weight(x, dw)?,
        (Gradient::Adapter(None), _) => {}
        (Gradient::Adapter(Some((lora, gradient))), GateUp::Interleaved(d)) => {
            lora.backward(d, x, &mut dx, gradient)?
        }
        (Gradient::Adapter(Some((lora, gradient))), GateUp::Split { gate, up }) => {
            let (loras, gradients) = (lora.every_second_row(), gradient.every_second_row());
            for ((d, lora), mut gradient) in [gate, up].into_iter().zip(&loras).zip(gradients) {
                lora.backward(d, x, &mut dx, &mut gradient)?;
            }
        }
    }
    Ok(dx) // [T, D]
}

impl Lora {
    fn add(&self, x: &Tensor, mut y: Tensor) -> Result<Tensor> {
        let low = linear::forward(&self.dropped(x)?, &self.a, None)?; // [T, k]
        linear::accumulate(&low, &self.b, &mut y)?;
        Ok(y)
    }

    /// Adds to dx and to the gradients of A and of the expanded B.
    fn backward(&self, dy: &Tensor, x: &Tensor, dx: &mut Tensor, gradient: &mut Lora) -> Result<()> {
        let x = self.dropped(x)?;
        linear::accumulate_weight(dy, &linear::forward(&x, &self.a, None)?, &mut gradient.b)?;
        let d_low = linear::backward_input(dy, &self.b)?; // [T, k]
        linear::accumulate_weight(&d_low, &x, &mut gradient.a)?;
        match &self.dropout {
            None => linear::accumulate_input(&d_low, &self.a, dx)?,
            Some(dropout) => drop(dx.f_add_(&dropout.apply(&linear::backward_input(&d_low, &self.a)?)?)?),
        }
        Ok(())
    }

    /// Beside the even rows, and beside the odd ones.
    fn every_second_row(&self) -> [Self; 2] {
        let pairs = self.b.view([-1, 2, self.b.size()[1]]);
        [0, 1].map(|row| self.with(self.a.shallow_clone(), pairs.select(1, row)))
    }

    fn dropped(&self, x: &Tensor) -> Result<Tensor> {
        self.dropout.map_or_else(|| Ok(x.shallow_clone()), |dropout| dropout.apply(x))
    }
}
