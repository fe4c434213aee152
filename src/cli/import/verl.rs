//! Translates verl configurations, which count batches in prompts and steps in generation batches, and have other defaults.

mod objective;

use serde_json::Value;

use super::draft::{Draft, ForeignKeys};
use crate::migration::word;

/// The verl version whose defaults are written out. Those that are written have been the same since 0.4.
pub(super) const DEFAULTS: &str = "defaults of verl 0.9.1";

/// Handles the keys that the dictionary alone cannot translate, and sets verl's defaults.
pub(super) fn translate(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let num_updates = batch(theirs, draft);
    objective::translate(theirs, draft, num_updates > 1);
    steps(theirs, draft, num_updates);
    schedule(theirs, draft);
    rewards(theirs, draft);
    groups(theirs, draft);
    output(theirs, draft);
    rest(theirs, draft);
}

/// Converts prompts per generation batch and per update to completions per GPU; returns the number of updates per generation batch.
fn batch(theirs: &mut ForeignKeys, draft: &mut Draft) -> u64 {
    let whole = |number: Option<f64>| number.filter(|number| *number >= 1.0).map(|number| number as u64);
    let num_prompts = whole(theirs.take_number("data.train_batch_size")).unwrap_or(1024);
    let per_update = whole(theirs.take_number("actor.ppo_mini_batch_size")).unwrap_or(256).min(num_prompts);
    let num_generations = whole(theirs.number("rollout.n")).unwrap_or(1);
    if !theirs.has("rollout.n") {
        draft.lose("rollout.n", &1.into(), "verl's default; num_generations must be at least 2 here");
    }
    let gpus = theirs.take_number("trainer.n_gpus_per_node");
    if gpus.is_some() {
        draft.drop("trainer.n_gpus_per_node", "--nproc sets the number of GPUs");
    }
    let gpus = whole(gpus).unwrap_or(8);
    let nodes = theirs.take_number("trainer.nnodes");
    if nodes.is_some() {
        draft.drop("trainer.nnodes", "--nnodes sets the number of nodes");
    }
    let nodes = whole(nodes).unwrap_or(1);
    draft.nproc = Some(gpus).filter(|gpus| *gpus > 1);
    draft.nnodes = Some(nodes).filter(|nodes| *nodes > 1);
    let gpus = gpus.saturating_mul(nodes);
    let (updates, completions) = (num_prompts / per_update, per_update * num_generations);
    let note = format!(
        "data.train_batch_size {num_prompts}, actor.ppo_mini_batch_size {per_update}, rollout.n {num_generations}, {gpus} GPUs"
    );
    draft.set(
        "per_device_train_batch_size",
        completions.div_ceil(gpus),
        format!("completions per update on each GPU: {note}"),
    );
    if !completions.is_multiple_of(gpus) || !num_prompts.is_multiple_of(per_update) {
        draft.lose(
            "data.train_batch_size",
            &num_prompts.into(),
            &format!("it is not divisible, so the batch size differs: {note}"),
        );
    }
    if updates > 1 {
        draft.set("steps_per_generation", updates, "updates per generation batch");
    }
    updates * whole(theirs.number("actor.ppo_epochs")).unwrap_or(1)
}

/// Converts steps, which are generation batches in verl, to updates.
fn steps(theirs: &mut ForeignKeys, draft: &mut Draft, num_updates: u64) {
    for (name, ours) in [
        ("trainer.save_freq", "save_steps"),
        ("trainer.test_freq", "eval_steps"),
        ("trainer.total_training_steps", "max_steps"),
        ("actor.optim.lr_warmup_steps", "warmup_steps"),
    ] {
        let is_counted = |steps: &Value| num_updates > 1 && steps.as_u64().is_some_and(|steps| steps > 0);
        if let Some(steps) = theirs.take_if(name, is_counted).and_then(|steps| steps.as_u64()) {
            let note = format!("{name} = {steps} generation batches with {num_updates} updates each");
            draft.set(ours, steps.saturating_mul(num_updates), note);
        }
    }
}

fn schedule(theirs: &mut ForeignKeys, draft: &mut Draft) {
    // verl sets this one to its own number of steps, whatever a file says.
    if theirs.take("actor.optim.total_training_steps").is_some() {
        draft.drop("actor.optim.total_training_steps", "the learning rate schedule always ends with the run");
    }
    for name in ["trainer.total_training_steps"] {
        if theirs.number(name).is_some_and(|steps| steps < 1.0) {
            theirs.take(name);
            draft.drop(name, "the number of epochs is used instead");
        }
    }
    if theirs.number("actor.optim.lr_warmup_steps").is_some_and(|steps| steps < 0.0) {
        theirs.take("actor.optim.lr_warmup_steps");
        draft.drop("actor.optim.lr_warmup_steps", "off");
    }
    let is_off = |ratio: &Value| ratio.as_f64().is_some_and(|ratio| ratio <= 0.0);
    if theirs.take_if("actor.optim.lr_warmup_steps_ratio", is_off).is_some() {
        draft.drop("actor.optim.lr_warmup_steps_ratio", "no warm-up");
    }
    let names = ["actor.optim.lr_scheduler_type", "actor.optim.warmup_style"];
    if !names.iter().any(|name| theirs.has(name)) {
        draft.set("lr_scheduler_type", "constant", "verl's default");
    }
    if !theirs.has("actor.optim.weight_decay") {
        draft.set("weight_decay", 0.01, "verl's default (verl applies it to norms and biases, too)");
    }
    if let Some(least) = theirs.take_number("actor.optim.min_lr_ratio") {
        let falls = names.iter().find(|name| theirs.is_word(name, "cosine")).filter(|_| least > 0.0);
        match falls {
            Some(name) => {
                theirs.take(name);
                draft.set(
                    "lr_scheduler_type",
                    "cosine_with_min_lr",
                    format!("{name} = cosine with actor.optim.min_lr_ratio"),
                );
                draft.set("lr_scheduler_kwargs.min_lr_rate", least, "it was actor.optim.min_lr_ratio");
            }
            None => draft.drop("actor.optim.min_lr_ratio", "it has no effect with this schedule"),
        }
    }
    if !theirs.has("trainer.total_epochs") && !theirs.has("trainer.total_training_steps") && !draft.has("max_steps") {
        draft.set("num_train_epochs", 30, "verl's default");
    }
    if let Some(Value::Array(betas)) = theirs.take_if("actor.optim.betas", Value::is_array) {
        for (beta, key) in betas.into_iter().zip(["adam_beta1", "adam_beta2"]) {
            draft.set(key, beta, "it was actor.optim.betas");
        }
    }
}

/// The user's reward function, or the one that verl chooses by the data's source.
fn rewards(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let tables = ["custom_reward_function", "reward.custom_reward_function"];
    let custom = tables.into_iter().find(|table| theirs.has(&format!("{table}.path")));
    if let Some(table) = custom {
        let mut text = |name: &str| {
            let value = theirs.take(&format!("{table}.{name}"))?;
            Some(word(&value))
        };
        let (path, name) = (text("path").unwrap_or_default(), text("name"));
        let name = name.as_deref().unwrap_or("compute_score");
        draft.set("reward_funcs", vec![format!("{path}:{name}")], format!("{table}.path and {table}.name"));
    } else {
        let files = theirs.take("data.train_files");
        let is_gsm8k = files.as_ref().is_some_and(|files| {
            let of_gsm8k = |file: &Value| file.to_string().contains("gsm8k");
            files.as_array().map_or_else(|| of_gsm8k(files), |files| files.iter().all(of_gsm8k))
        });
        if let Some(files) = files {
            draft.set("train_file", files, "it was data.train_files");
        }
        let (reward, note) = match is_gsm8k {
            true => (
                "numeric_answer",
                "verl scores GSM8K by the number after ####; here an answer in \\boxed{} or <answer> is accepted, too",
            ),
            false => {
                ("math", "verl chooses a reward by each row's data_source; math compares answers with math-verify")
            }
        };
        draft.set("reward_funcs", vec![reward], note);
    }
    for name in ["reward_model.enable", "reward.reward_model.enable"] {
        switch(theirs, draft, name, "reward_funcs may be functions, commands and HTTP services");
    }
    overlong(theirs, draft);
}

/// DAPO's penalty for long completions, which is a separate reward here.
fn overlong(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let tables = [
        "reward_model.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    ];
    let Some(table) = tables.into_iter().find(|table| theirs.has(&format!("{table}.enable"))) else { return };
    let [enable, length, factor, log] =
        ["enable", "len", "penalty_factor", "log"].map(|name| format!("{table}.{name}"));
    let longest =
        [format!("{}.max_resp_len", table.rsplit_once('.').unwrap_or_default().0), "data.max_response_length".into()];
    let is_on = theirs.is_true(&enable);
    let most = longest.iter().find_map(|name| theirs.number(name)).filter(|_| is_on);
    match (most, theirs.number(&length).filter(|length| *length > 0.0)) {
        (Some(most), Some(cache))
            if draft.adds_reward("soft_overlong_punishment", theirs.number(&factor).unwrap_or(1.0)) =>
        {
            theirs.take(&enable);
            draft.drop(&enable, "replaced by the reward soft_overlong_punishment, with the penalty factor as weight");
            draft.set("reward.max_completion_len", most as u64, "the longest completion of verl's overlong buffer");
            draft.set("reward.soft_punish_cache", cache as u64, format!("it was {length}"));
            for name in [&length, &factor] {
                if theirs.take(name).is_some() {
                    draft.drop(name, "soft_overlong_punishment");
                }
            }
        }
        _ if !is_on => {
            for name in [&enable, &length, &factor] {
                if theirs.take(name).is_some() {
                    draft.drop(name, "the penalty is switched off");
                }
            }
        }
        _ => (),
    }
    for name in [&log, &longest[0]] {
        if theirs.take(name).is_some() {
            draft.drop(name, "logged as rewards/soft_overlong_punishment, computed from max_completion_len");
        }
    }
}

/// DAPO's replacement of groups without a training signal.
fn groups(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let [enable, most] = ["enable", "max_num_gen_batches"].map(|name| format!("algorithm.filter_groups.{name}"));
    let Some(is_on) = theirs.take_if(&enable, Value::is_boolean) else { return };
    match is_on == true {
        true => {
            draft.set("dynamic_sampling", "replace", format!("{enable} is true"));
            if theirs.take("data.gen_batch_size").is_some() {
                draft.drop("data.gen_batch_size", "groups are sampled until the batch is full");
            }
        }
        false => draft.drop(&enable, "off"),
    }
    match theirs.take_if(&most, |most| is_on == false || most.as_u64().is_some_and(|most| most > 0)) {
        Some(most_batches) if is_on == true => {
            draft.set("dynamic_sampling_max_gen_batches", most_batches, format!("it was {most}"));
        }
        Some(_) => draft.drop(&most, &format!("{enable} is false")),
        None => (),
    }
}

fn output(theirs: &mut ForeignKeys, draft: &mut Draft) {
    if let Some(loggers) = theirs.take("trainer.logger") {
        let listed = match loggers {
            Value::Array(listed) => listed,
            other => vec![other],
        };
        let known = |name: &Value| ["wandb", "tensorboard", "trackio"].iter().any(|known| name == known);
        let (known, others): (Vec<_>, Vec<_>) = listed.into_iter().partition(known);
        for other in others.into_iter().filter(|name| name != "console") {
            draft.lose("trainer.logger", &other, "report_to accepts tensorboard, wandb and trackio");
        }
        draft.set(
            "report_to",
            if known.is_empty() { "none".into() } else { Value::Array(known) },
            "it was trainer.logger; output to the console is always on",
        );
    }
    for (name, ours) in [("trainer.save_freq", "save_steps"), ("trainer.test_freq", "eval_steps")] {
        if !draft.has(ours) && theirs.number(name).is_none_or(|steps| steps < 1.0) {
            let is_set = theirs.take_number(name).is_some();
            draft.set(ours, "none", if is_set { format!("{name} is off") } else { "verl's default".to_owned() });
        }
    }
    evaluations(theirs, draft);
}

/// verl's evaluations, which are greedy with one completion per prompt by default.
fn evaluations(theirs: &mut ForeignKeys, draft: &mut Draft) {
    const SAMPLES: &str = "rollout.val_kwargs.do_sample";
    const TEMPERATURE: &str = "rollout.val_kwargs.temperature";
    const NUM: &str = "rollout.val_kwargs.n";
    if !theirs.has("data.val_files") {
        return;
    }
    let (samples, temperature) = (theirs.take_if(SAMPLES, Value::is_boolean), theirs.take(TEMPERATURE));
    if samples == Some(true.into()) {
        let note = format!("it was {TEMPERATURE} (default 0), because {SAMPLES} is true");
        return draft.set("eval_temperature", temperature.unwrap_or_else(|| 0.into()), note);
    }
    draft.set(
        "eval_temperature",
        0,
        if samples.is_some() { format!("{SAMPLES} is false") } else { "verl's default".into() },
    );
    if temperature.is_some() {
        draft.drop(TEMPERATURE, "greedy evaluations have no temperature");
    }
    if let Some(num) = theirs.take_if(NUM, |num| num.as_u64().is_some_and(|num| num > 1)) {
        draft.lose(NUM, &num, "verl makes one greedy completion per prompt, as all would be equal");
    }
}

/// verl's token budget of a micro-batch, which is per GPU of those that share it.
fn shared_micro_batches(theirs: &mut ForeignKeys, draft: &mut Draft) {
    const SIZE: &str = "actor.ulysses_sequence_parallel_size";
    const BUDGET: &str = "actor.ppo_max_token_len_per_gpu";
    if theirs.take("ref.ulysses_sequence_parallel_size").is_some() {
        draft.drop("ref.ulysses_sequence_parallel_size", "the reference model uses the trainer's micro-batches");
    }
    let Some(size) = theirs.take_number(SIZE) else { return };
    draft.set("sequence_parallel_size", size as u64, format!("it was {SIZE}"));
    if let Some(tokens) = theirs.take_number(BUDGET) {
        let why = format!("it was {BUDGET} per GPU; {size} GPUs share a micro-batch");
        draft.set("max_tokens_per_micro_batch", (tokens * size) as u64, why);
    }
}

fn rest(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let rank = theirs.number("model.lora_rank").filter(|rank| *rank > 0.0);
    if rank.is_some() && !theirs.has("model.lora_alpha") {
        draft.set("lora.alpha", 16, "verl's default");
    }
    let keys = [
        ("model.lora_rank", "lora.r"),
        ("model.lora_alpha", "lora.alpha"),
        ("model.target_modules", "lora.target_modules"),
    ];
    for (name, ours) in keys {
        match theirs.take(name) {
            Some(value) if rank.is_some() => draft.set(ours, value, format!("it was {name}")),
            Some(_) => draft.drop(name, "model.lora_rank is 0"),
            None => (),
        }
    }
    for name in [
        "actor.ulysses_sequence_parallel_size",
        "ref.ulysses_sequence_parallel_size",
        "rollout.pipeline_model_parallel_size",
    ] {
        if theirs.number(name) == Some(1.0) {
            theirs.take(name);
            draft.drop(name, "1 means off");
        }
    }
    shared_micro_batches(theirs, draft);
    experts(theirs, draft);
    match theirs.take("data.truncation") {
        Some(how) if how != "error" => {
            draft.lose("data.truncation", &how, "prompts longer than max_prompt_length are left out, never truncated")
        }
        Some(_) => draft.drop("data.truncation", "prompts longer than max_prompt_length are left out, never truncated"),
        None => (),
    }
    for (name, ours) in
        [("data.max_response_length", "max_completion_length"), ("data.max_prompt_length", "max_prompt_length")]
    {
        if !theirs.has(name) {
            draft.fill(ours, 512, "verl's default");
        }
    }
    for name in ["data.train_max_samples", "data.val_max_samples"] {
        if theirs.take_if(name, |num| num.as_f64().is_some_and(|num| num < 0.0)).is_some() {
            draft.drop(name, "all rows are used, as by default");
        }
    }
}

/// Expert parallelism of the engine and router replay of the trainer.
fn experts(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let (name, ours) = ("rollout.expert_parallel_size", "enable_expert_parallel");
    let of_engine = theirs.number("rollout.tensor_model_parallel_size");
    if theirs.take_if(name, |size| *size == 1).is_some() {
        draft.drop(name, "1 means off");
    } else if theirs.take_if(name, |size| size.is_number() && size.as_f64() == of_engine).is_some() {
        draft.set(ours, true, format!("{name} equals rollout.tensor_model_parallel_size"));
    }
    let replay = "actor.router_replay.mode";
    if !theirs.has(replay) {
        draft.set("router_replay", "disabled", "verl's default for models with experts");
    }
    if theirs.has_experts("model.path") {
        draft.fill("router_aux_loss_coef", 0, "verl's loss has no load balancing term");
    }
    let name = "rollout.enable_rollout_routing_replay";
    if theirs.take_if(name, Value::is_boolean).is_some() {
        draft.drop(name, &format!("set by router_replay, from {replay}"));
    }
}

/// A key that has no effect if it is false.
fn switch(theirs: &mut ForeignKeys, draft: &mut Draft, name: &str, why: &str) {
    match theirs.take(name) {
        Some(Value::Bool(true)) => draft.lose(name, &true.into(), why),
        Some(_) => draft.drop(name, "off"),
        None => (),
    }
}
