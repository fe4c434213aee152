//! Host memory for tensors that are offloaded from the device. It is allocated once and kept, so that no step waits for pinning or page faults.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use tch::{Device, Tensor};

use super::arena::check_view;
use super::ledger::{Ledger, MemoryKind};
use super::pages::{Pages, PinnedPages};
use crate::cuda::{CudaEvent, Stream, check};
use crate::error::{Error, Result};

/// Most bytes per call to a GPU's copy engine.
const PIECE_BYTES: usize = 32 << 20;

/// A fixed range of host memory that tensors are copied to and from, addressed by byte offset.
///
/// For a GPU the memory is pinned, and copies run on two streams of the pool, one per direction. A copy starts after everything that libtorch has
/// queued so far.
#[derive(Debug)]
pub struct HostPool {
    name: &'static str,
    device: Device,
    pub(super) pages: Pages,
}

/// A running copy, which keeps its tensor alive. Dropping it waits for the copy.
#[derive(Debug)]
#[must_use = "a copy is waited for when this is dropped: keep it while other work goes on"]
pub struct PendingCopy {
    pub(super) event: Option<CudaEvent>, // None once the copy is done
    pub(super) tensor: Tensor,
}

/// A point in a device's stream, or in time if copies run on the host.
#[derive(Debug)]
pub struct Mark {
    pub(super) event: Option<CudaEvent>,
    pub(super) at: Instant,
}

impl Mark {
    /// Time from this point to a later one; zero if that came first. Waits for both.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn until(&self, later: &Self) -> Result<Duration> {
        let (Some(start), Some(end)) = (&self.event, &later.event) else {
            return Ok(later.at.saturating_duration_since(self.at));
        };
        start.time_until(end)
    }

    /// Whether the device has come this far.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn is_past(&self) -> Result<bool> {
        self.event.as_ref().map_or(Ok(true), CudaEvent::is_done)
    }
}

impl HostPool {
    /// Allocates `bytes` for tensors on `device` and touches them, so that missing memory is noticed now. Pinning takes about a second per GiB;
    /// `progress(done, total)` is called with bytes from time to time.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with the pool's name; errors of the driver.
    pub fn new(
        name: &'static str,
        bytes: usize,
        device: Device,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self> {
        let pages = match device {
            Device::Cuda(ordinal) => Pages::Pinned(Arc::new(PinnedPages::new(name, bytes, ordinal, progress)?)),
            _ => Pages::ordinary(name, bytes)?,
        };
        Ledger::resize(name, MemoryKind::Host, 0, pages.len_bytes());
        Ok(Self { name, device, pages })
    }

    /// Size of the pool in bytes.
    pub fn len_bytes(&self) -> usize {
        self.pages.len_bytes()
    }

    /// Copies `tensor`'s elements, in row-major order, to `byte_offset`. The tensor is on the pool's device or on the CPU.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they do not fit, are misaligned, or are on another device.
    pub fn copy_from(&mut self, byte_offset: usize, tensor: &Tensor) -> Result<()> {
        self.copy_from_async(byte_offset, &tensor.f_contiguous()?)?.wait()
    }

    /// Fills `tensor` with the elements at `byte_offset`.
    ///
    /// # Errors
    /// The errors of [`HostPool::copy_from`].
    pub fn copy_to(&self, byte_offset: usize, tensor: &mut Tensor) -> Result<()> {
        if tensor.is_contiguous() {
            return self.copy_to_async(byte_offset, tensor)?.wait();
        }
        let mut rows = Tensor::f_empty(tensor.size(), (tensor.kind(), tensor.device()))?;
        self.copy_to_async(byte_offset, &mut rows)?.wait()?;
        tensor.f_copy_(&rows)?;
        Ok(())
    }

    /// Starts [`HostPool::copy_from`] for a contiguous tensor. Until the copy is waited for, the tensor must not be written, and these bytes of the
    /// pool must not be copied from or to.
    ///
    /// # Errors
    /// The errors of [`HostPool::copy_from`].
    pub fn copy_from_async(&mut self, byte_offset: usize, tensor: &Tensor) -> Result<PendingCopy> {
        self.start("HostPool::copy_from", byte_offset, tensor, Direction::Out)
    }

    /// Starts [`HostPool::copy_to`] for a contiguous tensor, which must not be used until the copy is waited for.
    ///
    /// # Errors
    /// The errors of [`HostPool::copy_from`].
    pub fn copy_to_async(&self, byte_offset: usize, tensor: &mut Tensor) -> Result<PendingCopy> {
        self.start("HostPool::copy_to", byte_offset, tensor, Direction::In)
    }

    /// Checks that a tensor can be copied from or to `byte_offset` without conversion; returns its size in bytes.
    pub(super) fn check(&self, op: &'static str, byte_offset: usize, tensor: &Tensor) -> Result<usize> {
        let kind = tensor.kind();
        check_view(op, self.name, byte_offset, &tensor.size(), kind, self.len_bytes())?;
        let on_host = tensor.device() == Device::Cpu;
        if (tensor.device() != self.device && !on_host) || !tensor.is_contiguous() {
            let expected = format!("a contiguous tensor on {:?}", self.device);
            let got = format!("a tensor of strides {:?} on {:?}", tensor.stride(), tensor.device());
            return Err(Error::InvalidArgument { op, expected, got });
        }
        Ok(tensor.numel() * kind.elt_size_in_bytes())
    }

    fn start(
        &self,
        op: &'static str,
        byte_offset: usize,
        tensor: &Tensor,
        direction: Direction,
    ) -> Result<PendingCopy> {
        let bytes = self.check(op, byte_offset, tensor)?;
        let mut address = tensor.data_ptr().cast::<u8>();
        let stream = self.stream(direction).filter(|_| tensor.device() != Device::Cpu);
        match stream {
            Some(stream) => stream.wait_for_libtorch()?,
            None => self.synchronize()?, // the host itself accesses the pool
        }
        for (host, len) in self.pages.pieces(byte_offset..byte_offset + bytes) {
            for start in (0..len).step_by(PIECE_BYTES) {
                let len = PIECE_BYTES.min(len - start);
                // SAFETY: the piece lies in the pool and the tensor spans `bytes` from its address (checked above); `PendingCopy`
                // keeps the tensor until the copy is done, and the pool waits for its streams before its memory goes.
                unsafe { copy(host.wrapping_add(start), address, len, direction, stream)? };
                address = address.wrapping_add(len);
            }
        }
        let event = stream.map(Stream::record).transpose()?;
        Ok(PendingCopy { event, tensor: tensor.shallow_clone() })
    }

    /// Marks a point in the pool's copies of one direction: after those started so far, before later ones.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn mark(&self, direction: Direction) -> Result<Mark> {
        let passed = |stream: &Stream| stream.wait_for_libtorch().and_then(|()| stream.record_timed());
        let event = self.stream(direction).map(passed).transpose()?;
        Ok(Mark { event, at: Instant::now() })
    }

    /// Marks a point in the work that libtorch queues on the pool's device.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn mark_libtorch(&self) -> Result<Mark> {
        let record = |stream: &Stream| CudaEvent::record_libtorch(stream.context());
        Ok(Mark { event: self.stream(Direction::In).map(record).transpose()?, at: Instant::now() })
    }

    /// Waits for all running copies.
    fn synchronize(&self) -> Result<()> {
        [Direction::Out, Direction::In]
            .into_iter()
            .filter_map(|direction| self.stream(direction))
            .try_for_each(Stream::synchronize)
    }

    fn stream(&self, direction: Direction) -> Option<&Stream> {
        match &self.pages {
            Pages::Ordinary(_) => None,
            Pages::Pinned(pinned) => Some(pinned.stream(direction)),
        }
    }
}

impl Drop for HostPool {
    fn drop(&mut self) {
        Ledger::resize(self.name, MemoryKind::Host, self.len_bytes(), 0);
    }
}

impl PendingCopy {
    /// Waits on the host until the copy is done.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the copy failed, at every call.
    pub fn wait(&mut self) -> Result<()> {
        if let Some(event) = &self.event {
            event.synchronize()?;
        }
        self.event = None;
        Ok(())
    }

    /// Makes libtorch's later work wait for the copy, while the host continues.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn hold_libtorch(mut self) -> Result<()> {
        // The tensor's memory is freed in the order of libtorch's stream, and so after the copy.
        let held = self.event.as_ref().map_or(Ok(()), CudaEvent::hold_libtorch);
        if held.is_ok() {
            self.event = None;
        }
        held
    }

    /// Whether the copy is done.
    ///
    /// # Errors
    /// [`Error::Cuda`] if it failed.
    pub fn is_done(&self) -> Result<bool> {
        self.event.as_ref().map_or(Ok(true), CudaEvent::is_done)
    }

    /// The tensor that is being copied.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

impl Drop for PendingCopy {
    fn drop(&mut self) {
        // An error will appear at the next use of the GPU.
        let _ = self.event.take().map(|event| event.synchronize());
    }
}

/// The direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the device to the pool.
    Out,
    /// From the pool to the device.
    In,
}

impl PinnedPages {
    pub(super) fn stream(&self, direction: Direction) -> &Stream {
        match direction {
            Direction::Out => &self.copy_out,
            Direction::In => &self.copy_in,
        }
    }
}

/// Copies `len` bytes between host and tensor.
///
/// # Safety
/// Both addresses are valid for `len` bytes until the copy is done: at return without a stream, else when the stream has passed the copy.
pub(super) unsafe fn copy(
    host: *mut u8,
    tensor: *mut u8,
    len: usize,
    direction: Direction,
    stream: Option<&Stream>,
) -> Result<()> {
    let (from, to) = match direction {
        Direction::Out => (tensor, host),
        Direction::In => (host, tensor),
    };
    let Some(stream) = stream else {
        // SAFETY: the caller's promise; the pool's memory is never a tensor's.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
        return Ok(());
    };
    // SAFETY: the caller's promise; the driver knows by their addresses which is the host's.
    let queued = unsafe { sys::cuMemcpyAsync(to as u64, from as u64, len, stream.raw().cast()) };
    check("cuMemcpyAsync", queued.result())
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::memory::Account;

    #[test]
    fn tensors_return_from_host_memory_bit_for_bit() {
        let mut pool = HostPool::new("pool_test", 1 << 16, Device::Cpu, &mut |_, _| ()).unwrap();
        let floats = Tensor::from_slice(&[1.5f32, f32::NAN, -0.0, f32::INFINITY]);
        let transposed = Tensor::arange(6, (Kind::BFloat16, Device::Cpu)).view([2, 3]).tr();
        pool.copy_from(0, &floats).unwrap();
        pool.copy_from(64, &transposed).unwrap();
        let mut back = floats.zeros_like();
        pool.copy_to(0, &mut back).unwrap();
        assert_eq!(back.view_dtype(Kind::Int), floats.view_dtype(Kind::Int));
        for shape in [[3, 2], [2, 3]] {
            let mut back = Tensor::zeros(shape, (Kind::BFloat16, Device::Cpu));
            back = if shape == [2, 3] { back.tr() } else { back };
            pool.copy_to(64, &mut back).unwrap();
            assert_eq!(back, transposed);
        }
        assert!(pool.copy_from((1 << 16) - 8, &floats).is_err());
        assert!(pool.copy_from(2, &floats).is_err());
        assert!(Ledger::report().contains(&Account { kind: MemoryKind::Host, owner: "pool_test", bytes: 1 << 16 }));
    }

    #[test]
    fn cpu_copies_are_synchronous() {
        let mut pool = HostPool::new("pool_async_test", 4096, Device::Cpu, &mut |_, _| ()).unwrap();
        let tensor = Tensor::from_slice(&[1i64, 2, 3]);
        let mut pending = pool.copy_from_async(8, &tensor).unwrap();
        assert!(pending.is_done().unwrap());
        pending.wait().unwrap();
        let mut back = tensor.zeros_like();
        pool.copy_to_async(8, &mut back).unwrap().hold_libtorch().unwrap();
        assert_eq!(back, tensor);
        let strided = Tensor::zeros([4, 4], (Kind::Float, Device::Cpu)).tr();
        assert!(matches!(pool.copy_from_async(0, &strided), Err(Error::InvalidArgument { .. })));
    }
}
