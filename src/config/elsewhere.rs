//! Keys that TRL's or transformers' users bring along and that have another name here, or none.

/// What takes the place of `key` here, if it is one of those.
pub(super) fn advice(key: &str) -> Option<&'static str> {
    ELSEWHERE.iter().find(|(names, _)| names.contains(&key)).map(|(_, advice)| *advice)
}

const ELSEWHERE: &[(&[&str], &str)] = &[
    (&["optim"], "the optimizer is AdamW"),
    (
        &["use_vllm", "vllm_mode", "vllm_server_base_url", "vllm_server_host"],
        "the engine is built in; mode = colocated or split",
    ),
    (&["vllm_tensor_parallel_size"], "tensor_parallel_size"),
    (&["vllm_gpu_memory_utilization"], "gpu_memory_utilization"),
    (&["vllm_max_model_length", "max_seq_length"], "max_model_length"),
    (&["vllm_enable_sleep_mode"], "the engine always sleeps while training"),
    (&["bf16", "fp16", "torch_dtype"], "dtype = auto, float32 or bfloat16"),
    (
        &["report_to", "logging_strategy", "logging_dir", "run_name"],
        "metrics go to output_dir as JSONL and TensorBoard events",
    ),
    (&["save_strategy"], "save_steps, or none"),
    (&["eval_strategy", "evaluation_strategy", "do_eval", "eval_on_start"], "eval_file and eval_steps"),
    (&["num_generations_eval"], "eval_num_generations"),
    (&["warmup_ratio"], "warmup_steps"),
    (&["deepspeed", "fsdp", "fsdp_config"], "zero.stage, zero.shard_group_size and residency.optimizer"),
    (
        &["use_peft", "peft_config", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"],
        "lora.r and the other keys of lora",
    ),
    (&["load_in_4bit", "use_bnb_nested_quant", "bnb_4bit_quant_type"], "quantization = nf4, with lora.r"),
    (&["dataset_name", "dataset_config", "dataset_train_split"], "train_file, rows as JSONL"),
    (&["attn_implementation", "use_liger_kernel", "use_liger_loss", "torch_compile"], "the kernels are built in"),
    (&["gradient_checkpointing_kwargs"], "gradient_checkpointing = auto, none, selective or full"),
    (&["per_device_eval_batch_size", "dataloader_num_workers", "remove_unused_columns"], "there is no such limit"),
    (&["model_init_kwargs", "trust_remote_code"], "weights are read from a folder; no code of it runs"),
    (&["push_to_hub", "hub_model_id"], "the model is output_dir/final"),
];

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    #[test]
    fn no_key_of_ours_is_sent_elsewhere() {
        for key in Config::keys() {
            assert_eq!(advice(key), None, "{key}");
        }
        assert_eq!(advice("optim"), Some("the optimizer is AdamW"));
    }
}
