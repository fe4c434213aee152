//! Products of rows that are rounded to FP8 with the matrices of their experts: the reference of an engine's kernels.

use tch::{Kind, Tensor};

use super::{Dispatch, Groups, each};
use crate::error::Result;
use crate::ops::fp8::{self, ScaledRows};
use crate::torch;

impl Dispatch {
    /// [`Dispatch::forward`] of rounded rows, of a kind. [R, N] One product an expert, for which the host waits.
    ///
    /// # Errors
    /// The errors of [`fp8::forward`].
    pub fn forward_fp8(
        &self,
        x: &ScaledRows, // [R, K]
        w: &ScaledRows, // [E N, K]
        kind: Kind,
    ) -> Result<Tensor> {
        let (before, sizes) = self.groups.sizes()?;
        let (rows, columns) = (x.values.size()[0], w.values.size()[0] / sizes.len() as i64);
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
    /// The rows before the first group, and how many each group has.
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

    /// Each row is the product of its rounded values with the rounded matrix of its expert alone; rows of experts that are another rank's are 0.
    #[test]
    fn rows_have_the_rounded_matrices_of_their_experts() {
        let rand = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        let (x, w) = (rand(&[5, 16]), rand(&[4, 6, 16]));
        let experts = Tensor::from_slice(&[3i64, 0, 1, 3, 2, 0, 0, 1, 3, 2]).view([5, 2]);
        for own in [0..4, 1..3] {
            let dispatch = Dispatch::new(&experts, (4, own.clone()), Kind::Float).unwrap();
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
}
