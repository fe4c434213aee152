//! Outcomes of turns, on their way to the ranks that share an engine.

use std::collections::HashMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::phase;
use crate::ranks::HostGroup;
use crate::tools::{Conversations, EpisodeEnd, GroupKey, TrajectoryKey, TurnOutcome};
use crate::types::Prompt;

/// How long an engine without work waits for tools before it shows that it is alive.
const BEAT: Duration = Duration::from_millis(200);
/// How long one of several ranks without work waits for its own tools before it hears of those of others.
const TICK: Duration = Duration::from_millis(2);

/// The tools of this rank, and the ranks that share its engine.
#[derive(Debug)]
pub struct TurnTools {
    /// This rank's conversations.
    pub conversations: Conversations,
    /// The ranks of the engine.
    pub engine_ranks: HostGroup,
    /// Takes answers only when no trajectory can be decoded and all tools have answered, so that what is computed together does not
    /// depend on how long tools take.
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
    /// The group may begin, after these tokens if they are others than its prompt's.
    Begins(Option<Vec<u32>>),
    /// Context of the next turn.
    Continues(Vec<u32>),
    /// It was the last turn.
    Ended,
}

/// The parts of an outcome that its owner alone needs.
#[derive(Debug)]
pub(super) enum Own {
    Prompt(Prompt),
    End(EpisodeEnd),
}

impl TurnTools {
    /// The outcomes that have come to any rank of the engine, own ones with their messages; in an order that all ranks have. `places`
    /// has the numbers of this rank's groups in the session. Where the engine `is_idle`, waits for some.
    pub(super) fn news(
        &mut self,
        places: &HashMap<GroupKey, usize>,
        is_idle: bool,
    ) -> Result<Vec<(TurnNews, Option<Own>)>> {
        phase::beat();
        let is_alone = self.engine_ranks.size() == 1;
        let is_wanted = |key: &TrajectoryKey| places.contains_key(&key.group);
        let wait = match is_idle {
            true if is_alone => BEAT,
            true => TICK,
            false => Duration::ZERO,
        };
        let mut outcomes = self.conversations.poll(wait, is_wanted)?;
        while self.waits && self.conversations.is_waiting(is_wanted) {
            phase::beat();
            outcomes.extend(self.conversations.poll(BEAT, is_wanted)?);
        }
        let mut own_parts = HashMap::new();
        let mut own: Vec<TurnNews> = outcomes
            .into_iter()
            .map(|(TrajectoryKey { group, sample }, outcome)| {
                let group = places[&group];
                let what = match outcome {
                    TurnOutcome::Opened(None) => News::Begins(None),
                    TurnOutcome::Opened(Some(prompt)) => {
                        let token_ids = prompt.token_ids.clone();
                        own_parts.insert((group, sample), Own::Prompt(prompt));
                        News::Begins(Some(token_ids))
                    }
                    TurnOutcome::Continues(context) => News::Continues(context),
                    TurnOutcome::Ended(end) => {
                        own_parts.insert((group, sample), Own::End(end));
                        News::Ended
                    }
                };
                TurnNews { group, sample, what }
            })
            .collect();
        own.sort_by_key(|news| (news.group, news.sample));
        let all = self.engine_ranks.all_gather_json("announce turns", own)?;
        let with_own = |news: TurnNews| {
            let own = own_parts.remove(&(news.group, news.sample));
            (news, own)
        };
        Ok(all.into_iter().flatten().map(with_own).collect())
    }
}
