//! The words that keys accept, with references to papers.

use super::choice::choices;

choices! {
    /// Device of all tensors.
    Device {
        /// CUDA if a GPU is visible, else the CPU.
        Auto = "auto",
        /// The CPU backend.
        Cpu = "cpu",
        /// One GPU per process.
        Cuda = "cuda",
    }
}
choices! {
    /// Whether each GPU both generates and trains, or does one of the two.
    Mode {
        /// Every GPU generates and trains in turn.
        Colocated = "colocated",
        /// Some GPUs only generate, the others only train.
        Split = "split",
    }
}
choices! {
    /// How a prompt that is plain text reaches the model.
    #[derive(Default)]
    PromptFormat {
        /// A plain text prompt becomes a user message if the model has a chat template, else it stays unchanged.
        #[default]
        Auto = "auto",
        /// A plain text prompt becomes a user message.
        Chat = "chat",
        /// A plain text prompt reaches the model unchanged.
        Text = "text",
    }
}
choices! {
    /// Treatment of the KV cache of unfinished groups that are carried to the next step.
    CarriedKv {
        /// Keys and values are recomputed at the next wake with the newest weights.
        Recompute = "recompute",
        /// Keys and values computed by older weights stay in the KV cache.
        Keep = "keep",
    }
}
choices! {
    /// The reference model of the KL term in LoRA runs.
    ReferenceModel {
        /// The base with a frozen copy of the initial adapters; the base alone if the adapters are new.
        Initial = "initial",
        /// The base model without adapters.
        Base = "base",
    }
}
choices! {
    /// Dtype of weights and activations.
    Dtype {
        /// bfloat16 on CUDA, float32 on a CPU.
        Auto = "auto",
        /// 32-bit floating point.
        Float32 = "float32",
        /// bfloat16, with fp32 master weights and reductions.
        Bfloat16 = "bfloat16",
    }
}
choices! {
    /// Dtype of the residual stream.
    ResidualDtype {
        /// The dtype of weights and activations.
        Auto = "auto",
        /// 32-bit floating point.
        Float32 = "float32",
    }
}
choices! {
    /// Precision of the GEMMs of training with the weights of blocks.
    MixedPrecision {
        /// The dtype of weights and activations.
        None = "none",
        /// FP8 (e4m3) in forward and for gradients of activations; weight gradients use unrounded operands.
        Fp8 = "fp8",
        /// All three GEMMs of a weight matrix in FP8; the scales for weight gradients are per micro-batch.
        Fp8All = "fp8_all",
    }
}
choices! {
    /// How token losses are reduced to one number.
    LossType {
        /// Mean per sequence, then mean over sequences (arXiv 2402.03300).
        Grpo = "grpo",
        /// Sum divided by a constant, the number of sequences times `max_completion_length` (arXiv 2503.20783).
        DrGrpo = "dr_grpo",
        /// Mean over the tokens of the batch.
        Bnpo = "bnpo",
        /// Mean over the tokens of the whole generation batch (arXiv 2503.14476).
        Dapo = "dapo",
        /// Clipped importance weights as constant factors (arXiv 2506.13585).
        Cispo = "cispo",
        /// A smooth gate instead of clipping; mean per sequence, then mean over sequences (arXiv 2511.20347).
        Sapo = "sapo",
        /// Sum per sequence, then mean over sequences (arXiv 2602.05261).
        Luspo = "luspo",
        /// Gamma weights of whole sequences as constant factors; mean over the tokens of the generation batch (arXiv 2602.10693).
        Vespo = "vespo",
    }
}
choices! {
    /// Estimator of the KL divergence from the policy to the reference, with verl's names. d is the policy's log-probability minus the reference's.
    KlEstimator {
        /// The estimator `d`: unbiased, can be negative.
        K1 = "k1",
        /// The estimator `d^2 / 2`: never negative.
        K2 = "k2",
        /// The estimator `exp(-d) + d - 1`: never negative.
        K3 = "k3",
    }
}
choices! {
    /// Tokens over which the distillation divergence is computed, with TRL's names.
    DistillationMode {
        /// The sampled tokens: an estimate of the reverse KL divergence.
        SampledToken = "sampled_token",
        /// The teacher's most probable tokens at each position (TRL's choice for a teacher served over HTTP).
        TopkLogits = "topk_logits",
    }
}
choices! {
    /// Self-distillation: the policy with a longer prompt scores its own samples. Names are those of TRL's trainers.
    SelfDistillation {
        /// No self-distillation.
        None = "none",
        /// The prompt is extended by the row's column `privileged_context`: a worked answer or a hint (SDFT, arXiv 2601.19897).
        Sdft = "sdft",
        /// The prompt is extended by a successful completion of the same group, or by the row's feedback (SDPO, arXiv 2601.20802).
        Sdpo = "sdpo",
    }
}
choices! {
    /// Which experts the trainer uses for each token, in models with experts.
    RouterReplay {
        /// The experts that the sampler chose, with the trainer's own probabilities (rollout routing replay, arXiv 2510.11370).
        R3 = "R3",
        /// The experts that the trainer's own router chooses.
        Disabled = "disabled",
    }
}
choices! {
    /// Baseline that is subtracted from rewards.
    AdvantageEstimator {
        /// Mean reward of the group (arXiv 2402.03300).
        Grpo = "grpo",
        /// Mean reward of the other completions of the group (RLOO, arXiv 2402.14740).
        Rloo = "rloo",
    }
}
choices! {
    /// How several rewards are combined into one advantage.
    MultiObjectiveAggregation {
        /// The weighted sum of the rewards is normalized.
        SumThenNormalize = "sum_then_normalize",
        /// Each reward is normalized within its group, then their weighted sum over the batch (GDPO, arXiv 2601.05242).
        NormalizeThenSum = "normalize_then_sum",
    }
}
choices! {
    /// Level at which the policy ratio is computed.
    ImportanceSamplingLevel {
        /// One ratio per token.
        Token = "token",
        /// One length-normalized ratio per sequence (GSPO, arXiv 2507.18071).
        Sequence = "sequence",
    }
}
choices! {
    /// Treatment of groups without a training signal (equal rewards).
    DynamicSampling {
        /// Groups with equal rewards stay in the batch with advantages of 0.
        None = "none",
        /// Groups with equal rewards are left out of the update.
        Filter = "filter",
        /// Groups with equal rewards are replaced within the same rollout: the next prompts are sampled instead.
        Replace = "replace",
    }
}
choices! {
    /// The divisor of advantages.
    ScaleRewards {
        /// Advantages are divided by the standard deviation of the group's rewards.
        Group = "group",
        /// Advantages are divided by the standard deviation of rewards in the whole generation batch.
        Batch = "batch",
        /// Advantages are not divided.
        None = "none",
    }
}
choices! {
    /// How the difference between the sampler's and the trainer's log-probabilities is corrected (TRL's modes).
    ImportanceSamplingMode {
        /// Tokens are weighted by their probability ratio, clipped to the bounds.
        TokenTruncate = "token_truncate",
        /// Tokens are weighted by their probability ratio; those with a ratio outside of the bounds get weight 0.
        TokenMask = "token_mask",
        /// Sequences are weighted by their probability ratio, clipped to the bounds.
        SequenceTruncate = "sequence_truncate",
        /// Sequences are weighted by their probability ratio; those with a ratio outside of the bounds get weight 0.
        SequenceMask = "sequence_mask",
    }
}
choices! {
    /// Learning rate schedule after warm-up.
    LrSchedulerType {
        /// The learning rate stays at its peak.
        Constant = "constant",
        /// The learning rate decreases linearly to 0.
        Linear = "linear",
        /// The learning rate decreases to 0 along a half cosine.
        Cosine = "cosine",
        /// The learning rate decreases along a half cosine to a fraction of its peak.
        CosineWithMinLr = "cosine_with_min_lr",
    }
}
choices! {
    /// Which activations backward recomputes instead of keeping them. Each value also recomputes what the ones before it do.
    GradientCheckpointing {
        /// Recomputes only norms, the activation function and the convolution of gated delta nets, which cost one pass over memory.
        KeepChunks = "keep_chunks",
        /// Recomputes also the chunks of gated delta nets; the same as `keep_chunks` in models without them.
        None = "none",
        /// Recomputes also the output of the MLP's first GEMM, the largest activation of a block.
        Selective = "selective",
        /// Recomputes the whole block from its input, except for the output and log-sum-exp of attention; `full` in layers without attention.
        KeepAttention = "keep_attention",
        /// Recomputes the whole block from its input.
        Full = "full",
    }
}

impl GradientCheckpointing {
    /// Whether the output of the MLP's first GEMM is kept.
    pub fn keeps_gate_up(self) -> bool {
        matches!(self, Self::KeepChunks | Self::None)
    }

    /// Whether backward recomputes a block from its input.
    pub fn recomputes_blocks(self) -> bool {
        matches!(self, Self::KeepAttention | Self::Full)
    }

    /// Whether attention's output and log-sum-exp are kept in blocks that are otherwise recomputed.
    pub fn keeps_attention(self) -> bool {
        self == Self::KeepAttention
    }

    /// Whether chunks of gated delta nets are kept.
    pub fn keeps_chunks(self) -> bool {
        self == Self::KeepChunks
    }
}

choices! {
    /// A projection that can have a LoRA adapter.
    #[derive(PartialOrd, Ord)]
    TargetModule {
        /// The projection to queries.
        QProj = "q_proj",
        /// The projection to keys.
        KProj = "k_proj",
        /// The projection to values.
        VProj = "v_proj",
        /// The output projection of attention.
        OProj = "o_proj",
        /// The gate projection of the MLP.
        GateProj = "gate_proj",
        /// The up projection of the MLP.
        UpProj = "up_proj",
        /// The down projection of the MLP.
        DownProj = "down_proj",
        /// The projection to queries, keys and values of a gated delta net.
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
        /// In the dtype of the network.
        None = "none",
        /// 4-bit NormalFloat in blocks of 64 with double quantization of the scales (QLoRA, arXiv 2305.14314).
        Nf4 = "nf4",
    }
}
choices! {
    /// Precision of the block weights in the engine's GEMMs.
    RolloutQuantization {
        /// The engine's weights have the policy's dtype.
        None = "none",
        /// e4m3 with one scale per row, quantized at every wake; activations with one scale per token.
        Fp8 = "fp8",
        /// int8 with one scale per row, after both operands were multiplied by Hadamard matrices. The sampler is closer to the trainer than with `fp8`,
        /// and `strict` is supported.
        Int8 = "int8",
        /// Matrices of experts in MXFP4: e2m1 with a power of two for every 32 weights of a row, quantized at every wake; activations and all other
        /// weights have the policy's dtype.
        Mxfp4 = "mxfp4",
    }
}
choices! {
    /// Where the draft tokens of speculative decoding come from; the engine verifies them by sampling.
    Speculation {
        /// No draft tokens.
        None = "none",
        /// The tokens that followed an earlier occurrence of the completion's last tokens: in the completion, its prompt or other completions of that
        /// prompt.
        Ngram = "ngram",
        /// The model's own draft head.
        Mtp = "mtp",
        /// Like `ngram`, with the number of draft tokens per step that is fastest by the measured step times.
        Auto = "auto",
    }
}
choices! {
    /// Dtype of the KV cache.
    KvCacheDtype {
        /// The dtype of the network.
        Auto = "auto",
        /// e4m3 with one scale per token and head.
        Fp8 = "fp8",
        /// int8 with one scale per token and head. Queries and keys are multiplied by a Hadamard matrix first. The sampler is closer to the trainer
        /// than with `fp8`.
        Int8 = "int8",
    }
}
choices! {
    /// Dtype in which the engine stores the states of gated delta nets between steps.
    StateDtype {
        /// float32, in which states are computed.
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
        /// AdamW with 8-bit moments in blocks of 256 (arXiv 2110.02861), as in bitsandbytes.
        AdamW8bit = "adamw_8bit",
        /// Muon for the matrices of blocks, AdamW for everything else.
        Muon = "muon",
    }
}
choices! {
    /// How Muon scales the learning rate for a matrix of A rows and B columns.
    AdjustLr {
        /// Multiplied by sqrt(max(1, A / B)), as in Jordan's Muon.
        Original = "original",
        /// Multiplied by 0.2 sqrt(max(A, B)), which gives updates of AdamW's size (arXiv 2502.16982).
        MatchRmsAdamw = "match_rms_adamw",
    }
}
choices! {
    /// Where optimizer state is stored during rollout.
    OptimizerResidency {
        /// Optimizer state always stays on the device.
        Resident = "resident",
        /// Optimizer state is in host memory during rollout, and on the device for training.
        Swap = "swap",
        /// Optimizer state is in host memory; the optimizer step streams it through the device in buckets.
        Stream = "stream",
    }
}
choices! {
    /// Where the reference weights are stored.
    ReferenceResidency {
        /// Reference weights are on the device, sharded over the shard group.
        Resident = "resident",
        /// Reference weights are in pinned host memory; each layer is copied to the device one layer ahead of its use.
        Host = "host",
    }
}
