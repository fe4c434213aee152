//! Muon (Jordan et al., kellerjordan.github.io/posts/muon), as `torch.optim.Muon` computes it. Momentum and the update are elementwise, so shards can
//! be processed separately; the orthogonalization between them needs whole matrices, in bfloat16.

use tch::{Kind, Tensor};

use crate::config::AdjustLr;
use crate::error::Result;
use crate::torch::{check_room, scalar};

/// Coefficients of the quintic Newton-Schulz iteration: the steepest at 0 that still bring singular values to about 1.
const A: f64 = 3.4445;
const B: f64 = -4.7750;
const C: f64 = 2.0315;
/// Smallest norm by which a matrix is divided.
const EPS: f64 = 1e-7;
/// Elements processed at once, to bound the temporaries.
const PIECE: i64 = 1 << 24;

/// Computes m += (1 - beta) (g - m) with g = grad * grad_scale; sets `direction` to g + beta (m - g), or to m without `nesterov`.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn momentum(
    m: &Tensor,         // [n] f32 (f64 in tests)
    grad: &Tensor,      // [n], any floating type
    direction: &Tensor, // [n] bf16
    beta: f64,
    nesterov: bool,
    grad_scale: f64,
) -> Result<()> {
    for_pieces(m.size()[0], |cut| {
        let (mut m, mut g) = (cut(m), cut(grad).f_mul(&scalar(grad_scale))?.f_to_kind(m.kind())?);
        let _ = m.f_lerp_(&g, 1.0 - beta)?;
        let direction = &mut cut(direction);
        let source = if nesterov { g.f_lerp_(&m, beta)? } else { m };
        direction.f_copy_(&source)?;
        Ok(())
    })
}

/// Approximates U V^T for each matrix U S V^T by Newton-Schulz iteration, which brings singular values to about 0.7 to 1.2.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn orthogonalized(matrices: &Tensor /* [E, R, C] */, num_steps: usize) -> Result<Tensor> {
    let is_tall = matrices.size()[1] > matrices.size()[2];
    let flat = |x: &Tensor| if is_tall { x.transpose(1, 2) } else { x.shallow_clone() };
    let mut x = flat(&matrices.f_to_dtype(Kind::BFloat16, false, true)?);
    let mut norm = x.f_norm_scalaropt_dim(2.0, [1i64, 2], true)?;
    let _ = x.f_div_(&norm.f_clamp_min_(EPS)?)?;
    for _ in 0..num_steps {
        let gram = x.f_bmm(&x.transpose(1, 2))?;
        check_room(&gram.size(), (gram.kind(), gram.device()))?;
        let polynomial = gram.f_baddbmm(&gram, &gram, B, C)?;
        check_room(&x.size(), (x.kind(), x.device()))?;
        x = x.f_baddbmm(&polynomial, &x, A, 1.0)?;
    }
    Ok(flat(&x)) // [E, R, C] bf16
}

/// The ratio of a matrix's learning rate to the configured one.
pub fn lr_ratio(adjust: AdjustLr, rows: usize, columns: usize) -> f64 {
    let (rows, columns) = (rows as f64, columns as f64);
    match adjust {
        AdjustLr::Original => (rows / columns).max(1.0).sqrt(),
        AdjustLr::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
    }
}

/// Computes master = (1 - lr weight_decay) master - lr ratio update, and copies it to `weight` in its own type.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn apply(
    master: &Tensor, // [n] f32 (f64 in tests)
    update: &Tensor, // [n] bf16
    weight: &Tensor, // [n], any floating type
    lr: f64,
    weight_decay: f64,
    ratio: f64,
) -> Result<()> {
    for_pieces(master.size()[0], |cut| {
        let mut master = cut(master);
        let _ = master.f_mul_scalar_(1.0 - lr * weight_decay)?;
        let change = cut(update).f_to_kind(master.kind())?.f_mul_scalar_(-lr * ratio)?;
        let _ = master.f_add_(&change)?;
        cut(weight).f_copy_(&master)?;
        Ok(())
    })
}

fn for_pieces(total: i64, mut f: impl FnMut(&dyn Fn(&Tensor) -> Tensor) -> Result<()>) -> Result<()> {
    (0..total).step_by(PIECE as usize).try_for_each(|start| f(&|t| t.narrow(0, start, PIECE.min(total - start))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{optim_golden, wave};
    use tch::Device;

    /// torch sums bfloat16 GEMMs in another order, so elements of an update may differ by rounding.
    #[test]
    fn muon_steps_equal_torch() {
        let (lr, weight_decay, beta) = (0.02, 0.1, 0.95);
        for case in optim_golden()["muon"].as_array().unwrap() {
            let [rows, columns] = ["rows", "columns"].map(|name| case[name].as_u64().unwrap() as usize);
            let adjust = if case["adjust_lr_fn"] == "original" { AdjustLr::Original } else { AdjustLr::MatchRmsAdamw };
            let (n, ratio) = ((rows * columns) as i64, lr_ratio(adjust, rows, columns));
            let master = (wave(n, 0.5).to_kind(Kind::Double) * 0.3).to_kind(Kind::Float);
            let (m, weight) = (master.zeros_like(), master.to_kind(Kind::BFloat16));
            let direction = Tensor::zeros([n], (Kind::BFloat16, Device::Cpu));
            for (index, expected) in case["steps"].as_array().unwrap().iter().enumerate() {
                let grad = wave(n, 1.0 + index as f64) * 2.0;
                momentum(&m, &grad, &direction, beta, case["nesterov"] == true, 0.5).unwrap();
                let update =
                    orthogonalized(&direction.view([1, rows as i64, columns as i64]), 5).unwrap().reshape([-1]);
                apply(&master, &update, &weight, lr, weight_decay, ratio).unwrap();
                let theirs: Vec<f64> = serde_json::from_value(expected.clone()).unwrap();
                let off = (master.to_kind(Kind::Double) - Tensor::from_slice(&theirs)).abs().max().double_value(&[]);
                assert!(off < 0.02 * lr * ratio, "{rows} x {columns}, step {index}: {off:e}");
                assert!(weight.equal(&master.to_kind(Kind::BFloat16)));
            }
        }
    }

    #[test]
    fn muon_orthogonalizes_batched_matrices_separately() {
        let matrices = wave(3 * 20 * 28, 0.2).view([3, 20, 28]);
        let all = orthogonalized(&matrices, 5).unwrap();
        for index in 0..3 {
            let one = orthogonalized(&matrices.narrow(0, index, 1), 5).unwrap();
            let off = (all.narrow(0, index, 1) - &one).abs().max().double_value(&[]);
            assert!(off < 0.01, "{off}");
            let one = one.squeeze_dim(0).to_kind(Kind::Double);
            let values = one.mm(&one.tr()).linalg_eigvalsh("L").clamp_min(0.0).sqrt(); // its singular values
            let values = Vec::<f64>::try_from(values).unwrap();
            let (none, all): (Vec<f64>, Vec<f64>) = values.iter().partition(|&&value| value < 1e-3);
            let rows_of_zeros = matrices.get(index).abs().amax([1i64], false).eq(0.0).sum(Kind::Int64).int64_value(&[]);
            assert_eq!(none.len() as i64, rows_of_zeros, "{values:?}");
            assert!(all.iter().all(|value| (0.1..1.3).contains(value)), "{values:?}");
        }
    }
}
