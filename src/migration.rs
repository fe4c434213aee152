//! Keys and values of TRL, transformers and verl, and their equivalents here.

mod harmless;
mod values;

pub(crate) use harmless::is_harmless_at;
#[cfg(test)]
pub(crate) use harmless::{HARMLESS, is_harmless};
pub(crate) use values::{value, value_advice, word};

/// Advice on the equivalent here of `key`, if it is a key of another trainer.
pub(crate) fn advice(key: &str) -> Option<&'static str> {
    let key = bare(key);
    let listed = |fits: &dyn Fn(&str) -> bool| KEYS.iter().find(|(names, _)| names.iter().any(|name| fits(name)));
    let row = listed(&|name| name == key);
    let renamed = RENAMED.iter().find(|(theirs, _)| is_meant(theirs, key)).map(|(_, ours)| *ours);
    let advice = row.map(|(_, advice)| *advice).or(renamed);
    advice.or_else(|| listed(&|name| is_meant(name, key)).map(|(_, advice)| *advice))
}

/// The key here that accepts the same values as `key` of another trainer.
pub(crate) fn renamed(key: &str) -> Option<String> {
    let key = bare(key);
    if let Some(variable) = key.strip_prefix("data.apply_chat_template_kwargs.") {
        return Some(format!("chat_template_kwargs.{variable}"));
    }
    let is_of_reward = key.starts_with("cosine_") || key.starts_with("repetition_");
    if is_of_reward && advice(key).is_some_and(|advice| advice.contains("table reward")) || REWARD.contains(&key) {
        return Some(format!("reward.{key}"));
    }
    RENAMED.iter().find(|(theirs, _)| *theirs == key).map(|(_, ours)| (*ours).to_owned())
}

/// A key without Hydra's `+` prefix and without verl's table `actor_rollout_ref`.
pub(crate) fn bare(key: &str) -> &str {
    let key = key.trim_start_matches('+');
    key.strip_prefix("actor_rollout_ref.").unwrap_or(key)
}

/// Whether `name` equals the key or a table that contains it, or, with a final `*`, is a prefix of it.
fn is_meant(name: &str, key: &str) -> bool {
    match name.strip_suffix('*') {
        Some(start) => key.starts_with(start),
        None => key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')),
    }
}

/// Arguments of open-r1's rewards that are keys of the table `reward` here.
const REWARD: &[&str] = &["max_completion_len", "soft_punish_cache", "code_language"];

/// Keys of other trainers and their names here, where values have the same meaning.
pub(crate) const RENAMED: &[(&str, &str)] = &[
    ("vllm_tensor_parallel_size", "tensor_parallel_size"),
    ("vllm_max_model_length", "max_model_length"),
    ("vllm_importance_sampling_cap", "importance_sampling_clip_max"),
    ("vllm_importance_sampling_clip_max", "importance_sampling_clip_max"),
    ("vllm_importance_sampling_mode", "importance_sampling_mode"),
    ("vllm_importance_sampling_correction", "importance_sampling_correction"),
    ("vllm_importance_sampling_clip_min", "importance_sampling_clip_min"),
    ("num_generations_eval", "eval_num_generations"),
    ("activation_offloading", "activation_offload"),
    ("model.enable_activation_offload", "activation_offload"),
    ("dataset_configs", "dataset_config"),
    ("data.train_files", "train_file"),
    ("data.val_files", "eval_file"),
    ("data.max_prompt_length", "max_prompt_length"),
    ("data.max_response_length", "max_completion_length"),
    ("data.shuffle", "shuffle_dataset"),
    ("data.prompt_key", "dataset_prompt_column"),
    ("data.train_max_samples", "max_train_samples"),
    ("data.val_max_samples", "max_eval_samples"),
    ("model.path", "model_name_or_path"),
    ("actor.optim.lr", "learning_rate"),
    ("actor.optim.lr_warmup_steps", "warmup_steps"),
    ("actor.optim.lr_warmup_steps_ratio", "warmup_ratio"),
    ("actor.optim.weight_decay", "weight_decay"),
    ("actor.optim.warmup_style", "lr_scheduler_type"),
    ("actor.optim.lr_scheduler_type", "lr_scheduler_type"),
    ("actor.optim.total_training_steps", "max_steps"),
    ("actor.ppo_epochs", "num_iterations"),
    ("actor.clip_ratio", "epsilon"),
    ("actor.clip_ratio_low", "epsilon"),
    ("actor.clip_ratio_high", "epsilon_high"),
    ("actor.clip_ratio_c", "delta"),
    ("actor.grad_clip", "max_grad_norm"),
    ("actor.ppo_max_token_len_per_gpu", "max_tokens_per_micro_batch"),
    ("rollout.n", "num_generations"),
    ("rollout.tensor_model_parallel_size", "tensor_parallel_size"),
    ("rollout.pipeline_model_parallel_size", "pipeline_parallel_size"),
    ("rollout.quantization", "rollout_quantization"),
    ("rollout.kv_cache_dtype", "kv_cache_dtype"),
    ("rollout.engine_kwargs.vllm.quantization", "rollout_quantization"),
    ("rollout.engine_kwargs.vllm.kv_cache_dtype", "kv_cache_dtype"),
    ("rollout.engine_kwargs.vllm.mamba_ssm_cache_dtype", "mamba_ssm_cache_dtype"),
    ("rollout.engine_kwargs.vllm.enable_expert_parallel", "enable_expert_parallel"),
    ("actor.router_replay.mode", "router_replay"),
    ("rollout.temperature", "temperature"),
    ("rollout.top_p", "top_p"),
    ("rollout.top_k", "top_k"),
    ("rollout.max_num_seqs", "max_num_seqs"),
    ("rollout.max_num_batched_tokens", "max_num_batched_tokens"),
    ("rollout.max_model_len", "max_model_length"),
    ("rollout.val_kwargs.n", "eval_num_generations"),
    ("rollout.val_kwargs.temperature", "eval_temperature"),
    ("trainer.total_epochs", "num_train_epochs"),
    ("trainer.total_training_steps", "max_steps"),
    ("trainer.save_freq", "save_steps"),
    ("trainer.test_freq", "eval_steps"),
    ("trainer.default_local_dir", "output_dir"),
    ("trainer.experiment_name", "run_name"),
    ("trainer.max_actor_ckpt_to_keep", "save_total_limit"),
];

/// The advice for keys without an equivalent here.
pub(crate) const NONE: &str = "no equivalent; colo-grpo config prints all keys";

/// Names of keys or tables of other trainers (`start*`: all with this prefix; verl's without `actor_rollout_ref.`), and advice. An exact name
/// takes precedence over [`RENAMED`], which takes precedence over a table or prefix. Among several matches, the first row is used.
pub(crate) const KEYS: &[(&[&str], &str)] = &[
    // ---- what changes the result and has no counterpart ----
    (
        &["rollout.multi_turn.*"],
        "tools, max_tool_calling_iterations, max_tool_response_length and tool_call_parser, for tools in Python",
    ),
    // ---- open-r1 ----
    (
        &[
            "cosine_min_value_wrong",
            "cosine_max_value_wrong",
            "cosine_min_value_correct",
            "cosine_max_value_correct",
            "cosine_max_len",
            "repetition_n_grams",
            "repetition_max_penalty",
            "max_completion_len",
            "soft_punish_cache",
            "code_language",
        ],
        "the key of that name in the table reward",
    ),
    // ---- TRL and transformers ----
    (&["optim_args"], "adam_beta1, adam_beta2, adam_epsilon and muon"),
    (
        &["vllm_gpu_memory_utilization"],
        "gpu_memory_utilization, best left at 0.9: the KV cache's memory is free while training",
    ),
    (&["max_seq_length"], "max_model_length"),
    (
        &["teacher_model_kind", "teacher_update_rate", "teacher_sync_steps"],
        "the teacher of self_distillation has the policy's own weights, as with TRL's teacher_model_kind = live",
    ),
    (
        &["generate_from_teacher", "use_teacher_server"],
        "the policy samples, and scores as its own teacher: self_distillation",
    ),
    (&["max_staleness"], "split.async_steps, with mode = split"),
    (&["vllm_enable_sleep_mode"], "the engine always sleeps while training"),
    (
        &["normalize_advantages", "rloo_k"],
        "RLOO is advantage_estimator = rloo; scale_rewards = batch normalizes its advantages, none leaves them, and \
         num_generations is its k",
    ),
    (&["vllm_structured_outputs_regex", "vllm_guided_decoding_regex"], NONE),
    (&["use_vllm", "vllm_*"], "the engine is built in; mode = colocated or split"),
    (&["bf16", "fp16", "tf32", "torch_dtype"], "dtype = auto, float32 or bfloat16"),
    (
        &["logging_strategy", "logging_dir", "logging_first_step", "log_level"],
        "metrics go to output_dir as JSONL and TensorBoard events",
    ),
    (&["wandb_*"], "report_to = wandb, with WANDB_PROJECT and WANDB_MODE in the environment"),
    (&["save_strategy", "save_only_model"], "save_steps, or none"),
    (
        &["eval_strategy", "evaluation_strategy", "do_eval", "eval_on_start"],
        "eval_steps, with eval_file or dataset_test_split",
    ),
    (
        &["num_completions_to_print", "log_unique_prompts"],
        "log_completions, which writes all of them to output_dir; the report shows the first and the last",
    ),
    (
        &[
            "lr_scheduler_kwargs.min_lr",
            "lr_scheduler_kwargs.num_cycles",
            "lr_scheduler_kwargs.power",
            "lr_scheduler_kwargs.lr_end",
        ],
        "lr_scheduler_kwargs.min_lr_rate, with lr_scheduler_type = cosine_with_min_lr",
    ),
    (&["deepspeed", "fsdp", "fsdp_config", "ds3_gather_for_generation"], "zero.stage and residency.optimizer"),
    (
        &["use_peft", "use_lora", "peft_config", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"],
        "lora.r and the other keys of lora",
    ),
    (&["load_in_4bit", "use_bnb_nested_quant", "bnb_4bit_quant_type"], "quantization = nf4, with lora.r"),
    (
        &["datasets", "dataset_mixture"],
        "train_file = [..], in which hf://datasets/USER/NAME/PATTERN are files of the Hub; train_file_weights weighs them",
    ),
    (&["dataset_streaming", "dataset_num_proc", "dataset_kwargs"], "rows are read as a whole"),
    (&["hf_token", "hub_token", "use_auth_token", "token"], "HF_TOKEN in the environment, where no file keeps it"),
    (&["attn_implementation", "use_liger_kernel", "use_liger_loss", "torch_compile"], "the kernels are built in"),
    (&["gradient_checkpointing_kwargs"], "gradient_checkpointing = auto, none, selective or full"),
    (
        &["per_device_eval_batch_size", "dataloader_num_workers", "remove_unused_columns", "disable_dropout"],
        "there is nothing to set",
    ),
    (
        &["generation_kwargs.temperature"],
        "temperature, which is the trainer's, too: it scales the log-probabilities of both",
    ),
    (&["generation_kwargs.max_tokens", "generation_kwargs.max_new_tokens"], "max_completion_length"),
    (&["generation_kwargs"], "stop, min_p, top_k and other keys of sampling"),
    (&["chat_template_path", "chat_template"], "the chat template of the model's folder"),
    (
        &["overwrite_output_dir"],
        "a run cannot write to the output_dir of an earlier one; set resume_from_checkpoint or another output_dir",
    ),
    (&["model_init_kwargs", "trust_remote_code"], "weights are safetensors; no code of a model's folder runs"),
    (
        &["push_to_hub", "hub_*"],
        "the model is output_dir/final, which is uploaded with: hf upload USER/NAME output_dir/final",
    ),
    // ---- verl ----
    (
        &["data.train_batch_size", "data.gen_batch_size"],
        "generation_batch_size, in completions: prompts x num_generations",
    ),
    (
        &["data.filter_overlong_prompts", "data.truncation"],
        "prompts longer than max_prompt_length are left out, never truncated",
    ),
    (&["data.apply_chat_template_kwargs"], "chat_template_kwargs"),
    (&["data.reward_fn_key", "data.return_raw_chat"], "rows are verl's as they are"),
    (&["data.*"], NONE),
    (&["model.enable_gradient_checkpointing"], "gradient_checkpointing"),
    (&["model.lora_rank", "model.lora_alpha", "model.target_modules"], "lora.r and the other keys of lora"),
    (&["model.use_remove_padding"], "nothing is padded"),
    (&["model.*"], NONE),
    (&["actor.optim.betas"], "adam_beta1 and adam_beta2"),
    (&["actor.optim.*"], NONE),
    (
        &["actor.ppo_mini_batch_size"],
        "steps_per_generation and gradient_accumulation_steps, which make updates of a generation batch",
    ),
    (&["algorithm.use_kl_in_reward"], "use_kl_in_reward, with beta"),
    (&["actor.use_kl_loss", "actor.kl_loss_coef", "algorithm.kl_ctrl.*"], "beta"),
    (
        &["actor.kl_loss_type", "algorithm.kl_penalty"],
        "kl_estimator = k1, k2 or k3, which verl calls kl, mse and low_var_kl, too",
    ),
    (&["actor.loss_agg_mode"], "loss_type"),
    (&["actor.entropy_coeff"], "entropy_coef"),
    (&["actor.fsdp_config.*", "ref.fsdp_config.*"], "zero.stage, residency.optimizer and residency.reference"),
    (
        &[
            "actor.ppo_micro_batch_size*",
            "actor.ppo_max_token_len_per_gpu",
            "actor.use_dynamic_bsz",
            "ref.log_prob_*",
            "rollout.log_prob_*",
        ],
        "max_tokens_per_micro_batch, in tokens of a rank",
    ),
    (
        &["actor.ulysses_sequence_parallel_size", "ref.ulysses_sequence_parallel_size"],
        "sequence_parallel_size; max_tokens_per_micro_batch then counts the tokens of all ranks that share a micro-batch",
    ),
    (&["actor.strategy", "ref.strategy", "critic.strategy"], "the trainer is built in; zero.stage is how it shards"),
    (&["actor.use_torch_compile", "ref.use_torch_compile"], "the kernels are built in"),
    (&["actor.megatron.override_transformer_config.fp8"], "mixed_precision = fp8"),
    (
        &["actor.megatron.*", "ref.megatron.*"],
        "zero.stage, residency.optimizer and residency.reference: trainers are sharded by ZeRO alone",
    ),
    (&["actor.router_replay.*"], "router_replay = R3 or disabled"),
    (&["actor.*", "ref.*"], NONE),
    (&["rollout.gpu_memory_utilization"], "gpu_memory_utilization"),
    (
        &["rollout.val_kwargs.*"],
        "evaluations sample as training does (top_p, top_k), at eval_temperature, eval_num_generations completions a prompt",
    ),
    (&["rollout.do_sample"], "completions are always sampled, at a temperature above 0"),
    (&["rollout.prompt_length"], "max_prompt_length"),
    (&["rollout.response_length"], "max_completion_length"),
    (&["rollout.dtype"], "dtype = auto, float32 or bfloat16"),
    (
        &["rollout.name", "rollout.mode", "rollout.engine_kwargs.*", "rollout.load_format", "rollout.enforce_eager"],
        "the engine is built in",
    ),
    (
        &["rollout.expert_parallel_size"],
        "enable_expert_parallel = true, by which each of an engine's tensor_parallel_size ranks has whole experts",
    ),
    (&["rollout.enable_rollout_routing_replay"], "router_replay = R3"),
    (&["rollout.data_parallel_size"], "--nproc: ranks beyond those of one engine are further engines"),
    (&["rollout.free_cache_engine"], "the engine always sleeps while training"),
    (&["rollout.*"], NONE),
    (&["algorithm.filter_groups.enable"], "dynamic_sampling = replace, or none"),
    (&["algorithm.filter_groups.max_num_gen_batches"], "dynamic_sampling_max_gen_batches"),
    (&["algorithm.filter_groups.metric"], "dynamic_sampling compares the weighted sum of the rewards"),
    (&["algorithm.filter_groups"], "dynamic_sampling and dynamic_sampling_max_gen_batches"),
    (&["algorithm.norm_adv_by_std_in_grpo"], "scale_rewards"),
    (
        &["algorithm.adv_estimator"],
        "advantage_estimator = grpo or rloo; gdpo is multi_objective_aggregation = normalize_then_sum; there is no critic",
    ),
    (&["algorithm.*"], NONE),
    (
        &["reward_model.overlong_buffer.*", "reward_model.reward_kwargs.overlong_buffer_cfg.*"],
        "the reward soft_overlong_punishment, with reward.max_completion_len and reward.soft_punish_cache",
    ),
    (&["reward_model.reward_manager"], "reward_funcs"),
    (&["critic.*", "reward_model.*"], "GRPO has no critic; reward_funcs are functions and commands"),
    (&["custom_reward_function.*", "reward.custom_reward_function.*"], "reward_funcs = [\"file.py:function\"]"),
    (
        &["hybrid_engine", "nccl_timeout", "model_engine", "ray_kwargs.*", "ray_init.*", "global_profiler.*"],
        "processes and engines are the program's own; trace = true writes a time-line",
    ),
    (&["trainer.n_gpus_per_node"], "--nproc"),
    (&["trainer.nnodes"], "--nnodes"),
    (&["trainer.resume_mode", "trainer.resume_from_path"], "resume_from_checkpoint"),
    (&["trainer.logger", "trainer.project_name", "trainer.experiment_name"], "report_to and run_name"),
    (&["trainer.val_before_train"], "eval_file, on which a run is evaluated before and after training in any case"),
    (&["trainer.critic_warmup"], "GRPO has no critic"),
    (&["trainer.*"], NONE),
];
