//! Queries NVML for the visible GPUs: who holds their memory (it needs no context and sees other processes), what energy they
//! have taken.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};

use cudarc::driver::result;

use super::devices::{devices, failed};
use crate::error::{Error, Result};

/// Memory that a GPU may hold for others: displays, monitors, the driver itself.
const TOLERATED_BYTES: u64 = 1 << 30;
const MAX_PROCESSES: usize = 64;

type Device = *mut c_void;
type NvmlStatus = c_int;

#[repr(C)]
struct NvmlMemory {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NvmlProcess {
    pid: c_uint,
    used: c_ulonglong, // all ones where it is not told
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// Refuses GPUs that other processes hold memory of.
///
/// # Errors
/// [`Error::Environment`] with the GPU, its processes and their MiB; or if the driver does not answer. Where there is no
/// NVML, a warning is logged and nothing is refused.
pub fn require_free() -> Result<()> {
    let count = devices()?.len();
    let Some(nvml) = Nvml::open() else {
        tracing::warn!("libnvidia-ml.so.1 is not to be had: whether others hold GPU memory is not checked");
        return Ok(());
    };
    let mut held = Vec::new();
    for ordinal in 0..count {
        held.extend(nvml.held(ordinal as i32)?.map(|by| format!("GPU {ordinal}: {by}")));
    }
    if held.is_empty() {
        return Ok(());
    }
    let message = format!("{}; end them or choose other GPUs with CUDA_VISIBLE_DEVICES", held.join("; "));
    Err(Error::Environment { message })
}

/// The energy that one GPU has taken since its driver was loaded.
#[derive(Debug)]
pub struct EnergyMeter {
    energy: EnergyOf,
    device: Device,
}

impl EnergyMeter {
    /// The energy meter of a visible GPU.
    ///
    /// # Errors
    /// [`Error::Cuda`] for a GPU that does not exist; [`Error::Environment`] where there is no NVML or it does not know the GPU.
    pub fn new(ordinal: usize) -> Result<Self> {
        let meter = match Nvml::open() {
            Some(nvml) => nvml.device(ordinal as i32)?.map(|device| Self { energy: nvml.energy, device }),
            None => None,
        };
        let untold =
            || Error::Environment { message: format!("NVML, which tells a GPU's energy, does not know GPU {ordinal}") };
        meter.ok_or_else(untold)
    }

    /// Joules. The counter moves every few hundredths of a second.
    ///
    /// # Errors
    /// [`Error::Environment`] for a GPU that does not count.
    pub fn joules(&self) -> Result<f64> {
        let mut millijoules = 0;
        // SAFETY: the device is one of NVML's, and the number outlives the call.
        match unsafe { (self.energy)(self.device, &raw mut millijoules) } {
            0 => Ok(millijoules as f64 / 1e3),
            status => {
                Err(Error::Environment { message: format!("NVML does not tell the GPU's energy: status {status}") })
            }
        }
    }
}

/// The memory of one GPU as its driver counts it: contexts, libraries and other processes included.
#[derive(Debug)]
pub struct MemoryMeter {
    memory: MemoryOf,
    device: Device,
}

// SAFETY: NVML may be called from any thread, and its handles are good in all of them.
unsafe impl Send for MemoryMeter {}

impl MemoryMeter {
    /// The memory of a visible GPU; none where there is no NVML, or it does not know the GPU.
    ///
    /// # Errors
    /// [`Error::Cuda`] for a GPU that does not exist.
    pub fn new(ordinal: usize) -> Result<Option<Self>> {
        let Some(nvml) = Nvml::open() else { return Ok(None) };
        Ok(nvml.device(ordinal as i32)?.map(|device| Self { memory: nvml.memory, device }))
    }

    /// Bytes in use and bytes in all; none while the driver does not say.
    pub fn used_and_total(&self) -> Option<(u64, u64)> {
        let mut memory = NvmlMemory::empty();
        // SAFETY: the device is NVML's own, and memory outlives the call.
        let status = unsafe { (self.memory)(self.device, &raw mut memory) };
        (status == 0).then_some((memory.used, memory.total))
    }
}

impl NvmlMemory {
    /// The structure without numbers, for NVML to fill in.
    fn empty() -> Self {
        let version = (size_of::<Self>() | 2 << 24) as c_uint;
        Self { version, total: 0, reserved: 0, free: 0, used: 0 }
    }
}

/// The functions that are used of the library, which stays open.
struct Nvml {
    by_uuid: ByUuid,
    memory: MemoryOf,
    processes: ProcessesOf,
    energy: EnergyOf,
}

type ByUuid = unsafe extern "C" fn(*const c_char, *mut Device) -> NvmlStatus;
type MemoryOf = unsafe extern "C" fn(Device, *mut NvmlMemory) -> NvmlStatus;
type EnergyOf = unsafe extern "C" fn(Device, *mut c_ulonglong) -> NvmlStatus;
type ProcessesOf = unsafe extern "C" fn(Device, *mut c_uint, *mut NvmlProcess) -> NvmlStatus;

impl Nvml {
    fn open() -> Option<Self> {
        // SAFETY: opens the driver's library, whose initialisers are its vendor's; the name outlives the call.
        let library = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return None;
        }
        let symbol = |name: &CStr| {
            // SAFETY: the library is open and the name outlives the call.
            let address = unsafe { libc::dlsym(library, name.as_ptr()) };
            (!address.is_null()).then_some(address)
        };
        // SAFETY: the symbols have these types in nvml.h (12.0 and later).
        let (init, nvml) = unsafe {
            let init =
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> NvmlStatus>(symbol(c"nvmlInit_v2")?);
            let by_uuid = std::mem::transmute::<*mut c_void, ByUuid>(symbol(c"nvmlDeviceGetHandleByUUID")?);
            let memory = std::mem::transmute::<*mut c_void, MemoryOf>(symbol(c"nvmlDeviceGetMemoryInfo_v2")?);
            let processes =
                std::mem::transmute::<*mut c_void, ProcessesOf>(symbol(c"nvmlDeviceGetComputeRunningProcesses_v3")?);
            let energy = std::mem::transmute::<*mut c_void, EnergyOf>(symbol(c"nvmlDeviceGetTotalEnergyConsumption")?);
            (init, Self { by_uuid, memory, processes, energy })
        };
        // SAFETY: takes no arguments.
        (unsafe { init() } == 0).then_some(nvml)
    }

    /// NVML's handle of a visible GPU.
    fn device(&self, ordinal: i32) -> Result<Option<Device>> {
        let device = result::device::get(ordinal).map_err(failed)?;
        let uuid = result::device::get_uuid(device).map_err(failed)?;
        let name = uuid_text(&uuid.bytes.map(|byte| byte as u8));
        let mut handle = std::ptr::null_mut();
        // SAFETY: name and handle outlive the call.
        let known = unsafe { (self.by_uuid)(name.as_ptr(), &raw mut handle) } == 0;
        Ok(known.then_some(handle))
    }

    /// Describes the memory of one GPU that others hold, if it is more than is tolerated.
    fn held(&self, ordinal: i32) -> Result<Option<String>> {
        let mut memory = NvmlMemory::empty();
        // SAFETY: the device is NVML's own, and memory outlives the call.
        let of = |&device: &Device| unsafe { (self.memory)(device, &raw mut memory) } == 0;
        let Some(device) = self.device(ordinal)?.filter(of) else {
            tracing::warn!("NVML does not know GPU {ordinal}: whether others hold its memory is not checked");
            return Ok(None);
        };
        if memory.used <= TOLERATED_BYTES {
            return Ok(None);
        }
        let mut processes = [NvmlProcess { pid: 0, used: 0, gpu_instance: 0, compute_instance: 0 }; MAX_PROCESSES];
        let mut count = MAX_PROCESSES as c_uint;
        // SAFETY: there is room for `count` processes, of which the call writes no more.
        let listed = unsafe { (self.processes)(device, &raw mut count, processes.as_mut_ptr()) } == 0;
        let processes = &processes[..if listed { count as usize } else { 0 }];
        Ok(Some(describe(memory.used, processes)))
    }
}

fn describe(used: u64, processes: &[NvmlProcess]) -> String {
    let by = |process: &NvmlProcess| match process.used {
        u64::MAX => format!("process {}", process.pid),
        used => format!("process {} ({} MiB)", process.pid, used >> 20),
    };
    let list: Vec<String> = processes.iter().map(by).collect();
    let list = if list.is_empty() { "processes that are not visible here".to_owned() } else { list.join(", ") };
    format!("{} MiB are held by {list}", used >> 20)
}

/// The UUID as NVML writes it: `GPU-` and the bytes in groups of 4, 2, 2, 2 and 6.
fn uuid_text(bytes: &[u8; 16]) -> CString {
    let mut text = "GPU".to_owned();
    for range in [0..4, 4..6, 6..8, 8..10, 10..16] {
        text.push('-');
        text.extend(bytes[range].iter().map(|byte| format!("{byte:02x}")));
    }
    CString::new(text).expect("digits and dashes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_named_with_their_mib() {
        let process = |pid, used| NvmlProcess { pid, used, gpu_instance: 0, compute_instance: 0 };
        let text = describe(5 << 30, &[process(7, 4 << 30), process(9, u64::MAX)]);
        assert_eq!(text, "5120 MiB are held by process 7 (4096 MiB), process 9");
        assert_eq!(describe(2 << 30, &[]), "2048 MiB are held by processes that are not visible here");
        let uuid = uuid_text(&[0xab, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(uuid.to_str().unwrap(), "GPU-ab010203-0405-0607-0809-0a0b0c0d0e0f");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn gpu_require_free_sees_what_this_process_holds() {
        crate::cuda::require().unwrap();
        require_free().unwrap();
        let held = tch::Tensor::zeros([1 << 29], (tch::Kind::Float, tch::Device::Cuda(0)));
        tch::Cuda::synchronize(0);
        let error = require_free().unwrap_err().to_string();
        assert!(error.contains("GPU 0: ") && error.contains("MiB are held by"), "{error}");
        let meter = MemoryMeter::new(0).unwrap().expect("NVML knows the GPU");
        let (used, total) = meter.used_and_total().unwrap();
        assert!((2 << 30..total).contains(&used), "{used} of {total}");
        drop(held);
    }
}
