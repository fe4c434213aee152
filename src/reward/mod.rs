//! Verifiers that score completions, and the threads and processes they run in. Know nothing of tensors. What a model wrote
//! is read, compared and matched against regular expressions of linear time; it is run in the sandbox alone, and
//! graded outside of it.
//!
//! A [`RewardPool`] scores groups with functions of the program and with built-in rewards, by name:
//!
//! ```
//! use std::sync::Arc;
//! use colo_grpo::Config;
//! use colo_grpo::data::{FinishReason, Prompt, RolloutGroup, Trajectory};
//! use colo_grpo::reward::{FailureCount, FailureKind, RewardFunction, RewardInput, RewardPool, RewardTicket};
//!
//! let words = ["tensor_parallel_size=1", "reward_funcs=[\"brevity\"]", "reward_weights=[1.0]"].map(str::to_owned);
//! let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
//! let brevity: RewardFunction = Arc::new(|input: &RewardInput<'_>| Ok(1.0 / (1.0 + input.token_ids.len() as f32)));
//! let mut pool = RewardPool::with_functions(&config, &[("brevity", brevity)])?;
//! let prompt = Prompt { id: 0, text: "2 + 3 =".to_owned(), token_ids: vec![5, 6], columns: Arc::default() };
//! let completion = Trajectory { token_ids: vec![7], finish_reason: Some(FinishReason::Eos), ..Trajectory::default() };
//! let mut groups = [RolloutGroup { completions: vec![completion], ..RolloutGroup::new(prompt) }];
//! let ticket: RewardTicket = pool.submit(&groups[0]); // other groups may be sampled meanwhile
//! pool.wait(&mut groups, &[ticket])?;
//! let failures: Vec<FailureCount> = pool.take_failures();
//! let too_slow = failures.iter().filter(|failure| failure.kind == FailureKind::Timeout).count();
//! assert_eq!((groups[0].completions[0].reward, too_slow), (Some(0.5), 0));
//! # Ok::<(), colo_grpo::Error>(())
//! ```
//!
//! The built-in rewards that are functions, [`numeric_answer`], [`exact_answer`] and [`format()`], can be called by themselves.
//!
//! | file | what it is |
//! |---|---|
//! | `builtin` | names of the built-in rewards |
//! | `answer`, `marked`, `number`, `style` | built-in rewards that are functions of this process |
//! | `pool`, `state`, `failures` | the pool of threads, its shared state, and counts of failures |
//! | `function` | threads that call functions of this process |
//! | `service`, `conversation`, `worker`, `worker.py`, `protocol` | rewards computed by worker processes |
//! | `endpoint`, `form` | rewards from HTTP services, and the format of requests |
//! | `reaper`, `reaper.sh` | kills all processes that a worker started |
//! | `verdict`, `verdict.py`, `readable` | rewards that depend on whether an answer is right, and the check of reference answers |
//! | `grading` | converts the scores of a worker process to rewards |
//! | `source` | how the reward named by an entry of `reward_funcs` is computed |
//! | `code` | model-written programs, run against tests in the sandbox |

mod answer;
mod builtin;
pub mod code;
mod conversation;
mod endpoint;
mod failures;
mod form;
mod function;
mod grading;
mod job;
mod marked;
mod number;
mod pool;
mod protocol;
mod readable;
mod reaper;
mod servants;
mod service;
mod source;
mod state;
mod style;
mod verdict;
mod worker;

use std::sync::Arc;

pub use answer::{exact_answer, format, numeric_answer};
pub(crate) use builtin::names;
pub(crate) use failures::RewardFailure;
pub use failures::{FailureCount, FailureKind};
pub use pool::{RewardPool, RewardTicket};
pub(crate) use protocol::{frame, take_frame};
use serde_json::{Map, Value};
pub(crate) use worker::{Origin, Program, RewardWorker};

use crate::config::RewardConfig;
use crate::error::Result;
use crate::types::FinishReason;

/// The input of a reward function: one completion and its row.
#[derive(Debug, Clone, Copy)]
pub struct RewardInput<'a> {
    /// The rendered prompt.
    pub prompt: &'a str,
    /// The completion without special tokens; with several turns, the newest turn.
    pub completion: &'a str,
    /// Messages of all turns if the model may call tools: the assistant's, with `content` and `tool_calls`, and the results of tools.
    pub messages: &'a [Value],
    /// Token ids of the completion, including the end-of-sequence token.
    pub token_ids: &'a [u32],
    /// Why the completion ended.
    pub finish_reason: FinishReason,
    /// Every column of the prompt's row.
    pub columns: &'a Map<String, Value>,
}

/// A reward function. It returns a finite number; an error masks the sample.
pub type RewardFunction = Arc<dyn Fn(&RewardInput<'_>) -> Result<f32> + Send + Sync>;

/// The function with which the built-in reward `name` extracts a completion's answer in normal form, so that equal answers have equal texts.
/// `None` if the reward compares no answers.
///
/// ```
/// use colo_grpo::config::RewardConfig;
/// use colo_grpo::reward::answer_reader;
///
/// let read = answer_reader("numeric_answer", &RewardConfig::default())?.expect("it reads answers");
/// assert_eq!(read("\\boxed{5.0}"), read("\\boxed{10/2}")); // one vote more for 5
/// # Ok::<(), colo_grpo::Error>(())
/// ```
///
/// # Errors
/// [`Error::InvalidValue`](crate::Error::InvalidValue) for a pattern that does not compile.
pub fn answer_reader(name: &str, config: &RewardConfig) -> Result<Option<impl Fn(&str) -> Option<String> + use<>>> {
    let pattern = builtin::answer_pattern(config)?;
    let reward = name.to_owned();
    Ok(builtin::compares_answers(name)
        .then_some(move |completion: &str| answer::vote(completion, pattern.as_ref(), &reward)))
}

/// Checks a reply of a reward's worker process, a frame without its length prefix: it must contain one score per completion, or an
/// error of the reward.
///
/// ```
/// use colo_grpo::reward::check_reply;
///
/// assert!(check_reply(br#"{"id": 0, "rewards": [1.0, null]}"#, 2).is_ok());
/// assert!(check_reply(b"{}", 2).is_err(), "two scores are expected");
/// ```
///
/// # Errors
/// What is wrong with the reply, or the reward's error.
pub fn check_reply(frame: &[u8], num_completions: usize) -> std::result::Result<(), String> {
    let scores = protocol::RewardReply::parse(frame).and_then(|reply| reply.scores(num_completions));
    scores.map(drop).map_err(|failure| failure.cause)
}
