//! A decode step over a synthetic batch, for timing.

use std::sync::Arc;

use super::inputs::DraftPlaces;
use super::runner::GpuRunner;
use crate::cuda::TorchStream;
use crate::error::{Error, Result};
use crate::ranks::Collective;
use crate::rollout::engine::{Engine, RolloutEngine};
use crate::rollout::sampler::Draw;
use crate::rollout::scheduler::{Step, TokenRun};
use crate::rollout::sequence::EngineSequence;
use crate::rollout::state_pages::SequenceMemory;
use crate::rollout::weights::EngineWeights;
use crate::types::SamplingParams;

/// Shape of a synthetic batch.
#[derive(Debug, Clone, Copy)]
pub struct TrialBatch {
    /// Number of sequences.
    pub sequences: usize,
    /// Number of neighbouring sequences that share a prompt.
    pub group: usize,
    /// Tokens of a prompt; a group shares its full blocks.
    pub prompt_len: usize,
    /// Tokens of each sequence.
    pub context: usize,
}

/// A decode step whose inputs are on the GPU.
pub struct TrialStep<'a> {
    /// Queues the step on `stream`. It may be called any number of times, and allocates nothing, so it can be captured.
    pub run: &'a mut dyn FnMut() -> Result<()>,
    /// The engine's stream.
    pub stream: &'a TorchStream,
    /// The engine's tensor-parallel group; all its ranks run the step.
    pub tp: &'a dyn Collective,
    /// The weights that the step reads.
    pub weights: &'a EngineWeights<'a>,
    /// Bytes of one token in this rank's KV cache.
    pub cached_token_bytes: f64,
    /// Whether all-reduces are done by a kernel of this crate, which includes the norm.
    pub sums_have_norms: bool,
}

impl std::fmt::Debug for TrialStep<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrialStep").field("cached_token_bytes", &self.cached_token_bytes).finish_non_exhaustive()
    }
}

impl RolloutEngine<'_> {
    /// Calls `work` with one decode step over a synthetic batch. The step overwrites the cache, so all kept sequences are dropped. Only on a GPU, in
    /// an engine with one stage; collective over the tensor-parallel group.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on a CPU, with several stages, or if the batch does not fit into the engine; the errors of `work`.
    pub fn try_step<R>(&mut self, batch: TrialBatch, work: impl FnOnce(TrialStep<'_>) -> Result<R>) -> Result<R> {
        self.engine.drop_kept(); // the step overwrites blocks
        let RolloutEngine { engine, weights, stats, .. } = self;
        let refuse = |expected: &str, got: String| {
            Err(Error::InvalidArgument { op: "RolloutEngine::try_step", expected: expected.into(), got })
        };
        if engine.ranks().stages.count() > 1 {
            return refuse("an engine with one pipeline stage", format!("{} stages", engine.ranks().stages.count()));
        }
        let Engine { spec, gpu: Some(gpu), kv_cache, states, options, ranks, .. } = &mut **engine else {
            return refuse("an engine on a GPU", "an engine on a CPU".into());
        };
        if batch.sequences > options.max_num_seqs {
            return refuse(&format!("at most max_num_seqs = {} sequences", options.max_num_seqs), format!("{batch:?}"));
        }
        let block_size = kv_cache.block_size();
        let Some(mut sequences) = batch.made_up(spec.vocab_size, stats.num_blocks, block_size) else {
            return refuse(&format!("a batch that fits into {} KV blocks", stats.num_blocks), format!("{batch:?}"));
        };
        if states.is_some() {
            (0..).zip(&mut sequences).for_each(|(page, sequence)| sequence.state_page = Some(page));
        }
        let mut runner =
            GpuRunner::new(gpu, (spec, weights), SequenceMemory { kv_cache, states: states.as_ref() }, ranks)?;
        runner.try_step(&sequences, work)
    }
}

impl GpuRunner<'_> {
    fn try_step<R>(
        &mut self,
        sequences: &[EngineSequence],
        work: impl FnOnce(TrialStep<'_>) -> Result<R>,
    ) -> Result<R> {
        let run = |(index, sequence): (usize, &EngineSequence)| {
            let context = sequence.token_ids.len();
            TokenRun::new(index, context - 1..context, index..index + 1)
        };
        let runs = sequences.iter().enumerate().map(run).collect();
        let step = Step::new(true, runs);
        let draws = sequences.iter().enumerate().map(|(row, EngineSequence { params, token_ids, .. })| Draw {
            row,
            params,
            step: 0,
            prompt_id: 0,
            sample: row,
            token_ids,
            drafts: &[],
            allowed: None,
        });
        let draws: Vec<Draw> = draws.collect();
        let drafted = DraftPlaces::default();
        let packing = self.packing((&step, &draws, sequences), &drafted);
        let sums_have_norms = self.state.sums.as_ref().is_some_and(|sums| sequences.len() <= sums.rows());
        let (tp, weights, cached_token_bytes) = (self.tp, self.weights, self.memory.kv_cache.token_bytes());
        self.prepare_decode(&packing, |stream, run| {
            work(TrialStep { run, stream, tp, weights, cached_token_bytes, sums_have_norms })
        })
    }
}

impl TrialBatch {
    /// Places the sequences in the blocks of an empty cache; `None` if they do not fit.
    fn made_up(self, vocab_size: usize, num_blocks: usize, block_size: usize) -> Option<Vec<EngineSequence>> {
        let Self { sequences: count, group, prompt_len, context } = self;
        let (num_shared, longest) = (prompt_len / block_size, context.div_ceil(block_size));
        let mut free = 0..num_blocks as u32;
        let (params, mut sequences) = (Arc::<SamplingParams>::default(), Vec::<EngineSequence>::with_capacity(count));
        for index in 0..count {
            let prompt = vec![1; prompt_len.clamp(1, context)];
            let mut sequence = EngineSequence::new(index / group, params.clone(), &prompt, context);
            // Use different tokens in each row: equal rows take less power, so the GPU would clock higher.
            let last = 1 + index * (vocab_size - 1) / count;
            sequence.token_ids.resize(context, last as u32);
            sequence.block_table = match index % group {
                0 => free.by_ref().take(num_shared).collect(),
                member => sequences[index - member].block_table.clone(),
            };
            sequences.push(sequence);
        }
        // All sequences grow at the same time, so interleave their blocks in memory.
        for _ in num_shared..longest {
            sequences.iter_mut().zip(free.by_ref()).for_each(|(sequence, block)| sequence.block_table.push(block));
        }
        sequences.iter().all(|sequence| sequence.block_table.len() >= longest).then_some(sequences)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benchmark_groups_share_the_full_blocks_of_their_prompt() {
        let batch = TrialBatch { sequences: 4, group: 2, prompt_len: 9, context: 14 };
        let sequences = batch.made_up(100, 12, 4).unwrap();
        let tables: Vec<&[u32]> = sequences.iter().map(|sequence| &*sequence.block_table).collect();
        assert_eq!(tables, [[0, 1, 4, 8], [0, 1, 5, 9], [2, 3, 6, 10], [2, 3, 7, 11]]);
        assert_eq!(sequences.iter().map(|sequence| sequence.token_ids[13]).collect::<Vec<_>>(), [1, 25, 50, 75]);
        assert!(sequences.iter().all(|sequence| sequence.token_ids.len() == 14));
        assert!(batch.made_up(100, 11, 4).is_none());
    }
}
