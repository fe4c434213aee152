//! Exact sampling from logits whose vocabulary is split over a tensor-parallel group.
//!
//! Tokens are sampled by Gumbel-max: argmax over ids of (processed logit + noise), ties to the lowest id. The noise is a function of (seed, step,
//! prompt id, sample, position, vocabulary id), so a sample depends neither on its batch nor on the split of the vocabulary. Each rank computes its
//! candidates and its log-sum-exp, one small all-gather follows, and every rank makes the same decision.
//!
//! Recorded log-probabilities are those of the distribution at the sampling temperature, before top-k, top-p, min-p and penalties: the trainer
//! computes the same for each token.

#[cfg(test)]
mod tests;

use std::ops::Range;

use super::filters::{self, Candidate};
use crate::data::TokenMask;
use crate::error::{Error, Result};
use crate::ops::exact::log_sum_exp;
use crate::ops::random::RandomKey;
use crate::ranks::{Collective, all_gather_bytes};
use crate::types::{SamplingParams, TokenLogprob};

/// First word of the sampler's random keys. It separates them from those of initialisation and shuffling.
const STREAM: u64 = u64::from_be_bytes(*b"sampling");

/// One token to sample.
#[derive(Debug)]
pub(super) struct Draw<'a> {
    /// Row of the logits to sample from.
    pub(super) row: usize,
    /// How the token is sampled.
    pub(super) params: &'a SamplingParams,
    /// The step in which the completion was begun.
    pub(super) step: u64,
    pub(super) prompt_id: u64,
    /// Index of the completion within its group.
    pub(super) sample: usize,
    /// Prompt and completion so far. A repetition penalty applies to these and to `drafts`.
    pub(super) token_ids: &'a [u32],
    /// Draft tokens after `token_ids`, treated as if they were sampled.
    pub(super) drafts: &'a [u32],
    /// The token ids that may be sampled; `None` allows all.
    pub(super) allowed: Option<&'a TokenMask>,
}

impl Draw<'_> {
    /// The random key of all draws of this completion.
    pub(super) fn key(&self) -> RandomKey {
        sampling_key(self.params.seed, self.step, self.prompt_id, self.sample)
    }

    /// The position of the sampled token: the number of tokens before it.
    pub(super) fn position(&self) -> usize {
        self.token_ids.len() + self.drafts.len()
    }

    fn is_greedy(&self) -> bool {
        self.params.temperature == 0.0
    }

    /// The multiplier from a logit to a logit at the draw's temperature.
    fn scale(&self) -> f32 {
        if self.is_greedy() { 1.0 } else { 1.0 / self.params.temperature }
    }

    fn is_filtered(&self) -> bool {
        filters::is_active(self.params) && !self.is_greedy()
    }
}

/// An owned [`Draw`], for a step that is computed after its sequences have changed.
#[derive(Debug)]
pub(super) struct OwnedDraw {
    row: usize,
    params: SamplingParams,
    step: u64,
    prompt_id: u64,
    sample: usize,
    token_ids: Vec<u32>,
    drafts: Vec<u32>,
    allowed: Option<TokenMask>,
}

impl OwnedDraw {
    pub(super) fn new(draw: &Draw<'_>) -> Self {
        let Draw { row, params, step, prompt_id, sample, token_ids, drafts, allowed } = *draw;
        let (params, token_ids, drafts) = (params.clone(), token_ids.to_vec(), drafts.to_vec());
        Self { row, params, step, prompt_id, sample, token_ids, drafts, allowed: allowed.cloned() }
    }

    pub(super) fn as_draw(&self) -> Draw<'_> {
        let Self { row, ref params, step, prompt_id, sample, ref token_ids, ref drafts, ref allowed } = *self;
        Draw { row, params, step, prompt_id, sample, token_ids, drafts, allowed: allowed.as_ref() }
    }
}

/// A sampled token.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sampled {
    pub(super) token_id: u32,
    /// ln softmax(logits / temperature)[token_id] in nats, before penalty and filters; temperature 0 counts as 1. With structured output, the softmax
    /// is over the allowed ids only.
    pub(super) logprob: f32,
    /// The `top_logprobs` most probable ids, with log-probabilities under the same distribution.
    pub(super) top: Vec<TokenLogprob>,
}

impl Sampled {
    /// Marks non-finite logits in a row behind a draft token. They are an error only if the row counts, because the draft token was accepted.
    pub(super) fn not_finite() -> Self {
        Self { token_id: u32::MAX, logprob: f32::NAN, top: Vec::new() }
    }

    /// The id to use as a draft token: 0 where the logits were not finite.
    pub(super) fn known_id(&self) -> u32 {
        if self.token_id == u32::MAX { 0 } else { self.token_id }
    }

    /// Checks that the row's logits were finite.
    ///
    /// # Errors
    /// [`Error::NonFinite`] if they were not.
    pub(super) fn check(&self, prompt_id: u64, position: usize) -> Result<()> {
        if self.token_id == u32::MAX { Err(non_finite(prompt_id, position)) } else { Ok(()) }
    }
}

/// One rank's contribution to one draw.
#[derive(Debug, Clone, PartialEq)]
struct Offer {
    /// Log-sum-exp of this rank's share of logits / temperature.
    log_sum_exp: f64,
    candidates: Vec<Candidate>,
    /// This rank's most probable ids before penalty and filters, most probable first.
    top: Vec<Candidate>,
}

/// Samples tokens from logits, of which this rank has a share of the vocabulary.
#[derive(Debug)]
pub(super) struct Sampler<'a> {
    /// Token ids of the logits' columns on this rank.
    pub(super) vocab: Range<usize>,
    pub(super) tp: &'a dyn Collective,
}

impl Sampler<'_> {
    /// Samples one token for each of `draws`, in order. Collective over the tensor-parallel group.
    ///
    /// Order of processing, as in vLLM: repetition penalty, temperature, min-p, top-k, top-p.
    ///
    /// # Errors
    /// [`Error::NonFinite`] for logits that are NaN or infinite, on every rank together.
    pub(super) fn sample(
        &self,
        logits: &[f32], /* [rows, V of this rank] */
        draws: &[Draw],
    ) -> Result<Vec<Sampled>> {
        let offers = self.exchange(self.offers(logits, draws))?;
        let of_draw = |index: usize| offers.iter().map(move |offers| &offers[index]);
        let decide = |(index, draw): (usize, &Draw)| match self.decide(draw, of_draw(index)) {
            Err(Error::NonFinite { .. }) if !draw.drafts.is_empty() => Ok(Sampled::not_finite()),
            decided => decided,
        };
        draws.iter().enumerate().map(decide).collect()
    }

    /// The `top_logprobs` most probable ids, before penalty and filters, for draws whose tokens are sampled elsewhere. Collective over the
    /// tensor-parallel group.
    ///
    /// # Errors
    /// The errors of the group.
    pub(super) fn top_logprobs(
        &self,
        logits: &[f32], // [draws, V of this rank], minus infinity for forbidden ids
        draws: &[&Draw],
    ) -> Result<Vec<Vec<TokenLogprob>>> {
        let rows = logits.chunks_exact(self.vocab.len());
        let offer = |(raw, draw): (&[f32], &&Draw)| Offer {
            log_sum_exp: log_sum_exp(raw.iter().map(|&logit| f64::from(logit * draw.scale()))),
            candidates: Vec::new(),
            top: self.top(raw, draw),
        };
        let offers = self.exchange(rows.zip(draws).map(offer).collect())?;
        let of_draw = |index: usize| offers.iter().map(move |offers| &offers[index]);
        let top = |(index, draw): (usize, &&Draw)| {
            let log_sum_exp = log_sum_exp(of_draw(index).map(|offer| offer.log_sum_exp));
            top_of(draw, of_draw(index), log_sum_exp)
        };
        Ok(draws.iter().enumerate().map(top).collect())
    }

    /// This rank's contribution to each draw. The draws are divided among as many threads as libtorch uses.
    fn offers(&self, logits: &[f32], draws: &[Draw]) -> Vec<Offer> {
        let per_thread = draws.len().div_ceil(tch::get_num_threads().max(1) as usize).max(1);
        if per_thread >= draws.len() {
            return self.offers_of(logits, draws);
        }
        std::thread::scope(|scope| {
            let parts = draws.chunks(per_thread);
            let threads: Vec<_> = parts.map(|part| scope.spawn(move || self.offers_of(logits, part))).collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("drawing does not panic")).collect()
        })
    }

    fn offers_of(&self, logits: &[f32], draws: &[Draw]) -> Vec<Offer> {
        let width = self.vocab.len();
        let (mut values, mut noise, mut masked) = (vec![0.0; width], vec![0.0; width], Vec::new());
        let mut last_row = (usize::MAX, 0.0); // the draws of a group share one row and parameters
        let offer = |draw: &Draw| {
            let mut raw = &logits[draw.row * width..][..width];
            if let Some(allowed) = draw.allowed {
                self.mask(raw, allowed, &mut masked);
                raw = &masked;
            }
            if last_row.0 != draw.row {
                last_row = (draw.row, log_sum_exp(raw.iter().map(|&logit| f64::from(logit * draw.scale()))));
            }
            self.process(raw, draw, &mut values);
            let candidates = self.candidates(raw, &values, draw, &mut noise);
            Offer { log_sum_exp: last_row.1, candidates, top: self.top(raw, draw) }
        };
        draws.iter().map(offer).collect()
    }

    /// masked = logits of the allowed ids, minus infinity for others.
    fn mask(&self, raw: &[f32], allowed: &TokenMask, masked: &mut Vec<f32>) {
        let logit =
            |(column, &logit)| if allowed.contains(self.vocab.start + column) { logit } else { f32::NEG_INFINITY };
        masked.clear();
        masked.extend(raw.iter().enumerate().map(logit));
    }

    /// This rank's `top_logprobs` most probable ids.
    fn top(&self, raw: &[f32], draw: &Draw) -> Vec<Candidate> {
        let count = draw.params.top_logprobs;
        if count == 0 {
            return Vec::new();
        }
        let scale = draw.scale();
        let candidate = |(column, &logit): (usize, &f32)| {
            let id = (self.vocab.start + column) as u32;
            Candidate { id, value: logit, raw: logit * scale }
        };
        let possible = raw.iter().enumerate().filter(|(_, logit)| **logit > f32::NEG_INFINITY);
        let mut all: Vec<Candidate> = possible.map(candidate).collect();
        filters::keep_first(&mut all, count);
        all
    }

    /// values = penalised logits / temperature: a seen id's positive logit is divided by the penalty, a negative one
    /// multiplied (arXiv 1909.05858).
    fn process(&self, raw: &[f32], draw: &Draw, values: &mut [f32]) {
        let (scale, penalty) = (draw.scale(), draw.params.repetition_penalty);
        for (value, logit) in values.iter_mut().zip(raw) {
            *value = logit * scale;
        }
        if penalty == 1.0 {
            return;
        }
        for &id in draw.token_ids.iter().chain(draw.drafts) {
            let Some(column) = (id as usize).checked_sub(self.vocab.start).filter(|&column| column < raw.len()) else {
                continue;
            };
            // From the raw logit, so that an id seen twice is penalised once.
            let logit = raw[column];
            values[column] = scale * if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
    }

    /// Candidates of this rank: with filters, all ids that may survive them; without, the id with the largest noisy logit.
    fn candidates(&self, raw: &[f32], values: &[f32], draw: &Draw, noise: &mut [f32]) -> Vec<Candidate> {
        let scale = draw.scale();
        let start = self.vocab.start;
        let candidate =
            |column| Candidate { id: (start + column) as u32, value: values[column], raw: raw[column] * scale };
        if draw.is_filtered() {
            let mut all: Vec<Candidate> = (0..values.len()).map(candidate).collect();
            if draw.allowed.is_some() {
                all.retain(|candidate| candidate.value > f32::NEG_INFINITY);
            }
            filters::cut_shard(&mut all, draw.params);
            return all;
        }
        if draw.is_greedy() {
            noise.fill(0.0);
        } else {
            draw.key().fill_gumbel(draw.position() as u64, start as u64, noise);
        }
        let mut best = (0, f64::NEG_INFINITY);
        for (column, (&value, &noise)) in values.iter().zip(noise.iter()).enumerate() {
            let perturbed = f64::from(value) + f64::from(noise);
            if perturbed > best.1 {
                best = (column, perturbed);
            }
        }
        vec![candidate(best.0)]
    }

    /// Chooses the winner among all ranks' candidates.
    fn decide<'b>(&self, draw: &Draw, offers: impl Iterator<Item = &'b Offer> + Clone) -> Result<Sampled> {
        let log_sum_exp = log_sum_exp(offers.clone().map(|offer| offer.log_sum_exp));
        if !log_sum_exp.is_finite() {
            return Err(non_finite(draw.prompt_id, draw.position()));
        }
        let top = top_of(draw, offers.clone(), log_sum_exp);
        let mut candidates: Vec<Candidate> = offers.flat_map(|offer| offer.candidates.iter().copied()).collect();
        if draw.is_filtered() {
            filters::cut(&mut candidates, draw.params);
        }
        let key = draw.key();
        let perturbed = |candidate: &Candidate| {
            let mut noise = [0.0];
            if !draw.is_greedy() {
                key.fill_gumbel(draw.position() as u64, candidate.id.into(), &mut noise);
            }
            f64::from(candidate.value) + f64::from(noise[0])
        };
        let best = candidates.iter().map(|candidate| (perturbed(candidate), candidate));
        let best = best.max_by(|(a, left), (b, right)| a.total_cmp(b).then(right.id.cmp(&left.id)));
        let (_, winner) = best.ok_or_else(|| Error::NonFinite {
            message: "no token is left to sample: all logits are -inf or NaN".into(),
        })?;
        Ok(Sampled { token_id: winner.id, logprob: winner.logprob(log_sum_exp), top })
    }

    /// All-gathers the contributions, in rank order.
    fn exchange(&self, own: Vec<Offer>) -> Result<Vec<Vec<Offer>>> {
        // A step in which no prompt ends samples nothing, on any rank.
        if self.tp.size() == 1 || own.is_empty() {
            return Ok(vec![own]);
        }
        let gathered = all_gather_bytes(self.tp, &encode(&own))?;
        Ok(gathered.iter().map(|bytes| decode(bytes)).collect())
    }
}

/// The most probable ids over all ranks' contributions.
fn top_of<'b>(draw: &Draw, offers: impl Iterator<Item = &'b Offer>, log_sum_exp: f64) -> Vec<TokenLogprob> {
    let mut top: Vec<Candidate> = offers.flat_map(|offer| offer.top.iter().copied()).collect();
    filters::keep_first(&mut top, draw.params.top_logprobs);
    let of = |candidate: &Candidate| TokenLogprob { token_id: candidate.id, logprob: candidate.logprob(log_sum_exp) };
    top.iter().map(of).collect()
}

/// The random key of all draws of one completion. Rows are positions, entries are vocabulary ids.
pub(super) fn sampling_key(seed: u64, step: u64, prompt_id: u64, sample: usize) -> RandomKey {
    RandomKey::new(seed, STREAM).fold(step).fold(prompt_id).fold(sample as u64)
}

pub(super) fn non_finite(prompt_id: u64, position: usize) -> Error {
    let message = format!("logits of prompt {prompt_id} at position {position} are not finite; check the weights");
    Error::NonFinite { message }
}

fn encode(offers: &[Offer]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for offer in offers {
        bytes.extend(offer.log_sum_exp.to_le_bytes());
        for candidates in [&offer.candidates, &offer.top] {
            bytes.extend((candidates.len() as u32).to_le_bytes());
            for candidate in candidates {
                bytes.extend(candidate.id.to_le_bytes());
                bytes.extend(candidate.value.to_le_bytes());
                bytes.extend(candidate.raw.to_le_bytes());
            }
        }
    }
    bytes
}

fn decode(mut bytes: &[u8]) -> Vec<Offer> {
    fn take<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
        let (head, rest) = bytes.split_first_chunk().expect("offers are encoded by the same program");
        *bytes = rest;
        *head
    }
    let mut offers = Vec::new();
    while !bytes.is_empty() {
        let log_sum_exp = f64::from_le_bytes(take(&mut bytes));
        let mut candidates = || {
            let count = u32::from_le_bytes(take(&mut bytes));
            let candidate = |_| Candidate {
                id: u32::from_le_bytes(take(&mut bytes)),
                value: f32::from_le_bytes(take(&mut bytes)),
                raw: f32::from_le_bytes(take(&mut bytes)),
            };
            (0..count).map(candidate).collect()
        };
        offers.push(Offer { log_sum_exp, candidates: candidates(), top: candidates() });
    }
    offers
}
