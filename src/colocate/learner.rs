//! The half of a step that trains, wherever the other half is.

use std::panic::resume_unwind;
use std::sync::Arc;

use super::agree;
use crate::dist::{Mesh, World};
use crate::error::Result;
use crate::train::{Policy, Reference};

/// The policy, the reference model and the ranks that train them together. `update` holds what it does.
#[derive(Debug)]
pub struct Learner {
    pub(super) world: Arc<World>,
    pub(super) mesh: Mesh,
    pub(super) policy: Policy,
    pub(super) reference: Option<Reference>,
    pub(super) num_consecutive_skips: u32,
}

impl Learner {
    /// Puts the parts together. `mesh.world` are the ranks that train, of all those of `world`.
    pub fn new(world: Arc<World>, mesh: Mesh, policy: Policy, reference: Option<Reference>) -> Self {
        Self { world, mesh, policy, reference, num_consecutive_skips: 0 }
    }

    /// Runs `work` to an outcome that all ranks agree on; collective over the world. Gradients are dropped after a failure of
    /// any rank; a panic goes on unwinding.
    pub(crate) fn together<T>(&mut self, place: &'static str, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let (world, mut panic) = (self.world.clone(), None);
        let agreed = agree(&world, place, &mut panic, || work(self)).inspect_err(|_| self.policy.drop_gradients());
        panic.map_or(agreed, |payload| resume_unwind(payload))
    }

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The policy, to load it.
    pub fn policy_mut(&mut self) -> &mut Policy {
        &mut self.policy
    }
}
