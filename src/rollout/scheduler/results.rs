//! Adds the sampled tokens of finished steps to their sequences.

use super::{Scheduler, Step, TokenRun};
use crate::error::Result;
use crate::rollout::request::{Event, RequestId};
use crate::rollout::sampler::Sampled;
use crate::rollout::sequence::EngineSequence;
use crate::rollout::stop::StopRules;
use crate::types::FinishReason;

impl Scheduler {
    /// Records the experts of the oldest step's tokens in their sequences, if there are any; the experts of a prompt are recorded in all members of
    /// its group.
    pub(in crate::rollout) fn record_experts(&mut self, step: &Step, mut experts: &[u16]) {
        let per_token = experts.len().checked_div(step.num_tokens()).unwrap_or(0);
        if per_token == 0 {
            return;
        }
        for run in &step.runs {
            let (of_run, others) = experts.split_at(run.tokens.len() * per_token);
            experts = others;
            if self.sequences[run.sequence].is_finished() {
                continue; // the step ran ahead of its end
            }
            self.share_experts(run);
            let own = &mut self.sequences[run.sequence].routed_experts;
            for (position, experts) in run.tokens.clone().zip(of_run.chunks_exact(per_token)) {
                own.push(position, experts);
            }
            for member in run.samples.clone().filter(|member| *member != run.sequence) {
                if self.sequences[member].routed_experts.num_tokens() < run.tokens.end {
                    self.sequences[member].routed_experts = self.sequences[run.sequence].routed_experts.clone();
                }
            }
        }
    }

    /// Appends the tokens that the oldest step under way sampled, in the order of its draws.
    pub(in crate::rollout) fn postprocess(
        &mut self,
        step: &Step,
        mut sampled: &[Sampled],
        rules: &StopRules,
    ) -> Result<()> {
        for run in &step.runs {
            let (own, others) = sampled.split_at(run.num_draws());
            sampled = others;
            self.sequences[run.samples.clone()].iter_mut().for_each(|sequence| sequence.num_pending -= 1);
            if run.drafts.token_ids.is_empty() {
                for (index, sampled) in run.samples.clone().zip(own) {
                    self.append(index, sampled, rules)?;
                }
            } else {
                self.append_drawn(run, own, rules)?;
            }
        }
        let is_unfinished = |&index: &usize| self.sequences[index].finish_reason.is_none();
        self.running.retain(is_unfinished);
        self.waiting.retain(is_unfinished); // a preempted sequence may have ended with a token under way
        Ok(())
    }

    /// Appends a token to a sequence unless that has ended. Returns whether the sequence continues.
    fn append(&mut self, index: usize, sampled: &Sampled, rules: &StopRules) -> Result<bool> {
        let sequence = &mut self.sequences[index];
        if let Some(reason) = sequence.finish_reason {
            if !sequence.is_finished() {
                self.finish(index, reason); // this step recorded the experts of its last token
            }
            return Ok(false);
        }
        sampled.check(self.groups[sequence.group - self.num_dropped].prompt_id, sequence.len())?;
        sequence.push(sampled.token_id, sampled.logprob);
        sequence.finish_reason = rules.finish_reason(sequence)?;
        self.stats.num_generated_tokens += 1;
        let reason = sequence.finish_reason;
        let (request, sample) = self.place(index);
        let Sampled { token_id, logprob, ref top } = *sampled;
        self.events.push(Event::Token { request, sample, token_id, logprob, top_logprobs: top.clone() });
        self.observe(index);
        match reason {
            Some(reason) => self.finish(index, reason),
            None => {
                if let Err(message) = self.sequences[index].advance_grammar() {
                    self.remove(request.0);
                    self.events.push(Event::Failed { request, message });
                }
            }
        }
        Ok(self.sequences[index].finish_reason.is_none())
    }

    /// Appends the tokens sampled at the draft tokens of a run, up to and including the first that differs from its draft token. Tokens after the end
    /// of the sequence are dropped.
    fn append_drawn(&mut self, run: &TokenRun, sampled: &[Sampled], rules: &StopRules) -> Result<()> {
        let (index, drafts) = (run.sequence, &run.drafts.token_ids);
        if self.sequences[index].finish_reason.is_some() {
            return Ok(()); // the request was removed
        }
        let mut num_drawn = 0;
        let mut goes_on = self.append(index, &sampled[0], rules)?;
        let mut last = sampled[0].token_id;
        while let Some((draft, next)) = drafts.get(num_drawn).zip(sampled.get(num_drawn + 1))
            && (*draft == last || self.replays(index))
        {
            num_drawn += 1;
            if !goes_on {
                break;
            }
            last = next.token_id;
            goes_on = self.append(index, next, rules)?;
        }
        self.take_drafts(run, num_drawn, goes_on);
        if goes_on && !self.sequences[index].block_table.is_empty() {
            let sequence = &mut self.sequences[index];
            sequence.num_computed = sequence.len() - 1;
            self.blocks.shrink(&mut sequence.block_table, sequence.num_computed);
        }
        let EngineSequence { routed_experts, token_ids, .. } = &mut self.sequences[index];
        if routed_experts.num_tokens() + 1 > token_ids.len() && !token_ids.is_empty() {
            *routed_experts = routed_experts.first(token_ids.len() - 1);
        }
        Ok(())
    }

    /// Whether a benchmark makes the sequence's next draft token count as accepted.
    fn replays(&self, index: usize) -> bool {
        let sequence = &self.sequences[index];
        let group = self.group(sequence.group);
        let sample = group.first_sample + index - group.members.start;
        self.speculator.as_ref().is_some_and(|speculator| speculator.replays(group.prompt_id, sample, sequence.len()))
    }

    fn finish(&mut self, index: usize, reason: FinishReason) {
        let (request, sample) = self.place(index);
        match reason {
            FinishReason::Eos | FinishReason::Stop if self.keeps_turns => {
                if self.awaits_experts(index) {
                    return; // that step's results finish the sequence
                }
                self.leave_to_next_turn(index);
            }
            _ => self.release(index),
        }
        self.stats.num_finished += 1;
        self.events.push(Event::Finished { request, sample, reason });
        if self.members(request.0).all(|member| self.sequences[member].is_finished()) {
            self.end_drafts(request.0);
            self.events.push(Event::Complete { request });
        }
    }

    /// The request of a sequence, and the completion's index in it.
    pub(super) fn place(&self, index: usize) -> (RequestId, usize) {
        let group = self.sequences[index].group;
        (RequestId(group), index - self.group(group).members.start)
    }
}
