//! How a process joins a world.

use std::time::Duration;

/// How to join a world.
#[derive(Debug, Clone, PartialEq)]
pub struct WorldOptions {
    /// Longest wait for peers, at rendezvous and in every collective.
    pub timeout: Duration,
    /// The backend that carries tensors.
    pub backend: Backend,
    /// Shared memory per rank and group, in bytes; larger tensors pass through in pieces of half of it.
    pub slot_bytes: usize,
    /// Longest silence of another node before it counts as gone.
    pub node_timeout: Duration,
    /// Keys with values that all nodes must have alike.
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

/// The backend that carries tensors between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// Shared memory, for CPU tensors; between hosts TCP.
    Shm,
    /// NCCL, one GPU a rank.
    Nccl,
}
