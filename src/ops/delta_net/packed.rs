//! Gated delta nets over the sequences of a micro-batch, whose completions may share prompts. A shared prompt is computed once; its completions start
//! from forks of its state, and its gradient is the sum of theirs.

use tch::{Device, Tensor};

use super::{
    DeltaChunks, DeltaHeads, DeltaOptions, DeltaRows, DeltaState, DeltaWeights, Forward, Results, Sequences, backward,
    conv, forward, run,
};
use crate::error::Result;
use crate::ops::attention::{Bounds, SharedBounds};

/// The layout of a micro-batch for gated delta nets. It is created once and used by all layers, in forward and backward.
#[derive(Debug)]
pub struct PackedSequences {
    parts: DeltaSequences,
}

#[derive(Debug)]
enum DeltaSequences {
    Separate(Sequences),
    Shared(SharedSequences),
}

#[derive(Debug)]
struct SharedSequences {
    num_prompt_tokens: i64,
    prompts: Sequences,
    completions: Sequences,
    /// Index of every completion's prompt.
    prompt_of: Tensor, // [N] int64
}

/// Intermediate results per chunk that a forward of [`PackedSequences`] keeps for its backward.
#[derive(Debug)]
pub struct PackedChunks {
    /// Results for shared prompts.
    prompts: Option<DeltaChunks>,
    /// Results for completions, or for whole sequences.
    rest: DeltaChunks,
}

impl PackedSequences {
    /// Creates the layout for sequences with these bounds and a convolution over `width` tokens.
    pub fn new(bounds: &Bounds, width: usize, device: Device) -> Self {
        let sequences = |bounds: &[i64]| {
            let first = bounds.first().copied().unwrap_or(0);
            let bounds: Vec<i64> = bounds.iter().map(|bound| bound - first).collect();
            Sequences::new(&bounds, width as i64, device)
        };
        let parts = match bounds {
            Bounds::Separate(cu_seqlens) => DeltaSequences::Separate(sequences(cu_seqlens)),
            Bounds::Shared(SharedBounds { prompts, groups, completions }) => {
                let starts = &completions[..completions.len().saturating_sub(1)];
                // If a group is empty, the next one starts at the same row.
                let prompt_of = starts.iter().map(|start| groups.partition_point(|group| group <= start) as i64 - 1);
                let prompt_of: Vec<i64> = prompt_of.collect();
                DeltaSequences::Shared(SharedSequences {
                    num_prompt_tokens: prompts.last().copied().unwrap_or(0),
                    prompts: sequences(prompts),
                    completions: sequences(completions),
                    prompt_of: Tensor::from_slice(&prompt_of).to_device(device),
                })
            }
        };
        Self { parts }
    }

    /// Whether kept chunks fit in the planned memory. They do not if many sequences are much shorter than a chunk.
    fn fill_chunks(&self) -> bool {
        let size = |sequences: &Sequences| (sequences.layout.num_tokens, sequences.chunks.count());
        let (tokens, chunks) = match &self.parts {
            DeltaSequences::Separate(sequences) => size(sequences),
            DeltaSequences::Shared(SharedSequences { prompts, completions, .. }) => {
                let (first, rest) = (size(prompts), size(completions));
                (first.0 + rest.0, first.1 + rest.1)
            }
        };
        let [chunk, mean] = [DeltaHeads::CHUNK, DeltaHeads::MEAN_TOKENS].map(|tokens| tokens as i64);
        chunks * chunk * mean <= tokens * (mean + chunk / 2)
    }

    /// Returns the outputs [T, H dv] in the rows' type, and the intermediate results per chunk if they are to be kept and fit in the planned memory.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn forward(
        &self,
        rows: &DeltaRows,
        weights: &DeltaWeights,
        options: DeltaOptions,
        keeps_chunks: bool,
    ) -> Result<(Tensor, Option<PackedChunks>)> {
        let keeps_chunks = keeps_chunks && self.fill_chunks();
        let shared = match &self.parts {
            DeltaSequences::Separate(sequences) => {
                let Results { output, chunks, .. } = run(rows, weights, None, sequences, options, keeps_chunks)?;
                return Ok((output, chunks.map(|rest| PackedChunks { prompts: None, rest })));
            }
            DeltaSequences::Shared(shared) => shared,
        };
        let (prompts, completions) = shared.split(rows);
        let first = run(&prompts, weights, None, &shared.prompts, options, keeps_chunks)?;
        let ends = DeltaState { conv: conv::last_rows(&prompts.qkv, None, &shared.prompts)?, rule: first.last };
        let starts = ends.fork(&shared.prompt_of)?;
        drop(ends);
        let rest = run(&completions, weights, Some(&starts), &shared.completions, options, keeps_chunks)?;
        let chunks = first.chunks.zip(rest.chunks).map(|(first, rest)| PackedChunks { prompts: Some(first), rest });
        Ok((Tensor::f_cat(&[first.output, rest.output], 0)?, chunks))
    }

    /// Returns the gradients of the rows, in the types of [`backward`]; adds those of the weights in place. `chunks` are those that [`Self::forward`]
    /// kept, if any; the bits are the same without.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    ///
    /// # Panics
    /// If `chunks` belong to other sequences.
    pub fn backward(
        &self,
        d_output: &Tensor, // [T, H dv]
        rows: &DeltaRows,
        weights: &DeltaWeights,
        options: DeltaOptions,
        chunks: Option<PackedChunks>,
        grads: &mut DeltaWeights,
    ) -> Result<DeltaRows> {
        let shared = match &self.parts {
            DeltaSequences::Separate(sequences) => {
                let forward = chunks.map_or(Forward::Again(None), |chunks| Forward::Kept(chunks.rest, None));
                return Ok(backward((d_output, None), rows, weights, forward, sequences, options, grads)?.0);
            }
            DeltaSequences::Shared(shared) => shared,
        };
        let (prompts, completions) = shared.split(rows);
        let (d_prompts, d_completions) = shared.split_rows(d_output);
        let back = |forward, grads: &mut DeltaWeights| {
            backward((&d_completions, None), &completions, weights, forward, &shared.completions, options, grads)
        };
        let ((d_rest, d_starts), of_prompts) = match chunks {
            Some(PackedChunks { prompts: of_prompts, rest }) => {
                let ends = conv::last_rows(&prompts.qkv, None, &shared.prompts)?;
                let tails = ends.f_index_select(0, &shared.prompt_of)?;
                let of_prompts = of_prompts.expect("chunks of shared prompts");
                (back(Forward::Kept(rest, Some(&tails)), grads)?, Forward::Kept(of_prompts, None))
            }
            None => {
                let (_, ends) = forward(&prompts, weights, None, &shared.prompts, options)?;
                let starts = ends.fork(&shared.prompt_of)?;
                drop(ends);
                (back(Forward::Again(Some(&starts)), grads)?, Forward::Again(None))
            }
        };
        let d_ends = d_starts.sum_of_forks(&shared.prompt_of, shared.prompts.num_sequences)?;
        drop(d_starts);
        let d_prompts = (&d_prompts, Some(&d_ends));
        let (d_first, _) = backward(d_prompts, &prompts, weights, of_prompts, &shared.prompts, options, grads)?;
        d_first.zip(&d_rest, |first, rest| Ok(Tensor::f_cat(&[first, rest], 0)?))
    }
}

impl SharedSequences {
    fn split_rows(&self, t: &Tensor) -> (Tensor, Tensor) {
        let (prompts, all) = (self.num_prompt_tokens, t.size()[0]);
        (t.narrow(0, 0, prompts), t.narrow(0, prompts, all - prompts))
    }

    /// Splits rows into those of prompts and those of completions.
    fn split(&self, DeltaRows { qkv, z, b, a }: &DeltaRows) -> (DeltaRows, DeltaRows) {
        let [qkv, z, b, a] = [qkv, z, b, a].map(|t| self.split_rows(t));
        (DeltaRows { qkv: qkv.0, z: z.0, b: b.0, a: a.0 }, DeltaRows { qkv: qkv.1, z: z.1, b: b.1, a: a.1 })
    }
}

impl DeltaRows {
    /// Combines the tensors of both rows with `f`.
    fn zip(&self, other: &Self, f: impl Fn(&Tensor, &Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            qkv: f(&self.qkv, &other.qkv)?,
            z: f(&self.z, &other.z)?,
            b: f(&self.b, &other.b)?,
            a: f(&self.a, &other.a)?,
        })
    }
}
