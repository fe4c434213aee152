//! Trajectories between two rollouts: their tools and environments keep running until a later rollout continues them.

use super::{Conversations, EpisodeEnd, GroupKey, TrajectoryKey, TurnOutcome};
use crate::error::{Error, Result};
use crate::types::{Prompt, Trajectory};

impl Conversations {
    /// Discards all trajectories and closes their environments.
    pub fn reset(&mut self) {
        self.forget_where(|_| true);
    }

    /// Discards the trajectories of a group and closes their environments.
    pub fn forget(&mut self, group: GroupKey) {
        self.forget_where(|key| *key == group);
    }

    fn forget_where(&mut self, is_lost: impl Fn(&GroupKey) -> bool) {
        let lost = self.open.extract_if(|key, _| is_lost(&key.group));
        lost.for_each(|(_, conversation)| self.process.forget(conversation.number));
        self.opening.retain(|group, _| !is_lost(group));
        self.asked.retain(|_, asked| !is_lost(&asked.key().group));
        self.done.retain(|(key, _)| !is_lost(&key.group));
        self.ended.retain(|key, _| !is_lost(&key.group));
        self.observed.retain(|group, _| !is_lost(group));
    }

    /// Keeps the prompt of a group that a later rollout continues.
    pub fn keep_prompt(&mut self, group: GroupKey, prompt: Prompt) {
        self.observed.insert(group, prompt);
    }

    /// Removes and returns the prompt of a group that an earlier rollout began.
    pub fn take_prompt(&mut self, group: GroupKey) -> Option<Prompt> {
        self.observed.remove(&group)
    }

    /// Keeps the end of a trajectory whose group a later rollout continues.
    pub fn keep_end(&mut self, key: TrajectoryKey, end: EpisodeEnd) {
        self.ended.insert(key, end);
    }

    /// Continues a trajectory whose newest turn ended in an earlier rollout. [`Conversations::poll`] returns the outcome of that turn.
    ///
    /// # Errors
    /// [`Error::Environment`] for an unknown trajectory.
    pub fn resume(&mut self, key: TrajectoryKey) -> Result<()> {
        if let Some(end) = self.ended.remove(&key) {
            self.done.push((key, TurnOutcome::Ended(end)));
        } else if !self.open.contains_key(&key) && !self.done.iter().any(|(done, _)| *done == key) {
            let message =
                format!("the tools of the unfinished conversation {key:?} from an earlier step are no longer known");
            return Err(Error::Environment { message });
        }
        Ok(())
    }

    /// Ends a trajectory that has no room for another turn after its context.
    pub fn cut_off(&mut self, key: TrajectoryKey, trajectory: &Trajectory) {
        let conversation = self.open.remove(&key).unwrap_or_else(|| self.fresh());
        self.end(key, conversation, trajectory);
    }
}
