//! Rewards on threads of their own, while generation goes on.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::worker::{RewardFailures, Shared, State};
use super::{RewardFunction, builtin, reads_answer};
use crate::config::{Config, RewardConfig};
use crate::error::{Error, Result};
use crate::phase;
use crate::types::RolloutGroup;

/// Longest that dropping a pool waits for threads that are still scoring.
const FAREWELL: Duration = Duration::from_secs(1);
/// Longest time between two looks at deadlines and two heartbeats.
const LOOK: Duration = Duration::from_millis(200);

/// Scores completions with every reward function. Results do not depend on the threads' timing, but for functions that
/// run into their deadline. A completion whose reward fails in any way (error, panic, NaN, deadline) has `None` there,
/// and is masked if that reward has a weight; it is never scored 0.
pub struct RewardPool {
    names: Vec<String>,
    weights: Vec<f64>,
    required_columns: Vec<String>,
    num_threads: usize,
    shared: Arc<Shared>,
}

impl RewardPool {
    /// The rewards that `config` names, all of them built in. Threads start with the first submission.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for an unknown name or a wrong number of weights.
    pub fn new(config: &Config) -> Result<Self> {
        Self::with_functions(config, &[])
    }

    /// The same, where `reward_funcs` may also name `functions`, which win over built-in ones.
    pub fn with_functions(config: &Config, functions: &[(&str, RewardFunction)]) -> Result<Self> {
        Self::build(&config.reward, &config.reward_funcs, &config.reward_weights, functions)
    }

    /// One built-in reward with weight 1, for evaluation.
    pub fn single(name: &str, settings: &RewardConfig) -> Result<Self> {
        Self::build(settings, &[name.to_owned()], &[], &[])
    }

    fn build(
        settings: &RewardConfig,
        names: &[String],
        weights: &[f64],
        functions: &[(&str, RewardFunction)],
    ) -> Result<Self> {
        let is_custom = |name: &String| functions.iter().find(|(known, _)| known == name);
        let find = |name: &String| match is_custom(name) {
            Some((_, function)) => Ok((name.clone(), Arc::clone(function))),
            None => Ok((name.clone(), builtin(name, settings)?)),
        };
        let required_columns = match names.iter().any(|name| is_custom(name).is_none() && reads_answer(name)) {
            true => vec![settings.answer_column.clone()],
            false => Vec::new(),
        };
        let functions: Vec<_> = names.iter().map(find).collect::<Result<_>>()?;
        if !weights.is_empty() && weights.len() != names.len() {
            let expected = format!("one weight for each of the {} reward_funcs, or none", names.len());
            return Err(Error::invalid_value("reward_weights", format!("{weights:?}"), expected));
        }
        let weights = if weights.is_empty() { vec![1.0; names.len()] } else { weights.to_vec() };
        let timeout = Duration::from_secs_f64(settings.timeout_s);
        let shared = Shared { functions, timeout, state: Mutex::new(State::default()), changed: Condvar::new() };
        let (names, num_threads) = (names.to_vec(), settings.num_threads);
        Ok(Self { names, weights, required_columns, num_threads, shared: Arc::new(shared) })
    }

    /// Names of the rewards, in the order of [`Completion::rewards`](crate::types::Completion::rewards).
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Columns that the built-in ones among them cannot do without.
    pub fn required_columns(&self) -> Vec<String> {
        self.required_columns.clone()
    }

    /// Starts to score a finished group and returns at once; should no thread start, [`wait`](Self::wait) says so.
    pub fn submit(&self, group: &RolloutGroup) {
        self.shared.lock().submit(Arc::new(group.clone()), self.names.len());
        self.shared.changed.notify_all();
        let _ = self.keep_workers();
    }

    /// Waits for the scores of `groups`, in any order of submission, and fills in `rewards` and `reward` of each
    /// completion. Groups that were not submitted are scored now.
    ///
    /// # Errors
    /// [`Error::Environment`] if no thread can be started.
    pub fn wait(&mut self, groups: &mut [RolloutGroup]) -> Result<()> {
        let tickets = self.claim(groups)?;
        loop {
            self.keep_workers()?;
            phase::beat();
            let state = self.shared.lock();
            if tickets.iter().all(|ticket| state.pending[ticket].num_open == 0) {
                break;
            }
            drop(self.shared.changed.wait_timeout(state, LOOK));
        }
        let mut state = self.shared.lock();
        for (group, ticket) in groups.iter_mut().zip(&tickets) {
            let scores = state.pending.remove(ticket).map(|pending| pending.scores).unwrap_or_default();
            for (completion, rewards) in group.completions.iter_mut().zip(scores) {
                completion.reward = weighted_sum(&rewards, &self.weights);
                completion.rewards = rewards;
            }
        }
        Ok(())
    }

    /// Rewards that failed since the last call, by cause.
    pub fn take_failures(&self) -> RewardFailures {
        std::mem::take(&mut self.shared.lock().failures)
    }

    /// A ticket for each group: of an equal group that was submitted, or of one submitted here.
    fn claim(&self, groups: &[RolloutGroup]) -> Result<Vec<u64>> {
        let mut state = self.shared.lock();
        let mut tickets = Vec::with_capacity(groups.len());
        for group in groups {
            let same = |submitted: &RolloutGroup| {
                submitted.prompt.id == group.prompt.id
                    && submitted.completions.len() == group.completions.len()
                    && submitted.completions.iter().zip(&group.completions).all(|(a, b)| a.token_ids == b.token_ids)
            };
            let known =
                state.pending.iter().filter(|(ticket, pending)| !tickets.contains(*ticket) && same(&pending.group));
            let ticket = known.map(|(ticket, _)| *ticket).min();
            tickets.push(ticket.unwrap_or_else(|| state.submit(Arc::new(group.clone()), self.names.len())));
        }
        drop(state);
        self.shared.changed.notify_all();
        Ok(tickets)
    }

    /// Gives up overdue jobs and sees to it that `num_threads` threads are at work.
    fn keep_workers(&self) -> Result<()> {
        let mut state = self.shared.lock();
        state.give_up_overdue();
        while state.num_workers < self.num_threads {
            let shared = Arc::clone(&self.shared);
            let started = std::thread::Builder::new().name("reward".into()).spawn(move || shared.work());
            match started {
                Ok(_) => state.num_workers += 1,
                Err(_) if state.num_workers > 0 => break,
                Err(error) => {
                    let message = format!("no thread for rewards can be started: {error}");
                    return Err(Error::Environment { message });
                }
            }
        }
        Ok(())
    }
}

impl Drop for RewardPool {
    /// Ends the threads; one that is stuck in a function is left behind.
    fn drop(&mut self) {
        let end = Instant::now() + FAREWELL.min(self.shared.timeout);
        let mut state = self.shared.lock();
        state.closed = true;
        self.shared.changed.notify_all();
        while state.num_workers > 0 {
            let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else { break };
            state = match self.shared.changed.wait_timeout(state, left) {
                Ok((state, _)) => state,
                Err(poisoned) => PoisonError::into_inner(poisoned).0,
            };
        }
    }
}

impl fmt::Debug for RewardPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RewardPool").field("names", &self.names).field("weights", &self.weights).finish_non_exhaustive()
    }
}

/// `None` if a reward with a weight is.
fn weighted_sum(rewards: &[Option<f32>], weights: &[f64]) -> Option<f32> {
    let terms = rewards.iter().zip(weights).filter(|(_, weight)| **weight != 0.0);
    let sum: Option<f64> = terms.map(|(reward, weight)| reward.map(|reward| f64::from(reward) * weight)).sum();
    sum.map(|sum| sum as f32)
}

#[cfg(test)]
mod tests;
