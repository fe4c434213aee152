//! An engine session whose groups are played by agents.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{EndedEpisode, EpisodePlayer};
use crate::endpoint::announce::RequestChange;
use crate::endpoint::client::EngineCommand;
use crate::endpoint::episodes::behind;
use crate::endpoint::requests::Requests;
use crate::error::{Error, Result};
use crate::rollout::{CostMeter, Event, GroupTurns, Request, Session, Turns};
use crate::tools::GroupKey;
use crate::types::{Prompt, RolloutGroup};

/// Changes on a rank since the last step.
#[derive(Debug, Default, Serialize, Deserialize)]
struct EpisodeNews {
    changes: Vec<RequestChange>,
    /// Numbers of this rank's groups that have become complete.
    complete: Vec<usize>,
    /// All tokens of each conversation that has ended, so that its KV cache can be freed.
    ended: Vec<Vec<u32>>,
}

/// A session's groups, including those of the engine's other ranks.
#[derive(Debug)]
pub(super) struct PlayedSession<'p> {
    player: &'p mut EpisodePlayer,
    keeps_branches: bool,
    requests: Requests,
    groups: Vec<Option<GroupKey>>, // of this rank, by number
    places: HashMap<GroupKey, usize>,
    /// Numbers of this rank's groups that have not been announced as complete.
    own_open: HashSet<usize>,
    /// Number of incomplete groups on all ranks.
    num_open: usize,
    /// Version of the weights used for sampling.
    version: u64,
    meter: CostMeter,
}

impl<'p> PlayedSession<'p> {
    pub fn new(player: &'p mut EpisodePlayer, keeps_branches: bool) -> Self {
        let requests = Requests::new(player.options.engine_ranks.rank(), Some(player.queue.shared()), true);
        let (groups, places, own_open) = (Vec::new(), HashMap::new(), HashSet::new());
        Self {
            player,
            keeps_branches,
            requests,
            groups,
            places,
            own_open,
            num_open: 0,
            version: 0,
            meter: CostMeter::new(),
        }
    }

    /// Collects this rank's changes since the last call. Waits up to `wait` for a command.
    fn own_news(&mut self, wait: Duration) -> Result<EpisodeNews> {
        let mut news = EpisodeNews::default();
        let mut commands = std::mem::take(&mut self.player.held);
        if !wait.is_zero() && !commands.iter().any(|command| self.is_wanted(command)) {
            commands.extend(self.player.queue.commands.recv_timeout(wait));
        }
        commands.extend(std::iter::from_fn(|| self.player.queue.commands.try_recv().ok()));
        for outcome in self.player.agent.ended()? {
            if let Some(EndedEpisode { key, sample, token_ids }) = self.player.take(outcome)? {
                news.ended.extend(token_ids);
                // What it has asked for and did not wait for.
                let of_episode = self.of_episode(key, sample);
                news.changes.extend(of_episode.into_iter().map(RequestChange::Cancel));
            }
        }
        commands.into_iter().for_each(|command| self.hold_or_announce(command, &mut news.changes));
        let is_complete = |place: &&usize| {
            let group = self.groups[**place].and_then(|key| self.player.groups.get(&key));
            group.is_some_and(|group| group.is_complete())
        };
        news.complete = self.own_open.iter().filter(is_complete).copied().collect();
        news.complete.sort_unstable();
        self.own_open.retain(|place| !news.complete.contains(place));
        Ok(news)
    }

    fn is_wanted(&self, command: &EngineCommand) -> bool {
        command.group().is_some_and(|key| self.places.contains_key(&key))
    }

    /// Announces a command if its group is in this session, holds it if its group is in another one, and drops it otherwise.
    fn hold_or_announce(&mut self, command: EngineCommand, changes: &mut Vec<RequestChange>) {
        let held = &mut self.player.held;
        match command {
            EngineCommand::Submit { ref wanted, .. } => {
                let key = wanted.group();
                let is_played = self
                    .player
                    .groups
                    .get(&key)
                    .is_some_and(|group| group.name(group.sample_of(wanted.first_sample)).is_some());
                if is_played && !self.places.contains_key(&key) {
                    held.push(command);
                } else if is_played {
                    let mut change = self.requests.take(command);
                    if let RequestChange::Submit(_, wanted) = &mut change {
                        Arc::make_mut(&mut wanted.params).step = self.version;
                    }
                    changes.push(change);
                }
            }
            EngineCommand::Cancel { ticket } => {
                let is_it = |held: &EngineCommand| matches!(held, EngineCommand::Submit { ticket: other, .. } if *other == ticket);
                match held.iter().position(is_it) {
                    Some(place) => drop(held.remove(place)),
                    None => changes.push(self.requests.take(command)),
                }
            }
        }
    }

    /// Tickets of an episode's open requests.
    fn of_episode(&self, key: GroupKey, sample: usize) -> Vec<u64> {
        let Some(group) = self.player.groups.get(&key) else { return Vec::new() };
        let is_its = |wanted: &Request| wanted.group() == key && group.sample_of(wanted.first_sample) == sample;
        self.requests.under_way().filter(|(_, _, wanted)| is_its(wanted)).map(|(_, ticket, _)| ticket).collect()
    }
}

impl Turns for PlayedSession<'_> {
    fn begin(&mut self, session: &mut Session<'_>) -> Result<()> {
        self.player.serve()?;
        self.meter.begin(session);
        Ok(())
    }

    fn on_event(&mut self, event: Event, session: &mut Session<'_>) -> Result<()> {
        self.requests.report(event, session)
    }

    fn advance(&mut self, session: &mut Session<'_>) -> Result<Vec<usize>> {
        if self.num_open == 0 {
            return Ok(Vec::new());
        }
        let (engine_ranks, mut meter) = (self.player.options.engine_ranks.clone(), self.meter);
        let all = meter.exchange(&engine_ranks, "announce episodes", session, |wait| self.own_news(wait))?;
        self.meter = meter;
        let mut complete = Vec::new();
        for (owner, news) in all.into_iter().enumerate() {
            for change in news.changes {
                self.requests.apply(change, owner, session)?;
            }
            news.ended.iter().for_each(|token_ids| session.forget_turn(token_ids, &[]));
            complete.extend(news.complete);
        }
        self.num_open -= complete.len();
        Ok(complete)
    }

    /// Ends the session. Episodes of incomplete groups continue to run, except for groups without any sampled tokens, which are discarded.
    fn suspend(self: Box<Self>, session: &Session<'_>) -> Result<()> {
        let mut fresh = Vec::new();
        for (key, number) in &self.places {
            fresh.extend(self.group(*number, session)?.completions.is_empty().then_some(*key));
        }
        let Self { player, requests, meter, .. } = *self;
        let is_played = |command: &EngineCommand| command.group().is_some_and(|key| player.groups.contains_key(&key));
        let mut held: Vec<EngineCommand> = requests.suspend(session).into_iter().filter(is_played).collect();
        held.append(&mut player.held);
        player.held = held;
        fresh.into_iter().for_each(|key| player.forget(key));
        player.stats.sessions += meter.costs(session, player.options.engine_ranks.rank());
        Ok(())
    }
}

impl GroupTurns for PlayedSession<'_> {
    /// Removes the group's completions, which the player keeps.
    fn restore(&mut self, group: &mut RolloutGroup) {
        group.completions.clear();
    }

    fn submit(&mut self, _: &mut Session<'_>, request: Request, own: Option<&Prompt>) -> Result<usize> {
        let number = self.groups.len();
        let key = request.group();
        self.version = request.params.step;
        if let Some(prompt) = own {
            if self.places.insert(key, number).is_some() {
                return Err(Error::InvalidArgument {
                    op: "play episodes",
                    expected: "each prompt at most once per session".to_owned(),
                    got: format!("prompt {} twice", key.prompt_id),
                });
            }
            if !self.player.groups.contains_key(&key) {
                self.player.begin(key, prompt, &request.params, self.keeps_branches);
            }
            self.own_open.insert(number);
        }
        self.groups.push(own.map(|_| key));
        self.num_open += 1;
        Ok(number)
    }

    /// The group with its completions. For an incomplete group, these are the conversations recorded so far; their number differs from
    /// that of the episodes.
    fn group(&self, number: usize, session: &Session<'_>) -> Result<RolloutGroup> {
        let key = self.groups[number].expect("an own group");
        let played = &self.player.groups[&key];
        if played.is_complete() {
            return Ok(played.group.clone());
        }
        let recorded = played.playing().flat_map(|(_, name)| self.player.episodes.recorded(name));
        let of_group = self.requests.under_way().filter(|(_, _, wanted)| wanted.group() == key);
        let num_begun = |wanted: &Request| wanted.begun.first().map_or(0, |begun| begun.token_ids.len());
        let under_way = of_group.map(|(id, _, wanted)| behind(&session.trajectory(id, 0), num_begun(wanted)));
        let completions = played.ended().cloned().chain(recorded).chain(under_way);
        let completions = completions.filter(|trajectory| !trajectory.token_ids.is_empty()).collect();
        Ok(RolloutGroup { completions, ..played.group.clone() })
    }

    fn take_complete(&mut self, number: usize, _: &Session<'_>) -> Result<RolloutGroup> {
        let key = self.groups[number].take().expect("an own group");
        self.places.remove(&key);
        Ok(self.player.groups.remove(&key).expect("a group that is played").group)
    }
}
