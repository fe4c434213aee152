//! The inputs of a step: 32-bit words, packed on the host, uploaded in one copy, and viewed as tensors on the device.

use std::collections::HashMap;
use std::ops::Range;

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::rollout::sampler::Draw;
use crate::rollout::scheduler::{Step, TokenRun};
use crate::rollout::sequence::EngineSequence;
use crate::types::SamplingParams;

/// Allocates sections of the upload buffer, each aligned to four words.
#[derive(Debug)]
pub(super) struct Words<'a> {
    words: &'a mut [i32],
    len: usize,
}

impl<'a> Words<'a> {
    pub(super) fn new(words: &'a mut [i32]) -> Self {
        Self { words, len: 0 }
    }

    /// Writes a section of `len` words: `values`, then `rest` as padding.
    pub(super) fn put(&mut self, len: usize, values: impl IntoIterator<Item = i32>, rest: i32) -> Result<Range<usize>> {
        let range = self.len..self.len + len;
        let free = self.words.len();
        let section = self.words.get_mut(range.clone()).ok_or_else(|| Error::InvalidArgument {
            op: "Words::put",
            expected: format!("at most {free} 32-bit words of step input"),
            got: format!("{len} words after {} others", range.start),
        })?;
        let mut values = values.into_iter();
        section.iter_mut().for_each(|word| *word = values.next().unwrap_or(rest));
        self.len = range.end.next_multiple_of(4).min(free);
        Ok(range)
    }

    /// Number of words used so far.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

/// The step, draws and sequences whose inputs are packed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packing<'a> {
    pub(super) step: &'a Step,
    pub(super) draws: &'a [Draw<'a>],
    pub(super) sequences: &'a [EngineSequence],
    pub(super) block_size: usize,
    /// Whether requests choose among LoRA adapters.
    pub(super) has_adapters: bool,
    /// Whether the engine has states that take drafts in.
    pub(super) takes_drafts_in: bool,
    /// Hidden states that a page keeps for a draft head, 0 without one.
    pub(super) num_kept: usize,
    /// Where the drafts of a sequence are that the head has made, among sampled tokens.
    pub(super) drafted: &'a DraftPlaces,
}

/// Places of drafts among the tokens on the device, by sequence.
pub(super) type DraftPlaces = HashMap<usize, Vec<i32>>;

impl Packing<'_> {
    /// The token at a position of a run, or the complement of its place on the device, where that alone knows it.
    pub(super) fn token(&self, run: &TokenRun, position: usize, pending: &[u32]) -> i32 {
        let first_draft = run.tokens.end - run.drafts.token_ids.len();
        let of_head = self.drafted.get(&run.sequence).filter(|_| self.step.asks_head);
        match (position.checked_sub(first_draft), of_head) {
            (Some(at), Some(places)) => !places[at],
            _ => match run.token(&self.sequences[run.sequence], position) {
                Some(id) => id as i32,
                None => !(pending[run.sequence] as i32),
            },
        }
    }

    fn slots(&self, run: &TokenRun) -> impl Iterator<Item = i32> {
        let sequence = &self.sequences[run.sequence];
        run.tokens.clone().map(|at| sequence.slot(at, self.block_size) as i32)
    }

    /// The adapter number of each row, padded to `len`; -1 is the base model.
    fn adapters(&self, words: &mut Words, len: usize, inputs: &Tensor) -> Result<Option<Tensor>> {
        if !self.has_adapters {
            return Ok(None);
        }
        let of_run =
            |run: &TokenRun| std::iter::repeat_n(self.sequences[run.sequence].adapter_number(), run.tokens.len());
        let range = words.put(len, self.step.runs.iter().flat_map(of_run), -1)?;
        Ok(Some(inputs.narrow(0, range.start as i64, range.len() as i64)))
    }

    /// The state page of each part of the step, padded to `len` with -1.
    fn state_pages(&self, words: &mut Words, len: usize) -> Result<Range<usize>> {
        let page = |run: &TokenRun| self.sequences[run.sequence].state_page.map_or(-1, |page| page as i32);
        words.put(len, self.step.parts().map(|(run, _)| page(run)), -1)
    }

    /// The KV block tables of the step's parts, padded to [`rows`, `blocks`].
    fn block_tables(&self, words: &mut Words, size: (usize, usize), inputs: &Tensor) -> Result<Tensor> {
        self.tables_of(self.step.parts().map(|(run, _)| run.sequence), words, size, inputs)
    }

    /// KV blocks of sequences, [`rows`, `blocks`].
    pub(super) fn tables_of(
        &self,
        of: impl Iterator<Item = usize>,
        words: &mut Words,
        (rows, blocks): (usize, usize),
        inputs: &Tensor,
    ) -> Result<Tensor> {
        let row = |sequence: usize| {
            let table = self.sequences[sequence].block_table.iter().map(|&block| block as i32);
            table.chain(std::iter::repeat(0)).take(blocks).collect::<Vec<_>>()
        };
        let range = words.put(rows * blocks, of.flat_map(row), 0)?;
        Ok(inputs.narrow(0, range.start as i64, range.len() as i64).view([rows as i64, blocks as i64]))
    }

    /// What a decode step tells gated delta nets of its sequences, with room for `rows`. Rows of padding are sequences without pages.
    fn drafted(&self, words: &mut Words, rows: usize, inputs: &Tensor) -> Result<DraftedInputs> {
        let runs = || self.step.runs.iter();
        let page = |run: &TokenRun| self.sequences[run.sequence].state_page.map_or(-1, |page| page as i32);
        let lens = runs().map(|run| run.tokens.len()).chain(std::iter::repeat_n(1, rows - self.step.num_tokens()));
        let pages = words.put(rows, runs().map(page), -1)?;
        let bounds = words.put(rows + 1, bounds(lens), rows as i32)?;
        let stored = words.put(rows, runs().map(|run| run.num_stored as i32), 0)?;
        let starts = words.put(rows, runs().map(|run| run.tokens.start as i32), 0)?;
        let view = |range: Range<usize>| inputs.narrow(0, range.start as i64, range.len() as i64);
        Ok(DraftedInputs { pages: view(pages), bounds: view(bounds), stored: view(stored), starts: view(starts) })
    }

    /// Where the hidden states of a decode step's rows go, among those that pages keep, with room for `len`; none without a draft head.
    fn kept(&self, words: &mut Words, len: usize, inputs: &Tensor) -> Result<Option<Tensor>> {
        if self.num_kept == 0 {
            return Ok(None);
        }
        let of_run = |run: &TokenRun| {
            let page = self.sequences[run.sequence].state_page.expect("a sequence that runs has a page") as i32;
            let first = page * self.num_kept as i32;
            first..first + run.tokens.len() as i32
        };
        let range = words.put(len, self.step.runs.iter().flat_map(of_run), -1)?;
        Ok(Some(inputs.narrow(0, range.start as i64, range.len() as i64)))
    }

    /// How the draws are made, with room for `len`.
    fn sampling(&self, words: &mut Words, len: usize, inputs: &Tensor) -> Result<Sampling> {
        let draws: Vec<Option<&Draw>> = self.draws.iter().map(Some).collect();
        Sampling::pack(&draws, words, len, inputs)
    }
}

impl Sampling {
    /// How rows are drawn from, those that are, with room for `len`.
    pub(super) fn pack(draws: &[Option<&Draw>], words: &mut Words, len: usize, inputs: &Tensor) -> Result<Self> {
        let key = |draw: &Option<&Draw>| draw.map_or([0; 2], |draw| draw.key().words().map(|word| word as i32));
        let keys = words.put(2 * len, draws.iter().flat_map(key), 0)?;
        let first = draws.iter().flatten().next();
        let mut of_draws = |word: &dyn Fn(&SamplingParams) -> i32| {
            let padding = first.map_or(0, |draw| word(draw.params));
            let words_of = draws.iter().map(|draw| draw.map_or(padding, |draw| word(draw.params)));
            let range = words.put(len, words_of, padding)?;
            Ok::<_, Error>(inputs.narrow(0, range.start as i64, len as i64))
        };
        let mut floats = |number: &dyn Fn(&SamplingParams) -> f32| {
            Ok::<_, Error>(of_draws(&|params| number(params).to_bits() as i32)?.view_dtype(Kind::Float))
        };
        Ok(Self {
            keys: inputs.narrow(0, keys.start as i64, keys.len() as i64).view([len as i64, 2]),
            temperatures: floats(&|params| params.temperature)?,
            penalties: floats(&|params| params.repetition_penalty)?,
            min_p: floats(&|params| params.min_p.unwrap_or(0.0))?,
            top_p: floats(&|params| params.top_p)?,
            top_k: of_draws(&|params| i32::try_from(params.top_k).unwrap_or(i32::MAX))?,
        })
    }
}

/// Sampling parameters of S draws.
#[derive(Debug)]
pub(super) struct Sampling {
    pub(super) keys: Tensor,         // [S, 2]
    pub(super) temperatures: Tensor, // [S] f32
    pub(super) penalties: Tensor,    // [S] f32
    pub(super) min_p: Tensor,        // [S] f32
    pub(super) top_k: Tensor,        // [S]
    pub(super) top_p: Tensor,        // [S] f32
}

/// Inputs of a decode step, padded to its bucket of S rows. Their offsets depend on the bucket only.
#[derive(Debug)]
pub(super) struct DecodeInputs {
    pub(super) from: Tensor,         // [S], see `kernels::next_tokens`
    pub(super) positions: Tensor,    // [S]
    pub(super) context_lens: Tensor, // [S], 0 for padding
    pub(super) slots: Tensor,        // [S]
    pub(super) sampling: Sampling,
    pub(super) groups: Tensor,           // [S], see `kernels::SharedPrefixes`
    pub(super) num_shared: Tensor,       // [S]
    pub(super) block_tables: Tensor,     // [S, blocks]
    pub(super) adapters: Option<Tensor>, // [S]
    pub(super) state_pages: Tensor,      // [S], -1 for padding or a model without states
    /// Of the step's sequences, where some have drafts or states that take stored ones in.
    pub(super) drafted: Option<DraftedInputs>,
    /// Where the rows' hidden states are kept for a draft head, -1: padding.
    pub(super) kept: Option<Tensor>, // [S]
}

/// What gated delta nets are told of the B sequences of a decode step with S rows, padded to as many.
#[derive(Debug)]
pub(super) struct DraftedInputs {
    pub(super) pages: Tensor,  // [S], -1: none
    pub(super) bounds: Tensor, // [S + 1], of their rows
    pub(super) stored: Tensor, // [S], drafts that they take in first
    pub(super) starts: Tensor, // [S], positions of their first rows
}

impl DecodeInputs {
    /// Packs and views the inputs over `inputs`. `pending` has, for each sequence that the last step sampled for, its row in that step's output.
    /// `blocks` is the width of a block table. Shared prefixes are set if rows share at least `least_shared_tokens` tokens.
    pub(super) fn pack(
        packing: &Packing,
        words: &mut Words,
        (bucket, blocks): (usize, usize),
        pending: &[u32],
        least_shared_tokens: usize,
        inputs: &Tensor,
    ) -> Result<Self> {
        let from = |(run, tokens): (&TokenRun, Range<usize>)| packing.token(run, tokens.start, pending);
        let rows = || packing.step.parts();
        let from = words.put(bucket, rows().map(from), 0)?;
        let positions = words.put(bucket, rows().map(|(_, tokens)| tokens.start as i32), 0)?;
        let context_lens = words.put(bucket, rows().map(|(_, tokens)| tokens.end as i32), 0)?;
        let slots = words.put(bucket, packing.step.runs.iter().flat_map(|run| packing.slots(run)), -1)?;
        let sampling = packing.sampling(words, bucket, inputs)?;
        let prefixes = shared_prefixes(packing, least_shared_tokens);
        let groups = words.put(bucket, prefixes.iter().map(|prefix| prefix.0), -1)?;
        let num_shared = words.put(bucket, prefixes.iter().map(|prefix| prefix.1), 0)?;
        let block_tables = packing.block_tables(words, (bucket, blocks), inputs)?;
        let adapters = packing.adapters(words, bucket, inputs)?;
        let state_pages = packing.state_pages(words, bucket)?;
        let drafted = packing.takes_drafts_in.then(|| packing.drafted(words, bucket, inputs)).transpose()?;
        let kept = packing.kept(words, bucket, inputs)?;
        let view = |range: Range<usize>| inputs.narrow(0, range.start as i64, range.len() as i64);
        Ok(Self {
            from: view(from),
            positions: view(positions),
            context_lens: view(context_lens),
            slots: view(slots),
            sampling,
            groups: view(groups),
            num_shared: view(num_shared),
            block_tables,
            adapters,
            state_pages: view(state_pages),
            drafted: drafted.filter(|_| packing.step.is_drafted()),
            kept,
        })
    }
}

/// For each row, the first of the neighbouring rows that begin with the same full KV blocks, and the number of these blocks; (-1, 0) if there are
/// none. All rows get (-1, 0) if they share fewer than `least_tokens` in total. Neighbours are either the rows of one group, which share its prompt,
/// or the rows of one sequence and its draft tokens; whichever saves more reads is used.
fn shared_prefixes(packing: &Packing, least_tokens: usize) -> Vec<(i32, i32)> {
    let sequence = |run: &TokenRun| &packing.sequences[run.sequence];
    let mut prefixes: Vec<(i32, i32)> = Vec::with_capacity(packing.step.num_tokens());
    for members in packing.step.runs.chunk_by(|a, b| sequence(a).group == sequence(b).group) {
        let first = sequence(&members[0]);
        let prompt = &first.block_table[..first.prompt_len / packing.block_size];
        let common = |run: &TokenRun| sequence(run).block_table.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let of_prompt = members.iter().map(common).min().unwrap_or(0);
        let of_sequence = |run: &TokenRun| run.tokens.start / packing.block_size;
        let num_rows: usize = members.iter().map(|run| run.tokens.len()).sum();
        let saved_by_group = (num_rows - 1) * of_prompt;
        let saved_by_sequences: usize = members.iter().map(|run| (run.tokens.len() - 1) * of_sequence(run)).sum();
        let mut put = |num_rows: usize, shared: usize| {
            let prefix = if num_rows > 1 && shared > 0 { (prefixes.len() as i32, shared as i32) } else { (-1, 0) };
            prefixes.extend(std::iter::repeat_n(prefix, num_rows));
        };
        match saved_by_sequences > saved_by_group {
            true => members.iter().for_each(|run| put(run.tokens.len(), of_sequence(run))),
            false => put(num_rows, of_prompt),
        }
    }
    let tokens: usize = prefixes.iter().map(|prefix| prefix.1 as usize * packing.block_size).sum();
    if tokens < least_tokens { Vec::new() } else { prefixes }
}

/// Start offsets of concatenated runs with these lengths, and the end of the last. [B + 1]
pub(super) fn bounds(lens: impl Iterator<Item = usize>) -> Vec<i32> {
    let mut bounds = vec![0];
    for len in lens {
        bounds.push(bounds[bounds.len() - 1] + len as i32);
    }
    bounds
}

/// Inputs of a prefill step: T tokens of B runs, of which L rows are sampled from.
#[derive(Debug)]
pub(super) struct PrefillInputs {
    pub(super) token_ids: Tensor,        // [T]
    pub(super) positions: Tensor,        // [T]
    pub(super) slots: Tensor,            // [T]
    pub(super) bounds: Tensor,           // [B + 1], start of each run's tokens and end of the last
    pub(super) block_tables: Tensor,     // [B, blocks]
    pub(super) last_rows: Tensor,        // [L]
    pub(super) drawn_runs: Tensor,       // [L]
    pub(super) lens: Tensor,             // [L], number of tokens so far
    pub(super) sampling: Sampling,       // of L draws
    pub(super) copies: [Tensor; 2],      // blocks to copy from, and to
    pub(super) adapters: Option<Tensor>, // [T]
    pub(super) state_pages: Tensor,      // [B], -1 for a model without states
}

impl PrefillInputs {
    /// Packs and views the inputs over `inputs`. `blocks` is the width of a block table.
    pub(super) fn pack(packing: &Packing, words: &mut Words, blocks: usize, inputs: &Tensor) -> Result<Self> {
        let step = packing.step;
        let tokens: usize = step.runs.iter().map(|run| run.tokens.len()).sum();
        let bounds = bounds(step.runs.iter().map(|run| run.tokens.len()));
        let ids =
            |run: &TokenRun| packing.sequences[run.sequence].token_ids[run.tokens.clone()].iter().map(|&id| id as i32);
        let token_ids = words.put(tokens, step.runs.iter().flat_map(ids), 0)?;
        let positions = step.runs.iter().flat_map(|run| run.tokens.clone().map(|at| at as i32));
        let positions = words.put(tokens, positions, 0)?;
        let slots = words.put(tokens, step.runs.iter().flat_map(|run| packing.slots(run)), -1)?;
        let draws = packing.draws.len();
        // A number of a run for each of its draws.
        let of_draws = |number: &dyn Fn(usize, &TokenRun) -> i32| -> Vec<i32> {
            let runs = step.runs.iter().enumerate();
            runs.flat_map(|(index, run)| std::iter::repeat_n(number(index, run), run.samples.len())).collect()
        };
        let last_rows = words.put(draws, of_draws(&|index, _| bounds[index + 1] - 1), 0)?;
        let drawn_runs = words.put(draws, of_draws(&|index, _| index as i32), 0)?;
        let lens = words.put(draws, of_draws(&|_, run| run.tokens.end as i32), 0)?;
        let block_tables = packing.block_tables(words, (step.runs.len(), blocks), inputs)?;
        let sampling = packing.sampling(words, draws, inputs)?;
        let bounds = words.put(bounds.len(), bounds, 0)?;
        let from = words.put(step.copies.len(), step.copies.iter().map(|copy| copy.0 as i32), 0)?;
        let to = words.put(step.copies.len(), step.copies.iter().map(|copy| copy.1 as i32), 0)?;
        let adapters = packing.adapters(words, tokens, inputs)?;
        let state_pages = packing.state_pages(words, step.runs.len())?;
        let view = |range: Range<usize>| inputs.narrow(0, range.start as i64, range.len() as i64);
        Ok(Self {
            token_ids: view(token_ids),
            positions: view(positions),
            slots: view(slots),
            bounds: view(bounds),
            block_tables,
            last_rows: view(last_rows),
            drawn_runs: view(drawn_runs),
            lens: view(lens),
            sampling,
            copies: [view(from), view(to)],
            adapters,
            state_pages: view(state_pages),
        })
    }
}
