//! Tensors as kernels take them, and launches on libtorch's current stream.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

pub(super) use crate::cuda::kernel::Argument;
use crate::cuda::kernel::Kernel;
use crate::cuda::nvrtc::KernelSource;
use crate::error::{Error, Result};
use crate::torch;

/// Whether these kernels serve an operation on such a tensor; libtorch's own operations serve all others.
pub fn serve(tensor: &Tensor) -> bool {
    tensor.device().is_cuda() && matches!(tensor.kind(), Kind::Float | Kind::BFloat16)
}

/// The GPU that an operation's first tensor is on; the others are held to it by [`address`].
pub(super) fn ordinal(op: &'static str, tensor: &Tensor) -> Result<usize> {
    match tensor.device() {
        Device::Cuda(ordinal) => Ok(ordinal),
        other => Err(invalid(op, "a tensor on a GPU", other)),
    }
}

/// The name of a type in the kernels' names.
pub(super) fn kind_name(op: &'static str, tensor: &Tensor) -> Result<&'static str> {
    match tensor.kind() {
        Kind::Float => Ok("f32"),
        Kind::BFloat16 => Ok("bf16"),
        other => Err(invalid(op, "float32 or bfloat16", other)),
    }
}

/// The types' part of the name of a kernel whose `x` is like all `others`, or float32 beside others of bfloat16.
pub(super) fn kinds_name(op: &'static str, x: &Tensor, others: &Tensor) -> Result<&'static str> {
    match (x.kind(), others.kind()) {
        (Kind::Float, Kind::BFloat16) => Ok("f32_bf16"),
        (x, others) if x != others => Err(invalid(op, "tensors of one dtype, or float32 with bfloat16", [x, others])),
        _ => kind_name(op, x),
    }
}

/// The address of a contiguous tensor of `kind` with `numel` elements on GPU `ordinal`.
pub(super) fn address(op: &'static str, tensor: &Tensor, kind: Kind, numel: usize, ordinal: usize) -> Result<Argument> {
    let fits = tensor.device() == Device::Cuda(ordinal)
        && tensor.kind() == kind
        && tensor.numel() == numel
        && tensor.is_contiguous();
    if !fits {
        let got = format!("{:?} {:?} on {:?}", tensor.size(), tensor.kind(), tensor.device());
        return Err(invalid(op, format!("{numel} contiguous elements of {kind:?} on GPU {ordinal}"), got));
    }
    Ok(Argument::Address(tensor.data_ptr()))
}

/// The tensor's [`address`], null for none.
pub(super) fn address_or_null(
    op: &'static str,
    tensor: Option<&Tensor>,
    kind: Kind,
    numel: usize,
    ordinal: usize,
) -> Result<Argument> {
    tensor.map_or(Ok(Argument::NULL), |tensor| address(op, tensor, kind, numel, ordinal))
}

/// The address of a tensor of `kind` and `shape` on GPU `ordinal`, whatever its strides.
pub(super) fn strided(
    op: &'static str,
    tensor: &Tensor,
    kind: Kind,
    shape: &[i64],
    ordinal: usize,
) -> Result<Argument> {
    if tensor.device() != Device::Cuda(ordinal) || tensor.kind() != kind || tensor.size() != shape {
        let got = format!("{:?} {:?} on {:?}", tensor.size(), tensor.kind(), tensor.device());
        return Err(invalid(op, format!("{shape:?} of {kind:?} on GPU {ordinal}"), got));
    }
    Ok(Argument::Address(tensor.data_ptr()))
}

/// Elements of the last dimension, at least 1.
pub(super) fn row_len(op: &'static str, tensor: &Tensor) -> Result<usize> {
    match tensor.size().last() {
        Some(&len) if len > 0 => Ok(len as usize),
        _ => Err(invalid(op, "rows of at least one element", tensor.size())),
    }
}

/// Elements that a thread can move at once: 16 bytes where rows of `len` and all addresses allow it, else one.
pub(super) fn width(len: usize, tensors: &[&Tensor]) -> usize {
    let widest = tensors.iter().map(|tensor| 16 / tensor.kind().elt_size_in_bytes()).max().unwrap_or(1);
    let is_wide = len.is_multiple_of(widest) && tensors.iter().all(|tensor| is_aligned(tensor));
    if is_wide { widest } else { 1 }
}

/// Queues `name` of `source` on libtorch's current stream; nothing for an empty grid.
///
/// # Safety
/// The conditions of [`Kernel::launch`] hold; memory that libtorch frees in this stream's order is valid long enough.
pub(super) unsafe fn launch(
    source: &'static KernelSource,
    name: &str,
    ordinal: usize,
    shape: (u32, u32, u32), // blocks, threads, bytes of shared memory
    arguments: &[Argument],
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { queue(source, name, ordinal, shape, (1, false), arguments) }
}

/// Launches a kernel, as [`launch`] does, while the one before still runs: before `wait_for_inputs` it reads at most what is
/// older than that one, and writes nothing.
///
/// # Safety
/// The conditions of [`launch`] hold.
pub(super) unsafe fn launch_early(
    source: &'static KernelSource,
    name: &str,
    ordinal: usize,
    shape: (u32, u32, u32),
    arguments: &[Argument],
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { queue(source, name, ordinal, shape, (1, true), arguments) }
}

/// Launches a kernel in clusters, early or not.
///
/// # Safety
/// The conditions of [`launch`] hold.
pub(super) unsafe fn queue(
    source: &'static KernelSource,
    name: &str,
    ordinal: usize,
    shape: (u32, u32, u32),
    (cluster, early): (u32, bool),
    arguments: &[Argument],
) -> Result<()> {
    if shape.0 == 0 {
        return Ok(());
    }
    let kernel = Kernel::get(source, name, ordinal)?;
    let stream = torch::current_cuda_stream(ordinal)?;
    // SAFETY: the caller's promise.
    unsafe { kernel.launch(shape, (cluster, early), stream, arguments) }
}

/// Whether a tensor starts where 16 bytes can be moved at once.
pub(super) fn is_aligned(tensor: &Tensor) -> bool {
    (tensor.data_ptr() as usize).is_multiple_of(16)
}

/// Blocks for `items` of work, `per_block` each; the kernels stride over what is left above `most`.
pub(super) fn blocks(items: usize, per_block: usize, most: usize) -> u32 {
    items.div_ceil(per_block).min(most) as u32
}

/// A grid for other constants than the source's would give wrong results, and no error.
#[cfg(test)]
pub(super) fn assert_declared(source: &KernelSource, constants: &[(&str, usize)]) {
    for (name, value) in constants {
        let line = format!("constexpr int {name} = {value};");
        assert!(crate::cuda::nvrtc::texts(source).any(|text| text.contains(&line)), "{line}");
    }
}

/// The error of a tensor that a kernel does not take.
pub(super) fn invalid(op: &'static str, expected: impl Into<String>, got: impl std::fmt::Debug) -> Error {
    Error::InvalidArgument { op, expected: expected.into(), got: format!("{got:?}") }
}
