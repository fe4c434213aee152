//! Draft tokens of a decode step, and counting how many were accepted.

use super::{Scheduler, Step, TokenRun};
use crate::rollout::sampler::Draw;
use crate::rollout::sequence::EngineSequence;
use crate::rollout::speculation::{DraftRequest, DraftedText, Drafts, StoredDrafts};

impl Scheduler {
    /// Whether the next step gets draft tokens. Such a step needs all earlier tokens, so schedule it only when no other step is under way.
    pub(in crate::rollout) fn is_to_draft(&mut self) -> bool {
        if self.speculator.is_none() || !self.has_work() {
            return false;
        }
        self.admit_all();
        let (num_seqs, most_rows) = (self.running.len(), self.limits.max_decode_rows);
        let is_decode = self.prefilling.is_empty() && num_seqs > 0;
        is_decode && self.speculator.as_mut().is_some_and(|speculator| speculator.is_to_draft(num_seqs, most_rows))
    }

    /// Adds draft tokens to a decode step whose tokens are all known, as far as rows and free blocks allow. It never preempts a sequence.
    pub(super) fn add_drafts(&mut self, step: &mut Step) {
        let Self { speculator: Some(speculator), limits, sequences, blocks, groups, num_dropped, .. } = self else {
            return;
        };
        let room = limits.max_decode_rows.saturating_sub(step.runs.len());
        let is_known = |run: &TokenRun| sequences[run.sequence].num_pending == 0;
        if !step.is_decode || !step.runs.iter().all(is_known) || !speculator.drafts_now() {
            return;
        }
        step.waited = true;
        step.asks_head = speculator.asks_head();
        let request = |run: &TokenRun| {
            let sequence = &sequences[run.sequence];
            let group = &groups[sequence.group - *num_dropped];
            let sample = run.sequence - group.members.start;
            // The token after the last draft token is sampled too and may be the last one. A structure needs tokens one at a time, so no drafts.
            let left = sequence.max_len - sequence.len();
            let most = if sequence.allowed().is_some() { 0 } else { left.saturating_sub(1) };
            DraftRequest {
                text: DraftedText {
                    request: sequence.group,
                    sample,
                    token_ids: &sequence.token_ids,
                    prompt_len: sequence.prompt_len,
                },
                prompt_id: group.prompt_id,
                key_sample: group.first_sample + sample,
                most,
            }
        };
        let requests: Vec<DraftRequest> = step.runs.iter().map(request).collect();
        let drafts = speculator.drafts(&requests, room);
        for (run, mut drafts) in step.runs.iter_mut().zip(drafts) {
            let sequence = &mut sequences[run.sequence];
            while !blocks.grow(&mut sequence.block_table, run.tokens.end + drafts.token_ids.len()) {
                drafts.token_ids.pop();
            }
            run.tokens.end += drafts.token_ids.len();
            run.drafts = drafts;
        }
    }

    /// Returns how to sample the draft tokens at index `depth`, for the runs that have more than `depth` draft tokens.
    pub(in crate::rollout) fn head_draws<'a>(&'a self, step: &'a Step, depth: usize) -> Vec<Draw<'a>> {
        let num_drafts =
            step.runs.iter().flat_map(|run| std::iter::repeat_n(run.drafts.token_ids.len(), run.num_draws()));
        let all = self.draws(step).into_iter().zip(num_drafts);
        let of_depth = all.filter(|(draw, num_drafts)| draw.drafts.len() == depth && depth < *num_drafts);
        of_depth.enumerate().map(|(row, (draw, _))| Draw { row, ..draw }).collect()
    }

    /// Returns the accepted draft tokens that recurrent states have not processed yet. The caller must process them, because the scheduler then
    /// counts them as processed. Call it only with no step under way.
    pub(in crate::rollout) fn settle_drafts(&mut self) -> Vec<StoredDrafts> {
        let settle = |sequence: &mut EngineSequence| {
            let end = sequence.num_computed;
            let count = end - std::mem::replace(&mut sequence.num_in_state, end);
            sequence.state_page.filter(|_| count > 0).map(|page| StoredDrafts { page, count, end })
        };
        self.running.iter().filter_map(|&index| settle(&mut self.sequences[index])).collect()
    }

    /// Reports a sequence's newest tokens to the source of draft tokens.
    pub(super) fn observe(&mut self, index: usize) {
        let (request, sample) = self.place(index);
        let sequence = &self.sequences[index];
        let (num_sampled, is_finished) = (sequence.completion().len(), sequence.finish_reason.is_some());
        let Some(speculator) =
            self.speculator.as_mut().filter(|it| is_finished || it.is_due(request.0, sample, num_sampled))
        else {
            return;
        };
        let (token_ids, prompt_len) = (&*sequence.token_ids, sequence.prompt_len);
        speculator.observe(DraftedText { request: request.0, sample, token_ids, prompt_len });
    }

    /// Records that the first `num_drawn` draft tokens of a run were accepted, for choosing the number of later ones.
    pub(super) fn take_drafts(&mut self, run: &TokenRun, num_drawn: usize, goes_on: bool) {
        let Drafts { token_ids, matched } = &run.drafts;
        self.stats.num_drafted_sequences += 1;
        self.stats.num_draft_tokens += token_ids.len();
        self.stats.num_accepted_tokens += num_drawn;
        if let Some(speculator) = &mut self.speculator {
            let num_checked = if goes_on { token_ids.len() } else { num_drawn };
            speculator.note(&Drafts { token_ids: token_ids[..num_checked].to_vec(), matched: *matched }, num_drawn);
        }
    }

    /// Ends drafting for a request that is complete or removed.
    pub(super) fn end_drafts(&mut self, request: usize) {
        let members = self.members(request);
        if let Some(speculator) = &mut self.speculator {
            speculator.end(request, self.sequences[members].iter().map(|sequence| sequence.completion()));
        }
    }
}
