//! The products of a block with a matrix that is trained, or frozen with an adapter beside it.

use tch::Tensor;

use super::Lora;
use crate::ops::linear;

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
) -> Tensor {
    match lora {
        None => y,
        Some(lora) => lora.add(x, y),
    }
}

/// dx of y = x w^T + (x A^T) B^T; the gradient of w, or of A and B, is added in place.
pub(in crate::model) fn backward(
    dy: &Tensor, // [T, N]
    x: &Tensor,  // [T, K]
    w: &Tensor,  // [N, K]
    gradient: Gradient<'_>,
) -> Tensor {
    let mut dx = linear::backward_input(dy, w);
    match gradient {
        Gradient::Weight(dw) => linear::accumulate_weight(dy, x, dw),
        Gradient::Adapter(Some((lora, gradient))) => lora.backward(dy, x, &mut dx, gradient),
        Gradient::Adapter(None) => {}
    }
    dx // [T, K]
}

impl Lora {
    fn add(&self, x: &Tensor, mut y: Tensor) -> Tensor {
        let low = linear::forward(&self.dropped(x), &self.a, None); // [T, k]
        y.addmm_(&low, &self.b.tr())
    }

    /// Adds to dx and to the gradients of A and of the expanded B.
    pub(in crate::model) fn backward(&self, dy: &Tensor, x: &Tensor, dx: &mut Tensor, gradient: &mut Lora) {
        let x = self.dropped(x);
        linear::accumulate_weight(dy, &linear::forward(&x, &self.a, None), &mut gradient.b);
        let d_low = linear::backward_input(dy, &self.b); // [T, k]
        linear::accumulate_weight(&d_low, &x, &mut gradient.a);
        match &self.dropout {
            None => linear::accumulate_input(&d_low, &self.a, dx),
            Some(dropout) => _ = dx.g_add_(&dropout.apply(&linear::backward_input(&d_low, &self.a))),
        }
    }

    /// Beside some of the matrix's rows.
    pub(in crate::model) fn rows(&self, start: i64, len: i64) -> Self {
        self.with(self.a.shallow_clone(), self.b.narrow(0, start, len))
    }

    /// Beside the even rows, and beside the odd ones.
    pub(in crate::model) fn every_second_row(&self) -> [Self; 2] {
        let pairs = self.b.view([-1, 2, self.b.size()[1]]);
        [0, 1].map(|row| self.with(self.a.shallow_clone(), pairs.select(1, row)))
    }

    fn dropped(&self, x: &Tensor) -> Tensor {
        self.dropout.map_or_else(|| x.shallow_clone(), |dropout| dropout.apply(x))
    }
}
