//! The input tensors of one engine step.

use std::ops::Range;

use tch::{Device, Tensor};

use super::scheduler::{Step, TokenRun};
use super::sequence::EngineSequence;
use crate::error::Result;
use crate::ops::delta_net::StoredAndRows;
use crate::torch;

/// Inputs of one step: T tokens in B runs, of which L rows are sampled from. A run is consecutive tokens of one sequence; in a decode step without
/// draft tokens each run is one token.
#[derive(Debug)]
pub(super) struct StepBatch {
    /// Whether this is a decode step: every run is one token.
    pub(super) is_decode: bool,
    /// Whether no run has keys and values in the cache from an earlier step.
    pub(super) is_uncached: bool,
    pub(super) token_ids: Tensor,      // [T] i64
    pub(super) positions: Tensor,      // [T] i64
    pub(super) slot_mapping: Tensor,   // [T] i64, block * block_size + offset
    pub(super) cu_seqlens: Vec<i64>,   // [B + 1], start of each run and end of the last
    pub(super) context_lens: Vec<i64>, // [B], tokens in the cache after this step
    pub(super) block_tables: Tensor,   // [B, longest table] i64, padded with 0
    pub(super) last_rows: Tensor,      // [L] i64, rows to sample from
    /// State page of each run, for a model with gated delta nets. In a decode step with draft tokens, several tokens share one page.
    pub(super) state_pages: Tensor, // i64
    /// Number of stored and new tokens of each state page. Set for a decode step with draft tokens, or with states that still have to process stored
    /// tokens.
    pub(super) drafted: Option<Vec<StoredAndRows>>,
    /// Adapter number of each row, -1 for the base model. Set if requests choose among several LoRA adapters.
    pub(super) adapters: Option<Tensor>, // [T] i32
}

impl StepBatch {
    /// Builds the input tensors of `step`, with the adapter of each row if `has_adapters`.
    pub(super) fn new(
        step: &Step,
        sequences: &[EngineSequence],
        block_size: usize,
        has_adapters: bool,
        device: Device,
    ) -> Result<Self> {
        let (mut token_ids, mut positions, mut slot_mapping) = (Vec::new(), Vec::new(), Vec::new());
        let (mut cu_seqlens, mut last_rows, mut adapters) = (vec![0], Vec::new(), Vec::new());
        let parts: Vec<(&TokenRun, Range<usize>)> = step.parts().collect();
        for (run, tokens) in &parts {
            let sequence = &sequences[run.sequence];
            for position in tokens.clone() {
                let token = run.token(sequence, position).expect("the host knows the tokens of its own steps");
                token_ids.push(i64::from(token));
                positions.push(position as i64);
                slot_mapping.push(sequence.slot(position, block_size) as i64);
                adapters.push(sequence.adapter_number());
            }
            cu_seqlens.push(token_ids.len() as i64);
            last_rows.extend((!run.samples.is_empty()).then_some(token_ids.len() as i64 - 1));
        }
        let pages = step.runs.iter().filter_map(|run| sequences[run.sequence].state_page);
        let drafted = step.runs.iter().map(|run| StoredAndRows { stored: run.num_stored, rows: run.tokens.len() });
        let is_plain = |run: &TokenRun| run.num_stored == 0 && run.drafts.token_ids.is_empty();
        let has_drafted = step.is_decode && !step.runs.iter().all(is_plain);
        let on_device = |values: &[i64]| torch::tensor_on(values, device);
        Ok(Self {
            is_decode: step.is_decode,
            is_uncached: parts.iter().all(|(_, tokens)| tokens.start == 0),
            token_ids: on_device(&token_ids)?,
            positions: on_device(&positions)?,
            slot_mapping: on_device(&slot_mapping)?,
            cu_seqlens,
            context_lens: parts.iter().map(|(_, tokens)| tokens.end as i64).collect(),
            block_tables: block_tables(&parts, sequences, block_size, device)?,
            last_rows: on_device(&last_rows)?,
            state_pages: on_device(&pages.map(i64::from).collect::<Vec<_>>())?,
            drafted: has_drafted.then(|| drafted.collect()),
            adapters: has_adapters.then(|| torch::tensor_on(&adapters, device)).transpose()?,
        })
    }
}

/// Block table of each run: the KV blocks that hold the context of its last token. [B, longest]
pub(super) fn block_tables(
    runs: &[(&TokenRun, Range<usize>)],
    sequences: &[EngineSequence],
    block_size: usize,
    device: Device,
) -> Result<Tensor> {
    let num_blocks = |(_, tokens): &(&TokenRun, Range<usize>)| tokens.end.div_ceil(block_size);
    let longest = runs.iter().map(num_blocks).max().unwrap_or(0);
    let mut tables = vec![0; runs.len() * longest];
    for (run, row) in runs.iter().zip(tables.chunks_mut(longest.max(1))) {
        let table = &sequences[run.0.sequence].block_table[..num_blocks(run)];
        row.iter_mut().zip(table).for_each(|(slot, &block)| *slot = i64::from(block));
    }
    Ok(torch::tensor_on(&tables, device)?.view([runs.len() as i64, longest as i64]))
}
