//! Gated activations, activation(gate) * up, on the interleaved output of the gate and up GEMM.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, blocks, invalid, kind_name, launch_early, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::SWIGLU;
pub(super) const NAMES: &[&str] = &[
    "swiglu_forward_f32_x1",
    "swiglu_forward_f32_x2",
    "swiglu_forward_bf16_x1",
    "swiglu_forward_bf16_x4",
    "swiglu_backward_f32_x1",
    "swiglu_backward_f32_x2",
    "swiglu_backward_bf16_x1",
    "swiglu_backward_bf16_x4",
    "swiglu_forward_fp8",
    "swiglu_forward_int8",
    "swiglu_backward_fp8",
    "swiglu_weighted_backward_f32_x1",
    "swiglu_weighted_backward_f32_x2",
    "swiglu_weighted_backward_bf16_x1",
    "swiglu_weighted_backward_bf16_x4",
    "geglu_forward_f32_x1",
    "geglu_forward_f32_x2",
    "geglu_forward_bf16_x1",
    "geglu_forward_bf16_x4",
    "geglu_backward_f32_x1",
    "geglu_backward_f32_x2",
    "geglu_backward_bf16_x1",
    "geglu_backward_bf16_x4",
    "geglu_forward_fp8",
    "geglu_forward_int8",
    "geglu_backward_fp8",
    "geglu_weighted_backward_f32_x1",
    "geglu_weighted_backward_f32_x2",
    "geglu_weighted_backward_bf16_x1",
    "geglu_weighted_backward_bf16_x4",
    "clamped_forward_f32_x1",
    "clamped_forward_f32_x2",
    "clamped_forward_bf16_x1",
    "clamped_forward_bf16_x4",
    "clamped_backward_f32_x1",
    "clamped_backward_f32_x2",
    "clamped_backward_bf16_x1",
    "clamped_backward_bf16_x4",
    "clamped_forward_fp8",
    "clamped_forward_int8",
    "clamped_backward_fp8",
    "clamped_weighted_backward_f32_x1",
    "clamped_weighted_backward_f32_x2",
    "clamped_weighted_backward_bf16_x1",
    "clamped_weighted_backward_bf16_x4",
];

/// A gated activation function of gate and up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// SwiGLU: g sigmoid(g) u.
    Silu,
    /// GeGLU with the tanh approximation of GELU: g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) / 2 times u.
    GeluTanh,
    /// gpt-oss's SwiGLU: g sigmoid([`SWISH_SLOPE`] g) (u + 1), where g and u are clamped to at most [`SWISH_LIMIT`], and u to at least its negative.
    ClampedSwiglu,
}

/// Multiplier within the sigmoid of [`Activation::ClampedSwiglu`].
pub const SWISH_SLOPE: f64 = 1.702;
/// Limit to which [`Activation::ClampedSwiglu`] clamps gate and up.
pub const SWISH_LIMIT: f64 = 7.0;

impl Activation {
    /// The name of the gated activation, with which its kernels' names begin.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Silu => "swiglu",
            Self::GeluTanh => "geglu",
            Self::ClampedSwiglu => "clamped",
        }
    }
}

const THREADS: usize = 256;
const MOST_BLOCKS: usize = 1 << 14;

/// Returns y = activation(gate) * up.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn swiglu_forward(
    activation: Activation,
    gate_up: &Tensor, // [.., 2 F] f32 or bf16: g0 u0 g1 u1 ..
) -> Result<Tensor> {
    let mut shape = gate_up.size();
    match shape.last_mut() {
        Some(last) if *last % 2 == 0 => *last /= 2,
        _ => return Err(invalid("swiglu_forward", "a last dimension of even size (gate and up)", gate_up.size())),
    }
    let mut y = Tensor::f_empty(shape, (gate_up.kind(), gate_up.device()))?; // [.., F]
    silu_mul(activation, gate_up, &mut y)?;
    Ok(y)
}

/// Computes y = activation(gate) * up in existing memory.
///
/// # Errors
/// The errors of [`swiglu_forward`].
pub fn silu_mul(
    activation: Activation,
    gate_up: &Tensor, // [.., 2 F] f32 or bf16: g0 u0 g1 u1 ..
    y: &mut Tensor,   // [.., F], like gate_up
) -> Result<()> {
    const OP: &str = "swiglu_forward";
    let (gpu, n) = (ordinal(OP, gate_up)?, y.numel());
    let name = |variant| format!("{}_forward_{variant}", activation.unit());
    let (from, to) = (address(OP, gate_up, gate_up.kind(), 2 * n, gpu)?, address(OP, y, gate_up.kind(), n, gpu)?);
    queue((OP, &name), gate_up.kind(), gpu, n, &[&*y, gate_up], &[from, to])
}

/// Returns d_gate_up = (dy * up * activation'(gate), dy * activation(gate)), interleaved, in the memory of `gate_up`; and the forward's y,
/// recomputed.
///
/// # Errors
/// The errors of [`swiglu_forward`].
pub fn swiglu_backward(
    activation: Activation,
    dy: &Tensor,     // [.., F], like gate_up
    gate_up: Tensor, // [.., 2 F] f32 or bf16
) -> Result<[Tensor; 2]> {
    const OP: &str = "swiglu_backward";
    let (gpu, n) = (ordinal(OP, &gate_up)?, dy.numel());
    let y = dy.f_empty_like()?; // [.., F]
    let pairs = address(OP, &gate_up, gate_up.kind(), 2 * n, gpu)?;
    let half = |tensor: &Tensor| address(OP, tensor, gate_up.kind(), n, gpu);
    let arguments = [half(dy)?, pairs, pairs, half(&y)?];
    let name = |variant| format!("{}_backward_{variant}", activation.unit());
    queue((OP, &name), gate_up.kind(), gpu, n, &[dy, &gate_up], &arguments)?;
    Ok([gate_up, y])
}

/// Computes [`swiglu_backward`] for rows of y that are multiplied by a weight each. Returns d_gate_up, the weighted y, and the gradient of each row's
/// weight.
///
/// # Errors
/// The errors of [`swiglu_forward`].
pub fn swiglu_weighted_backward(
    activation: Activation,
    dy: &Tensor,      // [R, F], like gate_up
    weights: &Tensor, // [R, 1] f32
    gate_up: Tensor,  // [R, 2 F] f32 or bf16
) -> Result<[Tensor; 3]> {
    const OP: &str = "swiglu_weighted_backward";
    let (&[rows, columns], gpu) = (&dy.size()[..], ordinal(OP, &gate_up)?) else {
        return Err(invalid(OP, "rows", dy.size()));
    };
    let (kind, n) = (gate_up.kind(), dy.numel());
    let (y, d_weights) = (dy.f_empty_like()?, Tensor::f_empty([rows], (Kind::Float, dy.device()))?); // [R, F], [R]
    let pairs = address(OP, &gate_up, kind, 2 * n, gpu)?;
    let arguments = [
        address(OP, dy, kind, n, gpu)?,
        address(OP, weights, Kind::Float, rows as usize, gpu)?,
        pairs,
        pairs,
        address(OP, &y, kind, n, gpu)?,
        address(OP, &d_weights, Kind::Float, rows as usize, gpu)?,
        Argument::Count(columns),
    ];
    let width = width(kind, columns as usize, &[dy, &gate_up]);
    let threads = (columns as usize / width).next_multiple_of(32).clamp(32, THREADS) as u32;
    let name = format!("{}_weighted_backward_{}_x{width}", activation.unit(), kind_name(OP, dy)?);
    // SAFETY: the kernel's parameters in order; one block a row, of whole warps, aligned to what a thread moves.
    unsafe { launch_early(SOURCE, &name, gpu, (rows as u32, threads, 0), &arguments)? };
    Ok([gate_up, y, d_weights])
}

/// Number of outputs that a thread computes at once: the widest variant (16 bytes of pairs) if rows of `len` and the addresses of [half, pairs]
/// permit it, else one.
fn width(kind: Kind, len: usize, tensors: &[&Tensor; 2]) -> usize {
    let width = 8 / kind.elt_size_in_bytes();
    let [half, pairs] = tensors.map(|tensor| tensor.data_ptr() as usize);
    let is_wide = len.is_multiple_of(width) && half.is_multiple_of(8) && pairs.is_multiple_of(16);
    if is_wide { width } else { 1 }
}

/// Queues the widest kernel variant, up to 16 bytes of pairs per thread, that the length and the addresses of [half, pairs] permit.
fn queue(
    (op, name): (&'static str, &dyn Fn(String) -> String),
    kind: Kind,
    gpu: usize,
    n: usize,
    tensors: &[&Tensor; 2],
    arguments: &[Argument],
) -> Result<()> {
    let width = width(kind, n, tensors);
    let name = name(format!("{}_x{width}", kind_name(op, tensors[0])?));
    let grid = blocks(n / width, THREADS, MOST_BLOCKS);
    let arguments = [arguments, &[Argument::Count(n as i64)]].concat();
    // SAFETY: the kernel's parameters in order; n outputs, 2 n inputs, aligned to what a thread moves.
    unsafe { launch_early(SOURCE, &name, gpu, (grid, THREADS as u32, 0), &arguments) }
}
