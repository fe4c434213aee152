//! y = x w^T + bias: the one place where activations are multiplied with weight matrices.
//!
//! Weights may be strided views (a range of columns of a row-parallel matrix, every second row of an interleaved one): GEMMs read them, and write
//! their gradients, through the leading dimension, without a copy. All functions return [`crate::Error::OutOfMemory`] if there is no memory for a
//! result.

use tch::{Kind, TchError, Tensor};

use crate::cuda::{OpCost, timed};
use crate::error::Result;
use crate::torch::accumulation_kind;

/// Whether a weight gradient overwrites its memory or is added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Onto {
    /// Overwrite; the memory may be uninitialized.
    Nothing,
    /// Add to the existing sum.
    Sum,
}

/// Computes y = x w^T + bias.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn forward(
    x: &Tensor,            // [T, K]
    w: &Tensor,            // [N, K]
    bias: Option<&Tensor>, // [N]
) -> Result<Tensor> {
    product(
        || work(x, w),
        || match bias {
            Some(bias) => bias.f_addmm(x, &w.tr()),
            None => x.f_mm(&w.tr()),
        },
    ) // [T, N]
}

/// Computes y = residual + x w^T, in the residual's type. When a bfloat16 GEMM is added to a float32 residual, a GPU adds the unrounded sum, a CPU
/// rounds it to bfloat16 first.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn forward_onto(
    residual: &Tensor, // [T, N]
    x: &Tensor,        // [T, K]
    w: &Tensor,        // [N, K]
) -> Result<Tensor> {
    let run = || {
        if residual.kind() == x.kind() {
            residual.f_addmm(x, &w.tr())
        } else if sums_wide(x, residual.kind()) {
            residual.f_addmm_dtype(x, &w.tr(), residual.kind())
        } else {
            residual.f_add(&x.f_mm(&w.tr())?)
        }
    };
    product(|| work(x, w), run) // [T, N]
}

/// Computes y += x w^T.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn accumulate(
    x: &Tensor,     // [T, K]
    w: &Tensor,     // [N, K]
    y: &mut Tensor, // [T, N]
) -> Result<()> {
    product(|| work(x, w), || add_product(y, x, &w.tr()))
}

/// Computes x w^T in the accumulation type; on a GPU the float32 sums of a bfloat16 GEMM are not rounded.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn forward_wide(
    x: &Tensor, // [T, K]
    w: &Tensor, // [N, K]
) -> Result<Tensor> {
    let kind = accumulation_kind(x.kind());
    let run = || {
        if sums_wide(x, kind) { x.f_mm_dtype(&w.tr(), kind) } else { x.f_mm(&w.tr())?.f_to_kind(kind) }
    };
    product(|| work(x, w), run) // [T, N]
}

/// Computes dx = dy w.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn backward_input(
    dy: &Tensor, // [T, N]
    w: &Tensor,  // [N, K]
) -> Result<Tensor> {
    input_gradient(dy, w, || dy.f_mm(w)) // [T, K]
}

/// Computes dx = dy w in existing memory.
///
/// # Errors
/// [`crate::Error::OutOfMemory`], for a library's workspace.
pub fn backward_input_into(
    dy: &Tensor, // [T, N]
    w: &Tensor,  // [N, K]
    dx: &Tensor, // [T, K]
) -> Result<()> {
    input_gradient(dy, w, || dy.f_mm_out(dx, w).map(drop))
}

/// Computes dx += dy w; dx may have a wider type.
///
/// # Errors
/// [`crate::Error::OutOfMemory`], for a library's workspace.
pub fn accumulate_input(
    dy: &Tensor,     // [T, N]
    w: &Tensor,      // [N, K]
    dx: &mut Tensor, // [T, K]
) -> Result<()> {
    input_gradient(dy, w, || add_product(dx, dy, w))
}

/// Computes dw += dy^T x.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn accumulate_weight(
    dy: &Tensor,     // [T, N]
    x: &Tensor,      // [T, K]
    dw: &mut Tensor, // [N, K]
) -> Result<()> {
    weight_gradient(dy, x, dw, Onto::Sum)
}

/// Computes dw = dy^T x or dw += dy^T x. On a CPU, overwriting gives the same bits as adding to zeros.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn weight_gradient(
    dy: &Tensor,     // [T, N]
    x: &Tensor,      // [T, K]
    dw: &mut Tensor, // [N, K]
    onto: Onto,
) -> Result<()> {
    let run = || match onto {
        Onto::Nothing => write_product(dw, &dy.tr(), x),
        Onto::Sum => add_product(dw, &dy.tr(), x),
    };
    Ok(timed("product, gradient of its weight", || work(&dy.tr(), &x.tr()), run)?)
}

/// Adds the sum over tokens of dy to db.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn accumulate_bias(
    dy: &Tensor,     // [T, N]
    db: &mut Tensor, // [N]
) -> Result<()> {
    let _ = db.f_add_(&dy.f_sum_dim_intlist(0, false, db.kind())?)?;
    Ok(())
}

/// Computes sum += a b. On a GPU, a bfloat16 GEMM is added to a float32 sum in place; on a CPU, if the sum has another type, the GEMM is computed
/// first and then added.
fn add_product(
    sum: &mut Tensor, // [M, N]
    a: &Tensor,       // [M, K]
    b: &Tensor,       // [K, N]
) -> Result<(), TchError> {
    let _ = if sum.kind() == a.kind() {
        sum.f_addmm_(a, b)?
    } else if sums_wide(a, sum.kind()) {
        sum.f_addmm_dtype_out(sum, a, b, sum.kind())?
    } else {
        sum.f_add_(&a.f_mm(b)?)?
    };
    Ok(())
}

/// Computes out = a b in the same way as [`add_product`]; the contents of `out` are ignored.
fn write_product(
    out: &mut Tensor, // [M, N]
    a: &Tensor,       // [M, K]
    b: &Tensor,       // [K, N]
) -> Result<(), TchError> {
    if out.kind() == a.kind() {
        return a.f_mm_out(out, b).map(drop);
    }
    if sums_wide(a, out.kind()) {
        return a.f_mm_dtype_out(out, b, out.kind()).map(drop);
    }
    out.f_copy_(&a.f_mm(b)?)
}

fn product<T>(work: impl FnOnce() -> OpCost, run: impl FnOnce() -> Result<T, TchError>) -> Result<T> {
    Ok(timed("product", work, run)?)
}

fn input_gradient<T>(dy: &Tensor, w: &Tensor, run: impl FnOnce() -> Result<T, TchError>) -> Result<T> {
    Ok(timed("product, gradient of its input", || work(dy, &w.tr()), run)?)
}

/// The cost of the GEMM a b^T.
fn work(a: &Tensor /* [M, K] */, b: &Tensor /* [N, K] */) -> OpCost {
    OpCost::product(a.size()[0], b.size()[0], a.size()[1])
}

/// Whether libtorch can write a GEMM of such operands directly as `kind`.
fn sums_wide(operand: &Tensor, kind: Kind) -> bool {
    operand.device().is_cuda() && operand.kind() == Kind::BFloat16 && kind == Kind::Float
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, leaf, rand};

    #[test]
    fn linear_gradients_match_autograd_and_accumulate_into_views() {
        let (x, w, bias) = (leaf(&rand(&[5, 3])), leaf(&rand(&[4, 3])), leaf(&rand(&[4])));
        let dy = rand(&[5, 4]);
        let reference = x.linear(&w, Some(&bias));
        assert_close(&forward(&x.detach(), &w.detach(), Some(&bias.detach())).unwrap(), &reference);
        assert_close(&forward(&x.detach(), &w.detach(), None).unwrap(), &(&reference - &bias));
        assert_close(&forward_onto(&dy, &x.detach(), &w.detach()).unwrap(), &(&reference - &bias + &dy));
        let grads = Tensor::run_backward(&[(&reference * &dy).sum(None)], &[&x, &w, &bias], false, false);
        assert_close(&backward_input(&dy, &w.detach()).unwrap(), &grads[0]);
        let mut dx = rand(&[5, 3]);
        let before = dx.copy();
        accumulate_input(&dy, &w.detach(), &mut dx).unwrap();
        assert_close(&dx, &(before + &grads[0]));

        let flat = rand(&[8, 6]);
        let before = flat.copy();
        let mut every_second_row = flat.view([4, 2, 6]).select(1, 1).narrow(1, 2, 3);
        accumulate_weight(&dy, &x.detach(), &mut every_second_row).unwrap();
        let expected = before.view([4, 2, 6]).select(1, 1).narrow(1, 2, 3) + &grads[1];
        assert_close(&every_second_row, &expected);
        assert_close(&flat.view([4, 2, 6]).select(1, 0), &before.view([4, 2, 6]).select(1, 0));

        let mut db = rand(&[4]);
        let before = db.copy();
        accumulate_bias(&dy, &mut db).unwrap();
        assert_close(&db, &(before + &grads[2]));
    }

    #[test]
    fn linear_weight_gradients_may_have_a_wider_dtype() {
        let (dy, x) = (rand(&[5, 4]).to_kind(tch::Kind::BFloat16), rand(&[5, 3]).to_kind(tch::Kind::BFloat16));
        let mut dw = Tensor::zeros([4, 3], (tch::Kind::Float, tch::Device::Cpu));
        accumulate_weight(&dy, &x, &mut dw).unwrap();
        let exact = dy.to_kind(tch::Kind::Float).tr().mm(&x.to_kind(tch::Kind::Float));
        assert!(f64::try_from((&dw - &exact).abs().max() / exact.abs().max()).unwrap() < 0.01);
    }

    /// Covers every type of sum, few tokens and more than a CPU's GEMM processes at once, contiguous rows and every second row.
    #[test]
    fn linear_gradient_written_equals_added_to_zeros() {
        let kinds = [Kind::Double, Kind::Float, Kind::BFloat16].map(|kind| (kind, kind));
        for (kind, wide) in kinds.into_iter().chain([(Kind::BFloat16, Kind::Float), (Kind::Float, Kind::BFloat16)]) {
            for [tokens, rows, columns] in [[0, 4, 3], [1, 5, 7], [3, 130, 17], [2500, 66, 130]] {
                let [dy, x] = [[tokens, rows], [tokens, columns]].map(|size| rand(&size).to_kind(kind));
                for step in [1, 2] {
                    let gradient = |fill: f64, onto| {
                        let flat = Tensor::full([rows, step, columns], fill, (wide, tch::Device::Cpu));
                        weight_gradient(&dy, &x, &mut flat.select(1, step - 1), onto).unwrap();
                        flat.select(1, step - 1)
                    };
                    let [added, written] = [gradient(0.0, Onto::Sum), gradient(f64::NAN, Onto::Nothing)];
                    assert!(added.equal(&written), "{kind:?} to {wide:?}, {tokens} x {rows} x {columns}, step {step}");
                }
            }
        }
    }

    /// The residual is 1000 times larger, so in bfloat16 the GEMM's contribution would be lost.
    #[test]
    fn the_residual_may_have_a_wider_dtype_than_the_output() {
        let [x, w] = [rand(&[5, 4]), rand(&[3, 4])].map(|tensor| tensor.to_kind(Kind::BFloat16));
        let residual = rand(&[5, 3]).to_kind(Kind::Float) + 1000.0;
        let exact = x.to_kind(Kind::Float).mm(&w.to_kind(Kind::Float).tr());
        let mut y = forward_onto(&residual, &x, &w).unwrap();
        let off = |sum: &Tensor| f64::try_from((sum - &residual - &exact).abs().max()).unwrap();
        assert!(y.kind() == Kind::Float && off(&y) < 0.05);
        y.copy_(&residual);
        accumulate(&x, &w, &mut y).unwrap();
        assert!(off(&y) < 0.05);
    }
}
