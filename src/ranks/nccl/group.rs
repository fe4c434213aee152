//! A group of ranks that exchanges tensors through NCCL.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use cudarc::nccl::sys;
use tch::{Device, Kind, Tensor};

use super::communicator::{Communicator, ID_BYTES, describe, lock};
use crate::cuda::PeerMemory;
use crate::error::{Error, Result};
use crate::phase;
use crate::ranks::checks;
use crate::ranks::collective::{Collective, ReduceOp, Trade};
use crate::ranks::control::{ControlPlane, Deadline, RankGroup};
use crate::ranks::lane::Lane;
use crate::ranks::peers::Peers;
use crate::torch;

/// A group of ranks, one GPU each.
#[derive(Debug)]
pub(super) struct NcclGroup {
    group: Arc<RankGroup>,
    control: Arc<dyn ControlPlane>,
    ordinal: usize,
    timeout: Duration,
    lane: Arc<Lane>,
    /// `None` while the communicator is aborted.
    communicator: Mutex<Option<Communicator>>,
    /// Number of communicators built so far.
    epoch: AtomicU64,
    peers: Peers,
}

impl NcclGroup {
    /// Creates the group without a communicator; see [`NcclGroup::connect`].
    pub(super) fn new(
        group: Arc<RankGroup>,
        control: Arc<dyn ControlPlane>,
        ordinal: usize,
        timeout: Duration,
        lane: Arc<Lane>,
    ) -> Self {
        let (communicator, epoch, peers) = (Mutex::new(None), AtomicU64::new(0), Peers::default());
        Self { group, control, ordinal, timeout, lane, communicator, epoch, peers }
    }

    /// Builds the communicator; rank 0 sends the id to the others through the control plane. Collective over the group.
    pub(super) fn connect(&self) -> Result<()> {
        let mut id = [0; ID_BYTES];
        if self.rank() == 0 {
            let (made, code) = Communicator::new_id();
            self.check("ncclGetUniqueId", code)?;
            id = made;
        }
        self.control.broadcast(&self.group, &mut id, 0)?;
        torch::set_cuda_device(self.ordinal)?;
        let (communicator, code) = Communicator::start(id, self.rank(), self.size());
        let Some(communicator) = communicator else { return self.check("ncclCommInitRankConfig", code) };
        self.settle("ncclCommInitRankConfig", &communicator, code)?;
        *lock(&self.communicator) = Some(communicator);
        self.epoch.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Whether a rank of the world has reported a failure.
    pub(super) fn has_failed(&self) -> bool {
        self.control.failure().is_some()
    }

    /// Locks the communicator, so that it can be removed. Nothing is queued while the lock is held.
    pub(super) fn communicator(&self) -> MutexGuard<'_, Option<Communicator>> {
        lock(&self.communicator)
    }

    /// Ends all waits in kernels that use peers' memory.
    pub(super) fn abort_peers(&self) {
        self.peers.abort();
    }

    /// Queues one operation on libtorch's current stream, after all overlapped collectives, so that only one communicator runs at a time.
    fn queue(
        &self,
        op: &'static str,
        bytes: usize,
        call: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> sys::ncclResult_t,
    ) -> Result<()> {
        let communicator = lock(&self.communicator);
        let Some(communicator) = communicator.as_ref() else {
            let aborted = || self.error(op, "the communicator was aborted; World::agree rebuilds it".to_owned());
            return Err(self.control.failure().map_or_else(aborted, Error::from));
        };
        self.lane.join()?;
        let stream = torch::current_cuda_stream(self.ordinal)?;
        let seen = phase::collective(op, self.name(), bytes);
        let code = call(communicator.raw(), stream.cast());
        self.settle(op, communicator, code)?;
        seen.queued(); // from here on, waiting for the stream means waiting for peers
        Ok(())
    }

    /// Polls a non-blocking call until NCCL has accepted it.
    fn settle(&self, op: &'static str, communicator: &Communicator, mut code: sys::ncclResult_t) -> Result<()> {
        let deadline = Deadline::after(self.timeout);
        while code == sys::ncclResult_t::ncclInProgress {
            if let Some(failure) = self.control.failure() {
                return Err(failure.into());
            }
            if deadline.is_over() {
                return Err(
                    self.error(op, format!("the operation did not start within {:.1} s", self.timeout.as_secs_f64()))
                );
            }
            std::thread::yield_now();
            let asked;
            (code, asked) = communicator.progress();
            self.check(op, asked)?;
        }
        self.check(op, code)
    }

    fn check(&self, op: &'static str, code: sys::ncclResult_t) -> Result<()> {
        if code == sys::ncclResult_t::ncclSuccess {
            return Ok(());
        }
        let message = describe(code);
        Err(Error::out_of_memory(&message).unwrap_or_else(|| self.error(op, message)))
    }

    fn error(&self, op: &'static str, message: String) -> Error {
        let group = self.name().to_owned();
        Error::Collective { op, group, rank: self.ranks()[self.rank()], message }
    }
}

// SAFETY, for every block below: `checks` made sure that the tensors span the bytes named on this device; NCCL reads and
// writes them in stream order, and libtorch frees memory in the same stream's order.
impl Collective for NcclGroup {
    fn members(&self) -> &RankGroup {
        &self.group
    }

    fn device(&self) -> Device {
        Device::Cuda(self.ordinal)
    }

    fn epoch(&self) -> Result<u64> {
        let is_open = lock(&self.communicator).is_some();
        match (is_open, self.control.failure()) {
            (false, Some(failure)) => Err(failure.into()),
            _ => Ok(self.epoch.load(Ordering::Relaxed)),
        }
    }

    fn peer_memory(&self, bytes: usize) -> Result<Option<Arc<PeerMemory>>> {
        self.peers.memory((&*self.control, &self.group), self.ordinal, self.epoch()?, bytes)
    }

    fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()> {
        let memory = checks::memory("all_reduce", tensor, self.device())?;
        checks::reducible("all_reduce", memory.kind)?;
        let (address, count) = (memory.address.cast(), tensor.numel());
        self.queue("all_reduce", memory.bytes, |comm, stream| unsafe {
            // SAFETY: see above the impl; in place is allowed.
            sys::ncclAllReduce(address, address, count, data_type(memory.kind), reduction(op), comm, stream)
        })
    }

    fn all_gather(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        let (input, output) = checks::pair("all_gather", input, output, self.size(), self.device())?;
        self.queue("all_gather", input.bytes, |comm, stream| unsafe {
            // SAFETY: see above the impl; the input may be output's own slice.
            sys::ncclAllGather(input.address.cast(), output.address.cast(), input.bytes, BYTE, comm, stream)
        })
    }

    fn reduce_scatter(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        let count = output.numel();
        let (output, input) = checks::pair("reduce_scatter", output, input, self.size(), self.device())?;
        checks::reducible("reduce_scatter", output.kind)?;
        let sum = sys::ncclRedOp_t::ncclSum;
        self.queue("reduce_scatter", input.bytes, |comm, stream| unsafe {
            // SAFETY: see above the impl; the output may be input's own slice.
            sys::ncclReduceScatter(
                input.address.cast(),
                output.address.cast(),
                count,
                data_type(output.kind),
                sum,
                comm,
                stream,
            )
        })
    }

    fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<()> {
        checks::root("broadcast", root, self.size())?;
        let memory = checks::memory("broadcast", tensor, self.device())?;
        let address = memory.address.cast();
        self.queue("broadcast", memory.bytes, |comm, stream| unsafe {
            // SAFETY: see above the impl; in place is allowed.
            sys::ncclBroadcast(address, address, memory.bytes, BYTE, root as i32, comm, stream)
        })
    }

    fn all_to_all(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        let (input, output) = checks::split("all_to_all", input, output, self.size(), self.device())?;
        let bytes = input.bytes / self.size();
        self.queue("all_to_all", input.bytes, |comm, stream| unsafe {
            // SAFETY: see above the impl; every part lies within its tensor. Errors of single calls come out of the last.
            sys::ncclGroupStart();
            for rank in 0..self.size() {
                let (from, to) = (input.address.add(rank * bytes), output.address.add(rank * bytes));
                sys::ncclSend(from.cast(), bytes, BYTE, rank as i32, comm, stream);
                sys::ncclRecv(to.cast(), bytes, BYTE, rank as i32, comm, stream);
            }
            sys::ncclGroupEnd()
        })
    }

    fn trade(&self, trades: &[Trade]) -> Result<()> {
        let mut all = Vec::new();
        for Trade { rank, sent, received } in trades {
            checks::root("trade", *rank, self.size())?;
            let [sent, received] = [sent, received].map(|tensor| checks::memory("trade", tensor, self.device()));
            all.push((*rank as i32, sent?, received?));
        }
        let bytes = all.iter().map(|(_, sent, _)| sent.bytes).sum();
        self.queue("trade", bytes, |comm, stream| unsafe {
            // SAFETY: see above the impl. Errors of single calls come out of the last.
            sys::ncclGroupStart();
            for (rank, sent, received) in all {
                if sent.bytes > 0 {
                    sys::ncclSend(sent.address.cast(), sent.bytes, BYTE, rank, comm, stream);
                }
                if received.bytes > 0 {
                    sys::ncclRecv(received.address.cast(), received.bytes, BYTE, rank, comm, stream);
                }
            }
            sys::ncclGroupEnd()
        })
    }

    fn send(&self, tensor: &Tensor, to: usize) -> Result<()> {
        checks::root("send", to, self.size())?;
        let memory = checks::memory("send", tensor, self.device())?;
        self.queue("send", memory.bytes, |comm, stream| unsafe {
            // SAFETY: see above the impl.
            sys::ncclSend(memory.address.cast(), memory.bytes, BYTE, to as i32, comm, stream)
        })
    }

    fn receive(&self, tensor: &mut Tensor, from: usize) -> Result<()> {
        checks::root("receive", from, self.size())?;
        let memory = checks::memory("receive", tensor, self.device())?;
        self.queue("receive", memory.bytes, |comm, stream| unsafe {
            // SAFETY: see above the impl.
            sys::ncclRecv(memory.address.cast(), memory.bytes, BYTE, from as i32, comm, stream)
        })
    }

    fn barrier(&self) -> Result<()> {
        self.control.barrier(&self.group)
    }
}

const BYTE: sys::ncclDataType_t = sys::ncclDataType_t::ncclUint8;

fn data_type(kind: Kind) -> sys::ncclDataType_t {
    match kind {
        Kind::Float => sys::ncclDataType_t::ncclFloat32,
        Kind::Double => sys::ncclDataType_t::ncclFloat64,
        Kind::BFloat16 => sys::ncclDataType_t::ncclBfloat16,
        Kind::Int64 => sys::ncclDataType_t::ncclInt64,
        other => unreachable!("{other:?} was refused before"),
    }
}

fn reduction(op: ReduceOp) -> sys::ncclRedOp_t {
    match op {
        ReduceOp::Sum => sys::ncclRedOp_t::ncclSum,
        ReduceOp::Max => sys::ncclRedOp_t::ncclMax,
        ReduceOp::Min => sys::ncclRedOp_t::ncclMin,
    }
}
