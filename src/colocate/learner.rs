//! The half of a step that trains, wherever the other half is.

use std::sync::Arc;

use crate::dist::{Mesh, World};
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

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The policy, to load it.
    pub fn policy_mut(&mut self) -> &mut Policy {
        &mut self.policy
    }
}
