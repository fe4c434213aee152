//! Checks tensors for kernels, and launches kernels on libtorch's current stream.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

pub(super) use crate::cuda::kernel::Argument;
use crate::cuda::kernel::Kernel;
use crate::cuda::nvrtc::KernelSource;
use crate::error::{Error, Result};
use crate::torch;

/// Whether these kernels support a tensor like this; otherwise libtorch's operations are used.
pub fn serve(tensor: &Tensor) -> bool {
    tensor.device().is_cuda() && matches!(tensor.kind(), Kind::Float | Kind::BFloat16)
}

/// The index of the GPU that holds an operation's first tensor; [`address`] checks that the others are on the same one.
pub(super) fn ordinal(op: &'static str, tensor: &Tensor) -> Result<usize> {
    match tensor.device() {
        Device::Cuda(ordinal) => Ok(ordinal),
        other => Err(invalid(op, "a tensor on a GPU", other)),
    }
}

/// The name of a tensor's type as used in kernel names.
pub(super) fn kind_name(op: &'static str, tensor: &Tensor) -> Result<&'static str> {
    match tensor.kind() {
        Kind::Float => Ok("f32"),
        Kind::BFloat16 => Ok("bf16"),
        other => Err(invalid(op, "float32 or bfloat16", other)),
    }
}

/// The part of a kernel's name for the type of quantized rows or of an 8-bit KV cache.
pub(super) fn code_name(op: &'static str, codes: &Tensor) -> Result<&'static str> {
    match codes.kind() {
        Kind::Float8e4m3fn => Ok("fp8"),
        Kind::Int8 => Ok("int8"),
        other => Err(invalid(op, "e4m3 or int8", other)),
    }
}

/// The part of a kernel's name for the types of its tensors: `x` and the others have the same type, or `x` is float32 and the others bfloat16.
pub(super) fn kinds_name(op: &'static str, x: &Tensor, others: &Tensor) -> Result<&'static str> {
    match (x.kind(), others.kind()) {
        (Kind::Float, Kind::BFloat16) => Ok("f32_bf16"),
        (x, others) if x != others => Err(invalid(op, "tensors of one dtype, or float32 with bfloat16", [x, others])),
        _ => kind_name(op, x),
    }
}

/// The address of a tensor, after checking that it is contiguous and on GPU `ordinal`, with type `kind` and `numel` elements.
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

/// The tensor's [`address`], or null for `None`.
pub(super) fn address_or_null(
    op: &'static str,
    tensor: Option<&Tensor>,
    kind: Kind,
    numel: usize,
    ordinal: usize,
) -> Result<Argument> {
    tensor.map_or(Ok(Argument::NULL), |tensor| address(op, tensor, kind, numel, ordinal))
}

/// The address of a tensor with any strides, after checking its type, shape and GPU.
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

/// Length of the last dimension; an error if it is 0.
pub(super) fn row_len(op: &'static str, tensor: &Tensor) -> Result<usize> {
    match tensor.size().last() {
        Some(&len) if len > 0 => Ok(len as usize),
        _ => Err(invalid(op, "rows of at least one element", tensor.size())),
    }
}

/// Elements that a thread can move at once: 16 bytes if rows of `len` elements and all addresses permit it, else one.
pub(super) fn width(len: usize, tensors: &[&Tensor]) -> usize {
    let widest = tensors.iter().map(|tensor| 16 / tensor.kind().elt_size_in_bytes()).max().unwrap_or(1);
    let is_wide = len.is_multiple_of(widest) && tensors.iter().all(|tensor| is_aligned(tensor));
    if is_wide { widest } else { 1 }
}

/// Queues the kernel `name` of `source` on libtorch's current stream; does nothing for an empty grid.
///
/// # Safety
/// The conditions of [`Kernel::launch`] hold. Memory that libtorch frees in the order of this stream stays valid long enough.
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

/// Launches a kernel like [`launch`], but lets it start while the preceding kernel still runs (programmatic dependent launch). Until it calls
/// `wait_for_inputs`, it must write nothing, and must read only memory that the preceding kernel does not write. If that one calls `let_next_begin`,
/// the same holds for the kernels before it, back to the last one that let the next start after its own wait.
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

/// Launches a kernel in clusters of blocks; the second of the pair selects an early start as in [`launch_early`].
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

/// Whether the tensor's address is a multiple of 16 bytes.
pub(super) fn is_aligned(tensor: &Tensor) -> bool {
    (tensor.data_ptr() as usize).is_multiple_of(16)
}

/// Number of blocks for `items` of work, `per_block` each, but at most `most`; the kernels then loop over the rest.
pub(super) fn blocks(items: usize, per_block: usize, most: usize) -> u32 {
    items.div_ceil(per_block).min(most) as u32
}

/// Checks that constants equal those in the .cu file, because a mismatch would give wrong results without an error.
#[cfg(test)]
pub(super) fn assert_declared(source: &KernelSource, constants: &[(&str, usize)]) {
    for (name, value) in constants {
        let line = format!("constexpr int {name} = {value};");
        assert!(crate::cuda::nvrtc::texts(source).any(|text| text.contains(&line)), "{line}");
    }
}

/// The error for a tensor that a kernel does not support.
pub(super) fn invalid(op: &'static str, expected: impl Into<String>, got: impl std::fmt::Debug) -> Error {
    Error::InvalidArgument { op, expected: expected.into(), got: format!("{got:?}") }
}
