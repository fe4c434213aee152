//! Keys and values that users of TRL, transformers and verl bring along, and what takes their place here.

use serde_json::Value;

/// What takes the place of `key` here, if it is another program's.
pub(super) fn advice(key: &str) -> Option<&'static str> {
    let key = key.trim_start_matches('+'); // Hydra's sign for a key that its file lacks
    let key = key.strip_prefix("actor_rollout_ref.").unwrap_or(key);
    let is_meant = |name: &str| match name.strip_suffix('*') {
        Some(start) => key.starts_with(start),
        None => key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')),
    };
    KEYS.iter().find(|(names, _)| names.iter().any(|name| is_meant(name))).map(|(_, advice)| *advice)
}

/// What is written here for `value`, where TRL's differs and its meaning is clear.
pub(super) fn value(key: &str, value: &Value) -> Option<Value> {
    let json = |text: &str| serde_json::from_str::<Value>(text).expect("the table holds JSON");
    VALUES.iter().find(|(known, theirs, _)| *known == key && json(theirs) == *value).map(|(.., ours)| json(ours))
}

/// What takes the place of a `value` that `key` has in other programs.
pub(super) fn value_advice(key: &str, value: &Value) -> Option<&'static str> {
    let word = value.as_str()?;
    VALUE_ADVICE.iter().find(|(known, theirs, _)| (*known, *theirs) == (key, word)).map(|(.., advice)| *advice)
}

/// Keys, values of other programs and what is written here.
const VALUE_ADVICE: &[(&str, &str, &str)] = &[
    ("loss_type", "gspo", "GSPO is importance_sampling_level = \"sequence\" with loss_type = \"grpo\""),
    ("loss_type", "token-mean", "verl's token-mean is loss_type = \"dapo\""),
    ("loss_type", "seq-mean-token-mean", "verl's seq-mean-token-mean is loss_type = \"grpo\""),
    ("lr_scheduler_type", "cosine_with_min_lr", "cosine falls to 0"),
    ("quantization", "bitsandbytes", "bitsandbytes' 4-bit weights are quantization = \"nf4\""),
];

/// Keys, theirs and ours as JSON.
const VALUES: &[(&str, &str, &str)] = &[
    ("max_steps", "-1", r#""none""#),
    ("top_k", "-1", "0"),
    ("save_steps", "-1", r#""none""#),
    ("eval_steps", "-1", r#""none""#),
    ("resume_from_checkpoint", "true", r#""latest""#),
    ("resume_from_checkpoint", "false", r#""none""#),
    ("gradient_checkpointing", "true", r#""full""#),
    ("gradient_checkpointing", "false", r#""none""#),
    ("scale_rewards", "true", r#""group""#),
    ("scale_rewards", "false", r#""none""#),
    ("lr_scheduler_type", r#""constant_with_warmup""#, r#""constant""#),
];

/// What is said of keys that nothing here answers to.
const NONE: &str = "nothing takes its place; colo-grpo config prints every key there is";
const WARMUP: &str = "warmup_steps, which is the ratio x updates in all: max_steps or, without it, num_train_epochs x rows x \
                      num_generations / generation_batch_size x updates of each batch (steps_per_generation / \
                      gradient_accumulation_steps x num_iterations)";

/// Names, of tables too (`start*`: all that begin so; verl's without `actor_rollout_ref.`) and what is written here; the first
/// row that fits.
const KEYS: &[(&[&str], &str)] = &[
    // ---- what changes the result and has no counterpart ----
    (
        &["top_entropy_quantile", "entropy_coef", "actor.entropy_coeff"],
        "every token takes part, without an entropy term",
    ),
    (&["sync_ref_model", "ref_model_*"], "the reference model is that of the start"),
    (&["multi_objective_aggregation"], "rewards are summed by reward_weights, then scaled"),
    (&["off_policy_mask_threshold"], "importance_sampling_mode and importance_sampling_clip_max"),
    (&["tools", "max_tool_calling_iterations", "rollout.multi_turn.*"], "a rollout is one turn"),
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
    (&["optim", "optim_args"], "the optimizer is AdamW"),
    (&["vllm_tensor_parallel_size"], "tensor_parallel_size"),
    (
        &["vllm_gpu_memory_utilization"],
        "gpu_memory_utilization, best left at 0.9: the KV cache's memory is free while training",
    ),
    (&["vllm_max_model_length", "max_seq_length"], "max_model_length"),
    (&["vllm_enable_sleep_mode"], "the engine always sleeps while training"),
    (&["vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"], "importance_sampling_clip_max"),
    (&["vllm_importance_sampling_mode"], "importance_sampling_mode"),
    (&["vllm_importance_sampling_correction"], "importance_sampling_correction"),
    (&["use_vllm", "vllm_*"], "the engine is built in; mode = colocated or split"),
    (&["bf16", "fp16", "tf32", "torch_dtype"], "dtype = auto, float32 or bfloat16"),
    (
        &["report_to", "logging_strategy", "logging_dir", "logging_first_step", "run_name", "log_level", "wandb_*"],
        "metrics go to output_dir as JSONL and TensorBoard events",
    ),
    (&["save_strategy", "save_only_model"], "save_steps, or none"),
    (
        &["eval_strategy", "evaluation_strategy", "do_eval", "eval_on_start"],
        "eval_steps, with eval_file or dataset_test_split",
    ),
    (&["num_generations_eval"], "eval_num_generations"),
    (
        &["num_completions_to_print", "log_unique_prompts"],
        "log_completions, which writes all of them to output_dir; the report shows the first and the last",
    ),
    (&["warmup_ratio", "actor.optim.lr_warmup_steps_ratio"], WARMUP),
    (&["lr_scheduler_kwargs"], "lr_scheduler_type = constant, linear or cosine, without further settings"),
    (&["deepspeed", "fsdp", "fsdp_config", "ds3_gather_for_generation"], "zero.stage and residency.optimizer"),
    (
        &["use_peft", "use_lora", "peft_config", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"],
        "lora.r and the other keys of lora",
    ),
    (&["load_in_4bit", "use_bnb_nested_quant", "bnb_4bit_quant_type"], "quantization = nf4, with lora.r"),
    (&["dataset_configs"], "dataset_config"),
    (
        &["datasets", "dataset_mixture"],
        "train_file = [..], in which hf://datasets/USER/NAME/PATTERN are files of the Hub; train_file_weights weighs them",
    ),
    (&["dataset_streaming", "dataset_num_proc", "dataset_kwargs"], "rows are read as a whole"),
    (&["hf_token", "hub_token", "use_auth_token", "token"], "HF_TOKEN in the environment, where no file keeps it"),
    (
        &["early_stopping_*", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"],
        "a run goes on to max_steps; eval_reward of every evaluation is in metrics.jsonl, and save_total_limit = none keeps every \
         checkpoint to choose from",
    ),
    (&["attn_implementation", "use_liger_kernel", "use_liger_loss", "torch_compile"], "the kernels are built in"),
    (&["gradient_checkpointing_kwargs"], "gradient_checkpointing = auto, none, selective or full"),
    (
        &["per_device_eval_batch_size", "dataloader_num_workers", "remove_unused_columns", "disable_dropout"],
        "there is nothing to set",
    ),
    (&["generation_kwargs"], "stop, min_p, top_k and other keys of sampling"),
    (&["chat_template_path", "chat_template"], "the chat template of the model's folder"),
    (
        &["overwrite_output_dir"],
        "a run beside an earlier one's checkpoints is refused; resume_from_checkpoint or another output_dir",
    ),
    (&["model_init_kwargs", "trust_remote_code"], "weights are safetensors; no code of a model's folder runs"),
    (
        &["push_to_hub", "hub_*"],
        "the model is output_dir/final, which is uploaded with: hf upload USER/NAME output_dir/final",
    ),
    // ---- verl ----
    (&["data.train_files"], "train_file"),
    (&["data.val_files"], "eval_file"),
    (&["data.max_prompt_length"], "max_prompt_length"),
    (&["data.max_response_length"], "max_completion_length"),
    (
        &["data.train_batch_size", "data.gen_batch_size"],
        "generation_batch_size, in completions: prompts x num_generations",
    ),
    (&["data.shuffle"], "shuffle_dataset"),
    (
        &["data.filter_overlong_prompts", "data.truncation"],
        "prompts longer than max_prompt_length are left out, never cut",
    ),
    (&["data.prompt_key"], "dataset_prompt_column"),
    (&["data.train_max_samples"], "max_train_samples"),
    (&["data.val_max_samples"], "max_eval_samples"),
    (&["data.apply_chat_template_kwargs"], "chat_template_kwargs"),
    (&["data.reward_fn_key", "data.return_raw_chat"], "rows are verl's as they are"),
    (&["data.*"], NONE),
    (&["model.path"], "model_name_or_path"),
    (&["model.enable_gradient_checkpointing"], "gradient_checkpointing"),
    (&["model.lora_rank", "model.lora_alpha", "model.target_modules"], "lora.r and the other keys of lora"),
    (&["model.use_remove_padding"], "nothing is padded"),
    (&["model.*"], NONE),
    (&["actor.optim.lr"], "learning_rate"),
    (&["actor.optim.lr_warmup_steps"], "warmup_steps"),
    (&["actor.optim.weight_decay"], "weight_decay"),
    (&["actor.optim.warmup_style", "actor.optim.lr_scheduler_type"], "lr_scheduler_type"),
    (&["actor.optim.betas"], "adam_beta1 and adam_beta2"),
    (&["actor.optim.total_training_steps"], "max_steps"),
    (&["actor.optim.*"], NONE),
    (
        &["actor.ppo_mini_batch_size"],
        "steps_per_generation and gradient_accumulation_steps, which make updates of a generation batch",
    ),
    (&["actor.ppo_epochs"], "num_iterations"),
    (&["actor.use_kl_loss", "actor.kl_loss_coef", "algorithm.kl_ctrl.*", "algorithm.use_kl_in_reward"], "beta"),
    (&["actor.clip_ratio", "actor.clip_ratio_low"], "epsilon"),
    (&["actor.clip_ratio_high"], "epsilon_high"),
    (&["actor.clip_ratio_c"], "delta"),
    (&["actor.kl_loss_type", "algorithm.kl_penalty"], "the KL term is k3, verl's low_var_kl"),
    (&["actor.loss_agg_mode"], "loss_type"),
    (&["actor.grad_clip"], "max_grad_norm"),
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
        "no sequence is split over ranks",
    ),
    (&["actor.strategy", "ref.strategy", "critic.strategy"], "the trainer is built in; zero.stage is how it shards"),
    (&["actor.use_torch_compile", "ref.use_torch_compile"], "the kernels are built in"),
    (&["actor.*", "ref.*"], NONE),
    (&["rollout.n"], "num_generations"),
    (&["rollout.tensor_model_parallel_size"], "tensor_parallel_size"),
    (&["rollout.temperature"], "temperature"),
    (&["rollout.top_p"], "top_p"),
    (&["rollout.top_k"], "top_k"),
    (&["rollout.gpu_memory_utilization"], "gpu_memory_utilization"),
    (&["rollout.max_num_seqs"], "max_num_seqs"),
    (&["rollout.max_num_batched_tokens"], "max_num_batched_tokens"),
    (&["rollout.val_kwargs.n"], "eval_num_generations"),
    (
        &["rollout.val_kwargs.*"],
        "evaluations sample as training does (temperature, top_p, top_k), eval_num_generations completions a prompt",
    ),
    (&["rollout.do_sample"], "completions are always sampled, at a temperature above 0"),
    (&["rollout.max_model_len"], "max_model_length"),
    (&["rollout.prompt_length"], "max_prompt_length"),
    (&["rollout.response_length"], "max_completion_length"),
    (&["rollout.dtype"], "dtype = auto, float32 or bfloat16"),
    (
        &["rollout.name", "rollout.mode", "rollout.engine_kwargs.*", "rollout.load_format", "rollout.enforce_eager"],
        "the engine is built in",
    ),
    (&["rollout.free_cache_engine"], "the engine always sleeps while training"),
    (&["rollout.*"], NONE),
    (&["algorithm.norm_adv_by_std_in_grpo"], "scale_rewards"),
    (&["algorithm.adv_estimator"], "advantages are GRPO's; scale_rewards and loss_type vary them"),
    (&["algorithm.*"], NONE),
    (&["critic.*", "reward_model.*"], "GRPO has no critic; reward_funcs are functions and commands"),
    (&["custom_reward_function.*", "reward.custom_reward_function.*"], "reward_funcs = [\"file.py:function\"]"),
    (&["trainer.n_gpus_per_node", "trainer.nnodes"], "--nproc"),
    (&["trainer.total_epochs"], "num_train_epochs"),
    (&["trainer.total_training_steps"], "max_steps"),
    (&["trainer.save_freq"], "save_steps"),
    (&["trainer.test_freq"], "eval_steps"),
    (&["trainer.default_local_dir"], "output_dir"),
    (&["trainer.resume_mode", "trainer.resume_from_path"], "resume_from_checkpoint"),
    (
        &["trainer.logger", "trainer.project_name", "trainer.experiment_name"],
        "metrics go to output_dir as JSONL and TensorBoard events",
    ),
    (&["trainer.val_before_train"], "eval_file, on which a run is evaluated before and after training in any case"),
    (&["trainer.critic_warmup"], "GRPO has no critic"),
    (&["trainer.max_actor_ckpt_to_keep"], "save_total_limit"),
    (&["trainer.*"], NONE),
];

#[cfg(test)]
mod tests {
    use super::super::tests::{config, message};
    use super::super::{AutoOr, Config, GradientCheckpointing, LrSchedulerType, ScaleRewards, SftConfig};
    use super::*;

    #[test]
    fn no_key_of_ours_is_sent_elsewhere_and_every_row_is_reached() {
        for key in Config::keys().iter().chain(&SftConfig::keys()) {
            assert_eq!(advice(key), None, "{key}");
        }
        for (names, text) in KEYS {
            names.iter().for_each(|name| assert_eq!(advice(name), Some(*text), "{name}"));
        }
        assert_eq!(advice("+actor_rollout_ref.rollout.n"), Some("num_generations"));
    }

    /// A name of a key is an answer: what has none is told so.
    #[test]
    fn hints_answer_or_say_that_nothing_does() {
        for (key, part) in [
            ("hub_strategy", "hf upload"),
            ("wandb_project", "JSONL"),
            ("use_lora", "lora.r"),
            ("hf_token", "HF_TOKEN"),
            ("dataset_configs", "dataset_config"),
            ("early_stopping_patience", "metrics.jsonl"),
            ("load_best_model_at_end", "save_total_limit"),
            ("warmup_ratio", "the ratio x updates in all: max_steps or"),
            ("num_completions_to_print", "log_completions"),
            ("actor_rollout_ref.rollout.val_kwargs.temperature", "as training does"),
            ("actor_rollout_ref.actor.kl_loss_type", "k3"),
            ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "max_tokens_per_micro_batch"),
            ("trainer.critic_warmup", "no critic"),
            ("trainer.val_before_train", "eval_file"),
            ("trainer.balance_batch", NONE),
            ("actor_rollout_ref.actor.checkpoint.contents", NONE),
        ] {
            assert!(advice(key).is_some_and(|said| said.contains(part)), "{key}: {:?}", advice(key));
        }
    }

    #[test]
    fn a_value_of_another_program_has_its_answer() {
        let said = message(&["loss_type=gspo"]);
        assert!(said.contains("one of grpo, ") && said.contains("importance_sampling_level = \"sequence\""), "{said}");
        assert!(!message(&["loss_type=nope"]).contains("sequence"));
    }

    #[test]
    fn all_foreign_keys_are_named_at_once() {
        let said = message(&["use_vllm=true", "data.train_batch_size=1024", "learnign_rate=1"]);
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines.len(), 3, "{said}");
        assert_eq!(
            lines[0],
            "command line: unknown key 'use_vllm'; here: the engine is built in; mode = colocated or split"
        );
        assert!(lines[1].contains("generation_batch_size") && lines[2].ends_with("'learning_rate'?"), "{said}");
    }

    #[test]
    fn values_of_trl_whose_meaning_is_clear_are_taken() {
        let given = ["max_steps=-1", "top_k=-1", "resume_from_checkpoint=true", "gradient_checkpointing=true"];
        let config = config(&[&given[..], &["scale_rewards=false", "lr_scheduler_type=constant_with_warmup"]].concat());
        assert_eq!((config.optimizer.max_steps, config.top_k), (None, 0));
        assert_eq!(config.resume_from_checkpoint.as_deref(), Some("latest"));
        assert_eq!(config.gradient_checkpointing, AutoOr::Given(GradientCheckpointing::Full));
        assert_eq!(config.scale_rewards, ScaleRewards::None);
        assert_eq!(config.optimizer.lr_scheduler_type, LrSchedulerType::Constant);
        assert!(message(&["num_generations=-1"]).contains("a whole number of at least 2"));
    }

    #[test]
    fn a_value_that_is_read_as_another_is_said_once_and_saved_as_it_was_read() {
        let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        let required = "model_name_or_path = 'm'\ntrain_file = 't'\nreward_funcs = ['format']\n";
        std::fs::write(file.path(), format!("{required}top_k = -1\nmax_steps = -1\n")).unwrap();
        let load = |overrides: &[&str]| {
            let (mut notices, overrides) =
                (Vec::new(), overrides.iter().map(|&text| text.to_owned()).collect::<Vec<_>>());
            let config = Config::load_noting(Some(file.path()), &overrides, &mut notices).unwrap();
            (config, notices)
        };
        let (read, notices) = load(&["max_steps=7"]);
        assert_eq!(notices, [format!("{}:4: top_k = -1 is read as top_k = 0", file.path().display())]);
        let (ours, notices) = load(&["max_steps=7", "top_k=0"]);
        assert_eq!(notices, [""; 0], "what the command line overrides is not read at all");
        assert_eq!(read.diff(&ours), []);
        assert!(read.to_toml().contains("\ntop_k = 0\n"));
    }
}
