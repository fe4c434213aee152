//! The keys of a GRPO run.

use super::*;

impl Config {
    /// Whether the KL term needs separate reference weights. LoRA runs use their frozen base, alone or with the initial adapters.
    pub fn has_reference(&self) -> bool {
        self.beta > 0.0 && self.lora.r.is_none()
    }

    /// Whether a frozen copy of the initial adapters is kept for the KL term.
    pub fn keeps_initial_adapters(&self) -> bool {
        self.beta > 0.0 && self.lora.r.is_some() && self.reference == ReferenceModel::Initial
    }

    /// Whether the engine keeps its memory, with the KV cache of unfinished groups, while a step trains.
    pub fn keeps_kv_cache(&self) -> bool {
        self.carried_kv == CarriedKv::Keep
    }

    /// Names of all keys of `T`, in declaration order.
    pub fn keys() -> &'static [String] {
        static KEYS: OnceLock<Vec<String>> = OnceLock::new();
        KEYS.get_or_init(field::names::<Self>)
    }
}

keys! {
    /// The validated configuration of a GRPO run. Every field is a configuration key; nested structs are tables (`zero.stage`).
    ///
    /// Dr. GRPO, whose sums have a constant divisor, with ratios of whole sequences as in GSPO:
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{ImportanceSamplingLevel, ImportanceSamplingMode, LossType, ScaleRewards};
    ///
    /// let words = [
    ///     "loss_type=dr_grpo",
    ///     "scale_rewards=none",
    ///     "importance_sampling_level=sequence",
    ///     "epsilon=3e-4",
    ///     "importance_sampling_mode=token_mask",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// assert_eq!((config.loss_type, config.scale_rewards), (LossType::DrGrpo, ScaleRewards::None));
    /// assert_eq!(config.importance_sampling_level, ImportanceSamplingLevel::Sequence);
    /// assert_eq!(config.importance_sampling_mode, ImportanceSamplingMode::TokenMask); // of sampler and trainer
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    ///
    /// An engine that rounds its weights, keys, values and states, and drafts tokens:
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{KvCacheDtype, RolloutQuantization, Speculation, StateDtype};
    ///
    /// let words = [
    ///     "rollout_quantization=fp8",
    ///     "kv_cache_dtype=int8",
    ///     "mamba_ssm_cache_dtype=bfloat16",
    ///     "speculation=ngram",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// assert_eq!((config.rollout_quantization, config.kv_cache_dtype), (RolloutQuantization::Fp8, KvCacheDtype::Int8));
    /// assert_eq!((config.mamba_ssm_cache_dtype, config.speculation), (StateDtype::Bfloat16, Speculation::Ngram));
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    ///
    /// Groups that are not complete when a step ends go on in the next one; or groups that teach nothing are replaced:
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{CarriedKv, DynamicSampling};
    ///
    /// let load = |words: &[&str]| {
    ///     let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
    ///     Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)
    /// };
    /// let carried = load(&["oversample=0.5", "partial_rollout=true", "carried_kv=keep"])?;
    /// assert!(carried.carried_kv == CarriedKv::Keep && carried.keeps_kv_cache());
    /// let replaced = load(&["dynamic_sampling=replace", "dynamic_sampling_range=[0.1, 0.9]"])?;
    /// assert_eq!(replaced.dynamic_sampling, DynamicSampling::Replace);
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    #[non_exhaustive]
    pub struct Config {
        section "What is trained, on what";
        /// The model that is trained.
        #[serde(flatten)]
        /// Branch, tag or commit of a model on the Hub; `none` is `main`.
        pub model: ModelConfig,
        /// Keys for rows and prompts.
        #[serde(flatten)]
        pub data: DataConfig,
        /// Keys for the output folder and for resuming.
        #[serde(flatten)]
        pub output: OutputConfig,
        /// Maximum prompt length in tokens; longer prompts are counted and dropped. `none` allows what the context allows. In either case a prompt is
        /// dropped if prompt and `max_completion_length` together exceed the context.
        pub max_prompt_length: Option<usize> = None => COUNT,
        /// Shuffle training rows each epoch, with a counter-based random key.
        pub shuffle_dataset: bool = true,
        /// Drop the rows at the end of an epoch that do not fill a generation batch; `false` fills that batch with rows of the next epoch.
        pub dataloader_drop_last: bool = true,

        section "Which ranks do what";
        /// `colocated`: every GPU generates and trains in turn. `split`: some GPUs only generate, the others only train.
        pub mode: Mode = Mode::Colocated,
        /// How the ranks are divided when `mode` is `split`.
        pub split: SplitConfig,

        section "Batch";
        /// Completions per prompt.
        pub num_generations: usize = 8 => at_least(2.0).because("advantages are relative to the group"),
        /// Completions per GPU in one slice of the generation batch; counts all GPUs, whether they train or generate.
        pub per_device_train_batch_size: usize = 8 => COUNT,
        /// Number of slices per optimizer update.
        pub gradient_accumulation_steps: usize = 1 => COUNT,
        /// Number of slices per generation batch; `none` is `gradient_accumulation_steps`.
        pub steps_per_generation: Option<usize> = None => COUNT,
        /// Completions per generation batch over all ranks; `none` is `per_device_train_batch_size * world_size * steps_per_generation`.
        pub generation_batch_size: Option<usize> = None => COUNT,
        /// Number of passes over each generation batch.
        pub num_iterations: usize = 1 => COUNT,
        /// Maximum number of tokens of one forward and backward on one rank, or on all ranks that share micro-batches (a longer sequence forms its
        /// own micro-batch).
        pub max_tokens_per_micro_batch: usize = 16384 => COUNT,
        /// Number of ranks that share each micro-batch. Each computes an equal part of its tokens and, in attention and delta nets, some of the heads
        /// (Ulysses, arXiv 2309.14509). It must divide the ranks that train, the ranks of a node, and the query heads of every layer. `auto` is the
        /// smallest size with which the plan fits.
        pub sequence_parallel_size: AutoOr<usize> = AutoOr::Given(1) => COUNT,
        /// Compute the prompt of a group once for all its completions in training; off if the model has a sliding window.
        pub share_prompts: bool = true,

        section "Sampling";
        /// Maximum completion length in tokens; prompt and completion together must fit into the context or `max_model_length`.
        pub max_completion_length: usize = 512 => COUNT,
        /// Maximum sequence length of the engine in tokens; `none` is the model's context.
        pub max_model_length: Option<usize> = None => COUNT,
        /// Softmax temperature of the sampler and of the trainer's log-probabilities, at least 0.000001.
        pub temperature: f32 = 1.0 => above(0.0).because("greedy samples of a group are all equal"),
        /// Nucleus sampling: probability mass that is kept; 1 is off.
        pub top_p: f32 = 1.0 => ABOVE_ZERO,
        /// Number of highest logits that are kept; 0 is off.
        pub top_k: usize = 0,
        /// Minimum probability relative to the most probable token; `none` is off.
        pub min_p: Option<f32> = None => from_to(0.0, 1.0),
        /// Penalty on token ids already seen; 1 is off; at least 0.000001 and at most 1000000.
        pub repetition_penalty: f32 = 1.0 => above(0.0),
        /// Stop strings that end a completion.
        pub stop: Vec<String> = Vec::new(),
        /// Number of ranks that share one engine, or each of its pipeline stages.
        pub tensor_parallel_size: usize = 1 => COUNT,
        /// Number of pipeline stages of one engine. Each stage has `tensor_parallel_size` ranks that hold only its layers. Use it for numbers of
        /// ranks by which `tensor_parallel_size` cannot divide a model, or would divide it too finely. Each stage computes another part of the
        /// sequences; the slowest stage sets the speed. It needs `zero.stage` 3 or `mode` split, as otherwise every rank holds all weights and
        /// several engines generate faster. On GPUs it does not support `strict`, or models with experts or gated delta nets yet.
        pub pipeline_parallel_size: usize = 1 => COUNT,
        /// Number of layers per pipeline stage, such as `"10,10,8"`; `none` balances the stages' times, including the output head.
        pub pipeline_partition: Option<PipelinePartition> = None,
        /// In models with experts, give each rank of an engine whole experts instead of a slice of every expert.
        pub enable_expert_parallel: bool = false,
        /// Fraction of the memory left during rollout that the KV cache may use, if `kv_cache_bytes` is `none`. With `carried_kv = keep` also at most
        /// this fraction of the memory left during training; on a CPU of half of the memory left.
        pub gpu_memory_utilization: f64 = 0.9 => ABOVE_ZERO,
        /// Size of the KV cache per rank in bytes; `none` lets the plan decide.
        pub kv_cache_bytes: Option<usize> = None => at_least(1.0),
        /// Tokens per block of the KV cache.
        pub kv_block_size: usize = 16 => from_to(1.0, 1024.0),
        /// Maximum number of sequences that an engine decodes at once.
        pub max_num_seqs: usize = 256 => COUNT,
        /// Maximum number of prompt tokens that one engine step prefills.
        pub max_num_batched_tokens: usize = 8192 => COUNT,
        /// Make completions independent, bit for bit, of the order of prompts, of other sequences in the batch and of preemption; slower. On a GPU it
        /// needs `tensor_parallel_size` 1.
        pub strict: bool = false,
        /// Make the trainer's log-probability of every sampled token equal to the sampler's, bit for bit: `sampling/sampling_logp_difference/max` is
        /// 0 at every step, or the run ends with an error. The sampler's log-probabilities then serve as old ones, and
        /// `importance_sampling_correction` has no effect. On a GPU this implies `strict`; slower. [exact.md](exact.md)
        pub exact: bool = false,
        /// Precision of the block weights in the engine's GEMMs. `fp8` quantizes them to e4m3 at every wake, into a copy of half their size, and
        /// quantizes each token's activations. `int8` is closer to the trainer and supports `strict`, but no experts. `mxfp4` quantizes only the
        /// matrices of experts, to 4 bits with a power of two for 32 weights, into a copy of 27 % of their size, and no activations
        /// ([mxfp4.md](mxfp4.md)). Norms, embedding and output head stay unquantized, and training is not affected. Sampled log-probabilities then
        /// differ more from the trainer's; `importance_sampling_correction` corrects for that. A CPU simulates the rounding; for `fp8` and `int8` GPUs
        /// must be H100 or H200.
        pub rollout_quantization: RolloutQuantization = RolloutQuantization::None,
        /// Dtype of the engine's KV cache; `auto` is `dtype`. `fp8` (e4m3) and `int8` have one scale per token and head: 1.94 times as many tokens as
        /// bfloat16 for heads of 128, and half the bytes that attention reads; `int8` is closer to the trainer. `importance_sampling_correction`
        /// corrects for the rounding. On a GPU they need `dtype` bfloat16 and compute capability 8.9 (`fp8`) or 8.0 (`int8`) or later.
        pub kv_cache_dtype: KvCacheDtype = KvCacheDtype::Auto,
        /// Dtype in which the engine stores the states of gated delta nets between steps; they are computed in float32. `bfloat16` rounds them to
        /// nearest after every step, which halves their memory and memory traffic. `importance_sampling_correction` corrects for the rounding.
        pub mamba_ssm_cache_dtype: StateDtype = StateDtype::Float32,
        /// Method of draft tokens: the engine keeps those that equal what it samples, so completions do not change but take fewer steps. `ngram` drafts
        /// what followed an earlier occurrence of the completion's last tokens, in it, in its prompt, or in other and earlier completions of the
        /// prompt; `auto` does so where measured step times show a gain. `mtp` uses the draft head of Qwen3.5, Qwen3.6 and Qwen3-Next (`mtp.*` in
        /// their files), which trains with the model.
        /// [speculation.md](speculation.md)
        pub speculation: Speculation = Speculation::None,
        /// Maximum number of draft tokens per completion and step.
        pub num_speculative_tokens: usize = 7 => from_to(1.0, 64.0),
        /// Extra groups that a step starts, as a fraction of the groups that it uses; it uses the first complete ones. Samples of the others are
        /// dropped, which favours short completions, unless `partial_rollout` is on.
        pub oversample: f64 = 0.0 => from_to(0.0, 16.0),
        /// Continue groups that are incomplete at the end of a step in the next step, with the new weights.
        pub partial_rollout: bool = false,
        /// Treatment of the KV cache of such groups: `recompute` computes it again with the newest weights, `keep` leaves it as the older weights
        /// computed it (PipelineRL, arXiv 2509.19128). `keep` occupies the KV cache's memory during training, too; a resumed run always recomputes.
        pub carried_kv: CarriedKv = CarriedKv::Recompute,

        /// Treatment of groups without a training signal: all rewards equal, or the mean reward outside of `dynamic_sampling_range`. `none`: they
        /// stay in the batch with advantages of 0. `filter`: they are removed from the update. `replace`: the next prompts are sampled in their place
        /// while others are still decoded; the batch is the first groups with a signal, in data order.
        pub dynamic_sampling: DynamicSampling = DynamicSampling::None,
        /// Maximum number of groups that a step with `dynamic_sampling = replace` samples, in generation batches; a data set with fewer rows limits
        /// it further. The step then trains on the groups it has; if there are none, the run ends.
        pub dynamic_sampling_max_gen_batches: usize = 10 => COUNT,
        /// Bounds of a group's mean reward, inclusive; `none` only requires unequal rewards.
        pub dynamic_sampling_range: Option<[f64; 2]> = None,

        /// Keys that make some rows appear less often.
        pub curriculum: CurriculumConfig,

        section "Tools";
        /// Keys for functions that the model may call.
        #[serde(flatten)]
        pub tools: ToolsConfig,

        section "Objective";
        /// Weight of the KL term; with 0 no reference model is loaded.
        pub beta: f64 = 0.0 => at_least(0.0),
        /// Reference model of the KL term in LoRA runs: `initial` is the base with a frozen copy of the adapters in `model_name_or_path` (just the
        /// base if the adapters are new), `base` is the model without adapters. Without LoRA the reference is the initial model.
        pub reference: ReferenceModel = ReferenceModel::Initial,
        /// Lower clip range of the policy ratio.
        pub epsilon: f64 = 0.2 => BELOW_ONE,
        /// Upper clip range of the policy ratio; `none` is `epsilon`.
        pub epsilon_high: Option<f64> = None => at_least(0.0),
        /// Upper bound of the policy ratio for negative advantages (two-sided clipping); `none` is off.
        pub delta: Option<f64> = None => above(1.0),
        /// How token losses are reduced to one number.
        pub loss_type: LossType = LossType::Dapo,
        /// Whether the policy ratio is computed per token or per sequence.
        pub importance_sampling_level: ImportanceSamplingLevel = ImportanceSamplingLevel::Token,
        /// Divisor of advantages: the standard deviation of rewards in the group or in the generation batch, or none.
        pub scale_rewards: ScaleRewards = ScaleRewards::Group,
        /// Exclude completions that were cut by a length limit from the loss.
        pub mask_truncated_completions: bool = false,
        /// Correct for the difference between the sampler's and the trainer's probabilities.
        pub importance_sampling_correction: bool = true,
        /// Level (token or sequence) and kind (truncate or mask) of the importance sampling correction.
        pub importance_sampling_mode: ImportanceSamplingMode = ImportanceSamplingMode::SequenceMask,
        /// Upper bound of the importance sampling ratio.
        pub importance_sampling_clip_max: f64 = 3.0 => above(0.0),
        /// Multiply the KL term by the differentiable ratio.
        pub use_bias_correction_kl: bool = true,
        /// Keys for further losses, estimators and advantages.
        #[serde(flatten)]
        pub objective: ObjectiveConfig,
        /// Keys for distillation from a teacher.
        #[serde(flatten)]
        pub distillation: DistillationConfig,

        section "Rewards";
        /// The reward functions, in order: built-in rewards, names of `rewards.*`, and Python functions as `file.py:function`, `module:function` or
        /// `module.function`, which are named after the function.
        pub reward_funcs: Vec<String>,
        /// One weight per reward; an empty list is 1 for each.
        pub reward_weights: Vec<f64> = Vec::new(),
        /// Settings of built-in rewards.
        pub reward: RewardConfig,
        /// Rewards with their own process or service, by name.
        pub rewards: ProcessRewards,

        section "Optimizer";
        /// Peak learning rate.
        pub learning_rate: f64 = 1e-6 => above(0.0),
        /// Keys for the optimizer and its schedule.
        #[serde(flatten)]
        pub optimizer: OptimizerConfig,
        /// Which activations backward recomputes; `auto` recomputes as little as fits.
        pub gradient_checkpointing: AutoOr<GradientCheckpointing> = AutoOr::Auto,
        /// Keep saved inputs of blocks (with `keep_attention` also attention's outputs) in pinned host memory until backward. They are copied out
        /// during the forward of the next block and back during the backward of the block above.
        pub activation_offload: bool = false,
        /// Keys for ZeRO sharding.
        pub zero: ZeroConfig,
        /// Keys for where optimizer state and reference weights are stored.
        pub residency: ResidencyConfig,
        /// Keys for LoRA adapters.
        pub lora: LoraConfig,
        /// How the frozen base of a LoRA run is stored.
        pub quantization: Quantization = Quantization::None,

        section "Output";
        /// Number of steps between metric lines.
        pub logging_steps: usize = 1 => COUNT,
        /// Keys for checkpoints.
        #[serde(flatten)]
        pub saving: SavingConfig,
        /// Number of steps between evaluations; `none` evaluates only before and after training.
        pub eval_steps: Option<usize> = None => COUNT,
        /// Keys for where metrics are written.
        #[serde(flatten)]
        pub report: ReportConfig,
        /// Keys for the best evaluation and early stopping.
        #[serde(flatten)]
        pub best: BestConfig,
        /// Number of samples per evaluation problem.
        pub eval_num_generations: usize = 1 => COUNT,
        /// Softmax temperature of evaluations; 0 is greedy, `none` is `temperature`.
        pub eval_temperature: Option<f32> = None => at_least(0.0),
        /// Names of the rewards that must all give 1 for an evaluation sample to count as solved in pass@k. If empty: those of `numeric_answer`,
        /// `exact_answer`, `math`, `accuracy`, TRL's `accuracy_reward` and `reasoning_accuracy_reward`, `code` and `binary_code` that are among the
        /// rewards, or all rewards if there are none of these.
        pub eval_solved_by: Vec<String> = Vec::new(),
        /// Write the completions of every step.
        pub log_completions: bool = false,
        /// Write a timeline of every rank's phases to `trace/` in the output folder, in Chrome's trace format.
        pub trace: bool = false,

        section "Process";
        /// Random seed, the first word of every random key.
        pub seed: u64 = 42 => SEED,
        /// Fix the order of sums in libtorch operations and attention, and choose GEMM algorithms without timing; on a GPU the backward of attention
        /// then takes twice as long.
        pub full_determinism: bool = false,
        /// Keys for how ranks are watched and restarted.
        #[serde(flatten)]
        pub supervision: SupervisionConfig,
        /// Injected fault for tests, `rank:step:phase:kind` (`step+`: also in later steps).
        #[serde(skip_serializing_if = "Option::is_none")]
        pub fault: Option<String> = None,
    }
}
