//! One step of the engine: the tokens that it computes, and the sequences that sample from them.

use std::ops::Range;

use crate::rollout::sequence::EngineSequence;
use crate::rollout::speculation::Drafts;

/// The tokens that one step computes.
#[derive(Debug, PartialEq)]
pub(in crate::rollout) struct Step {
    /// Whether this is a decode step, with the last token of every running sequence and its draft tokens; else it has parts of prompts. In a decode
    /// step each token is a row of its own.
    pub(in crate::rollout) is_decode: bool,
    pub(in crate::rollout) runs: Vec<TokenRun>,
    /// Blocks (from, to) to copy after the forward pass: the partial last block of a prompt, for each completion but the first.
    pub(in crate::rollout) copies: Vec<(u32, u32)>,
    /// State pages (from, to) to copy after the forward pass.
    pub(in crate::rollout) state_copies: Vec<(u32, u32)>,
    /// Whether the step was scheduled with no other step under way, in order to have draft tokens.
    pub(in crate::rollout) waited: bool,
    /// Whether the step's draft tokens are placeholders that the model's draft head still has to fill.
    pub(in crate::rollout) asks_head: bool,
}

/// Consecutive tokens of one sequence.
#[derive(Debug, PartialEq)]
pub(in crate::rollout) struct TokenRun {
    pub(in crate::rollout) sequence: usize,
    pub(in crate::rollout) tokens: Range<usize>,
    /// Sequences that sample from the row before the draft tokens, which is the last row if there are none. Empty while a prompt is unfinished.
    pub(in crate::rollout) samples: Range<usize>,
    /// The draft tokens at the end of the run, which the sequence does not have yet. Tokens are sampled from their rows, too.
    pub(in crate::rollout) drafts: Drafts,
    /// Number of tokens before the run that the states have to process first: accepted draft tokens of the previous step.
    pub(in crate::rollout) num_stored: usize,
}

impl Step {
    /// Creates a step that copies nothing.
    pub(in crate::rollout) fn new(is_decode: bool, runs: Vec<TokenRun>) -> Self {
        Self { is_decode, runs, copies: Vec::new(), state_copies: Vec::new(), waited: false, asks_head: false }
    }

    /// Total number of tokens.
    pub(in crate::rollout) fn num_tokens(&self) -> usize {
        self.runs.iter().map(|run| run.tokens.len()).sum()
    }

    /// Whether the step has draft tokens. Only its result then says how many tokens its sequences gain, and where they continue.
    pub(in crate::rollout) fn has_drafts(&self) -> bool {
        self.runs.iter().any(|run| !run.drafts.token_ids.is_empty())
    }

    /// Whether a sequence of the step has several rows, or has a state that must first process accepted draft tokens of the previous step.
    pub(in crate::rollout) fn is_drafted(&self) -> bool {
        self.runs.iter().any(|run| run.num_stored > 0 || !run.drafts.token_ids.is_empty())
    }

    /// Replaces the placeholder draft tokens of all runs by `drafts`, which the draft head sampled on the device. `drafts` is empty if the host
    /// already knows the draft tokens.
    pub(in crate::rollout) fn take_all_drafts(&mut self, drafts: &[u32]) {
        let places = self.runs.iter_mut().flat_map(|run| &mut run.drafts.token_ids);
        places.zip(drafts).for_each(|(place, draft)| *place = *draft);
    }

    /// Sets the draft tokens at index `depth`, for the runs that have more than `depth` draft tokens.
    pub(in crate::rollout) fn take_drafts(&mut self, depth: usize, drafts: &[u32]) {
        let drafted = self.runs.iter_mut().filter_map(|run| run.drafts.token_ids.get_mut(depth));
        drafted.zip(drafts).for_each(|(place, draft)| *place = *draft);
    }

    /// Splits each run into parts that are computed in one row range: single tokens in a decode step, else whole runs.
    pub(in crate::rollout) fn parts(&self) -> impl Iterator<Item = (&TokenRun, Range<usize>)> {
        self.runs.iter().flat_map(|run| {
            let size = if self.is_decode { 1 } else { run.tokens.len().max(1) };
            run.tokens.clone().step_by(size).map(move |start| (run, start..start + size))
        })
    }
}

impl TokenRun {
    /// Creates a run without draft tokens.
    pub(in crate::rollout) fn new(sequence: usize, tokens: Range<usize>, samples: Range<usize>) -> Self {
        Self { sequence, tokens, samples, drafts: Drafts::default(), num_stored: 0 }
    }

    /// The token at a position of the run; `None` if a step under way samples it.
    pub(in crate::rollout) fn token(&self, sequence: &EngineSequence, position: usize) -> Option<u32> {
        let drafts = &self.drafts.token_ids;
        match position.checked_sub(self.tokens.end - drafts.len()) {
            Some(at) => drafts.get(at).copied(),
            None => sequence.token_ids.get(position).copied(),
        }
    }

    /// Number of rows that are sampled from.
    pub(in crate::rollout) fn num_sampled_rows(&self) -> usize {
        if self.samples.is_empty() { 0 } else { 1 + self.drafts.token_ids.len() }
    }

    /// Number of tokens that are sampled: several from one row at the end of a prompt, or one from each of several rows.
    pub(in crate::rollout) fn num_draws(&self) -> usize {
        self.samples.len() + self.drafts.token_ids.len()
    }
}
