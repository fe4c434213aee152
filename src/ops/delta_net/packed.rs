//! The sequences of a micro-batch, whose completions may share prompts. A shared prompt is computed once; its completions begin with
//! forks of its state, and its gradient is the sum of theirs.

use tch::{Device, Tensor};

use super::{DeltaOptions, DeltaRows, DeltaWeights, Sequences, backward, forward, outputs};
use crate::error::Result;
use crate::ops::attention::{Bounds, SharedBounds};

/// The layout of a micro-batch for gated delta nets; made once, shared by all layers, forward and backward.
#[derive(Debug)]
pub struct PackedSequences {
    parts: Parts,
}

#[derive(Debug)]
enum Parts {
    Separate(Sequences),
    Shared(Shared),
}

#[derive(Debug)]
struct Shared {
    num_prompt_tokens: i64,
    prompts: Sequences,
    completions: Sequences,
    /// The prompt of every completion.
    prompt_of: Tensor, // [N] int64
}

impl PackedSequences {
    /// For sequences with these bounds and a convolution over `width` tokens.
    pub fn new(bounds: &Bounds, width: usize, device: Device) -> Self {
        let sequences = |bounds: &[i64]| {
            let first = bounds.first().copied().unwrap_or(0);
            let bounds: Vec<i64> = bounds.iter().map(|bound| bound - first).collect();
            Sequences::new(&bounds, width as i64, device)
        };
        let parts = match bounds {
            Bounds::Separate(cu_seqlens) => Parts::Separate(sequences(cu_seqlens)),
            Bounds::Shared(SharedBounds { prompts, groups, completions }) => {
                let starts = &completions[..completions.len().saturating_sub(1)];
                // Where a group is empty, the next one begins at the same row.
                let prompt_of = starts.iter().map(|start| groups.partition_point(|group| group <= start) as i64 - 1);
                let prompt_of: Vec<i64> = prompt_of.collect();
                Parts::Shared(Shared {
                    num_prompt_tokens: prompts.last().copied().unwrap_or(0),
                    prompts: sequences(prompts),
                    completions: sequences(completions),
                    prompt_of: Tensor::from_slice(&prompt_of).to_device(device),
                })
            }
        };
        Self { parts }
    }

    /// Outputs [T, H dv], of the rows' kind.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn forward(&self, rows: &DeltaRows, weights: &DeltaWeights, options: DeltaOptions) -> Result<Tensor> {
        let shared = match &self.parts {
            Parts::Separate(sequences) => return outputs(rows, weights, None, sequences, options),
            Parts::Shared(shared) => shared,
        };
        let (prompts, completions) = shared.split(rows);
        let (o_prompts, ends) = forward(&prompts, weights, None, &shared.prompts, options)?;
        let starts = ends.fork(&shared.prompt_of)?;
        let o = outputs(&completions, weights, Some(&starts), &shared.completions, options)?;
        Ok(Tensor::f_cat(&[o_prompts, o], 0)?)
    }

    /// Gradients of the rows, of the kinds that [`backward`] gives; those of the weights are added in place.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn backward(
        &self,
        d_output: &Tensor, // [T, H dv]
        rows: &DeltaRows,
        weights: &DeltaWeights,
        options: DeltaOptions,
        grads: &mut DeltaWeights,
    ) -> Result<DeltaRows> {
        let shared = match &self.parts {
            Parts::Separate(sequences) => {
                return Ok(backward((d_output, None), rows, weights, None, sequences, options, grads)?.0);
            }
            Parts::Shared(shared) => shared,
        };
        let (prompts, completions) = shared.split(rows);
        let (d_prompts, d_completions) = shared.split_rows(d_output);
        let (_, ends) = forward(&prompts, weights, None, &shared.prompts, options)?;
        let starts = ends.fork(&shared.prompt_of)?;
        let d_completions = (&d_completions, None);
        let (d_rest, d_starts) =
            backward(d_completions, &completions, weights, Some(&starts), &shared.completions, options, grads)?;
        let d_ends = d_starts.sum_of_forks(&shared.prompt_of, ends.rule.size()[0])?;
        drop((starts, d_starts, ends));
        let d_prompts = (&d_prompts, Some(&d_ends));
        let (d_first, _) = backward(d_prompts, &prompts, weights, None, &shared.prompts, options, grads)?;
        d_first.zip(&d_rest, |first, rest| Ok(Tensor::f_cat(&[first, rest], 0)?))
    }
}

impl Shared {
    fn split_rows(&self, t: &Tensor) -> (Tensor, Tensor) {
        let (prompts, all) = (self.num_prompt_tokens, t.size()[0]);
        (t.narrow(0, 0, prompts), t.narrow(0, prompts, all - prompts))
    }

    /// Rows of prompts and of completions.
    fn split(&self, DeltaRows { qkv, z, b, a }: &DeltaRows) -> (DeltaRows, DeltaRows) {
        let [qkv, z, b, a] = [qkv, z, b, a].map(|t| self.split_rows(t));
        (DeltaRows { qkv: qkv.0, z: z.0, b: b.0, a: a.0 }, DeltaRows { qkv: qkv.1, z: z.1, b: b.1, a: a.1 })
    }
}

impl DeltaRows {
    /// Rows that `f` makes of the rows of both.
    fn zip(&self, other: &Self, f: impl Fn(&Tensor, &Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            qkv: f(&self.qkv, &other.qkv)?,
            z: f(&self.z, &other.z)?,
            b: f(&self.b, &other.b)?,
            a: f(&self.a, &other.a)?,
        })
    }
}
