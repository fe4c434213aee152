//! Sums of squares, for gradient norms.

use tch::{Kind, Tensor};

use crate::cuda::{OpCost, kernels, timed};
use crate::error::Result;

/// Computes `sum_i x_i^2` in float64 for each tensor `[n]`, as one tensor on their device, without waiting for it. On a GPU, one kernel per tensor
/// reads float32 and bfloat16 once and adds in a fixed order.
///
/// # Errors
/// The errors of the kernel.
pub fn sums_of_squares(tensors: &[Tensor]) -> Result<Tensor /* [tensors] f64 */> {
    let fused = |x: &Tensor| x.device().is_cuda() && matches!(x.kind(), Kind::Float | Kind::BFloat16);
    if !tensors.is_empty() && tensors.iter().all(fused) {
        let work = || OpCost::pass(&tensors.iter().collect::<Vec<_>>());
        return timed("gradient norm", work, || kernels::sums_of_squares(tensors));
    }
    let norm = |x: &Tensor| Ok(x.f_norm_scalaropt_dim_dtype(2.0, [0i64], false, Kind::Double)?);
    let norms = tensors.iter().map(norm).collect::<Result<Vec<_>>>()?;
    Ok(Tensor::f_stack(&norms, 0)?.f_square()?)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn gradient_norm_handles_very_large_and_tiny_elements() {
        let tensors = [
            Tensor::from_slice(&[1e30f32, -2e30]),
            Tensor::from_slice(&[3e-30f32]),
            Tensor::zeros([0], (Kind::Float, Device::Cpu)),
            Tensor::from_slice(&[1f32, f32::INFINITY]),
        ];
        let sums = Vec::<f64>::try_from(sums_of_squares(&tensors).unwrap()).unwrap();
        assert!((sums[0] / 5e60 - 1.0).abs() < 1e-6 && (sums[1] / 9e-60 - 1.0).abs() < 1e-6, "{sums:?}");
        assert_eq!((sums[2], sums[3]), (0.0, f64::INFINITY));
    }
}
