//! Trajectories of several turns in a session. While tools run for some trajectories, the others are decoded. A tool's answer is added between two
//! steps.

use std::collections::HashMap;
use std::sync::Arc;

use super::news::{News, Own, OwnNews, TurnNews, TurnTools};
use super::{CostMeter, GroupTurns, Turns};
use crate::data::Tokenizer;
use crate::error::Result;
use crate::rollout::request::{Event, Request, RequestId, refuse};
use crate::rollout::session::Session;
use crate::tools::{EpisodeEnd, GroupKey, TrajectoryKey};
use crate::types::{FinishReason, Prompt, RolloutGroup, SamplingParams, Trajectory};

impl TurnTools {
    /// The turns of a session that uses these tools.
    pub fn turns(&mut self) -> Box<dyn GroupTurns + '_> {
        Box::new(TurnGroups::new(self))
    }
}

/// A group of any rank of the engine.
#[derive(Debug)]
struct OpenGroup {
    /// The prompt of a group of this rank, with the text that its environment added.
    own: Option<Prompt>,
    /// The request that continues a trajectory of the group, without `begun`.
    request: Request,
    trajectories: Vec<TurnedTrajectory>,
    num_open: usize,
}

/// The state of a trajectory.
#[derive(Debug, Clone, Default)]
struct TurnedTrajectory {
    /// The request that samples it, and its sample number there. While set, the engine holds the newest tokens.
    request: Option<(RequestId, usize)>,
    trajectory: Trajectory,
    /// Whether its last turn, its tools and its environment are all finished.
    has_ended: bool,
}

/// The groups of a session whose trajectories have several turns.
#[derive(Debug)]
struct TurnGroups<'t> {
    tools: &'t mut TurnTools,
    tokenizer: Arc<Tokenizer>,
    groups: Vec<OpenGroup>,
    places: HashMap<GroupKey, usize>, // of this rank's groups
    /// For each request, the trajectory that its first completion belongs to.
    keys: HashMap<RequestId, (usize, usize)>, // group, sample
    num_asked: usize,                 // turns that ended, and groups that may not begin yet, whose outcome is not known
    meter: CostMeter,
}

impl<'t> TurnGroups<'t> {
    fn new(tools: &'t mut TurnTools) -> Self {
        let tokenizer = Arc::clone(tools.conversations.tokenizer());
        let (groups, places, keys) = (Vec::new(), HashMap::new(), HashMap::new());
        Self { tools, tokenizer, groups, places, keys, num_asked: 0, meter: CostMeter::new() }
    }

    /// Submits all trajectories of a group that can be continued.
    fn submit_all(&mut self, session: &mut Session<'_>, place: usize) -> Result<()> {
        let group = &mut self.groups[place];
        let begun: Vec<Trajectory> = group.trajectories.iter().map(|it| it.trajectory.clone()).collect();
        let is_new = begun.iter().all(|trajectory| trajectory.token_ids.is_empty());
        let begun = if is_new { Vec::new() } else { begun };
        let request = session.submit(Request { begun, ..group.request.clone() })?;
        for (sample, it) in group.trajectories.iter_mut().enumerate() {
            it.request = it.trajectory.finish_reason.is_none().then_some((request, sample));
        }
        self.keys.insert(request, (place, 0));
        Ok(())
    }

    /// Applies an outcome: begins a group, continues a trajectory, or ends it. Returns whether this completed the group.
    fn take(&mut self, news: TurnNews, session: &mut Session<'_>, own: Option<Own>) -> Result<bool> {
        let TurnNews { group: place, sample, what } = news;
        self.num_asked -= 1;
        let group = &mut self.groups[place];
        if let News::Begins(token_ids) = what {
            if let Some(token_ids) = token_ids {
                group.request.token_ids = token_ids;
            }
            if let Some(Own::Prompt(prompt)) = own {
                group.own = Some(prompt);
            }
            self.submit_all(session, place)?;
            return Ok(false);
        }
        let key = TrajectoryKey { group: group.request.group(), sample };
        let params = &group.request.params;
        let trajectory = &mut group.trajectories[sample].trajectory;
        if let News::Continues(context) = what {
            let turn_end = trajectory.token_ids.len();
            trajectory.push_context(&context, params.step);
            if trajectory.token_ids.len() < params.max_completion_length {
                let params = Arc::new(SamplingParams { num_generations: 1, ..(**params).clone() });
                let begun = vec![std::mem::take(trajectory)];
                let request = Request { first_sample: sample, params, begun, ..group.request.clone() };
                let request = session.submit(request)?;
                group.trajectories[sample].request = Some((request, 0));
                self.keys.insert(request, (place, sample));
                return Ok(false);
            }
            trajectory.finish_reason = Some(FinishReason::Length); // no token is left for another turn
            session.forget_turn(&group.request.token_ids, &trajectory.token_ids[..turn_end]);
            self.num_asked += 1;
            if group.own.is_some() {
                self.tools.conversations.cut_off(key, trajectory);
            }
            return Ok(false);
        }
        session.forget_turn(&group.request.token_ids, &trajectory.token_ids);
        group.num_open -= 1;
        if group.own.is_some() {
            trajectory.text = self.tokenizer.decode(&trajectory.token_ids)?;
            if let Some(Own::End(EpisodeEnd { messages, environment, failure })) = own {
                (trajectory.messages, trajectory.environment, trajectory.failure) = (messages, environment, failure);
            }
        }
        group.trajectories[sample].has_ended = true;
        Ok(group.num_open == 0)
    }
}

impl Turns for TurnGroups<'_> {
    fn begin(&mut self, session: &mut Session<'_>) -> Result<()> {
        self.meter.begin(session);
        Ok(())
    }

    fn on_event(&mut self, event: Event, session: &mut Session<'_>) -> Result<()> {
        let Some(&(place, first)) = self.keys.get(&event.request()) else { return Ok(()) };
        match event {
            Event::Finished { request, sample, .. } => {
                let group = &mut self.groups[place];
                let key = TrajectoryKey { group: group.request.group(), sample: first + sample };
                let trajectory = session.trajectory(request, sample);
                if let Some(prompt) = &group.own {
                    self.tools.conversations.turn_ended(key, &prompt.token_ids, &trajectory)?;
                }
                group.trajectories[key.sample] = TurnedTrajectory { trajectory, ..TurnedTrajectory::default() };
                self.num_asked += 1;
            }
            Event::Complete { request } => {
                self.keys.remove(&request);
                session.remove(request)?;
            }
            Event::Failed { message, .. } => return refuse("a structure to follow".to_owned(), message),
            Event::Token { .. } | Event::Preempted { .. } => {}
        }
        Ok(())
    }

    fn advance(&mut self, session: &mut Session<'_>) -> Result<Vec<usize>> {
        if self.num_asked == 0 || (self.tools.waits && session.has_work()) {
            return Ok(Vec::new());
        }
        let TurnTools { conversations, engine_ranks, waits } = &mut *self.tools;
        let mut parts = HashMap::new();
        let all = self.meter.exchange(engine_ranks, "announce turns", session, |wait| {
            let own = OwnNews::poll(conversations, &self.places, wait, *waits)?;
            parts = own.parts;
            Ok(own.news)
        })?;
        let mut complete = Vec::new();
        for news in all.into_iter().flatten() {
            let (place, own) = (news.group, parts.remove(&(news.group, news.sample)));
            if self.take(news, session, own)? {
                complete.push(place);
            }
        }
        Ok(complete)
    }

    fn suspend(mut self: Box<Self>, session: &Session<'_>) -> Result<()> {
        let own = |(place, group): (usize, &OpenGroup)| group.own.is_some().then_some(place);
        let own: Vec<usize> = self.groups.iter().enumerate().filter_map(own).collect();
        for place in own {
            let is_new = self.group(place, session)?.completions.is_empty();
            let group = &mut self.groups[place];
            let key = group.request.group();
            if is_new {
                self.tools.conversations.forget(key);
                continue;
            }
            if let Some(prompt) = group.own.take() {
                self.tools.conversations.keep_prompt(key, prompt);
            }
            for (sample, it) in group.trajectories.iter_mut().enumerate().filter(|(_, it)| it.has_ended) {
                let Trajectory { messages, environment, failure, .. } = std::mem::take(&mut it.trajectory);
                let end = EpisodeEnd { messages, environment, failure };
                self.tools.conversations.keep_end(TrajectoryKey { group: key, sample }, end);
            }
        }
        let costs = self.meter.costs(session, self.tools.engine_ranks.rank());
        self.tools.conversations.book(costs);
        Ok(())
    }
}

impl GroupTurns for TurnGroups<'_> {
    /// Restores the prompt of a partly sampled group as its environments extended it.
    fn restore(&mut self, group: &mut RolloutGroup) {
        if !group.completions.is_empty() {
            let key = GroupKey { prompt_id: group.prompt.id, first_step: group.first_step };
            group.prompt = self.tools.conversations.take_prompt(key).unwrap_or_else(|| group.prompt.clone());
        }
    }

    fn submit(&mut self, session: &mut Session<'_>, mut request: Request, own: Option<&Prompt>) -> Result<usize> {
        let (place, num_generations) = (self.groups.len(), request.params.num_generations);
        let begun = std::mem::take(&mut request.begun);
        let is_new = begun.is_empty();
        let trajectories = match is_new {
            true => vec![TurnedTrajectory::default(); num_generations],
            false => {
                begun.into_iter().map(|trajectory| TurnedTrajectory { trajectory, ..Default::default() }).collect()
            }
        };
        let group = OpenGroup { own: own.cloned(), request, trajectories, num_open: num_generations };
        let key = group.request.group();
        if own.is_some() && self.places.insert(key, place).is_some() {
            let expected = "each prompt at most once per session".to_owned();
            return refuse(expected, format!("prompt {} twice", key.prompt_id));
        }
        self.groups.push(group);
        if is_new && self.tools.conversations.has_environments() {
            self.num_asked += 1;
            own.map_or(Ok(()), |prompt| self.tools.conversations.open(key, prompt, num_generations))?;
            return Ok(place);
        }
        let group = &self.groups[place];
        for (sample, it) in group.trajectories.iter().enumerate() {
            if it.trajectory.finish_reason.is_some() {
                self.num_asked += 1; // its tools run, or its end was not sent to the other ranks yet
                if group.own.is_some() {
                    self.tools.conversations.resume(TrajectoryKey { group: key, sample })?;
                }
            }
        }
        self.submit_all(session, place)?;
        Ok(place)
    }

    fn group(&self, place: usize, session: &Session<'_>) -> Result<RolloutGroup> {
        let group = &self.groups[place];
        let trajectory = |it: &TurnedTrajectory| match it.request {
            Some((request, sample)) => session.trajectory(request, sample),
            None => it.trajectory.clone(),
        };
        let completions: Vec<Trajectory> = group.trajectories.iter().map(trajectory).collect();
        let is_new = completions.iter().all(|trajectory| trajectory.token_ids.is_empty());
        let completions = if is_new { Vec::new() } else { completions };
        let prompt = group.own.clone().expect("an own group");
        Ok(RolloutGroup { prompt, first_step: group.request.first_step, completions })
    }

    fn take_complete(&mut self, place: usize, _: &Session<'_>) -> Result<RolloutGroup> {
        let group = &mut self.groups[place];
        let completions = group.trajectories.iter_mut().map(|it| std::mem::take(&mut it.trajectory)).collect();
        let prompt = group.own.take().expect("an own group");
        Ok(RolloutGroup { prompt, first_step: group.request.first_step, completions })
    }
}
