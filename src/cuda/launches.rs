//! Records the kernels, copies and fills that a GPU runs, with their start and end times, through CUPTI. This library is shipped with libtorch and
//! opened only when a recording begins. Other times in this crate come from CUDA events, which do not show the gaps between two kernels.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::transmute_copy;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::context::Context;
use super::library::{environment, mapped_files};
use crate::error::{Error, Result};

/// File name of the CUPTI library, for the dynamic loader.
const LIBRARY: &str = "libcupti.so.13";
/// Kinds of CUPTI records that are enabled: copies, fills, and kernels. Kernels of this kind may run concurrently.
const KINDS: [u32; 3] = [MEMCPY, MEMSET, KERNEL];
const MEMCPY: u32 = 1;
const MEMSET: u32 = 2;
const KERNEL: u32 = 10;
/// Byte offset of the start time in a record, in nanoseconds. A record begins with its kind.
const START_AT: usize = 16;
/// Byte offset of the end time in a record, in nanoseconds.
const END_AT: usize = 24;
/// Byte offset of the pointer to the name in a kernel's record.
const NAME_AT: usize = 104;
/// Flag of a flush: CUPTI returns all buffers, full or not.
const FLUSH_FORCED: u32 = 1;
const BUFFER: Layout = match Layout::from_size_align(4 << 20, 8) {
    Ok(layout) => layout,
    Err(_) => panic!("a power of two"),
};

/// A kernel, copy or fill that a GPU has run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuLaunch {
    /// Name of the kernel in its binary, or "copy" or "fill".
    pub name: String,
    /// Time when its first block started, in nanoseconds of the GPU's clock.
    pub start_ns: u64,
    /// Time when its last block ended, in nanoseconds of the GPU's clock.
    pub end_ns: u64,
}

/// Functions of the CUPTI library.
struct Cupti {
    enable: unsafe extern "C" fn(u32) -> u32,
    disable: unsafe extern "C" fn(u32) -> u32,
    register: unsafe extern "C" fn(BufferRequest, BufferReturn) -> u32,
    flush: unsafe extern "C" fn(u32) -> u32,
    next: unsafe extern "C" fn(*mut u8, usize, *mut *mut u8) -> u32,
}

type BufferRequest = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type BufferReturn = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

/// Launches recorded so far. It is a global because CUPTI returns buffers on its own thread.
static RECORDED: Mutex<Vec<GpuLaunch>> = Mutex::new(Vec::new());

/// Runs `work` and returns the kernels, copies and fills that the GPU ran meanwhile, on all streams of this process, sorted by start. Recording slows
/// each kernel by about a microsecond, and later work may be slower, too. So take other timings before.
///
/// # Errors
/// The errors of `work`; [`Error::Environment`] if CUPTI is missing or returns an error.
pub fn record_launches(context: &Context, work: impl FnOnce() -> Result<()>) -> Result<Vec<GpuLaunch>> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _only = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let cupti = Cupti::open()?;
    context.synchronize()?;
    let outcome = KINDS.iter().try_for_each(|&kind| {
        // SAFETY: CUPTI knows this kind.
        check("cuptiActivityEnable", unsafe { (cupti.enable)(kind) })
    });
    let outcome = outcome.and_then(|()| work()).and_then(|()| context.synchronize());
    for kind in KINDS {
        // SAFETY: CUPTI knows this kind. An error about a kind that was not enabled does not matter.
        let _ = unsafe { (cupti.disable)(kind) };
    }
    // SAFETY: CUPTI returns its buffers through `completed`.
    let flushed = check("cuptiActivityFlushAll", unsafe { (cupti.flush)(FLUSH_FORCED) });
    let mut launches = std::mem::take(&mut *RECORDED.lock().unwrap_or_else(PoisonError::into_inner));
    outcome?;
    flushed?;
    launches.sort_by_key(|launch| (launch.start_ns, launch.end_ns));
    Ok(launches)
}

impl Cupti {
    /// Opens the CUPTI library at the first call: the one that is already loaded, else the one that the dynamic loader finds.
    fn open() -> Result<&'static Self> {
        static OUTCOME: OnceLock<std::result::Result<Cupti, String>> = OnceLock::new();
        let outcome = OUTCOME.get_or_init(|| Self::load().map_err(|error| error.to_string()));
        outcome.as_ref().map_err(|message| Error::Environment { message: message.clone() })
    }

    fn load() -> Result<Self> {
        let path = mapped_files("libcupti.so")?.into_iter().next().unwrap_or_else(|| PathBuf::from(LIBRARY));
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| environment("a path with a NUL byte"))?;
        // SAFETY: this is the CUPTI library that libtorch has loaded, or the one that the loader finds; it is never closed.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return Err(environment(&format!("{LIBRARY}, which records launches, was not found beside libtorch")));
        }
        let symbol = |name: &CStr| {
            // SAFETY: the library is open.
            let address = unsafe { libc::dlsym(library, name.as_ptr()) };
            let missing = || environment(&format!("{} has no {}", path.display(), name.to_string_lossy()));
            if address.is_null() { Err(missing()) } else { Ok(address) }
        };
        // SAFETY: each symbol is a function of the type that the library's header gives it.
        let cupti = unsafe {
            Self {
                enable: transmute_copy(&symbol(c"cuptiActivityEnable")?),
                disable: transmute_copy(&symbol(c"cuptiActivityDisable")?),
                register: transmute_copy(&symbol(c"cuptiActivityRegisterCallbacks")?),
                flush: transmute_copy(&symbol(c"cuptiActivityFlushAll")?),
                next: transmute_copy(&symbol(c"cuptiActivityGetNextRecord")?),
            }
        };
        // SAFETY: both functions live as long as the process.
        check("cuptiActivityRegisterCallbacks", unsafe { (cupti.register)(requested, completed) })?;
        Ok(cupti)
    }
}

fn check(op: &str, code: u32) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(environment(&format!("{op}: CUPTI code {code}"))) }
}

/// Callback of CUPTI that gives it an empty buffer. The buffer is null if there is no memory; CUPTI then drops records.
///
/// # Safety
/// CUPTI must call it, with valid addresses of the three results.
unsafe extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, max_records: *mut usize) {
    // SAFETY: the caller promises valid addresses; the layout is not empty.
    unsafe {
        *buffer = alloc_zeroed(BUFFER);
        *size = if (*buffer).is_null() { 0 } else { BUFFER.size() };
        *max_records = 0; // as many as fit
    }
}

/// Callback of CUPTI that reads the records of a full buffer and frees the buffer.
///
/// # Safety
/// CUPTI must call it, with a buffer of [`requested`] and the number of bytes of the records in it.
unsafe extern "C" fn completed(_: *mut c_void, _: u32, buffer: *mut u8, _: usize, valid: usize) {
    if buffer.is_null() {
        return;
    }
    if let Ok(cupti) = Cupti::open() {
        let mut recorded = RECORDED.lock().unwrap_or_else(PoisonError::into_inner);
        let mut record = std::ptr::null_mut();
        // SAFETY: the buffer is complete; `record` is null or the last record that was read from this buffer.
        while unsafe { (cupti.next)(buffer, valid, &raw mut record) } == 0 && !record.is_null() {
            // SAFETY: CUPTI has set `record` to a complete record, which begins with its kind.
            recorded.extend(unsafe { launch_of(record) });
        }
    }
    // SAFETY: `requested` has allocated the buffer with this layout.
    unsafe { dealloc(buffer, BUFFER) };
}

/// Converts a CUPTI record to a launch; `None` if the record is of another kind or has no times.
///
/// # Safety
/// `record` must point to a record of CUPTI that is complete for its kind.
unsafe fn launch_of(record: *const u8) -> Option<GpuLaunch> {
    // SAFETY: the caller promises a complete record, so all fields that are read lie in it; reads may be unaligned.
    unsafe {
        let kind = record.cast::<u32>().read_unaligned();
        let name = match kind {
            KERNEL => {
                let name = record.add(NAME_AT).cast::<*const c_char>().read_unaligned();
                if name.is_null() { String::new() } else { CStr::from_ptr(name).to_string_lossy().into_owned() }
            }
            MEMCPY => "copy".to_owned(),
            MEMSET => "fill".to_owned(),
            _ => return None,
        };
        let time = |at: usize| record.add(at).cast::<u64>().read_unaligned();
        let (start_ns, end_ns) = (time(START_AT), time(END_AT));
        (end_ns > start_ns && start_ns > 0).then_some(GpuLaunch { name, start_ns, end_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_by_their_kind() {
        let mut record = [0u64; 20];
        record[0] = u64::from(KERNEL);
        (record[2], record[3]) = (5, 9);
        record[NAME_AT / 8] = c"paged_attention".as_ptr() as u64;
        // SAFETY: the array has the layout of a kernel's record.
        let read = |record: &[u64; 20]| unsafe { launch_of(record.as_ptr().cast()) };
        let expected = GpuLaunch { name: "paged_attention".to_owned(), start_ns: 5, end_ns: 9 };
        assert_eq!(read(&record), Some(expected.clone()));
        record[0] = u64::from(MEMSET);
        assert_eq!(read(&record), Some(GpuLaunch { name: "fill".to_owned(), ..expected }));
        record[3] = 0;
        assert_eq!(read(&record), None, "not over");
        record[0] = 51;
        assert_eq!(read(&record), None, "another kind");
    }

    #[test]
    fn the_library_comes_with_libtorch() {
        tch::set_num_threads(1);
        assert!(!mapped_files("libcupti.so").unwrap().is_empty());
    }
}
