//! Keys and values in int8: each row is divided by its largest absolute value / 127 and rounded to nearest, ties to even.
//!
//! int8 has equal steps, so a column far larger than the others would cost them their precision. Keys have such columns. So keys and queries are
//! first multiplied by a Hadamard matrix, block by block: this leaves their dot products unchanged and spreads a column's values over its block (as
//! in QuaRot, arXiv 2404.00456). On a GPU one kernel does both when it writes to the cache.

use tch::{Kind, Tensor};

use super::fp8::{ScaledRows, scale_rows};
pub use crate::cuda::kernels::hadamard_block;
use crate::error::Result;
use crate::torch::scalar;

/// The largest value.
pub const MOST: f32 = 127.0;
/// Multiplies every block of consecutive columns by a Hadamard matrix, in the type of `x`.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
///
/// # Panics
/// If `block` is not a power of two that divides hd.
pub fn turned_by_hadamard(x: &Tensor /* [.., hd] */, block: usize) -> Result<Tensor> {
    assert!(block.is_power_of_two(), "a block of {block} columns");
    let sign = |row: usize, column: usize| if (row & column).count_ones().is_multiple_of(2) { 1.0 } else { -1.0f32 };
    let signs: Vec<f32> = (0..block * block).map(|at| sign(at / block, at % block)).collect();
    let matrix = Tensor::f_from_slice(&signs)?.f_to_device(x.device())?.view([block as i64; 2]);
    let y = x.f_to_kind(Kind::Float)?.f_reshape([-1, block as i64])?.f_mm(&matrix)?;
    Ok(y.f_mul(&scalar((block as f64).sqrt().recip()))?.view_as(x).f_to_kind(x.kind())?)
}

/// Quantizes rows to [`Kind::Int8`] in existing memory. Rows of zeros have the scale 0; rows with a non-finite value have a non-finite scale.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn round_rows(
    x: &Tensor,      // [R, K]
    to: &ScaledRows, // [R, K]
) -> Result<()> {
    let numbers = scale_rows(x, MOST, to)?.f_nan_to_num(0.0, None::<f64>, None::<f64>)?.f_round()?;
    to.values.shallow_clone().f_copy_(&numbers.f_clamp(-f64::from(MOST), f64::from(MOST))?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    fn rand(shape: &[i64]) -> Tensor {
        Tensor::randn(shape, (Kind::Float, Device::Cpu))
    }

    fn empty(rows: i64, columns: i64) -> ScaledRows {
        let values = Tensor::zeros([rows, columns], (Kind::Int8, Device::Cpu));
        ScaledRows { values, scales: Tensor::zeros([rows], (Kind::Float, Device::Cpu)) }
    }

    fn widened(rows: &ScaledRows) -> Tensor {
        rows.values.to_kind(Kind::Float) * rows.scales.unsqueeze(-1)
    }

    /// Multiplying two rows by the Hadamard matrix must not change their dot product, and applying it twice must restore a row.
    #[test]
    fn hadamard_rotation_keeps_inner_products() {
        for block in [1, 2, 8, 32] {
            let (q, k) = (rand(&[5, 3, 64]), rand(&[5, 3, 64]));
            let [tq, tk] = [&q, &k].map(|x| turned_by_hadamard(x, block).unwrap());
            let off = ((&tq * &tk).sum_dim_intlist(-1, false, None) - (&q * &k).sum_dim_intlist(-1, false, None)).abs();
            assert!(off.max().double_value(&[]) < 1e-4, "{block}");
            assert!(turned_by_hadamard(&tq, block).unwrap().allclose(&q, 1e-5, 1e-5, false), "{block}");
            assert_eq!(tq.allclose(&q, 1e-5, 1e-5, false), block == 1);
        }
    }

    /// The error is at most half a step; rows of zeros and non-finite rows do not affect others.
    #[test]
    fn int8_rounding_error_is_at_most_half_a_step() {
        let x = rand(&[9, 48]) * rand(&[9, 1]).exp();
        let _ = x.get(2).fill_(0.0);
        let to = empty(9, 48);
        round_rows(&x, &to).unwrap();
        let off = ((widened(&to) - &x).abs() / x.abs().amax([1], true).clamp_min(1e-9)).max().double_value(&[]);
        assert!(off > 0.25 / 127.0 && off <= 0.501 / 127.0, "{off}");
        for poison in [f64::NAN, f64::INFINITY] {
            let x = rand(&[3, 8]);
            let _ = x.get(1).get(5).fill_(poison);
            let to = empty(3, 8);
            round_rows(&x, &to).unwrap();
            let finite: Vec<bool> = (0..3).map(|row| to.scales.double_value(&[row]).is_finite()).collect();
            assert_eq!(finite, [true, false, true]);
        }
    }

    /// With columns thirty times as large as the others, rows multiplied by a Hadamard matrix must lose a fifth of what plain int8 loses, and less
    /// than e4m3.
    #[test]
    fn hadamard_rotation_spreads_outlier_columns() {
        let k = rand(&[512, 64]);
        let _ = k.narrow(1, 7, 2).g_mul_scalar_(30.0);
        let q = rand(&[64, 64]);
        let _ = q.narrow(1, 7, 2).g_mul_scalar_(1.0 / 30.0);
        let exact = q.mm(&k.tr());
        let off = |scores: Tensor| (scores - &exact).square().mean(Kind::Float).sqrt().double_value(&[]);
        let kept = |k: &Tensor| {
            let to = empty(512, 64);
            round_rows(k, &to).unwrap();
            widened(&to)
        };
        let plain = off(q.mm(&kept(&k).tr()));
        let [tq, tk] = [&q, &k].map(|x| turned_by_hadamard(x, 32).unwrap());
        let turned = off(tq.mm(&kept(&tk).tr()));
        let e4m3 = crate::ops::fp8::rounded(&k).unwrap();
        let e4m3 = off(q.mm(&(e4m3.values.to_kind(Kind::Float) * e4m3.scales.unsqueeze(-1)).tr()));
        println!("plain {plain:.4}, turned {turned:.4}, e4m3 {e4m3:.4}");
        assert!(turned < 0.6 * plain && turned < e4m3, "{plain} {turned} {e4m3}");
    }
}
