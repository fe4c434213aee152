//! Grouped GEMMs of FP8 rows with the matrices of their experts. If the groups' ends are on a GPU, libtorch's grouped e4m3 GEMM is used. Otherwise
//! each expert has its own GEMM, and the host waits for the sizes of the groups. Tests compare the grouped GEMM and the engine's kernels with that
//! path.

use tch::{Kind, Tensor};

use super::{Dispatch, ExpertRows, Groups, each};
use crate::cuda::kernels::{GroupTiles, fp8_group_columns, grouped_weight_fp8};
use crate::cuda::{OpCost, timed};
use crate::error::Result;
use crate::ops::fp8::{self, ScaledRows};
use crate::ops::linear::Onto;
use crate::torch;

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
        self.product_fp8("grouped product in FP8", x, w, kind)
    }

    /// Computes [`Dispatch::backward_input`] with quantized rows of dy; quantizes the columns of every matrix on the fly. [R, K]
    ///
    /// # Errors
    /// The errors of [`fp8::backward_input`].
    pub fn backward_input_fp8(
        &self,
        dy: &ScaledRows, // [R, N]
        w: &Tensor,      // [E, N, K]
        kind: Kind,
    ) -> Result<Tensor> {
        let w = fp8::rounded_columns_of_each(w)?; // [E K, N]
        self.product_fp8("grouped product in FP8, gradient of its input", dy, &w, kind)
    }

    /// Computes dw += dy^T x for each expert's matrix, from the rows of that expert. The columns of dy and x are quantized, with one scale per expert
    /// and column. If the groups' ends are on a GPU, one kernel of this crate computes the gradients of all experts.
    ///
    /// # Errors
    /// The errors of [`fp8::weight_gradient`].
    pub fn accumulate_weight_fp8(
        &self,
        dy: ExpertRows<'_>, // [R, N]
        x: ExpertRows<'_>,  // [R, K]
        dw: &mut Tensor,    // [E, N, K]
    ) -> Result<()> {
        let Groups::Ends(ends) = &self.groups else {
            let (before, sizes) = self.groups.sizes()?;
            let [dy, x] = [dy.sorted(self)?, x.sorted(self)?];
            return each(before, &sizes, |expert, start, size| {
                let rows = |t: &Tensor| t.f_narrow(0, start, size);
                fp8::weight_gradient(&rows(&dy)?, &rows(&x)?, &dw.f_select(0, expert)?, Onto::Sum)
            });
        };
        let rows = self.tokens.numel();
        let tiles = timed("rounding to FP8", OpCost::default, || GroupTiles::new(ends, rows))?;
        let rounded = |x: ExpertRows<'_>| {
            let (x, tokens) = match x {
                ExpertRows::OfTokens(x) => (x.f_contiguous()?, Some(&self.tokens)),
                x => (x.sorted(self)?.f_contiguous()?, None),
            };
            let bytes = 5.0 * rows as f64 * x.size()[1] as f64; // two bytes are read twice, one byte is written
            timed("rounding to FP8", || OpCost { bytes, flop: 0.0 }, || fp8_group_columns(&x, tokens, &tiles))
        };
        let (dy, x) = (rounded(dy)?, rounded(x)?);
        let work = || fp8::cost([dw.size()[1], dw.size()[2], rows as i64]);
        let run = || grouped_weight_fp8(&dy, &x, &tiles, dw);
        timed("grouped product in FP8, added to its weight's gradient", work, run)
    }

    fn product_fp8(
        &self,
        name: &'static str,
        x: &ScaledRows, // [R, K]
        w: &ScaledRows, // [E N, K]
        kind: Kind,
    ) -> Result<Tensor> {
        let of_experts = |experts: i64| w.values.size()[0] / experts;
        if let Groups::Ends(ends) = &self.groups {
            let shape = [ends.size()[0], of_experts(ends.size()[0]), w.values.size()[1]];
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
            return timed(name, || fp8::cost([x.values.size()[0], shape[1], shape[2]]), run);
        }
        let (before, sizes) = self.groups.sizes()?;
        let (rows, columns) = (x.values.size()[0], of_experts(sizes.len() as i64));
        let y = Tensor::f_zeros([rows, columns], (kind, x.values.device()))?;
        let part = |of: &ScaledRows, start: i64, len: i64| -> Result<ScaledRows> {
            Ok(ScaledRows { values: of.values.f_narrow(0, start, len)?, scales: of.scales.f_narrow(0, start, len)? })
        };
        each(before, &sizes, |expert, start, size| {
            let own = fp8::forward(&part(x, start, size)?, &part(w, expert * columns, columns)?, None, kind)?;
            Ok(y.f_narrow(0, start, size)?.f_copy_(&own)?)
        })?;
        Ok(y) // [R, N]
    }
}

impl Groups {
    /// The number of rows before the first group, and the number of rows in each group.
    fn sizes(&self) -> Result<(i64, Vec<i64>)> {
        Ok(match self {
            Groups::Sizes { before, sizes } => (*before, sizes.clone()),
            Groups::Ends(ends) => {
                let ends = torch::i64_vec(&ends.f_to_kind(Kind::Int64)?)?;
                let starts = [0].into_iter().chain(ends.iter().copied());
                (0, ends.iter().zip(starts).map(|(end, start)| end - start).collect())
            }
        })
    }
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

    /// A row's gradient must use only the quantized columns of its own expert's matrix; rows of another rank's experts must have none.
    #[test]
    fn fp8_grouped_gemm_gradients_use_the_rounded_columns() {
        let rand = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        let (dy, w) = (rand(&[5, 6]), rand(&[4, 6, 16]));
        let experts = Tensor::from_slice(&[3i64, 0, 1, 3, 2, 0, 0, 1, 3, 2]).view([5, 2]);
        for own in [0..4, 1..3] {
            let dispatch = Dispatch::new(&experts, 4, own.clone(), Kind::Float).unwrap();
            let rows = dispatch.scatter_fp8(&fp8::rounded(&dy).unwrap()).unwrap();
            let weights = w.narrow(0, own.start as i64, own.len() as i64);
            let dx = dispatch.backward_input_fp8(&rows, &weights, Kind::Float).unwrap();
            for (token, choice) in (0..5).flat_map(|token| [(token, 0), (token, 1)]) {
                let expert = experts.int64_value(&[token, choice]);
                let one = fp8::rounded(&dy.narrow(0, token, 1)).unwrap();
                let expected = match own.contains(&(expert as usize)) {
                    true => fp8::backward_input(&one, &w.get(expert), Kind::Float).unwrap(),
                    false => Tensor::zeros([1, 16], (Kind::Float, Device::Cpu)),
                };
                let row = dispatch.rows.int64_value(&[token, choice]);
                assert!(dx.narrow(0, row, 1).allclose(&expected, 1e-6, 1e-6, false), "{token} {choice}");
            }
        }
    }

    /// An expert's gradient must use only the expert's own rows, with quantized columns; nothing may be added for an expert without rows. Rows that
    /// are already sorted and rows that are gathered by token must give equal gradients.
    #[test]
    fn gradients_of_weights_have_the_rounded_columns_of_their_rows() {
        let rand = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        let (dy, x) = (rand(&[5, 6]), rand(&[5, 16]));
        let experts = Tensor::from_slice(&[3i64, 0, 1, 3, 4, 0, 0, 1, 3, 4]).view([5, 2]);
        for own in [0..5, 1..4] {
            let dispatch = Dispatch::new(&experts, 5, own.clone(), Kind::Float).unwrap();
            let rows = [&dy, &x].map(|t| dispatch.scatter(t).unwrap());
            let before = rand(&[own.len() as i64, 6, 16]);
            let [sorted, gathered] = [(); 2].map(|()| before.copy());
            let [of_dy, of_x] = [0, 1].map(|factor: usize| ExpertRows::Sorted(&rows[factor]));
            dispatch.accumulate_weight_fp8(of_dy, of_x, &mut sorted.shallow_clone()).unwrap();
            let of_tokens = ExpertRows::OfTokens;
            dispatch.accumulate_weight_fp8(of_tokens(&dy), of_tokens(&x), &mut gathered.shallow_clone()).unwrap();
            assert!(sorted.equal(&gathered));
            for (index, expert) in own.enumerate() {
                let choices = dispatch.rows.masked_select(&experts.eq(expert as i64));
                let (choices, _) = choices.sort(0, false);
                let expected = before.get(index as i64);
                if choices.numel() > 0 {
                    let [dy, x] = [&rows[0], &rows[1]].map(|t| t.index_select(0, &choices));
                    fp8::weight_gradient(&dy, &x, &expected, Onto::Sum).unwrap();
                }
                assert!(sorted.get(index as i64).allclose(&expected, 1e-6, 1e-6, false), "expert {expert}");
            }
        }
    }
}
