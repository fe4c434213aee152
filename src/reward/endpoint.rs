//! Rewards of services that are asked over HTTP: many completions at once, each with a deadline within which what passes (no
//! connection, a server that is overloaded or restarting) is tried again. A failure masks its sample.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::failures::{FailureKind, RewardFailure, Score};
use super::form::Form;
use super::protocol::{MAX_REPLY_BYTES, excerpt};
use crate::config::{ProcessReward, RewardConfig};
use crate::error::{Error, Result};
use crate::types::RolloutGroup;

/// Pause before the second attempt; it doubles with every further one up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A service over HTTP.
pub(super) struct ServiceEndpoint {
    /// Place of this reward among all.
    pub index: usize,
    pub name: String,
    /// Requests that are open at once.
    pub concurrency: usize,
    url: String,
    /// The header that names us, a secret.
    authorization: Option<String>,
    form: Form,
    agent: ureq::Agent,
    /// Longest time that one completion may take, with all attempts.
    timeout: Duration,
    /// Failures, each of a request that was made after the one before had failed, that end the run.
    max_failures: usize,
    outage: Mutex<Outage>,
}

/// Failures with no answer in between.
#[derive(Debug, Default)]
struct Outage {
    num_failures: usize,
    last: Option<Instant>,
}

/// Why an attempt has no answer.
enum AttemptFailure {
    /// Another attempt may have one, after this time at least.
    Passing(RewardFailure, Duration),
    Final(RewardFailure),
}

impl ServiceEndpoint {
    /// The service that `rewards.NAME.url` names.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for what is no URL, a rubric that is no template, or a variable that is not set.
    pub fn new(name: &str, index: usize, reward: &ProcessReward, settings: &RewardConfig) -> Result<Self> {
        let key = |field: &str| format!("rewards.{name}.{field}");
        let given = reward.url.as_deref().unwrap_or_default();
        let is_http =
            |uri: &ureq::http::Uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
        if !given.parse::<ureq::http::Uri>().is_ok_and(|uri| is_http(&uri)) {
            return Err(Error::invalid_value(&key("url"), given, "http://host:port/path or https://host/path"));
        }
        let secret = |variable: &String| match std::env::var(variable) {
            Ok(secret) if !secret.is_empty() => Ok(format!("Bearer {secret}")),
            _ => Err(Error::invalid_value(
                &key("api_key_env"),
                variable,
                "the name of an environment variable that is set",
            )),
        };
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_idle_connections(reward.concurrency)
            .max_idle_connections_per_host(reward.concurrency);
        Ok(Self {
            index,
            name: name.to_owned(),
            concurrency: reward.concurrency,
            form: Form::new(name, reward)?,
            url: Form::url(given, reward),
            authorization: reward.api_key_env.as_ref().map(secret).transpose()?,
            agent: config.build().new_agent(),
            timeout: Duration::from_secs_f64(reward.timeout_s.unwrap_or(settings.timeout_s)),
            max_failures: settings.max_worker_failures,
            outage: Mutex::default(),
        })
    }

    /// The score of a completion. `pause_until` waits between two attempts; false if the pool closes meanwhile.
    pub fn score(
        &self,
        pause_until: &dyn Fn(Instant) -> bool,
        group: &RolloutGroup,
        index: usize,
    ) -> Result<Score, RewardFailure> {
        let body = self.form.body(group, index)?;
        let end = Instant::now() + self.timeout;
        let mut pause = FIRST_PAUSE;
        loop {
            match self.ask(&body, end) {
                Ok(answer) => return self.form.read(&answer),
                Err(AttemptFailure::Final(failure)) => return Err(failure),
                Err(AttemptFailure::Passing(failure, least)) => {
                    let next = Instant::now() + jittered(pause).max(least);
                    if next >= end || !pause_until(next) {
                        return Err(failure);
                    }
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    /// One attempt: the answer's body.
    fn ask(&self, body: &[u8], end: Instant) -> Result<Vec<u8>, AttemptFailure> {
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let mut request = self.agent.post(&self.url).config().timeout_global(Some(left)).build();
        request = request.header("content-type", "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header("authorization", authorization);
        }
        let mut response = request.send(body).map_err(trouble)?;
        let status = response.status().as_u16();
        let least = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
        let answer = response.body_mut().with_config().limit(MAX_REPLY_BYTES as u64);
        let answer = answer.read_to_vec().map_err(trouble)?;
        let said = || format!("HTTP status {status}: {}", excerpt(&answer));
        match status {
            200..300 => Ok(answer),
            408 | 429 | 500..600 => {
                let failure = RewardFailure::new(FailureKind::Unavailable, said());
                Err(AttemptFailure::Passing(failure, Duration::from_secs(least.unwrap_or(0))))
            }
            _ => Err(AttemptFailure::Final(RewardFailure::new(FailureKind::Error, said()))),
        }
    }

    /// Counts an outcome; an error where the service has been out for too long. Requests that were open together count as one
    /// failure, and an error of the service's own as none.
    pub fn count(&self, begun: Instant, outcome: &Result<Score, RewardFailure>) -> Option<Error> {
        let mut outage = self.outage.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Ok(_) => *outage = Outage::default(),
            Err(failure) if failure.kind == FailureKind::Error => {}
            Err(failure) if outage.last.is_none_or(|last| begun >= last) => {
                *outage = Outage { num_failures: outage.num_failures + 1, last: Some(Instant::now()) };
                if outage.num_failures >= self.max_failures {
                    let (name, message) = (self.name.clone(), failure.cause.clone());
                    return Some(Error::RewardService { name, num_failures: outage.num_failures, message });
                }
            }
            Err(_) => {}
        }
        None
    }
}

/// Classifies an error of the connection.
fn trouble(error: ureq::Error) -> AttemptFailure {
    let failure = |kind| RewardFailure::new(kind, error.to_string());
    match &error {
        ureq::Error::Timeout(_) => {
            AttemptFailure::Final(RewardFailure::new(FailureKind::Timeout, "no reply before its deadline"))
        }
        ureq::Error::Io(inner) if inner.kind() == io::ErrorKind::TimedOut => {
            AttemptFailure::Final(failure(FailureKind::Timeout))
        }
        ureq::Error::BodyExceedsLimit(_) => AttemptFailure::Final(failure(FailureKind::Output)),
        _ => AttemptFailure::Passing(failure(FailureKind::Unavailable), Duration::ZERO),
    }
}

/// Between half of a pause and all of it, so that requests that failed together are not made again together.
fn jittered(pause: Duration) -> Duration {
    let random = RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
    pause.mul_f64(0.5 + 0.5 * random)
}
