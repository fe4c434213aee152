//! Peak memory of a rank while something ran.

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

/// How often the driver is asked.
const LOOK: Duration = Duration::from_millis(20);

/// Most bytes at once, by who holds them; peaks of different holders need not fall together.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Peak {
    /// libtorch's tensors on the GPU.
    pub tensor_bytes: usize,
    /// Bytes of tensors, and those that libtorch keeps for later ones.
    pub libtorch_bytes: usize,
    /// Arenas on the device.
    pub arena_bytes: usize,
    /// Host pools.
    pub host_pool_bytes: usize,
    /// All of the GPU that is not free, as the driver counts it, looked at every 20 ms.
    pub used_bytes: usize,
    /// Physical memory of the process.
    pub resident_bytes: usize,
}

/// Bytes of a model in training that libtorch holds at most, `at_once` of them at its fullest moment; optimizer state lies in an
/// arena.
pub(super) fn predicted_tensor_bytes(model: &TrainedModel<'_>, at_once: usize) -> usize {
    model.bytes().weights + at_once + WORKSPACE_BYTES
}

/// Memory that a rank needs to train.
#[derive(Debug, Clone, Copy)]
pub(super) struct TrainingNeeds {
    /// Bytes of libtorch's tensors at training's fullest moment.
    pub tensor_bytes: usize,
    /// Bytes of master weights and moments, which lie in an arena, not in libtorch's tensors.
    pub optimizer_bytes: usize,
}

impl TrainingNeeds {
    /// Refuses to begin where a rank has less; collective over the world.
    ///
    /// # Errors
    /// [`Error::Environment`]; the errors of [`Room::common`].
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

/// Watches this rank's memory from its start on.
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

    /// The peaks so far, of every rank of `group`, by rank; collective over it.
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

/// A thread that asks the driver how much of the GPU is taken.
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
