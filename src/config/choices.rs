//! The words that keys take, with the papers behind them.

use super::choice::choices;

choices! {
    /// Where tensors live (`device`).
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
    /// Where the two halves of a step run (`mode`).
    Mode {
        /// On every GPU in turn.
        Colocated = "colocated",
        /// On GPUs of their own.
        Split = "split",
    }
}
choices! {
    /// The treatment of a prompt that is text (`prompt_format`).
    #[derive(Default)]
    PromptFormat {
        /// A user's message where the model has a chat template.
        #[default]
        Auto = "auto",
        /// A user's message.
        Chat = "chat",
        /// Text, as it is.
        Text = "text",
    }
}
choices! {
    /// The treatment of the keys and values of carried groups (`carried_kv`).
    CarriedKv {
        /// Computed again at the next wake, with the newest weights.
        Recompute = "recompute",
        /// Left in the KV cache as older weights computed them.
        Keep = "keep",
    }
}
choices! {
    /// The model that the KL term compares with where adapters train (`reference`).
    ReferenceModel {
        /// A frozen copy of the adapters that training starts from; the base where they are new.
        Initial = "initial",
        /// The model without adapters.
        Base = "base",
    }
}
choices! {
    /// Type of weights and activations (`dtype`).
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
    /// Type of the residual stream (`residual_dtype`).
    ResidualDtype {
        /// The type of weights and activations.
        Auto = "auto",
        /// IEEE single.
        Float32 = "float32",
    }
}
choices! {
    /// The precision in which training multiplies by the weights of blocks (`mixed_precision`).
    MixedPrecision {
        /// That of weights and activations.
        None = "none",
        /// FP8 (e4m3) in forward and for the gradients of activations; weights' gradients are made of factors that are not rounded.
        Fp8 = "fp8",
        /// All three products of a matrix in FP8: scales of weights' gradients are those of a micro-batch.
        Fp8All = "fp8_all",
    }
}
choices! {
    /// How token losses become one number (`loss_type`).
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
        /// A smooth gate in place of the clip range, mean per sequence, then mean over sequences (arXiv 2511.20347).
        Sapo = "sapo",
        /// Sum per sequence, then mean over sequences (arXiv 2602.05261).
        Luspo = "luspo",
        /// Gamma weights of whole sequences as constants, mean over the tokens of the generation batch (arXiv 2602.10693).
        Vespo = "vespo",
    }
}
choices! {
    /// Estimator of the KL divergence from policy to reference, by verl's names (`kl_estimator`). d is the log-probability under the policy less
    /// that under the reference.
    KlEstimator {
        /// `d`.
        K1 = "k1",
        /// `d^2 / 2`.
        K2 = "k2",
        /// `exp(-d) + d - 1`, never negative.
        K3 = "k3",
    }
}
choices! {
    /// Tokens that a divergence from a teacher is over, by TRL's names (`distillation_mode`).
    DistillationMode {
        /// The sampled tokens: an estimate of the reverse KL divergence.
        SampledToken = "sampled_token",
        /// The teacher's most probable tokens of each distribution (TRL's choice where a server scores).
        TopkLogits = "topk_logits",
    }
}
choices! {
    /// How the policy is its own teacher, by the names of TRL's trainers: behind which longer prompt it scores its samples (`self_distillation`).
    SelfDistillation {
        /// It is not.
        None = "none",
        /// The prompt with the row's column `privileged_context`: a worked answer or a hint (SDFT, arXiv 2601.19897).
        Sdft = "sdft",
        /// The prompt with a successful completion of the same group, or with the row's feedback (SDPO, arXiv 2601.20802).
        Sdpo = "sdpo",
    }
}
choices! {
    /// Source of the trainer's experts, of a model with experts (`router_replay`).
    RouterReplay {
        /// The sampler's choices, with the trainer's own probabilities (rollout routing replay, arXiv 2510.11370).
        R3 = "R3",
        /// The choices of its own router.
        Disabled = "disabled",
    }
}
choices! {
    /// Baseline that rewards are compared with (`advantage_estimator`).
    AdvantageEstimator {
        /// Mean of the group (arXiv 2402.03300).
        Grpo = "grpo",
        /// Mean of the others of the group (arXiv 2402.14740).
        Rloo = "rloo",
    }
}
choices! {
    /// How several rewards become one advantage (`multi_objective_aggregation`).
    MultiObjectiveAggregation {
        /// Weighted sum of the rewards, then scaled.
        SumThenNormalize = "sum_then_normalize",
        /// Each reward scaled within its group, then their weighted sum over the batch (GDPO, arXiv 2601.05242).
        NormalizeThenSum = "normalize_then_sum",
    }
}
choices! {
    /// Level of the policy ratio (`importance_sampling_level`).
    ImportanceSamplingLevel {
        /// One ratio a token.
        Token = "token",
        /// One length-normalised ratio a sequence (GSPO, arXiv 2507.18071).
        Sequence = "sequence",
    }
}
choices! {
    /// The treatment of groups that teach nothing (`dynamic_sampling`).
    DynamicSampling {
        /// They are in the batch, with advantages of 0.
        None = "none",
        /// They are left out of the update.
        Filter = "filter",
        /// The next prompts are sampled in their place, in the same rollout.
        Replace = "replace",
    }
}
choices! {
    /// Divisor of the advantages (`scale_rewards`).
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
    /// Correction for the difference between sampler and trainer log-probabilities, by TRL's modes (`importance_sampling_mode`).
    ImportanceSamplingMode {
        /// Token ratios, cut at the bounds.
        TokenTruncate = "token_truncate",
        /// Token ratios, zero outside of the bounds.
        TokenMask = "token_mask",
        /// Sequence ratios, cut at the bounds.
        SequenceTruncate = "sequence_truncate",
        /// Sequence ratios, zero outside of the bounds.
        SequenceMask = "sequence_mask",
    }
}
choices! {
    /// Shape of the learning rate after warm-up (`lr_scheduler_type`).
    LrSchedulerType {
        /// Stays at the peak.
        Constant = "constant",
        /// Falls to 0 in a line.
        Linear = "linear",
        /// Falls to 0 in a half cosine.
        Cosine = "cosine",
        /// Falls in a half cosine to a share of the peak.
        CosineWithMinLr = "cosine_with_min_lr",
    }
}
choices! {
    /// The activations that backward recomputes (`gradient_checkpointing`).
    GradientCheckpointing {
        /// Norms, the activation and the convolution of gated delta nets alone, which cost a reading of memory.
        KeepChunks = "keep_chunks",
        /// The chunks of gated delta nets too; `keep_chunks` in a model without them.
        None = "none",
        /// The MLP's first product too, the largest of a block by memory.
        Selective = "selective",
        /// The whole block from its input but for attention's scores, whose output and log-sum-exp are kept; `full` in layers without.
        KeepAttention = "keep_attention",
        /// The whole block from its input.
        Full = "full",
    }
}

impl GradientCheckpointing {
    /// Whether the MLP's first product is kept.
    pub fn keeps_gate_up(self) -> bool {
        matches!(self, Self::KeepChunks | Self::None)
    }

    /// Whether backward begins with a block's input.
    pub fn recomputes_blocks(self) -> bool {
        matches!(self, Self::KeepAttention | Self::Full)
    }

    /// Whether of blocks that are computed again attention's output and log-sum-exp are kept.
    pub fn keeps_attention(self) -> bool {
        self == Self::KeepAttention
    }

    /// Whether chunks of gated delta nets are kept.
    pub fn keeps_chunks(self) -> bool {
        self == Self::KeepChunks
    }
}

choices! {
    /// A projection that can have a low-rank adapter (`lora.target_modules`).
    #[derive(PartialOrd, Ord)]
    TargetModule {
        /// Queries.
        QProj = "q_proj",
        /// Keys.
        KProj = "k_proj",
        /// Values.
        VProj = "v_proj",
        /// Attention output.
        OProj = "o_proj",
        /// Gate of the MLP.
        GateProj = "gate_proj",
        /// Up projection of the MLP.
        UpProj = "up_proj",
        /// Down projection of the MLP.
        DownProj = "down_proj",
        /// Queries, keys and values of a gated delta net.
        InProjQkv = "in_proj_qkv",
        /// Gate of a gated delta net's norm.
        InProjZ = "in_proj_z",
        /// Write strengths of a gated delta net.
        InProjB = "in_proj_b",
        /// Decays of a gated delta net.
        InProjA = "in_proj_a",
        /// Output of a gated delta net.
        OutProj = "out_proj",
    }
}
choices! {
    /// How the frozen base of a LoRA run is stored (`quantization`).
    Quantization {
        /// In the type of the network.
        None = "none",
        /// 4-bit NormalFloat in blocks of 64 with doubly quantised scales (QLoRA, arXiv 2305.14314).
        Nf4 = "nf4",
    }
}
choices! {
    /// How the engine's products read the weights of blocks (`rollout_quantization`).
    RolloutQuantization {
        /// The engine's weights have the policy's dtype.
        None = "none",
        /// In e4m3 with a scale for each row, made at every wake; activations with one for each token.
        Fp8 = "fp8",
    }
}
choices! {
    /// Where draft tokens come from, which the engine checks by drawing (`speculation`).
    Speculation {
        /// There are none.
        None = "none",
        /// The tokens that followed the last tokens of a completion where these occurred before: in the completion, its prompt or other completions of that prompt.
        Ngram = "ngram",
        /// The model's own draft head.
        Mtp = "mtp",
        /// The drafts of `ngram`, as many in each step as pay by the measured times of steps.
        Auto = "auto",
    }
}
choices! {
    /// How the engine stores keys and values (`kv_cache_dtype`).
    KvCacheDtype {
        /// In the type of the network.
        Auto = "auto",
        /// In e4m3 with a scale for each token and head.
        Fp8 = "fp8",
        /// In whole numbers of eight bits with a scale for each token and head. Queries and keys are multiplied by a Hadamard matrix first. The sampler is nearer to the trainer than with `fp8`.
        Int8 = "int8",
    }
}
choices! {
    /// How the engine stores the states of gated delta nets between steps (`mamba_ssm_cache_dtype`).
    StateDtype {
        /// In float32, in which they are computed.
        Float32 = "float32",
        /// Rounded to bfloat16 after every step.
        Bfloat16 = "bfloat16",
    }
}
choices! {
    /// The optimizer (`optim`).
    OptimizerName {
        /// AdamW (arXiv 1711.05101).
        AdamW = "adamw",
        /// AdamW with moments of 8 bits in blocks of 256 (arXiv 2110.02861), as bitsandbytes has it.
        AdamW8bit = "adamw_8bit",
        /// Muon for the matrices of blocks, AdamW for everything else.
        Muon = "muon",
    }
}
choices! {
    /// How Muon's learning rate follows from a matrix of A rows and B columns (`muon.adjust_lr_fn`).
    AdjustLr {
        /// Times sqrt(max(1, A / B)), as Jordan's Muon.
        Original = "original",
        /// Times 0.2 sqrt(max(A, B)), which gives updates AdamW's size (arXiv 2502.16982).
        MatchRmsAdamw = "match_rms_adamw",
    }
}
choices! {
    /// Where optimizer state lives during rollout (`residency.optimizer`).
    OptimizerResidency {
        /// On the device, always.
        Resident = "resident",
        /// In the host pool during rollout.
        Swap = "swap",
        /// In the host pool; it flows through the device in buckets while it is stepped.
        Stream = "stream",
    }
}
choices! {
    /// Where reference weights live (`residency.reference`).
    ReferenceResidency {
        /// On the device, sharded over the shard group.
        Resident = "resident",
        /// In pinned host memory, brought to the device a layer ahead.
        Host = "host",
    }
}
