//! Grouped GEMMs of FP8 rows with the matrices of their experts. If the groups' ends are on a GPU, libtorch's grouped e4m3 GEMM is used. Otherwise
//! each expert has its own GEMM, and the host waits for the sizes of the groups. Tests compare the grouped GEMM and the engine's kernels with that
//! path.

use tch::{Kind, Tensor};

use super::{Dispatch, Groups, each};
use crate::cuda::{OpCost, timed};
use crate::error::Result;
use crate::ops::fp8::{self, ScaledRows};

impl Dispatch {
    /// Copies each token's quantized row to its rows, like [`Dispatch::scatter`], so that a token is quantized once for all of its experts. [R, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn scatter_fp8(&self, x: &ScaledRows /* [T, N] */) -> Result<ScaledRows> {
        let bytes = (self.tokens.size()[0] * x.values.size()[1]) as f64 * 2.0;
        let run = || {
            let values = x.values.f_view_dtype(Kind::Uint8)?.f_index_select(0, &self.tokens)?;
            let scales = x.scales.f_index_select(0, &self.tokens)?;
            Ok(ScaledRows { values: values.f_view_dtype(Kind::Float8e4m3fn)?, scales })
        };
        timed("rows of experts", || OpCost { bytes, flop: 0.0 }, run)
    }

    /// Computes [`Dispatch::forward`] with quantized rows, in the type `kind`; on a GPU this is bfloat16. [R, N]
    ///
    /// # Errors
    /// The errors of [`fp8::forward`].
    pub fn forward_fp8(
        &self,
        x: &ScaledRows, // [R, K]
        w: &ScaledRows, // [E N, K]
        kind: Kind,
    ) -> Result<Tensor> {
        let (before, sizes) = match &self.groups {
            Groups::Ends(ends) => return product_of_groups(x, w, ends),
            Groups::Sizes { before, sizes } => (*before, sizes),
        };
        let (rows, columns) = (x.values.size()[0], w.values.size()[0] / sizes.len() as i64);
        let y = Tensor::f_zeros([rows, columns], (kind, x.values.device()))?;
        let part = |of: &ScaledRows, start: i64, len: i64| -> Result<ScaledRows> {
            Ok(ScaledRows { values: of.values.f_narrow(0, start, len)?, scales: of.scales.f_narrow(0, start, len)? })
        };
        each(before, sizes, |expert, start, size| {
            let own = fp8::forward(&part(x, start, size)?, &part(w, expert * columns, columns)?, None, kind)?;
            Ok(y.f_narrow(0, start, size)?.f_copy_(&own)?)
        })?;
        Ok(y) // [R, N]
    }
}

/// Computes x w^T, each row with its own expert's matrix, by libtorch's grouped GEMM.
fn product_of_groups(
    x: &ScaledRows, // [R, K]
    w: &ScaledRows, // [E N, K]
    ends: &Tensor,  // [E]
) -> Result<Tensor> {
    let experts = ends.size()[0];
    let shape = [experts, w.values.size()[0] / experts, w.values.size()[1]];
    let run = || {
        let values = w.values.f_view(shape)?.f_transpose(1, 2)?;
        let scales = w.scales.f_view([shape[0], shape[1]])?;
        let none = None::<&Tensor>;
        let product = x.values.f_internal_scaled_grouped_mm(
            &values,
            &x.scales,
            &scales,
            Some(ends),
            none,
            none,
            Kind::BFloat16,
            true,
        );
        Ok(product?)
    };
    timed("grouped product in FP8", || fp8::cost([x.values.size()[0], shape[1], shape[2]]), run) // [R, N]
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// Each row must equal the GEMM of its quantized values with its own expert's quantized matrix; rows of another rank's experts must be 0.
    #[test]
    fn fp8_grouped_gemm_uses_the_rounded_matrix_of_each_expert() {
        let rand = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        let (x, w) = (rand(&[5, 16]), rand(&[4, 6, 16]));
        let experts = Tensor::from_slice(&[3i64, 0, 1, 3, 2, 0, 0, 1, 3, 2]).view([5, 2]);
        for own in [0..4, 1..3] {
            let dispatch = Dispatch::new(&experts, 4, own.clone(), Kind::Float).unwrap();
            let len = own.len() as i64;
            let weights = fp8::rounded(&w.narrow(0, own.start as i64, len).reshape([6 * len, 16])).unwrap();
            let rows = fp8::rounded(&dispatch.scatter(&x).unwrap()).unwrap();
            let y = dispatch.forward_fp8(&rows, &weights, Kind::Float).unwrap();
            for (token, choice) in (0..5).flat_map(|token| [(token, 0), (token, 1)]) {
                let expert = experts.int64_value(&[token, choice]);
                let row = dispatch.rows.int64_value(&[token, choice]);
                let expected = match own.contains(&(expert as usize)) {
                    true => {
                        let one = fp8::rounded(&x.narrow(0, token, 1)).unwrap();
                        fp8::forward(&one, &fp8::rounded(&w.get(expert)).unwrap(), None, Kind::Float).unwrap()
                    }
                    false => Tensor::zeros([1, 6], (Kind::Float, Device::Cpu)),
                };
                assert!(y.narrow(0, row, 1).allclose(&expected, 1e-6, 1e-6, false), "{token} {choice}");
            }
        }
    }

    /// Quantizing before copying must equal copying before quantizing.
    #[test]
    fn fp8_grouped_gemm_rounds_a_token_once_for_all_experts() {
        let x = Tensor::randn([5, 16], (Kind::Float, Device::Cpu));
        let experts = Tensor::from_slice(&[3i64, 0, 1, 3, 2, 0, 0, 1, 3, 2]).view([5, 2]);
        let dispatch = Dispatch::new(&experts, 4, 0..4, Kind::Float).unwrap();
        let rows = dispatch.scatter_fp8(&fp8::rounded(&x).unwrap()).unwrap();
        let expected = fp8::rounded(&dispatch.scatter(&x).unwrap()).unwrap();
        assert!(rows.scales.equal(&expected.scales));
        assert!(rows.values.view_dtype(Kind::Uint8).equal(&expected.values.view_dtype(Kind::Uint8)));
    }
}
