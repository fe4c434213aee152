//! Tests of the frozen key lists, and of the errors for faulty files.

use std::io::Write;

use super::*;
use crate::error::{Error, ExitCode, Result, UnknownKey};

/// The configuration of the required keys and `overrides`.
pub(super) fn config(overrides: &[&str]) -> Config {
    load(overrides).unwrap()
}

fn load(overrides: &[&str]) -> Result<Config> {
    let required = ["model_name_or_path=model", "train_file=train.jsonl", "reward_funcs=[\"format\"]"];
    let all: Vec<String> = required.iter().chain(overrides).map(|text| text.to_string()).collect();
    Config::load(None, &all)
}

fn load_file(extension: &str, text: &str) -> Result<Config> {
    let mut file = tempfile::Builder::new().prefix("run").suffix(extension).tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let required = ["model_name_or_path=model", "train_file=train.jsonl", "reward_funcs=[\"format\"]"];
    Config::load(Some(file.path()), &required.map(String::from))
}

pub(super) fn message(overrides: &[&str]) -> String {
    let error = load(overrides).unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::Configuration);
    error.to_string()
}

/// Panics with the keys that differ from the list.
fn assert_frozen(keys: &[String], expected: &str) {
    let expected: Vec<&str> = expected.split_whitespace().collect();
    let new: Vec<_> = keys.iter().filter(|key| !expected.contains(&key.as_str())).collect();
    let gone: Vec<_> = expected.iter().filter(|key| keys.iter().all(|known| known != *key)).collect();
    assert!(
        new.is_empty() && gone.is_empty(),
        "new keys, to be added to this list: {new:?}; keys that are gone: {gone:?}"
    );
    let moved = keys.iter().zip(&expected).find(|(key, expected)| key != *expected);
    assert_eq!(moved, None, "a key and the one that is listed in its place");
}

/// A key in this list is a promise to users: adding keys is fine, renaming and removing is not.
#[test]
fn the_key_list_is_frozen() {
    let expected = "model_name_or_path model_revision device dtype residual_dtype mixed_precision train_file train_file_weights eval_file dataset_name dataset_config \
        dataset_train_split dataset_test_split max_train_samples max_eval_samples dataset_prompt_column prompt_format \
        system_prompt chat_template_kwargs.* output_dir resume_from_checkpoint force_resume max_prompt_length shuffle_dataset dataloader_drop_last mode split.rollout_gpus split.async_steps split.in_flight_updates num_generations \
        per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size num_iterations \
        max_tokens_per_micro_batch sequence_parallel_size share_prompts max_completion_length max_model_length temperature top_p top_k min_p \
        repetition_penalty stop tensor_parallel_size pipeline_parallel_size pipeline_partition enable_expert_parallel gpu_memory_utilization kv_cache_bytes kv_block_size max_num_seqs \
        max_num_batched_tokens strict exact rollout_quantization kv_cache_dtype mamba_ssm_cache_dtype speculation num_speculative_tokens oversample partial_rollout carried_kv dynamic_sampling \
        dynamic_sampling_max_gen_batches dynamic_sampling_range curriculum.solve_rate curriculum.every tools environment_factory tool_call_parser \
        max_tool_calling_iterations max_tool_response_length tool_timeout_s tool_workers agent agent_timeout_s agent_max_requests agent_workers environment environment_args.* beta reference epsilon epsilon_high delta loss_type \
        importance_sampling_level scale_rewards \
        mask_truncated_completions importance_sampling_correction importance_sampling_mode \
        importance_sampling_clip_max use_bias_correction_kl use_kl_in_reward kl_estimator sync_ref_model \
        ref_model_mixup_alpha ref_model_sync_steps advantage_estimator multi_objective_aggregation \
        importance_sampling_clip_min off_policy_mask_threshold sapo_temperature_neg sapo_temperature_pos vespo_k_pos \
        vespo_lambda_pos vespo_k_neg vespo_lambda_neg top_entropy_quantile entropy_coef use_adaptive_entropy \
        entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target router_replay router_aux_loss_coef \
        teacher_model_name_or_path teacher_model_revision distillation_weight distillation_mode distillation_topk distillation_alpha distillation_add_tail distillation_is_clip \
        self_distillation teacher_prompt_template num_loss_tokens_to_skip reprompt_template solution_template feedback_template \
        use_successful_as_teacher success_reward_threshold dont_reprompt_on_self_success include_environment_feedback \
        environment_feedback_only_without_solution remove_thinking_from_demonstration max_reprompt_len \
        reward_funcs reward_weights reward.format_pattern \
        reward.answer_pattern reward.answer_column reward.num_threads reward.timeout_s reward.python \
        reward.math_workers reward.max_worker_failures reward.reasoning_delimiters reward.cosine_min_value_wrong \
        reward.cosine_max_value_wrong reward.cosine_min_value_correct reward.cosine_max_value_correct reward.cosine_max_len \
        reward.repetition_n_grams reward.repetition_max_penalty reward.max_completion_len \
        reward.soft_punish_cache reward.code_language reward.code.tests_column reward.code.command reward.code.timeout_s \
        reward.code.memory_bytes reward.code.workers reward.code.readable reward.code.may_lack rewards.*.function \
        rewards.*.command rewards.*.url rewards.*.api_key_env rewards.*.judge_model rewards.*.judge_rubric rewards.*.judge_score_pattern \
        rewards.*.judge_max_score rewards.*.judge_max_tokens rewards.*.judge_temperature rewards.*.timeout_s rewards.*.workers rewards.*.batch rewards.*.concurrency learning_rate optim muon.momentum \
        muon.nesterov muon.ns_steps muon.adjust_lr_fn adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm lr_scheduler_type lr_scheduler_kwargs.min_lr_rate warmup_steps warmup_ratio max_steps num_train_epochs \
        gradient_checkpointing activation_offload zero.stage zero.shard_group_size zero.reduce_dtype zero.grad_accum_dtype \
        residency.optimizer residency.reference lora.r lora.alpha lora.dropout lora.target_modules quantization \
        logging_steps save_steps save_async save_on_each_node save_total_limit eval_steps report_to run_name load_best_model_at_end metric_for_best_model \
        greater_is_better early_stopping_patience early_stopping_threshold eval_num_generations eval_temperature eval_solved_by log_completions trace seed \
        full_determinism collective_timeout_s node_timeout_s max_restarts heartbeat fault";
    assert_frozen(Config::keys(), expected);
    let expected = "model_name_or_path model_revision device dtype residual_dtype mixed_precision train_file train_file_weights eval_file dataset_name dataset_config \
        dataset_train_split dataset_test_split max_train_samples max_eval_samples dataset_prompt_column prompt_format \
        system_prompt chat_template_kwargs.* dataset_completion_column output_dir resume_from_checkpoint force_resume max_length shuffle_dataset \
        per_device_train_batch_size gradient_accumulation_steps max_tokens_per_micro_batch sequence_parallel_size learning_rate router_aux_loss_coef \
        optim muon.momentum muon.nesterov muon.ns_steps muon.adjust_lr_fn adam_beta1 adam_beta2 adam_epsilon weight_decay \
        max_grad_norm lr_scheduler_type lr_scheduler_kwargs.min_lr_rate warmup_steps warmup_ratio max_steps num_train_epochs \
        gradient_checkpointing activation_offload zero.stage zero.shard_group_size zero.reduce_dtype zero.grad_accum_dtype lora.r lora.alpha \
        lora.dropout lora.target_modules quantization logging_steps save_steps save_async save_on_each_node save_total_limit seed \
        collective_timeout_s node_timeout_s max_restarts heartbeat";
    assert_frozen(&SftConfig::keys(), expected);
}

#[test]
fn the_limits_of_heartbeats_are_one_table() {
    let table = load_file(".toml", "heartbeat = { timeout_s = 5, wake_s = 2.5, load_s = 'none' }\n")
        .unwrap()
        .supervision
        .heartbeat;
    assert_eq!(
        table,
        config(&["heartbeat.timeout_s=5", "heartbeat.wake_s=2.5", "heartbeat.load_s=none"]).supervision.heartbeat
    );
    let written: Vec<_> = config(&[]).entries().into_iter().filter(|(key, _)| key.starts_with("heartbeat.")).collect();
    assert_eq!(written.len(), 1 + crate::phase::Phase::ALL.len(), "older checkpoints have and newer ones keep each");
    let said = message(&["heartbeat.wak_s=1"]);
    assert!(said.ends_with("unknown key 'heartbeat.wak_s'; did you mean 'heartbeat.wake_s'?"), "{said}");
    assert!(message(&["heartbeat=5"]).contains("it is a table of timeout_s, startup_s"));
}

#[test]
fn a_list_key_accepts_a_single_entry() {
    assert_eq!(config(&["reward_funcs=numeric_answer", "stop=END"]).reward_funcs, ["numeric_answer"]);
    assert_eq!(config(&["stop=[]"]).stop, [""; 0]);
}

#[test]
fn toml_and_yaml_load_alike_and_the_command_line_overrides_them() {
    let toml = "beta = 0.1\nseed = 7\n[zero]\nstage = 3\n[reward]\nnum_threads = 4\n";
    let yaml = "beta: 0.1\nseed: 7\nzero:\n  stage: 3\nreward: {num_threads: 4}\n";
    let config = load_file(".toml", toml).unwrap();
    assert_eq!(config, load_file(".yaml", yaml).unwrap());
    assert_eq!((config.beta, config.seed, config.zero.stage, config.reward.num_threads), (0.1, 7, 3, 4));
    assert_eq!(config.learning_rate, 1e-6);
}

#[test]
fn an_unknown_key_is_named_with_its_line_and_the_nearest_key() {
    for (extension, text) in [(".toml", "beta = 0\n\nlearnin_rate = 1\n"), (".yml", "beta: 0\n\nlearnin_rate: 1\n")] {
        match load_file(extension, text).unwrap_err() {
            Error::UnknownKeys(keys) => {
                let [UnknownKey { origin, key, advice }] = &keys[..] else { panic!("{keys:?}") };
                assert!(origin.ends_with(&format!("{extension}:3")), "{origin}");
                let expected = ("learnin_rate", Some("did you mean 'learning_rate'?"));
                assert_eq!((key.as_str(), advice.as_deref()), expected);
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(message(&["zero.stages=1"]), "command line: unknown key 'zero.stages'; did you mean 'zero.stage'?");
    let low = "command line: unknown key 'curriculum.low'; curriculum has the keys solve_rate, every";
    assert_eq!(message(&["curriculum.low=0.1"]), low);
    let func = "command line: unknown key 'rewards.a.func'; did you mean 'rewards.*.function'?";
    assert_eq!(message(&["rewards.a.func=b"]), func);
    let optim_args = "command line: unknown key 'optim_args'; here: adam_beta1, adam_beta2, adam_epsilon and muon";
    assert_eq!(message(&["optim_args=a"]), optim_args);
    assert_eq!(
        message(&["residency=swap"]),
        "command line: unknown key 'residency'; it is a table of optimizer, reference"
    );
    let foreign = "bf16: true\nuse_vllm: true\n";
    let said = load_file(".yaml", foreign).unwrap_err().to_string();
    let hint = ".yaml --output run.toml";
    assert!(said.lines().last().unwrap().ends_with(hint) && said.contains("colo-grpo import /"), "{said}");
    for one in [load_file(".yaml", "bf16: true\n").unwrap_err().to_string(), message(&["bf16=true", "use_vllm=true"])] {
        assert!(!one.contains("import"), "{one}");
    }
    assert!(load_file(".toml", "[zro]\n").unwrap_err().to_string().contains("unknown key 'zro'"));
    assert!(load_file(".toml", "[zero]\n").is_ok());
}

#[test]
fn unquoted_text_in_a_toml_file_is_reported() {
    let error = load_file(".toml", "beta = 0\nmax_steps = nope # ten\n").unwrap_err().to_string();
    assert!(error.contains(".toml:2: nope is not a TOML value: put text in quotes (\"nope\")"), "{error}");
}

#[test]
fn the_saved_configuration_of_a_run_loads_again() {
    let given = [
        "lora.r=8",
        "stop=END",
        "eval_file=a.jsonl",
        "min_p=0.05",
        "gradient_checkpointing=full",
        "split.rollout_gpus=2",
        "mode=split",
        "chat_template_kwargs.enable_thinking=false",
        "rewards.tone.command=[\"cat\", \"-\"]",
        "residency.optimizer=stream",
        "train_file=[\"a.jsonl\", \"b.csv\"]",
        "save_steps=none",
    ];
    for keys in [&given[..], &["lora.r=8", "lora.target_modules=[\"q_proj\"]", "quantization=nf4"], &[]] {
        let config = config(keys);
        let mut file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
        file.write_all(serde_json::to_string_pretty(&config).unwrap().as_bytes()).unwrap();
        assert_eq!(Config::load(Some(file.path()), &[]).unwrap(), config);
    }
    let mut file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    file.write_all(b"[1]").unwrap();
    assert!(Config::load(Some(file.path()), &[]).unwrap_err().to_string().contains("an object of keys"));
}

#[test]
fn an_invalid_word_is_refused_with_the_valid_ones() {
    assert!(message(&["residency.reference=swap"]).contains("auto or one of resident, host"));
}

#[test]
fn wrong_types_and_syntax_carry_the_line() {
    let error = load_file(".toml", "\nnum_generations = 'eight'\n").unwrap_err().to_string();
    assert!(error.starts_with("num_generations = \"eight\": expected a whole number of at least 2: "), "{error}");
    assert!(error.ends_with(".toml:2)"), "{error}");
    let error = load_file(".toml", "beta = 0\nbeta 1\n").unwrap_err().to_string();
    assert!(error.contains(".toml:2: "), "{error}");
    let error = load_file(".yaml", "beta: 0\nzero: [\n").unwrap_err();
    assert!(matches!(error, Error::ConfigSyntax { .. }), "{error}");
    assert!(load_file(".ini", "").unwrap_err().to_string().contains("expected a .toml, .yaml, .yml or .json file"));
    assert_eq!(
        message(&["loss_type=ppo"]),
        "loss_type = \"ppo\": expected one of grpo, dr_grpo, bnpo, dapo, cispo, sapo, luspo, vespo (command line)"
    );
    let error = Config::load(None, &[]).unwrap_err().to_string();
    let required: Vec<&str> = error.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(required, ["model_name_or_path", "reward_funcs", "train_file"], "{error}");
    assert!(error.starts_with("model_name_or_path = nothing: expected a path (this key is required)\n"), "{error}");
}

#[test]
fn all_errors_of_a_configuration_are_reported_together() {
    let text = "lr_scheduler_type = 'lin'\nlog_completions = 'yes'\nmax_step = 3\nnum_generations = 3.0\n\
                heartbeat.wake_s = 0\nheartbeat.timeout_s = -1\n[rewards]\na.workers = 0\nb.timeout_s = 'x'\n";
    let error = load_file(".toml", text).unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::Configuration);
    let error = error.to_string();
    let lines: Vec<&str> = error.lines().collect();
    let expected = [
        (".toml:3: unknown key 'max_step'; did you mean 'max_steps'?", ""),
        ("num_generations = 3.0: expected a whole number of at least 2", ".toml:4)"),
        ("rewards.a.workers = 0: expected a whole number from 1", ".toml:8)"),
        ("rewards.b.timeout_s = \"x\": expected \"none\" or a number", ".toml:9)"),
        ("lr_scheduler_type = \"lin\": expected one of ", ".toml:1)"),
        ("log_completions = \"yes\": expected true or false", ".toml:2)"),
        ("heartbeat.timeout_s = -1: expected a number in ", ".toml:6)"),
        ("heartbeat.wake_s = 0: expected ", ".toml:5)"),
    ];
    assert_eq!(lines.len(), expected.len(), "{error}");
    for (line, (part, place)) in lines.iter().zip(expected) {
        assert!(line.contains(part) && line.ends_with(place), "{line}: {part}");
    }
    let together = message(&["stop=[\"\"]", "delta=1.1", "eval_steps=5", "zero.stage=0", "zero.shard_group_size=2"]);
    let keys: Vec<&str> = together.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(keys, ["stop", "delta", "eval_file", "zero.shard_group_size"], "{together}");
}

#[test]
fn values_out_of_range_are_refused() {
    for (overrides, part) in [
        (&["num_generations=1"][..], "at least 2"),
        (&["epsilon=1.0"], "in [0, 1)"),
        (&["top_p=0"], "in (0, 1]"),
        (&["top_p=1e-38"], "top_p = 1e-38: expected a number in (0, 1] and at least 1.2e-38"),
        (&["lora.r=65537"], "a whole number from 1 to 65536"),
        (
            &["lora.r=4", "lora.target_modules=[q_proj, q_proj]"],
            "lora.target_modules = [\"q_proj\",\"q_proj\"]: expected each projection at most once",
        ),
        (&["temperature=0"], "above 0"),
        (&["temperature=1e-60"], "above 0"), // 0 in its type
        (&["temperature=1e-37"], "temperature = 1e-37: expected at least 0.000001"),
        (&["eval_temperature=-1"], "at least 0"),
        (&["eval_temperature=1e-37"], "eval_temperature = 1e-37: expected 0 (greedy) or at least 0.000001"),
        (&["repetition_penalty=1e30"], "repetition_penalty = 1e30: expected a number from 0.000001 to 1000000"),
        (&["epsilon_high=1e300"], "a number of at least 0; no number is above 1e30"),
        (&["reward_weights=[-1e31]"], "each a number; no number is above 1e30 or below -1e30"),
        (&["kv_block_size=1025"], "a whole number from 1 to 1024"),
        (&["oversample=-0.5"], "a number from 0 to 16"),
        (&["dynamic_sampling=filter", "dynamic_sampling_range=[0.9, 0.1]"], "low not above high"),
        (&["dynamic_sampling=filter", "dynamic_sampling_range=[0.9]"], "[low, high], each a number"),
        (&["mamba_ssm_cache_dtype=float16"], "one of float32, bfloat16"),
        (&["mixed_precision=fp16"], "one of none, fp8, fp8_all"),
        (&["reward_weights=[1, 2]"], "one weight for each of the 1 reward_funcs"),
        (&["reward_funcs=[\"a\", \"a\"]"], "a at most once"),
        (&["reward.answer_pattern=[0-9]+"], "with a group"),
        (&["reward.format_pattern=("], "a regular expression"),
        (&["max_model_length=600", "max_prompt_length=100"], "100 + 512 = 612"),
        (&["zero.stage=4"], "a whole number from 0 to 3"),
        (&["split.async_steps=9"], "a whole number from 0 to 8"),
        (&["split.rollout_gpus=0"], "from 1 to"),
        (&["fault=1:2"], "rank:step:phase:kind"),
        (&["adam_beta2=1"], "in [0, 1)"),
        (&["seed=9223372036854775808"], "a whole number of at least 0: at most 9223372036854775807 (2^63 - 1)"),
        (&["max_num_seqs=9223372036854775807"], "1 to 2147483648"),
        (&["heartbeat.wake_s=0"], "in (0, 31536000)"),
    ] {
        let text = message(overrides);
        assert!(text.contains(part), "{overrides:?}: {text}");
    }
}

#[test]
fn max_completion_length_must_leave_space_for_a_prompt() {
    let said = |keys: &[&str], context| config(keys).validate_context(context).map_err(|error| error.to_string());
    assert_eq!(said(&["max_completion_length=63"], 64), Ok(()));
    let error = said(&["max_completion_length=64"], 64).unwrap_err();
    assert!(
        error.starts_with(
            "max_completion_length = 64: expected at most 63: prompt and completion share the model's context of 64"
        ),
        "{error}"
    );
    assert_eq!(said(&["max_completion_length=64", "max_model_length=65"], 64), Ok(()));
}

#[test]
fn sft_configurations_reject_grpo_keys_and_vice_versa() {
    let load = |more: &str| SftConfig::load(None, &["model_name_or_path=m", "train_file=t", more].map(String::from));
    assert_eq!(load("zero.stage=1").unwrap().zero.stage, 1);
    let error = load("num_generations=8").unwrap_err().to_string();
    assert_eq!(
        error,
        "command line: unknown key 'num_generations'; this key is for GRPO runs, not for supervised ones (sft)"
    );
    let error = message(&["max_length=8"]);
    assert!(error.contains("unknown key 'max_length'; "), "{error}");
    let error = message(&["dataset_completion_column=a"]);
    assert!(
        error.ends_with("'dataset_completion_column'; this key is for supervised runs (sft), not for GRPO runs"),
        "{error}"
    );
    assert!(load("learning_rate=0").unwrap_err().to_string().contains("above 0 (command line)"));
}

/// The run_config.json in a run's output folder starts the same run again, including adapters, reward tables and template variables.
#[test]
fn the_run_config_json_of_a_run_can_be_run_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run_config.json");
    let keys = [
        "lora.r=4",
        "max_prompt_length=16",
        "stop=[\"a\", \"b\"]",
        "rewards.judge.command=[\"judge\"]",
        "reward_funcs=[\"format\", \"judge\"]",
        "chat_template_kwargs.enable_thinking=false",
        "heartbeat.load_s=900",
        "train_file=[\"a.jsonl\", \"b.csv\"]",
    ];
    for keys in [&keys[..], &[], &["lora.r=4", "lora.target_modules=[\"q_proj\"]"]] {
        let config = config(keys);
        std::fs::write(&path, serde_json::to_string(&config).unwrap()).unwrap();
        assert_eq!(Config::load(Some(&path), &[]).unwrap(), config, "{keys:?}");
    }
}
