//! On-policy distillation from a teacher model.

use std::path::Path;

use crate::checkpoint::Runs;
use crate::program::{MODEL, run};

/// With the policy as teacher the gradient is zero. With another teacher the policy moves towards it, and a resumed run equals an uninterrupted one
/// bit
/// for bit.
#[test]
fn distillation_moves_the_policy_towards_another_teacher_only() {
    let runs = Runs::new();
    let teacher = |folder: &Path| format!("teacher_model_name_or_path={}", folder.display());
    let value = |run: &str, step, name: &str| runs.metrics(run)[&(step, false)].values[name];

    let model = Path::new("configs/arithmetic/model");
    let on_host = ["max_steps=1", "save_steps=none", "zero.stage=3", "residency.reference=host"];
    runs.train_to_the_end("own", 2, &[&[&*teacher(model)][..], &on_host].concat());
    for name in ["distillation/kl", "loss", "grad_norm"] {
        assert_eq!(value("own", 1, name), 0.0, "{name}");
    }
    // Over the teacher's most probable tokens, too.
    let top = ["distillation_mode=topk_logits", "distillation_topk=8", "distillation_add_tail=true"];
    let forward = ["distillation_alpha=0", "temperature=0.7"];
    runs.train_to_the_end("own-top", 2, &[&[&*teacher(model)][..], &on_host, &top, &forward].concat());
    for name in ["distillation/kl", "loss", "grad_norm"] {
        assert_eq!(value("own-top", 1, name), 0.0, "{name} over several tokens");
    }
    let weights = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(weights(&runs.path("own/final")) == weights(model));

    runs.train_to_the_end("other", 2, &["max_steps=3", "save_steps=none", "learning_rate=3e-3"]);
    let other = teacher(&runs.path("other/final"));
    let student = ["max_steps=8", "save_steps=4", "learning_rate=1e-3", "lr_scheduler_type=constant", &other];
    runs.train_to_the_end("student", 2, &student);
    let [first, last] = [1, 8].map(|step| value("student", step, "distillation/kl"));
    println!("{first} nats a token from the teacher before, {last} after 7 updates");
    assert!(first > 1e-3 && last < 0.8 * first, "{first} and {last}");
    let by_top = [&student[..], &top, &["max_steps=4", "save_steps=none"]].concat();
    runs.train_to_the_end("by-top", 2, &by_top);
    let [before, after] = [1, 4].map(|step| value("by-top", step, "distillation/kl"));
    println!("{before} nats over eight tokens, {after} after 3 updates");
    assert!(before > 1e-3 && after < 0.8 * before && value("by-top", 1, "grad_norm") > 1e-3, "{before} and {after}");
    runs.train_to_the_end("resumed", 2, &[&student[..], &[&runs.resume("student", 4)]].concat());
    runs.assert_same("resumed", "student", &[5, 6, 7, 8]);
}

/// A teacher of another shape on the training rank, which trains adapters. The generating rank does not load it.
#[test]
fn a_larger_teacher_trains_adapters_in_split_mode() {
    let runs = Runs::new();
    let place = runs.path("teacher").display().to_string();
    let made = run(&format!("init --preset micro --tokenizer {MODEL} --output {place}"));
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let teacher = format!("teacher_model_name_or_path={place}");
    let keys = ["lora.r=4", "mode=split", "split.rollout_gpus=1", "tensor_parallel_size=1", "residency.optimizer=auto"];
    let ended = runs.train_to_the_end("split", 2, &[&keys[..], &["max_steps=2", "save_steps=none", &teacher]].concat());
    assert!(ended.output.contains("teacher weights"), "in the plan: {}", ended.output);
    let values = &runs.metrics("split")[&(1, false)].values;
    assert!(values["distillation/kl"] > 0.1 && values["grad_norm"] > 1e-3, "{values:?}");
}

/// A teacher whose heads fewer ranks can share than the policy's: so many ranks are no choice. Where memory is short for all numbers, the plan
/// says so, and nothing of heads.
#[test]
fn ranks_share_micro_batches_as_the_teacher_can_share_them() {
    let folder = tempfile::tempdir().unwrap();
    let teacher = folder.path().join("teacher");
    let place = teacher.display();
    let made = run(&format!("init --preset micro --tokenizer {MODEL} --output {place}"));
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let path = teacher.join("config.json");
    let four = std::fs::read_to_string(&path).unwrap();
    let two = four.replace("\"num_attention_heads\": 4", "\"num_attention_heads\": 2");
    assert_ne!(four, two);
    std::fs::write(&path, two).unwrap();
    let plan = format!(
        "plan --nproc 4 --config configs/tiny-cpu.toml teacher_model_name_or_path={place} sequence_parallel_size=auto"
    );
    let planned = run(&plan);
    assert!(planned.stdout.contains("free while training, of 1, 2\n"), "{}{}", planned.stdout, planned.stderr);
    run(&format!("{plan} kv_cache_bytes=1000000000000000")).assert_error("a cache", 4, &["per rank and", "available"]);
}
