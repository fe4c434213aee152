//! Resuming a run from a checkpoint.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::batches::begun_anew;
use super::output::RunOutput;
use super::policy_and_engine::PolicyAndEngine;
use super::teacher::Teacher;
use super::{TrainingData, TrainingProgress};
use crate::checkpoint::{self, CarriedGroup, Checkpoint, NumberChange, TrainerState};
use crate::config::Config;
use crate::console;
use crate::error::{Error, Result};
use crate::grpo::{EntropyControl, LossConfig};
use crate::model::{ModelSpec, WeightFiles};
use crate::ranks::World;

/// Configuration changes that would change the result: single keys, and numbers derived from batch and world size. Prints a message if `exact` was
/// turned on or off, so that log-probabilities of sampler and trainer become or cease to be equal.
pub(super) fn unsafe_changes(config: &Config, world: &World, checkpoint: &Checkpoint) -> Result<Vec<String>> {
    let TrainerState { config: saved, world_size: saved_size, .. } = &checkpoint.state;
    let foreign = |error: Error| checkpoint.of_another_program(&error);
    let saved = Config::from_entries(saved.entries(config.entries())).map_err(foreign)?;
    let saved_batch = saved.validate_world((*saved_size).max(1)).map_err(foreign)?;
    let batch = config.validate_world(world.size())?;
    let (old, new) = (saved_batch, batch);
    let (old_size, new_size) = (old.generation_batch_size, new.generation_batch_size);
    let (old_updates, new_updates) = (old.updates_per_generation, new.updates_per_generation);
    let numbers = [
        NumberChange { name: "generation_batch_size (completions)", old: old_size, new: new_size },
        NumberChange { name: "updates per generation batch", old: old_updates, new: new_updates },
    ];
    let changes = checkpoint::changes(config, &saved);
    if let Some(change) = changes.iter().find(|change| change.key == "exact" && world.rank() == 0) {
        console::say(format_args!("{change}: the new value applies from this step on"));
    }
    checkpoint.unsafe_changes(&changes, &numbers, world.size())
}

/// Loads the reference model of a checkpoint, if it follows the policy.
pub(super) fn mixed_reference(
    config: &Config,
    spec: &Arc<ModelSpec>,
    checkpoint: Option<&Checkpoint>,
) -> Result<Option<WeightFiles>> {
    let folder = checkpoint.filter(|_| config.objective.sync_ref_model).and_then(Checkpoint::reference);
    folder.map(|folder| WeightFiles::open(&folder, spec.clone())).transpose()
}

/// Identities of the weights that the run reads but does not train, by key: the base of adapters or a fixed reference in `files`, and the teacher.
pub(super) fn frozen_weights(
    config: &Config,
    files: &WeightFiles,
    teacher: Option<&Teacher>,
) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    let is_fixed = !config.objective.sync_ref_model; // else checkpoints contain the reference
    if config.lora.r.is_some() || (config.has_reference() && is_fixed) {
        found.insert("model_name_or_path".to_owned(), files.identity()?);
    }
    if let Some(Teacher { folder, table }) = teacher {
        let identity = WeightFiles::open(folder, table.spec.clone())?.identity()?;
        found.insert("teacher_model_name_or_path".to_owned(), identity);
    }
    Ok(found)
}

/// Restores model and data from `checkpoint`, if there is one, and returns the progress that the run starts from. Carried groups are restored with
/// the data, if any step continues them.
pub(super) fn restore(
    checkpoint: Option<&Checkpoint>,
    config: &Config,
    vocab_size: usize,
    model: &mut PolicyAndEngine,
    data: &mut TrainingData,
) -> Result<TrainingProgress> {
    let entropy_control = EntropyControl::new(&LossConfig::from(config));
    let Some(checkpoint) = checkpoint else {
        return Ok(TrainingProgress { entropy_control, ..TrainingProgress::default() });
    };
    let TrainerState { global_step, generation_step, num_input_tokens_seen: num_tokens, .. } = checkpoint.state;
    checkpoint.check_rows(data.train.len(), data.train.digest().as_deref())?;
    model.policy_mut().map_or(Ok(()), |policy| checkpoint.restore(policy))?;
    data.sampler.restore(checkpoint.state.sampler.clone())?;
    data.carried = match checkpoint.state.carried.as_slice() {
        _ if config.oversample == 0.0 => Vec::new(), // possible with force_resume
        carried if config.tools.takes_turns() => begun_anew(carried), // their tools and environments have ended
        carried if config.output.force_resume && checkpoint.carries_others(config.num_generations) => {
            begun_anew(carried)
        }
        carried => {
            checkpoint.check_carried(config.num_generations, vocab_size)?;
            carried.to_vec()
        }
    };
    let entropy_control = checkpoint.state.entropy_control.unwrap_or(entropy_control);
    Ok(TrainingProgress { global_step, previous_step: global_step, generation_step, num_tokens, entropy_control })
}

/// Prints a message if another number of ranks shares micro-batches than before, as `sequence_parallel_size = auto` may choose. Only the rounding of
/// sums changes.
pub(super) fn say_sharing(checkpoint: &Checkpoint, config: &Config, output: &RunOutput) {
    let saved = Config::from_entries(checkpoint.state.config.entries(config.entries()));
    let Ok(changes) = saved.map(|saved| checkpoint::changes(config, &saved)) else { return };
    if let Some(change) = changes.iter().find(|change| change.key == "sequence_parallel_size") {
        output.say(&format!("{change}: from this step on sums over a sequence have another rounding order"));
    }
}

/// Prints which unfinished groups of `checkpoint` are dropped or begun again; `carried` are those that the run continues.
pub(super) fn say_carried(checkpoint: &Checkpoint, config: &Config, carried: &[CarriedGroup], output: &RunOutput) {
    let saved = &checkpoint.state.carried;
    let num_dropped = saved.len() - carried.len();
    if num_dropped > 0 {
        output.say(&format!("{num_dropped} unfinished groups of the checkpoint are dropped: oversample is 0"));
    }
    let has_less = |(saved, now): &(&CarriedGroup, &CarriedGroup)| now.completions.len() < saved.completions.len();
    let num_anew = match checkpoint.carries_others(config.num_generations) {
        true => saved.iter().zip(carried).filter(has_less).count(),
        false => 0,
    };
    if num_anew > 0 {
        output.say(&format!(
            "{num_anew} unfinished groups of the checkpoint are sampled from the start: num_generations differs"
        ));
    }
}
