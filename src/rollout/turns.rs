//! Closed batches of trajectories of several turns. While tools run for some, the others are decoded; what a tool answers enters
//! between two steps.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::engine::RolloutEngine;
use super::exchange::{Owner, exchange};
use super::request::{Event, Request, RequestId, refuse};
use super::session::Session;
use crate::data::Tokenizer;
use crate::dist::HostGroup;
use crate::error::Result;
use crate::phase;
use crate::tools::{Conversations, EpisodeEnd, TrajectoryKey, TurnOutcome};
use crate::types::{FinishReason, Prompt, RolloutGroup, SamplingParams, Trajectory};

/// How long an engine without work waits for tools before it shows that it is alive.
const BEAT: Duration = Duration::from_millis(200);
/// How long one of several ranks without work waits for its own tools before it hears of those of others.
const TICK: Duration = Duration::from_millis(2);

/// The tools of this rank, and the ranks that share its engine.
#[derive(Debug)]
pub struct TurnTools<'a> {
    /// This rank's conversations.
    pub conversations: &'a mut Conversations,
    /// The ranks of the engine.
    pub engine_ranks: &'a HostGroup,
    /// Takes answers only when no trajectory can be decoded and all tools have answered, so that what is computed together does not
    /// depend on how long tools take.
    pub waits: bool,
}

/// An outcome of a turn on its way to the other ranks.
#[derive(Debug, Serialize, Deserialize)]
struct TurnNews {
    group: usize,
    sample: usize,
    what: News,
}

#[derive(Debug, Serialize, Deserialize)]
enum News {
    /// The group may begin, after these tokens if they are others than its prompt's.
    Begins(Option<Vec<u32>>),
    /// Context of the next turn.
    Continues(Vec<u32>),
    /// It was the last turn.
    Ended,
}

/// The parts of an outcome that its owner alone needs.
#[derive(Debug)]
enum Own {
    Prompt(Prompt),
    End(EpisodeEnd),
}

/// A group of any rank of the engine.
struct OpenGroup {
    owner: Owner,
    prompt_id: u64,
    token_ids: Vec<u32>,
    first_step: u64,
    /// Trajectories between two turns, or after their last one.
    trajectories: Vec<Trajectory>,
    num_open: usize,
}

/// Trajectories of a batch on their way.
struct OpenBatch {
    groups: Vec<OpenGroup>,
    /// The trajectory that the first completion of each request is.
    keys: HashMap<RequestId, TrajectoryKey>,
    all: Arc<SamplingParams>,    // of a group
    single: Arc<SamplingParams>, // of a trajectory that goes on alone
    rank: usize,
    num_asked: usize, // turns that ended and groups that may not begin yet, whose outcome is not known
    opens: bool,      // environments, before groups begin
}

impl RolloutEngine<'_> {
    /// Samples `num_generations` trajectories for each of this rank's prompts, each until a turn calls no tool or a limit is reached.
    /// `done` is called with each own group as soon as its last trajectory ends. Collective over the ranks of the engine, which make
    /// the same submissions before the same steps.
    ///
    /// # Errors
    /// The errors of [`RolloutEngine::generate`] and of [`Conversations`].
    pub fn generate_turns(
        &mut self,
        groups: Vec<RolloutGroup>,
        params: &SamplingParams,
        tools: &mut TurnTools<'_>,
        mut done: impl FnMut(&RolloutGroup),
    ) -> Result<Vec<RolloutGroup>> {
        let (limits, vocab_size, tp) = (self.limits(), self.engine.spec.vocab_size, Arc::clone(&self.engine.tp));
        let (requests, _) = exchange(&groups, groups.len(), params, (vocab_size, &limits), tp.as_ref())?;
        let tokenizer = Arc::clone(&self.engine.tokenizer);
        tools.conversations.reset();
        let mut session = self.session()?;
        let opens = tools.conversations.has_environments();
        let mut batch = OpenBatch::begin(&mut session, requests, params, (tp.rank(), opens))?;
        let mut finished: Vec<Option<RolloutGroup>> = groups.into_iter().map(Some).collect();
        if batch.opens {
            for (place, group) in batch.groups.iter().enumerate().filter(|(_, group)| group.owner.0 == tp.rank()) {
                let prompt = &finished[group.owner.1].as_ref().expect("an own group").prompt;
                tools.conversations.open(place, prompt, params.num_generations)?;
            }
        }
        let (start, mut idle) = (Instant::now(), Duration::ZERO);
        while batch.groups.iter().any(|group| group.num_open > 0) {
            if session.has_work() {
                for event in session.step()? {
                    batch.hear(event, &mut session, tools)?;
                }
            }
            if batch.num_asked == 0 || (tools.waits && session.has_work()) {
                continue;
            }
            let before = Instant::now();
            let news = tools.news(!session.has_work())?;
            if !session.has_work() {
                idle += before.elapsed();
            }
            for (news, own) in news {
                let group = news.group;
                if let Some(Own::Prompt(prompt)) = own {
                    let own = batch.groups[group].owner.1;
                    finished[own].as_mut().expect("an own group").prompt = prompt;
                    batch.take(news, &mut session, &tokenizer, None)?;
                    continue;
                }
                batch.take(news, &mut session, &tokenizer, own)?;
                if let Some((own, group)) = batch.finished(group) {
                    let whole = finished[own].as_mut().expect("an own group");
                    (whole.first_step, whole.completions) = group;
                    done(whole);
                }
            }
        }
        session.close()?;
        tools.conversations.book_time(idle, start.elapsed());
        Ok(finished.into_iter().flatten().collect())
    }
}

impl TurnTools<'_> {
    /// The outcomes that have come to any rank of the engine, own ones with their messages; in an order that all ranks have. Where
    /// the engine `is_idle`, waits for some.
    fn news(&mut self, is_idle: bool) -> Result<Vec<(TurnNews, Option<Own>)>> {
        phase::beat();
        let is_alone = self.engine_ranks.size() == 1;
        let mut outcomes = self.conversations.poll(match is_idle {
            true if is_alone => BEAT,
            true => TICK,
            false => Duration::ZERO,
        })?;
        while self.waits && self.conversations.is_waiting() {
            phase::beat();
            outcomes.extend(self.conversations.poll(BEAT)?);
        }
        outcomes.sort_by_key(|(key, _)| *key);
        let mut own_parts = HashMap::new();
        let own: Vec<TurnNews> = outcomes
            .into_iter()
            .map(|(TrajectoryKey { group, sample }, outcome)| {
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
        let all = self.engine_ranks.all_gather_json("announce turns", own)?;
        let with_own = |news: TurnNews| {
            let own = own_parts.remove(&(news.group, news.sample));
            (news, own)
        };
        Ok(all.into_iter().flatten().map(with_own).collect())
    }
}

impl OpenBatch {
    fn begin(
        session: &mut Session<'_>,
        requests: Vec<(Owner, Request)>,
        params: &SamplingParams,
        (rank, opens): (usize, bool),
    ) -> Result<Self> {
        let (all, single) = (Arc::new(params.clone()), SamplingParams { num_generations: 1, ..params.clone() });
        let single = Arc::new(single);
        let mut batch = Self { groups: Vec::new(), keys: HashMap::new(), all, single, rank, num_asked: 0, opens };
        for (owner, request) in requests {
            let num_generations = params.num_generations;
            batch.groups.push(OpenGroup {
                owner,
                prompt_id: request.prompt_id,
                token_ids: request.token_ids.clone(),
                first_step: request.first_step,
                trajectories: vec![Trajectory::default(); num_generations],
                num_open: num_generations,
            });
            if !opens {
                batch.submit(session, batch.groups.len() - 1)?;
            }
        }
        batch.num_asked = if opens { batch.groups.len() } else { 0 };
        Ok(batch)
    }

    /// Submits all trajectories of a group.
    fn submit(&mut self, session: &mut Session<'_>, place: usize) -> Result<()> {
        let group = &self.groups[place];
        let request = session.submit(Request {
            prompt_id: group.prompt_id,
            token_ids: group.token_ids.clone(),
            first_step: group.first_step,
            first_sample: 0,
            params: Arc::clone(&self.all),
            begun: Vec::new(),
            adapter: None,
        })?;
        self.keys.insert(request, TrajectoryKey { group: place, sample: 0 });
        Ok(())
    }

    /// Takes in what the engine reports.
    fn hear(&mut self, event: Event, session: &mut Session<'_>, tools: &mut TurnTools<'_>) -> Result<()> {
        let Some(&first) = self.keys.get(&event.request()) else { return Ok(()) };
        match event {
            Event::Finished { request, sample, .. } => {
                let key = TrajectoryKey { sample: first.sample + sample, ..first };
                let group = &mut self.groups[key.group];
                let trajectory = session.trajectory(request, sample);
                if group.owner.0 == self.rank {
                    tools.conversations.turn_ended(key, group.token_ids.len(), &trajectory)?;
                }
                group.trajectories[key.sample] = trajectory;
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

    /// Begins a group, goes on with a trajectory, or ends it.
    fn take(
        &mut self,
        TurnNews { group: place, sample, what }: TurnNews,
        session: &mut Session<'_>,
        tokenizer: &Tokenizer,
        own: Option<Own>,
    ) -> Result<()> {
        self.num_asked -= 1;
        let group = &mut self.groups[place];
        if let News::Begins(token_ids) = what {
            group.token_ids = token_ids.unwrap_or_else(|| std::mem::take(&mut group.token_ids));
            return self.submit(session, place);
        }
        let trajectory = &mut group.trajectories[sample];
        if let News::Continues(context) = what {
            trajectory.push_context(&context, self.single.step);
            if trajectory.token_ids.len() < self.single.max_completion_length {
                let request = session.submit(Request {
                    prompt_id: group.prompt_id,
                    token_ids: group.token_ids.clone(),
                    first_step: group.first_step,
                    first_sample: sample,
                    params: Arc::clone(&self.single),
                    begun: vec![std::mem::take(trajectory)],
                    adapter: None,
                })?;
                self.keys.insert(request, TrajectoryKey { group: place, sample });
                return Ok(());
            }
            trajectory.finish_reason = Some(FinishReason::Length); // no token is left for another turn
        }
        group.num_open -= 1;
        if group.owner.0 == self.rank {
            trajectory.text = tokenizer.decode(&trajectory.token_ids)?;
            if let Some(Own::End(EpisodeEnd { messages, environment, failure })) = own {
                (trajectory.messages, trajectory.environment, trajectory.failure) = (messages, environment, failure);
            }
        }
        Ok(())
    }

    /// The place of an own group that is complete, with its first step and trajectories.
    fn finished(&mut self, place: usize) -> Option<(usize, (u64, Vec<Trajectory>))> {
        let group = &mut self.groups[place];
        let (rank, position) = group.owner;
        (rank == self.rank && group.num_open == 0)
            .then(|| (position, (group.first_step, std::mem::take(&mut group.trajectories))))
    }
}
