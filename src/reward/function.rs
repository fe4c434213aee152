//! Threads that compute rewards with functions of this process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::RewardInput;
use super::failures::{FailureKind, RewardFailure, Score};
use super::job::{GroupJob, ScoringJob};
use super::state::PoolShared;
use crate::error::panic_message;
use crate::types::RolloutGroup;

impl PoolShared {
    /// Main loop of a thread: scores completions until the pool closes or this thread exceeds a deadline.
    pub fn work(&self) {
        while let Some(GroupJob { job, group }) = self.next_job(|state| &mut state.queue) {
            let number = self.lock().begin(job.clone(), Instant::now() + self.timeout);
            self.call_all(number, &job, &group);
            if !self.lock().finish(number) {
                return;
            }
            self.changed.notify_all();
        }
        self.lock().num_workers -= 1;
        self.changed.notify_all();
    }

    /// Runs every function on the job's completion, until the job exceeds its deadline.
    fn call_all(&self, number: u64, job: &ScoringJob, group: &RolloutGroup) {
        let completion = &group.completions[job.completions.start];
        let input = RewardInput {
            prompt: &group.prompt.text,
            completion: completion.newest_text(),
            messages: &completion.messages,
            token_ids: &completion.token_ids,
            finish_reason: completion.finish_reason.expect("a completion that is scored has ended"),
            columns: &group.prompt.columns,
        };
        for (index, function) in &self.functions {
            let outcome = catch_unwind(AssertUnwindSafe(|| function(&input)));
            let outcome = match outcome {
                Ok(score) => score.map_err(RewardFailure::from).and_then(Score::finite),
                Err(panic) => Err(RewardFailure::new(FailureKind::Panic, panic_message(&*panic))),
            };
            if !self.lock().answer(number, (*index, &self.names[*index]), outcome) {
                return;
            }
        }
    }
}
