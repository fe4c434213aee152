//! y = x w^T + bias: the one place where activations meet weight matrices.
//!
//! Weights may be strided views (a column range of a row-parallel matrix, every second row of an interleaved one): the
//! product reads and the gradient writes them through their leading dimension, without a copy.

use tch::{Kind, Tensor};

use crate::cuda::{Work, timed};
use crate::torch::accumulation_kind;

/// y = x w^T + bias.
pub fn forward(
    x: &Tensor,            // [T, K]
    w: &Tensor,            // [N, K]
    bias: Option<&Tensor>, // [N]
) -> Tensor {
    timed(
        "product",
        || work(x, w),
        || match bias {
            Some(bias) => bias.addmm(x, &w.tr()),
            None => x.mm(&w.tr()),
        },
    ) // [T, N]
}

/// y = residual + x w^T, of the residual's kind. A bfloat16 product is added to a float32 residual as it was summed on a GPU,
/// rounded to bfloat16 first on a CPU.
pub fn forward_onto(
    residual: &Tensor, // [T, N]
    x: &Tensor,        // [T, K]
    w: &Tensor,        // [N, K]
) -> Tensor {
    let run = || {
        if residual.kind() == x.kind() {
            residual.addmm(x, &w.tr())
        } else if sums_wide(x, residual.kind()) {
            residual.addmm_dtype(x, &w.tr(), residual.kind())
        } else {
            residual + x.mm(&w.tr())
        }
    };
    timed("product", || work(x, w), run) // [T, N]
}

/// y += x w^T.
pub fn accumulate(
    x: &Tensor,     // [T, K]
    w: &Tensor,     // [N, K]
    y: &mut Tensor, // [T, N]
) {
    timed("product", || work(x, w), || add_product(y, x, &w.tr()));
}

/// x w^T in the accumulation kind: on a GPU what a bfloat16 product sums in float32 is not rounded.
pub fn forward_wide(
    x: &Tensor, // [T, K]
    w: &Tensor, // [N, K]
) -> Tensor {
    let kind = accumulation_kind(x.kind());
    let run = || if sums_wide(x, kind) { x.mm_dtype(&w.tr(), kind) } else { x.mm(&w.tr()).to_kind(kind) };
    timed("product", || work(x, w), run) // [T, N]
}

/// dx = dy w.
pub fn backward_input(
    dy: &Tensor, // [T, N]
    w: &Tensor,  // [N, K]
) -> Tensor {
    timed("product, gradient of its input", || work(dy, &w.tr()), || dy.mm(w)) // [T, K]
}

/// dx = dy w, into memory that is there.
pub fn backward_input_into(
    dy: &Tensor, // [T, N]
    w: &Tensor,  // [N, K]
    dx: &Tensor, // [T, K]
) {
    let _ = timed("product, gradient of its input", || work(dy, &w.tr()), || dy.mm_out(dx, w));
}

/// dx += dy w, into an existing gradient.
pub fn accumulate_input(
    dy: &Tensor,     // [T, N]
    w: &Tensor,      // [N, K]
    dx: &mut Tensor, // [T, K]
) {
    let _ = timed("product, gradient of its input", || work(dy, &w.tr()), || dx.addmm_(dy, w));
}

/// dw += dy^T x.
pub fn accumulate_weight(
    dy: &Tensor,     // [T, N]
    x: &Tensor,      // [T, K]
    dw: &mut Tensor, // [N, K]
) {
    timed("product, gradient of its weight", || work(&dy.tr(), &x.tr()), || add_product(dw, &dy.tr(), x));
}

/// db += sum over tokens of dy.
pub fn accumulate_bias(
    dy: &Tensor,     // [T, N]
    db: &mut Tensor, // [N]
) {
    let _ = db.g_add_(&dy.sum_dim_intlist(0, false, db.kind()));
}

/// sum += a b. A float32 sum of bfloat16 products is made in place on a GPU; on a CPU, where the sum is of another type, the
/// product is made first and then added.
fn add_product(
    sum: &mut Tensor, // [M, N]
    a: &Tensor,       // [M, K]
    b: &Tensor,       // [K, N]
) {
    let _ = if sum.kind() == a.kind() {
        sum.addmm_(a, b)
    } else if sums_wide(a, sum.kind()) {
        sum.addmm_dtype_out(sum, a, b, sum.kind())
    } else {
        sum.g_add_(&a.mm(b))
    };
}

/// Of a b^T.
fn work(a: &Tensor /* [M, K] */, b: &Tensor /* [N, K] */) -> Work {
    Work::product(a.size()[0], b.size()[0], a.size()[1])
}

/// Whether libtorch multiplies such operands into `kind` directly.
fn sums_wide(operand: &Tensor, kind: Kind) -> bool {
    operand.device().is_cuda() && operand.kind() == Kind::BFloat16 && kind == Kind::Float
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, leaf, rand};

    #[test]
    fn matches_autograd_and_accumulates_into_strided_views() {
        let (x, w, bias) = (leaf(&rand(&[5, 3])), leaf(&rand(&[4, 3])), leaf(&rand(&[4])));
        let dy = rand(&[5, 4]);
        let reference = x.linear(&w, Some(&bias));
        assert_close(&forward(&x.detach(), &w.detach(), Some(&bias.detach())), &reference);
        assert_close(&forward(&x.detach(), &w.detach(), None), &(&reference - &bias));
        assert_close(&forward_onto(&dy, &x.detach(), &w.detach()), &(&reference - &bias + &dy));
        let grads = Tensor::run_backward(&[(&reference * &dy).sum(None)], &[&x, &w, &bias], false, false);
        assert_close(&backward_input(&dy, &w.detach()), &grads[0]);
        let mut dx = rand(&[5, 3]);
        let before = dx.copy();
        accumulate_input(&dy, &w.detach(), &mut dx);
        assert_close(&dx, &(before + &grads[0]));

        let flat = rand(&[8, 6]);
        let before = flat.copy();
        let mut every_second_row = flat.view([4, 2, 6]).select(1, 1).narrow(1, 2, 3);
        accumulate_weight(&dy, &x.detach(), &mut every_second_row);
        let expected = before.view([4, 2, 6]).select(1, 1).narrow(1, 2, 3) + &grads[1];
        assert_close(&every_second_row, &expected);
        assert_close(&flat.view([4, 2, 6]).select(1, 0), &before.view([4, 2, 6]).select(1, 0));

        let mut db = rand(&[4]);
        let before = db.copy();
        accumulate_bias(&dy, &mut db);
        assert_close(&db, &(before + &grads[2]));
    }

    #[test]
    fn gradient_may_be_wider_than_the_activations() {
        let (dy, x) = (rand(&[5, 4]).to_kind(tch::Kind::BFloat16), rand(&[5, 3]).to_kind(tch::Kind::BFloat16));
        let mut dw = Tensor::zeros([4, 3], (tch::Kind::Float, tch::Device::Cpu));
        accumulate_weight(&dy, &x, &mut dw);
        let exact = dy.to_kind(tch::Kind::Float).tr().mm(&x.to_kind(tch::Kind::Float));
        assert!(f64::try_from((&dw - &exact).abs().max() / exact.abs().max()).unwrap() < 0.01);
    }

    /// Of a residual 1000 times the product, bfloat16 would keep nothing of that.
    #[test]
    fn a_residual_may_be_wider_than_what_is_added() {
        let [x, w] = [rand(&[5, 4]), rand(&[3, 4])].map(|tensor| tensor.to_kind(Kind::BFloat16));
        let residual = rand(&[5, 3]).to_kind(Kind::Float) + 1000.0;
        let exact = x.to_kind(Kind::Float).mm(&w.to_kind(Kind::Float).tr());
        let mut y = forward_onto(&residual, &x, &w);
        let off = |sum: &Tensor| f64::try_from((sum - &residual - &exact).abs().max()).unwrap();
        assert!(y.kind() == Kind::Float && off(&y) < 0.05);
        y.copy_(&residual);
        accumulate(&x, &w, &mut y);
        assert!(off(&y) < 0.05);
    }
}
