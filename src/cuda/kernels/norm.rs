//! Sums of squares of flat shards, for gradient norms.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, invalid, kind_name, launch, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::NORM;
pub(super) const NAMES: &[&str] = &["sum_of_squares_f32", "sum_of_squares_bf16"];

const THREADS: u32 = 512;
/// Number of partial sums per tensor. It is the same on every GPU, so that the sums have the same bits.
const PARTIALS: u32 = 528;

/// Returns the sum of squares of each tensor, in float64.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn sums_of_squares(tensors: &[Tensor], // each [n] f32 or bf16
) -> Result<Tensor /* [tensors] f64 */> {
    const OP: &str = "sum_of_squares";
    let Some(first) = tensors.first() else { return Err(invalid(OP, "at least one tensor", "none")) };
    let gpu = ordinal(OP, first)?;
    let size = [tensors.len() as i64, i64::from(PARTIALS)];
    let partials = Tensor::f_empty(size, (Kind::Double, first.device()))?;
    for (index, x) in tensors.iter().enumerate() {
        let row = partials.get(index as i64);
        let arguments = [
            address(OP, x, x.kind(), x.numel(), gpu)?,
            address(OP, &row, Kind::Double, PARTIALS as usize, gpu)?,
            Argument::Count(x.numel() as i64),
        ];
        let name = format!("{OP}_{}", kind_name(OP, x)?);
        // SAFETY: the kernel's parameters in order; every block writes its own element of the row.
        unsafe { launch(SOURCE, &name, gpu, (PARTIALS, THREADS, 0), &arguments)? };
    }
    Ok(partials.f_sum_dim_intlist(1, false, Kind::Double)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("THREADS", THREADS as usize)]);
    }
}
