//! Translates open-r1 recipes and files for `trl grpo --config`; most keys have the same name and meaning here.

use serde_json::Value;

use super::draft::{Draft, ForeignKeys};
use crate::config::{OptimizerName, is_python};
use crate::reward;

/// Handles the keys that the dictionary alone cannot translate.
pub(super) fn translate(theirs: &mut ForeignKeys, draft: &mut Draft) {
    mixture(theirs, draft);
    rewards(theirs, draft);
    sampling(theirs, draft);
    schedule(theirs, draft);
    strategies(theirs, draft);
    adapters(theirs, draft);
    optimizer(theirs, draft);
    neutral(theirs, draft);
    number_type(theirs, draft);
}

/// Reward names; unknown ones are left out with their weights.
fn rewards(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let names = match theirs.take("reward_funcs") {
        Some(Value::Array(names)) => names,
        Some(name) => vec![name],
        None => return,
    };
    let is_known =
        |name: &Value| name.as_str().is_some_and(|name| is_python(name) || reward::names().any(|known| known == name));
    for name in names.iter().filter(|name| !is_known(name)) {
        let why = "no reward of this name is here: expected a built-in one (docs/rewards.md) or file.py:function; it and its weight are left out";
        draft.lose("reward_funcs", name, why);
    }
    let weights =
        theirs.take_if("reward_weights", |weights| weights.as_array().is_some_and(|all| all.len() == names.len()));
    if let Some(Value::Array(weights)) = weights {
        let kept = weights.into_iter().zip(&names).filter(|(_, name)| is_known(name));
        draft.keep("reward_weights", kept.map(|(weight, _)| weight).collect());
    }
    draft.keep("reward_funcs", names.into_iter().filter(is_known).collect());
}

/// `generation_kwargs`, which override the sampling keys.
fn sampling(theirs: &mut ForeignKeys, draft: &mut Draft) {
    if let Some(Value::String(text)) = theirs.take_if("generation_kwargs", Value::is_string) {
        match serde_json::from_str(&text) {
            Ok(Value::Object(arguments)) => theirs.extend("generation_kwargs", arguments),
            _ => draft.lose("generation_kwargs", &text.into(), "expected a table of sampling's keys"),
        }
    }
    for (theirs_name, ours) in [
        ("top_p", "top_p"),
        ("top_k", "top_k"),
        ("min_p", "min_p"),
        ("repetition_penalty", "repetition_penalty"),
        ("stop", "stop"),
        ("stop_strings", "stop"),
    ] {
        let name = format!("generation_kwargs.{theirs_name}");
        let Some(value) = theirs.take(&name) else { continue };
        if theirs.take(ours).is_some() {
            draft.drop(ours, &format!("{name} is used instead"));
        }
        let value = crate::migration::value(ours, &value).unwrap_or(value);
        draft.set(ours, value, format!("it was {name}"));
    }
}

/// TRL's `dtype`, and its older name `torch_dtype`.
fn number_type(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let (old, new) = (theirs.take("torch_dtype"), theirs.take("dtype"));
    match (old, &new) {
        (Some(old), Some(new)) if old == *new => draft.drop("torch_dtype", "dtype has the same value"),
        (Some(old), Some(_)) => draft.lose("torch_dtype", &old, "dtype, its newer name, is used instead"),
        (Some(old), None) if old == "float32" => draft.set("dtype", "float32", "it was torch_dtype"),
        (Some(old), None) if old == "bfloat16" || old == "auto" => {
            draft.drop("torch_dtype", "dtype = auto is bfloat16 on a GPU")
        }
        (Some(old), None) => draft.lose("torch_dtype", &old, "dtype = auto (bfloat16 on a GPU), float32 or bfloat16"),
        (None, _) => (),
    }
    if let Some(new) = new {
        draft.keep("dtype", new);
    }
}

/// Several data sets: open-r1's `dataset_mixture`, whose weights are fractions of rows, and TRL's `datasets`.
fn mixture(theirs: &mut ForeignKeys, draft: &mut Draft) {
    for (key, name, config) in [("dataset_mixture.datasets", "id", "config"), ("datasets", "path", "name")] {
        let Some(Value::Array(listed)) = theirs.take_if(key, Value::is_array) else { continue };
        let text = |set: &Value, key: &str| set.get(key).and_then(Value::as_str).map(str::to_owned);
        let split = |set: &Value| text(set, "split").unwrap_or_else(|| "train".to_owned());
        if let [set] = listed.as_slice() {
            draft.set("dataset_name", text(set, name).unwrap_or_default(), format!("{key} has one entry"));
            if let Some(config) = text(set, config) {
                draft.set("dataset_config", config, format!("from {key}"));
            }
            draft.set("dataset_train_split", split(set), format!("from {key}"));
        } else {
            let file = |set: &Value| {
                let folder = text(set, config).map(|config| format!("{config}/")).unwrap_or_default();
                format!("hf://datasets/{}/{folder}{}*", text(set, name).unwrap_or_default(), split(set))
            };
            let files: Vec<_> = listed.iter().map(file).collect();
            draft.set("train_file", files, format!("{key}; CHECK that these are the names of the files on the Hub"));
        }
        let weights: Vec<_> =
            listed.iter().map(|set| set.get("weight").and_then(Value::as_f64).unwrap_or(1.0)).collect();
        if weights.iter().any(|weight| *weight != 1.0) {
            match weights.as_slice() {
                [weight] => draft.lose(
                    key,
                    &(*weight).into(),
                    "a fraction of one data set; set max_train_samples to a number of rows",
                ),
                weights => draft.set(
                    "train_file_weights",
                    weights.to_vec(),
                    format!("the weights in {key}, as fractions of rows"),
                ),
            }
        }
        if listed.iter().any(|set| set.get("columns").is_some()) {
            draft.drop(&format!("{key}.columns"), "rewards get all columns of a row");
        }
    }
    if theirs.take("dataset_mixture.seed").is_some() {
        draft.drop("dataset_mixture.seed", "the key seed determines the order of rows");
    }
    for name in ["dataset_mixture.test_split_size", "test_split_size"] {
        if let Some(size) = theirs.take(name) {
            draft.lose(name, &size, "set eval_file or dataset_test_split to held-out rows");
        }
    }
}

fn schedule(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let name = theirs.take("lr_scheduler_type");
    let without_warm_up = ["warmup_steps", "warmup_ratio"].into_iter().filter(|_| name == Some("constant".into()));
    for warm_up in without_warm_up {
        if theirs.take(warm_up).is_some() {
            draft.drop(warm_up, "transformers' schedule constant has no warm-up");
        }
    }
    let is_share = |steps: &Value| steps.as_f64().is_some_and(|steps| 0.0 < steps && steps < 1.0);
    if let Some(share) = theirs.take_if("warmup_steps", is_share) {
        draft.set("warmup_ratio", share, "it was warmup_steps, which is a fraction of all updates if below 1");
    }
    if theirs.number("warmup_steps").is_some_and(|steps| steps >= 1.0) && theirs.take("warmup_ratio").is_some() {
        draft.drop("warmup_ratio", "warmup_steps is used instead");
    }
    let Some(name) = name else { return };
    match name.as_str() {
        Some("cosine_with_min_lr" | "cosine_warmup_with_min_lr") => {
            let peak = theirs.number("learning_rate").unwrap_or(1e-6);
            if let Some(least) = theirs.take_number("lr_scheduler_kwargs.min_lr") {
                let note = format!("lr_scheduler_kwargs.min_lr = {least} of learning_rate = {peak}");
                draft.set("lr_scheduler_kwargs.min_lr_rate", least / peak, note);
            }
            match name == "cosine_with_min_lr" {
                true => draft.keep("lr_scheduler_type", name),
                false => {
                    draft.set("lr_scheduler_type", "cosine_with_min_lr", format!("it was {name}; warm-up begins at 0"))
                }
            }
        }
        Some("constant_with_warmup") => draft.set(
            "lr_scheduler_type",
            "constant",
            "the schedule constant has warm-up here; it was constant_with_warmup",
        ),
        _ => draft.keep("lr_scheduler_type", name),
    }
}

/// Keys such as `save_strategy` that say whether the matching step count is used.
fn strategies(theirs: &mut ForeignKeys, draft: &mut Draft) {
    if let Some(strategy) = theirs.take("save_strategy") {
        match strategy.as_str() {
            Some("steps") => draft.drop("save_strategy", "save_steps is the interval in steps"),
            Some("no") => {
                let steps = theirs.take("save_steps").map(|steps| format!(", so save_steps = {steps} had no effect"));
                draft.set("save_steps", "none", format!("save_strategy = no{}", steps.unwrap_or_default()));
            }
            _ => draft.lose("save_strategy", &strategy, "save_steps is the interval in steps"),
        }
    }
    for name in ["eval_strategy", "evaluation_strategy"] {
        let Some(strategy) = theirs.take(name) else { continue };
        match strategy.as_str() {
            Some("steps") => draft.drop(name, "eval_steps is the interval in steps"),
            Some("no") => {
                draft.drop(name, "without eval_steps and eval_file there is no evaluation");
                if theirs.take("eval_steps").is_some() {
                    draft.drop("eval_steps", &format!("{name} = no"));
                }
            }
            _ => draft.lose(name, &strategy, "eval_steps is the interval in steps"),
        }
    }
    if theirs.take("do_eval").is_some() {
        draft.drop("do_eval", "eval_steps switches evaluation on");
    }
}

fn adapters(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let use_peft = theirs.take("use_peft");
    if use_peft.is_some() {
        draft.drop("use_peft", "lora.r switches adapters on");
    }
    let uses_adapters = use_peft.is_some_and(|is_on| is_on == true);
    let names = [
        ("lora_r", "lora.r"),
        ("lora_alpha", "lora.alpha"),
        ("lora_dropout", "lora.dropout"),
        ("lora_target_modules", "lora.target_modules"),
    ];
    let defaults = [
        ("lora_r", "lora.r", Value::from(16), "TRL's default"),
        ("lora_dropout", "lora.dropout", 0.05.into(), "TRL's default"),
        (
            "lora_target_modules",
            "lora.target_modules",
            vec!["q_proj", "v_proj"].into(),
            "PEFT's default for Qwen2, Qwen3, Llama and Mistral (PEFT has none for OLMo 2)",
        ),
    ];
    for (name, ours, value, whose) in defaults.into_iter().filter(|(name, ..)| uses_adapters && !theirs.has(name)) {
        draft.set(ours, value, format!("{name} is not set: {whose}"));
    }
    for (name, ours) in names {
        match theirs.take(name) {
            Some(value) if uses_adapters => draft.set(ours, value, format!("it was {name}")),
            Some(_) => draft.drop(name, "use_peft is not true"),
            None => (),
        }
    }
    match theirs.take("load_in_4bit") {
        Some(Value::Bool(true)) => draft.set("quantization", "nf4", "it was load_in_4bit"),
        Some(_) => draft.drop("load_in_4bit", "off"),
        None => (),
    }
}

/// An optimizer that is not available here; available ones are in the dictionary of values.
fn optimizer(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let Some(value) = theirs.take("optim") else { return };
    let ours = crate::migration::value("optim", &value).unwrap_or_else(|| value.clone());
    if ours.as_str().is_some_and(|name| OptimizerName::NAMES.contains(&name)) {
        draft.keep("optim", ours);
    } else {
        draft.lose("optim", &value, "adamw, adamw_8bit or muon");
    }
}

/// Keys that have no effect at a certain value.
fn neutral(theirs: &mut ForeignKeys, draft: &mut Draft) {
    for (name, nothing) in [
        ("top_entropy_quantile", Value::from(1.0)),
        ("entropy_coef", 0.0.into()),
        ("multi_objective_aggregation", "sum_then_normalize".into()),
    ] {
        if super::is_ours(name) {
            continue;
        }
        match theirs.take(name) {
            Some(value)
                if value == nothing || value.as_f64().is_some_and(|number| nothing.as_f64() == Some(number)) =>
            {
                draft.drop(name, "this value has no effect");
            }
            Some(value) => draft.lose(name, &value, crate::migration::advice(name).unwrap_or_default()),
            None => (),
        }
    }
}
