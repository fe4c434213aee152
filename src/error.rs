//! The one error type of the crate. Variants carry data; messages say what failed, where, what was expected and how to mend it.

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

/// Placeholder owners of an out-of-memory error that do not say where it happened; `memory::explain_out_of_memory` adds the phase.
pub(crate) const A_TENSOR: &str = "a tensor";
pub(crate) const A_LIBRARY: &str = "a library";

/// The result type of the crate, with [`Error`] as its error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error that the crate returns, in one flat enum.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- configuration: exit code 2 ----
    /// Configuration keys that are not known, in the order written.
    #[error("{}{}", lines(.0), unknown_key::hint(.0))]
    UnknownKeys(Vec<UnknownKey>),
    /// A value that a key cannot take.
    #[error("{key} = {got}: expected {expected}")]
    InvalidValue {
        /// The configuration key.
        key: String,
        /// The invalid value of the key, as written.
        got: String,
        /// The accepted values; for numbers, the nearest valid ones.
        expected: String,
    },
    /// Several errors of a configuration and of the files that it names, reported together.
    #[error("{}", lines(.0))]
    InvalidConfig(Vec<Error>),
    /// A configuration file that does not parse.
    #[error("{origin}: {message}")]
    ConfigSyntax {
        /// Configuration file and line of the syntax error.
        origin: String,
        /// The message of the TOML or YAML parser.
        message: String,
    },

    // ---- data and model files: exit code 3 ----
    /// A data or model file that is missing, malformed or inconsistent.
    #[error("{}: {message}", path.display())]
    BadFile {
        /// The faulty file or folder.
        path: PathBuf,
        /// The fault, the expected contents and how to mend it.
        message: String,
    },
    /// A line of a data file that cannot be used.
    #[error("{}:{line}: {message}", path.display())]
    BadLine {
        /// The data file with the faulty line.
        path: PathBuf,
        /// Number of the faulty line, from 1.
        line: usize,
        /// The fault in the line, and the columns that it has.
        message: String,
    },
    /// A data set of which no row is left to train on.
    #[error("{}: no usable prompts ({stages})", path.display())]
    EmptyDataset {
        /// The data file without usable rows.
        path: PathBuf,
        /// Row counts: rows read, and rows dropped by each filter.
        stages: String,
    },
    /// Prompts whose completions all get equal rewards, so that there is nothing to learn from.
    #[error("no group of completions gives a training signal: {message}")]
    NoSignal {
        /// The completions that were sampled, their rewards, and the keys that limit how many groups are sampled.
        message: String,
    },
    /// A repository of the Hugging Face Hub that is not in the cache and cannot be downloaded.
    #[error("{repo}: {message}")]
    Hub {
        /// Name and revision of the repository.
        repo: String,
        /// The attempts to find the repository, their outcome, and how to fix it.
        message: String,
    },
    /// The tokenizer and the model do not match.
    #[error("tokenizer and model disagree: {message}")]
    TokenizerMismatch {
        /// The token ids or vocabulary sizes that differ.
        message: String,
    },
    /// A chat template that is missing, does not compile, fails or exceeds its limits.
    #[error("chat template: {message}")]
    ChatTemplate {
        /// What is wrong with the template, and how to fix it.
        message: String,
    },

    // ---- environment: exit code 4 ----
    /// Something that the machine or the launching program must provide.
    #[error("{message}")]
    Environment {
        /// What is missing, what was found instead, and how to fix it.
        message: String,
    },

    // ---- checkpoints: exit code 5 ----
    /// A checkpoint that cannot be resumed from.
    #[error("checkpoint {}: {message}", path.display())]
    Checkpoint {
        /// Folder of the unusable checkpoint.
        path: PathBuf,
        /// The faulty file of the checkpoint, and what is wrong with it.
        message: String,
    },

    // ---- ranks: exit code 10; 15 where nothing moves ----
    /// A collective operation (such as all_reduce) that failed.
    #[error("{op} in group '{group}' on rank {rank}: {message}")]
    Collective {
        /// Name of the failed collective operation.
        op: &'static str,
        /// Name of the process group.
        group: String,
        /// World rank of the process that reports the error.
        rank: usize,
        /// The error message of the communication library or of the peer.
        message: String,
    },
    /// A collective whose peers did not arrive in time.
    #[error(
        "{op} in group '{group}' timed out on rank {rank} after {timeout_s:.1} s; missing ranks {missing:?}{place}"
    )]
    CollectiveTimeout {
        /// Name of the collective operation.
        op: &'static str,
        /// Name of the process group.
        group: String,
        /// World rank of the process that reports the error.
        rank: usize,
        /// Seconds that the rank waited for its peers.
        timeout_s: f64,
        /// World ranks that had not arrived.
        missing: Vec<usize>,
        /// Text such as ` of node 1 (host)` that says on which nodes the missing ranks are; empty on one node.
        place: String,
    },
    /// A rank whose heartbeat stayed unchanged for longer than its phase allows.
    #[error(
        "no heartbeat for {stood_s:.1} s in phase {phase} (heartbeat.{phase}_s or heartbeat.timeout_s allows {limit_s} s); last state: {state}"
    )]
    Hang {
        /// Name of the phase that makes no progress.
        phase: &'static str,
        /// Seconds since the rank's last heartbeat.
        stood_s: f64,
        /// The limit of that phase in seconds.
        limit_s: f64,
        /// The last activity that the hanging rank reported.
        state: String,
    },
    /// A helper process of a rank (such as that of the tools) that stopped answering, although it limits the time of every request itself.
    #[error(
        "{process} has not answered for {silent_s:.1} s, although {key} = {limit_s} s limits each request: process {pid} is in state {state}"
    )]
    Silent {
        /// What the helper process does, for example "the process of the tools".
        process: &'static str,
        /// Id of the silent process.
        pid: u32,
        /// Seconds since the process last answered.
        silent_s: f64,
        /// The configuration key that limits the time of a request.
        key: &'static str,
        /// The value of that key in seconds.
        limit_s: f64,
        /// Process state as in /proc, for example "T" for stopped.
        state: String,
    },
    /// Another rank failed first; its error was broadcast to all ranks.
    #[error("rank {rank} failed: {message}")]
    PeerFailed {
        /// The rank whose failure came first.
        rank: usize,
        /// Exit code of the failed rank.
        code: ExitCode,
        /// Message of the failed rank.
        message: String,
    },
    /// A rank whose process ended without reporting an error.
    #[error("rank {rank} died: {how}")]
    RankDied {
        /// World rank of the process that ended.
        rank: usize,
        /// Signal or exit status with which the process ended, and its phase if known.
        how: String,
    },

    // ---- memory: exit code 11 ----
    /// An allocation that failed for lack of memory.
    #[error("out of memory: {owner} needs {}", amount(*requested_bytes))]
    OutOfMemory {
        /// What needed the memory and, where known, what holds the rest and which key to lower.
        owner: String,
        /// Requested size in bytes; 0 if the library does not report it.
        requested_bytes: usize,
    },

    // ---- CUDA: exit code 4, 10 or 11 by its code ----
    /// The CUDA driver refused an operation.
    #[error("{op}: CUDA code {code}, {message}")]
    Cuda {
        /// Name of the CUDA driver function that failed.
        op: &'static str,
        /// The `CUresult` that the driver returned.
        code: u32,
        /// The driver's name and description of the error code.
        message: String,
    },

    // ---- storage: exit code 12 ----
    /// Reading or writing failed.
    #[error("{}: {}", path.display(), explained(source))]
    Io {
        /// The file that could not be read or written.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },

    // ---- numerics: exit code 13 ----
    /// Losses, gradients or logits stayed NaN or infinite.
    #[error("{message}")]
    NonFinite {
        /// Which quantity, at which step, how often, where the batch was dumped.
        message: String,
    },

    /// Results that `exact = true` requires to be equal bit for bit, but that differ.
    #[error(
        "{message}. With `exact = true` both must be equal bit for bit. After an update of a driver or library delete the folder `exact` in the \
         cache, or continue with `exact = false`"
    )]
    Unequal {
        /// The place and the size of the difference.
        message: String,
    },

    /// A model whose outputs differ from transformers' by more than rounding errors (`verify`).
    #[error(
        "{}: outputs differ from transformers by more than rounding errors: {message}; run again with --dtype float32 to rule out rounding",
        model.display()
    )]
    Differs {
        /// The model as named on the command line.
        model: PathBuf,
        /// The figure that differs, by how much, and the allowed difference.
        message: String,
    },

    // ---- rewards: exit code 14 ----
    /// A reward whose workers or service failed again and again without a score in between.
    #[error(
        "reward '{name}' failed {num_failures} times in a row without a score (limit: reward.max_worker_failures); last failure: {message}"
    )]
    RewardService {
        /// Name of the failed reward.
        name: String,
        /// Failures since the last score.
        num_failures: usize,
        /// Message of the reward's last failure.
        message: String,
    },

    /// A process of tools, environments or an agent that ended again and again without an answer in between.
    #[error("{name} ended {num_failures} times in a row without an answer in between; last failure: {message}")]
    ToolService {
        /// What the process does, for example "the process of the tools".
        name: &'static str,
        /// How often the process has ended since its last answer.
        num_failures: usize,
        /// The last error output of the process.
        message: String,
    },

    /// All samples of several steps, or of an evaluation, have no score from any reward.
    #[error("no sample {place} could be scored: {message}")]
    NoScore {
        /// Which samples have no score, for example "in 3 steps in a row".
        place: String,
        /// The first failure of a reward among them.
        message: String,
    },

    // ---- use of the library: exit code 10 ----
    /// The engine's weights are older than the policy's.
    #[error("stale weights: the engine holds version {engine}, the policy is at {policy}; wake it inside with_rollout")]
    StaleWeights {
        /// Version of the engine's weights.
        engine: u64,
        /// Version of the policy's weights.
        policy: u64,
    },
    /// An argument that a function of the library cannot take.
    #[error("{op}: expected {expected}, got {got}")]
    InvalidArgument {
        /// Name of the function that got the invalid argument.
        op: &'static str,
        /// Description of the arguments that the function accepts.
        expected: String,
        /// The invalid argument that was given.
        got: String,
    },
    /// An error that libtorch returned.
    #[error("libtorch: {0}")]
    Torch(tch::TchError),
    /// A panic caught at a boundary that must not unwind further.
    #[error("panic in {place}: {message}")]
    Panic {
        /// The place where the panic was caught.
        place: &'static str,
        /// The message with which the code panicked.
        message: String,
    },
    /// Stopped by a signal before training began.
    #[error("stopped by a signal before there was anything to save")]
    StoppedEarly,
    /// Stopped by a signal (TERM, INT, USR1, HUP) after saving a checkpoint.
    #[error("stopped by a signal at step {step}; saved {}", saved.display())]
    Preempted {
        /// Step of the checkpoint that was saved.
        step: u64,
        /// Folder of the checkpoint that was saved.
        saved: PathBuf,
    },
    /// A fault injected for tests by the hidden key `fault`.
    #[error("injected fault in {phase}")]
    Injected {
        /// The phase it fired in.
        phase: &'static str,
    },
}

impl Error {
    /// Returns a function for `map_err` that turns an I/O error into [`Error::Io`] with `path`.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { path, source }
    }

    /// Builds [`Error::BadFile`] for `path`.
    pub fn bad_file(path: impl Into<PathBuf>, message: impl Into<String>) -> Error {
        Error::BadFile { path: path.into(), message: message.into() }
    }

    /// Turns a caught panic into an error: [`Error::OutOfMemory`] if its message reports missing memory, else [`Error::Panic`].
    pub fn of_panic(place: &'static str, message: String) -> Error {
        Error::out_of_memory(&message).unwrap_or(Error::Panic { place, message })
    }

    /// [`Error::OutOfMemory`] if `message` of a library or driver reports missing memory, else `None`.
    pub(crate) fn out_of_memory(message: &str) -> Option<Error> {
        let requested_bytes = refusal::requested_bytes(message)?;
        let owner = if requested_bytes > 0 { A_TENSOR } else { A_LIBRARY };
        Some(Error::OutOfMemory { owner: owner.to_owned(), requested_bytes })
    }

    /// Combines `errors` into one error; `None` if the list is empty.
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

    /// Builds [`Error::InvalidValue`] for a configuration key or command-line option.
    pub fn invalid_value(key: &str, got: impl ToString, expected: impl Into<String>) -> Error {
        Error::InvalidValue { key: key.to_owned(), got: got.to_string(), expected: expected.into() }
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Error::out_of_memory(&error.to_string()).unwrap_or(Error::Torch(error))
    }
}
