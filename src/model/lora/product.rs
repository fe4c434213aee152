//! The GEMMs of one adapter, added to those of its matrix.

use tch::Tensor;

use super::layout::Lora;
use crate::error::Result;
use crate::ops::{exact, linear};

impl Lora {
    /// Adds the adapter's part to y in place: y + (x A^T) B^T.
    pub(in crate::model) fn add(&self, x: &Tensor, mut y: Tensor) -> Result<Tensor> {
        let mut low = linear::forward(&self.dropped(x)?, &self.a, None)?; // [T, k]
        if let Some(others) = &self.others {
            let _ = low.f_masked_fill_(others, 0.0)?;
        }
        linear::accumulate(&low, &self.b, &mut y)?;
        Ok(y)
    }

    /// Adds the adapter's part to y in place, y + (x A^T) B^T, with operations that compute the same bits for a row in any batch.
    pub(in crate::model) fn add_exactly(&self, x: &Tensor, y: Tensor) -> Result<Tensor> {
        exact::adapt(&self.dropped(x)?, &self.a, &self.b, &y)?;
        Ok(y)
    }

    /// Adds the adapter's part to dx, and to the gradients of A and of the expanded B.
    pub(in crate::model) fn backward(
        &self,
        dy: &Tensor,     // [T, N]
        x: &Tensor,      // [T, K]
        dx: &mut Tensor, // [T, K]
        gradient: &mut Lora,
    ) -> Result<()> {
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

    /// Adds the adapter to the weight in place: w + B A.
    pub(in crate::model) fn merge_into(&self, weight: &mut Tensor /* [N, K], or [E, N, K] */) -> Result<()> {
        let _ = match weight.dim() {
            2 => weight.f_addmm_(&self.b, &self.a)?,
            _ => weight.f_baddbmm_(&self.b, &self.a)?,
        };
        Ok(())
    }

    /// Splits the adapter of a matrix without experts into one for its even rows and one for its odd rows.
    pub(in crate::model) fn every_second_row(&self) -> [Self; 2] {
        let pairs = self.b.view([-1, 2, self.b.size()[1]]);
        [0, 1].map(|row| self.with(self.a.shallow_clone(), pairs.select(1, row)))
    }

    fn dropped(&self, x: &Tensor) -> Result<Tensor> {
        self.dropout.map_or_else(|| Ok(x.shallow_clone()), |dropout| dropout.apply(x))
    }
}
