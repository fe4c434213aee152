//! Writes the files of a checkpoint. Every rank writes its own optimizer state, rank 0 all other files.
//!
//! Ranks may write in threads during training, so they cannot use collectives. Instead each rank leaves a record of its written files in `.records`
//! of the temporary folder, and rank 0 waits for all records before it publishes the checkpoint.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tch::{Kind, Tensor};

use super::folder;
use super::manifest::{FileRecord, Manifest};
use super::shard_file::{ShardFile, bytes_of};
use super::shards::FOLDER;
use super::writers::Writers;
use super::{CheckpointOptions, TrainerState};
use crate::config::Quantization;
use crate::console::checkpoint_progress;
use crate::error::{Error, ExitCode, Result};
use crate::model::{AdapterBase, LoraSpec, ModelSpec, ParamTable, WeightWriter, copy_tokenizer, write_adapters};
use crate::phase::{self, Phase};
use crate::ranks::World;
use crate::train::{ParamState, Policy, Reference};

/// Bytes reserved for small files: configuration, tokenizer, headers, manifest.
const SMALL_FILES_BYTES: u64 = 32 << 20;
/// Bytes of a carried group's token in `trainer_state.json`: its id and its log-probability, eight hexadecimal digits each.
const CARRIED_TOKEN_BYTES: u64 = 16;
/// Folder for the ranks' records while a checkpoint is written.
const RECORDS: &str = ".records";
/// Folder of a reference model that follows the policy.
pub(super) const REFERENCE: &str = "reference";
/// Interval at which rank 0 checks for records.
const LOOK: Duration = Duration::from_millis(5);

/// The models to save in a checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct Models<'a> {
    /// The policy.
    pub policy: &'a Policy,
    /// The reference model, if it follows the policy.
    pub reference: Option<&'a Reference>,
}

/// Bytes of a checkpoint, over all ranks.
pub fn num_bytes(models: Models<'_>, state: &TrainerState) -> u64 {
    let length = |line| serde_json::to_string(line).map_or(0, |text| text.len() as u64 * 2);
    let history = state.log_history.lines().map(length).sum::<u64>();
    let carried = state.groups().map(|group| CARRIED_TOKEN_BYTES * group.num_tokens() as u64).sum::<u64>();
    first_bytes(models) + history + carried
}

/// Bytes of the first checkpoint, without history.
pub fn first_bytes(Models { policy, reference }: Models<'_>) -> u64 {
    let num_models = 1 + u64::from(reference.is_some());
    policy.whole_state_bytes() as u64 + num_models * model_bytes(policy)
}

/// Bytes of the model folder.
pub fn model_bytes(policy: &Policy) -> u64 {
    weights_bytes(policy.trained_table(), policy.kind()) + SMALL_FILES_BYTES
}

/// Marks that all ranks are about to write. A failing rank removes its mark, which is possible even on a full disk.
pub fn open_records(temporary: &Path, writers: &Writers) -> Result<()> {
    let records = temporary.join(RECORDS);
    std::fs::create_dir(&records).map_err(Error::io(&records))?;
    writers.ranks().try_for_each(|rank| {
        let mark = pending(temporary, rank);
        File::create(&mark).map(drop).map_err(Error::io(mark))
    })
}

/// One rank's part of a checkpoint, without the tensors.
#[derive(Debug)]
pub struct RankPart {
    temporary: PathBuf,
    complete: PathBuf,
    options: CheckpointOptions,
    rank: usize,
    writers: Writers,
    step: u64,
    /// Name and header of this rank's optimizer state file, if it saves any.
    shard: Option<ShardFile>,
    lora: Option<LoraSpec>,
    /// Storage format of the base under adapters.
    base_quantization: Quantization,
    table: Arc<ParamTable>,
    kind: Kind,
    has_reference: bool,
    state: TrainerState,
    /// The text of the state file, if every node writes its own folder.
    common_state: Option<String>,
}

/// Checkpoints over the limit. They are removed once a newer one is complete; with a folder per node, once it is complete on all nodes.
#[derive(Debug)]
pub struct OldCheckpoints {
    output_dir: PathBuf,
    newest: PathBuf,
    best: Option<PathBuf>,
    limit: Option<usize>,
}

impl OldCheckpoints {
    pub fn remove(&self) {
        folder::keep_newest(&self.output_dir, [Some(&self.newest), self.best.as_ref()], self.limit);
    }
}

/// Whole units of the models in a checkpoint. Ranks other than rank 0 only iterate over them, because gathering them may be collective.
pub struct Units<'a> {
    /// Units of the policy.
    pub policy: &'a mut dyn Iterator<Item = Result<Tensor>>,
    /// Units of the reference model, if it is saved.
    pub reference: &'a mut dyn Iterator<Item = Result<Tensor>>,
}

impl RankPart {
    pub fn new(
        temporary: &Path,
        complete: &Path,
        options: &CheckpointOptions,
        world: &World,
        Models { policy, reference }: Models<'_>,
        state: TrainerState,
        common_state: Option<String>,
    ) -> Self {
        let (rank, num_ranks) = (world.rank(), policy.num_ranks());
        let writers = Writers::of(world, num_ranks, options.on_each_node);
        let name = format!("{FOLDER}/rank_{rank:05}_of_{num_ranks:05}.safetensors");
        Self {
            temporary: temporary.to_owned(),
            complete: complete.to_owned(),
            options: options.clone(),
            rank,
            step: phase::step(),
            shard: policy.saves_state(&writers.ranks()).then(|| ShardFile::of(policy, name, state.mark())),
            writers,
            lora: policy.lora().cloned(),
            base_quantization: policy.base_quantization(),
            table: policy.trained_table().clone(),
            kind: policy.kind(),
            has_reference: reference.is_some(),
            state,
            common_state,
        }
    }

    /// Approximate number of bytes that this rank writes.
    fn bytes(&self) -> u64 {
        let num_models = u64::from(self.writers.is_first()) * (1 + u64::from(self.has_reference));
        self.shard.as_ref().map_or(0, |shard| shard.bytes) + num_models * weights_bytes(&self.table, self.kind)
    }

    /// Writes this rank's files; rank 0 then waits for the others and gives the checkpoint its final name.
    pub fn write(
        &self,
        shard: &mut dyn Iterator<Item = Result<ParamState>>,
        units: Units<'_>,
        abandoned: &AtomicBool,
    ) -> Result<()> {
        let mut told = checkpoint_progress("checkpoint", self.bytes());
        let own = match &self.shard {
            Some(own) => vec![own.write(&self.temporary, shard, &mut told)?],
            None => Vec::new(),
        };
        phase::inject_at(Phase::Write, self.step)?;
        if !self.writers.is_first() {
            units.policy.chain(units.reference).try_for_each(|flat| flat.map(drop))?;
            return self.leave_record(&own);
        }
        let folder = &self.temporary;
        let base = AdapterBase { folder: &self.options.base_dir, quantization: self.base_quantization };
        write_model(folder, base, self.lora.as_ref(), &self.table, self.kind, units.policy, &mut told)?;
        if self.has_reference {
            write_model(&folder.join(REFERENCE), base, None, &self.table, self.kind, units.reference, &mut told)?;
        }
        match &self.common_state {
            Some(text) => TrainerState::write_text(&self.temporary, text)?,
            None => self.state.write(&self.temporary)?,
        }
        let mut records = own;
        for rank in self.writers.others() {
            records.extend(self.await_record(rank, abandoned)?);
        }
        let folder = self.temporary.join(RECORDS);
        std::fs::remove_dir_all(&folder).map_err(Error::io(folder))?;
        Manifest::write(&self.temporary, records)?;
        folder::publish(&self.temporary, &self.complete)?;
        if self.common_state.is_none() {
            self.old().remove();
        }
        Ok(())
    }

    /// The checkpoints that exceed the limit because of this one.
    pub fn old(&self) -> OldCheckpoints {
        let best = self.state.best_global_step.map(|step| folder::path(&self.options.output_dir, step));
        OldCheckpoints {
            output_dir: self.options.output_dir.clone(),
            newest: self.complete.clone(),
            best,
            limit: self.options.save_total_limit,
        }
    }

    /// Cleans up after an error: rank 0 removes everything, another rank only reports to rank 0.
    pub fn give_up(&self) {
        let gone = match self.writers.is_first() {
            true => std::fs::remove_dir_all(&self.temporary),
            false => std::fs::remove_file(pending(&self.temporary, self.rank)),
        };
        if let Err(error) = gone {
            tracing::warn!(
                "cannot remove the temporary file {}: {error}; the next save will remove it",
                self.temporary.display()
            );
        }
    }

    fn leave_record(&self, own: &[FileRecord]) -> Result<()> {
        let (draft, path) = (record(&self.temporary, self.rank, "draft"), record(&self.temporary, self.rank, "json"));
        let json = serde_json::to_vec(own).expect("records are plain data");
        std::fs::write(&draft, json).map_err(Error::io(&draft))?;
        std::fs::rename(draft, &path).map_err(Error::io(path))
    }

    fn await_record(&self, rank: usize, abandoned: &AtomicBool) -> Result<Vec<FileRecord>> {
        let path = record(&self.temporary, rank, "json");
        loop {
            let is_pending = pending(&self.temporary, rank).exists(); // check it before looking for the record
            if let Ok(json) = std::fs::read(&path) {
                let bad = |error: serde_json::Error| Error::Checkpoint {
                    path: self.complete.clone(),
                    message: format!("cannot read the record of files that rank {rank} wrote: {error}"),
                };
                return serde_json::from_slice(&json).map_err(bad);
            }
            if !is_pending || abandoned.load(Ordering::Relaxed) {
                // The failed rank returns its own error when ranks agree on the outcome.
                let message = format!("it did not write its part of the checkpoint {}", self.complete.display());
                return Err(Error::PeerFailed { rank, code: ExitCode::Storage, message });
            }
            std::thread::sleep(LOOK);
        }
    }
}

fn record(temporary: &Path, rank: usize, suffix: &str) -> PathBuf {
    temporary.join(RECORDS).join(format!("rank_{rank:05}.{suffix}"))
}

fn pending(temporary: &Path, rank: usize) -> PathBuf {
    record(temporary, rank, "pending")
}

/// Writes the policy as a Hugging Face model folder, or its adapters in PEFT's format, in the compute dtype. All ranks gather sharded units; the
/// ranks with `is_first` write.
pub fn model(folder: &Path, base_dir: &Path, is_first: bool, policy: &Policy) -> Result<()> {
    let mut weights = policy.trained_table().units.iter().map(|layout| {
        phase::beat();
        policy.trained_weights(layout.unit)
    });
    match is_first {
        true => write_model(
            folder,
            AdapterBase { folder: base_dir, quantization: policy.base_quantization() },
            policy.lora(),
            policy.trained_table(),
            policy.kind(),
            &mut weights,
            &mut checkpoint_progress("model", weights_bytes(policy.trained_table(), policy.kind())),
        ),
        false => weights.try_for_each(|flat| flat.map(drop)),
    }
}

fn write_model(
    folder: &Path,
    base: AdapterBase<'_>,
    lora: Option<&LoraSpec>,
    table: &ParamTable,
    kind: Kind,
    weights: &mut dyn Iterator<Item = Result<Tensor>>,
    told: &mut dyn FnMut(u64),
) -> Result<()> {
    let weights = &mut weights.inspect(|flat| told(flat.as_ref().map_or(0, bytes_of)));
    let base_dir = base.folder;
    std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
    copy_tokenizer(base_dir, folder)?;
    if let Some(lora) = lora {
        return write_adapters(folder, table, lora, base, kind, weights);
    }
    ModelSpec { dtype: kind, ..ModelSpec::clone(&table.spec) }.write_config(folder, Some(base_dir))?;
    let mut writer = WeightWriter::create(folder, table.spec.clone(), kind, Some(base_dir))?;
    for (layout, flat) in table.units.iter().zip(weights) {
        writer.write_unit(layout, &flat?)?;
    }
    writer.finish()
}

/// Bytes of a model's weights in `kind`.
fn weights_bytes(table: &ParamTable, kind: Kind) -> u64 {
    (table.num_params() * kind.elt_size_in_bytes()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::CarriedGroup;
    use crate::types::Trajectory;

    #[test]
    fn saved_bytes_per_unfinished_token_match_the_estimate() {
        let written = |len| {
            let completion = Trajectory {
                token_ids: vec![u32::MAX; len],
                loss_mask: vec![true; len],
                rollout_logprobs: vec![-1.234_567_8e-7; len],
                weight_versions: vec![7; len],
                ..Trajectory::default()
            };
            let group = CarriedGroup { completions: vec![completion], ..CarriedGroup::new(0) };
            serde_json::to_string_pretty(&group).unwrap().len() as u64
        };
        assert_eq!(written(1010) - written(10), 1000 * CARRIED_TOKEN_BYTES + 2, "and two digits of their number");
    }
}
