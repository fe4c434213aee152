//! Speculative decoding. The engine samples each token as the argmax of logits plus noise, where the noise depends only on the random key, the
//! position and the token id. After an accepted draft token it therefore samples exactly the token that it would have sampled without drafting. So
//! completions are the same for any draft tokens; only the number of steps changes.
//!
//! | file | what it is |
//! |---|---|
//! | `drafts` | draft tokens of one sequence in one step |
//! | `index` | finds earlier matches of a text's end, and what followed |
//! | `earlier` | completions of earlier rollouts |
//! | `acceptance` | acceptance rates of draft tokens |
//! | `control` | decides whether drafting pays off, and for how many rows |
//! | `injection` | draft tokens from a test or benchmark |

mod acceptance;
mod control;
mod drafts;
mod earlier;
mod index;
mod injection;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use self::acceptance::Acceptance;
pub(super) use self::control::StepTime;
use self::control::{Controller, fitting};
pub(super) use self::drafts::{Drafts, StoredDrafts};
use self::earlier::{EarlierCompletions, prompt_key};
use self::index::DraftIndex;
pub use self::injection::DraftInjection;
use crate::config::Speculation;
use crate::error::Result;
use crate::ranks::{Collective, ReduceOp, all_reduce_f64};

/// Minimum capacity of a decode step, in rows, if there are draft tokens.
const LEAST_ROWS: usize = 64;
/// Number of tokens of a completion between two trial look-ups, which only measure how often draft tokens would be accepted.
const LOOK_EVERY: usize = 16;
/// With `ngram`, which measures no times, a draft token gets a row if its acceptance probability is at least this.
const LEAST_PROBABILITY: f64 = 0.2;

/// Source and number of draft tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpeculationOptions {
    /// Source of the draft tokens.
    pub method: Speculation,
    /// Maximum number of draft tokens of a sequence in a step.
    pub num_tokens: usize,
}

impl SpeculationOptions {
    /// No speculative decoding.
    pub const NONE: Self = Self { method: Speculation::None, num_tokens: 0 };

    /// Whether speculative decoding is on.
    pub(super) fn is_on(&self) -> bool {
        self.method != Speculation::None
    }

    /// Maximum number of draft tokens of a sequence in a step; 0 if speculative decoding is off.
    pub fn most_drafts(&self) -> usize {
        if self.is_on() { self.num_tokens } else { 0 }
    }

    /// Maximum rows of a decode step of at most `max_num_seqs` sequences, including draft tokens.
    pub(super) fn most_rows(&self, max_num_seqs: usize) -> usize {
        if self.is_on() { max_num_seqs.max(LEAST_ROWS) } else { max_num_seqs }
    }
}

/// The tokens of one completion so far.
#[derive(Debug, Clone, Copy)]
pub(super) struct DraftedText<'a> {
    pub(super) request: usize,
    pub(super) sample: usize,
    pub(super) token_ids: &'a [u32],
    pub(super) prompt_len: usize,
}

/// A completion that may get draft tokens in the next step.
#[derive(Debug, Clone, Copy)]
pub(super) struct DraftRequest<'a> {
    pub(super) text: DraftedText<'a>,
    /// Prompt id and completion number from the completion's random key.
    pub(super) prompt_id: u64,
    pub(super) key_sample: usize,
    /// Maximum number of draft tokens.
    pub(super) most: usize,
}

/// Creates draft tokens and learns how many pay off. All ranks of an engine make the same decisions.
#[derive(Debug)]
pub(super) struct Speculator {
    options: SpeculationOptions,
    injection: Option<DraftInjection>,
    earlier: EarlierCompletions,
    acceptance: Acceptance,
    controller: Controller,
    drafts_now: bool,
    prompts: HashMap<usize, u64>, // prompt key of each request that is not complete
    groups: HashMap<u64, TextGroup>,
}

/// The texts of one prompt.
#[derive(Debug, Default)]
struct TextGroup {
    num_requests: usize,
    index: DraftIndex,
    texts: HashMap<(usize, usize), OwnText>, // by request and completion number
    /// Texts of requests that have ended. A request for the next turn continues one of these texts.
    ended: Vec<OwnText>,
}

#[derive(Debug)]
struct OwnText {
    number: usize,
    /// Number of the completion's tokens in the index.
    num_indexed: usize,
    /// Draft tokens of a trial look-up, and how many of them have been matched since.
    looked: Option<(Drafts, usize)>,
}

impl Speculator {
    /// Creates a speculator; `None` if speculative decoding is off.
    pub(super) fn new(options: SpeculationOptions) -> Option<Self> {
        options.is_on().then(|| Self::fresh(options))
    }

    fn fresh(options: SpeculationOptions) -> Self {
        Self {
            options,
            injection: None,
            earlier: EarlierCompletions::default(),
            acceptance: Acceptance::default(),
            controller: Controller::default(),
            drafts_now: false,
            prompts: HashMap::new(),
            groups: HashMap::new(),
        }
    }

    /// Takes draft tokens from a test or benchmark.
    pub(super) fn inject(&mut self, injection: DraftInjection) {
        self.injection = Some(injection);
    }

    /// Whether the model's draft head creates the draft tokens.
    pub(super) fn asks_head(&self) -> bool {
        self.options.method == Speculation::Mtp && self.injection.as_ref().is_none_or(DraftInjection::is_replay)
    }

    /// Registers a submitted request.
    pub(super) fn begin(&mut self, request: usize, prompt: &[u32]) {
        if self.options.method == Speculation::Mtp {
            return; // the draft head needs no look-up
        }
        let key = prompt_key(prompt);
        self.prompts.insert(request, key);
        self.groups.entry(key).or_default().num_requests += 1;
    }

    /// Ends a request that is complete or removed; its completions so far are stored for later rollouts.
    pub(super) fn end<'a>(&mut self, request: usize, completions: impl Iterator<Item = &'a [u32]>) {
        let Some(key) = self.prompts.remove(&request) else { return };
        let completions: Vec<&[u32]> = completions.collect();
        self.earlier.remember(key, completions.iter().copied().filter(|completion| !completion.is_empty()));
        if let Some(group) = self.groups.get_mut(&key) {
            group.num_requests -= 1;
            group.ended.extend((0..completions.len()).filter_map(|sample| group.texts.remove(&(request, sample))));
            if group.num_requests == 0 {
                self.groups.remove(&key);
            }
        }
    }

    /// Whether to report the new tokens of a completion with `num_sampled` tokens. While no tokens are drafted, new tokens are reported in batches,
    /// which needs much less time on the host.
    pub(super) fn is_due(&self, request: usize, sample: usize, num_sampled: usize) -> bool {
        self.drafts_now || is_looked_at(request, sample, num_sampled)
    }

    /// Adds the new tokens of a completion to the index.
    pub(super) fn observe(&mut self, text: DraftedText) {
        let Some(group) = self.prompts.get(&text.request).and_then(|key| self.groups.get_mut(key)) else { return };
        let (prompt, completion) = text.token_ids.split_at(text.prompt_len);
        if completion.is_empty() {
            return; // the completion waits, and is indexed when it runs
        }
        if group.texts.is_empty() && group.ended.is_empty() {
            group.begin(prompt, self.earlier.of(self.prompts[&text.request]));
        }
        let own = group.own(text);
        let new = &completion[own.num_indexed.min(completion.len())..];
        let (number, looked) = (own.number, own.looked.take());
        own.num_indexed = completion.len();
        if let Some(looked) = looked {
            let goes_on = judge(&mut self.acceptance, looked, new);
            group.own(text).looked = goes_on;
        }
        group.index.extend(number, new);
        // A step with draft tokens measures acceptance itself, so it needs no trial look-up. But `ngram` may skip draft tokens, so it always looks
        // up.
        let is_unseen = self.options.method != Speculation::Auto || !self.drafts_now;
        if is_unseen && is_looked_at(text.request, text.sample, completion.len()) {
            let drafts = group.index.drafts(number, self.options.num_tokens);
            self.controller.look(&self.acceptance.of_rows(&drafts));
            let own = group.own(text);
            own.looked = own.looked.take().or((!drafts.token_ids.is_empty()).then_some((drafts, 0)));
        }
    }

    /// Whether the next step of this many sequences gets draft tokens. If it does, the host must know all tokens of these sequences first.
    pub(super) fn is_to_draft(&mut self, num_seqs: usize, most_rows: usize) -> bool {
        self.drafts_now = num_seqs < most_rows
            && (self.options.method != Speculation::Auto || self.controller.pays(num_seqs, most_rows));
        self.drafts_now
    }

    /// The last decision of [`Speculator::is_to_draft`].
    pub(super) fn drafts_now(&self) -> bool {
        self.drafts_now
    }

    /// Creates draft tokens for each of `requests`, in a step with space for `most_rows` draft tokens.
    pub(super) fn drafts(&mut self, requests: &[DraftRequest], most_rows: usize) -> Vec<Drafts> {
        let mut all: Vec<Drafts> = requests.iter().map(|request| self.drafts_of(request)).collect();
        let probabilities: Vec<Vec<f64>> = all.iter().map(|drafts| self.acceptance.of_rows(drafts)).collect();
        let of_sequence = |(sequence, rows): (usize, &Vec<f64>)| {
            rows.iter().map(move |&probability| (probability, sequence)).collect::<Vec<_>>()
        };
        let mut rows: Vec<(f64, usize)> = probabilities.iter().enumerate().flat_map(of_sequence).collect();
        rows.sort_by(|(a, _), (b, _)| b.total_cmp(a)); // stable, so that a sequence's first tokens stay first
        if self.options.method == Speculation::Ngram && self.injection.is_none() {
            rows.retain(|(probability, _)| *probability >= LEAST_PROBABILITY);
            rows.truncate(fitting(requests.len(), rows.len().min(most_rows)));
        }
        if self.options.method == Speculation::Auto && self.injection.is_none() {
            probabilities.iter().for_each(|rows| self.controller.look(rows));
            let probabilities: Vec<f64> = rows.iter().map(|(probability, _)| *probability).collect();
            rows.truncate(self.controller.num_rows(requests.len(), &probabilities, requests.len() + most_rows));
        }
        rows.truncate(most_rows);
        let mut counts = vec![0; all.len()];
        rows.iter().for_each(|&(_, sequence)| counts[sequence] += 1);
        all.iter_mut().zip(counts).for_each(|(drafts, count)| drafts.token_ids.truncate(count));
        all
    }

    fn drafts_of(&mut self, &DraftRequest { text, prompt_id, key_sample, most }: &DraftRequest) -> Drafts {
        let most = most.min(self.options.num_tokens);
        if let Some(injection) = &self.injection {
            let token_ids = injection.drafts(prompt_id, key_sample, text.token_ids, most);
            return Drafts { token_ids, matched: 0 };
        }
        if self.asks_head() {
            return Drafts { token_ids: vec![0; most], matched: 0 }; // placeholders: the ids are known when the step runs
        }
        if text.token_ids.len() == text.prompt_len {
            return Drafts::default();
        }
        self.observe(text);
        let group = self.prompts.get(&text.request).and_then(|key| self.groups.get_mut(key));
        group.map_or_else(Drafts::default, |group| {
            let number = group.own(text).number;
            group.index.drafts(number, most)
        })
    }

    /// Whether a benchmark makes the draft token at a position count as accepted.
    pub(super) fn replays(&self, prompt_id: u64, sample: usize, position: usize) -> bool {
        self.injection.as_ref().is_some_and(|injection| injection.replays(prompt_id, sample, position))
    }

    /// Records that the first `num_drawn` of `drafts` were accepted. `drafts` must not include tokens after the end of the sequence, which were not
    /// checked.
    pub(super) fn note(&mut self, drafts: &Drafts, num_drawn: usize) {
        self.acceptance.note_all(drafts, num_drawn);
    }

    /// Records times of decode steps that all ranks have received.
    pub(super) fn note_times(&mut self, times: impl Iterator<Item = StepTime>) {
        times.for_each(|time| self.controller.note(time));
    }

    /// Whether the speculator needs step times.
    pub(super) fn reads_times(&self) -> bool {
        self.options.method == Speculation::Auto
    }

    /// Ends the session; measurements are kept.
    pub(super) fn close(self) -> Self {
        Self { prompts: HashMap::new(), groups: HashMap::new(), drafts_now: false, ..self }
    }

    /// Discards all measurements unless they are equal on all ranks: a failed session may have ended differently on some ranks. Collective.
    pub(super) fn agree(self, all: &dyn Collective) -> Result<Self> {
        if all.size() == 1 {
            return Ok(self);
        }
        let mut hasher = DefaultHasher::new(); // without random keys: equal on all ranks
        (self.earlier.digest(), &self.acceptance, &self.controller).hash(&mut hasher);
        let digest = (hasher.finish() >> 11) as f64; // 53 bits are exact in f64
        let mut least = [digest, -digest];
        all_reduce_f64(all, &mut least, ReduceOp::Min)?;
        match least[0] == -least[1] {
            true => Ok(self),
            false => Ok(Self { injection: self.injection, ..Self::fresh(self.options) }),
        }
    }
}

impl TextGroup {
    /// Indexes a prompt and its earlier completions.
    fn begin(&mut self, prompt: &[u32], earlier: &[Arc<[u32]>]) {
        let text = self.index.begin(&[]);
        self.index.extend(text, prompt);
        for completion in earlier.iter().rev() {
            let number = self.index.begin(prompt);
            self.index.extend(number, completion);
            self.ended.push(OwnText { number, num_indexed: completion.len(), looked: None });
        }
    }

    /// Returns the indexed text of a completion. A new completion continues the longest text that it begins with, left by an earlier turn, or gets a
    /// new text.
    fn own(&mut self, text: DraftedText) -> &mut OwnText {
        let Self { index, ended, texts, .. } = self;
        texts.entry((text.request, text.sample)).or_insert_with(|| {
            let (prompt, completion) = text.token_ids.split_at(text.prompt_len);
            let begun = ended.iter().enumerate().filter(|(_, it)| index.begins(it.number, it.num_indexed, completion));
            match begun.max_by_key(|(_, it)| it.num_indexed).map(|(place, _)| place) {
                Some(place) => OwnText { looked: None, ..ended.swap_remove(place) },
                None => OwnText { number: index.begin(prompt), num_indexed: 0, looked: None },
            }
        })
    }
}

/// Whether to make a trial look-up for a completion after this many tokens. Completions of a rollout begin together, so their look-ups are staggered.
/// If all completions were looked up at once, the next step would be delayed.
fn is_looked_at(request: usize, sample: usize, num_sampled: usize) -> bool {
    let turn = request.wrapping_mul(7).wrapping_add(sample); // equally many completions per turn for groups of any size
    turn.wrapping_add(num_sampled).is_multiple_of(LOOK_EVERY)
}

/// Compares the draft tokens of a trial look-up with the tokens that were sampled since. Returns the look-up if some of its draft tokens are not yet
/// compared.
fn judge(acceptance: &mut Acceptance, looked: (Drafts, usize), new: &[u32]) -> Option<(Drafts, usize)> {
    let (drafts, mut at) = looked;
    for &token in new {
        let draft = *drafts.token_ids.get(at)?;
        acceptance.note(drafts.matched + at, token == draft);
        if token != draft {
            return None;
        }
        at += 1;
    }
    Some((drafts, at))
}
