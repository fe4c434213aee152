//! Values of keys in other trainers' configurations, and the equivalents here.

use serde_json::Value;

/// A JSON value in the notation of the command line: a string without quotes.
pub(crate) fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The equivalent here of a TRL `value`, if they differ and its meaning is unambiguous.
pub(crate) fn value(key: &str, value: &Value) -> Option<Value> {
    let json = |text: &str| serde_json::from_str::<Value>(text).expect("the table holds JSON");
    VALUES.iter().find(|(known, theirs, _)| *known == key && json(theirs) == *value).map(|(.., ours)| json(ours))
}

/// Advice for a `value` that `key` has in other trainers' configurations.
pub(crate) fn value_advice(key: &str, value: &Value) -> Option<&'static str> {
    let is_share = value.as_f64().is_some_and(|number| 0.0 < number && number < 1.0);
    if is_share && STEP_KEYS.contains(&key) {
        return Some("in transformers a share of all updates; here a number of steps, that share x max_steps");
    }
    let word = value.as_str()?;
    VALUE_ADVICE.iter().find(|(known, theirs, _)| (*known, *theirs) == (key, word)).map(|(.., advice)| *advice)
}

/// Keys for numbers of steps. transformers also accepts fractions for them.
const STEP_KEYS: &[&str] = &["logging_steps", "save_steps", "eval_steps"];

/// Keys, values in other trainers, and advice on what to write here.
const VALUE_ADVICE: &[(&str, &str, &str)] = &[
    ("loss_type", "gspo", "GSPO is importance_sampling_level = \"sequence\" with loss_type = \"grpo\""),
    ("kl_estimator", "kl", "verl's kl is kl_estimator = \"k1\""),
    ("kl_estimator", "mse", "verl's mse is kl_estimator = \"k2\""),
    ("kl_estimator", "low_var_kl", "verl's low_var_kl is kl_estimator = \"k3\""),
    ("loss_type", "token-mean", "verl's token-mean is loss_type = \"dapo\""),
    ("loss_type", "seq-mean-token-mean", "verl's seq-mean-token-mean is loss_type = \"grpo\""),
    (
        "lr_scheduler_type",
        "polynomial",
        "transformers' polynomial falls to lr_end = 1e-7, by default in a straight line; linear is the nearest, and falls to 0",
    ),
    ("mixed_precision", "no", "accelerate's no is dtype = \"float32\""),
    ("mixed_precision", "bf16", "accelerate's bf16 is dtype = \"bfloat16\", the default on a GPU"),
    ("mixed_precision", "fp16", "nothing computes in fp16 here; dtype = \"bfloat16\" takes its place"),
    (
        "router_replay",
        "R2",
        "verl's R2 replays the trainer's own experts in updates; router_replay = \"R3\" replays the sampler's",
    ),
    ("quantization", "bitsandbytes", "bitsandbytes' 4-bit weights are quantization = \"nf4\""),
];

/// Keys, values in other trainers and equivalents here, as JSON.
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
    ("kv_cache_dtype", r#""fp8_e4m3""#, r#""fp8""#),
    ("optim", r#""adamw_torch""#, r#""adamw""#),
    ("optim", r#""adamw_torch_fused""#, r#""adamw""#),
    ("optim", r#""adamw_hf""#, r#""adamw""#),
    ("optim", r#""adamw_apex_fused""#, r#""adamw""#),
    ("optim", r#""adamw_bnb_8bit""#, r#""adamw_8bit""#),
    ("optim", r#""paged_adamw_8bit""#, r#""adamw_8bit""#),
    ("optim", r#""paged_adamw_32bit""#, r#""adamw""#),
];
