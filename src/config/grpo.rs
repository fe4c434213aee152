//! The keys of a GRPO run.

use super::*;

impl Config {
    /// Whether the KL term has a model of its own: adapters have their frozen base, alone or beneath the initial adapters.
    pub fn has_reference(&self) -> bool {
        self.beta > 0.0 && self.lora.r.is_none()
    }

    /// Whether the KL term has a frozen copy of the adapters that a run starts from, if it starts from any.
    pub fn keeps_initial_adapters(&self) -> bool {
        self.beta > 0.0 && self.lora.r.is_some() && self.reference == ReferenceModel::Initial
    }

    /// Whether the engine keeps its memory, and keys and values of unfinished groups in it, while a step trains.
    pub fn keeps_kv_cache(&self) -> bool {
        self.carried_kv == CarriedKv::Keep
    }

    /// Every key in declaration order.
    pub fn keys() -> &'static [String] {
        static KEYS: OnceLock<Vec<String>> = OnceLock::new();
        KEYS.get_or_init(field::names::<Self>)
    }
}

keys! {
    /// A validated run. Every field is a configuration key; nested structs are tables (`zero.stage`).
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
        pub model: ModelConfig,
        /// Rows and prompts.
        #[serde(flatten)]
        pub data: DataConfig,
        /// Where the run writes, and what it goes on from.
        #[serde(flatten)]
        pub output: OutputConfig,
        /// Longest prompt in tokens; longer ones are counted and left out. `none` leaves what the context allows. In either
        /// case a prompt is left out that with `max_completion_length` tokens more is longer than the context.
        pub max_prompt_length: Option<usize> = None => COUNT,
        /// Shuffle training rows each epoch, by a counter-based key.
        pub shuffle_dataset: bool = true,
        /// Leave out the rows at the end of an epoch that make no whole generation batch; `false` begins a batch with them that
        /// the next epoch fills.
        pub dataloader_drop_last: bool = true,

        section "Which ranks do what";
        /// Every GPU does both halves of a step in turn, or one of them.
        pub mode: Mode = Mode::Colocated,
        /// How the world is divided where `mode` is `split`.
        pub split: SplitConfig,

        section "Batch";
        /// Completions per prompt.
        pub num_generations: usize = 8 => at_least(2.0).because("advantages are relative to the group"),
        /// Completions per GPU, whatever it does, in one slice of the generation batch.
        pub per_device_train_batch_size: usize = 8 => COUNT,
        /// Slices per optimizer update.
        pub gradient_accumulation_steps: usize = 1 => COUNT,
        /// Slices per generation batch; `none` is `gradient_accumulation_steps`.
        pub steps_per_generation: Option<usize> = None => COUNT,
        /// Completions per generation over all ranks; `none` is
        /// `per_device_train_batch_size * world_size * steps_per_generation`.
        pub generation_batch_size: Option<usize> = None => COUNT,
        /// Passes over each generation batch.
        pub num_iterations: usize = 1 => COUNT,
        /// Token budget of one forward and backward on one rank, or on the ranks that share micro-batches (a longer sequence is a
        /// micro-batch of its own).
        pub max_tokens_per_micro_batch: usize = 16384 => COUNT,
        /// Ranks that share each micro-batch: every one has an equal part of its tokens and, where tokens see one another, some of the
        /// heads (Ulysses, arXiv 2309.14509). It divides the ranks that train, the ranks of a node, and the query heads of every layer.
        /// `auto` is the least with which the plan fits.
        pub sequence_parallel_size: AutoOr<usize> = AutoOr::Given(1) => COUNT,
        /// Run the prompt of a group once for all its completions in training; off where the model has a sliding window.
        pub share_prompts: bool = true,

        section "Sampling";
        /// Longest completion in tokens; the context, or `max_model_length`, must hold the prompt beside it.
        pub max_completion_length: usize = 512 => COUNT,
        /// Longest sequence the engine holds; `none` is the model's context.
        pub max_model_length: Option<usize> = None => COUNT,
        /// Softmax temperature of the sampler and of the trainer's log-probabilities, at least 0.000001.
        pub temperature: f32 = 1.0 => above(0.0).because("greedy samples of a group are all equal"),
        /// Nucleus mass; 1 is off.
        pub top_p: f32 = 1.0 => ABOVE_ZERO,
        /// Highest logits kept; 0 is off.
        pub top_k: usize = 0,
        /// Least relative probability.
        pub min_p: Option<f32> = None => from_to(0.0, 1.0),
        /// 1 is off; at least 0.000001 and at most 1000000.
        pub repetition_penalty: f32 = 1.0 => above(0.0),
        /// Strings that end a completion.
        pub stop: Vec<String> = Vec::new(),
        /// Ranks that share one engine, or each stage of its layers.
        pub tensor_parallel_size: usize = 1 => COUNT,
        /// Stages of layers of one engine, each on `tensor_parallel_size` ranks that hold its layers alone: for numbers of ranks that
        /// `tensor_parallel_size` cannot divide a model by, and for models that it would divide too small. Each stage computes
        /// another part of the sequences, and all are as fast as the slowest. With `zero.stage` 3 or `mode` split, as elsewhere every rank
        /// holds all weights and replicas of an engine generate more. On GPUs without `strict`, and not of a model with experts or gated delta nets so far.
        pub pipeline_parallel_size: usize = 1 => COUNT,
        /// Layers of each stage, such as `"10,10,8"`; `none` cuts where the slowest stage is fastest, the head's time counted.
        pub pipeline_partition: Option<PipelinePartition> = None,
        /// The ranks of one engine each have some experts whole, of a model with experts; else a part of every expert.
        pub enable_expert_parallel: bool = false,
        /// Share that the KV cache may take of the memory that is left during rollout, with `carried_kv = keep` of what is left
        /// beside training, too, and on a CPU of half of that; where `kv_cache_bytes` is `none`.
        pub gpu_memory_utilization: f64 = 0.9 => ABOVE_ZERO,
        /// Size of the KV cache per rank in bytes; `none` is decided by the plan.
        pub kv_cache_bytes: Option<usize> = None => at_least(1.0),
        /// Tokens per KV block.
        pub kv_block_size: usize = 16 => from_to(1.0, 1024.0),
        /// Most sequences decoded at once per engine.
        pub max_num_seqs: usize = 256 => COUNT,
        /// Most prompt tokens prefilled in one engine step.
        pub max_num_batched_tokens: usize = 8192 => COUNT,
        /// Completions that do not depend, to the last bit, on the order of prompts, on what is decoded beside them or on
        /// preemption; slower. On a GPU with `tensor_parallel_size` 1.
        pub strict: bool = false,
        /// The trainer gives a sampled token the log-probability that the sampler gave it, bit for bit:
        /// `sampling/sampling_logp_difference/max` is 0 at every step, and a run in which it is not ends with an error. The
        /// sampler's log-probabilities are then the old ones, and `importance_sampling_correction` does nothing. On a GPU `strict` goes with it; slower. [exact.md](exact.md)
        pub exact: bool = false,
        /// The precision in which the engine multiplies by the weights of blocks. `fp8` rounds them to e4m3 at every wake, into a copy of
        /// half their size, and each token's activations as they come; norms, embedding and head stay as they are, and so does training.
        /// Sampled log-probabilities then differ more from the trainer's, which `importance_sampling_correction` makes up for. On a CPU
        /// its rounding is simulated; a GPU has to be an H100 or H200.
        pub rollout_quantization: RolloutQuantization = RolloutQuantization::None,
        /// Type of keys and values in the engine's cache; `auto` is `dtype`. `fp8` is e4m3 with a scale for each token and head: 1.94 times
        /// the tokens of bfloat16 for heads of 128, and half the bytes that attention reads. `importance_sampling_correction` makes up for
        /// its rounding. On a GPU with `dtype` bfloat16 and compute capability 8.9 or later.
        pub kv_cache_dtype: KvCacheDtype = KvCacheDtype::Auto,
        /// Type in which the engine stores the states of gated delta nets between steps; they are computed in float32. `bfloat16` rounds
        /// them to nearest after every step, which halves their memory and the bytes that a decode step moves for them.
        /// `importance_sampling_correction` makes up for its rounding.
        pub mamba_ssm_cache_dtype: StateDtype = StateDtype::Float32,
        /// Draft tokens, which the engine checks by drawing: completions are those of a run without them, in fewer steps where drafts are
        /// right. `ngram` drafts what followed the longest end of a completion that occurred before, in it, in its prompt, and in other and
        /// earlier completions of that; `auto` does so as far as the measured times of steps say that it pays. `mtp` is the draft
        /// head of Qwen3.5, Qwen3.6 and Qwen3-Next (`mtp.*` in their files), on CPUs, which trains beside the model.
        /// [speculation.md](speculation.md)
        pub speculation: Speculation = Speculation::None,
        /// Most draft tokens of a completion in one step.
        pub num_speculative_tokens: usize = 7 => from_to(1.0, 64.0),
        /// Share of groups that a step begins beyond those that it takes, the first complete ones. What is sampled of the
        /// others is dropped, which favours short completions, unless `partial_rollout` is on.
        pub oversample: f64 = 0.0 => from_to(0.0, 16.0),
        /// Groups that are not complete when a step ends go on in the next one, with its weights.
        pub partial_rollout: bool = false,
        /// Keys and values of what has been sampled of such groups: computed again with the newest weights, or kept as those
        /// computed them that sampled it (PipelineRL, arXiv 2509.19128). `keep` takes the KV cache's memory while training, too;
        /// a resumed run computes them again.
        pub carried_kv: CarriedKv = CarriedKv::Recompute,

        /// The treatment of a group whose completions teach nothing, as their rewards are all equal or their mean is outside of
        /// `dynamic_sampling_range`. `none`: it is in the batch, with advantages of 0. `filter`: it is left out of the update.
        /// `replace`: the next prompt is sampled in its place while others are still decoded; the batch is the first groups that
        /// teach something, in the order of the data.
        pub dynamic_sampling: DynamicSampling = DynamicSampling::None,
        /// Most groups that a step with `dynamic_sampling = replace` samples, in generation batches; a data set with fewer rows
        /// ends it earlier. The step then trains on the groups it has; where there is none, the run ends.
        pub dynamic_sampling_max_gen_batches: usize = 10 => COUNT,
        /// Bounds of a group's mean reward, both allowed; `none` asks only that its rewards differ.
        pub dynamic_sampling_range: Option<[f64; 2]> = None,

        /// Rows that teach little come less often.
        pub curriculum: CurriculumConfig,

        section "Tools";
        /// Functions that the model may call.
        #[serde(flatten)]
        pub tools: ToolsConfig,

        section "Objective";
        /// Weight of the KL term; 0 loads no reference model.
        pub beta: f64 = 0.0 => at_least(0.0),
        /// The model that the KL term compares adapters with: `initial` is a frozen copy of those that `model_name_or_path` names
        /// (the base, where they are new), `base` is the model without them. Where all weights train it is the initial model.
        pub reference: ReferenceModel = ReferenceModel::Initial,
        /// Lower clip range.
        pub epsilon: f64 = 0.2 => BELOW_ONE,
        /// Upper clip range; `none` is `epsilon`.
        pub epsilon_high: Option<f64> = None => at_least(0.0),
        /// Upper bound of the ratio for negative advantages (two-sided clipping).
        pub delta: Option<f64> = None => above(1.0),
        /// How token losses are summed.
        pub loss_type: LossType = LossType::Dapo,
        /// Level of the policy ratio.
        pub importance_sampling_level: ImportanceSamplingLevel = ImportanceSamplingLevel::Token,
        /// Divisor of the advantages.
        pub scale_rewards: ScaleRewards = ScaleRewards::Group,
        /// Leave completions cut by a length limit out of the loss.
        pub mask_truncated_completions: bool = false,
        /// Correct for the difference between sampler and trainer.
        pub importance_sampling_correction: bool = true,
        /// Level and kind of that correction.
        pub importance_sampling_mode: ImportanceSamplingMode = ImportanceSamplingMode::SequenceMask,
        /// Upper bound of the correction.
        pub importance_sampling_clip_max: f64 = 3.0 => above(0.0),
        /// Multiply the KL term by the differentiable ratio.
        pub use_bias_correction_kl: bool = true,
        /// Losses, estimators and advantages beside the defaults.
        #[serde(flatten)]
        pub objective: ObjectiveConfig,
        /// A teacher that scores the samples.
        #[serde(flatten)]
        pub distillation: DistillationConfig,

        section "Rewards";
        /// The rewards, in order: built-in ones, names of `rewards.*`, and Python functions as `file.py:function`,
        /// `module:function` or `module.function`, which go by the function's name.
        pub reward_funcs: Vec<String>,
        /// One weight per reward; empty is 1 each.
        pub reward_weights: Vec<f64> = Vec::new(),
        /// Settings of the built-in rewards.
        pub reward: RewardConfig,
        /// Rewards in processes of their own, by name.
        pub rewards: ProcessRewards,

        section "Optimizer";
        /// Peak learning rate.
        pub learning_rate: f64 = 1e-6 => above(0.0),
        /// The optimizer and its schedule.
        #[serde(flatten)]
        pub optimizer: OptimizerConfig,
        /// The activations that backward recomputes; `auto` is the least that fits.
        pub gradient_checkpointing: AutoOr<GradientCheckpointing> = AutoOr::Auto,
        /// Kept inputs of blocks, and with `keep_attention` attention's outputs, wait for backward in pinned host memory: they leave beside the
        /// forward of the next block and come back beside the backward of the one above.
        pub activation_offload: bool = false,
        /// Sharding.
        pub zero: ZeroConfig,
        /// Where state lives while it is not used.
        pub residency: ResidencyConfig,
        /// Low-rank adapters in place of the weights.
        pub lora: LoraConfig,
        /// How the frozen base of a LoRA run is stored.
        pub quantization: Quantization = Quantization::None,

        section "Output";
        /// Steps between metric lines.
        pub logging_steps: usize = 1 => COUNT,
        /// Checkpoints.
        #[serde(flatten)]
        pub saving: SavingConfig,
        /// Steps between evaluations; `none` evaluates before and after training only.
        pub eval_steps: Option<usize> = None => COUNT,
        /// Where metrics go.
        #[serde(flatten)]
        pub report: ReportConfig,
        /// The best evaluation, and early stopping.
        #[serde(flatten)]
        pub best: BestConfig,
        /// Samples per held-out problem.
        pub eval_num_generations: usize = 1 => COUNT,
        /// Softmax temperature of evaluations; 0 is greedy, `none` is `temperature`.
        pub eval_temperature: Option<f32> = None => at_least(0.0),
        /// Rewards, by name, that all give 1 to a held-out sample that counts as solved in pass@k. Empty: those
        /// of the built-in rewards that say whether an answer is right (`numeric_answer`, `exact_answer`, `math`, `accuracy`, TRL's
        /// `accuracy_reward` and `reasoning_accuracy_reward`, `code`, `binary_code`) that are among the rewards, or all rewards
        /// where none of them is.
        pub eval_solved_by: Vec<String> = Vec::new(),
        /// Write every step's completions.
        pub log_completions: bool = false,
        /// Write a time-line of every rank's phases to `trace/` of the output folder, in Chrome's trace format.
        pub trace: bool = false,

        section "Process";
        /// First word of every random key.
        pub seed: u64 = 42 => SEED,
        /// Sums of libtorch's operations and of attention in one order in every run, and products by algorithms that no clock
        /// chose; on a GPU attention's backward then takes twice as long.
        pub full_determinism: bool = false,
        /// How ranks are watched and started again.
        #[serde(flatten)]
        pub supervision: SupervisionConfig,
        /// Injected fault, `rank:step:phase:kind` (`step+`: in later steps too); for tests.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub fault: Option<String> = None,
    }
}
