//! Saves checkpoints during training: tensors are copied to the host, and a thread writes them while training continues.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use tch::{Device, Tensor};

use super::folder;
use super::write::{self, Models, OldCheckpoints, RankPart, Units};
use super::writers::{Writers, common_state, is_apart};
use super::{Checkpoint, CheckpointOptions, TrainerState};
use crate::error::{Error, Result};
use crate::phase::{self, Phase};
use crate::ranks::{World, first_text};
use crate::train::{ParamState, Policy, Reference};

/// Interval at which a wait checks whether the writer is done.
const LOOK: Duration = Duration::from_millis(2);

/// Saves checkpoints, one at a time. The error of a failed write is returned by the next [`Saver::save`] or [`Saver::finish`].
#[derive(Debug)]
pub struct Saver {
    options: CheckpointOptions,
    run_id: String, // empty before the first save of a new run
    is_under_way: bool,
    in_flight: Option<InFlight>, // this rank's write under way, if it has one
    old: Option<OldCheckpoints>, // to remove once all nodes are done, with a folder per node
}

impl Saver {
    /// Creates a saver for a new run, or for one that resumes from a checkpoint.
    pub fn new(options: CheckpointOptions, resumed: Option<&Checkpoint>) -> Self {
        let run_id = resumed.map(|checkpoint| checkpoint.state.run_id.clone()).unwrap_or_default();
        Self { options, run_id, is_under_way: false, in_flight: None, old: None }
    }

    /// Where it saves, and how many checkpoints it keeps.
    pub fn options(&self) -> &CheckpointOptions {
        &self.options
    }

    /// Saves the models, the optimizer and the trainer's state as `checkpoint-{global_step}`; collective over the world, whose first ranks have the
    /// models. It waits for the previous write first. With `save_async`, it returns as soon as everything is copied to host memory: on each rank its
    /// share of the optimizer state, on rank 0 also the weights. Otherwise one parameter is copied at a time, and the checkpoint is complete on
    /// return.
    ///
    /// # Errors
    /// The first failure of any rank, on every rank: [`Error::Io`] with needed and free bytes if the disk is too small; the error of the previous
    /// save. No partial checkpoint remains, and earlier checkpoints stay.
    pub fn save(&mut self, world: &World, models: Option<Models<'_>>, mut state: TrainerState) -> Result<PathBuf> {
        self.finish(world)?;
        if self.run_id.is_empty() {
            let own = format!("{:016x}", RandomState::new().build_hasher().finish());
            self.run_id = first_text(&*world.group(), Some(own))?.unwrap_or_default();
        }
        state.run_id.clone_from(&self.run_id);
        let complete = folder::path(&self.options.output_dir, state.global_step);
        let temporary = folder::temporary(&complete);
        let num_trainers = models.map_or(0, |models| models.policy.num_ranks());
        let writers = Writers::of(world, num_trainers, self.options.on_each_node);
        let is_first = models.is_some() && writers.is_first();
        let common = if is_apart(world, self.options.on_each_node) { common_state(world, &state)? } else { None };
        let is_apart = common.is_some();
        let prepared = match models {
            Some(models) if is_first => folder::prepare(&temporary, write::num_bytes(models, &state))
                .and_then(|()| write::open_records(&temporary, &writers)),
            _ => Ok(()),
        };
        let mut old = None;
        let begun = world.agree(prepared).and_then(|()| {
            let Some(models) = models else { return world.agree(Ok(None)) };
            let part = RankPart::new(&temporary, &complete, &self.options, world, models, state, common);
            old = (is_apart && is_first).then(|| part.old());
            let begun = phase::scope(Phase::Checkpoint, || match self.options.save_async {
                true => {
                    let snapshot = RankSnapshot::take(models, &writers)?;
                    Ok(Some((InFlight::ready()?, (part, snapshot))))
                }
                false => write_now(part, models).map(|()| None),
            });
            world.agree(begun)
        });
        self.is_under_way = begun.is_ok() && self.options.save_async;
        match begun {
            Ok(Some((writer, work))) => (self.in_flight, self.old) = (Some(writer.start(work)), old),
            Ok(None) => old.iter().for_each(OldCheckpoints::remove),
            Err(error) => {
                if is_first {
                    folder::remove(&temporary);
                }
                return Err(error);
            }
        }
        Ok(complete)
    }

    /// Waits until the checkpoint under way, if any, is complete; collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank, on every rank.
    pub fn finish(&mut self, world: &World) -> Result<()> {
        if !std::mem::take(&mut self.is_under_way) {
            return Ok(());
        }
        let (own, old) = (self.in_flight.take(), self.old.take());
        world.agree(phase::scope(Phase::Write, || own.map_or(Ok(()), |own| own.wait(world))))?;
        old.iter().for_each(OldCheckpoints::remove);
        Ok(())
    }
}

/// A write under way. If it is dropped without waiting, because the run failed, it is aborted and its files are removed.
#[derive(Debug)]
struct InFlight {
    thread: Option<JoinHandle<Result<()>>>,
    work: Option<Sender<(RankPart, RankSnapshot)>>, // until the thread starts to write
    abandoned: Arc<AtomicBool>,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.work = None;
        self.abandoned.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl InFlight {
    /// Starts the thread without work. Ranks start writing once each has its thread.
    fn ready() -> Result<Self> {
        let abandoned = Arc::new(AtomicBool::new(false));
        let seen = abandoned.clone();
        let (work, given) = channel::<(RankPart, RankSnapshot)>();
        let write = move || {
            let Ok((part, snapshot)) = given.recv() else { return Ok(()) };
            let written = snapshot.write(&part, &seen);
            if written.is_err() {
                part.give_up();
            }
            written
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_owned()).spawn(write);
        let failed =
            |error| Error::Environment { message: format!("cannot start the thread that writes checkpoints: {error}") };
        Ok(Self { thread: Some(thread.map_err(failed)?), work: Some(work), abandoned })
    }

    fn start(mut self, work: (RankPart, RankSnapshot)) -> Self {
        if let Some(thread) = self.work.take() {
            let _ = thread.send(work); // the thread waits only for this
        }
        self
    }

    fn wait(mut self, world: &World) -> Result<()> {
        let thread = self.thread.take().expect("taken here and on drop alone");
        while !thread.is_finished() {
            // The record of a rank that failed may never come.
            self.abandoned.fetch_or(world.has_failed(), Ordering::Relaxed);
            std::thread::sleep(LOOK);
        }
        let panicked = |_| Error::Panic { place: "the checkpoint writer", message: "see above".to_owned() };
        thread.join().map_err(panicked)?
    }
}

/// A rank's share of a checkpoint, in host memory.
#[derive(Debug)]
struct RankSnapshot {
    shard: Vec<ParamState>,
    policy: Vec<Tensor>,    // by unit, as is the next field; only on rank 0
    reference: Vec<Tensor>, // empty if no reference is saved
}

impl RankSnapshot {
    /// Copies everything to the host. Collective if weights are sharded.
    fn take(models: Models<'_>, writers: &Writers) -> Result<Self> {
        let (mut shard, is_first) = (Vec::new(), writers.is_first());
        if models.policy.saves_state(&writers.ranks()) {
            shard = states(models.policy).collect::<Result<_>>()?;
        }
        let (mut policy, mut reference) = (Vec::new(), Vec::new());
        let (own, others) = (&mut units(models.policy), &mut reference_units(models.reference));
        for (copies, units) in [(&mut policy, own as &mut dyn Iterator<Item = _>), (&mut reference, others)] {
            for flat in units {
                let flat = flat?;
                if is_first {
                    copies.push(flat.f_to_device_(Device::Cpu, flat.kind(), false, true)?); // also on a CPU, where it must be a copy
                }
            }
        }
        Ok(Self { shard, policy, reference })
    }

    fn write(self, part: &RankPart, abandoned: &AtomicBool) -> Result<()> {
        let (policy, reference) = (&mut self.policy.into_iter().map(Ok), &mut self.reference.into_iter().map(Ok));
        part.write(&mut self.shard.into_iter().map(Ok), Units { policy, reference }, abandoned)
    }
}

fn write_now(part: RankPart, models: Models<'_>) -> Result<()> {
    let units = Units { policy: &mut units(models.policy), reference: &mut reference_units(models.reference) };
    part.write(&mut states(models.policy), units, &AtomicBool::new(false)).inspect_err(|_| part.give_up())
}

/// Whole units of the trained weights, one at a time; collective if weights are sharded.
fn units(policy: &Policy) -> impl Iterator<Item = Result<Tensor>> + '_ {
    policy.trained_table().units.iter().map(|layout| {
        phase::beat();
        policy.trained_weights(layout.unit)
    })
}

/// Whole units of a reference model, if there is one.
fn reference_units(reference: Option<&Reference>) -> impl Iterator<Item = Result<Tensor>> + '_ {
    let units = |reference: &'_ Reference| reference.table().units.clone();
    reference.into_iter().flat_map(move |reference| {
        units(reference).into_iter().map(|layout| {
            phase::beat();
            reference.unit_weights(layout.unit)
        })
    })
}

/// This rank's optimizer state, one parameter at a time.
fn states(policy: &Policy) -> impl Iterator<Item = Result<ParamState>> + '_ {
    policy.export_state().map(|shard| {
        phase::beat();
        Ok(shard?.state)
    })
}
