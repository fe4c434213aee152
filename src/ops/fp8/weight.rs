//! The weight gradient in FP8. It sums over tokens, so both operands are quantized by column; a column's scale spans a micro-batch's tokens.

use tch::{Device, Kind, Tensor};

use super::{product, rounded_columns, work};
use crate::cuda::{Products, Tuning, timed};
use crate::error::Result;
use crate::ops::linear::Onto;

/// Computes dw = dy^T x, or dw += dy^T x; quantizes the columns of dy and x on the fly. On a GPU these must be bfloat16, and the scaled float32 sums
/// are added without intermediate rounding.
///
/// # Errors
/// The errors of [`super::round_rows`] and of [`super::forward`].
pub fn weight_gradient(
    dy: &Tensor, // [T, N]
    x: &Tensor,  // [T, K]
    dw: &Tensor, // [N, K]
    onto: Onto,
) -> Result<()> {
    let (dy, x) = (rounded_columns(dy)?, rounded_columns(x)?); // [N, T], [K, T]
    let run = || {
        let Device::Cuda(gpu) = dw.device() else {
            let mut dw = dw.shallow_clone();
            let gradient = product(&dy, &x, None, Kind::Float)?;
            match onto {
                Onto::Nothing => dw.f_copy_(&gradient)?,
                Onto::Sum => drop(dw.f_add_(&gradient)?),
            }
            return Ok(());
        };
        let products = Products::of_current_stream(gpu)?;
        match onto {
            Onto::Nothing => products.run_fp8(&dy, &x, None, dw, Tuning::First),
            Onto::Sum => products.run_fp8_onto(dw, &dy, &x, dw),
        }
    };
    timed("product in FP8, gradient of its weight", || work(&dy, &x), run)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::fp8::{MOST, rounded};
    use crate::torch::f32_vec;

    fn rand(shape: [i64; 2]) -> Tensor {
        Tensor::randn(shape, (Kind::Float, Device::Cpu))
    }

    /// Computes dy^T x in float64.
    fn exact(dy: &Tensor, x: &Tensor) -> Tensor {
        dy.to_kind(Kind::Double).tr().mm(&x.to_kind(Kind::Double))
    }

    /// The result must equal a float64 GEMM of the quantized operands, both when it is written and when it is added to a sum, for numbers of tokens
    /// that are not multiples of anything.
    #[test]
    fn fp8_weight_gradient_equals_the_gemm_of_rounded_columns() {
        for [tokens, rows, columns] in [[1, 1, 1], [7, 33, 5], [130, 3, 17]] {
            let (dy, x) = (rand([tokens, rows]), rand([tokens, columns]));
            let _ = dy.select(1, rows - 1).fill_(0.0);
            let whole = |x: &Tensor| {
                let rows = rounded(&x.tr()).unwrap();
                (rows.values.to_kind(Kind::Double) * rows.scales.to_kind(Kind::Double).unsqueeze(1)).tr()
            };
            let expected = exact(&whole(&dy), &whole(&x));
            let [written, added] =
                [f64::NAN, 3.0].map(|fill| Tensor::full([rows, columns], fill, (Kind::Float, Device::Cpu)));
            weight_gradient(&dy, &x, &written, Onto::Nothing).unwrap();
            weight_gradient(&dy, &x, &added, Onto::Sum).unwrap();
            let most = f64::try_from(expected.abs().max()).unwrap().max(1.0);
            for (got, before) in [(&written, 0.0), (&added, 3.0)] {
                let off = f64::try_from((got.to_kind(Kind::Double) - &expected - before).abs().max()).unwrap();
                assert!(off <= 1e-5 * most, "{off} of {most}");
            }
            assert!(f32_vec(&written.get(rows - 1)).unwrap().iter().all(|&dw| dw == 0.0));
        }
    }

    /// The error is bounded by half a unit in the last of 3 mantissa bits of each operand, or by the smallest step of its column's scale. Covers
    /// normal numbers, and columns, tokens and single values that are a hundred times larger.
    #[test]
    fn fp8_weight_gradient_error_is_bounded_by_the_operands_precision() {
        let (tokens, rows, columns) = (512, 96, 160);
        for outliers in ["none", "columns", "tokens", "values"] {
            let (dy, x) = (rand([tokens, rows]), rand([tokens, columns]));
            for t in [&dy, &x] {
                match outliers {
                    "columns" => drop(t.narrow(1, 3, 5).g_mul_scalar_(100.0)),
                    "tokens" => drop(t.narrow(0, 7, 4).g_mul_scalar_(100.0)),
                    "values" => drop(t.get(9).narrow(0, 2, 20).g_mul_scalar_(100.0)),
                    _ => (),
                }
            }
            let dw = Tensor::zeros([rows, columns], (Kind::Float, Device::Cpu));
            weight_gradient(&dy, &x, &dw, Onto::Nothing).unwrap();
            let [a, b] = [&dy, &x].map(|t| t.to_kind(Kind::Double).abs());
            let [off_a, off_b] =
                [&a, &b].map(|t| t * 2f64.powi(-4) + t.amax([0], true) / f64::from(MOST) * 2f64.powi(-10));
            let most = off_a.tr().mm(&b) + a.tr().mm(&off_b) + off_a.tr().mm(&off_b) + a.tr().mm(&b) * 1e-6;
            let (exact, dw) = (exact(&dy, &x), dw.to_kind(Kind::Double));
            let off = (&dw - &exact).abs();
            let (worst, cost) = ((&off / &most).max().double_value(&[]), (off.norm() / exact.norm()).double_value(&[]));
            println!("{outliers}: {cost:.4} of the norm, {worst:.2} of the bound");
            assert!(worst < 1.0 && cost < 0.06, "{outliers}: {cost}, {worst}");
        }
    }

    /// A column with non-finite values must give a non-finite result, and no other column may.
    #[test]
    fn fp8_weight_gradient_keeps_non_finite_values_in_their_row() {
        for poison in [f64::NAN, f64::INFINITY] {
            let (dy, x) = (rand([9, 4]), rand([9, 6]).abs() + 0.1);
            let _ = dy.get(5).get(2).fill_(poison);
            let dw = Tensor::zeros([4, 6], (Kind::Float, Device::Cpu));
            weight_gradient(&dy, &x, &dw, Onto::Nothing).unwrap();
            let rows: Vec<Vec<f32>> = (0..4).map(|row| f32_vec(&dw.get(row)).unwrap()).collect();
            assert!(rows[2].iter().all(|dw| !dw.is_finite()), "{rows:?}");
            assert!([0, 1, 3].iter().all(|&row: &usize| rows[row].iter().all(|dw| dw.is_finite())), "{rows:?}");
        }
    }
}
