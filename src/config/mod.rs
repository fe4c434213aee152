//! Configuration: parsed, validated, read-only after. Keys are TRL's `GRPOConfig` names where one exists.

use std::path::PathBuf;

/// A validated run. Every field is a configuration key; nested structs are tables (`zero.stage`).
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Config {
    // ---- what is trained, on what ----
    /// Hugging Face model folder of the policy (and of the reference model, if `beta` > 0).
    pub model_name_or_path: PathBuf,
    /// Training rows, JSONL.
    pub train_file: PathBuf,
    /// Held-out rows, JSONL.
    pub eval_file: Option<PathBuf>,
    /// Where metrics, completions, checkpoints, the report and the final model go.
    pub output_dir: PathBuf,
    /// A checkpoint folder, or `latest` of `output_dir`.
    pub resume_from_checkpoint: Option<String>,
    /// Resume although keys that change the result differ from the checkpoint's.
    pub force_resume: bool,
    /// `auto` is CUDA where a GPU is visible.
    pub device: Device,
    /// Type of weights and activations; `auto` is bfloat16 on CUDA and float32 on a CPU.
    pub dtype: Dtype,
    /// System message put before every prompt that has none.
    pub system_prompt: Option<String>,
    /// Longest prompt in tokens; longer ones are counted and left out. `None` leaves what the context allows.
    pub max_prompt_length: Option<usize>,
    /// Shuffle training rows each epoch, by a counter-based key.
    pub shuffle_dataset: bool,

    // ---- batch ----
    /// Completions per prompt.
    pub num_generations: usize,
    /// Completions per GPU in one slice of the generation batch.
    pub per_device_train_batch_size: usize,
    /// Slices per optimizer update.
    pub gradient_accumulation_steps: usize,
    /// Slices per generation batch; `None` is `gradient_accumulation_steps`.
    pub steps_per_generation: Option<usize>,
    /// Completions per generation over all ranks; `None` is
    /// `per_device_train_batch_size * world_size * steps_per_generation`.
    pub generation_batch_size: Option<usize>,
    /// Passes over each generation batch.
    pub num_iterations: usize,
    /// Token budget of one forward and backward on one rank (a longer sequence is a micro-batch of its own).
    pub max_tokens_per_micro_batch: usize,

    // ---- sampling ----
    /// Longest completion in tokens.
    pub max_completion_length: usize,
    /// Longest sequence the engine holds; `None` is the model's context.
    pub max_model_length: Option<usize>,
    /// Softmax temperature of the sampler and of the trainer's log-probabilities.
    pub temperature: f32,
    /// Nucleus mass; 1 is off.
    pub top_p: f32,
    /// Highest logits kept; 0 is off.
    pub top_k: usize,
    /// Least relative probability.
    pub min_p: Option<f32>,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// Strings that end a completion.
    pub stop: Vec<String>,
    /// Ranks that share one engine.
    pub tensor_parallel_size: usize,
    /// Share of what the plan leaves that the KV cache takes (on a CPU: of `kv_cache_bytes`' default).
    pub gpu_memory_utilization: f64,
    /// Size of the KV cache per rank in bytes; `None` is decided by the plan.
    pub kv_cache_bytes: Option<usize>,
    /// Tokens per KV block.
    pub kv_block_size: usize,
    /// Most sequences decoded at once per engine.
    pub max_num_seqs: usize,
    /// Most prompt tokens prefilled in one engine step.
    pub max_num_batched_tokens: usize,

    // ---- objective ----
    /// Weight of the KL term; 0 loads no reference model.
    pub beta: f64,
    /// Lower clip range.
    pub epsilon: f64,
    /// Upper clip range; `None` is `epsilon`.
    pub epsilon_high: Option<f64>,
    /// Upper bound of the ratio for negative advantages (two-sided clipping).
    pub delta: Option<f64>,
    /// How token losses are summed.
    pub loss_type: LossType,
    /// Level of the policy ratio.
    pub importance_sampling_level: ImportanceSamplingLevel,
    /// Divisor of the advantages.
    pub scale_rewards: ScaleRewards,
    /// Leave completions cut by a length limit out of the loss.
    pub mask_truncated_completions: bool,
    /// Correct for the difference between sampler and trainer.
    pub importance_sampling_correction: bool,
    /// Level and kind of that correction.
    pub importance_sampling_mode: ImportanceSamplingMode,
    /// Upper bound of the correction.
    pub importance_sampling_clip_max: f64,
    /// Multiply the KL term by the differentiable ratio.
    pub use_bias_correction_kl: bool,

    // ---- rewards ----
    /// Names of the rewards, in order.
    pub reward_funcs: Vec<String>,
    /// One weight per reward; empty is 1 each.
    pub reward_weights: Vec<f64>,
    /// Settings of the built-in rewards.
    pub reward: RewardConfig,

    // ---- optimizer ----
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Adam's first moment decay.
    pub adam_beta1: f64,
    /// Adam's second moment decay.
    pub adam_beta2: f64,
    /// Adam's denominator term.
    pub adam_epsilon: f64,
    /// Decoupled weight decay on matrices (not on norms and biases).
    pub weight_decay: f64,
    /// Global gradient norm is clipped to this; 0 is off.
    pub max_grad_norm: f64,
    /// Shape of the learning rate after warm-up.
    pub lr_scheduler_type: LrSchedulerType,
    /// Updates of linear warm-up.
    pub warmup_steps: usize,
    /// Optimizer updates in all; `None` follows `num_train_epochs`.
    pub max_steps: Option<usize>,
    /// Passes over the training rows.
    pub num_train_epochs: f64,
    /// What is recomputed in backward.
    pub gradient_checkpointing: GradientCheckpointing,
    /// Sharding.
    pub zero: ZeroConfig,
    /// Where state lives while it is not used.
    pub residency: ResidencyConfig,

    // ---- output ----
    /// Steps between metric lines.
    pub logging_steps: usize,
    /// Steps between checkpoints; `None` saves only the final model.
    pub save_steps: Option<usize>,
    /// Newest checkpoints kept; `None` keeps all.
    pub save_total_limit: Option<usize>,
    /// Steps between evaluations; `None` evaluates before and after training only.
    pub eval_steps: Option<usize>,
    /// Samples per held-out problem.
    pub eval_num_generations: usize,
    /// Write every step's completions.
    pub log_completions: bool,

    // ---- process ----
    /// First word of every random key.
    pub seed: u64,
    /// Longest wait for peers in a collective, in seconds.
    pub collective_timeout_s: f64,
    /// Injected fault, `rank:step:phase:kind`; for tests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
}

macro_rules! choices {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            /// Every accepted spelling.
            pub const NAMES: &[&str] = &[$($text),+];

            /// The spelling used in configuration files.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text),+ }
            }
        }
    };
}

choices! {
    /// Where tensors live.
    Device {
        /// CUDA where a GPU is visible, else the CPU.
        Auto = "auto",
        /// The CPU backend.
        Cpu = "cpu",
        /// One GPU per process.
        Cuda = "cuda",
    }
}
choices! {
    /// Type of weights and activations.
    Dtype {
        /// bfloat16 on CUDA, float32 on a CPU.
        Auto = "auto",
        /// IEEE single.
        Float32 = "float32",
        /// bfloat16, with fp32 master weights and reductions.
        Bfloat16 = "bfloat16",
    }
}
choices! {
    /// How token losses become one number.
    LossType {
        /// Mean per sequence, then mean over sequences (arXiv 2402.03300).
        Grpo = "grpo",
        /// Sum over a constant, sequences times `max_completion_length` (arXiv 2503.20783).
        DrGrpo = "dr_grpo",
        /// Mean over the tokens of the batch.
        Bnpo = "bnpo",
        /// Mean over the tokens of the whole generation batch (arXiv 2503.14476).
        Dapo = "dapo",
        /// Clipped importance weights as constants (arXiv 2506.13585).
        Cispo = "cispo",
    }
}
choices! {
    /// Level of the policy ratio.
    ImportanceSamplingLevel {
        /// One ratio a token.
        Token = "token",
        /// One length-normalised ratio a sequence (GSPO, arXiv 2507.18071).
        Sequence = "sequence",
    }
}
choices! {
    /// Divisor of the advantages.
    ScaleRewards {
        /// Standard deviation of the group.
        Group = "group",
        /// Standard deviation of the whole generation batch.
        Batch = "batch",
        /// No division.
        None = "none",
    }
}
choices! {
    /// Correction for the difference between sampler and trainer log-probabilities (TRL's modes).
    ImportanceSamplingMode {
        /// Token ratios, cut at the bound.
        TokenTruncate = "token_truncate",
        /// Token ratios, zero above the bound.
        TokenMask = "token_mask",
        /// Sequence ratios, cut at the bound.
        SequenceTruncate = "sequence_truncate",
        /// Sequence ratios, zero above the bound.
        SequenceMask = "sequence_mask",
    }
}
choices! {
    /// Shape of the learning rate after warm-up.
    LrSchedulerType {
        /// Stays at the peak.
        Constant = "constant",
        /// Falls to 0 in a line.
        Linear = "linear",
        /// Falls to 0 in a half cosine.
        Cosine = "cosine",
    }
}
choices! {
    /// What is recomputed in backward.
    GradientCheckpointing {
        /// Nothing: all activations are kept.
        None = "none",
        /// All but attention output and log-sum-exp.
        Selective = "selective",
        /// The whole block from its input.
        Full = "full",
    }
}
choices! {
    /// Where optimizer state lives during rollout.
    OptimizerResidency {
        /// The plan decides.
        Auto = "auto",
        /// On the device, always.
        Resident = "resident",
        /// In the host pool during rollout.
        Swap = "swap",
    }
}

/// Sharding (`zero.*`).
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ZeroConfig {
    /// 0: nothing is sharded; 1: optimizer state; 2: gradients too; 3: weights too.
    pub stage: u8,
    /// Ranks that share one copy of the state; `None` is the world. Smaller is hybrid sharding.
    pub shard_group_size: Option<usize>,
}

/// Residency (`residency.*`).
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ResidencyConfig {
    /// Master weights and Adam moments.
    pub optimizer: OptimizerResidency,
}

/// Settings of the built-in rewards (`reward.*`).
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct RewardConfig {
    /// `format`: a regular expression that the whole completion must match.
    pub format_pattern: String,
    /// `numeric_answer`: a regular expression whose first group is the answer; the last match counts.
    pub answer_pattern: String,
    /// `numeric_answer`: the column with the reference answer.
    pub answer_column: String,
    /// Threads that score completions on each rank.
    pub num_threads: usize,
    /// Longest time one completion may take to score, in seconds; past it the sample is masked.
    pub timeout_s: f64,
}
