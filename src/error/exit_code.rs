//! Exit codes, and the errors that end a process with them.

use super::Error;

/// Process exit codes, as the launcher and the worker return them.
///
/// ```
/// use colo_grpo::{Config, ExitCode};
///
/// let error = Config::load(None, &["learning_rat=1".to_owned()]).unwrap_err();
/// assert_eq!(error.exit_code(), ExitCode::Configuration);
/// assert_eq!(ExitCode::from_number(75), Some(ExitCode::Preempted)); // saved: queue the run again
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[repr(u8)]
pub enum ExitCode {
    /// The command succeeded.
    Done = 0,
    /// The configuration is wrong.
    Configuration = 2,
    /// Data or model files are wrong.
    Files = 3,
    /// The machine or launching program lacks something that is required.
    Environment = 4,
    /// The run found no usable checkpoint to resume from.
    Checkpoint = 5,
    /// A rank died or could not be reached.
    RankDied = 10,
    /// Out of memory, on the device or the host.
    OutOfMemory = 11,
    /// A file could not be read or written, for example because the disk is full.
    Storage = 12,
    /// Too many non-finite losses or gradients, or `verify` found a model that differs from transformers.
    Numerics = 13,
    /// A reward's workers keep failing, or no reward gives a score.
    RewardService = 14,
    /// A rank made no progress for the configured time.
    Hang = 15,
    /// With `exact = true`, sampler and trainer do not agree bit for bit.
    Unequal = 16,
    /// The run was stopped by a signal and saved a checkpoint.
    Preempted = 75,
    /// The run was ended at once by a second signal (130, as shells report an interrupt).
    Interrupted = 130,
}

impl ExitCode {
    /// All exit codes, to parse the report of a worker.
    pub const ALL: [ExitCode; 14] = [
        ExitCode::Done,
        ExitCode::Configuration,
        ExitCode::Files,
        ExitCode::Environment,
        ExitCode::Checkpoint,
        ExitCode::RankDied,
        ExitCode::OutOfMemory,
        ExitCode::Storage,
        ExitCode::Numerics,
        ExitCode::RewardService,
        ExitCode::Hang,
        ExitCode::Unequal,
        ExitCode::Preempted,
        ExitCode::Interrupted,
    ];

    /// The exit code with this number; `None` for a number that the program does not use.
    pub fn from_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|code| *code as i32 == number)
    }
}

impl Error {
    /// The process exit code for this error.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Error::UnknownKeys(_) | Error::InvalidValue { .. } | Error::ConfigSyntax { .. } => ExitCode::Configuration,
            // That of the first step to take: 2 where a key or a value is wrong, 3 where only files are missing.
            Error::InvalidConfig(all) => {
                let codes = all.iter().map(Error::exit_code);
                codes.min_by_key(|code| *code as i32).unwrap_or(ExitCode::Configuration)
            }
            Error::BadFile { .. }
            | Error::Hub { .. }
            | Error::BadLine { .. }
            | Error::EmptyDataset { .. }
            | Error::NoSignal { .. }
            | Error::TokenizerMismatch { .. }
            | Error::ChatTemplate { .. } => ExitCode::Files,
            Error::Environment { .. } => ExitCode::Environment,
            Error::Checkpoint { .. } => ExitCode::Checkpoint,
            Error::PeerFailed { code, .. } => *code,
            Error::OutOfMemory { .. } | Error::Cuda { code: 2, .. } => ExitCode::OutOfMemory,
            // Not initialised, stub library, driver too old, no or no such device, no image for it, system not ready.
            Error::Cuda { code: 3 | 34 | 35 | 100 | 101 | 209 | 222 | 802 | 803, .. } => ExitCode::Environment,
            Error::Io { .. } => ExitCode::Storage,
            Error::NonFinite { .. } | Error::Differs { .. } => ExitCode::Numerics,
            Error::Unequal { .. } => ExitCode::Unequal,
            Error::RewardService { .. } | Error::ToolService { .. } | Error::NoScore { .. } => ExitCode::RewardService,
            Error::Preempted { .. } | Error::StoppedEarly => ExitCode::Preempted,
            Error::CollectiveTimeout { .. } | Error::Hang { .. } | Error::Silent { .. } => ExitCode::Hang,
            Error::Collective { .. }
            | Error::RankDied { .. }
            | Error::StaleWeights { .. }
            | Error::InvalidArgument { .. }
            | Error::Cuda { .. }
            | Error::Torch(_)
            | Error::Panic { .. }
            | Error::Injected { .. } => ExitCode::RankDied,
        }
    }
}
