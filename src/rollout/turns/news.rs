//! Outcomes of turns, exchanged between the ranks that share an engine.

use std::collections::HashMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::BEAT;
use crate::error::Result;
use crate::phase;
use crate::ranks::HostGroup;
use crate::tools::{Conversations, EpisodeEnd, GroupKey, TrajectoryKey, TurnOutcome};
use crate::types::Prompt;

/// The tools of this rank, and the ranks that share its engine.
#[derive(Debug)]
pub struct TurnTools {
    /// This rank's conversations.
    pub conversations: Conversations,
    /// The ranks of the engine.
    pub engine_ranks: HostGroup,
    /// Handles answers only when no trajectory can be decoded and all tools have answered. Batches then do not depend on how long tools take.
    pub waits: bool,
}

/// An outcome of a turn.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TurnNews {
    /// The group's number in the session.
    pub group: usize,
    pub sample: usize,
    pub what: News,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum News {
    /// The group may begin. If `Some`, these token ids replace its prompt.
    Begins(Option<Vec<u32>>),
    /// The token ids of the context before the next turn.
    Continues(Vec<u32>),
    /// The turn was the trajectory's last.
    Ended,
}

/// The parts of an outcome that only the group's own rank needs.
#[derive(Debug)]
pub(super) enum Own {
    Prompt(Prompt),
    End(EpisodeEnd),
}

/// The outcomes that a rank has received since the last call.
#[derive(Debug, Default)]
pub(super) struct OwnNews {
    /// The outcomes, in the order of groups and samples.
    pub news: Vec<TurnNews>,
    /// The parts for this rank only, by group and sample.
    pub parts: HashMap<(usize, usize), Own>,
}

impl OwnNews {
    /// Collects the outcomes of `conversations`, waiting up to `wait` for the first. `places` maps this rank's groups to their numbers in the
    /// session. With `waits_for_all` it waits for all outcomes that conversations expect.
    pub fn poll(
        conversations: &mut Conversations,
        places: &HashMap<GroupKey, usize>,
        wait: Duration,
        waits_for_all: bool,
    ) -> Result<Self> {
        let is_wanted = |key: &TrajectoryKey| places.contains_key(&key.group);
        let mut outcomes = conversations.poll(wait, is_wanted)?;
        while waits_for_all && conversations.is_waiting(is_wanted) {
            phase::beat();
            outcomes.extend(conversations.poll(BEAT, is_wanted)?);
        }
        let mut own = Self::default();
        for (TrajectoryKey { group, sample }, outcome) in outcomes {
            let group = places[&group];
            let what = match outcome {
                TurnOutcome::Opened(None) => News::Begins(None),
                TurnOutcome::Opened(Some(prompt)) => {
                    let token_ids = prompt.token_ids.clone();
                    own.parts.insert((group, sample), Own::Prompt(prompt));
                    News::Begins(Some(token_ids))
                }
                TurnOutcome::Continues(context) => News::Continues(context),
                TurnOutcome::Ended(end) => {
                    own.parts.insert((group, sample), Own::End(end));
                    News::Ended
                }
            };
            own.news.push(TurnNews { group, sample, what });
        }
        own.news.sort_by_key(|news| (news.group, news.sample));
        Ok(own)
    }
}
