//! Peak memory of a rank while some work runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use tch::{Device, Kind};

use crate::cuda::{Context, FreeMemory, Placement};
use crate::error::{Error, Result};
use crate::memory::{self, Ledger, MemoryKind};
use crate::plan::{Room, human};
use crate::ranks::{Collective, World, all_gather_json};
use crate::torch;
use crate::train::{TrainedModel, WORKSPACE_BYTES};

/// Interval at which the driver is queried.
const LOOK: Duration = Duration::from_millis(20);

/// Maximum bytes by holder; the peaks of different holders need not coincide.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Peak {
    /// Bytes of libtorch's tensors on the GPU.
    pub tensor_bytes: usize,
    /// Bytes of tensors, and of free blocks in libtorch's cache.
    pub libtorch_bytes: usize,
    /// Bytes of arenas on the device.
    pub arena_bytes: usize,
    /// Bytes of host pools.
    pub host_pool_bytes: usize,
    /// Used bytes of the whole GPU as reported by the driver, polled every 20 ms.
    pub used_bytes: usize,
    /// Physical memory of the process, in bytes.
    pub resident_bytes: usize,
}

/// Predicted maximum bytes of libtorch's tensors for a model in training, of which `at_once` are needed at its peak. Optimizer state is in an arena,
/// so it is not included.
pub(super) fn predicted_tensor_bytes(model: &TrainedModel<'_>, at_once: usize) -> usize {
    model.bytes().weights + at_once + WORKSPACE_BYTES
}

/// Memory that a rank needs to train.
#[derive(Debug, Clone, Copy)]
pub(super) struct TrainingNeeds {
    /// Bytes of libtorch's tensors at training's peak.
    pub tensor_bytes: usize,
    /// Bytes of master weights and moments, which are in an arena.
    pub optimizer_bytes: usize,
}

impl TrainingNeeds {
    /// Refuses to start if any rank has less memory; collective over the world.
    ///
    /// # Errors
    /// [`Error::Environment`] if the memory is too small; the errors of [`Room::common`].
    pub(super) fn check(self, kind: Kind, world: &World) -> Result<()> {
        let placement = Placement { on_cuda: world.device().is_cuda(), kind };
        self.check_within(Room::common(placement, world)?.available_bytes)
    }

    pub(super) fn check_within(self, available: usize) -> Result<()> {
        let Self { tensor_bytes, optimizer_bytes } = self;
        let needed = tensor_bytes + optimizer_bytes;
        if needed <= available {
            return Ok(());
        }
        let message = format!(
            "this benchmark needs {} per rank ({} for tensors, {} for optimizer state), but only {} are available: use \
             more ranks, fewer --layers, a smaller --max_tokens_per_micro_batch or more --gradient_checkpointing",
            human(needed),
            human(tensor_bytes),
            human(optimizer_bytes),
            human(available),
        );
        Err(Error::Environment { message })
    }
}

/// Measures this rank's peak memory from its creation on.
#[derive(Debug)]
pub(super) struct MemoryWatch {
    device: Device,
    driver: Option<DriverWatch>,
}

impl MemoryWatch {
    pub(super) fn start(device: Device) -> Result<Self> {
        let mut watch = Self { device, driver: None };
        torch::reset_peak_memory(device)?;
        Ledger::take_peak(MemoryKind::Device);
        Ledger::take_peak(MemoryKind::Host);
        if let Device::Cuda(ordinal) = device {
            watch.driver = Some(DriverWatch::start(Context::retain(ordinal)?)?);
        }
        Ok(watch)
    }

    /// The peaks so far of every rank in `group`, by rank; collective over it.
    pub(super) fn of_all(self, group: &dyn Collective) -> Result<Vec<Value>> {
        all_gather_json(group, "gather memory peaks", &self.take()?)
    }

    fn take(&self) -> Result<Peak> {
        let libtorch = torch::device_memory(self.device)?;
        Ok(Peak {
            tensor_bytes: libtorch.map_or(0, |memory| memory.peak_allocated),
            libtorch_bytes: libtorch.map_or(0, |memory| memory.peak_reserved),
            arena_bytes: Ledger::take_peak(MemoryKind::Device),
            host_pool_bytes: Ledger::take_peak(MemoryKind::Host),
            used_bytes: self.driver.as_ref().map_or(0, |driver| driver.most.load(Ordering::Relaxed)),
            resident_bytes: memory::peak_resident_bytes()?,
        })
    }
}

/// A thread that polls the driver for the GPU's used memory.
#[derive(Debug)]
struct DriverWatch {
    most: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl DriverWatch {
    fn start(context: Arc<Context>) -> Result<Self> {
        let (most, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (seen, stopped) = (most.clone(), stop.clone());
        let look = move || {
            while !stopped.load(Ordering::Relaxed) {
                if let Ok(FreeMemory { free_bytes: free, total_bytes: total }) = context.memory() {
                    seen.fetch_max(total - free, Ordering::Relaxed);
                }
                std::thread::sleep(LOOK);
            }
        };
        let thread = std::thread::Builder::new().name("memory-watch".to_owned()).spawn(look);
        let thread = thread.map_err(|error| Error::Environment {
            message: format!("cannot start the thread that measures peak memory: {error}"),
        })?;
        Ok(Self { most, stop, thread: Some(thread) })
    }
}

impl Drop for DriverWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
