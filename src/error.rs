//! The one error type of the crate. Variants carry data; messages say what, where, what was expected and how to mend it.

use std::path::PathBuf;

mod exit_code;
mod refusal;
mod text;
mod unknown_key;

pub use exit_code::ExitCode;
pub use text::panic_message;
pub(crate) use text::{MAX_LISTED, explained};
use text::{amount, lines};
pub(crate) use unknown_key::OF_ANOTHER_TRAINER;
pub use unknown_key::UnknownKey;

/// Owners of missing memory that say nothing of the place; `memory::explain_out_of_memory` adds the phase.
pub(crate) const A_TENSOR: &str = "a tensor";
pub(crate) const A_LIBRARY: &str = "a library";

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, flat.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- configuration: exit code 2 ----
    /// Keys that no part of the program reads, in the order written.
    #[error("{}{}", lines(.0), unknown_key::hint(.0))]
    UnknownKeys(Vec<UnknownKey>),
    /// A value that a key cannot take.
    #[error("{key} = {got}: expected {expected}")]
    InvalidValue {
        /// The key.
        key: String,
        /// The value as written.
        got: String,
        /// The values that are accepted, with the nearest valid ones where numbers are concerned.
        expected: String,
    },
    /// All that is wrong with a configuration and with the files that it names, where that is more than one error.
    #[error("{}", lines(.0))]
    InvalidConfig(Vec<Error>),
    /// A configuration file that does not parse.
    #[error("{origin}: {message}")]
    ConfigSyntax {
        /// File and line.
        origin: String,
        /// The parser's message.
        message: String,
    },

    // ---- data and model files: exit code 3 ----
    /// A data or model file that is missing, malformed or inconsistent.
    #[error("{}: {message}", path.display())]
    BadFile {
        /// The file or folder.
        path: PathBuf,
        /// The fault, the expected contents and the remedy.
        message: String,
    },
    /// A line of a data file that cannot be used.
    #[error("{}:{line}: {message}", path.display())]
    BadLine {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The fault, and the columns that were seen.
        message: String,
    },
    /// A data set with nothing left to train on.
    #[error("{}: no usable prompts ({stages})", path.display())]
    EmptyDataset {
        /// The file.
        path: PathBuf,
        /// Counts at each stage: read, filtered by what.
        stages: String,
    },
    /// Prompts whose completions all get equal rewards, so that there is nothing to learn from.
    #[error("no group of completions gives a training signal: {message}")]
    NoSignal {
        /// The completions that were sampled, their rewards, and the keys that bound the search.
        message: String,
    },
    /// A repository of the Hugging Face Hub that is not in the cache and cannot be downloaded.
    #[error("{repo}: {message}")]
    Hub {
        /// Name and revision of the repository.
        repo: String,
        /// The attempts, their outcome and the remedy.
        message: String,
    },
    /// Tokenizer and model do not fit one another.
    #[error("tokenizer and model disagree: {message}")]
    TokenizerMismatch {
        /// Which ids or counts differ.
        message: String,
    },
    /// The chat template is missing, does not compile or ran out of fuel.
    #[error("chat template: {message}")]
    ChatTemplate {
        /// The fault and the remedy.
        message: String,
    },

    // ---- environment: exit code 4 ----
    /// Something that the machine or the launching program must provide.
    #[error("{message}")]
    Environment {
        /// The missing thing, what was found in its place, and the remedy.
        message: String,
    },

    // ---- checkpoints: exit code 5 ----
    /// A checkpoint that cannot be resumed from.
    #[error("checkpoint {}: {message}", path.display())]
    Checkpoint {
        /// The checkpoint's folder.
        path: PathBuf,
        /// Which file is wrong, and how.
        message: String,
    },

    // ---- ranks: exit code 10; 15 where nothing moves ----
    /// A collective that cannot be carried out.
    #[error("{op} in group '{group}' on rank {rank}: {message}")]
    Collective {
        /// The operation.
        op: &'static str,
        /// The group's name.
        group: String,
        /// This rank in the world.
        rank: usize,
        /// The library's or the peer's account of it.
        message: String,
    },
    /// A collective whose peers did not arrive in time.
    #[error(
        "{op} in group '{group}' timed out on rank {rank} after {timeout_s:.1} s; missing ranks {missing:?}{place}"
    )]
    CollectiveTimeout {
        /// The operation.
        op: &'static str,
        /// The group's name.
        group: String,
        /// This rank in the world.
        rank: usize,
        /// How long was waited, in seconds.
        timeout_s: f64,
        /// World ranks that had not arrived.
        missing: Vec<usize>,
        /// ` of node 1 (host)`: where they are; empty on one node.
        place: String,
    },
    /// A rank that showed no sign of life for longer than its phase allows.
    #[error(
        "no heartbeat for {stood_s:.1} s in phase {phase} (heartbeat.{phase}_s or heartbeat.timeout_s allows {limit_s} s); last state: {state}"
    )]
    Hang {
        /// The phase in which it stands still.
        phase: &'static str,
        /// How long, in seconds.
        stood_s: f64,
        /// The limit, in seconds.
        limit_s: f64,
        /// The rank's last activity.
        state: String,
    },
    /// A process beside a rank that answers nothing, though it ends by itself what takes longer than the key allows.
    #[error(
        "{process} has not answered for {silent_s:.1} s, although {key} = {limit_s} s limits each request: process {pid} is in state {state}"
    )]
    Silent {
        /// The process, by the work that it does.
        process: &'static str,
        /// The process.
        pid: u32,
        /// How long, in seconds.
        silent_s: f64,
        /// The key that bounds the time of a request.
        key: &'static str,
        /// The limit, in seconds.
        limit_s: f64,
        /// The state of the process as the kernel names it.
        state: String,
    },
    /// Another rank failed first; this is its error, told to every rank.
    #[error("rank {rank} failed: {message}")]
    PeerFailed {
        /// The rank whose failure came first.
        rank: usize,
        /// Exit code of the failed rank.
        code: ExitCode,
        /// Message of the failed rank.
        message: String,
    },
    /// A rank that ended without leaving an error.
    #[error("rank {rank} died: {how}")]
    RankDied {
        /// The rank.
        rank: usize,
        /// Signal or exit status, and its phase where known.
        how: String,
    },

    // ---- memory: exit code 11 ----
    /// An allocation that did not succeed.
    #[error("out of memory: {owner} needs {}", amount(*requested_bytes))]
    OutOfMemory {
        /// Owner of the allocation and, where known, who holds the rest and which key to lower.
        owner: String,
        /// Size of the allocation; 0 where a library does not say.
        requested_bytes: usize,
    },

    // ---- CUDA: exit code 4, 10 or 11 by its code ----
    /// The CUDA driver refused an operation.
    #[error("{op}: CUDA code {code}, {message}")]
    Cuda {
        /// The driver's function.
        op: &'static str,
        /// The `CUresult`.
        code: u32,
        /// Name of the code and the driver's description.
        message: String,
    },

    // ---- storage: exit code 12 ----
    /// Reading or writing failed.
    #[error("{}: {}", path.display(), explained(source))]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },

    // ---- numerics: exit code 13 ----
    /// Non-finite values that did not go away.
    #[error("{message}")]
    NonFinite {
        /// Which quantity, at which step, how often, where the batch was dumped.
        message: String,
    },

    /// Results that were to be equal to the last bit, and are not.
    #[error(
        "{message}. With `exact = true` both must be equal bit for bit. After an update of a driver or library delete the folder `exact` in the \
         cache, or continue with `exact = false`"
    )]
    Unequal {
        /// The place and the size of the difference.
        message: String,
    },

    /// A model whose numbers are further from transformers' than rounding is.
    #[error(
        "{}: outputs differ from transformers by more than rounding errors: {message}; run again with --dtype float32 to rule out rounding",
        model.display()
    )]
    Differs {
        /// The model as it was named.
        model: PathBuf,
        /// Which figure, by how much, what is allowed.
        message: String,
    },

    // ---- rewards: exit code 14 ----
    /// A reward whose workers were replaced again and again, or whose service stayed away, with no score in between.
    #[error(
        "reward '{name}' failed {num_failures} times in a row without a score (limit: reward.max_worker_failures); last failure: {message}"
    )]
    RewardService {
        /// The reward.
        name: String,
        /// Failures since the last score.
        num_failures: usize,
        /// The last failure.
        message: String,
    },

    /// A process of tools, environments or an agent that was replaced again and again with no answer in between.
    #[error("{name} ended {num_failures} times in a row without an answer in between; last failure: {message}")]
    ToolService {
        /// The process, by the work that it does.
        name: &'static str,
        /// Ends since the last answer.
        num_failures: usize,
        /// The last words of the process.
        message: String,
    },

    /// Rewards that gave no score at all, so that nothing is learned or measured.
    #[error("no sample {place} could be scored: {message}")]
    NoScore {
        /// Which samples.
        place: String,
        /// The first failure of a reward among them.
        message: String,
    },

    // ---- use of the library: exit code 10 ----
    /// The engine's weights are older than the policy's.
    #[error("stale weights: the engine holds version {engine}, the policy is at {policy}; wake it inside with_rollout")]
    StaleWeights {
        /// Version in the engine.
        engine: u64,
        /// Version of the policy.
        policy: u64,
    },
    /// An argument that a function of the library cannot take.
    #[error("{op}: expected {expected}, got {got}")]
    InvalidArgument {
        /// The function.
        op: &'static str,
        /// The accepted argument.
        expected: String,
        /// The argument that was given.
        got: String,
    },
    /// libtorch refused an operation.
    #[error("libtorch: {0}")]
    Torch(tch::TchError),
    /// A panic caught at a boundary that must not unwind further.
    #[error("panic in {place}: {message}")]
    Panic {
        /// The place where the panic was caught.
        place: &'static str,
        /// The panic's message.
        message: String,
    },
    /// Stopped on request before training began.
    #[error("stopped by a signal before there was anything to save")]
    StoppedEarly,
    /// Stopped on request (TERM, INT, USR1, HUP) after saving.
    #[error("stopped by a signal at step {step}; saved {}", saved.display())]
    Preempted {
        /// The step saved.
        step: u64,
        /// The checkpoint's folder.
        saved: PathBuf,
    },
    /// A fault injected by the hidden key `fault`.
    #[error("injected fault in {phase}")]
    Injected {
        /// The phase it fired in.
        phase: &'static str,
    },
}

impl Error {
    /// An I/O error with the file it concerns; for `map_err`.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { path, source }
    }

    /// A file error with its message.
    pub fn bad_file(path: impl Into<PathBuf>, message: impl Into<String>) -> Error {
        Error::BadFile { path: path.into(), message: message.into() }
    }

    /// The error of a panic with `message`. Operations return their failures; this is the net below those that do not.
    pub fn of_panic(place: &'static str, message: String) -> Error {
        Error::out_of_memory(&message).unwrap_or(Error::Panic { place, message })
    }

    /// [`Error::OutOfMemory`] if that is what the `message` of a library or a driver says; `None` if it is about something else.
    pub(crate) fn out_of_memory(message: &str) -> Option<Error> {
        let requested_bytes = refusal::requested_bytes(message)?;
        let owner = if requested_bytes > 0 { A_TENSOR } else { A_LIBRARY };
        Some(Error::OutOfMemory { owner: owner.to_owned(), requested_bytes })
    }

    /// One error of all of `errors`; `None` if there are none.
    pub fn of_all(errors: Vec<Error>) -> Option<Error> {
        let flat = errors.into_iter().flat_map(|error| match error {
            Error::InvalidConfig(inner) => inner,
            other => vec![other],
        });
        let mut flat: Vec<Error> = flat.collect();
        match flat.len() {
            0 | 1 => flat.pop(),
            _ => Some(Error::InvalidConfig(flat)),
        }
    }

    /// A configuration value error.
    pub fn invalid_value(key: &str, got: impl ToString, expected: impl Into<String>) -> Error {
        Error::InvalidValue { key: key.to_owned(), got: got.to_string(), expected: expected.into() }
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Error::out_of_memory(&error.to_string()).unwrap_or(Error::Torch(error))
    }
}
