//! Queries NVML about the visible GPUs: which processes use their memory (this needs no context and covers other processes), and the energy they have
//! used.

use std::sync::LazyLock;

use cudarc::driver::result;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};

use super::devices::{devices, failed};
use crate::error::{Error, Result};

/// Memory in bytes that other users of a GPU may hold without being reported: displays, monitoring, the driver.
const TOLERATED_BYTES: u64 = 1 << 30;

/// The NVML library, opened once; `None` if it is not installed.
static NVML: LazyLock<Option<Nvml>> =
    LazyLock::new(|| Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init().ok());

/// Checks that no other process uses memory of the visible GPUs.
///
/// # Errors
/// [`Error::Environment`] with the GPU, the processes and their MiB, or if the driver does not answer. Without NVML a warning is logged and the check
/// is skipped.
pub fn require_free() -> Result<()> {
    let count = devices()?.len();
    if NVML.is_none() {
        tracing::warn!("cannot load libnvidia-ml.so.1: skipping the check for other processes on the GPU");
        return Ok(());
    }
    let mut held = Vec::new();
    for ordinal in 0..count {
        held.extend(held_memory(ordinal)?.map(|by| format!("GPU {ordinal}: {by}")));
    }
    if held.is_empty() {
        return Ok(());
    }
    let message = format!("{}; end them or choose other GPUs with CUDA_VISIBLE_DEVICES", held.join("; "));
    Err(Error::Environment { message })
}

/// Reads the energy that one GPU has used since its driver was loaded.
#[derive(Debug)]
pub struct EnergyMeter(Device<'static>);

impl EnergyMeter {
    /// Creates the energy meter of a visible GPU.
    ///
    /// # Errors
    /// [`Error::Cuda`] for a GPU that does not exist; [`Error::Environment`] if there is no NVML or it does not know the GPU.
    pub fn new(ordinal: usize) -> Result<Self> {
        let untold = || Error::Environment {
            message: format!("NVML, which reports a GPU's energy, does not know GPU {ordinal}"),
        };
        handle(ordinal)?.map(Self).ok_or_else(untold)
    }

    /// The energy used so far, in joules. The counter is updated every few hundredths of a second.
    ///
    /// # Errors
    /// [`Error::Environment`] for a GPU without an energy counter.
    pub fn joules(&self) -> Result<f64> {
        let failed =
            |error| Error::Environment { message: format!("NVML cannot report the energy of the GPU: {error}") };
        Ok(self.0.total_energy_consumption().map_err(failed)? as f64 / 1e3)
    }
}

/// Memory of a GPU as the driver reports it, including contexts, libraries and other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct GpuMemory {
    /// Bytes in use.
    pub used_bytes: u64,
    /// Total bytes.
    pub total_bytes: u64,
}

/// Reads the memory use of one GPU as the driver reports it, including contexts, libraries and other processes.
#[derive(Debug)]
pub struct MemoryMeter(Device<'static>);

impl MemoryMeter {
    /// Creates the memory meter of a visible GPU; `None` if there is no NVML or it does not know the GPU.
    ///
    /// # Errors
    /// [`Error::Cuda`] for a GPU that does not exist.
    pub fn new(ordinal: usize) -> Result<Option<Self>> {
        Ok(handle(ordinal)?.map(Self))
    }

    /// The current memory use; `None` if the driver does not answer.
    pub fn read(&self) -> Option<GpuMemory> {
        self.0.memory_info().ok().map(|memory| GpuMemory { used_bytes: memory.used, total_bytes: memory.total })
    }
}

/// NVML's handle of a visible GPU.
fn handle(ordinal: usize) -> Result<Option<Device<'static>>> {
    let Some(nvml) = &*NVML else { return Ok(None) };
    let device = result::device::get(ordinal as i32).map_err(failed)?;
    let uuid = result::device::get_uuid(device).map_err(failed)?;
    Ok(nvml.device_by_uuid(uuid_text(&uuid.bytes.map(|byte| byte as u8))).ok())
}

/// Describes the memory of one GPU that other processes hold, if it is more than tolerated.
fn held_memory(ordinal: usize) -> Result<Option<String>> {
    let known = handle(ordinal)?.and_then(|device| Some((device.memory_info().ok()?.used, device)));
    let Some((used, device)) = known else {
        tracing::warn!("NVML does not know GPU {ordinal}; skipping the check for other processes that use its memory");
        return Ok(None);
    };
    let processes = || device.running_compute_processes().unwrap_or_default();
    Ok((used > TOLERATED_BYTES).then(|| describe(used, &processes())))
}

fn describe(used: u64, processes: &[ProcessInfo]) -> String {
    let by = |process: &ProcessInfo| match process.used_gpu_memory {
        UsedGpuMemory::Unavailable => format!("process {}", process.pid),
        UsedGpuMemory::Used(used) => format!("process {} ({} MiB)", process.pid, used >> 20),
    };
    let list: Vec<String> = processes.iter().map(by).collect();
    let list = if list.is_empty() { "processes that are not visible from here".to_owned() } else { list.join(", ") };
    format!("{} MiB are in use by {list}", used >> 20)
}

/// The UUID as NVML writes it: `GPU-` and the bytes in groups of 4, 2, 2, 2 and 6.
fn uuid_text(bytes: &[u8; 16]) -> String {
    let mut text = "GPU".to_owned();
    for range in [0..4, 4..6, 6..8, 8..10, 10..16] {
        text.push('-');
        text.extend(bytes[range].iter().map(|byte| format!("{byte:02x}")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_use_gpu_memory_are_named_with_mib() {
        let process = |pid, used_gpu_memory| ProcessInfo {
            pid,
            used_gpu_memory,
            gpu_instance_id: None,
            compute_instance_id: None,
        };
        let two = [process(7, UsedGpuMemory::Used(4 << 30)), process(9, UsedGpuMemory::Unavailable)];
        let text = describe(5 << 30, &two);
        assert_eq!(text, "5120 MiB are in use by process 7 (4096 MiB), process 9");
        assert_eq!(describe(2 << 30, &[]), "2048 MiB are in use by processes that are not visible from here");
        let uuid = uuid_text(&[0xab, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(uuid, "GPU-ab010203-0405-0607-0809-0a0b0c0d0e0f");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn gpu_check_for_free_memory_sees_memory_of_this_process() {
        crate::cuda::require().unwrap();
        require_free().unwrap();
        let held = tch::Tensor::zeros([1 << 29], (tch::Kind::Float, tch::Device::Cuda(0)));
        tch::Cuda::synchronize(0);
        let error = require_free().unwrap_err().to_string();
        assert!(error.contains("GPU 0: ") && error.contains("MiB are in use by"), "{error}");
        let meter = MemoryMeter::new(0).unwrap().expect("NVML knows the GPU");
        let GpuMemory { used_bytes: used, total_bytes: total } = meter.read().unwrap();
        assert!((2 << 30..total).contains(&used), "{used} of {total}");
        drop(held);
    }
}
