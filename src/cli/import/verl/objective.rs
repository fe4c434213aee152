//! Translates verl's objective: clipping, KL divergence, importance sampling correction, and the reduction of losses.

use serde_json::Value;

use super::{Draft, ForeignKeys};

/// Handles the keys of the objective, and sets verl's defaults. `has_several_updates` says whether a generation batch has several updates.
pub(super) fn translate(theirs: &mut ForeignKeys, draft: &mut Draft, has_several_updates: bool) {
    divergence(theirs, draft);
    if theirs.number("actor.entropy_coeff") == Some(0.0) {
        theirs.take("actor.entropy_coeff");
        draft.drop("actor.entropy_coeff", "0 has no effect");
    }
    let form = policy_loss(theirs, draft);
    clipping(theirs, draft, form);
    aggregation(theirs, draft, form, has_several_updates);
    advantages(theirs, draft);
    correction(theirs, draft);
}

/// verl's forms of the policy term that are available here.
#[derive(Clone, Copy, PartialEq)]
enum PolicyTerm {
    Clipped,
    Gspo,
    Sapo,
    Cispo,
}

fn policy_loss(theirs: &mut ForeignKeys, draft: &mut Draft) -> PolicyTerm {
    let name = "actor.policy_loss.loss_mode";
    let Some(mode) = theirs.take(name) else { return PolicyTerm::Clipped };
    let form = match mode.as_str() {
        Some("vanilla") => {
            draft.drop(name, "the clipped policy term is the default");
            return PolicyTerm::Clipped;
        }
        Some("gspo") => PolicyTerm::Gspo,
        Some("sapo") => PolicyTerm::Sapo,
        Some("cispo") => PolicyTerm::Cispo,
        _ => {
            draft.lose(name, &mode, "only vanilla, gspo, sapo and cispo are supported; the clipped term is used");
            return PolicyTerm::Clipped;
        }
    };
    match form {
        PolicyTerm::Gspo => draft.set("importance_sampling_level", "sequence", format!("{name} = gspo")),
        PolicyTerm::Sapo => {
            for (tau, ours) in [("actor.tau_pos", "sapo_temperature_pos"), ("actor.tau_neg", "sapo_temperature_neg")] {
                if let Some(value) = theirs.take(tau) {
                    draft.set(ours, value, format!("it was {tau}"));
                }
            }
        }
        PolicyTerm::Cispo | PolicyTerm::Clipped => (),
    }
    form
}

/// Clipping: verl uses the two sides, 0.2 each if not set, whatever `clip_ratio` is, and bounds the ratio of negative advantages at 3.
fn clipping(theirs: &mut ForeignKeys, draft: &mut Draft, form: PolicyTerm) {
    const BOTH: &str = "actor.clip_ratio";
    const LOW: &str = "actor.clip_ratio_low";
    const HIGH: &str = "actor.clip_ratio_high";
    const MOST: &str = "actor.clip_ratio_c";
    if theirs.take(BOTH).is_some() {
        let why = format!("verl uses {LOW} and {HIGH} instead, each 0.2 by default");
        draft.drop(BOTH, &why);
    }
    match form {
        PolicyTerm::Cispo => {
            let high = theirs.take_number(HIGH).unwrap_or(0.2);
            draft.set("epsilon_high", 1.0 + high, format!("1 + {HIGH}, because cispo limits the ratio itself"));
            let low = theirs.take(LOW).unwrap_or_else(|| 0.2.into());
            draft.lose(LOW, &low, "cispo has no lower limit of the ratio here");
        }
        PolicyTerm::Sapo => {
            for name in [LOW, HIGH] {
                if theirs.take(name).is_some() {
                    draft.drop(name, "sapo does not clip");
                }
            }
        }
        PolicyTerm::Clipped | PolicyTerm::Gspo if theirs.has(LOW) && !theirs.has(HIGH) => {
            draft.set("epsilon_high", 0.2, format!("verl's default of {HIGH}"));
        }
        PolicyTerm::Clipped | PolicyTerm::Gspo => (),
    }
    match form {
        PolicyTerm::Clipped if !theirs.has(MOST) => {
            draft.set("delta", 3, format!("verl's default of {MOST}, which limits the ratio for negative advantages"));
        }
        PolicyTerm::Clipped => (),
        _ if theirs.take(MOST).is_some() => draft.drop(MOST, "it has no effect in this form of the policy term"),
        _ => (),
    }
}

/// How token losses are reduced to one number.
fn aggregation(theirs: &mut ForeignKeys, draft: &mut Draft, form: PolicyTerm, has_several_updates: bool) {
    const NAME: &str = "actor.loss_agg_mode";
    let mode = theirs.take(NAME).unwrap_or_else(|| "token-mean".into());
    let written = mode.as_str().unwrap_or_default();
    match (form, written) {
        (PolicyTerm::Sapo, _) => {
            draft.set("loss_type", "sapo", format!("sapo averages tokens by sequence and ignores {NAME}"))
        }
        (PolicyTerm::Cispo, "token-mean") => draft.set("loss_type", "cispo", format!("{NAME} = token-mean")),
        (_, "token-mean") => {
            let of_update = "; verl divides by the tokens of each update, this program by the mean over the updates of a \
                 generation batch";
            let note = format!("verl's {NAME} token-mean{}", if has_several_updates { of_update } else { "" });
            draft.set("loss_type", "dapo", note);
        }
        (PolicyTerm::Clipped | PolicyTerm::Gspo, "seq-mean-token-mean") => {
            draft.set("loss_type", "grpo", format!("it was {NAME} seq-mean-token-mean"));
        }
        (PolicyTerm::Clipped | PolicyTerm::Gspo, "seq-mean-token-sum-norm") => {
            draft.set("loss_type", "dr_grpo", format!("it was {NAME} seq-mean-token-sum-norm"));
        }
        _ => draft.lose(NAME, &mode, "loss_type = grpo, dr_grpo or dapo"),
    }
    if let Some(factor) = theirs.take("actor.loss_scale_factor") {
        match written {
            "seq-mean-token-sum-norm" => {
                draft.lose("actor.loss_scale_factor", &factor, "dr_grpo divides by max_completion_length");
            }
            _ => draft.drop("actor.loss_scale_factor", "it has an effect only with seq-mean-token-sum-norm"),
        }
    }
}

fn advantages(theirs: &mut ForeignKeys, draft: &mut Draft) {
    match theirs.take("algorithm.norm_adv_by_std_in_grpo") {
        Some(Value::Bool(false)) => draft.set("scale_rewards", "none", "algorithm.norm_adv_by_std_in_grpo is false"),
        Some(_) => draft.drop("algorithm.norm_adv_by_std_in_grpo", "the default scale_rewards = group does the same"),
        None => (),
    }
    let name = "algorithm.adv_estimator";
    match theirs.take(name) {
        Some(estimator) if estimator == "rloo" => {
            draft.set("advantage_estimator", "rloo", format!("it was {name}"));
            draft.set("scale_rewards", "none", "verl's rloo does not divide by the standard deviation");
        }
        Some(estimator) if estimator != "grpo" => draft.lose(name, &estimator, "advantage_estimator = grpo or rloo"),
        Some(_) => draft.drop(name, "GRPO's advantages are the default"),
        None => draft.lose(
            name,
            &"gae".into(),
            "verl's default, because it is not set; it needs a critic, so GRPO's advantages are used here",
        ),
    }
}

/// The KL divergence in the loss or in the reward.
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
        unread.for_each(|name| draft.drop(name, "this KL divergence is switched off"));
    }
    let (coef, kind, default) = match (in_loss, in_reward) {
        (true, false) => of_loss,
        (true, true) => {
            let why = "the KL divergence can be either in the loss or in the reward; it is in the loss";
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
    let weight = theirs.take_number(coef).unwrap_or(0.001);
    draft.set("beta", weight, format!("it was {coef}, because {whose} is true"));
    let named = theirs.take(kind).unwrap_or_else(|| default.into());
    if weight == 0.0 {
        return draft.drop(kind, "with a weight of 0 there is no KL divergence");
    }
    if in_loss {
        draft.set("use_bias_correction_kl", false, "verl does not multiply the KL divergence in the loss by the ratio");
    }
    match named.as_str() {
        Some("kl" | "k1") => draft.set("kl_estimator", "k1", format!("{kind} = {named}")),
        Some("mse" | "k2" | "mse+" | "k2+") => draft.set("kl_estimator", "k2", format!("{kind} = {named}")),
        Some("low_var_kl" | "k3") => draft.drop(kind, "verl's low_var_kl is the default kl_estimator = k3"),
        _ => draft.lose(kind, &named, "kl_estimator = k1, k2 or k3"),
    }
}

/// The importance sampling correction, which is off by default in verl. verl 0.9 has it as `algorithm.rollout_correction`, 0.6 as
/// `algorithm.rollout_is*`, 0.5 as `actor.tis_imp_ratio_cap`.
fn correction(theirs: &mut ForeignKeys, draft: &mut Draft) {
    const TABLE: &str = "algorithm.rollout_correction";
    let [kind, threshold, bypass, loss, averaged] =
        ["rollout_is", "rollout_is_threshold", "bypass_mode", "loss_type", "rollout_is_batch_normalize"]
            .map(|name| format!("{TABLE}.{name}"));
    for name in [&bypass, &averaged] {
        if theirs.take_if(name, |value| *value == false).is_some() {
            draft.drop(name, "off");
        }
    }
    if !theirs.has(&bypass) && theirs.take(&loss).is_some() {
        draft.drop(&loss, "it has an effect only with bypass_mode");
    }
    let cap = theirs.take_if("actor.tis_imp_ratio_cap", Value::is_number);
    let bound = theirs.take(&threshold);
    let level = theirs.take(&kind);
    let (mode, bound, named) = match (level.as_ref().and_then(Value::as_str), cap.and_then(|cap| cap.as_f64())) {
        (Some(level @ ("token" | "sequence")), _) => {
            (format!("{level}_truncate"), bound.unwrap_or_else(|| 2.0.into()), kind)
        }
        (Some(_), _) => {
            return draft.lose(
                &kind,
                &level.unwrap_or_default(),
                "importance_sampling_mode = token_truncate or sequence_truncate",
            );
        }
        (None, Some(cap)) if cap > 0.0 => ("token_truncate".into(), cap.into(), "actor.tis_imp_ratio_cap".to_owned()),
        (None, cap) => {
            for name in [(bound.is_some(), threshold.as_str()), (cap.is_some(), "actor.tis_imp_ratio_cap")] {
                if name.0 {
                    draft.drop(name.1, "it has no effect without a correction");
                }
            }
            let note = format!("verl's default of {kind}: no correction for the sampler");
            return draft.set("importance_sampling_correction", false, note);
        }
    };
    draft.set("importance_sampling_mode", mode, format!("it was {named}"));
    match bound.as_f64().or_else(|| bound.as_str().and_then(|text| text.parse().ok())) {
        Some(most) => draft.set("importance_sampling_clip_max", most, format!("{threshold}, by default 2")),
        None => draft.lose(&threshold, &bound, "importance_sampling_clip_max must be a single number"),
    }
}
