//! Keys of other programs that a run computes the same without.

use serde_json::Value;

use super::{RENAMED, bare, is_meant, word};

/// Whether a run computes the same without `key`, which is another program's: it says how, where or how fast, or names what is built in.
pub(crate) fn is_harmless(key: &str) -> bool {
    let key = bare(key);
    let is_renamed = RENAMED.iter().any(|(theirs, _)| *theirs == key);
    !is_renamed && HARMLESS.iter().any(|name| is_meant(name, key))
}

/// [`is_harmless`] at this value: a few keys say what is built in at some values alone.
pub(crate) fn is_harmless_at(key: &str, value: &Value) -> bool {
    let key = bare(key);
    let word = word(value);
    let limited = HARMLESS_AT.iter().find(|(name, _)| is_meant(name, key));
    is_harmless(key) && limited.is_none_or(|(_, values)| values.iter().any(|known| is_meant(known, &word)))
}

/// Names as in [`KEYS`](super::KEYS): what is left out without a change of the result.
pub(crate) const HARMLESS: &[&str] = &[
    "use_vllm",
    "vllm_*",
    "bf16",
    "fp16",
    "tf32",
    "torch_dtype",
    "logging_strategy",
    "logging_dir",
    "logging_first_step",
    "log_level",
    "wandb_*",
    "num_completions_to_print",
    "log_unique_prompts",
    "deepspeed",
    "fsdp",
    "fsdp_config",
    "ds3_gather_for_generation",
    "dataset_streaming",
    "dataset_num_proc",
    "dataset_kwargs",
    "hf_token",
    "hub_token",
    "use_auth_token",
    "token",
    "attn_implementation",
    "use_liger_kernel",
    "use_liger_loss",
    "torch_compile",
    "gradient_checkpointing_kwargs",
    "per_device_eval_batch_size",
    "dataloader_num_workers",
    "remove_unused_columns",
    "disable_dropout",
    "overwrite_output_dir",
    "trust_remote_code",
    "push_to_hub",
    "hub_*",
    "data.filter_overlong_prompts*",
    "data.reward_fn_key",
    "data.return_raw_chat",
    "model.use_remove_padding",
    "model.enable_gradient_checkpointing",
    "actor.fsdp_config.*",
    "ref.fsdp_config.*",
    "actor.megatron.tensor_model_parallel_size",
    "actor.megatron.pipeline_model_parallel_size",
    "actor.megatron.expert_model_parallel_size",
    "actor.megatron.context_parallel_size",
    "actor.megatron.param_offload",
    "actor.megatron.grad_offload",
    "actor.megatron.optimizer_offload",
    "ref.megatron.tensor_model_parallel_size",
    "ref.megatron.pipeline_model_parallel_size",
    "ref.megatron.expert_model_parallel_size",
    "ref.megatron.context_parallel_size",
    "ref.megatron.param_offload",
    "actor.ppo_micro_batch_size*",
    "actor.use_dynamic_bsz",
    "ref.log_prob_*",
    "rollout.log_prob_*",
    "actor.strategy",
    "ref.strategy",
    "critic.*",
    "actor.use_torch_compile",
    "ref.use_torch_compile",
    "rollout.gpu_memory_utilization",
    "rollout.prompt_length",
    "rollout.response_length",
    "rollout.dtype",
    "rollout.name",
    "rollout.mode",
    "rollout.engine_kwargs.*",
    "rollout.data_parallel_size",
    "rollout.load_format",
    "rollout.enforce_eager",
    "rollout.free_cache_engine",
    "rollout.enable_chunked_prefill",
    "rollout.layered_summon",
    "reward_model.reward_manager",
    "reward_model.launch_reward_fn_async",
    "algorithm.kl_ctrl.*",
    "trainer.project_name",
    "trainer.resume_mode",
    "trainer.val_before_train",
    "trainer.critic_warmup",
    "trainer.balance_batch",
    "trainer.device",
    "trainer.log_val_generations",
];

/// Names of [`HARMLESS`], and the values (`start*`: all that begin so) that they are harmless at.
const HARMLESS_AT: &[(&str, &[&str])] = &[
    ("bf16", &["true"]),
    ("fp16", &["false"]),
    ("torch_dtype", &["auto", "bfloat16"]),
    ("vllm_structured_outputs_regex", &[]),
    ("vllm_guided_decoding_regex", &[]),
    ("rollout.dtype", &["auto", "bfloat16"]),
    ("reward_model.reward_manager", &["naive", "batch", "prime"]),
];
