//! Collectives between GPUs, through NCCL.
//!
//! Communicators are non-blocking: a call that is not done yet is polled, so that a peer's failure or the time limit ends the
//! wait. Everything is queued on libtorch's current stream, or on that of the lane. Each group has a twin in shared memory
//! with the same ranks, through which the host sides meet; its failure flag is watched by a thread that aborts all
//! communicators, which releases a host that waits for a stuck stream. `World::agree` builds them anew.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::nccl::sys;
use tch::{Device, Kind, Tensor};

use super::checks;
use super::collective::{Collective, ReduceOp};
use super::lane::Lane;
use super::peers::Peers;
use super::shm::{Member, ShmGroup};
use crate::cuda::{self, PeerMemory};
use crate::error::{Error, Result};
use crate::phase;
use crate::torch;

/// How often the failure flag is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// What NCCL must know before it is opened, unless the user says otherwise: captured collectives would pin buffers that are
/// remapped later, and NVLink multicast costs memory for nothing here.
const SETTINGS: [(&str, &str); 2] = [("NCCL_GRAPH_REGISTER", "0"), ("NCCL_NVLS_ENABLE", "0")];

/// The GPU of local rank `local_rank`, made current, its kernels compiled and loaded.
///
/// # Errors
/// [`Error::Environment`] if there is no such GPU, or libtorch's CUDA half or NCCL is not to be had.
pub(super) fn device(local_rank: usize) -> Result<Device> {
    for (name, value) in SETTINGS.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()) {
        // SAFETY: at the start of a worker, before the libraries that read it are opened and start threads.
        unsafe { std::env::set_var(name, value) };
    }
    cuda::require()?;
    torch::set_cuda_device(local_rank)?;
    cuda::kernels::prepare(local_rank)?;
    Ok(Device::Cuda(local_rank))
}

/// This rank's NCCL groups.
#[derive(Debug)]
pub(super) struct NcclGroups {
    member: Arc<Member>,
    ordinal: usize,
    timeout: Duration,
    lane: Arc<Lane>,
    groups: Arc<Mutex<Vec<Arc<NcclGroup>>>>,
    watcher: Option<(Sender<()>, JoinHandle<()>)>,
}

impl NcclGroups {
    /// No groups yet, and the thread that will abort them when the world fails. It ends with this.
    pub(super) fn new(member: Arc<Member>, ordinal: usize, timeout: Duration, lane: Arc<Lane>) -> Result<Self> {
        let groups = Arc::new(Mutex::new(Vec::new()));
        let (watched, (stay, end)) = (Arc::clone(&groups), channel());
        let watcher = std::thread::Builder::new().name("nccl-watch".to_owned());
        let watcher = watcher
            .spawn(move || watch(&watched, &end))
            .map_err(|error| Error::Environment { message: format!("a thread to watch NCCL: {error}") })?;
        Ok(Self { member, ordinal, timeout, lane, groups, watcher: Some((stay, watcher)) })
    }

    /// The GPU twin of a group in shared memory. Collective over the group.
    pub(super) fn add(&self, host: ShmGroup) -> Result<Arc<dyn Collective>> {
        let group = Arc::new(NcclGroup {
            host,
            member: self.member.clone(),
            ordinal: self.ordinal,
            timeout: self.timeout,
            lane: self.lane.clone(),
            communicator: Mutex::new(None),
            epoch: AtomicU64::new(0),
            peers: Peers::default(),
        });
        group.connect()?;
        lock(&self.groups).push(group.clone());
        Ok(group)
    }

    /// New communicators for all groups, after a failure. Collective over the world.
    pub(super) fn rebuild(&self) -> Result<()> {
        let groups = lock(&self.groups).clone();
        abort_where(&groups, |_| true);
        groups.iter().try_for_each(|group| group.connect())
    }
}

/// The watcher may hold the last communicators: it ends before this does. Threads that still abort are not waited for, as the
/// graphs that they wait for may outlive this: a process that has met a failure ends without taking its libraries apart
/// (`launch::exit_now`).
impl Drop for NcclGroups {
    fn drop(&mut self) {
        if let Some((stay, watcher)) = self.watcher.take() {
            drop(stay);
            let _ = watcher.join();
        }
    }
}

fn watch(groups: &Mutex<Vec<Arc<NcclGroup>>>, end: &Receiver<()>) {
    while end.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        let groups = lock(groups).clone();
        abort_where(&groups, |group| group.member.failure().is_some());
    }
}

/// Ends waiting in kernels over peers' memory and takes communicators away, under all locks because `rebuild` comes in the next epoch, and aborts each on a thread that nobody
/// waits for. Abort ends the kernels at once, but returns late: it waits for the GPU, which a kernel of another communicator
/// may keep busy until that one is aborted too, and for the end of every CUDA graph that holds the communicator, which the
/// engine drops when it wakes next.
fn abort_where(groups: &[Arc<NcclGroup>], is_due: impl Fn(&NcclGroup) -> bool) {
    if !groups.iter().any(|group| is_due(group)) {
        return;
    }
    let mut held: Vec<_> = groups.iter().map(|group| (lock(&group.communicator), is_due(group))).collect();
    groups.iter().zip(&held).filter(|(_, (_, due))| *due).for_each(|(group, _)| group.peers.abort());
    for communicator in held.iter_mut().filter(|(_, due)| *due).filter_map(|(communicator, _)| communicator.take()) {
        // Without a thread it is aborted here: a closure that cannot be run is dropped.
        let _ = std::thread::Builder::new().name("nccl-abort".to_owned()).spawn(move || drop(communicator));
    }
}

/// One group of ranks, one GPU each.
#[derive(Debug)]
struct NcclGroup {
    host: ShmGroup,
    member: Arc<Member>,
    ordinal: usize,
    timeout: Duration,
    lane: Arc<Lane>,
    /// None while aborted.
    communicator: Mutex<Option<Communicator>>,
    /// Communicators built so far.
    epoch: AtomicU64,
    peers: Peers,
}

/// An `ncclComm_t`, aborted when dropped: that is local and asks nothing of peers.
#[derive(Debug)]
struct Communicator(sys::ncclComm_t);

// SAFETY: NCCL lets any one thread at a time use a communicator; the mutex sees to that.
unsafe impl Send for Communicator {}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: the communicator is ours and not used after this. What abort returns cannot be mended here.
        unsafe { sys::ncclCommAbort(self.0) };
    }
}

impl NcclGroup {
    /// Builds the communicator; the first rank's id reaches the others through shared memory.
    fn connect(&self) -> Result<()> {
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        if self.host.rank() == 0 {
            // SAFETY: the id outlives the call, which fills it.
            let code = unsafe { sys::ncclGetUniqueId(&raw mut id) };
            self.check("ncclGetUniqueId", code)?;
        }
        let mut bytes = Tensor::from_slice(&id.internal.map(|byte| byte as u8));
        self.host.broadcast(&mut bytes, 0)?;
        for (byte, received) in id.internal.iter_mut().zip(torch::bytes(&bytes)?) {
            *byte = *received as std::ffi::c_char;
        }
        torch::set_cuda_device(self.ordinal)?;
        let (size, rank) = (self.size() as i32, self.rank() as i32);
        let (mut raw, mut config) = (std::ptr::null_mut(), non_blocking());
        // SAFETY: id and config outlive the call; the handle is written at once and kept until it is aborted.
        let code = unsafe { sys::ncclCommInitRankConfig(&raw mut raw, size, id, rank, &raw mut config) };
        if raw.is_null() {
            return self.check("ncclCommInitRankConfig", code);
        }
        let communicator = Communicator(raw);
        self.settle("ncclCommInitRankConfig", raw, code)?;
        *lock(&self.communicator) = Some(communicator);
        self.epoch.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Queues one operation on libtorch's current stream, after all that runs beside it: one communicator at a time.
    fn queue(
        &self,
        op: &'static str,
        bytes: usize,
        call: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> sys::ncclResult_t,
    ) -> Result<()> {
        let communicator = lock(&self.communicator);
        let Some(communicator) = communicator.as_ref() else {
            let aborted = || self.error(op, "the communicator was aborted; World::agree builds it anew".to_owned());
            return Err(self.member.failure().map_or_else(aborted, Error::from));
        };
        self.lane.join()?;
        let stream = torch::current_cuda_stream(self.ordinal)?;
        let seen = phase::collective(op, self.host.name(), bytes);
        let code = call(communicator.0, stream.cast());
        self.settle(op, communicator.0, code)?;
        seen.queued(); // a host that waits for the stream waits for peers
        Ok(())
    }

    /// Polls a call until NCCL has taken it on.
    fn settle(&self, op: &'static str, raw: sys::ncclComm_t, mut code: sys::ncclResult_t) -> Result<()> {
        let deadline = Instant::now() + self.timeout;
        while code == sys::ncclResult_t::ncclInProgress {
            if let Some(failure) = self.member.failure() {
                return Err(failure.into());
            }
            if Instant::now() > deadline {
                return Err(self.error(op, format!("not under way after {:.1} s", self.timeout.as_secs_f64())));
            }
            std::thread::yield_now();
            // SAFETY: the communicator is alive: its owner is borrowed by the caller.
            let asked = unsafe { sys::ncclCommGetAsyncError(raw, &raw mut code) };
            self.check(op, asked)?;
        }
        self.check(op, code)
    }

    fn check(&self, op: &'static str, code: sys::ncclResult_t) -> Result<()> {
        if code == sys::ncclResult_t::ncclSuccess {
            return Ok(());
        }
        // SAFETY: both give NUL-terminated strings of the library; the last error asks for no communicator.
        let texts = unsafe { [sys::ncclGetErrorString(code), sys::ncclGetLastError(std::ptr::null_mut())] };
        let [kind, detail] = texts.map(|text| {
            // SAFETY: as above; a null is left out.
            if text.is_null() { "".into() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy() }
        });
        Err(self.error(op, format!("NCCL code {}: {kind}. {detail}", code as u32)))
    }

    fn error(&self, op: &'static str, message: String) -> Error {
        let group = self.host.name().to_owned();
        Error::Collective { op, group, rank: self.ranks()[self.rank()], message }
    }
}

// SAFETY, for every block below: `checks` made sure that the tensors span the bytes named on this device; NCCL reads and
// writes them in stream order, and libtorch frees memory in the same stream's order.
impl Collective for NcclGroup {
    fn name(&self) -> &str {
        self.host.name()
    }

    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn ranks(&self) -> &[usize] {
        self.host.ranks()
    }

    fn device(&self) -> Device {
        Device::Cuda(self.ordinal)
    }

    fn epoch(&self) -> Result<u64> {
        match (lock(&self.communicator).is_some(), self.member.failure()) {
            (false, Some(failure)) => Err(failure.into()),
            _ => Ok(self.epoch.load(Ordering::Relaxed)),
        }
    }

    fn peer_memory(&self, bytes: usize) -> Result<Option<Arc<PeerMemory>>> {
        self.peers.memory(&self.host, self.ordinal, self.epoch()?, bytes)
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

    fn barrier(&self) -> Result<()> {
        self.host.barrier()
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

/// `NCCL_CONFIG_INITIALIZER` of NCCL 2.28 with `blocking = 0`. cudarc's struct is that of 2.30: the size given ends where
/// 2.28's does.
fn non_blocking() -> sys::ncclConfig_t {
    const UNDEFINED: i32 = i32::MIN;
    sys::ncclConfig_t {
        size: offset_of!(sys::ncclConfig_t, graphUsageMode),
        magic: 0xcafe_beef,
        version: 22_800,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_ends_where_that_of_2_28_does() {
        // size_t, 3 words to `blocking`, 3 CTA words, a pointer, 2 words, a pointer, 6 words.
        assert_eq!(non_blocking().size, 8 + 6 * 4 + 8 + 2 * 4 + 8 + 6 * 4);
    }
}
