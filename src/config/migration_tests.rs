//! Tests of keys and values of other trainers in a configuration.

use super::tests::{config, message};
use super::{AutoOr, Config, GradientCheckpointing, LrSchedulerType, ScaleRewards, SftConfig};
use crate::migration::{HARMLESS, KEYS, NONE, RENAMED, advice, is_harmless, renamed};

#[test]
fn migration_hints_cover_only_foreign_keys_and_all_are_reachable() {
    for key in Config::keys().iter().chain(&SftConfig::keys()) {
        assert_eq!(advice(key), None, "{key}");
    }
    for (names, text) in KEYS {
        names.iter().for_each(|name| assert_eq!(advice(name), Some(*text), "{name}"));
    }
    assert_eq!(advice("+actor_rollout_ref.rollout.n"), Some("num_generations"));
}

/// `import` renames or drops only keys of other trainers, and renames them to known keys.
#[test]
fn renamed_and_harmless_keys_are_in_the_dictionary() {
    for (theirs, ours) in RENAMED {
        assert!(Config::keys().iter().any(|key| key == ours), "{ours}");
        assert!(advice(theirs).is_some_and(|advice| advice.contains(ours)), "{theirs}");
        assert!(!is_harmless(theirs) || theirs.starts_with("vllm_"), "{theirs}");
    }
    for name in HARMLESS {
        assert!(advice(name.trim_end_matches('*')).is_some_and(|advice| !advice.is_empty()), "{name}");
        assert!(!Config::keys().iter().any(|key| is_harmless(key)), "{name}");
    }
    assert_eq!(renamed("cosine_max_len").as_deref(), Some("reward.cosine_max_len"));
    assert_eq!(renamed("data.apply_chat_template_kwargs.level").as_deref(), Some("chat_template_kwargs.level"));
}

/// Every hint names a known key, or says that there is no equivalent.
#[test]
fn every_migration_hint_names_a_known_key_or_says_there_is_none() {
    for (key, part) in [
        ("hub_strategy", "hf upload"),
        ("wandb_project", "WANDB_PROJECT"),
        ("use_lora", "lora.r"),
        ("hf_token", "HF_TOKEN"),
        ("dataset_configs", "dataset_config"),
        ("lr_scheduler_kwargs.min_lr", "lr_scheduler_kwargs.min_lr_rate"),
        ("num_completions_to_print", "log_completions"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "eval_temperature"),
        ("actor_rollout_ref.rollout.val_kwargs.top_p", "as training does"),
        ("actor_rollout_ref.actor.kl_loss_type", "low_var_kl"),
        ("algorithm.adv_estimator", "advantage_estimator = grpo or rloo"),
        ("vllm_importance_sampling_clip_min", "importance_sampling_clip_min"),
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
fn values_of_other_trainers_have_a_migration_hint() {
    let said = message(&["loss_type=gspo"]);
    assert!(said.contains("one of grpo, ") && said.contains("importance_sampling_level = \"sequence\""), "{said}");
    assert!(message(&["mixed_precision=bf16"]).contains("dtype = \"bfloat16\""));
    assert!(message(&["kl_estimator=low_var_kl", "beta=0.1"]).contains("kl_estimator = \"k3\""));
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
fn unambiguous_trl_values_are_accepted() {
    let given = ["max_steps=-1", "top_k=-1", "resume_from_checkpoint=true", "gradient_checkpointing=true"];
    let config = config(&[&given[..], &["scale_rewards=false", "lr_scheduler_type=constant_with_warmup"]].concat());
    assert_eq!((config.optimizer.max_steps, config.top_k), (None, 0));
    assert_eq!(config.output.resume_from_checkpoint.as_deref(), Some("latest"));
    assert_eq!(config.gradient_checkpointing, AutoOr::Given(GradientCheckpointing::Full));
    assert_eq!(config.scale_rewards, ScaleRewards::None);
    assert_eq!(config.optimizer.lr_scheduler_type, LrSchedulerType::Constant);
    assert!(message(&["num_generations=-1"]).contains("a whole number of at least 2"));
}

#[test]
fn a_converted_value_is_reported_once_and_saved_converted() {
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    let required = "model_name_or_path = 'm'\ntrain_file = 't'\nreward_funcs = ['format']\n";
    std::fs::write(file.path(), format!("{required}top_k = -1\nmax_steps = -1\n")).unwrap();
    let load = |overrides: &[&str]| {
        let (mut notices, overrides) = (Vec::new(), overrides.iter().map(|&text| text.to_owned()).collect::<Vec<_>>());
        let config = Config::load_noting(Some(file.path()), &overrides, &mut notices).unwrap();
        (config, notices)
    };
    let (read, notices) = load(&["max_steps=7"]);
    assert_eq!(notices, [format!("{}:4: top_k = -1 is read as top_k = 0", file.path().display())]);
    let (ours, notices) = load(&["max_steps=7", "top_k=0"]);
    assert_eq!(notices, [""; 0], "what the command line overrides is not read at all");
    assert_eq!(read, ours);
    assert!(read.to_toml().contains("\ntop_k = 0\n"));
}
