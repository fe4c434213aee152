//! One safe function per kernel of `src/kernels`, over tensors on a GPU. Each checks devices, kinds and lengths, and queues
//! its kernel on libtorch's current stream, so that it stands in order with libtorch's own operations.
#![allow(unsafe_code)]

mod adamw;
mod rms_norm;
mod swiglu;

pub use adamw::{AdamWScalars, adamw};
pub use rms_norm::{rms_norm_backward, rms_norm_forward};
pub use swiglu::{swiglu_backward, swiglu_forward};

use tch::{Device, Kind, Tensor};

use super::kernel::{Argument, Kernel};
use super::nvrtc::Source;
use crate::error::{Error, Result};
use crate::torch;

/// Compiles and loads the kernels of every kind for GPU `ordinal`, so that none is waited for, or found missing, in a step.
///
/// # Errors
/// [`Error::Environment`] without NVRTC; [`Error::Cuda`].
pub fn prepare(ordinal: usize) -> Result<()> {
    for (source, names) in
        [(adamw::SOURCE, adamw::NAMES), (rms_norm::SOURCE, rms_norm::NAMES), (swiglu::SOURCE, swiglu::NAMES)]
    {
        for name in names {
            Kernel::get(source, name, ordinal)?;
        }
    }
    Ok(())
}

/// The GPU that an operation's first tensor is on; the others are held to it by [`address`].
fn ordinal(op: &'static str, tensor: &Tensor) -> Result<usize> {
    match tensor.device() {
        Device::Cuda(ordinal) => Ok(ordinal),
        other => Err(invalid(op, "a tensor on a GPU", other)),
    }
}

/// What a kind is called in the kernels' names.
fn kind_name(op: &'static str, tensor: &Tensor) -> Result<&'static str> {
    match tensor.kind() {
        Kind::Float => Ok("f32"),
        Kind::BFloat16 => Ok("bf16"),
        other => Err(invalid(op, "float32 or bfloat16", other)),
    }
}

/// The address of a contiguous tensor of `kind` with `numel` elements on GPU `ordinal`.
fn address(op: &'static str, tensor: &Tensor, kind: Kind, numel: usize, ordinal: usize) -> Result<Argument> {
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

/// Queues `name` of `source` on libtorch's current stream; nothing for an empty grid.
///
/// # Safety
/// As [`Kernel::launch`]; memory that libtorch frees in this stream's order is valid long enough.
unsafe fn launch(
    source: &'static Source,
    name: &str,
    ordinal: usize,
    (grid, block, shared_bytes): (u32, u32, u32),
    arguments: &[Argument],
) -> Result<()> {
    if grid == 0 {
        return Ok(());
    }
    let kernel = Kernel::get(source, name, ordinal)?;
    let stream = torch::current_cuda_stream(ordinal)?;
    // SAFETY: the caller's promise.
    unsafe { kernel.launch(grid, block, shared_bytes, stream, arguments) }
}

/// Blocks for `items` of work, `per_block` each; the kernels stride over what is left above `most`.
fn blocks(items: usize, per_block: usize, most: usize) -> u32 {
    items.div_ceil(per_block).min(most) as u32
}

fn invalid(op: &'static str, expected: impl Into<String>, got: impl std::fmt::Debug) -> Error {
    Error::InvalidArgument { op, expected: expected.into(), got: format!("{got:?}") }
}
