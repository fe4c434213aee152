//! Host memory for what is off the device: allocated once, kept, so that no step pays for pinning or page faults.
#![allow(unsafe_code)]

use tch::{Device, Tensor};

use super::arena::{AddressRange, check_view, view};
use super::cpu::CpuRange;
use super::ledger::{Ledger, Place};
use crate::error::Result;

/// A fixed range of host memory that tensors are copied to and from, by byte offset.
#[derive(Debug)]
pub struct HostPool {
    name: &'static str,
    range: CpuRange,
}

impl HostPool {
    /// Allocates `bytes`, rounded up to whole pages, and touches them, so that a host without them fails now.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] naming the pool.
    pub fn new(name: &'static str, bytes: usize) -> Result<Self> {
        let mut range = CpuRange::reserve(name, bytes)?;
        let bytes = range.reserved_bytes();
        range.map(0, bytes)?;
        // SAFETY: the whole range was mapped read-write just above and is not yet shared.
        unsafe { std::ptr::write_bytes(range.as_ptr(), 0, bytes) };
        Ledger::resize(name, Place::Host, 0, bytes);
        Ok(Self { name, range })
    }

    /// Size in bytes.
    pub fn len_bytes(&self) -> usize {
        self.range.reserved_bytes()
    }

    /// Copies `tensor`'s elements, in row-major order, to `byte_offset`.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] when they do not fit or are not aligned to the kind.
    pub fn copy_from(&mut self, byte_offset: usize, tensor: &Tensor) -> Result<()> {
        let mut stored = self.stored("HostPool::copy_from", byte_offset, tensor)?;
        stored.f_copy_(tensor)?;
        Ok(())
    }

    /// Fills `tensor` from the elements at `byte_offset`.
    ///
    /// # Errors
    /// As [`HostPool::copy_from`].
    pub fn copy_to(&self, byte_offset: usize, tensor: &mut Tensor) -> Result<()> {
        let stored = self.stored("HostPool::copy_to", byte_offset, tensor)?;
        tensor.f_copy_(&stored)?;
        Ok(())
    }

    /// A view of the pool with `like`'s shape and kind; it must not outlive the call that asked for it.
    fn stored(&self, op: &'static str, byte_offset: usize, like: &Tensor) -> Result<Tensor> {
        let (shape, kind) = (like.size(), like.kind());
        check_view(op, self.name, byte_offset, &shape, kind, self.len_bytes())?;
        // SAFETY: inside the pool and aligned (checked above); the callers drop the view before they return, and
        // writing through it needs `&mut self`.
        unsafe { view(self.range.as_ptr().add(byte_offset), &shape, kind, Device::Cpu) }
    }
}

impl Drop for HostPool {
    fn drop(&mut self) {
        Ledger::resize(self.name, Place::Host, self.len_bytes(), 0);
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn tensors_return_bit_identical() {
        let mut pool = HostPool::new("pool_test", 1 << 16).unwrap();
        let floats = Tensor::from_slice(&[1.5f32, f32::NAN, -0.0, f32::INFINITY]);
        let transposed = Tensor::arange(6, (Kind::BFloat16, Device::Cpu)).view([2, 3]).tr();
        pool.copy_from(0, &floats).unwrap();
        pool.copy_from(64, &transposed).unwrap();
        let mut back = floats.zeros_like();
        pool.copy_to(0, &mut back).unwrap();
        assert_eq!(back.view_dtype(Kind::Int), floats.view_dtype(Kind::Int));
        let mut back = Tensor::zeros([3, 2], (Kind::BFloat16, Device::Cpu));
        pool.copy_to(64, &mut back).unwrap();
        assert_eq!(back, transposed);
        assert!(pool.copy_from((1 << 16) - 8, &floats).is_err());
        assert!(pool.copy_from(2, &floats).is_err());
        assert!(Ledger::report().contains(&(Place::Host, "pool_test", 1 << 16)));
    }
}
