//! Internal names that the executable, tests/it and the fuzz targets of this repository need. They are not part of the library and change without
//! notice.

pub mod bench {
    pub use crate::bench::LengthSpread;
}
pub mod checkpoint {
    pub use crate::checkpoint::{
        Checkpoint, CheckpointOptions, Models, SavedConfig, Saver, TrainerState, claim, find_latest,
    };
}
pub mod cli {
    pub use crate::cli::run;
}
pub mod colocate {
    pub use crate::colocate::Colocated;
}
pub mod config {
    pub use crate::config::{
        AdjustLr, Config, EngineShape, GradientCheckpointing, ImportanceSamplingLevel, KvCacheDtype, LossType,
        LrSchedulerType, MixedPrecision, Quantization, RewardConfig, RolloutQuantization, SandboxLayer, Speculation,
        StateDtype, TargetModule,
    };
}
pub mod cuda {
    pub use crate::cuda::{
        Capability, Context, CudaEvent, CurrentStream, ExactVerdict, FreeMemory, Graph, PeerMemory, Products,
        TorchStream, Tuning, kernels, profile,
    };
}
pub mod data {
    pub use crate::data::{
        ChatTemplate, Dataset, DatasetOptions, Hub, HubOptions, Message, PromptSampler, Repo, SamplerState, SftDataset,
        Tokenizer,
    };
}
pub mod ranks {
    pub use crate::ranks::{
        Backend, Collective, Mesh, ReduceOp, SingleRank, Trade, WorkerEnv, World, WorldOptions, all_gather_bytes,
        all_reduce_f64,
    };
}
pub mod grpo {
    pub use crate::grpo::{Distillation, EntropyControl, LossConfig, LossStats, TopDivergence};
}
pub mod launch {
    pub use crate::launch::{Inherited, LaunchOptions, Rendezvous, exit_now, hold_signals, run, worker_command};
}
pub mod memory {
    pub use crate::memory::{Account, Arena, HostPool, Ledger, MemoryKind, release_idle, settle};
}
pub mod metrics {
    pub use crate::metrics::{CompletionRow, LogHistory, MetricLine, read_completions, read_metrics};
}
pub mod model {
    pub use crate::model::{
        AdapterBase, AttentionSpec, BlockContext, BlockParams, BlockSpec, DeltaNetSpec, DenseSpec, EmbeddingParams,
        ExpertsSpec, Family, Format, Fp8, HeadParams, HeadSums, Int8, LoraSpec, Matrix, Mixer, Mlp, ModelSource,
        ModelSpec, Nf4, NormPlaces, PackedMixer, Param, ParamName, ParamTable, Piece, Plain, QkNorm, RopeSpec, Routes,
        Scoring, SequenceMixer, SharedExpertSpec, Stage, Stages, StoredBlock, StoredFormat, Unit, UnitLayout, Use,
        WeightFiles, WeightWriter, block_forward, draft_input, head_backward, head_forward, init_folder, init_unit,
        init_unit_on, write_adapters,
    };
}
pub mod ops {
    pub use crate::ops::*;
}
pub mod phase {
    pub use crate::phase::{Fault, FaultKind, Phase, arm_fault};
}
pub mod process {
    pub use crate::process::Scratch;
}
pub mod reward {
    pub use crate::reward::{
        FailureCount, FailureKind, RewardPool, answer_reader, check_reply, exact_answer, numeric_answer,
    };
}
pub mod rollout {
    pub use crate::rollout::{
        Batches, DraftInjection, Engine, EngineOptions, EngineRanks, EngineStats, EngineWeights, Event, Request,
        RequestId, RolloutEngine, SampledGroup, Session, SingleTurns, SpeculationOptions, kv_block_bytes,
    };
}
pub mod sandbox {
    pub use crate::sandbox::Readable;
}
pub mod serve {
    pub use crate::serve::{EngineSlices, Served};
}
pub mod torch {
    pub use crate::torch::{
        Store, Varlen, byte_vec, device_memory, f32_vec, flash_forward, i64_vec, keep_block, lacks_block,
        release_memory, reset_peak_memory, set_deterministic,
    };
}
pub mod train {
    pub use crate::train::{
        AdamOptions, AdapterOptions, GradientOptions, MicroBatch, MicroBatchShape, MuonOptions, NetworkOptions, Optim,
        OptimizerHome, PackOptions, ParamShard, ParamState, Policy, PolicyOptions, PolicyStart, Reference, Schedule,
        Scores, Sequence, StateForm, StatePart, StepOutcome, TokenGradients, TrainedModel, UpdateCourse,
        WORKSPACE_BYTES, pack, pad_to_agreed_count, reference_bytes,
    };
}
pub mod trainer {
    pub use crate::trainer::Trainer;
}
pub mod types {
    pub use crate::types::{
        FinishReason, Prompt, RolloutGroup, RoutedExperts, SamplingParams, Structure, TokenLogprob, Trajectory,
    };
}
pub mod untrusted {
    pub use crate::untrusted::MeteredAllocator;
}
pub mod update {
    pub use crate::update::{Learner, UpdateOptions};
}
