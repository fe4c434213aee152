//! y = silu(gate) * up.
//!
//! Gate and up are separate here: on a CPU the two products read the interleaved rows of the weight as strided views, which
//! costs nothing, where an interleaved activation would keep every elementwise loop from vectorising.

use tch::Tensor;

/// silu(gate) * up.
pub fn forward(
    gate: &Tensor, // [T, F]
    up: &Tensor,   // [T, F]
) -> Tensor {
    gate.silu().g_mul_(up) // [T, F]
}

/// (d_gate, d_up); `up`'s memory becomes d_gate's.
pub fn backward(
    dy: &Tensor,    // [T, F]
    gate: &Tensor,  // [T, F]
    mut up: Tensor, // [T, F]
) -> (Tensor, Tensor) {
    let d_up = gate.silu().g_mul_(dy);
    let d_silu = up.g_mul_(dy);
    (gate.silu_backward_grad_input(&d_silu, &d_silu), d_up)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, leaf, rand};

    #[test]
    fn matches_autograd() {
        let (gate, up, dy) = (leaf(&rand(&[5, 6])), leaf(&rand(&[5, 6])), rand(&[5, 6]));
        let reference = gate.sigmoid() * &gate * &up;
        let grads = Tensor::run_backward(&[(&reference * &dy).sum(None)], &[&gate, &up], false, false);
        assert_close(&forward(&gate.detach(), &up.detach()), &reference);
        let (d_gate, d_up) = backward(&dy, &gate.detach(), up.detach().copy());
        assert_close(&d_gate, &grads[0]);
        assert_close(&d_up, &grads[1]);
    }
}
