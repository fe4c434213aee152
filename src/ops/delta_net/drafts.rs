//! Speculative decoding with gated delta nets: steps in which a sequence has its newest token followed by draft tokens, which may be rejected. The
//! stored state includes only the newest token, so it never has to be rolled back. The inputs of each draft are stored; once it is known which drafts
//! were accepted, the next step applies these to the state first. Every token is computed as in [`step`](super::step), with the same bits.
//!
//! T rows of N sequences, S draft slots per sequence, C channels of the convolution, H value heads.

use tch::{Device, Kind, Tensor};

use super::{DeltaHeads, DeltaOptions, DeltaRows, DeltaState, DeltaWeights, advance, step};
use crate::error::{Error, Result};
use crate::torch;

/// Which rows of a step belong to each sequence, and how many stored drafts it applies to its state first.
#[derive(Debug)]
pub struct DraftedRows {
    /// For each index of a stored draft: the sequences that apply it.
    stored: Vec<Tensor>, // [n] int64
    /// For each depth: the sequences that have a row at that depth, and these rows. All sequences have a first row.
    own: Vec<[Tensor; 2]>, // [n] int64
}

impl DraftedRows {
    /// Creates the tables for sequences with the given numbers of stored drafts and of rows; a sequence's rows are consecutive.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn new(sequences: &[StoredAndRows], device: Device) -> Result<Self> {
        let starts = sequences.iter().scan(0, |next, sequence| {
            let start = *next;
            *next += sequence.rows;
            Some(start)
        });
        let starts: Vec<usize> = starts.collect();
        let those = |has: &dyn Fn(&StoredAndRows) -> bool| -> Vec<usize> {
            sequences.iter().enumerate().filter(|(_, sequence)| has(sequence)).map(|(index, _)| index).collect()
        };
        let tensor = |indices: &[usize]| {
            let indices: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
            torch::tensor_on(&indices, device)
        };
        let most = |count: fn(&StoredAndRows) -> usize| sequences.iter().map(count).max().unwrap_or(0);
        let stored = (0..most(|sequence| sequence.stored)).map(|at| tensor(&those(&|sequence| sequence.stored > at)));
        let own = (0..most(|sequence| sequence.rows)).map(|depth| {
            let own = those(&|sequence| sequence.rows > depth);
            let rows: Vec<usize> = own.iter().map(|&index| starts[index] + depth).collect();
            Ok([tensor(&own)?, tensor(&rows)?])
        });
        Ok(Self { stored: stored.collect::<Result<_>>()?, own: own.collect::<Result<_>>()? })
    }
}

/// Sizes of one sequence's part of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoredAndRows {
    /// Number of stored drafts of the previous step to apply to the state.
    pub stored: usize,
    /// Number of rows: the newest token and its drafts.
    pub rows: usize,
}

/// States and stored drafts of sequences.
#[derive(Debug)]
pub struct DraftedState {
    /// The states after the tokens that were applied.
    pub state: DeltaState,
    /// Inputs of the drafts that follow: what the convolution reads, then `b` and `a`.
    pub inputs: Tensor, // [N, S, at least C + 2 H], of the rows' kind
    /// Type in which states are stored; they are rounded to it after every token.
    pub kind: Kind,
}

impl DraftedState {
    /// Number of columns of one draft's inputs.
    pub fn input_columns(heads: DeltaHeads) -> usize {
        heads.channels() + 2 * heads.num_value_heads
    }

    /// Applies the stored drafts that `rows` counts to the states.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn take_in(&mut self, rows: &DraftedRows, weights: &DeltaWeights, options: DeltaOptions) -> Result<()> {
        for (at, sequences) in rows.stored.iter().enumerate() {
            let inputs = self.inputs.select(1, at as i64).f_index_select(0, sequences)?;
            let mut state = self.state.fork(sequences)?;
            let _ = advance(&of_inputs(&inputs, options.heads), weights, &mut state, options.heads)?;
            round(&mut state, self.kind)?;
            self.state.put(sequences, &state)?;
        }
        Ok(())
    }

    /// Applies stored drafts and the first row of every sequence to the states, computes all rows, and stores the inputs of the other rows. [T, H dv]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn step(
        &mut self,
        all: &DeltaRows, // [T, ..]
        rows: &DraftedRows,
        weights: &DeltaWeights,
        options: DeltaOptions,
    ) -> Result<Tensor> {
        self.take_in(rows, weights, options)?;
        let output = all.z.f_empty_like()?;
        let compute = |rows: &Tensor, state: &mut DeltaState| {
            let own = all.select(rows)?;
            let o = step(&own, weights, state, options)?;
            let _ = output.shallow_clone().f_index_copy_(0, rows, &o)?;
            round(state, self.kind)?;
            Ok::<_, Error>(own)
        };
        let [first, drafts @ ..] = &rows.own[..] else { return Ok(output) };
        compute(&first[1], &mut self.state)?;
        if drafts.is_empty() {
            return Ok(output);
        }
        let mut ahead = self.state.fork(&first[0])?; // of all sequences
        for (at, [sequences, rows]) in drafts.iter().enumerate() {
            let mut state = ahead.fork(sequences)?;
            let DeltaRows { qkv, b, a, .. } = compute(rows, &mut state)?;
            ahead.put(sequences, &state)?;
            let inputs = Tensor::f_cat(&[qkv, b, a], 1)?;
            let room = self.inputs.select(1, at as i64).narrow(1, 0, inputs.size()[1]);
            let _ = room.shallow_clone().f_index_copy_(0, sequences, &inputs)?;
        }
        Ok(output)
    }
}

/// Makes rows, without a gate, from stored inputs.
fn of_inputs(inputs: &Tensor /* [N, columns] */, heads: DeltaHeads) -> DeltaRows {
    let (channels, value_heads) = (heads.channels() as i64, heads.num_value_heads as i64);
    DeltaRows {
        qkv: inputs.narrow(1, 0, channels),
        z: inputs.narrow(1, 0, 0),
        b: inputs.narrow(1, channels, value_heads),
        a: inputs.narrow(1, channels + value_heads, value_heads),
    }
}

fn round(state: &mut DeltaState, kind: Kind) -> Result<()> {
    let wide = state.rule.kind();
    if wide != kind {
        state.rule = state.rule.f_to_kind(kind)?.f_to_kind(wide)?;
    }
    Ok(())
}

impl DeltaState {
    /// Replaces the states of some sequences.
    fn put(&mut self, sequences: &Tensor /* [n] int64 */, states: &Self) -> Result<()> {
        for (all, new) in [(&mut self.conv, &states.conv), (&mut self.rule, &states.rule)] {
            let _ = all.f_index_copy_(0, sequences, new)?;
        }
        Ok(())
    }
}

impl DeltaRows {
    /// Selects some of the rows.
    fn select(&self, rows: &Tensor /* [n] int64 */) -> Result<Self> {
        let Self { qkv, z, b, a } = self;
        let select = |t: &Tensor| t.f_index_select(0, rows);
        Ok(Self { qkv: select(qkv)?, z: select(z)?, b: select(b)?, a: select(a)? })
    }
}
