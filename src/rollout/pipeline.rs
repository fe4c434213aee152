//! The runner of an engine with pipeline stages.
//!
//! Every rank launches and collects the same steps, and all proceed in ticks: in tick t, stage s computes the step that was launched s ticks before.
//! Then all ranks communicate: each stage's output goes to the next stage, and the tokens of the step that finished go from the last stage to all.
//! There are as many steps under way as stages, and no sequence is in two of them, so a stage waits only for the slowest one. Nothing is buffered. A
//! rank that fails ends the exchange on all others, as with every collective.
//!
//! Stages run in lock step, where other engines send activations on as soon as they exist. With as many steps in flight as stages, no step could
//! start earlier unless step times differ. In return all ranks make the same collective calls, so deadlines and failures need no second mechanism.

use std::collections::VecDeque;
use std::time::Instant;

use tch::Tensor;

use super::runner::{HostRunner, Runner, StepWork};
use super::sampler::{Draw, OwnedDraw, Sampled};
use super::scheduler::Step;
use super::sequence::EngineSequence;
use super::speculation::StoredDrafts;
use super::stats::StageTimes;
use crate::error::Result;
use crate::ranks::{Collective, all_gather_json};
use crate::types::TokenLogprob;

/// The runner of one rank of one stage.
#[derive(Debug)]
pub(super) struct PipelineRunner<'a> {
    own: HostRunner<'a>,
    pipe: &'a dyn Collective,
    stages: VecDeque<Option<PipelineStep>>, // by stage: the step that it computed in the last tick
    received: Option<Tensor>,               // [T, D], from the previous stage, for the next tick
    own_experts: VecDeque<Vec<u16>>,        // of this stage's layers, for each step on its way through later stages
    through: VecDeque<StepResult>,          // finished steps to collect
    experts: Vec<u16>,                      // of the step that was collected last
    times: StageTimes,
}

/// A step that is on its way through the stages.
#[derive(Debug)]
struct PipelineStep {
    work: StepWork,
    draws: Vec<OwnedDraw>, // only on the last stage
}

#[derive(Debug)]
struct StepResult {
    sampled: Vec<Sampled>,
    experts: Vec<u16>, // of all layers, token by token
}

/// A sampled token as ranks exchange it: its id, the bits of its log-probability, and the same pairs for the most probable ids.
type SentToken = (u32, u32, Vec<(u32, u32)>);

impl Runner for PipelineRunner<'_> {
    fn lag(&self) -> usize {
        self.pipe.size() - 1
    }

    fn launch(&mut self, step: &Step, draws: &[Draw], sequences: &[EngineSequence]) -> Result<()> {
        let work = self.own.prepare(step, sequences)?;
        let draws = if self.is_last() { draws.iter().map(OwnedDraw::new).collect() } else { Vec::new() };
        self.tick(Some(PipelineStep { work, draws }))
    }

    fn collect(&mut self) -> Result<Vec<Sampled>> {
        loop {
            if let Some(StepResult { sampled, experts }) = self.through.pop_front() {
                self.experts = experts;
                return Ok(sampled);
            }
            self.tick(None)?;
        }
    }

    fn take_experts(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.experts)
    }

    fn settle(&mut self, stored: &[StoredDrafts]) -> Result<()> {
        self.own.settle(stored)
    }

    fn take_times(&mut self) -> StageTimes {
        std::mem::take(&mut self.times)
    }
}

impl<'a> PipelineRunner<'a> {
    pub(super) fn new(own: HostRunner<'a>, pipe: &'a dyn Collective) -> Self {
        Self {
            own,
            pipe,
            stages: (0..pipe.size()).map(|_| None).collect(),
            received: None,
            own_experts: VecDeque::new(),
            through: VecDeque::new(),
            experts: Vec::new(),
            times: StageTimes::default(),
        }
    }

    fn is_last(&self) -> bool {
        self.pipe.rank() + 1 == self.pipe.size()
    }

    /// Moves every step to the next stage, and lets a new one enter. Collective over the pipeline.
    fn tick(&mut self, entering: Option<PipelineStep>) -> Result<()> {
        let start = Instant::now();
        self.stages.pop_back(); // this step has passed all stages
        self.stages.push_front(entering);
        let (is_last, received) = (self.is_last(), self.received.take());
        let (mut x, mut sampled) = (None, Vec::new());
        if let Some(PipelineStep { work, draws }) = &mut self.stages[self.pipe.rank()] {
            let rows = self.own.compute(work, received)?; // [T, D]
            self.own_experts.push_back(work.take_experts()?);
            if is_last {
                let draws: Vec<Draw> = draws.iter().map(OwnedDraw::as_draw).collect();
                sampled = self.own.sample(work, &rows, &draws)?;
            }
            x = Some(rows);
        }
        let computed = Instant::now();
        self.pass_on(x.filter(|_| !is_last))?;
        self.bring_back(&sampled)?;
        self.times.computing += computed - start;
        self.times.waiting += computed.elapsed();
        Ok(())
    }

    /// Sends each stage's output to the next stage.
    fn pass_on(&mut self, x: Option<Tensor>) -> Result<()> {
        let last = self.pipe.size() - 1;
        let most = (0..last).map(|stage| self.num_tokens(stage)).max().unwrap_or(0);
        if most == 0 {
            return Ok(());
        }
        let [sent, mut received] = [self.own.stream(most)?, self.own.stream(most)?]; // [most, D]
        if let Some(x) = x {
            sent.f_narrow(0, 0, x.size()[0])?.f_copy_(&x)?;
        }
        self.pipe.shift(&sent, &mut received)?;
        if let Some(before) = self.pipe.rank().checked_sub(1) {
            let num_tokens = self.num_tokens(before);
            let x = received.f_narrow(0, 0, num_tokens as i64)?;
            self.received = (num_tokens > 0).then_some(x);
        }
        Ok(())
    }

    /// Number of tokens of a stage's current step; 0 without one.
    fn num_tokens(&self, stage: usize) -> usize {
        self.stages[stage].as_ref().map_or(0, |step| step.work.num_tokens())
    }

    /// Sends the last stage's samples, if it had a step, to all stages, with the experts of the step's tokens from every stage.
    fn bring_back(&mut self, sampled: &[Sampled]) -> Result<()> {
        let num_tokens = self.num_tokens(self.pipe.size() - 1);
        if num_tokens == 0 {
            return Ok(());
        }
        let experts = self.own_experts.pop_front().expect("every stage has computed a step that is through");
        let own: (Vec<SentToken>, Vec<u16>) = (sampled.iter().map(sent).collect(), experts);
        let all: Vec<(Vec<SentToken>, Vec<u16>)> = all_gather_json(self.pipe, "bring tokens back", &own)?;
        let mut experts = Vec::new();
        for token in 0..num_tokens {
            for (_, of_stage) in &all {
                let per_token = of_stage.len() / num_tokens;
                experts.extend_from_slice(&of_stage[token * per_token..(token + 1) * per_token]);
            }
        }
        let sampled = all.into_iter().flat_map(|(tokens, _)| tokens).map(received).collect();
        self.through.push_back(StepResult { sampled, experts });
        Ok(())
    }
}

fn sent(sampled: &Sampled) -> SentToken {
    let Sampled { token_id, logprob, top } = sampled;
    (*token_id, logprob.to_bits(), top.iter().map(|other| (other.token_id, other.logprob.to_bits())).collect())
}

fn received((token_id, logprob, top): SentToken) -> Sampled {
    let of = |(token_id, logprob)| TokenLogprob { token_id, logprob: f32::from_bits(logprob) };
    Sampled { token_id, logprob: f32::from_bits(logprob), top: top.into_iter().map(of).collect() }
}
