//! Which sequence each packed token belongs to.

use tch::{Kind, Tensor};

/// The packing of a micro-batch, for reductions per sequence. Every packed token counts; a sequence may have none.
#[derive(Debug)]
pub(crate) struct Segments {
    sequence_of_token: Tensor, // [C] i64
    /// 1 for every token.
    pub ones: Tensor, // [C]
    /// Number of tokens of each sequence.
    pub lengths: Tensor, // [N]
    /// Number of sequences (N).
    pub num_sequences: i64,
}

impl Segments {
    /// `kind` is the dtype of the log-probabilities and of every sum.
    pub fn new(sequence_of_token: &Tensor, num_sequences: i64, kind: Kind) -> Self {
        let ones = Tensor::ones(sequence_of_token.size(), (kind, sequence_of_token.device()));
        let mut segments =
            Self { sequence_of_token: sequence_of_token.shallow_clone(), lengths: Tensor::new(), ones, num_sequences };
        segments.lengths = segments.sum(&segments.ones);
        segments
    }

    /// Sum of `x` over the tokens of each sequence. `[C] -> [N]`
    pub fn sum(&self, x: &Tensor) -> Tensor {
        Tensor::zeros([self.num_sequences], (x.kind(), x.device())).index_add(0, &self.sequence_of_token, x)
    }

    /// The value of each token's sequence. `[N] -> [C]`
    pub fn expand(&self, x: &Tensor) -> Tensor {
        x.index_select(0, &self.sequence_of_token)
    }

    /// Sequence lengths, at least 1, for division. `[N]`
    pub fn divisors(&self) -> Tensor {
        self.lengths.clamp_min(1.0)
    }
}
