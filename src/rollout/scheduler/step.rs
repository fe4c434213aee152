//! One step: the tokens that it computes, and the draws from their rows.

use std::ops::Range;

use crate::rollout::sequence::EngineSequence;
use crate::rollout::speculation::Drafts;

/// The tokens that one step computes.
#[derive(Debug, PartialEq)]
pub(in crate::rollout) struct Step {
    /// The last token of every running sequence, with its drafts, rather than parts of prompts: each token is a row of its own.
    pub(in crate::rollout) is_decode: bool,
    pub(in crate::rollout) runs: Vec<TokenRun>,
    /// Blocks (from, to) to copy after the forward: a prompt's last partial block, for each completion but the first.
    pub(in crate::rollout) copies: Vec<(u32, u32)>,
    /// Pages of states (from, to) to copy after the forward.
    pub(in crate::rollout) state_copies: Vec<(u32, u32)>,
    /// It was scheduled with no other under way, to have drafts.
    pub(in crate::rollout) waited: bool,
    /// Its drafts are room for those of the model's head, which makes them.
    pub(in crate::rollout) asks_head: bool,
}

/// Consecutive tokens of one sequence.
#[derive(Debug, PartialEq)]
pub(in crate::rollout) struct TokenRun {
    pub(in crate::rollout) sequence: usize,
    pub(in crate::rollout) tokens: Range<usize>,
    /// Sequences that sample from the row in front of the drafts, the last one where there are none; none while a prompt is unfinished.
    pub(in crate::rollout) samples: Range<usize>,
    /// The last tokens, which the sequence does not have yet: it samples from their rows, too.
    pub(in crate::rollout) drafts: Drafts,
    /// Tokens in front of it that the sequence's states take in first: drafts of the step before, which were drawn.
    pub(in crate::rollout) num_stored: usize,
}

impl Step {
    /// A step that copies nothing.
    pub(in crate::rollout) fn new(is_decode: bool, runs: Vec<TokenRun>) -> Self {
        Self { is_decode, runs, copies: Vec::new(), state_copies: Vec::new(), waited: false, asks_head: false }
    }

    /// Tokens in all.
    pub(in crate::rollout) fn num_tokens(&self) -> usize {
        self.runs.iter().map(|run| run.tokens.len()).sum()
    }

    /// Whether some of them are drafts: how many tokens its sequences gain, and where they go on, is known with its result alone.
    pub(in crate::rollout) fn has_drafts(&self) -> bool {
        self.runs.iter().any(|run| !run.drafts.token_ids.is_empty())
    }

    /// Takes in drafts that have `depth` others before them, of the runs that have so many.
    pub(in crate::rollout) fn take_drafts(&mut self, depth: usize, drafts: &[u32]) {
        let drafted = self.runs.iter_mut().filter_map(|run| run.drafts.token_ids.get_mut(depth));
        drafted.zip(drafts).for_each(|(place, draft)| *place = *draft);
    }

    /// Tokens that see the context of the one before them, by run: of a decode step each one by itself.
    pub(in crate::rollout) fn parts(&self) -> impl Iterator<Item = (&TokenRun, Range<usize>)> {
        self.runs.iter().flat_map(|run| {
            let size = if self.is_decode { 1 } else { run.tokens.len().max(1) };
            run.tokens.clone().step_by(size).map(move |start| (run, start..start + size))
        })
    }
}

impl TokenRun {
    /// Tokens without drafts.
    pub(in crate::rollout) fn new(sequence: usize, tokens: Range<usize>, samples: Range<usize>) -> Self {
        Self { sequence, tokens, samples, drafts: Drafts::default(), num_stored: 0 }
    }

    /// The token at a position of the run; none that a step under way samples.
    pub(in crate::rollout) fn token(&self, sequence: &EngineSequence, position: usize) -> Option<u32> {
        let drafts = &self.drafts.token_ids;
        match position.checked_sub(self.tokens.end - drafts.len()) {
            Some(at) => drafts.get(at).copied(),
            None => sequence.token_ids.get(position).copied(),
        }
    }

    /// Rows that are sampled from.
    pub(in crate::rollout) fn num_sampled_rows(&self) -> usize {
        if self.samples.is_empty() { 0 } else { 1 + self.drafts.token_ids.len() }
    }

    /// Tokens that are sampled: several from one row, of a prompt, or one from each of several rows.
    pub(in crate::rollout) fn num_draws(&self) -> usize {
        self.samples.len() + self.drafts.token_ids.len()
    }
}
