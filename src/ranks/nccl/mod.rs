//! Collectives between GPUs, through NCCL.
//!
//! Communicators are non-blocking: a call that is not done yet is polled, so that a peer's failure or the time limit ends the wait. All work is
//! queued on libtorch's current stream, or on that of the lane. The host sides of a group communicate through the control plane. A thread watches the
//! control plane for failures and then aborts all communicators, which releases a host that waits for a stuck stream. `World::agree` builds them
//! again.
#![allow(unsafe_code)]

mod communicator;
mod group;

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use tch::Device;

use self::communicator::lock;
use self::group::NcclGroup;
use super::WorkerEnv;
use super::collective::Collective;
use super::control::{ControlPlane, RankGroup};
use super::lane::Lane;
use crate::cuda;
use crate::error::{Error, Result};
use crate::process::detach;
use crate::torch;

/// Interval at which the failure flag is checked.
const LOOK: Duration = Duration::from_millis(20);

/// Environment variables for NCCL, unless the user sets them. Registered buffers of captured collectives would pin memory that is remapped later, and
/// NVLink multicast costs memory without benefit here. They must be set when the process starts, because other threads read the environment.
pub const NCCL_SETTINGS: [(&str, &str); 2] = [("NCCL_GRAPH_REGISTER", "0"), ("NCCL_NVLS_ENABLE", "0")];

/// The GPU of a rank: made current, with kernels compiled and loaded.
///
/// # Errors
/// [`Error::Environment`] if there is no such GPU, if libtorch's CUDA library or NCCL cannot be loaded, or if one of [`NCCL_SETTINGS`] is not set.
pub(super) fn device(env: &WorkerEnv) -> Result<Device> {
    check_settings(|name| std::env::var_os(name).is_some())?;
    cuda::require()?;
    torch::set_cuda_device(env.local_rank)?;
    cuda::kernels::prepare(env.local_rank, env.local_world_size)?;
    Ok(Device::Cuda(env.local_rank))
}

fn check_settings(is_set: impl Fn(&str) -> bool) -> Result<()> {
    let missing: Vec<_> = NCCL_SETTINGS.iter().filter(|(name, _)| !is_set(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let missing: Vec<_> = missing.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
    let message = format!(
        "NCCL is not set up: start the program with {} (or let colo_grpo::main run the program)",
        missing.join(" ")
    );
    Err(Error::Environment { message })
}

/// This rank's NCCL groups.
#[derive(Debug)]
pub(super) struct NcclGroups {
    control: Arc<dyn ControlPlane>,
    ordinal: usize,
    timeout: Duration,
    lane: Arc<Lane>,
    groups: Arc<Mutex<Vec<Arc<NcclGroup>>>>,
    watcher: Option<(Sender<()>, JoinHandle<()>)>,
}

impl NcclGroups {
    /// Creates an empty set of groups, and the thread that aborts them when any rank fails. The thread ends with this value.
    pub(super) fn new(
        control: Arc<dyn ControlPlane>,
        ordinal: usize,
        timeout: Duration,
        lane: Arc<Lane>,
    ) -> Result<Self> {
        let groups = Arc::new(Mutex::new(Vec::new()));
        let (watched, (stay, end)) = (Arc::clone(&groups), channel());
        let watcher = std::thread::Builder::new().name("nccl-watch".to_owned());
        let watcher = watcher.spawn(move || watch(&watched, &end)).map_err(|error| Error::Environment {
            message: format!("cannot start the thread that watches NCCL: {error}"),
        })?;
        Ok(Self { control, ordinal, timeout, lane, groups, watcher: Some((stay, watcher)) })
    }

    /// Connects the GPUs of a group. Collective over the group.
    pub(super) fn add(&self, ranks: Arc<RankGroup>) -> Result<Arc<dyn Collective>> {
        let (control, lane) = (self.control.clone(), self.lane.clone());
        let group = Arc::new(NcclGroup::new(ranks, control, self.ordinal, self.timeout, lane));
        group.connect()?;
        lock(&self.groups).push(group.clone());
        Ok(group)
    }

    /// Builds new communicators for all groups after a failure. Collective over the world.
    pub(super) fn rebuild(&self) -> Result<()> {
        let groups = lock(&self.groups).clone();
        abort_where(&groups, |_| true);
        groups.iter().try_for_each(|group| group.connect())
    }
}

/// Ends the watcher thread first, because it may hold the last communicators. Threads that are still aborting are not waited for, because they wait
/// for graphs that may outlive this value. A process that has met a failure therefore exits without unloading its libraries (`launch::exit_now`).
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
        abort_where(&groups, NcclGroup::has_failed);
    }
}

/// Ends waits in kernels that use peers' memory, removes the communicators of the groups that `is_due` selects, and aborts each on a detached thread.
/// All locks are held meanwhile, because `rebuild` follows in the next epoch. Aborting ends kernels at once but returns late. It waits for the GPU,
/// which a kernel of another communicator may keep busy until that is aborted too. It also waits for the end of every CUDA graph that holds the
/// communicator; the engine drops these when it wakes next.
fn abort_where(groups: &[Arc<NcclGroup>], is_due: impl Fn(&NcclGroup) -> bool) {
    if !groups.iter().any(|group| is_due(group)) {
        return;
    }
    let mut held: Vec<_> = groups.iter().map(|group| (group.communicator(), is_due(group))).collect();
    groups.iter().zip(&held).filter(|(_, (_, due))| *due).for_each(|(group, _)| group.abort_peers());
    for communicator in held.iter_mut().filter(|(_, due)| *due).filter_map(|(communicator, _)| communicator.take()) {
        // If no thread can be started, dropping the closure aborts the communicator here.
        let _ = detach(std::thread::Builder::new().name("nccl-abort".to_owned()), move || drop(communicator));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_nccl_setting_is_named_with_its_value() {
        assert!(check_settings(|_| true).is_ok());
        let message = check_settings(|name| name == "NCCL_NVLS_ENABLE").unwrap_err().to_string();
        assert!(message.contains("NCCL_GRAPH_REGISTER=0 (or") && !message.contains("NVLS"), "{message}");
    }
}
