//! Configurations of verl: batches are counted in prompts there, and defaults are other ones.

use serde_json::Value;

use super::draft::{Draft, ForeignKeys};
use crate::migration::word;

/// Takes the keys that the dictionary alone cannot translate, and sets what verl does by default.
pub(super) fn translate(theirs: &mut ForeignKeys, draft: &mut Draft) {
    batch(theirs, draft);
    objective(theirs, draft);
    clipping(theirs, draft);
    schedule(theirs, draft);
    rewards(theirs, draft);
    groups(theirs, draft);
    output(theirs, draft);
    rest(theirs, draft);
}

/// Prompts of a generation batch and of an update, as completions on each GPU.
fn batch(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let whole = |number: Option<f64>| number.filter(|number| *number >= 1.0).map(|number| number as u64);
    let num_prompts = whole(theirs.take_number("data.train_batch_size")).unwrap_or(1024);
    let per_update = whole(theirs.take_number("actor.ppo_mini_batch_size")).unwrap_or(256).min(num_prompts);
    let num_generations = whole(theirs.number("rollout.n")).unwrap_or(1);
    let gpus = theirs.take_number("trainer.n_gpus_per_node");
    if gpus.is_some() {
        draft.drop("trainer.n_gpus_per_node", "--nproc says how many GPUs there are");
    }
    let gpus = whole(gpus).unwrap_or(8);
    let nodes = theirs.take_number("trainer.nnodes");
    if nodes.is_some() {
        draft.drop("trainer.nnodes", "--nnodes says how many nodes there are");
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
        format!("completions of an update on each GPU: {note}"),
    );
    if !completions.is_multiple_of(gpus) || !num_prompts.is_multiple_of(per_update) {
        draft.lose(
            "data.train_batch_size",
            &num_prompts.into(),
            &format!("it does not divide evenly, so that the batch is another one: {note}"),
        );
    }
    if updates > 1 {
        draft.set("steps_per_generation", updates, "updates of a generation batch");
    }
}

fn objective(theirs: &mut ForeignKeys, draft: &mut Draft) {
    divergence(theirs, draft);
    if theirs.number("actor.entropy_coeff") == Some(0.0) {
        theirs.take("actor.entropy_coeff");
        draft.drop("actor.entropy_coeff", "nothing at 0");
    }
    let mode = theirs.take("actor.loss_agg_mode").unwrap_or_else(|| "token-mean".into());
    match mode.as_str() {
        Some("token-mean") => {
            draft.set("loss_type", "dapo", "verl's actor.loss_agg_mode token-mean, over the whole generation batch")
        }
        Some("seq-mean-token-mean") => draft.set("loss_type", "grpo", "it was actor.loss_agg_mode seq-mean-token-mean"),
        Some("seq-mean-token-sum-norm") => {
            draft.set("loss_type", "dr_grpo", "it was actor.loss_agg_mode seq-mean-token-sum-norm")
        }
        _ => draft.lose("actor.loss_agg_mode", &mode, "loss_type = grpo, dr_grpo, bnpo or dapo"),
    }
    match theirs.take("algorithm.norm_adv_by_std_in_grpo") {
        Some(Value::Bool(false)) => draft.set("scale_rewards", "none", "algorithm.norm_adv_by_std_in_grpo is false"),
        Some(_) => draft.drop("algorithm.norm_adv_by_std_in_grpo", "scale_rewards = group does so"),
        None => (),
    }
    match theirs.take("algorithm.adv_estimator") {
        Some(name) if name == "rloo" => {
            draft.set("advantage_estimator", "rloo", "it was algorithm.adv_estimator");
            draft.set("scale_rewards", "none", "verl's rloo divides by no deviation");
        }
        Some(name) if name != "grpo" => {
            draft.lose("algorithm.adv_estimator", &name, "advantage_estimator = grpo or rloo")
        }
        Some(_) => draft.drop("algorithm.adv_estimator", "advantages are GRPO's"),
        None => (),
    }
}

/// The KL divergence in the loss, or in the reward.
fn divergence(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let [in_loss, in_reward] =
        ["actor.use_kl_loss", "algorithm.use_kl_in_reward"].map(|name| match theirs.take(name) {
            Some(Value::Bool(true)) => true,
            Some(_) => {
                draft.drop(name, "off");
                false
            }
            None => false,
        });
    let of_loss = ("actor.kl_loss_coef", "actor.kl_loss_type", "low_var_kl");
    let of_reward = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "kl");
    for ((coef, kind, _), is_read) in [(of_loss, in_loss), (of_reward, in_reward && !in_loss)] {
        let unread = [coef, kind].into_iter().filter(|name| !is_read && theirs.take(name).is_some());
        unread.for_each(|name| draft.drop(name, "it weighs nothing"));
    }
    let (coef, kind, default) = match (in_loss, in_reward) {
        (true, false) => of_loss,
        (true, true) => {
            let why = "beta weighs the divergence in the loss, and none in the reward beside it";
            draft.lose("algorithm.use_kl_in_reward", &true.into(), why);
            of_loss
        }
        (false, true) => {
            draft.set("use_kl_in_reward", true, "it was algorithm.use_kl_in_reward");
            of_reward
        }
        (false, false) => return,
    };
    let whose = if in_loss { "actor.use_kl_loss" } else { "algorithm.use_kl_in_reward" };
    draft.set("beta", theirs.take_number(coef).unwrap_or(0.001), format!("{coef}, as {whose} is true"));
    let named = theirs.take(kind).unwrap_or_else(|| default.into());
    match named.as_str() {
        Some("kl" | "k1") => draft.set("kl_estimator", "k1", format!("{kind} = {named}")),
        Some("mse" | "k2") => draft.set("kl_estimator", "k2", format!("{kind} = {named}")),
        Some("low_var_kl" | "k3") => draft.drop(kind, "kl_estimator = k3 is verl's low_var_kl"),
        _ => draft.lose(kind, &named, "kl_estimator = k1, k2 or k3"),
    }
}

/// `clip_ratio` is the bound on a side that has none of its own.
fn clipping(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let [low, high] = ["actor.clip_ratio_low", "actor.clip_ratio_high"].map(|name| theirs.has(name));
    let Some(both) = theirs.take_if("actor.clip_ratio", |_| low) else { return };
    match high {
        true => draft.drop("actor.clip_ratio", "actor.clip_ratio_low and actor.clip_ratio_high count"),
        false => draft.set("epsilon_high", both, "actor.clip_ratio, as actor.clip_ratio_high is not set"),
    }
}

fn schedule(theirs: &mut ForeignKeys, draft: &mut Draft) {
    for name in ["actor.optim.total_training_steps", "trainer.total_training_steps"] {
        if theirs.number(name).is_some_and(|steps| steps < 1.0) {
            theirs.take(name);
            draft.drop(name, "epochs count");
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
        draft.set("weight_decay", 0.01, "verl's default");
    }
    if let Some(Value::Array(betas)) = theirs.take_if("actor.optim.betas", Value::is_array) {
        for (beta, key) in betas.into_iter().zip(["adam_beta1", "adam_beta2"]) {
            draft.set(key, beta, "it was actor.optim.betas");
        }
    }
}

/// A function of the user's, or what verl chooses by the data's source.
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
        let is_gsm8k = files.as_ref().is_some_and(|files| files.to_string().contains("gsm8k"));
        if let Some(files) = files {
            draft.set("train_file", files, "it was data.train_files");
        }
        let (reward, note) = match is_gsm8k {
            true => (
                "numeric_answer",
                "verl scores GSM8K by the number behind ####; here \\boxed{} and <answer> count, too",
            ),
            false => (
                "math",
                "verl chooses a reward by each row's data_source; this one compares answers as mathematics (math-verify)",
            ),
        };
        draft.set("reward_funcs", vec![reward], note);
    }
    switch(theirs, draft, "reward_model.enable", "reward_funcs are functions, commands and services over HTTP");
}

/// DAPO's groups without a signal, in whose place others are sampled.
fn groups(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let [enable, most] = ["enable", "max_num_gen_batches"].map(|name| format!("algorithm.filter_groups.{name}"));
    let Some(is_on) = theirs.take_if(&enable, Value::is_boolean) else { return };
    match is_on == true {
        true => draft.set("dynamic_sampling", "replace", format!("{enable} is true")),
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
            draft.lose("trainer.logger", &other, "report_to takes tensorboard, wandb and trackio");
        }
        draft.set(
            "report_to",
            if known.is_empty() { "none".into() } else { Value::Array(known) },
            "trainer.logger, without the console, which is always written",
        );
    }
    for (name, ours) in [("trainer.save_freq", "save_steps"), ("trainer.test_freq", "eval_steps")] {
        if theirs.number(name).is_none_or(|steps| steps < 1.0) {
            let is_set = theirs.take_number(name).is_some();
            draft.set(ours, "none", if is_set { format!("{name} is off") } else { "verl's default".to_owned() });
        }
    }
    evaluations(theirs, draft);
}

/// verl's evaluations are greedy, with one completion a prompt, unless they are told to sample.
fn evaluations(theirs: &mut ForeignKeys, draft: &mut Draft) {
    const SAMPLES: &str = "rollout.val_kwargs.do_sample";
    const TEMPERATURE: &str = "rollout.val_kwargs.temperature";
    const NUM: &str = "rollout.val_kwargs.n";
    if !theirs.has("data.val_files") {
        return;
    }
    let (samples, temperature) = (theirs.take_if(SAMPLES, Value::is_boolean), theirs.take(TEMPERATURE));
    if samples == Some(true.into()) {
        let note = format!("it was {TEMPERATURE}, or 0 without it, as {SAMPLES} is true");
        return draft.set("eval_temperature", temperature.unwrap_or_else(|| 0.into()), note);
    }
    draft.set(
        "eval_temperature",
        0,
        if samples.is_some() { format!("{SAMPLES} is false") } else { "verl's default".into() },
    );
    if temperature.is_some() {
        draft.drop(TEMPERATURE, "evaluations that do not sample have none");
    }
    if let Some(num) = theirs.take_if(NUM, |num| num.as_u64().is_some_and(|num| num > 1)) {
        draft.lose(NUM, &num, "greedy completions of a prompt are all equal, and verl makes one");
    }
}

fn rest(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let rank = theirs.number("model.lora_rank").filter(|rank| *rank > 0.0);
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
            draft.drop(name, "1 is off");
        }
    }
    experts(theirs, draft);
    match theirs.take("data.truncation") {
        Some(how) if how != "error" => {
            draft.lose("data.truncation", &how, "prompts longer than max_prompt_length are left out, never cut")
        }
        Some(_) => draft.drop("data.truncation", "prompts longer than max_prompt_length are left out, never cut"),
        None => (),
    }
    if !draft.has("max_completion_length") && !theirs.has("data.max_response_length") {
        draft.set("max_completion_length", 512, "verl's default");
    }
}

/// Experts of an engine, and those that the trainer takes.
fn experts(theirs: &mut ForeignKeys, draft: &mut Draft) {
    let (name, ours) = ("rollout.expert_parallel_size", "enable_expert_parallel");
    let of_engine = theirs.number("rollout.tensor_model_parallel_size");
    if theirs.take_if(name, |size| *size == 1).is_some() {
        draft.drop(name, "1 is off");
    } else if theirs.take_if(name, |size| size.is_number() && size.as_f64() == of_engine).is_some() {
        draft.set(ours, true, format!("{name} is rollout.tensor_model_parallel_size"));
    }
    let replay = "actor.router_replay.mode";
    if !theirs.has(replay) {
        draft.set("router_replay", "disabled", "verl's default, of models with experts");
    }
    let name = "rollout.enable_rollout_routing_replay";
    if theirs.take_if(name, Value::is_boolean).is_some() {
        draft.drop(name, &format!("router_replay says so, which is {replay}"));
    }
}

/// A key that changes nothing where it is false.
fn switch(theirs: &mut ForeignKeys, draft: &mut Draft, name: &str, why: &str) {
    match theirs.take(name) {
        Some(Value::Bool(true)) => draft.lose(name, &true.into(), why),
        Some(_) => draft.drop(name, "off"),
        None => (),
    }
}
