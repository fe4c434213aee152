//! Rewards from HTTP services. Many completions are scored concurrently, each with a deadline. Until the deadline, temporary failures (no
//! connection, an overloaded or restarting server) are retried. A failure masks its sample.

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

/// Pause before the second attempt. It doubles with each further attempt, up to the longest pause.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// An HTTP service that computes a reward.
pub(super) struct ServiceEndpoint {
    /// Index of this reward among all rewards.
    pub index: usize,
    pub name: String,
    /// Largest number of concurrent requests.
    pub concurrency: usize,
    url: String,
    /// Value of the authorization header (secret).
    authorization: Option<String>,
    form: Form,
    /// The column with the prompt; `None` means the first of the default names that a row has.
    prompt_column: Option<String>,
    agent: ureq::Agent,
    /// Time limit for one completion, including all attempts.
    timeout: Duration,
    /// Number of consecutive failures that end the run. Failures of concurrent requests count once.
    max_failures: usize,
    outage: Mutex<Outage>,
}

/// Consecutive failures of a service without a successful reply.
#[derive(Debug, Default)]
struct Outage {
    num_failures: usize,
    last: Option<Instant>,
}

/// Why an attempt got no reply.
enum AttemptFailure {
    /// A temporary failure, and the time to wait at least before the next attempt.
    Passing(RewardFailure, Duration),
    Final(RewardFailure),
}

impl ServiceEndpoint {
    /// The service configured by `rewards.NAME.url`. `prompt_column` names the column with the prompt, if the configuration does.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a malformed URL, a rubric that is not a valid template, or an environment variable that is not set.
    pub fn new(
        name: &str,
        index: usize,
        reward: &ProcessReward,
        settings: &RewardConfig,
        prompt_column: Option<&str>,
    ) -> Result<Self> {
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
            prompt_column: prompt_column.map(str::to_owned),
            url: Form::url(given, reward),
            authorization: reward.api_key_env.as_ref().map(secret).transpose()?,
            agent: config.build().new_agent(),
            timeout: Duration::from_secs_f64(reward.timeout_s.unwrap_or(settings.timeout_s)),
            max_failures: settings.max_worker_failures,
            outage: Mutex::default(),
        })
    }

    /// Requests the score of a completion, with retries. `pause_until` waits between attempts; it returns false if the pool closes meanwhile.
    pub fn score(
        &self,
        pause_until: &dyn Fn(Instant) -> bool,
        group: &RolloutGroup,
        index: usize,
    ) -> Result<Score, RewardFailure> {
        let body = self.form.body(group, index, self.prompt_column.as_deref())?;
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

    /// Makes one attempt and returns the response body.
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

    /// Counts the outcome of a request that began at `begun`. Returns an error if the service has failed too often. Failures of concurrent requests
    /// count once; an error that the service itself reports does not count.
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

/// Classifies a connection error as temporary or permanent.
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

/// A random duration between half of `pause` and all of it, so that failed requests are not all retried at the same time.
fn jittered(pause: Duration) -> Duration {
    let random = RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
    pause.mul_f64(0.5 + 0.5 * random)
}
