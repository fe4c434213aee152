//! LoRA adapters: numbers and files equal PEFT's, every ZeRO stage, and whole runs.

mod experts;
mod peft;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use colo_grpo::internal::config::{GradientCheckpointing, Quantization, TargetModule};
use colo_grpo::internal::model::{AttentionSpec, LoraSpec, ModelSpec, ParamTable, Plain, Unit, UnitLayout, init_unit};
use colo_grpo::internal::ranks::{Mesh, World};
use colo_grpo::internal::train::{
    AdamOptions, AdapterOptions, GradientOptions, MicroBatch, NetworkOptions, Optim, OptimizerHome, PackOptions,
    ParamState, Policy, PolicyOptions, Sequence, StatePart, TokenGradients, pack,
};
use safetensors::SafeTensors;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::program::{MODEL, SMALL_RUN, command, end, json_lines, metrics, run, stdout_of};
use crate::ranks;

const ADAM: AdamOptions = AdamOptions { beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1 };

fn options(stage: u8, (kind, residual): (Kind, Kind)) -> PolicyOptions {
    PolicyOptions {
        stage,
        network: NetworkOptions { kind, residual, device: Device::Cpu, format: &Plain },
        gradient_checkpointing: GradientCheckpointing::Selective,
        optim: Optim::AdamW,
        adam: ADAM,
        gradients: GradientOptions::default(),
    }
}

fn sequence(token_ids: Vec<u32>) -> Sequence {
    Sequence::of_tokens(token_ids, 1)
}

fn packed(sequences: &[Sequence], max_tokens: usize) -> Vec<MicroBatch> {
    let options = PackOptions { max_tokens, share_prompts: false, device: Device::Cpu };
    pack(sequences, &options).unwrap()
}

/// Computes gradients of the sum of negative log-likelihoods. Returns the sum.
fn backward(policy: &mut Policy, micro_batches: &[MicroBatch]) -> f64 {
    let mut nll = 0.0;
    for micro_batch in micro_batches {
        let loss = &mut |scores: &colo_grpo::internal::train::Scores| {
            nll -= scores.logprobs.sum(Kind::Double).double_value(&[]);
            Ok(TokenGradients {
                dlogprobs: scores.logprobs.ones_like().neg(),
                dentropy: None,
                dtop: None,
                daux_loss: 0.0,
            })
        };
        policy.forward_backward(micro_batch, 1.0, loss).unwrap();
    }
    nll
}

/// The trained units, assembled from the parts of the optimizer state that one rank owns.
fn units(policy: &Policy, part: fn(&ParamState) -> Tensor) -> BTreeMap<Unit, Tensor> {
    let mut units = BTreeMap::new();
    for shard in policy.export_state() {
        let shard = shard.unwrap();
        let layout = policy.trained_table().unit(shard.unit);
        let zeros = || Tensor::zeros([layout.len as i64], (Kind::Double, Device::Cpu));
        let flat = units.entry(shard.unit).or_insert_with(zeros);
        let start = layout.param(shard.name).unwrap().offset + shard.elements.start;
        flat.narrow(0, start as i64, shard.elements.len() as i64).copy_(&part(&shard.state));
    }
    units
}

/// Float32 tensors of `adapter_model.safetensors`, with their shapes.
fn tensors(folder: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
    let floats = |data: &[u8]| data.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter();
    tensors.map(|(name, tensor)| (name, (tensor.shape().to_vec(), floats(tensor.data())))).collect()
}

fn random_adapters(layout: &UnitLayout) -> colo_grpo::Result<Tensor> {
    let flat = init_unit(layout, 3, Kind::Double)?;
    for param in &layout.params {
        let mut view = layout.view(param.name, &flat).unwrap();
        let noise = Tensor::arange(view.numel() as i64, (Kind::Double, Device::Cpu)).sin() * 0.05;
        view += noise.view_as(&view);
    }
    Ok(flat.to_kind(Kind::BFloat16).to_kind(Kind::Double))
}

/// The model's shape and the projections that have adapters.
type Shape = (ModelSpec, Vec<TargetModule>);

fn dense() -> Shape {
    let sizes = ModelSpec::preset("micro").unwrap().with_widths(64, 128).map_attention(|_, attention| {
        attention.head_dim = 16;
        attention.scale = AttentionSpec::usual_scale(16);
    });
    (sizes, TargetModule::ALL.to_vec())
}

/// The first two of three layers have gated delta nets; they have adapters only if `targets` includes their projections.
fn hybrid(targets: &[TargetModule]) -> Shape {
    let mut spec = ModelSpec { vocab_size: 96, ..ModelSpec::preset("tiny-hybrid").unwrap() };
    spec.layers.remove(0);
    (spec, targets.to_vec())
}

/// A policy with adapters whose weights are exact in bfloat16.
fn adapted(mesh: &Mesh, stage: u8, kinds: (Kind, Kind), dropout: f64, quantization: Quantization) -> Policy {
    adapted_from(dense(), mesh, stage, kinds, dropout, (quantization, false))
}

fn adapted_from(
    (spec, targets): Shape,
    mesh: &Mesh,
    stage: u8,
    kinds: (Kind, Kind),
    dropout: f64,
    (quantization, keeps_initial): (Quantization, bool),
) -> Policy {
    let table = Arc::new(ParamTable::new(Arc::new(spec), mesh.shard.size()));
    let lora = LoraSpec { r: 3, alpha: 6.0, dropout, targets };
    let adapters = AdapterOptions { lora, quantization, seed: 5, keeps_initial, source: &random_adapters };
    let base = |layout: &UnitLayout| Ok(init_unit(layout, 1, Kind::BFloat16)?.to_kind(kinds.0));
    Policy::with_adapters(table, mesh, options(stage, kinds), OptimizerHome::Resident, &base, adapters).unwrap()
}

fn own_sequences(rank: usize) -> Vec<Sequence> {
    let ids = |n: usize| (0..7 + 3 * n).map(|at| ((at * 37 + n * 11 + rank * 5) % 96) as u32).collect();
    (0..3).map(|n| sequence(ids(n))).collect()
}

fn bits(tensor: &Tensor) -> Vec<u8> {
    colo_grpo::internal::torch::byte_vec(&tensor.to_device(Device::Cpu).contiguous()).unwrap()
}

/// Bits of the frozen weights.
fn base(policy: &Policy) -> Vec<Vec<u8>> {
    let units = policy.table().units.iter();
    units.map(|layout| bits(&policy.unit_weights(layout.unit).unwrap())).collect()
}

/// Bits of the adapters.
fn trained(policy: &Policy) -> Vec<Vec<u8>> {
    let units = policy.trained_table().units.iter();
    units.map(|layout| bits(&policy.trained_weights(layout.unit).unwrap())).collect()
}

#[test]
fn zero_stages_with_lora_are_bitwise_equal_and_keep_the_base() {
    ranks::run(2, "lora::zero_stages_with_lora_are_bitwise_equal_and_keep_the_base", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        let runs = [
            ((Kind::Float, Kind::Float), 0.0, Quantization::None),
            ((Kind::BFloat16, Kind::BFloat16), 0.2, Quantization::None),
            ((Kind::BFloat16, Kind::Float), 0.2, Quantization::None),
            ((Kind::Float, Kind::Float), 0.0, Quantization::Nf4),
            ((Kind::BFloat16, Kind::Float), 0.0, Quantization::Nf4),
        ];
        for (kinds, dropout, quantization) in runs {
            stages_equal(&mesh, &dense(), kinds, dropout, quantization);
        }
    });
}

/// Blocks have different sizes, and in the last case two of three blocks have no adapters.
#[test]
fn zero_stages_of_a_hybrid_with_lora_are_bitwise_equal() {
    ranks::run(2, "lora::zero_stages_of_a_hybrid_with_lora_are_bitwise_equal", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        let (float, narrow) = ((Kind::Float, Kind::Float), (Kind::BFloat16, Kind::Float));
        stages_equal(&mesh, &hybrid(TargetModule::ALL), float, 0.0, Quantization::None);
        stages_equal(&mesh, &hybrid(TargetModule::ALL), narrow, 0.2, Quantization::Nf4);
        let some = hybrid(&[TargetModule::QProj, TargetModule::OProj]);
        stages_equal(&mesh, &some, float, 0.0, Quantization::Nf4);
    });
}

/// The negative log-likelihoods before each of four updates.
fn four_updates(policy: &mut Policy, micro_batches: &[MicroBatch]) -> Vec<f64> {
    let update = |_| {
        let nll = backward(policy, micro_batches);
        assert!(!policy.optimizer_step(1e-2, 1.0).unwrap().skipped);
        nll
    };
    (0..4).map(update).collect()
}

fn stages_equal(mesh: &Mesh, shape: &Shape, kinds: (Kind, Kind), dropout: f64, quantization: Quantization) {
    let after = |stage| {
        let mut policy = adapted_from(shape.clone(), mesh, stage, kinds, dropout, (quantization, false));
        let micro_batches = packed(&own_sequences(mesh.world.rank()), 1000);
        let (before, frozen) = (base(&policy), policy.reference_logprobs(&micro_batches[0], 1.0).unwrap().logprobs);
        let adapted = policy.forward_logprobs(&micro_batches[0], 1.0).unwrap().logprobs;
        assert!(!adapted.equal(&frozen));
        let nlls = four_updates(&mut policy, &micro_batches);
        assert!(dropout > 0.0 || nlls[3] < nlls[0], "{nlls:?}");
        assert!(base(&policy) == before, "the base changed");
        assert!(policy.reference_logprobs(&micro_batches[0], 1.0).unwrap().logprobs.equal(&frozen));
        trained(&policy)
    };
    let expected = after(0);
    for stage in 1..=3 {
        assert!(after(stage) == expected, "stage {stage}, {kinds:?}");
    }
}

/// Adapters from an earlier run are the reference model, and training does not change this reference.
#[test]
fn initial_adapters_stay_the_reference_at_every_zero_stage() {
    ranks::run(2, "lora::initial_adapters_stay_the_reference_at_every_zero_stage", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        let micro_batches = packed(&own_sequences(world.rank()), 1000);
        let kinds = (Kind::Float, Kind::Float);
        for (stage, quantization) in [(0, Quantization::None), (2, Quantization::Nf4), (3, Quantization::None)] {
            let reference = |policy: &mut Policy| policy.reference_logprobs(&micro_batches[0], 1.0).unwrap().logprobs;
            let current = |policy: &mut Policy| policy.forward_logprobs(&micro_batches[0], 1.0).unwrap().logprobs;
            let mut policy = adapted_from(dense(), &mesh, stage, kinds, 0.3, (quantization, true));
            let initial = current(&mut policy);
            assert!(reference(&mut policy).equal(&initial), "stage {stage}");
            for _ in 0..3 {
                let _ = backward(&mut policy, &micro_batches);
                assert!(!policy.optimizer_step(1e-2, 1.0).unwrap().skipped);
            }
            assert!(reference(&mut policy).equal(&initial) && !current(&mut policy).equal(&initial), "stage {stage}");
            let base = reference(&mut adapted(&mesh, stage, kinds, 0.3, quantization));
            assert!(!base.equal(&initial), "stage {stage}");
        }
    });
}

/// In bfloat16 with either data type of the residual stream, whose rounding contributes little with so few blocks.
#[test]
fn bfloat16_lora_gradients_match_float32_up_to_rounding() {
    let mesh = World::single().mesh(1, 1).unwrap();
    for quantization in [Quantization::None, Quantization::Nf4] {
        let gradient = |kinds| {
            let mut policy = adapted(&mesh, 0, kinds, 0.0, quantization);
            let _ = backward(&mut policy, &packed(&own_sequences(0), 1000));
            let _ = policy.optimizer_step(0.0, 0.0).unwrap();
            Tensor::cat(
                &units(&policy, |state| state.part(StatePart::M).unwrap().shallow_clone())
                    .into_values()
                    .collect::<Vec<_>>(),
                0,
            )
        };
        let exact = gradient((Kind::Float, Kind::Float));
        let [narrow, wide] = [Kind::BFloat16, Kind::Float].map(|residual| {
            let gradient = gradient((Kind::BFloat16, residual));
            ((gradient - &exact).norm() / exact.norm()).double_value(&[])
        });
        println!("{quantization:?}: off by {wide:.2e} with a float32 stream, {narrow:.2e} without");
        assert!(narrow.max(wide) < 1e-2 && wide != narrow, "{quantization:?}: {wide:e}, {narrow:e}");
    }
}

const LORA: &str = "lora.r=8 lora.alpha=16 learning_rate=2e-3";

/// Greedy completions of a model folder, with their log-probabilities.
fn generate(model: &Path, more: &str) -> Vec<Value> {
    let words =
        format!("generate --model {} --chat --temperature 0 --max_completion_length 12 {more}", model.display());
    let mut command = command(&words);
    for prompt in ["what is two plus three ?", "what is forty plus two ?", "what is nine plus nine ?"] {
        command.args(["--prompt", prompt]);
    }
    let ended = end(command.spawn().unwrap());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    json_lines(&ended.stdout)
}

/// The engine samples with the adapters being trained: in place at ZeRO-2, next to gathered slices at ZeRO-3. The saved adapters
/// give the same results unmerged and merged.
#[test]
fn lora_adapters_are_trained_saved_and_served() {
    let folder = tempfile::tempdir().unwrap();
    for (name, more) in [
        ("in_place", "zero.stage=2 tensor_parallel_size=2 beta=0.05"),
        ("gathered", "zero.stage=3 tensor_parallel_size=2 lora.target_modules=[\"q_proj\",\"o_proj\",\"up_proj\"]"),
    ] {
        let output = folder.path().join(name);
        let run = format!("--nproc 2 {SMALL_RUN} {LORA} {more} max_steps=3 output_dir={}", output.display());
        stdout_of(&run);
        let lines = metrics(&output);
        assert_eq!(lines.len(), 3, "{name}");
        for line in &lines {
            let difference = line["sampling/sampling_logp_difference/max"].as_f64().unwrap();
            assert!(difference < 1e-4, "{name}: {line}");
        }
        if name == "in_place" {
            assert!(lines[0]["kl"].as_f64().unwrap().abs() < 1e-5, "B is zero at the start: {}", lines[0]);
            assert!(lines[2]["kl"].as_f64().unwrap() > 1e-5, "{}", lines[2]);
        }
        let adapters = output.join("final");
        assert!(adapters.join("adapter_model.safetensors").exists() && !adapters.join("config.json").exists());
        let merged = folder.path().join(format!("{name}-merged"));
        stdout_of(&format!("export --model {} --output {} --merge", adapters.display(), merged.display()));
        crate::program::run(&format!(
            "export --model {} --output {}-again --merge",
            merged.display(),
            merged.display()
        ))
        .assert_error(
            "a whole model",
            2,
            &["--merge = ", "expected a folder of LoRA adapters: this is a full model"],
        );
        let (own, whole) = (generate(&adapters, "--nproc 2 --tp 2"), generate(&merged, ""));
        let base = generate(Path::new(MODEL), "");
        assert!(own.iter().zip(&base).any(|(own, base)| own["logprob"] != base["logprob"]));
        for (own, whole) in own.iter().zip(&whole) {
            assert_eq!(own["completion"], whole["completion"], "{name}");
            let logprob = |line: &Value| line["logprob"].as_f64().unwrap();
            assert!((logprob(own) - logprob(whole)).abs() < 1e-3, "{name}: {own} {whole}");
        }
        let copied = folder.path().join(format!("{name}-copied"));
        stdout_of(&format!("export --model {} --output {}", adapters.display(), copied.display()));
        assert_eq!(tensors(&copied), tensors(&adapters), "{name}");
    }
}

#[test]
fn a_grpo_run_continues_supervised_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let row = r#"{"prompt": "what is one plus one ?", "completion": "the answer is 2"}"#;
    std::fs::write(folder.path().join("rows.jsonl"), format!("{row}\n").repeat(4)).unwrap();
    let words = |model: &Path, name: &str| {
        format!(
            "sft --config configs/arithmetic/warmup.toml device=cpu model_name_or_path={} train_file={place}/rows.jsonl \
             eval_file=none output_dir={place}/{name} per_device_train_batch_size=2 max_steps=4 warmup_steps=0 \
             logging_steps=1",
            model.display(),
            place = folder.path().display()
        )
    };
    let losses = |model: &Path, name: &str| -> Vec<f64> {
        stdout_of(&format!("{} {LORA}", words(model, name)));
        metrics(&folder.path().join(name)).iter().map(|line| line["loss"].as_f64().unwrap()).collect()
    };
    let first = losses(Path::new(MODEL), "first");
    assert!(first[3] < first[0], "{first:?}");
    let adapters = folder.path().join("first/final");
    let second = losses(&adapters, "second");
    assert!(second[0] < first[3], "{second:?} after {first:?}");
    run(&words(&adapters, "third")).assert_error("adapters without lora.r", 2, &["model_name_or_path", "or lora.r"]);
}

/// The adapters' file records the quantization of their base. They are sampled and merged with the same quantization.
#[test]
fn adapters_trained_on_nf4_are_served_on_nf4() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    stdout_of(&format!("{SMALL_RUN} {LORA} quantization=nf4 max_steps=2 output_dir={}", output.display()));
    let adapters = output.join("final");
    let sampled = |model: &Path, more: &str| {
        let line = format!(
            "generate --model {} --prompt what --temperature 0 --max_completion_length 4 {more}",
            model.display()
        );
        let ended = crate::program::run(&line);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        (json_lines(&ended.stdout)[0]["logprob"].as_f64().unwrap(), ended.stderr)
    };
    let ((as_trained, said), (dense, of_dense)) = (sampled(&adapters, ""), sampled(&adapters, "--quantization none"));
    assert!(said.contains("was trained on its base in NF4: the base is rounded to NF4 here as well"), "{said}");
    assert!(of_dense.contains("here the base is used as stored, so probabilities differ"), "{of_dense}");
    assert!((as_trained - dense).abs() > 1e-4, "{as_trained} {dense}");

    let exported = |name: &str, more: &str| {
        let to = folder.path().join(name);
        let ended =
            crate::program::run(&format!("export --model {} --output {} {more}", adapters.display(), to.display()));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        (to, ended.stderr)
    };
    let (merged, said) = exported("merged", "--merge");
    assert!(said.contains("merged into the weights in float32. The base weights were rounded to NF4 first"), "{said}");
    let (of_merged, quiet) = sampled(&merged, "");
    assert!((of_merged - as_trained).abs() < 1e-3 && !quiet.contains("NF4"), "{of_merged} {as_trained}: {quiet}");
    let (copied, _) = exported("copied", "");
    assert!(sampled(&copied, "").1.contains("in NF4: the base is rounded"), "a copy keeps what is known");
    let (onto_dense, said) = exported("onto_dense", "--merge --quantization none");
    assert!(
        said.contains("The base weights are used as stored, although the adapters were trained on a base in NF4"),
        "{said}"
    );
    assert!((sampled(&onto_dense, "").0 - dense).abs() < 1e-3);

    // A base in bfloat16: what is merged is rounded, which is said.
    let half = crate::program::copy_of_model(&folder.path().join("half"));
    let config = std::fs::read_to_string(half.join("config.json")).unwrap();
    std::fs::write(half.join("config.json"), config.replace("\"float32\"", "\"bfloat16\"")).unwrap();
    let (_, said) = exported("halved", &format!("--merge --base_model {}", half.display()));
    assert!(said.contains("The sums were rounded to bfloat16, the dtype of the base's files"), "{said}");
}

/// As in TRL by default, the KL term of a run that continues adapters is relative to these, before and after a resume.
#[test]
fn a_run_started_from_adapters_uses_them_as_reference() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().display();
    let row = r#"{"prompt": "what is one plus one ?", "completion": "the answer is 2"}"#;
    std::fs::write(folder.path().join("rows.jsonl"), format!("{row}\n").repeat(4)).unwrap();
    stdout_of(&format!(
        "sft --config configs/arithmetic/warmup.toml device=cpu model_name_or_path={MODEL} train_file={place}/rows.jsonl \
         eval_file=none output_dir={place}/sft per_device_train_batch_size=2 max_steps=4 warmup_steps=0 {LORA}"
    ));
    let run = |name: &str, more: &str| -> Vec<Vec<u64>> {
        let line =
            format!("--nproc 2 {SMALL_RUN} {LORA} model_name_or_path={place}/sft/final beta=0.1 save_steps=2 {more}");
        stdout_of(&format!("{line} output_dir={place}/{name}"));
        let numbers =
            |line: &Value| ["kl", "loss", "grad_norm"].map(|key| line[key].as_f64().unwrap().to_bits()).to_vec();
        metrics(&folder.path().join(name)).iter().map(numbers).collect()
    };
    let kl = |lines: &[Vec<u64>], step: usize| f64::from_bits(lines[step][0]);
    for (name, more) in [
        ("whole", "max_steps=4"),
        ("sharded", "max_steps=2 zero.stage=3"),
        ("split", "max_steps=2 mode=split split.rollout_gpus=1 residency.optimizer=auto"),
    ] {
        let lines = run(name, more);
        assert!(kl(&lines, 0).abs() < 1e-6 && kl(&lines, 1) > 1e-6, "{name}: {} {}", kl(&lines, 0), kl(&lines, 1));
        if name == "whole" {
            let resumed = run("resumed", &format!("{more} resume_from_checkpoint={place}/whole/checkpoint-2"));
            assert_eq!(resumed, lines[2..], "the copy is that of the first start");
        }
    }
    assert!(kl(&run("base", "max_steps=1 reference=base"), 0) > 1e-4, "the base is another model");
}
