//! Inverted dropout whose mask is a pure function of (key, row, column). Nothing is kept for the backward, which applies the same mask to the
//! gradient.
//!
//! The adapters of a fused matrix (query, key and value; gate and up) share one mask of their common input; PEFT draws one for each. The key contains
//! seed, rank, update, micro-batch and layer, so a resumed run draws the same masks, and a run with another world size draws others.

use tch::Tensor;

use super::random::{RandomKey, dropout_scalars};
use crate::cuda::kernels;
use crate::error::Result;
use crate::torch;

/// The dropout mask of one use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Probability that an element is dropped.
    pub rate: f64,
    /// Random key of the mask.
    pub key: RandomKey,
}

impl Dropout {
    /// Derives the mask of one use, identified by `word`, from this one.
    pub fn fold(self, word: u64) -> Self {
        Self { key: self.key.fold(word), ..self }
    }

    /// Returns x / (1 - rate), or 0 with probability `rate`.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`]; the errors of the kernel.
    pub fn apply(&self, x: &Tensor /* [T, K] */) -> Result<Tensor> {
        if x.device().is_cuda() {
            let (threshold, kept) = dropout_scalars(self.rate);
            return kernels::dropout(&x.f_contiguous()?, self.key.words(), threshold, kept);
        }
        let (rows, columns) = (x.size()[0] as usize, x.size()[1] as usize);
        let mut mask = vec![0f32; rows * columns];
        for (row, mask) in mask.chunks_exact_mut(columns.max(1)).enumerate() {
            self.key.fill_dropout(row as u64, 0, self.rate, mask);
        }
        let mask = torch::tensor_on(&mask, x.device())?.view_as(x).f_to_kind(x.kind())?;
        Ok(x.f_mul(&mask)?) // [T, K]
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    /// The tolerance is five standard errors over 100,000 elements.
    #[test]
    fn dropout_drops_the_rate_and_keeps_the_mean() {
        let dropout = Dropout { rate: 0.3, key: RandomKey::new(1, 2) };
        let ones = Tensor::ones([100, 1000], (Kind::Double, Device::Cpu));
        let y = dropout.apply(&ones).unwrap();
        let dropped = y.eq(0.0).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
        assert!((dropped - 0.3).abs() < 0.0073, "{dropped}");
        assert!((y.max().double_value(&[]) - 1.0 / 0.7).abs() < 1e-6);
        assert!(dropout.apply(&ones).unwrap().equal(&y) && !dropout.fold(1).apply(&ones).unwrap().equal(&y));
        assert!(dropout.apply(&ones.narrow(0, 0, 7)).unwrap().equal(&y.narrow(0, 0, 7)), "a row's mask is its own");
    }
}
