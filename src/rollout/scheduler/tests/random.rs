//! Random calls of a scheduler, as sessions make them. After each call, no block or page is lost or read by sequences that do not share it, and every
//! completion equals the one sampled alone.

use super::*;
use crate::ops::random::RandomKey;

/// A scheduler and the random caller that drives it.
struct Calls {
    random: RandomKey,
    num_drawn: u64,
    lag: usize,
    scheduler: Scheduler,
    cache: Cache,
    tokens: Vec<Vec<u32>>, // see `Model::tokens`
    under_way: VecDeque<(Step, Vec<Sampled>)>,
    known: Vec<usize>, // requests that are not removed
    /// Requests for partly sampled sequences: next turns, and requests that were removed before their end.
    begun: Vec<Request>,
    turns: Vec<Vec<u32>>, // finished turns that may have left blocks for a next turn
    num_complete: usize,
    drafts: bool,
    records_experts: bool,
}

impl Calls {
    fn new(seed: u64) -> Self {
        let mut calls = Self {
            random: RandomKey::new(seed, 0),
            num_drawn: 0,
            lag: 0,
            scheduler: Scheduler::new(ROOMY, KeptSequences::default(), EngineStats::default()),
            cache: Cache::new(),
            tokens: Vec::new(),
            under_way: VecDeque::new(),
            known: Vec::new(),
            begun: Vec::new(),
            turns: Vec::new(),
            num_complete: 0,
            drafts: seed % 2 == 1,
            records_experts: seed % 4 < 2,
        };
        let (block_size, num_stages) = (1 + calls.below(5), 1 + calls.below(3));
        let limits = StepLimits {
            num_blocks: 32_usize.div_ceil(block_size) + calls.below(16), // at least the blocks of the longest sequence
            block_size,
            max_num_seqs: 1 + calls.below(8),
            max_num_batched_tokens: 1 + calls.below(24),
            has_states: calls.below(3) == 0,
            num_stages,
            runs_ahead: calls.below(2) == 0,
            ..ROOMY
        };
        calls.lag = if num_stages == 1 { calls.below(3) } else { num_stages - 1 + usize::from(limits.runs_ahead) };
        calls.open(limits, KeptSequences::default(), EngineStats::default());
        calls
    }

    fn below(&mut self, bound: usize) -> usize {
        self.num_drawn += 1;
        (self.random.word(0, self.num_drawn) % bound as u64) as usize
    }

    fn open(&mut self, limits: StepLimits, kept: KeptSequences, stats: EngineStats) {
        let drafts = self.drafts && limits.num_stages == 1;
        let speculator = if drafts { drafts::speculator(drafts::mixed) } else { None };
        self.scheduler = Scheduler::new(limits, kept, stats).with_speculator(speculator);
        self.scheduler.keep_turns();
        (self.tokens, self.known) = Default::default();
    }

    /// Makes one random call.
    fn call(&mut self) {
        match self.below(20) {
            0..3 => self.submit(),
            3 => self.remove(),
            4 if self.scheduler.prefilling.is_empty() => self.scheduler.preempt_last(),
            5 => self.forget_turn(),
            6 if self.below(8) == 0 => self.reopen(),
            _ => self.step(),
        }
        self.scheduler.check_integrity().unwrap();
    }

    /// Submits a short prompt; many of them have common beginnings.
    fn submit(&mut self) {
        let request = if self.begun.is_empty() || self.below(2) == 0 {
            let prompt: Vec<u32> = (0..1 + self.below(12)).map(|_| 1 + self.below(2) as u32).collect();
            let mut request = request(&prompt, 1 + self.below(4), Vec::new());
            Arc::make_mut(&mut request.params).max_completion_length = 1 + self.below(20);
            request
        } else {
            let at = self.below(self.begun.len());
            self.begun.swap_remove(at)
        };
        let prompt = request.token_ids.clone();
        let RequestId(group) = self.scheduler.submit(request, None);
        let members = &self.scheduler.sequences[self.scheduler.members(group)];
        assert!(members.iter().all(|sequence| sequence.token_ids.starts_with(&prompt)));
        self.tokens.extend(members.iter().map(|sequence| sequence.token_ids.clone()));
        self.known.push(group);
        self.take_events();
    }

    fn step(&mut self) {
        if self.under_way.is_empty() && self.below(4) == 0 {
            let num_sequences = self.scheduler.sequences.len();
            self.scheduler.compact();
            self.tokens.drain(..num_sequences - self.scheduler.sequences.len());
        }
        if self.scheduler.is_to_draft() || self.under_way.iter().any(|(step, _)| step.has_drafts()) {
            while !self.under_way.is_empty() {
                self.collect();
            }
        }
        let step = if self.scheduler.has_work() { self.scheduler.schedule() } else { None };
        let is_idle = step.is_none();
        if let Some(step) = step {
            self.scheduler.check_integrity().unwrap();
            let mut model = Model { cache: &mut self.cache, tokens: std::mem::take(&mut self.tokens) };
            let sampled = model.run(&step, &self.scheduler);
            self.tokens = model.tokens;
            self.under_way.push_back((step, sampled));
        }
        if is_idle || self.under_way.len() > self.lag {
            assert!(!self.under_way.is_empty() || !self.scheduler.has_work(), "idle, and no results are awaited");
            self.collect();
        }
    }

    fn collect(&mut self) {
        if let Some((step, sampled)) = self.under_way.pop_front() {
            collect(&mut self.scheduler, &step, &sampled, self.records_experts);
        }
        self.take_events();
    }

    fn take_events(&mut self) {
        for event in self.scheduler.take_events() {
            match event {
                Event::Complete { request } => self.check_complete(request.0),
                Event::Finished { request, sample, reason: FinishReason::Eos } => self.end_turn(request.0, sample),
                _ => (),
            }
        }
    }

    /// Checks that every token follows from those before it, and that the last one is an end token.
    fn check_complete(&mut self, group: usize) {
        self.num_complete += 1;
        let first_sample = self.scheduler.group(group).first_sample;
        for (sample, sequence) in self.scheduler.sequences[self.scheduler.members(group)].iter().enumerate() {
            let completion = sequence.completion().iter().zip(&sequence.loss_mask).enumerate();
            for (at, (&token_id, _)) in completion.filter(|(_, (_, is_sampled))| **is_sampled) {
                let before = &sequence.token_ids[..sequence.prompt_len + at];
                assert_eq!(token_id, next_token(before, first_sample + sample).token_id);
            }
            assert!(sequence.token_ids.ends_with(&[END]) || sequence.len() >= sequence.max_len);
            // No step computes context that leaves no room for a token.
            if self.records_experts && sequence.loss_mask.ends_with(&[true]) {
                check_experts(sequence);
            }
        }
    }

    /// Creates the next turn of a sequence that has ended; it may be submitted later.
    fn end_turn(&mut self, group: usize, sample: usize) {
        self.turns.push(self.scheduler.sequences[self.scheduler.members(group)][sample].token_ids.clone());
        let mut next = self.begun_request(group, sample..sample + 1);
        next.begun[0].push_context(&[7, 8, 9], 0);
        self.begun.push(next);
    }

    /// Creates a request that continues sequences of another request from their current state.
    fn begun_request(&self, group: usize, samples: Range<usize>) -> Request {
        let sequences = &self.scheduler.sequences[self.scheduler.members(group)][samples.clone()];
        let first = &sequences[0];
        let (prompt, params) = (&first.token_ids[..first.prompt_len], SamplingParams::clone(&first.params));
        let begun = sequences.iter().map(EngineSequence::trajectory).collect();
        Request {
            first_sample: self.scheduler.group(group).first_sample + samples.start,
            params: Arc::new(SamplingParams { num_generations: samples.len(), ..params }),
            ..request(prompt, 1, begun)
        }
    }

    fn remove(&mut self) {
        if self.known.is_empty() {
            return;
        }
        let at = self.below(self.known.len());
        let group = self.known.swap_remove(at);
        self.begun.push(self.begun_request(group, 0..self.scheduler.members(group).len()));
        self.scheduler.remove(group);
        assert!(!self.scheduler.knows(group));
    }

    fn forget_turn(&mut self) {
        if !self.turns.is_empty() {
            let at = self.below(self.turns.len());
            self.scheduler.forget_turn(&self.turns.swap_remove(at));
        }
    }

    /// Ends the session. Its unfinished requests may be submitted to the next session, which has the kept sequences.
    fn reopen(&mut self) {
        while !self.under_way.is_empty() {
            self.collect();
        }
        for group in std::mem::take(&mut self.known) {
            self.begun.push(self.begun_request(group, 0..self.scheduler.members(group).len()));
        }
        let fresh = Scheduler::new(ROOMY, KeptSequences::default(), EngineStats::default());
        let Scheduler { limits, stats, .. } = self.scheduler;
        settle(&mut self.scheduler, &mut self.cache);
        let kept = std::mem::replace(&mut self.scheduler, fresh).into_kept();
        self.open(limits, kept, stats);
        for _ in 0..3 {
            self.submit();
        }
    }

    /// Runs all requests to their end, frees what is kept for later turns and rollouts, and checks that no block is lost.
    fn end(mut self) -> EngineStats {
        while self.scheduler.has_work() || !self.under_way.is_empty() {
            self.step();
            self.scheduler.check_integrity().unwrap();
        }
        self.turns.iter().for_each(|token_ids| self.scheduler.forget_turn(token_ids));
        assert!(self.scheduler.between_turns.is_empty());
        while let Some(place) = self.scheduler.kept.take_any() {
            self.scheduler.free(place);
        }
        let StepLimits { num_blocks, max_num_seqs, has_states, .. } = self.scheduler.limits;
        assert_eq!(self.scheduler.blocks.num_free(), num_blocks);
        assert_eq!(self.scheduler.states.num_free(), if has_states { max_num_seqs } else { usize::MAX });
        assert!(self.num_complete > 50, "{}", self.num_complete);
        self.scheduler.stats
    }
}

#[test]
fn the_scheduler_stays_consistent_over_14_000_random_calls() {
    let play = |seed| {
        let mut calls = Calls::new(seed);
        (0..1000).for_each(|_| calls.call());
        calls.end()
    };
    let stats: Vec<EngineStats> = (0..14).map(play).collect();
    let all = |count: fn(&EngineStats) -> usize| stats.iter().map(count).sum::<usize>();
    let counts = [
        all(|stats| stats.num_preemptions),
        all(|stats| stats.num_shared_tokens),
        all(|stats| stats.num_turn_tokens),
        all(|stats| stats.num_lost_turn_tokens),
        all(|stats| stats.num_kept_tokens),
        all(|stats| stats.num_recomputed_tokens),
        all(|stats| stats.num_accepted_tokens),
    ];
    assert!(counts.iter().all(|&count| count > 20), "{counts:?}");
}
