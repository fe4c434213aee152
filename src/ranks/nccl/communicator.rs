//! NCCL's communicator object for a group of ranks, and its error codes.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::mem::offset_of;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::nccl::sys;

/// Bytes of the id by which the ranks of a communicator find each other.
pub(super) const ID_BYTES: usize = 128;

/// An `ncclComm_t`. Dropping it aborts it, which is local and does not wait for peers.
#[derive(Debug)]
pub(super) struct Communicator(sys::ncclComm_t);

// SAFETY: NCCL lets any one thread at a time use a communicator; the mutex sees to that.
unsafe impl Send for Communicator {}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: the communicator is ours and not used after this. What abort returns cannot be mended here.
        unsafe { sys::ncclCommAbort(self.0) };
    }
}

impl Communicator {
    /// Creates the id by which the ranks of a new communicator find each other. Rank 0 creates it and sends it to the others.
    pub(super) fn new_id() -> ([u8; ID_BYTES], sys::ncclResult_t) {
        let mut id = sys::ncclUniqueId { internal: [0; ID_BYTES] };
        // SAFETY: the id outlives the call, which fills it.
        let code = unsafe { sys::ncclGetUniqueId(&raw mut id) };
        (id.internal.map(|byte| byte as u8), code)
    }

    /// Starts to create a communicator of `size` ranks on this thread's GPU; `None` if NCCL refused at once.
    pub(super) fn start(id: [u8; ID_BYTES], rank: usize, size: usize) -> (Option<Self>, sys::ncclResult_t) {
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let (mut raw, mut config) = (std::ptr::null_mut(), non_blocking());
        // SAFETY: id and config outlive the call; the handle is written at once and kept until it is aborted.
        let code = unsafe { sys::ncclCommInitRankConfig(&raw mut raw, size as i32, id, rank as i32, &raw mut config) };
        ((!raw.is_null()).then(|| Self(raw)), code)
    }

    /// The handle for calls of NCCL.
    pub(super) fn raw(&self) -> sys::ncclComm_t {
        self.0
    }

    /// The state of the last asynchronous call, and the result code of this query.
    pub(super) fn progress(&self) -> (sys::ncclResult_t, sys::ncclResult_t) {
        let mut progress = sys::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is alive.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.0, &raw mut progress) };
        (progress, asked)
    }
}

/// NCCL's description of a code and of the last failure.
pub(super) fn describe(code: sys::ncclResult_t) -> String {
    // SAFETY: both give NUL-terminated strings of the library; the last error asks for no communicator.
    let texts = unsafe { [sys::ncclGetErrorString(code), sys::ncclGetLastError(std::ptr::null_mut())] };
    let [kind, detail] = texts.map(|text| {
        // SAFETY: as above; null pointers are skipped.
        if text.is_null() { "".into() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy() }
    });
    format!("NCCL error {}: {kind}. {detail}", code as u32)
}

/// `NCCL_CONFIG_INITIALIZER` of NCCL 2.28 with `blocking = 0`. cudarc's struct is that of NCCL 2.30, so the given size ends where 2.28's struct does.
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

/// Locks a mutex even if a thread panicked while it held the lock.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nccl_config_struct_has_the_size_of_nccl_2_28() {
        // size_t, 3 words to `blocking`, 3 CTA words, a pointer, 2 words, a pointer, 6 words.
        assert_eq!(non_blocking().size, 8 + 6 * 4 + 8 + 2 * 4 + 8 + 6 * 4);
    }
}
