//! TRL 1.16's defaults, and why some defaults differ here.

use std::fmt::Write;

use serde_json::Value;

use crate::config::KeyDoc;

/// A key that TRL's `GRPOConfig`, transformers' `TrainingArguments` or TRL's `ModelConfig` also has.
struct ForeignDefault {
    key: &'static str,
    /// TRL's name, if it differs.
    name: Option<&'static str>,
    /// TRL's default as JSON, `"none"` for None and for -1 if that means none.
    default: &'static str,
    /// Why the default here differs, if it does.
    reason: &'static str,
}

const fn same(key: &'static str, default: &'static str) -> ForeignDefault {
    ForeignDefault { key, name: None, default, reason: "" }
}

const fn renamed(key: &'static str, name: &'static str, default: &'static str) -> ForeignDefault {
    ForeignDefault { key, name: Some(name), default, reason: "" }
}

impl ForeignDefault {
    const fn but(self, reason: &'static str) -> Self {
        Self { reason, ..self }
    }
}

const FOREIGN: &[ForeignDefault] = &[
    same("dtype", r#""float32""#).but("bfloat16 on CUDA: TRL loads float32 and trains in bfloat16 by autocast"),
    same("output_dir", r#""trainer_output""#).but("a shorter name"),
    same("shuffle_dataset", "true"),
    same("dataloader_drop_last", "false").but("TRL's sampler leaves out the ragged batch whatever this says"),
    same("num_generations", "8"),
    same("per_device_train_batch_size", "8"),
    same("gradient_accumulation_steps", "1"),
    same("steps_per_generation", r#""none""#),
    same("generation_batch_size", r#""none""#),
    same("num_iterations", "1"),
    same("max_completion_length", "512"),
    renamed("max_model_length", "vllm_max_model_length", r#""none""#),
    same("temperature", "1.0"),
    same("top_p", "1.0"),
    same("top_k", "0"),
    same("min_p", r#""none""#),
    same("repetition_penalty", "1.0"),
    same("max_tool_calling_iterations", r#""none""#),
    renamed("tensor_parallel_size", "vllm_tensor_parallel_size", "1"),
    renamed("gpu_memory_utilization", "vllm_gpu_memory_utilization", "0.3")
        .but("a share of what training leaves, which the engine frees before training"),
    same("beta", "0.0"),
    same("epsilon", "0.2"),
    same("epsilon_high", r#""none""#),
    same("delta", r#""none""#),
    same("loss_type", r#""dapo""#),
    same("importance_sampling_level", r#""token""#),
    same("scale_rewards", r#""group""#),
    same("mask_truncated_completions", "false"),
    renamed("importance_sampling_correction", "vllm_importance_sampling_correction", "true"),
    renamed("importance_sampling_mode", "vllm_importance_sampling_mode", r#""sequence_mask""#),
    renamed("importance_sampling_clip_max", "vllm_importance_sampling_clip_max", "3.0"),
    same("use_bias_correction_kl", "true"),
    same("sync_ref_model", "false"),
    same("ref_model_mixup_alpha", "0.6"),
    same("ref_model_sync_steps", "512"),
    same("multi_objective_aggregation", r#""sum_then_normalize""#),
    renamed("importance_sampling_clip_min", "vllm_importance_sampling_clip_min", r#""none""#),
    same("off_policy_mask_threshold", r#""none""#),
    same("sapo_temperature_neg", "1.05"),
    same("sapo_temperature_pos", "1.0"),
    same("vespo_k_pos", "2.0"),
    same("vespo_lambda_pos", "3.0"),
    same("vespo_k_neg", "3.0"),
    same("vespo_lambda_neg", "2.0"),
    same("top_entropy_quantile", "1.0"),
    same("entropy_coef", "0.0"),
    same("use_adaptive_entropy", "false"),
    same("entropy_coef_min", "0.0"),
    same("entropy_coef_max", "1.0"),
    same("entropy_coef_delta", "0.005"),
    same("entropy_target", "0.2"),
    same("router_aux_loss_coef", r#""none""#),
    same("learning_rate", "1e-6"),
    same("optim", r#""adamw_torch_fused""#).but("the same AdamW by a shorter name"),
    same("adam_beta1", "0.9"),
    same("adam_beta2", "0.999"),
    same("adam_epsilon", "1e-8"),
    same("weight_decay", "0.0"),
    same("max_grad_norm", "1.0"),
    same("lr_scheduler_type", r#""linear""#),
    same("lr_scheduler_kwargs.min_lr_rate", r#""none""#),
    same("warmup_steps", "0"),
    same("warmup_ratio", "0.0"),
    same("max_steps", r#""none""#),
    same("num_train_epochs", "3.0"),
    same("gradient_checkpointing", "true").but("the least recomputation that fits the memory"),
    renamed("lora.r", "lora_r", "16").but("there is no `use_peft`: a rank turns adapters on"),
    renamed("lora.alpha", "lora_alpha", "32.0"),
    renamed("lora.dropout", "lora_dropout", "0.05").but("with dropout, old log-probabilities need a pass of their own"),
    renamed("lora.target_modules", "lora_target_modules", r#""none""#)
        .but("PEFT's choice depends on the model: here all projections, as PEFT's \"all-linear\""),
    same("logging_steps", "10").but("a step takes seconds to minutes, a line nothing"),
    same("save_steps", "500"),
    same("save_on_each_node", "false"),
    same("save_total_limit", r#""none""#),
    same("eval_steps", r#""none""#),
    same("report_to", r#""none""#).but("TensorBoard's files need no other program"),
    same("run_name", r#""none""#),
    same("load_best_model_at_end", "false"),
    same("metric_for_best_model", r#""none""#),
    same("greater_is_better", r#""none""#),
    same("early_stopping_threshold", "0.0"),
    renamed("eval_num_generations", "num_generations_eval", r#""none""#)
        .but("TRL takes `num_generations`; one sample a problem is the usual accuracy"),
    same("log_completions", "false"),
    same("seed", "42"),
    same("full_determinism", "false"),
    same("resume_from_checkpoint", r#""none""#),
];

/// A table of the `keys` whose defaults differ from TRL's.
pub(super) fn table(keys: &[KeyDoc]) -> String {
    let mut text = "| key | default here | TRL 1.16 | why |\n|---|---|---|---|\n".to_owned();
    for foreign in FOREIGN.iter().filter(|foreign| !foreign.reason.is_empty()) {
        let ours = keys.iter().find(|key| key.key == foreign.key).and_then(|key| key.default.as_ref());
        let name = foreign.name.map(|name| format!(" (`{name}`)")).unwrap_or_default();
        let cells = [shown(ours), shown(Some(&foreign.value())) + &name];
        let _ = writeln!(text, "| `{}` | {} | {} | {} |", foreign.key, cells[0], cells[1], foreign.reason);
    }
    text
}

impl ForeignDefault {
    fn value(&self) -> Value {
        serde_json::from_str(self.default).expect("the table holds JSON")
    }
}

fn shown(value: Option<&Value>) -> String {
    match value {
        None => "required".to_owned(),
        Some(Value::String(word)) => format!("`{word}`"),
        Some(value) => format!("`{value}`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, described};

    /// A default that differs from TRL's needs a reason.
    #[test]
    fn every_default_is_trls_or_has_a_documented_reason() {
        let keys = described::<Config>();
        for foreign in FOREIGN {
            let ours = keys.iter().find(|key| key.key == foreign.key).unwrap_or_else(|| panic!("{}", foreign.key));
            let (ours, theirs) = (ours.default.as_ref().unwrap(), foreign.value());
            let is_same = match (ours.as_f64(), theirs.as_f64()) {
                (Some(ours), Some(theirs)) => ours == theirs,
                _ => *ours == theirs,
            };
            assert_eq!(is_same, foreign.reason.is_empty(), "{}: {ours} here, {theirs} in TRL", foreign.key);
        }
        assert_eq!(table(&keys).lines().count(), 2 + FOREIGN.iter().filter(|it| !it.reason.is_empty()).count());
    }
}
