//! Checks of tensors that every backend makes before it reads or writes them.

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// Dtypes that can be reduced.
pub(super) const REDUCIBLE: [Kind; 4] = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Int64];

/// The memory of a tensor's elements: `bytes` from `address`.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryRange {
    pub address: *mut u8,
    pub kind: Kind,
    pub bytes: usize,
}

/// Checks that a tensor is contiguous and on `device`, and returns its memory.
pub(super) fn memory(op: &'static str, tensor: &Tensor, device: Device) -> Result<MemoryRange> {
    let kind = tensor.f_kind()?;
    if tensor.device() != device || !tensor.is_contiguous() {
        let got = format!("{kind:?} {:?} on {:?}, strides {:?}", tensor.size(), tensor.device(), tensor.stride());
        return Err(Error::InvalidArgument { op, expected: format!("a contiguous tensor on {device:?}"), got });
    }
    Ok(MemoryRange { address: tensor.data_ptr().cast(), kind, bytes: tensor.numel() * kind.elt_size_in_bytes() })
}

/// The memory of one rank's tensor and of a tensor that holds `size` of them.
pub(super) fn pair(
    op: &'static str,
    one: &Tensor,
    all: &Tensor,
    size: usize,
    device: Device,
) -> Result<(MemoryRange, MemoryRange)> {
    let (one, all) = (memory(op, one, device)?, memory(op, all, device)?);
    if one.kind == all.kind && one.bytes * size == all.bytes {
        return Ok((one, all));
    }
    let expected = format!("{} bytes of {:?} for {size} ranks", one.bytes * size, one.kind);
    Err(Error::InvalidArgument { op, expected, got: format!("{} bytes of {:?}", all.bytes, all.kind) })
}

/// The memory of two tensors of equal size, to be split into `size` equal parts.
pub(super) fn split(
    op: &'static str,
    input: &Tensor,
    output: &Tensor,
    size: usize,
    device: Device,
) -> Result<(MemoryRange, MemoryRange)> {
    let parts = input.numel().is_multiple_of(size);
    let (input, output) = (memory(op, input, device)?, memory(op, output, device)?);
    if parts && input.kind == output.kind && input.bytes == output.bytes {
        return Ok((input, output));
    }
    let describe = |memory: MemoryRange| format!("{} bytes of {:?}", memory.bytes, memory.kind);
    Err(Error::InvalidArgument {
        op,
        expected: format!("input and output of the same dtype and size, in {size} equal parts"),
        got: format!("{} and {}", describe(input), describe(output)),
    })
}

/// Refuses dtypes that cannot be reduced.
pub(super) fn reducible(op: &'static str, kind: Kind) -> Result<()> {
    if REDUCIBLE.contains(&kind) {
        return Ok(());
    }
    Err(Error::InvalidArgument { op, expected: format!("one of {REDUCIBLE:?}"), got: format!("{kind:?}") })
}

/// Refuses a root that is not a rank of the group.
pub(super) fn root(op: &'static str, root: usize, size: usize) -> Result<()> {
    if root < size {
        return Ok(());
    }
    Err(Error::InvalidArgument { op, expected: format!("a root below {size}"), got: root.to_string() })
}
