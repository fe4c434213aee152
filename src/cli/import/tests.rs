//! Tests that every key of another trainer's configuration is translated or noted.

use serde_json::{Value, json};

use super::*;
use crate::config::ForeignEntry;
use crate::migration::{self, HARMLESS, KEYS, RENAMED};

/// Keys that the rules of translation handle, besides those of the dictionary.
const TAKEN_BY_RULES: &[&str] = &[
    "rollout.val_kwargs.do_sample",
    "dtype",
    "save_steps",
    "eval_steps",
    "lr_scheduler_type",
    "lr_scheduler_kwargs.min_lr",
    "lr_scheduler_kwargs.min_lr_rate",
    "dataset_mixture.datasets",
    "dataset_mixture.seed",
    "dataset_mixture.test_split_size",
    "test_split_size",
    "custom_reward_function.path",
    "custom_reward_function.name",
    "data.train_batch_size",
    "actor.kl_loss_type",
    "actor.loss_agg_mode",
    "algorithm.kl_penalty",
    "rollout.pipeline_model_parallel_size",
    "rollout.expert_parallel_size",
    "rollout.enable_rollout_routing_replay",
];

/// A key as read from a file; unambiguous foreign values are converted already.
fn entry(key: &str, value: &Value) -> ForeignEntry {
    match migration::value(key, value) {
        Some(ours) => (key.to_owned(), ours, Some(value.clone())),
        None => (key.to_owned(), value.clone(), None),
    }
}

/// Translates keys, as keys of a script if `is_script`.
fn translated(entries: Vec<ForeignEntry>, is_script: bool) -> (Draft, String) {
    let files = HydraFiles { entries, ..HydraFiles::default() };
    super::translated(Foreign { files, is_script, ..Foreign::default() }, None)
}

/// Translates, and fails unless every key is mentioned by its full name.
fn assert_accounted(theirs: &[ForeignEntry]) -> Draft {
    let (mut draft, _) = translated(theirs.to_vec(), true);
    let _ = draft.check();
    let notes = draft.notes().join("\n");
    let is_name = |c: char| c.is_ascii_alphanumeric() || "_.".contains(c);
    let words: Vec<&str> = notes.split(|c| !is_name(c)).map(|word| word.trim_matches('.')).collect();
    for (key, value, _) in theirs {
        let is_said = words.contains(&key.as_str()) || words.contains(&migration::bare(key));
        assert!(is_said || draft.keeps(key), "{key} = {value} of {} keys is in no list:\n{notes}", theirs.len());
    }
    draft
}

fn lists(theirs: &[(&str, Value)]) -> Vec<String> {
    let theirs: Vec<_> = theirs.iter().map(|(key, value)| entry(key, value)).collect();
    let mut notes = assert_accounted(&theirs).notes();
    notes.retain(|note| !note.starts_with("MISSING")); // a few keys are no run
    notes
}

#[test]
fn evaluations_of_verl_are_greedy_unless_they_sample() {
    let said = |more: &[(&str, Value)]| {
        let files = ("data.val_files", json!("v.parquet"));
        let more =
            more.iter().map(|(key, value)| (format!("actor_rollout_ref.rollout.val_kwargs.{key}"), value.clone()));
        let more: Vec<_> = more.collect();
        lists(&more.iter().map(|(key, value)| (&key[..], value.clone())).chain([files]).collect::<Vec<_>>()).join("\n")
    };
    let default = said(&[]);
    assert!(default.contains("eval_temperature = 0: verl's default"), "{default}");
    let greedy = said(&[("do_sample", json!(false)), ("temperature", json!(0.6)), ("n", json!(4))]);
    for part in [
        "eval_temperature = 0: rollout.val_kwargs.do_sample is false",
        "rollout.val_kwargs.n = 4: verl makes one greedy",
    ] {
        assert!(greedy.contains(part), "{part}: {greedy}");
    }
    let sampled = said(&[("do_sample", json!(true)), ("temperature", json!(0.6)), ("n", json!(4))]);
    assert!(
        sampled.contains("eval_temperature = 0.6: it was") && sampled.contains("eval_num_generations = 4"),
        "{sampled}"
    );
}

#[test]
fn every_imported_key_is_translated_or_noted() {
    let names = KEYS.iter().flat_map(|(names, _)| *names).chain(HARMLESS).chain(TAKEN_BY_RULES);
    let names = names.copied().chain(RENAMED.iter().map(|(theirs, _)| *theirs));
    let whole = |name: &str| match name.split('.').next() {
        Some("actor" | "rollout" | "ref" | "model") => format!("actor_rollout_ref.{name}"),
        _ => name.to_owned(),
    };
    let mut names: Vec<String> = names.map(|name| whole(&name.replace('*', "x"))).collect();
    names.sort();
    names.dedup();
    for key in &names {
        for value in [json!(true), json!("no"), json!(50)] {
            assert_accounted(&[entry(key, &value)]);
        }
    }
    let (of_verl, of_trl): (Vec<_>, Vec<_>) = names.iter().partition(|name| {
        ["actor_rollout_ref.", "data.", "algorithm.", "trainer."].iter().any(|table| name.starts_with(table))
    });
    for value in [
        json!(true),
        json!(false),
        json!("no"),
        json!("steps"),
        json!(0),
        json!(-1),
        json!(0.5),
        json!(8),
        json!([]),
        json!(null),
    ] {
        for keys in [&of_verl, &of_trl] {
            assert_accounted(&keys.iter().map(|key| entry(key, &value)).collect::<Vec<_>>());
        }
    }
}

#[test]
fn keys_without_an_equivalent_are_in_the_last_list() {
    let notes = lists(&[
        ("optim", json!("adafactor")),
        ("fp16", json!(true)),
        ("torch_dtype", json!("float16")),
        ("vllm_structured_outputs_regex", json!("[0-9]+")),
        ("lr_scheduler_type", json!("polynomial")),
        ("save_steps", json!(0.1)),
        ("bf16", json!(true)),
    ]);
    let lost = notes.last().unwrap();
    for part in [
        "optim = \"adafactor\"",
        "fp16 = true",
        "torch_dtype = \"float16\"",
        "vllm_structured_outputs_regex",
        "linear is the nearest",
        "that share x max_steps",
    ] {
        assert!(lost.contains("WITHOUT") && lost.contains(part), "{part}: {lost}");
    }
    assert!(notes[0].starts_with("LEFT OUT") && notes[0].contains("bf16"), "{notes:?}");
    let notes = lists(&[("optim", json!("adamw_torch_fused"))]);
    assert!(!notes.concat().contains("WITHOUT"), "{notes:?}");
}

#[test]
fn the_batch_of_several_nodes_is_divided_over_all_gpus() {
    let batch = [
        ("algorithm.adv_estimator", json!("grpo")),
        ("data.train_batch_size", json!(64)),
        ("actor.ppo_mini_batch_size", json!(64)),
        ("rollout.n", json!(8)),
    ];
    let on = |nodes: u64| {
        let place = [("trainer.n_gpus_per_node", json!(8)), ("trainer.nnodes", json!(nodes))];
        let theirs: Vec<_> = batch.iter().chain(&place).map(|(key, value)| entry(key, value)).collect();
        assert_accounted(&theirs).text("run.yaml".as_ref(), "verl")
    };
    let (one, two) = (on(1), on(2));
    assert!(
        one.contains("colo-grpo --nproc 8 --config") && one.contains("\nper_device_train_batch_size = 64\n"),
        "{one}"
    );
    assert!(two.contains("--nproc 8 --nnodes 2 --node_rank RANK --master_addr NODE_0 --config"), "{two}");
    assert!(two.contains("\nper_device_train_batch_size = 32\n") && !two.contains("WITHOUT"), "{two}");
}

#[test]
fn verl_engine_settings_for_precision_and_experts_are_imported() {
    let place = [
        ("model.path", json!("m")),
        ("data.train_files", json!("rows.parquet")),
        ("trainer.n_gpus_per_node", json!(8)),
        ("data.train_batch_size", json!(64)),
        ("rollout.n", json!(8)),
        ("algorithm.adv_estimator", json!("grpo")),
        ("algorithm.rollout_correction.rollout_is", json!("token")),
    ];
    let imported = |keys: &[(&str, Value)]| {
        let theirs: Vec<_> = place.iter().chain(keys).map(|(key, value)| entry(key, value)).collect();
        assert_accounted(&theirs).text("run.yaml".as_ref(), "verl")
    };
    let text = imported(&[
        ("rollout.quantization", json!("fp8")),
        ("+rollout.engine_kwargs.vllm.kv_cache_dtype", json!("fp8_e4m3")),
        ("rollout.tensor_model_parallel_size", json!(4)),
        ("rollout.expert_parallel_size", json!(4)),
        ("actor.router_replay.mode", json!("R3")),
        ("rollout.enable_rollout_routing_replay", json!(true)),
        ("actor.megatron.tensor_model_parallel_size", json!(2)),
    ]);
    for line in [
        "rollout_quantization = \"fp8\"",
        "kv_cache_dtype = \"fp8\"",
        "enable_expert_parallel = true",
        "router_replay = \"R3\"",
    ] {
        assert!(text.contains(&format!("\n{line}\n")) && !text.contains("WITHOUT"), "{line}: {text}");
    }
    let text = imported(&[
        ("rollout.expert_parallel_size", json!(8)),
        ("rollout.pipeline_model_parallel_size", json!(2)),
        ("actor.router_replay.mode", json!("R2")),
    ]);
    let lost = text.split("WITHOUT").nth(1).unwrap();
    for part in ["expert_parallel_size = 8", "several engines generate faster", "R2 replays the trainer's own"] {
        assert!(lost.contains(part), "{part}: {text}");
    }
    assert!(imported(&[]).contains("\nrouter_replay = \"disabled\"\n"));
}

#[test]
fn dapo_filter_groups_becomes_dynamic_sampling() {
    let filtered = |enable: bool| {
        let most = "algorithm.filter_groups.max_num_gen_batches";
        let own = [("algorithm.adv_estimator", json!("grpo")), ("rollout.n", json!(8))];
        lists(&[&own[..], &[("algorithm.filter_groups.enable", json!(enable)), (most, json!(10))]].concat()).join("\n")
    };
    let on = filtered(true);
    for part in ["dynamic_sampling = \"replace\": ", "dynamic_sampling_max_gen_batches = 10: "] {
        assert!(on.contains(part) && !on.contains("WITHOUT"), "{part}: {on}");
    }
    let overlong = lists(&[("reward_model.overlong_buffer.len", json!(4096)), ("data.seed", json!(1))]).concat();
    assert!(overlong.contains("overlong_buffer.len = 4096: the reward soft_overlong_punishment"), "{overlong}");
    let off = filtered(false);
    assert!(!off.contains("dynamic_sampling") && !off.contains("WITHOUT"), "{off}");
}

#[test]
fn unresolved_shell_variables_are_not_taken_as_values() {
    let notes = lists(&[("data.train_files", json!(["${ROOT}/a.parquet"])), ("data.val_files", json!("v.parquet"))]);
    let lost = notes.last().unwrap();
    assert!(
        lost.contains("WITHOUT")
            && lost.contains("data.train_files = [\"${ROOT}/a.parquet\"]: expected a value without variables"),
        "{lost}"
    );
    assert!(!notes[0].contains("train_file"), "{notes:?}");
    let mathematics = entry("system_prompt", &json!("Solve for $x$."));
    let reference = entry("run_name", &json!("${model_name_or_path}-grpo"));
    let (draft, _) = translated(vec![mathematics, reference], false);
    assert!(draft.has("system_prompt") && !draft.has("run_name"), "{:?}", draft.notes());
}

#[test]
fn transformers_constant_scheduler_imports_without_warmup() {
    for (name, is_kept) in [("constant", false), ("constant_with_warmup", true), ("cosine", true)] {
        let theirs: Vec<_> = [("lr_scheduler_type", json!(name)), ("warmup_ratio", json!(0.1))]
            .map(|(key, value)| entry(key, &value))
            .into();
        let draft = assert_accounted(&theirs);
        assert_eq!(draft.has("warmup_ratio"), is_kept, "{name}: {:?}", draft.notes());
    }
}

#[test]
fn a_key_given_twice_is_imported_once() {
    let both = [("torch_dtype", json!("bfloat16")), ("dtype", json!("float32"))];
    let notes = lists(&both);
    assert!(notes[0].contains("WITHOUT") && notes[0].contains("torch_dtype = \"bfloat16\""), "{notes:?}");
    let notes = lists(&[("num_generations_eval", json!(4)), ("eval_num_generations", json!(8))]);
    assert!(notes[0].contains("it was num_generations_eval; eval_num_generations = 8 is used instead"), "{notes:?}");
}

#[test]
fn lora_defaults_are_those_of_trl_and_peft() {
    let notes = lists(&[("use_peft", json!(true))]);
    for part in ["lora.r = 16", "lora.dropout = 0.05", "lora.target_modules = [\"q_proj\",\"v_proj\"]"] {
        assert!(notes[0].starts_with("changed") && notes[0].contains(part), "{part}: {notes:?}");
    }
    let notes =
        lists(&[("use_peft", json!(true)), ("lora_dropout", json!(0.0)), ("lora_target_modules", json!("all-linear"))]);
    assert!(!notes[0].contains("0.05") && notes[0].contains("\"all-linear\""), "{notes:?}");
}

#[test]
fn missing_required_keys_are_noted() {
    let (mut draft, _) = translated(vec![entry("learning_rate", &json!(1e-6))], true);
    draft.check().unwrap();
    let missing = draft.notes().pop().unwrap();
    assert!(missing.starts_with("MISSING") && !missing.contains("saved configuration"), "{missing}");
    for key in ["model_name_or_path: expected a path", "reward_funcs: expected a list", "train_file: expected a value"]
    {
        assert!(missing.contains(key) && !missing.contains("required"), "{key}: {missing}");
    }
}
