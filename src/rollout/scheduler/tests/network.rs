//! The dummy network for tests of the scheduler.

use super::*;

/// Keys and values by block and offset; states by page and [`STATE`]; stored draft tokens by page and [`DRAFTS`].
pub(super) type Cache = HashMap<(u32, usize), Vec<u32>>;
const STATE: usize = usize::MAX;
const DRAFTS: usize = usize::MAX - 1;

/// A dummy network. The keys and values of a token are all tokens up to it, a state is the tokens that it has processed, and the next token is a
/// function of these and of the sample number.
pub(super) struct Model<'a> {
    pub(super) cache: &'a mut Cache,
    pub(super) tokens: Vec<Vec<u32>>, // of each sequence, including those that the scheduler does not know yet
}

impl Model<'_> {
    pub(super) fn run(&mut self, step: &Step, scheduler: &Scheduler) -> Vec<Sampled> {
        let block_size = scheduler.limits.block_size;
        let slot = |sequence: usize, position: usize| {
            (scheduler.sequences[sequence].block_table[position / block_size], position % block_size)
        };
        let with_drafts = |run: &TokenRun, tokens: &[u32]| {
            let first = run.tokens.end - run.drafts.token_ids.len();
            [&tokens[..first], &run.drafts.token_ids].concat()
        };
        for run in &step.runs {
            let tokens = &with_drafts(run, &self.tokens[run.sequence]);
            let page = scheduler.sequences[run.sequence].state_page;
            assert_eq!(page.is_some(), scheduler.limits.has_states);
            if let Some(page) = page {
                take_in(self.cache, page, run.num_stored);
                let (num_drafts, Range { start, end }) = (run.drafts.token_ids.len(), run.tokens.clone());
                let before = self.cache.insert((page, STATE), tokens[..end - num_drafts].to_vec());
                let is_own = start == 0 || before.as_deref() == Some(&tokens[..start]);
                assert!(is_own, "sequence {} goes on with a foreign state", run.sequence);
                self.cache.insert((page, DRAFTS), run.drafts.token_ids.clone());
            }
            for position in run.tokens.clone() {
                self.cache.insert(slot(run.sequence, position), tokens[..=position].to_vec());
            }
            for position in 0..run.tokens.end {
                let held = &self.cache[&slot(run.sequence, position)];
                assert_eq!(held, &tokens[..=position], "sequence {} reads foreign keys", run.sequence);
            }
        }
        for &(from, to) in &step.copies {
            for offset in 0..block_size {
                let held = self.cache.get(&(from, offset)).cloned();
                held.map(|held| self.cache.insert((to, offset), held));
            }
        }
        for &(from, to) in &step.state_copies {
            let state = self.cache[&(from, STATE)].clone();
            self.cache.insert((to, STATE), state);
        }
        let mut draws = scheduler.draws(step).into_iter();
        let mut all = Vec::new();
        for run in &step.runs {
            for index in run.samples.clone() {
                let mut goes_on = true;
                let rows = 0..run.num_sampled_rows();
                for (row, draw) in rows.zip(draws.by_ref()) {
                    let drafts = &run.drafts.token_ids[..row];
                    assert_eq!(draw.drafts, drafts);
                    let before = with_drafts(run, &self.tokens[index][..run.tokens.end.min(self.tokens[index].len())]);
                    let sampled = next_token(&before[..before.len() - run.drafts.token_ids.len() + row], draw.sample);
                    if goes_on {
                        self.tokens[index].push(sampled.token_id);
                    }
                    goes_on &= run.drafts.token_ids.get(row) == Some(&sampled.token_id);
                    all.push(sampled);
                }
            }
        }
        assert_eq!(draws.count(), 0);
        all
    }
}

/// What a session does with a step's results. The expert of a token is its position.
pub(super) fn collect(scheduler: &mut Scheduler, step: &Step, sampled: &[Sampled], records_experts: bool) {
    let rules = StopRules { eos_token_ids: &[END], decode: &|_| Ok(String::new()) };
    let positions = step.runs.iter().flat_map(|run| run.tokens.clone());
    let experts: Vec<u16> = positions.map(|position| position as u16).collect();
    scheduler.record_experts(step, if records_experts { &experts } else { &[] });
    scheduler.postprocess(step, sampled, &rules).unwrap();
}

/// All tokens that were fed have their experts.
pub(super) fn check_experts(sequence: &EngineSequence) {
    let RoutedExperts { experts, .. } = &sequence.routed_experts;
    assert!(experts.iter().copied().eq(0..experts.len() as u16) && experts.len() + 1 >= sequence.len(), "{experts:?}");
}

/// The first stored drafts become part of a page's state.
fn take_in(cache: &mut Cache, page: u32, num_stored: usize) {
    if num_stored > 0 {
        let drafts = cache[&(page, DRAFTS)][..num_stored].to_vec();
        cache.get_mut(&(page, STATE)).expect("drafts of a page stand behind its state").extend(drafts);
    }
}

/// Updates the states with accepted draft tokens, as a runner does before its session ends.
pub(super) fn settle(scheduler: &mut Scheduler, cache: &mut Cache) {
    scheduler.settle_drafts().into_iter().for_each(|stored| take_in(cache, stored.page, stored.count));
}

pub(super) fn next_token(tokens: &[u32], sample: usize) -> Sampled {
    let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    let hash = tokens.iter().fold(sample as u64 + 1, |hash, &token| mix(hash, token.into()));
    Sampled { token_id: (mix(hash, 1) % 12) as u32, logprob: 0.0, top: Vec::new() }
}
