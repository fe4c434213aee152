//! The two halves of a step on ranks of their own, to be compared with ranks that do both in turn: the first ones train, the last
//! ones only generate. Learner, engine and rewards are those of a colocated run; only the weights travel. Before a rollout every
//! unit, one flat bucket, is broadcast from one of the trainers, in turn, into the engines' own copy, which they read in place at
//! any tensor-parallel degree; a rank of an engine in stages keeps the units of its stage alone. Of adapters the frozen base goes once.

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

/// What an update gave, and what was done beside it.
pub struct Updated<R> {
    /// Of the trainers.
    pub outcome: UpdateOutcome,
    /// Of the engines.
    pub beside: R,
}

impl<R: Default> Updated<R> {
    /// An update beside which nothing was done.
    pub fn alone(outcome: UpdateOutcome) -> Self {
        Self { outcome, beside: R::default() }
    }
}

/// One rank's half.
#[derive(Debug)]
pub struct Split {
    world: Arc<World>,
    num_trainers: usize,
    role: SplitRank,
    base_is_there: bool, // the engines have the frozen base
}

/// The role of a rank in split mode.
#[derive(Debug)]
pub enum SplitRank {
    /// One of the first ranks.
    Trains(Box<Learner>),
    /// One of the last ranks, its weights still to come.
    Generates(Box<Served>),
}

impl Split {
    /// Puts the parts together: of `world`, the first `num_trainers` ranks train.
    pub fn new(world: Arc<World>, num_trainers: usize, role: SplitRank) -> Self {
        Self { world, num_trainers, role, base_is_there: false }
    }

    /// Brings the weights to the engines and runs `work` on each of them, while the trainers wait with `R`'s default;
    /// collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank, on every rank; the next scope can be entered.
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

    /// [`Learner::train`] on the trainers, while the engines run `beside`, if there is any, on the weights from before the update;
    /// collective over the world.
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

    /// [`Learner::divergences`] on the trainers, for which the engines wait; collective over the world.
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

    /// The sleeping engine of a rank that generates.
    pub(crate) fn engine(&self) -> Option<&Engine> {
        match &self.role {
            SplitRank::Trains(_) => None,
            SplitRank::Generates(served) => Some(served.engine()),
        }
    }

    /// The sleeping engine of a rank that generates, to be set up between scopes.
    pub(crate) fn engine_mut(&mut self) -> Option<&mut Engine> {
        match &mut self.role {
            SplitRank::Trains(_) => None,
            SplitRank::Generates(served) => Some(served.engine_mut()),
        }
    }

    /// The models of a trainer.
    pub fn learner(&self) -> Option<&Learner> {
        match &self.role {
            SplitRank::Trains(learner) => Some(learner),
            SplitRank::Generates(_) => None,
        }
    }

    /// The models of a trainer, to load them.
    pub fn learner_mut(&mut self) -> Option<&mut Learner> {
        match &mut self.role {
            SplitRank::Trains(learner) => Some(learner),
            SplitRank::Generates(_) => None,
        }
    }

    /// Every unit from its trainer to all ranks, those of adapters first. The other trainers receive the bits that they have.
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

    /// Puts this rank in order after a failure of any.
    fn recover(&mut self) {
        self.base_is_there = false;
        if let SplitRank::Trains(learner) = &mut self.role {
            learner.drop_unfinished();
        }
    }
}
