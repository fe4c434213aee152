//! RMSNorm over the last dimension (arXiv 1910.07467): y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps).

use crate::cuda::{OpCost, kernels, timed};
use crate::error::Result;
use crate::torch::accumulation_kind;
use tch::Tensor;

pub use crate::cuda::kernels::NormOptions;

impl NormOptions {
    /// The multipliers of the columns: `weight`, or 1 + weight in the accumulation type. [D]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn scale(self, weight: &Tensor /* [D] */) -> Result<Tensor> {
        match self.zero_centred {
            false => Ok(weight.shallow_clone()),
            true => Ok(weight.f_to_kind(accumulation_kind(weight.kind()))?.f_add_scalar(1.0)?),
        }
    }

    /// Normalizes like [`forward`], with these options.
    ///
    /// # Errors
    /// The errors of [`forward`].
    pub fn forward(
        self,
        x: &Tensor,      // [.., D]
        weight: &Tensor, // [D]
    ) -> Result<(Tensor, Tensor)> {
        if kernels::serve(x) {
            return kernel_forward(x, weight, self.eps, self.centre());
        }
        let (y, rstd) = forward(x, &self.scale(weight)?, self.eps)?;
        Ok((y.f_to_kind(weight.kind())?, rstd))
    }

    /// Computes gradients like [`backward`], with these options; the gradient of 1 + weight is that of the weight.
    ///
    /// # Errors
    /// The errors of [`forward`].
    pub fn backward(
        self,
        dy: &Tensor,               // [.., D]
        x: &Tensor,                // [.., D]
        weight: &Tensor,           // [D]
        rstd: &Tensor,             // [.., 1]
        residual: Option<&Tensor>, // [.., D]
        dweight: &mut Tensor,      // [D]
    ) -> Result<Tensor> {
        if kernels::serve(x) {
            return kernel_backward(dy, (x, weight, rstd), residual, self.centre(), dweight);
        }
        backward(dy, x, &self.scale(weight)?, rstd, residual, dweight)
    }

    fn centre(self) -> f64 {
        f64::from(u8::from(self.zero_centred))
    }
}

fn kernel_forward(x: &Tensor, weight: &Tensor, eps: f64, centre: f64) -> Result<(Tensor, Tensor)> {
    let y = || weight.expand_as(x); // has the shape of the result, which is not allocated yet
    timed("norm", || OpCost::pass(&[x, &y()]), || kernels::rms_norm_forward(x, weight, eps, centre))
}

fn kernel_backward(
    dy: &Tensor,
    (x, weight, rstd): (&Tensor, &Tensor, &Tensor),
    residual: Option<&Tensor>,
    centre: f64,
    dweight: &mut Tensor,
) -> Result<Tensor> {
    let run = || kernels::rms_norm_backward(dy, x, weight, rstd, residual, centre, dweight);
    timed("norm, backward", || OpCost::pass(&[dy, x, residual.unwrap_or(dy), dy]), run)
}

/// Returns the normalized `x` in the weight's type, and rstd for the backward.
///
/// # Errors
/// [`crate::Error::OutOfMemory`]; on a GPU [`crate::Error::InvalidArgument`] for rows that are longer than 12,000 or not contiguous.
pub fn forward(
    x: &Tensor,      // [.., D]
    weight: &Tensor, // [D]
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    if kernels::serve(x) {
        return kernel_forward(x, weight, eps, 0.0);
    }
    let kind = accumulation_kind(x.kind());
    let dim = *x.size().last().unwrap_or(&1);
    let wide = x.f_to_kind(kind)?;
    let mut rstd = wide.f_norm_scalaropt_dim(2, [-1i64], true)?.f_square_()?;
    let rstd = rstd.f_div_scalar_(dim as f64)?.f_add_scalar_(eps)?.f_rsqrt_()?; // [.., 1]
    let y = wide.f_mul(&rstd)?.f_mul_(weight)?.f_to_kind(weight.kind())?;
    Ok((y, rstd))
}

/// Returns dx = residual + rstd * (dy * w) - x * rstd^3 * mean(dy * w * x), in dy's type. Adds to dweight the sum over rows of dy * x * rstd.
/// `residual` is the gradient that bypasses the norm.
///
/// # Errors
/// The errors of [`forward`].
pub fn backward(
    dy: &Tensor,               // [.., D]
    x: &Tensor,                // [.., D]
    weight: &Tensor,           // [D]
    rstd: &Tensor,             // [.., 1]
    residual: Option<&Tensor>, // [.., D]
    dweight: &mut Tensor,      // [D]
) -> Result<Tensor> {
    if kernels::serve(x) {
        return kernel_backward(dy, (x, weight, rstd), residual, 0.0, dweight);
    }
    let (kind, narrow) = (rstd.kind(), dy.kind());
    let dim = *x.size().last().unwrap_or(&1);
    let (dy, wide, weight) = (dy.f_to_kind(kind)?, x.f_to_kind(kind)?, weight.f_to_kind(kind)?);
    let product = dy.f_mul(&wide)?.f_reshape([-1, dim])?; // [R, D]
    let _ = dweight.f_add_(&product.tr().f_mv(&rstd.f_reshape([-1])?)?)?;
    let projection = product.f_mv(&weight)?.view_as(rstd); // [.., 1], sum of dy * w * x
    let coefficient = projection.f_mul(&rstd.f_pow_tensor_scalar(3)?)?.f_mul_scalar_(-1.0 / dim as f64)?;
    let mut dx = dy.f_mul(&weight)?;
    drop(dy);
    dx = dx.f_mul_(rstd)?.f_addcmul_(&wide, &coefficient)?;
    if let Some(residual) = residual {
        dx = dx.f_add_(residual)?;
    }
    Ok(dx.f_to_kind(narrow)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, leaf, rand};

    #[test]
    fn rms_norm_matches_autograd_on_contiguous_and_strided_rows() {
        let wide = rand(&[6, 3, 10]);
        for x in [rand(&[7, 8]), wide.narrow(1, 0, 2).narrow(2, 1, 8)] {
            let (leaf_x, weight) = (leaf(&x), leaf(&rand(&[8])));
            let rms = (leaf_x.square().mean_dim(-1, true, None) + 1e-6).sqrt();
            let reference = &leaf_x / rms * &weight;
            let dy = rand(&x.size());
            let grads = Tensor::run_backward(&[(&reference * &dy).sum(None)], &[&leaf_x, &weight], false, false);
            let (y, rstd) = forward(&x, &weight.detach(), 1e-6).unwrap();
            assert_close(&y, &reference);
            let residual = rand(&x.size());
            for (residual, expected) in [(None, grads[0].shallow_clone()), (Some(&residual), &grads[0] + &residual)] {
                let mut dweight = rand(&[8]);
                let before = dweight.copy();
                let dx = backward(&dy, &x, &weight.detach(), &rstd, residual, &mut dweight).unwrap();
                assert_close(&dx, &expected);
                assert_close(&dweight, &(before + &grads[1]));
            }
        }
    }

    #[test]
    fn rms_norm_of_bfloat16_has_float32_statistics() {
        let x = rand(&[3, 8]).to_kind(tch::Kind::BFloat16);
        let weight = rand(&[8]).to_kind(tch::Kind::BFloat16);
        let (y, rstd) = forward(&x, &weight, 1e-6).unwrap();
        assert_eq!((y.kind(), rstd.kind()), (tch::Kind::BFloat16, tch::Kind::Float));
        let mut dweight = Tensor::zeros([8], (tch::Kind::Float, tch::Device::Cpu));
        assert_eq!(backward(&y, &x, &weight, &rstd, None, &mut dweight).unwrap().kind(), tch::Kind::BFloat16);
        // The result must be equal if only x has a wider type.
        let wide = x.to_kind(tch::Kind::Float);
        let (of_wide, rstd) = forward(&wide, &weight, 1e-6).unwrap();
        assert!(of_wide.equal(&y));
        let dx = backward(&y, &wide, &weight, &rstd, Some(&y), &mut dweight).unwrap();
        assert_eq!(dx.kind(), tch::Kind::BFloat16);
    }
}
