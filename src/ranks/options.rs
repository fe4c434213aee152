//! Options for joining a world.

use std::time::Duration;

/// Options for joining a world.
#[derive(Debug, Clone, PartialEq)]
pub struct WorldOptions {
    /// Maximum wait for peers, at rendezvous and in every collective.
    pub timeout: Duration,
    /// The backend for tensors.
    pub backend: Backend,
    /// Bytes of shared memory per rank and group. Larger tensors are transferred in pieces of half of this.
    pub slot_bytes: usize,
    /// Maximum silence of another node before it counts as gone.
    pub node_timeout: Duration,
    /// Configuration keys with values that must be equal on all nodes.
    pub compared: Vec<(String, String)>,
}

impl Default for WorldOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            backend: Backend::Shm,
            slot_bytes: 1 << 20,
            node_timeout: Duration::from_secs(30),
            compared: Vec::new(),
        }
    }
}

/// The backend that transfers tensors between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// Shared memory for CPU tensors; TCP between hosts.
    Shm,
    /// NCCL, with one GPU per rank.
    Nccl,
}
