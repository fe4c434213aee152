//! Optimizer shards that belong to another checkpoint are detected.

use std::fs;
use std::path::Path;

use colo_grpo::ExitCode;
use colo_grpo::internal::checkpoint::{Checkpoint, Models, Saver};
use colo_grpo::internal::ranks::World;
use serde_json::Value;
use tch::Kind;

use super::files::{SHARD, options, policy, save_step, state};

/// Replaces the shard in `folder` by that of `donor`, and updates its size and hash in the manifest.
fn transplant(donor: &Path, folder: &Path) {
    fs::copy(donor.join(SHARD), folder.join(SHARD)).unwrap();
    let manifest =
        |folder: &Path| -> Value { serde_json::from_slice(&fs::read(folder.join("manifest.json")).unwrap()).unwrap() };
    let [theirs, mut own] = [donor, folder].map(manifest);
    let is_shard = |record: &&Value| record["path"] == SHARD;
    let record = theirs["files"].as_array().unwrap().iter().find(is_shard).unwrap().clone();
    *own["files"].as_array_mut().unwrap().iter_mut().find(|file| file["path"] == SHARD).unwrap() = record;
    fs::write(folder.join("manifest.json"), own.to_string()).unwrap();
}

#[test]
fn a_shard_of_another_run_is_refused_even_with_a_valid_hash() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (world, mut policy) = (World::single(), policy(Kind::Float));
    let mut saver = Saver::new(options(folder.path()), None);
    let [second, fourth] = [2, 4].map(|step| {
        let saved = saver.save(&world, Some(Models { policy: &policy, reference: None }), state(step)).unwrap();
        saver.finish(&world).unwrap();
        saved
    });
    let of_other_run = save_step(&options(other.path()), &policy, 4);
    let run_of = |folder: &Path| Checkpoint::open(folder, true).unwrap().state.run_id;
    let [own, others] = [&fourth, &of_other_run].map(|folder| run_of(folder));
    assert!(own == run_of(&second) && own != others && own.len() == 16, "{own} {others}");
    for (donor, named) in [(&second, format!("run {own} step 2")), (&of_other_run, format!("run {others} step 4"))] {
        transplant(donor, &fourth);
        let error = Checkpoint::open(&fourth, true).unwrap().restore(&mut policy).unwrap_err();
        assert_eq!(error.exit_code(), ExitCode::Checkpoint);
        let expected = format!("{SHARD} was written by {named}, but trainer_state.json is from run {own} step 4");
        assert!(error.to_string().contains(&expected), "{error}");
    }

    // A resumed run stays the run that it was.
    let resumed = Checkpoint::open(&second, true).unwrap();
    let mut saver = Saver::new(options(folder.path()), Some(&resumed));
    let saved = saver.save(&world, Some(Models { policy: &policy, reference: None }), state(6)).unwrap();
    saver.finish(&world).unwrap();
    assert_eq!(run_of(&saved), own);
}

/// Old checkpoints, whose shards contain no run name and step, can still be resumed.
#[test]
fn a_checkpoint_without_a_run_name_can_be_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let mut policy = policy(Kind::Float);
    let saved = save_step(&options(folder.path()), &policy, 2);
    let state = saved.join("trainer_state.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&state).unwrap()).unwrap();
    json.as_object_mut().unwrap().remove("run_id").unwrap();
    fs::write(&state, json.to_string()).unwrap();
    let refused = Checkpoint::open(&saved, false).unwrap().restore(&mut policy).unwrap_err();
    assert!(refused.to_string().contains("but trainer_state.json is from an unnamed run"), "{refused}");

    let mut shard = fs::read(saved.join(SHARD)).unwrap();
    let header = String::from_utf8_lossy(&shard[8..200]).into_owned();
    let mark = &header[header.find("\"__metadata__\"").unwrap()..=header.find("},").unwrap() + 1];
    let at = 8 + header.find(mark).unwrap();
    shard[at..at + mark.len()].fill(b' ');
    fs::write(saved.join(SHARD), shard).unwrap();
    Checkpoint::open(&saved, false).unwrap().restore(&mut policy).unwrap();
}
