//! Rows of the head that drafts tokens: which of them a step has, and what it has drafted so far.

use tch::Tensor;

use super::scheduler::Step;
use super::sequence::EngineSequence;
use crate::ops::exact::VisibleKeys;

/// Rows of the head.
#[derive(Debug, Default)]
pub(super) struct DraftHeadRows {
    pub token_ids: Vec<i64>,
    pub positions: Vec<i64>,
    pub slots: Vec<i64>,
    /// The blocks of their sequences, one behind the other.
    pub blocks: Vec<i64>,
    /// Keys that each row attends to, among the tokens of `blocks`.
    pub contexts: Vec<VisibleKeys>,
}

/// The head's part of a step: its rows of a prompt's tokens, and the hidden states that are kept for its next rows.
#[derive(Debug)]
pub(super) struct HeadWork {
    pub rows: DraftHeadRows,
    /// Places of the hidden states before the rows, among those of the step's tokens and then those of all pages.
    pub before: Vec<i64>,
    /// Hidden states that pages keep: the token's row in the step, and the place among those of all pages.
    pub kept: Vec<(i64, i64)>,
}

/// What the head has drafted of a step so far.
#[derive(Debug)]
pub(super) struct HeadDrafts {
    /// Runs of the step that may have a further draft, and their hidden states.
    pub runs: Vec<usize>,
    pub hidden: Tensor, // [runs, D]
}

impl DraftHeadRows {
    /// Adds rows of a sequence's tokens at the positions from `first` on, none of which is 0.
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
    /// The head's part of `step`, where pages keep the hidden states of `num_kept` rows each.
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
