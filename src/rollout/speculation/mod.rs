//! Draft tokens, which the engine checks by drawing: a token is the argmax of logits and of noise that depends on its key, its position and
//! its id alone, so what is drawn behind a draft that turns out right is what would have been drawn anyway. Whatever is drafted, completions
//! are the same; only the steps that they take change.
//!
//! | file | what it is |
//! |---|---|
//! | `drafts` | draft tokens of one sequence in one step |
//! | `index` | where the end of a text occurred before, and what followed |
//! | `earlier` | completions of earlier rollouts |
//! | `acceptance` | how often drafts are drawn |
//! | `control` | whether drafts pay, and for how many rows |
//! | `injection` | drafts that a test makes |

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
use self::control::Controller;
pub(super) use self::control::StepTime;
pub(super) use self::drafts::Drafts;
use self::earlier::{EarlierCompletions, prompt_key};
use self::index::DraftIndex;
pub use self::injection::DraftInjection;
use crate::config::Speculation;
use crate::error::Result;
use crate::ranks::{Collective, ReduceOp, all_reduce_f64};

/// Rows that a decode step has room for at least, where there are drafts.
const LEAST_ROWS: usize = 64;
/// Tokens of a completion between two looks at what would be drafted.
const LOOK_EVERY: usize = 16;
/// Probability of a draft token from which `ngram`, which knows no times, computes a row for it.
const LEAST_PROBABILITY: f64 = 0.2;

/// How draft tokens are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpeculationOptions {
    /// Where they come from.
    pub method: Speculation,
    /// Most of a sequence in a step.
    pub num_tokens: usize,
}

impl SpeculationOptions {
    /// No drafts.
    pub const NONE: Self = Self { method: Speculation::None, num_tokens: 0 };

    /// Whether there are drafts.
    pub(super) fn is_on(&self) -> bool {
        self.method != Speculation::None
    }

    /// Most draft tokens of a sequence in a step.
    pub fn most_drafts(&self) -> usize {
        if self.is_on() { self.num_tokens } else { 0 }
    }

    /// Rows of a decode step of at most `max_num_seqs` sequences, drafts included.
    pub(super) fn most_rows(&self, max_num_seqs: usize) -> usize {
        if self.is_on() { max_num_seqs.max(LEAST_ROWS) } else { max_num_seqs }
    }
}

/// One completion of a request, as it stands.
#[derive(Debug, Clone, Copy)]
pub(super) struct DraftedText<'a> {
    pub(super) request: usize,
    pub(super) sample: usize,
    pub(super) token_ids: &'a [u32],
    pub(super) prompt_len: usize,
}

/// A completion that may have drafts in the next step.
#[derive(Debug, Clone, Copy)]
pub(super) struct DraftRequest<'a> {
    pub(super) text: DraftedText<'a>,
    /// Prompt and number of the completion as its random key has them.
    pub(super) prompt_id: u64,
    pub(super) key_sample: usize,
    /// Most tokens.
    pub(super) most: usize,
}

/// Makes drafts, and learns how many pay. All ranks of an engine take the same decisions.
#[derive(Debug)]
pub(super) struct Speculator {
    options: SpeculationOptions,
    injection: Option<DraftInjection>,
    earlier: EarlierCompletions,
    acceptance: Acceptance,
    controller: Controller,
    drafts_now: bool,
    prompts: HashMap<usize, u64>, // of requests that are not complete
    groups: HashMap<u64, TextGroup>,
}

/// The texts of one prompt.
#[derive(Debug, Default)]
struct TextGroup {
    num_requests: usize,
    index: DraftIndex,
    texts: HashMap<(usize, usize), OwnText>, // by request and completion
}

#[derive(Debug)]
struct OwnText {
    number: usize,
    /// Tokens of the completion that the index has.
    num_indexed: usize,
    /// What would have been drafted, with how many of it were drawn since.
    looked: Option<(Drafts, usize)>,
}

impl Speculator {
    /// None where there are no drafts.
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

    /// Takes drafts from a test.
    pub(super) fn inject(&mut self, injection: DraftInjection) {
        self.injection = Some(injection);
    }

    /// Whether the model's head makes the drafts.
    pub(super) fn asks_head(&self) -> bool {
        self.options.method == Speculation::Mtp && self.injection.as_ref().is_none_or(DraftInjection::is_replay)
    }

    /// A request was submitted.
    pub(super) fn begin(&mut self, request: usize, prompt: &[u32]) {
        if self.options.method == Speculation::Mtp {
            return; // nothing is looked up
        }
        let key = prompt_key(prompt);
        self.prompts.insert(request, key);
        self.groups.entry(key).or_default().num_requests += 1;
    }

    /// A request is complete, or removed: its completions are remembered as far as they are known.
    pub(super) fn end<'a>(&mut self, request: usize, completions: impl Iterator<Item = &'a [u32]>) {
        let Some(key) = self.prompts.remove(&request) else { return };
        self.earlier.remember(key, completions.filter(|completion| !completion.is_empty()));
        if let Some(group) = self.groups.get_mut(&key) {
            group.num_requests -= 1;
            if group.num_requests == 0 {
                self.groups.remove(&key);
            }
        }
    }

    /// Whether the tokens of a completion of so many are to be told. While nothing is drafted they are told some at a time, which takes the
    /// host a fraction of the time.
    pub(super) fn is_due(&self, request: usize, sample: usize, num_sampled: usize) -> bool {
        self.drafts_now || is_looked_at(request, sample, num_sampled)
    }

    /// A completion has new tokens.
    pub(super) fn observe(&mut self, text: DraftedText) {
        let Some(group) = self.prompts.get(&text.request).and_then(|key| self.groups.get_mut(key)) else { return };
        let (prompt, completion) = text.token_ids.split_at(text.prompt_len);
        if completion.is_empty() {
            return; // it waits: nothing is indexed for it yet
        }
        if group.texts.is_empty() {
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
        // A step with drafts that pay is a look itself; what `ngram` leaves out is looked at all the same.
        let is_unseen = self.options.method != Speculation::Auto || !self.drafts_now;
        if is_unseen && is_looked_at(text.request, text.sample, completion.len()) {
            let drafts = group.index.drafts(number, self.options.num_tokens);
            self.controller.look(&self.acceptance.of_rows(&drafts));
            let own = group.own(text);
            own.looked = own.looked.take().or((!drafts.token_ids.is_empty()).then_some((drafts, 0)));
        }
    }

    /// Whether the next step of so many sequences is to have drafts, for which all their tokens have to be known.
    pub(super) fn is_to_draft(&mut self, num_seqs: usize, most_rows: usize) -> bool {
        self.drafts_now = num_seqs < most_rows
            && (self.options.method != Speculation::Auto || self.controller.pays(num_seqs, most_rows));
        self.drafts_now
    }

    /// What [`Speculator::is_to_draft`] has decided.
    pub(super) fn drafts_now(&self) -> bool {
        self.drafts_now
    }

    /// Drafts for each of `requests`, of a step that has room for `most_rows` draft tokens beside the sequences.
    pub(super) fn drafts(&mut self, requests: &[DraftRequest], most_rows: usize) -> Vec<Drafts> {
        let mut all: Vec<Drafts> = requests.iter().map(|request| self.drafts_of(request)).collect();
        let probabilities: Vec<Vec<f64>> = all.iter().map(|drafts| self.acceptance.of_rows(drafts)).collect();
        let of_sequence = |(sequence, rows): (usize, &Vec<f64>)| {
            rows.iter().map(move |&probability| (probability, sequence)).collect::<Vec<_>>()
        };
        let mut rows: Vec<(f64, usize)> = probabilities.iter().enumerate().flat_map(of_sequence).collect();
        rows.sort_by(|(a, _), (b, _)| b.total_cmp(a)); // stable: of a sequence the first tokens stay the first
        if self.options.method == Speculation::Ngram && self.injection.is_none() {
            rows.retain(|(probability, _)| *probability >= LEAST_PROBABILITY);
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
            return Drafts { token_ids: vec![0; most], matched: 0 }; // which ones is known once the step is
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

    /// Whether a draft is taken for drawn, as a benchmark has it.
    pub(super) fn replays(&self, prompt_id: u64, sample: usize, position: usize) -> bool {
        self.injection.as_ref().is_some_and(|injection| injection.replays(prompt_id, sample, position))
    }

    /// Drafts were checked, of which the first `num_drawn` were drawn. The ones behind an end were not checked: they are not among `drafts`.
    pub(super) fn note(&mut self, drafts: &Drafts, num_drawn: usize) {
        self.acceptance.note_all(drafts, num_drawn);
    }

    /// Takes in times of decode steps that all ranks have been told.
    pub(super) fn note_times(&mut self, times: impl Iterator<Item = StepTime>) {
        times.for_each(|time| self.controller.note(time));
    }

    /// Whether it asks for times.
    pub(super) fn reads_times(&self) -> bool {
        self.options.method == Speculation::Auto
    }

    /// Ends the session: what it has learned stays.
    pub(super) fn close(self) -> Self {
        Self { prompts: HashMap::new(), groups: HashMap::new(), drafts_now: false, ..self }
    }

    /// Forgets all unless every rank has learned the same: a session that failed may have ended differently. Collective.
    pub(super) fn agree(self, all: &dyn Collective) -> Result<Self> {
        if all.size() == 1 {
            return Ok(self);
        }
        let mut hasher = DefaultHasher::new(); // without random keys: equal on all ranks
        (self.earlier.digest(), &self.acceptance, &self.controller).hash(&mut hasher);
        let digest = (hasher.finish() >> 11) as f64; // exact
        let mut least = [digest, -digest];
        all_reduce_f64(all, &mut least, ReduceOp::Min)?;
        match least[0] == -least[1] {
            true => Ok(self),
            false => Ok(Self { injection: self.injection, ..Self::fresh(self.options) }),
        }
    }
}

impl TextGroup {
    /// Indexes what is known of a prompt.
    fn begin(&mut self, prompt: &[u32], earlier: &[Arc<[u32]>]) {
        let text = self.index.begin(&[]);
        self.index.extend(text, prompt);
        for completion in earlier.iter().rev() {
            let text = self.index.begin(prompt);
            self.index.extend(text, completion);
        }
    }

    fn own(&mut self, text: DraftedText) -> &mut OwnText {
        let index = &mut self.index;
        self.texts.entry((text.request, text.sample)).or_insert_with(|| {
            let number = index.begin(&text.token_ids[..text.prompt_len]);
            OwnText { number, num_indexed: 0, looked: None }
        })
    }
}

/// Whether a completion of so many tokens is looked at. Completions take turns: those of a rollout begin together, and all at once would keep the host from
/// the next step for longer than a step takes.
fn is_looked_at(request: usize, sample: usize, num_sampled: usize) -> bool {
    let turn = request.wrapping_mul(7).wrapping_add(sample); // of groups of any size each turn has as many
    turn.wrapping_add(num_sampled).is_multiple_of(LOOK_EVERY)
}

/// Compares what would have been drafted with what came; what is left to compare.
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
