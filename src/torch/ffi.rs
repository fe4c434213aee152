//! Declarations of the C functions in `shim.h`, and safe wrappers: every call returns a [`Result`] with libtorch's own message.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use tch::Device;

use crate::error::{Error, Result};

/// An open TCPStore, owned by the C++ code.
#[repr(C)]
pub(super) struct RawStore {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    fn colo_last_error() -> *const c_char;
    fn colo_allocate_from_heap();
    pub(super) fn colo_store_host(
        host: *const c_char,
        port: u16,
        listen_fd: c_int,
        timeout_ms: i64,
        store: *mut *mut RawStore,
    ) -> c_int;
    pub(super) fn colo_store_connect(
        host: *const c_char,
        port: u16,
        timeout_ms: i64,
        store: *mut *mut RawStore,
    ) -> c_int;
    pub(super) fn colo_store_free(store: *mut RawStore);
    pub(super) fn colo_store_set(store: *mut RawStore, key: *const c_char, value: *const u8, bytes: usize) -> c_int;
    pub(super) fn colo_store_get(
        store: *mut RawStore,
        key: *const c_char,
        value: *mut *mut u8,
        bytes: *mut usize,
    ) -> c_int;
    pub(super) fn colo_store_add(store: *mut RawStore, key: *const c_char, delta: i64, sum: *mut i64) -> c_int;
    pub(super) fn colo_store_wait(
        store: *mut RawStore,
        keys: *const *const c_char,
        num_keys: usize,
        timeout_ms: i64,
    ) -> c_int;
    pub(super) fn colo_bytes_free(value: *mut u8);
    fn colo_cuda_current_stream(device: c_int, stream: *mut *mut c_void) -> c_int;
    fn colo_cuda_pool_stream(device: c_int, urgent: c_int, id: *mut i64, stream: *mut *mut c_void) -> c_int;
    fn colo_cuda_exchange_stream(device: c_int, id: i64, previous: *mut i64) -> c_int;
    fn colo_cuda_set_device(device: c_int) -> c_int;
    fn colo_cuda_release_cache() -> c_int;
    pub(super) fn colo_flash_attention_forward(
        query: *const c_void,
        key: *const c_void,
        value: *const c_void,
        cu_seqlens_q: *const c_void,
        cu_seqlens_k: *const c_void,
        max_len_q: i64,
        max_len_k: i64,
        causal: c_int,
        scale: f64,
        window_left: i64,
        output: *mut *mut c_void,
        logsumexp: *mut *mut c_void,
    ) -> c_int;
    pub(super) fn colo_cudnn_attention_forward(
        query: *const c_void,
        key: *const c_void,
        value: *const c_void,
        causal: c_int,
        scale: f64,
        output: *mut *mut c_void,
        logsumexp: *mut *mut c_void,
    ) -> c_int;
    fn colo_set_deterministic(on: c_int, only: c_int) -> c_int;
    fn colo_is_deterministic() -> c_int;
    fn colo_cuda_memory_stats(device: c_int, stats: *mut i64) -> c_int;
    fn colo_cuda_reset_peak_memory(device: c_int) -> c_int;
}

/// Makes CPU tensors come from `malloc` from now on; existing ones keep their memory.
pub(super) fn allocate_from_heap() {
    // SAFETY: no pointers; each tensor is freed as it was allocated.
    unsafe { colo_allocate_from_heap() }
}

/// The raw `CUstream` on which libtorch currently queues operations for CUDA device `ordinal`.
///
/// # Errors
/// [`Error::Environment`] if libtorch's CUDA libraries are not loaded.
pub fn current_cuda_stream(ordinal: usize) -> Result<*mut c_void> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: `stream` outlives the call, which writes it only on success.
    let status = unsafe { colo_cuda_current_stream(ordinal as c_int, &mut stream) };
    check(status, || format!("cannot get the current stream of CUDA device {ordinal}"))?;
    Ok(stream)
}

/// A stream of libtorch's pool.
pub(crate) struct PooledStream {
    /// libtorch's id of the stream.
    pub id: i64,
    /// The raw `CUstream`.
    pub raw: *mut c_void,
}

/// Takes the next stream of libtorch's pool for CUDA device `ordinal`. It lives as long as the process; the pool has 32 streams and reuses them in
/// turn. The GPU schedules blocks of an `urgent` stream before others.
///
/// # Errors
/// [`Error::Environment`] if libtorch's CUDA libraries are not loaded.
pub(crate) fn pool_cuda_stream(ordinal: usize, urgent: bool) -> Result<PooledStream> {
    let (mut id, mut stream) = (0, std::ptr::null_mut());
    // SAFETY: both outlive the call, which writes them only on success.
    let status = unsafe { colo_cuda_pool_stream(ordinal as c_int, urgent.into(), &mut id, &mut stream) };
    check(status, || format!("cannot get a stream of CUDA device {ordinal}"))?;
    Ok(PooledStream { id, raw: stream })
}

/// Makes the stream with libtorch's `id` current for the calling thread on CUDA device `ordinal`; returns the id of the previous one.
///
/// # Errors
/// [`Error::Environment`] if libtorch's CUDA libraries are not loaded.
pub(crate) fn exchange_cuda_stream(ordinal: usize, id: i64) -> Result<i64> {
    let mut previous = 0;
    // SAFETY: `previous` outlives the call; an id comes from libtorch.
    let status = unsafe { colo_cuda_exchange_stream(ordinal as c_int, id, &mut previous) };
    check(status, || format!("stream {id} of CUDA device {ordinal}"))?;
    Ok(previous)
}

/// Makes CUDA device `ordinal` current for the calling thread.
///
/// # Errors
/// [`Error::Environment`] if libtorch's CUDA libraries are not loaded or have no such device.
pub fn set_cuda_device(ordinal: usize) -> Result<()> {
    // SAFETY: no pointers.
    let status = unsafe { colo_cuda_set_device(ordinal as c_int) };
    check(status, || format!("CUDA device {ordinal}"))
}

/// Releases the memory that libtorch caches on `device`; does nothing on a CPU.
///
/// # Errors
/// [`Error::Environment`] if libtorch's CUDA libraries are not loaded.
pub(super) fn release_cache(device: Device) -> Result<()> {
    if !device.is_cuda() {
        return Ok(());
    }
    // SAFETY: no pointers; only memory that no tensor uses is given back.
    check(unsafe { colo_cuda_release_cache() }, || format!("cached memory of {device:?}"))
}

/// Sets whether libtorch's operations in this process sum in a fixed order where they can, at some cost.
///
/// # Errors
/// [`Error::Environment`] with libtorch's message.
pub fn set_deterministic(on: bool) -> Result<()> {
    // SAFETY: no pointers; sets a switch of libtorch's global context. Operations without a deterministic version stay allowed, since the trainer
    // uses its own kernels instead.
    check(unsafe { colo_set_deterministic(c_int::from(on), 0) }, || "cannot switch deterministic operations".to_owned())
}

/// Runs `work` such that, if [`set_deterministic`] is on, operations without a deterministic version are refused. libtorch's flash attention needs
/// this to select its deterministic backward.
///
/// # Errors
/// [`Error::Environment`] with libtorch's message; the errors of `work`.
pub(super) fn only_deterministic<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    if !is_deterministic() {
        return work();
    }
    let context = || "cannot switch deterministic operations".to_owned();
    // SAFETY: no pointers; a switch of libtorch's global context, as in `set_deterministic`.
    check(unsafe { colo_set_deterministic(1, 1) }, context)?;
    let outcome = work();
    // SAFETY: as above.
    check(unsafe { colo_set_deterministic(1, 0) }, context)?;
    outcome
}

/// The last value given to [`set_deterministic`]; false before.
pub fn is_deterministic() -> bool {
    // SAFETY: no pointers; reads that switch.
    unsafe { colo_is_deterministic() != 0 }
}

/// Bytes of CUDA device `ordinal`: allocated now, peak allocated, reserved now, peak reserved.
///
/// # Errors
/// [`Error::Environment`] if libtorch's CUDA libraries are not loaded, or before its first tensor.
pub(super) fn memory_stats(ordinal: usize) -> Result<[usize; 4]> {
    let mut stats = [0; 4];
    // SAFETY: `stats` has the four places that the call writes, and outlives it.
    let status = unsafe { colo_cuda_memory_stats(ordinal as c_int, stats.as_mut_ptr()) };
    check(status, || format!("allocator of CUDA device {ordinal}"))?;
    Ok(stats.map(|bytes: i64| bytes as usize))
}

/// Resets the peaks of [`memory_stats`].
///
/// # Errors
/// The errors of [`memory_stats`].
pub(super) fn reset_peak_memory(ordinal: usize) -> Result<()> {
    // SAFETY: no pointers.
    let status = unsafe { colo_cuda_reset_peak_memory(ordinal as c_int) };
    check(status, || format!("allocator of CUDA device {ordinal}"))
}

/// Converts a status of the shim into a result whose error names the attempted operation.
pub(super) fn check(status: c_int, what: impl FnOnce() -> String) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the shim's last error is a NUL-terminated string of this thread.
    let reason = unsafe { CStr::from_ptr(colo_last_error()) }.to_string_lossy().into_owned();
    Err(Error::out_of_memory(&reason)
        .unwrap_or_else(|| Error::Environment { message: format!("{}: {}", what(), reason.trim_end()) }))
}

/// Converts text to a C string; refuses interior NUL bytes.
pub(super) fn c_string(op: &'static str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::InvalidArgument {
        op,
        expected: "text without NUL bytes".into(),
        got: format!("{text:?}"),
    })
}
