//! Split mode: training and generation on separate ranks, for comparison with colocated mode. The first ranks train, the last ones only generate.
//! Learner, engine and rewards are the same as in a colocated run; only the weights are transferred. Before a rollout every unit (one flat bucket) is
//! broadcast from one of the trainers, in turn, into the engines' own copy, which the engines read in place at any tensor-parallel degree. A rank of
//! an engine with pipeline stages keeps only the units of its stage. With adapters, the frozen base is sent only once.

use std::sync::Arc;

use tch::Tensor;

use crate::console::units_progress;
use crate::error::Result;
use crate::phase::{self, Phase};
use crate::ranks::World;
use crate::rollout::{Engine, RolloutEngine};
use crate::serve::Served;
use crate::train::{Sequence, gather_sequences};
use crate::update::{Divergence, Learner, UpdateOptions, UpdateOutcome, UpdateProgress, await_divergences};

/// The result of an update, and of the work done meanwhile.
pub struct Updated<R> {
    /// Result of the trainers' update.
    pub outcome: UpdateOutcome,
    /// Result of the engines' work.
    pub beside: R,
}

impl<R: Default> Updated<R> {
    /// The result of an update without other work.
    pub fn alone(outcome: UpdateOutcome) -> Self {
        Self { outcome, beside: R::default() }
    }
}

/// One rank in split mode: a trainer or a generator.
#[derive(Debug)]
pub struct Split {
    world: Arc<World>,
    num_trainers: usize,
    role: SplitRank,
    base_is_there: bool, // whether the engines have the frozen base
}

/// The role of a rank in split mode.
#[derive(Debug)]
pub enum SplitRank {
    /// One of the first ranks, which train.
    Trains(Box<Learner>),
    /// One of the last ranks, which generate; its weights are received before each rollout.
    Generates(Box<Served>),
}

impl Split {
    /// Creates split mode: the first `num_trainers` ranks of `world` train.
    pub fn new(world: Arc<World>, num_trainers: usize, role: SplitRank) -> Self {
        Self { world, num_trainers, role, base_is_there: false }
    }

    /// Sends the weights to the engines and runs `work` on each of them, while the trainers wait and return `R`'s default. Collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank, on every rank. The next call can succeed again.
    pub fn with_rollout<R: Default>(&mut self, work: impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>) -> Result<R> {
        let world = self.world.clone();
        let work = |split: &mut Self| {
            split.send_weights()?;
            match &mut split.role {
                SplitRank::Trains(_) => Ok(R::default()),
                SplitRank::Generates(served) => served.awake(work),
            }
        };
        world.scope("with_rollout", self, work, |_| Ok(()), Self::recover)
    }

    /// Runs [`Learner::train`] on the trainers, while the engines run `beside`, if given, with the weights from before the update. Collective over
    /// the world.
    ///
    /// # Errors
    /// Returns the errors of [`Split::with_rollout`].
    pub fn update<R: Default>(
        &mut self,
        sequences: &[Sequence],
        options: &UpdateOptions,
        progress: &dyn UpdateProgress,
        beside: Option<impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>>,
    ) -> Result<Updated<R>> {
        let world = self.world.clone();
        let work = |split: &mut Self| {
            if beside.is_some() {
                split.send_weights()?;
            }
            match &mut split.role {
                SplitRank::Trains(learner) => Ok(Updated::alone(learner.train(sequences, options, progress)?)),
                SplitRank::Generates(served) => {
                    let group = split.world.group();
                    gather_sequences(sequences, &*group)?.experts.fetch(sequences, &[], &*group)?;
                    let outcome = UpdateOutcome {
                        num_updates: options.num_updates(),
                        entropy_control: options.entropy_control,
                        ..UpdateOutcome::default()
                    };
                    Ok(Updated { outcome, beside: beside.map_or_else(|| Ok(R::default()), |work| served.awake(work))? })
                }
            }
        };
        world.scope("update", self, work, |_| Ok(()), Self::recover)
    }

    /// Runs [`Learner::divergences`] on the trainers, while the engines wait; collective over the world.
    ///
    /// # Errors
    /// Returns the errors of [`Split::with_rollout`].
    pub fn divergences(
        &mut self,
        sequences: &[Sequence],
        options: &UpdateOptions,
        progress: &dyn UpdateProgress,
    ) -> Result<Vec<Divergence>> {
        let world = self.world.clone();
        let score = |split: &mut Self| match &mut split.role {
            SplitRank::Trains(learner) => learner.divergences(sequences, options, progress),
            SplitRank::Generates(_) => {
                await_divergences(sequences, options.loss.objective.kl_estimator, &*split.world.group())
            }
        };
        world.scope("divergences", self, score, |_| Ok(()), Self::recover)
    }

    /// The sleeping engine, on a rank that generates.
    pub(crate) fn engine(&self) -> Option<&Engine> {
        match &self.role {
            SplitRank::Trains(_) => None,
            SplitRank::Generates(served) => Some(served.engine()),
        }
    }

    /// The sleeping engine of a rank that generates, for changes between rollouts.
    pub(crate) fn engine_mut(&mut self) -> Option<&mut Engine> {
        match &mut self.role {
            SplitRank::Trains(_) => None,
            SplitRank::Generates(served) => Some(served.engine_mut()),
        }
    }

    /// The learner, on a rank that trains.
    pub fn learner(&self) -> Option<&Learner> {
        match &self.role {
            SplitRank::Trains(learner) => Some(learner),
            SplitRank::Generates(_) => None,
        }
    }

    /// Mutable access to the learner, for loading, on a rank that trains.
    pub fn learner_mut(&mut self) -> Option<&mut Learner> {
        match &mut self.role {
            SplitRank::Trains(learner) => Some(learner),
            SplitRank::Generates(_) => None,
        }
    }

    /// Broadcasts every unit from its trainer to all ranks, adapters first. The other trainers receive the same bits that they already have.
    fn send_weights(&mut self) -> Result<()> {
        let (group, num_trainers, base_is_there) = (self.world.group(), self.num_trainers, self.base_is_there);
        let num_units = self.learner().map_or(0, |learner| {
            let (policy, base) = (learner.policy(), usize::from(!base_is_there));
            let adapters = policy.lora().map_or(0, |_| policy.trained_table().units.len());
            adapters + base * policy.table().units.len()
        });
        let mut sent = units_progress("gather", num_units);
        let mut send = |(index, mut unit): (usize, Tensor)| -> Result<()> {
            group.broadcast(&mut unit, index % num_trainers)?;
            sent();
            Ok(())
        };
        phase::scope(Phase::Gather, || match &mut self.role {
            SplitRank::Trains(learner) => {
                let policy = learner.policy();
                if policy.lora().is_some() {
                    for (index, layout) in policy.trained_table().units.iter().enumerate() {
                        send((index, policy.trained_weights(layout.unit)?))?;
                    }
                }
                let base = policy.table().units.iter().filter(|_| !base_is_there);
                base.enumerate().try_for_each(|(index, layout)| send((index, policy.unit_weights(layout.unit)?)))
            }
            SplitRank::Generates(served) => {
                served.adapter_units().enumerate().try_for_each(&mut send)?;
                let base = served.base_units().filter(|_| !base_is_there);
                base.enumerate().try_for_each(|(index, unit)| send((index, unit?)))
            }
        })?;
        self.base_is_there = match &self.role {
            SplitRank::Trains(learner) => learner.policy().lora().is_some(),
            SplitRank::Generates(served) => served.has_adapters(),
        };
        Ok(())
    }

    /// Restores a consistent state on this rank after a failure on any.
    fn recover(&mut self) {
        self.base_is_there = false;
        if let SplitRank::Trains(learner) = &mut self.role {
            learner.drop_unfinished();
        }
    }
}
