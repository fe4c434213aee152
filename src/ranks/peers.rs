//! GPU memory of each rank that all ranks of a group map.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::control::{ControlPlane, RankGroup};
use crate::cuda::{Context, HANDLE_BYTES, PeerMemory};
use crate::error::{Error, Result};
use crate::types::Place;

/// A group's mapped memory, allocated at the first request.
#[derive(Debug, Default)]
pub(super) struct Peers(Mutex<Option<Known>>);

/// The control plane and the ranks of a group.
type Host<'a> = (&'a dyn ControlPlane, &'a Arc<RankGroup>);

#[derive(Debug, Clone)]
struct Known {
    /// The communication epoch in which the memory was zeroed.
    epoch: u64,
    /// The mapped memory; `None` if some rank cannot map it.
    memory: Option<Arc<PeerMemory>>,
}

impl Peers {
    /// Implements [`Collective::peer_memory`](super::Collective::peer_memory) for the group `host`; zeroes the memory again in every new `epoch`.
    pub(super) fn memory(
        &self,
        host: Host<'_>,
        ordinal: usize,
        epoch: u64,
        bytes: usize,
    ) -> Result<Option<Arc<PeerMemory>>> {
        let known = self.lock().clone();
        let memory = match known {
            Some(Known { memory: None, .. }) => return Ok(None),
            Some(Known { memory: Some(memory), epoch: then }) if memory.bytes() >= bytes => {
                if then == epoch {
                    return Ok(Some(memory));
                }
                // A kernel of any rank may still access any of the memory; it must end before the memory is zeroed.
                Context::retain(ordinal)?.synchronize()?;
                let (control, group) = host;
                control.barrier(group)?;
                memory.clear()?;
                control.barrier(group)?;
                Some(memory)
            }
            _ => connect(host, ordinal, bytes)?,
        };
        *self.lock() = Some(Known { epoch, memory: memory.clone() });
        Ok(memory)
    }

    /// Ends all waits for peers in kernels that use the memory, until the next epoch.
    pub(super) fn abort(&self) {
        if let Some(Known { memory: Some(memory), .. }) = &*self.lock() {
            memory.abort();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Allocates memory on every rank and maps it on every rank; `None` on all of them if one cannot.
fn connect((control, group): Host<'_>, ordinal: usize, bytes: usize) -> Result<Option<Arc<PeerMemory>>> {
    if !control.is_one_node(group) {
        return Ok(None);
    }
    let context = Context::retain(ordinal)?;
    let mut memory = PeerMemory::allocate(&context, Place { rank: group.rank, size: group.ranks.len() }, bytes)?;
    let offer = memory.handle();
    let handles = control.all_gather_bytes(group, offer.as_ref().map_or(&[], |handle| &handle[..]))?;
    let mapped = offer.and_then(|_| map_peers(&mut memory, group, &handles));
    let refusal = mapped.err().map(|error| error.to_string()).unwrap_or_default();
    let refusals = control.all_gather_bytes(group, refusal.as_bytes())?;
    let Some((rank, refusal)) = refusals.iter().enumerate().find(|(_, refusal)| !refusal.is_empty()) else {
        return Ok(Some(Arc::new(memory)));
    };
    if group.rank == 0 {
        let (name, rank, refusal) = (&group.name, group.ranks[rank], String::from_utf8_lossy(refusal));
        tracing::warn!(
            "group '{name}' uses NCCL for all reductions, as rank {rank} cannot map the memory of its peers: {refusal}"
        );
    }
    Ok(None)
}

fn map_peers(memory: &mut PeerMemory, group: &RankGroup, handles: &[Vec<u8>]) -> Result<()> {
    for (rank, handle) in handles.iter().enumerate().filter(|(rank, _)| *rank != group.rank) {
        let handle: &[u8; HANDLE_BYTES] = handle.as_slice().try_into().map_err(|_| Error::Environment {
            message: format!("rank {} cannot share its memory", group.ranks[rank]),
        })?;
        memory.map(rank, handle)?;
    }
    Ok(())
}
