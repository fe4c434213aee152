//! The rows of the draft head in a step, and the draft tokens that it has computed so far.

use tch::Tensor;

use super::scheduler::Step;
use super::sequence::EngineSequence;
use crate::ops::exact::VisibleKeys;

/// Inputs of the draft head: one row per token.
#[derive(Debug, Default)]
pub(super) struct DraftHeadRows {
    pub token_ids: Vec<i64>,
    pub positions: Vec<i64>,
    pub slots: Vec<i64>,
    /// KV blocks of the rows' sequences, concatenated.
    pub blocks: Vec<i64>,
    /// The keys that each row attends to, as ranges of the tokens in `blocks`.
    pub contexts: Vec<VisibleKeys>,
}

/// The draft head's work in a step: rows for a prompt's tokens, and the hidden states to keep for its next rows.
#[derive(Debug)]
pub(super) struct HeadWork {
    pub rows: DraftHeadRows,
    /// For each row, the index of the hidden state at the token before it: first the step's tokens, then the rows of all state pages.
    pub before: Vec<i64>,
    /// Hidden states to store in state pages: the token's row in the step, and the destination row among those of all pages.
    pub kept: Vec<(i64, i64)>,
}

/// The draft head's progress within one decode step.
#[derive(Debug)]
pub(super) struct HeadDrafts {
    /// Runs of the step that may get a further draft token.
    pub runs: Vec<usize>,
    pub hidden: Tensor, // [runs, D]
}

impl DraftHeadRows {
    /// Adds a row for each of `token_ids`, which are a sequence's tokens from position `first` (at least 1) on.
    pub(super) fn add(&mut self, sequence: &EngineSequence, first: usize, token_ids: &[u32], block_size: usize) {
        let (end, start) = (first + token_ids.len(), self.blocks.len() * block_size);
        let blocks = &sequence.block_table[..end.div_ceil(block_size)];
        self.blocks.extend(blocks.iter().map(|&block| i64::from(block)));
        for (position, &token_id) in (first..end).zip(token_ids) {
            self.token_ids.push(token_id.into());
            self.positions.push(position as i64);
            self.slots.push(sequence.slot(position, block_size) as i64);
        }
        self.contexts.extend(VisibleKeys::of_tokens(0..0, start + 1..start + end, start + first, None));
    }
}

impl HeadWork {
    /// Collects the draft head's work in `step`; each state page keeps the hidden states of `num_kept` rows.
    pub(super) fn new(step: &Step, sequences: &[EngineSequence], num_kept: usize, block_size: usize) -> Self {
        let (mut rows, mut before, mut kept, mut first_row) = (DraftHeadRows::default(), Vec::new(), Vec::new(), 0);
        let num_tokens = step.num_tokens() as i64;
        for run in &step.runs {
            let (sequence, tokens) = (&sequences[run.sequence], run.tokens.clone());
            let page = i64::from(sequence.state_page.expect("a sequence that runs has a page"));
            let of_page = |row: usize| page * num_kept as i64 + row as i64;
            let row_of = |position: usize| (first_row + position - tokens.start) as i64;
            if !step.is_decode {
                let first = tokens.start.max(1);
                rows.add(sequence, first, &sequence.token_ids[first..tokens.end.max(first)], block_size);
                let place = |position: usize| match position > tokens.start {
                    true => row_of(position - 1),
                    false => num_tokens + of_page(0),
                };
                before.extend((first..tokens.end).map(place));
            }
            let newest = if step.is_decode { tokens.start } else { tokens.end - 1 };
            kept.extend((newest..tokens.end).map(|position| (row_of(position), of_page(position - newest))));
            first_row += tokens.len();
        }
        Self { rows, before, kept }
    }
}
