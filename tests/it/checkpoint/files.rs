//! Files of checkpoints of a tiny policy: what is written, the effect of damage, and what a killed process leaves behind.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use colo_grpo::ExitCode;
use colo_grpo::Result;
use colo_grpo::internal::checkpoint::{self, Checkpoint, CheckpointOptions, Models, SavedConfig, Saver, TrainerState};
use colo_grpo::internal::config::{AdjustLr, GradientCheckpointing};
use colo_grpo::internal::data::SamplerState;
use colo_grpo::internal::grpo::EntropyControl;
use colo_grpo::internal::metrics::LogHistory;
use colo_grpo::internal::model::{ModelSpec, ParamTable, Plain, WeightFiles, init_unit};
use colo_grpo::internal::ranks::World;
use colo_grpo::internal::train::{
    AdamOptions, GradientOptions, MuonOptions, NetworkOptions, Optim, ParamState, Policy, PolicyOptions, StateForm,
    StatePart,
};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::{cut_short, flip_a_byte};
use crate::program::wait_until;

const KILLED_VARIABLE: &str = "COLO_GRPO_TEST_SAVES";
pub(super) const SHARD: &str = "optimizer/rank_00000_of_00001.safetensors";
const PARTS: [&str; 3] = ["master", "m", "v"];
const NUM_UPDATES: u64 = 5;

fn find_latest(output_dir: &Path) -> Result<Option<PathBuf>> {
    checkpoint::find_latest(output_dir, &mut || ())
}

/// A policy on one rank with non-zero optimizer moments.
pub(super) fn policy(kind: Kind) -> Policy {
    policy_of(kind, Optim::AdamW)
}

fn policy_of(kind: Kind, optim: Optim) -> Policy {
    let spec = Arc::new(ModelSpec::preset("micro").unwrap());
    let table = Arc::new(ParamTable::new(spec, 1));
    let adam = AdamOptions { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
    let network = NetworkOptions { kind, residual: kind, device: Device::Cpu, format: &Plain };
    let options = PolicyOptions {
        stage: 0,
        network,
        gradient_checkpointing: GradientCheckpointing::None,
        optim,
        adam,
        gradients: GradientOptions::default(),
    };
    let mesh = World::single().mesh(1, 1).unwrap();
    let mut policy = Policy::new(table, &mesh, options, &|layout| init_unit(layout, 1, Kind::Float)).unwrap();
    tch::manual_seed(7);
    let forms: BTreeMap<_, _> = policy
        .table()
        .units
        .iter()
        .flat_map(|layout| layout.params.iter().map(|param| ((layout.unit, param.name), policy.state_form(param))))
        .collect();
    let mut random = |unit, name, elements: std::ops::Range<usize>| {
        let form = forms[&(unit, name)];
        let numbers = |part: &StatePart| {
            let numbers = Tensor::rand([part.num_values(elements.len()) as i64], (Kind::Float, Device::Cpu));
            let kind = part.kind(Kind::Float);
            if kind == Kind::Uint8 { (numbers * 255.0).to_kind(kind) } else { numbers }
        };
        Ok(ParamState { form, tensors: form.parts().iter().map(numbers).collect() })
    };
    policy.import_state(NUM_UPDATES, &mut random).unwrap();
    policy
}

pub(super) fn state(global_step: u64) -> TrainerState {
    TrainerState {
        run_id: String::new(),
        global_step,
        num_updates: NUM_UPDATES,
        generation_step: global_step,
        epoch: 0.5,
        max_steps: 10,
        num_input_tokens_seen: 1000,
        world_size: 1,
        num_rows: 10,
        rows_digest: None,
        frozen_weights: BTreeMap::new(),
        sampler: SamplerState::default(),
        carried: Vec::new(),
        ahead: Vec::new(),
        entropy_control: Some(EntropyControl { coef: 0.1 + 0.2, entropy: Some(1.0 / 3.0) }),
        best_global_step: None,
        config: SavedConfig::default(),
        log_history: LogHistory::default(),
        unlogged: vec![BTreeMap::from([("loss".to_owned(), f64::NAN.to_bits())])],
    }
}

pub(super) fn options(folder: &Path) -> CheckpointOptions {
    let base_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/arithmetic/tokenizer");
    CheckpointOptions {
        output_dir: folder.to_owned(),
        base_dir,
        save_total_limit: None,
        save_async: true,
        on_each_node: false,
    }
}

pub(super) fn save_step(options: &CheckpointOptions, policy: &Policy, step: u64) -> PathBuf {
    save(options, policy, step).unwrap()
}

/// Saves a checkpoint and waits until it is complete.
fn save(options: &CheckpointOptions, policy: &Policy, step: u64) -> Result<PathBuf> {
    let (world, mut saver) = (World::single(), Saver::new(options.clone(), None));
    let folder = saver.save(&world, Some(Models { policy, reference: None }), state(step))?;
    saver.finish(&world).map(|()| folder)
}

/// Names of all entries in a folder, including hidden ones.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
    let mut names: Vec<String> = fs::read_dir(folder).unwrap().map(|entry| name(entry.unwrap())).collect();
    names.sort();
    names
}

fn saved_bits(policy: &Policy) -> Vec<Vec<f64>> {
    let shards = policy.export_state().map(|shard| shard.unwrap().state);
    shards.flat_map(|state| state.tensors).map(|t| Vec::try_from(t.to_kind(Kind::Double)).unwrap()).collect()
}

#[test]
fn a_bfloat16_policy_is_restored_with_its_state() {
    let folder = tempfile::tempdir().unwrap();
    let saved = policy(Kind::BFloat16);
    let checkpoint = save_step(&options(folder.path()), &saved, 3);
    let mut restored = policy(Kind::BFloat16);
    restored
        .import_state(0, &mut |_, _, elements| {
            let zeros = || Tensor::zeros([elements.len() as i64], (Kind::Float, Device::Cpu));
            Ok(ParamState::adam(zeros(), zeros(), zeros()))
        })
        .unwrap();
    let opened = Checkpoint::open(&checkpoint, true).unwrap();
    assert_eq!(TrainerState { run_id: String::new(), ..opened.state.clone() }, state(3));
    opened.restore(&mut restored).unwrap();
    assert!(saved_bits(&restored) == saved_bits(&saved) && restored.num_updates() == NUM_UPDATES);

    let spec = ModelSpec::from_folder(&checkpoint).unwrap();
    assert_eq!(spec.dtype, Kind::BFloat16);
    let bytes = fs::read(checkpoint.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert!(tensors.tensors().iter().all(|(_, tensor)| tensor.dtype() == Dtype::BF16));
    let weights = WeightFiles::open(&checkpoint, Arc::new(spec)).unwrap();
    for layout in &saved.table().units {
        let expected = saved.unit_weights(layout.unit).unwrap();
        assert_eq!(weights.read_unit(layout, Kind::BFloat16).unwrap(), expected, "{}", layout.unit);
    }
    let fields = ["global_step", "epoch", "max_steps", "num_input_tokens_seen", "log_history"];
    let json: Value = serde_json::from_slice(&fs::read(checkpoint.join("trainer_state.json")).unwrap()).unwrap();
    assert!(fields.iter().all(|field| json.get(field).is_some()), "{json}");
}

#[test]
fn the_newest_valid_checkpoint_is_found() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(find_latest(&folder.path().join("none")).unwrap(), None);
    let (options, policy) = (options(folder.path()), policy(Kind::Float));
    let saved = [9, 10, 11].map(|step| save_step(&options, &policy, step));
    assert_eq!(find_latest(folder.path()).unwrap().as_ref(), Some(&saved[2]));
    flip_a_byte(&saved[2].join("model.safetensors"));
    assert_eq!(find_latest(folder.path()).unwrap().as_ref(), Some(&saved[1]));
    cut_short(&saved[1].join(SHARD));
    assert_eq!(find_latest(folder.path()).unwrap().as_ref(), Some(&saved[0]));
    fs::remove_file(saved[0].join("trainer_state.json")).unwrap();
    let error = find_latest(folder.path()).unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::Checkpoint);
    let message = error.to_string();
    for expected in [
        "among 3",
        "checkpoint-11: model.safetensors: ",
        &format!("checkpoint-10: {SHARD}: "),
        "checkpoint-9: trainer_state.json: ",
    ] {
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn a_failed_save_keeps_the_old_checkpoint_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (good, policy) = (options(folder.path()), policy(Kind::Float));
    let old = save_step(&good, &policy, 1);
    let no_tokenizer = CheckpointOptions { base_dir: folder.path().to_owned(), ..good.clone() };
    assert!(save(&no_tokenizer, &policy, 2).is_err());
    assert_eq!(names(folder.path()), ["checkpoint-1"]);
    assert!(save(&no_tokenizer, &policy, 1).is_err());
    assert_eq!(find_latest(folder.path()).unwrap(), Some(old.clone()));
}

#[test]
fn save_total_limit_keeps_the_newest_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let (options, policy) =
        (CheckpointOptions { save_total_limit: Some(2), ..options(folder.path()) }, policy(Kind::Float));
    fs::create_dir(folder.path().join(".checkpoint-7.tmp")).unwrap();
    for step in [8, 9, 10, 10] {
        save_step(&options, &policy, step);
    }
    assert_eq!(names(folder.path()), ["checkpoint-10", "checkpoint-9"]);
    assert_eq!(find_latest(folder.path()).unwrap(), Some(folder.path().join("checkpoint-10")));
}

/// Data type, shape and bytes of tensors by name.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A modification of valid tensors by a test case.
type Change<'a> = &'a dyn Fn(&mut Tensors);

fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    tensors
        .into_iter()
        .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect()
}

fn write(path: &Path, tensors: &Tensors, metadata: &std::collections::HashMap<String, String>) {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, Some(metadata.clone()), path).unwrap();
}

#[test]
fn optimizer_state_is_restored_only_into_the_same_optimizer() {
    let folder = tempfile::tempdir().unwrap();
    let muon = MuonOptions { momentum: 0.95, nesterov: true, ns_steps: 5, adjust_lr: AdjustLr::Original };
    for (step, optim) in [(1, Optim::AdamW8bit), (2, Optim::Muon(muon))] {
        let saved = policy_of(Kind::Float, optim);
        let forms: Vec<StateForm> = saved.state_ranges().map(|range| range.form).collect();
        assert!(forms.iter().any(|&form| form != StateForm::Adam), "{forms:?}");
        let checkpoint = save_step(&options(folder.path()), &saved, step);
        let bytes = fs::metadata(checkpoint.join(SHARD)).unwrap().len();
        assert!(bytes.abs_diff(saved.whole_state_bytes() as u64) < 1 << 16, "{bytes}");
        let mut restored = policy_of(Kind::Float, optim);
        restored.optimizer_step(0.0, 0.0).map(drop).unwrap(); // moments decay
        assert!(saved_bits(&restored) != saved_bits(&saved));
        let opened = Checkpoint::open(&checkpoint, true).unwrap();
        opened.restore(&mut restored).unwrap();
        assert!(saved_bits(&restored) == saved_bits(&saved), "{optim:?}");
        let refused = opened.restore(&mut policy(Kind::Float)).unwrap_err();
        assert_eq!(refused.exit_code(), ExitCode::Checkpoint);
        assert!(refused.to_string().contains("resume with the optimizer that wrote the checkpoint"), "{refused}");
    }
}

#[test]
fn inconsistent_optimizer_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut policy = policy(Kind::Float);
    let checkpoint = save_step(&options(folder.path()), &policy, 1);
    let path = checkpoint.join(SHARD);
    let good = fs::read(&path).unwrap();
    let tensors = read(&path);
    let metadata = SafeTensors::read_metadata(&good).unwrap().1.metadata().clone().unwrap();
    let norm = "head/FinalNorm/0-32";
    let mut refuse = |expected: &str| {
        let error = Checkpoint::open(&checkpoint, false).unwrap().restore(&mut policy).expect_err(expected);
        assert_eq!(error.exit_code(), ExitCode::Checkpoint, "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    };
    let with_header = |header: &str| [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let tensor = |offsets: &str| format!(r#"{{"{norm}/m":{{"dtype":"F32","shape":[32],"data_offsets":{offsets}}}}}"#);
    let raw: [(Vec<u8>, &str); 7] = [
        (u64::MAX.to_le_bytes().to_vec(), "the header has 18446744073709551615 bytes"),
        (good[..4].to_vec(), "truncated: it has 4 bytes"),
        (good[..good.len() - 1].to_vec(), "truncated: "),
        ([&good[..], &[0]].concat(), "but its header describes"),
        (with_header(&"[".repeat(100_000)), "bad header: "),
        (with_header(&tensor("[0,128]")), "truncated: "),
        (with_header(&tensor("[18446744073709551488,0]")), "bad header: "),
    ];
    for (bytes, expected) in raw {
        fs::write(&path, bytes).unwrap();
        refuse(expected);
    }
    let part = |part: &str| format!("{norm}/{part}");
    let cases: [(Change<'_>, &str); 7] = [
        (
            &|all| all.get_mut(&part("m")).unwrap().0 = Dtype::I32,
            "expected the tensors of one optimizer, with their dtypes",
        ),
        (&|all| _ = all.remove(&part("v")), "has master, m, but optim = adamw needs master, m, v"),
        (&|all| _ = all.remove(&part("master")), "other tensors of this optimizer state are missing"),
        (
            &|all| all.retain(|name, _| !name.starts_with(norm)),
            "each of the elements 0..32 of head/FinalNorm must be stored exactly once, but found none: resume with the \
             same model, lora.target_modules",
        ),
        (
            &|all| {
                let copies: Vec<_> = PARTS.iter().map(|what| (what, all[&part(what)].clone())).collect();
                for (what, (dtype, _, bytes)) in copies {
                    all.insert(format!("head/FinalNorm/8-16/{what}"), (dtype, vec![8], bytes[..32].to_vec()));
                }
            },
            "each of the elements 0..32 of head/FinalNorm must be stored exactly once, but found 0..32 in ",
        ),
        (
            &|all| {
                for what in PARTS {
                    let tensor = all.remove(&part(what)).unwrap();
                    all.insert(format!("head/LmHead/0-32/{what}"), tensor);
                }
            },
            "head/LmHead is not a parameter that this run trains: resume with the same model",
        ),
        (
            &|all| _ = all.insert("head/FinalNorm/x".into(), (Dtype::F32, vec![1], vec![0; 4])),
            "tensor head/FinalNorm/x: expected a name of the form unit/parameter/first-last/",
        ),
    ];
    for (change, expected) in cases {
        let mut changed = tensors.clone();
        change(&mut changed);
        write(&path, &changed, &metadata);
        refuse(expected);
    }
    fs::write(checkpoint.join("trainer_state.json"), "[".repeat(100_000)).unwrap();
    let error = Checkpoint::open(&checkpoint, false).unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::Checkpoint);
    assert!(error.to_string().contains("trainer_state.json: "), "{error}");
    fs::write(&path, good).unwrap();
}

/// Saves each step twice, so that folders are replaced and old ones are removed.
fn save_until_killed(folder: &Path) -> ! {
    let (options, policy) = (CheckpointOptions { save_total_limit: Some(2), ..options(folder) }, policy(Kind::Float));
    let first =
        find_latest(folder).unwrap().map_or(1, |latest| Checkpoint::open(&latest, false).unwrap().state.global_step);
    fs::write(folder.join("started"), "").unwrap();
    for count in 0.. {
        save_step(&options, &policy, first + count / 2);
        fs::write(folder.join("saved"), "").unwrap();
    }
    unreachable!("the count has no end")
}

#[test]
fn a_kill_at_any_moment_leaves_only_complete_checkpoints() {
    kill_while_saving("a_kill_at_any_moment_leaves_only_complete_checkpoints", 20);
}

#[test]
#[ignore = "takes a minute"]
fn two_hundred_kills_leave_only_complete_checkpoints() {
    kill_while_saving("two_hundred_kills_leave_only_complete_checkpoints", 200);
}

/// Starts processes that only save, and kills at least `num_kills` of them at different moments.
fn kill_while_saving(test: &str, num_kills: u64) {
    if let Some(folder) = std::env::var_os(KILLED_VARIABLE) {
        save_until_killed(Path::new(&folder));
    }
    let folder = tempfile::tempdir().unwrap();
    let (started, saved) = (folder.path().join("started"), folder.path().join("saved"));
    let mut moments: Vec<Vec<String>> = Vec::new();
    let hit_a_save = |moments: &[Vec<String>]| moments.iter().flatten().any(|name| name.ends_with(".tmp"));
    // How long a save takes depends on the machine: more kills, at more moments, until one fell into a save.
    for attempt in 0..3 * num_kills {
        if attempt >= num_kills && hit_a_save(&moments) {
            break;
        }
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("checkpoint::files::{test}"), "--include-ignored"])
            .env(KILLED_VARIABLE, folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_until(|| started.exists() || child.try_wait().unwrap().is_some());
        // Every other kill comes as soon as a save is seen to be under way, the rest at any moment after the first save.
        let pause = || std::thread::sleep(Duration::from_micros(attempt * 7919 % 40_000));
        if attempt % 2 == 0 {
            pause();
            let is_saving = || names(folder.path()).iter().any(|name| name.ends_with(".tmp"));
            wait_until(|| is_saving() || child.try_wait().unwrap().is_some());
        } else {
            wait_until(|| saved.exists() || child.try_wait().unwrap().is_some());
            pause();
        }
        child.kill().unwrap();
        let ended = child.wait().unwrap();
        assert!(ended.code().is_none(), "attempt {attempt}: the saving process ended by itself: {ended}");
        fs::remove_file(&started).unwrap();
        let _ = fs::remove_file(&saved);
        let names = names(folder.path());
        for name in names.iter().filter(|name| name.starts_with("checkpoint-")) {
            Checkpoint::open(&folder.path().join(name), true)
                .unwrap_or_else(|error| panic!("attempt {attempt}: {error}"));
        }
        let has_checkpoint = |names: &Vec<String>| names.iter().any(|name| name.starts_with("checkpoint-"));
        assert!(
            has_checkpoint(&names) || !moments.iter().any(has_checkpoint),
            "the last one is gone: {moments:?}, {names:?}"
        );
        moments.push(names);
    }
    assert!(find_latest(folder.path()).unwrap().is_some(), "{moments:?}");
    assert!(hit_a_save(&moments), "no kill hit a save: {moments:?}");
    let num_hits = moments.iter().filter(|names| names.iter().any(|name| name.ends_with(".tmp"))).count();
    println!("{} kills, {num_hits} of them left a part of a checkpoint", moments.len());
}
