//! Where the two halves of a step run, behind one face.

use crate::checkpoint::Models;
use crate::colocate::Colocated;
use crate::error::Result;
use crate::rollout::{Engine, RolloutEngine, StageTimes};
use crate::split::Split;
use crate::train::{Policy, Sequence};
use crate::update::{Divergence, UpdateOptions, UpdateOutcome, UpdateProgress};

/// The policy and the engine, on the same ranks or apart.
#[derive(Debug)]
pub(super) enum PolicyAndEngine {
    /// Every rank, in turn.
    Colocated(Box<Colocated>),
    /// This rank does one of the two.
    Split(Split),
}

impl PolicyAndEngine {
    /// Runs `work` with the engines awake; where there is none on this rank, `R`'s default is the result. Collective.
    pub(super) fn with_rollout<R: Default>(
        &mut self,
        work: impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>,
    ) -> Result<R> {
        match self {
            Self::Colocated(colocated) => colocated.with_rollout(work),
            Self::Split(split) => split.with_rollout(work),
        }
    }

    /// Trains on the whole batch, of which `sequences` are this rank's. `beside` is run on engines that have nothing else to
    /// do, if there are any. Collective.
    pub(super) fn update<R: Default>(
        &mut self,
        sequences: &[Sequence],
        options: &UpdateOptions,
        progress: &dyn UpdateProgress,
        beside: Option<impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>>,
    ) -> Result<(UpdateOutcome, R)> {
        match self {
            Self::Colocated(colocated) => Ok((colocated.update(sequences, options, progress)?, R::default())),
            Self::Split(split) => split.update(sequences, options, progress, beside),
        }
    }

    /// KL divergences of this rank's `sequences` from the reference model. Collective.
    pub(super) fn divergences(
        &mut self,
        sequences: &[Sequence],
        options: &UpdateOptions,
        progress: &dyn UpdateProgress,
    ) -> Result<Vec<Divergence>> {
        match self {
            Self::Colocated(colocated) => colocated.divergences(sequences, options, progress),
            Self::Split(split) => split.divergences(sequences, options, progress),
        }
    }

    /// How long this rank's stage of the engine computed and waited since the last call, if layers are in stages.
    pub(super) fn take_stage_times(&self) -> Option<StageTimes> {
        let engine = match self {
            Self::Colocated(colocated) => Some(colocated.engine()),
            Self::Split(split) => split.engine(),
        };
        engine.map(Engine::take_stage_times).filter(|times| *times != StageTimes::default())
    }

    /// The sleeping engine, on a rank that has one, to be set up between steps.
    pub(super) fn engine_mut(&mut self) -> Option<&mut Engine> {
        match self {
            Self::Colocated(colocated) => Some(colocated.engine_mut()),
            Self::Split(split) => split.engine_mut(),
        }
    }

    /// The policy, on a rank that trains.
    pub(super) fn policy(&self) -> Option<&Policy> {
        match self {
            Self::Colocated(colocated) => Some(colocated.policy()),
            Self::Split(split) => split.policy(),
        }
    }

    /// The models of a checkpoint, on a rank that trains. The reference model is one of them where it follows the policy.
    pub(super) fn saved_models(&self, reference_moves: bool) -> Option<Models<'_>> {
        let reference = match self {
            Self::Colocated(colocated) => colocated.reference(),
            Self::Split(split) => split.reference(),
        };
        Some(Models { policy: self.policy()?, reference: reference.filter(|_| reference_moves) })
    }

    /// The policy, to be loaded, on a rank that trains.
    pub(super) fn policy_mut(&mut self) -> Option<&mut Policy> {
        match self {
            Self::Colocated(colocated) => Some(colocated.policy_mut()),
            Self::Split(split) => split.policy_mut(),
        }
    }
}
