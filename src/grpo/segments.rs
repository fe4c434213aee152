//! Which sequence each packed token belongs to, and which tokens count.

use tch::{Kind, Tensor};

/// The packing of a micro-batch, for reductions per sequence.
#[derive(Debug)]
pub(crate) struct Segments {
    sequence_of_token: Tensor, // [C] i64
    /// 1 where the token counts, else 0.
    pub mask: Tensor, // [C]
    not_counted: Tensor,       // [C] bool
    /// Tokens that count in each sequence.
    pub lengths: Tensor, // [N]
    /// N.
    pub num_sequences: i64,
}

impl Segments {
    /// `kind` is that of the log-probabilities: every mask and sum has it.
    pub fn new(sequence_of_token: &Tensor, token_mask: &Tensor, num_sequences: i64, kind: Kind) -> Self {
        let mask = token_mask.to_kind(kind);
        let mut segments = Self {
            sequence_of_token: sequence_of_token.shallow_clone(),
            not_counted: mask.eq(0.0),
            lengths: Tensor::new(),
            mask,
            num_sequences,
        };
        segments.lengths = segments.sum(&segments.mask);
        segments
    }

    /// `x` with exact zeros on tokens that do not count, whatever stands there. `[C] -> [C]`
    pub fn masked(&self, x: &Tensor) -> Tensor {
        x.masked_fill(&self.not_counted, 0.0)
    }

    /// `x` with NaN on tokens that do not count. `[C] -> [C]`
    pub fn counted(&self, x: &Tensor) -> Tensor {
        x.masked_fill(&self.not_counted, f64::NAN)
    }

    /// Sum of `x` over the tokens of each sequence. `[C] -> [N]`
    pub fn sum(&self, x: &Tensor) -> Tensor {
        Tensor::zeros([self.num_sequences], (x.kind(), x.device())).index_add(0, &self.sequence_of_token, x)
    }

    /// Each token's own sequence's value. `[N] -> [C]`
    pub fn expand(&self, x: &Tensor) -> Tensor {
        x.index_select(0, &self.sequence_of_token)
    }

    /// Lengths that can be divided by: at least 1. `[N]`
    pub fn divisors(&self) -> Tensor {
        self.lengths.clamp_min(1.0)
    }
}
