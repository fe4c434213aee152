//! Exit codes, and the errors that end a process with them.

use super::Error;

/// Process exit codes, as the launcher and the worker return them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[repr(u8)]
pub enum ExitCode {
    /// All done.
    Done = 0,
    /// The configuration is wrong.
    Configuration = 2,
    /// Data or model files are wrong.
    Files = 3,
    /// The machine lacks something.
    Environment = 4,
    /// No usable checkpoint.
    Checkpoint = 5,
    /// A rank died, or could not be reached.
    RankDied = 10,
    /// Out of memory, on the device or the host.
    OutOfMemory = 11,
    /// Storage failed or is full.
    Storage = 12,
    /// Too many non-finite losses or gradients, or a model that `verify` finds different.
    Numerics = 13,
    /// A reward's workers fail again and again, or rewards score nothing.
    RewardService = 14,
    /// No progress for the configured time.
    Hang = 15,
    /// Sampler and trainer are not equal in a run that asks for that.
    Unequal = 16,
    /// Preempted; the state was saved.
    Preempted = 75,
    /// A second signal ended it at once, as a shell counts an interrupt.
    Interrupted = 130,
}

impl ExitCode {
    /// Every code, for parsing what a worker left behind.
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

    /// The code with this number, if it is one of ours.
    pub fn from_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|code| *code as i32 == number)
    }
}

impl Error {
    /// The process exit code that stands for this error.
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
