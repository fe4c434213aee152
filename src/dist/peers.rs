//! Memory that the ranks of a group map of one another.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::collective::{Collective, all_gather_bytes};
use crate::cuda::{Context, HANDLE_BYTES, PeerMemory};
use crate::error::{Error, Result};

/// A group's memory, from when it is first asked for.
#[derive(Debug, Default)]
pub(super) struct Peers(Mutex<Option<Known>>);

#[derive(Debug, Clone)]
struct Known {
    /// In which communication epoch it was zeroed.
    epoch: u64,
    /// None where ranks cannot map one another's.
    memory: Option<Arc<PeerMemory>>,
}

impl Peers {
    /// As [`Collective::peer_memory`], of the group whose host side is `host`; zeroed anew in every `epoch`.
    pub(super) fn memory(
        &self,
        host: &dyn Collective,
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
                // A kernel of any rank may still be on its way into any memory, and must be over before that is zeroed.
                Context::retain(ordinal)?.synchronize()?;
                host.barrier()?;
                memory.clear()?;
                host.barrier()?;
                Some(memory)
            }
            _ => connect(host, ordinal, bytes)?,
        };
        *self.lock() = Some(Known { epoch, memory: memory.clone() });
        Ok(memory)
    }

    /// Ends all waiting for peers in kernels that use the memory, until the next epoch.
    pub(super) fn abort(&self) {
        if let Some(Known { memory: Some(memory), .. }) = &*self.lock() {
            memory.abort();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory of every rank, mapped by every rank; none, on all of them, if one cannot.
fn connect(host: &dyn Collective, ordinal: usize, bytes: usize) -> Result<Option<Arc<PeerMemory>>> {
    let context = Context::retain(ordinal)?;
    let mut memory = PeerMemory::allocate(&context, (host.rank(), host.size()), bytes)?;
    let offer = memory.handle();
    let handles = all_gather_bytes(host, offer.as_ref().map_or(&[], |handle| &handle[..]))?;
    let mapped = offer.and_then(|_| map_peers(&mut memory, host, &handles));
    let refusal = mapped.err().map(|error| error.to_string()).unwrap_or_default();
    let refusals = all_gather_bytes(host, refusal.as_bytes())?;
    let Some((rank, refusal)) = refusals.iter().enumerate().find(|(_, refusal)| !refusal.is_empty()) else {
        return Ok(Some(Arc::new(memory)));
    };
    if host.rank() == 0 {
        let (name, rank, refusal) = (host.name(), host.ranks()[rank], String::from_utf8_lossy(refusal));
        tracing::warn!("group '{name}' sums through NCCL alone: rank {rank} cannot map its peers' memory: {refusal}");
    }
    Ok(None)
}

fn map_peers(memory: &mut PeerMemory, host: &dyn Collective, handles: &[Vec<u8>]) -> Result<()> {
    for (rank, handle) in handles.iter().enumerate().filter(|(rank, _)| *rank != host.rank()) {
        let handle: &[u8; HANDLE_BYTES] = handle.as_slice().try_into().map_err(|_| Error::Environment {
            message: format!("rank {} cannot share its memory", host.ranks()[rank]),
        })?;
        memory.map(rank, handle)?;
    }
    Ok(())
}
