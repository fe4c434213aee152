//! Kernels from the fused QKV projection to rotated queries, keys and values, and their backward.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, address_or_null, blocks, invalid, is_aligned, kind_name, launch, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::HEADS;
pub(super) const NAMES: &[&str] = &[
    "heads_forward_f32_x1",
    "heads_forward_f32_x4",
    "heads_forward_bf16_x1",
    "heads_forward_bf16_x8",
    "heads_backward_f32_x1",
    "heads_backward_f32_x4",
    "heads_backward_bf16_x1",
    "heads_backward_bf16_x8",
];

/// Largest supported head width.
pub(super) const MOST_HEAD_DIM: i64 = 512;
/// Blocks of the backward, each with its own partial sums. The number is the same on every GPU, so that the sums have the same bits.
const BACKWARD_BLOCKS: usize = 132 * 8;

/// Weights of the norms of query and key heads, `[hd]` each, and their epsilon.
#[derive(Debug, Clone, Copy)]
pub struct HeadNormWeights<'a> {
    /// Weights of the norm of queries.
    pub q: &'a Tensor,
    /// Weights of the norm of keys.
    pub k: &'a Tensor,
    /// Epsilon added to the mean square.
    pub eps: f64,
    /// Heads are multiplied by 1 + weight instead of weight.
    pub zero_centred: bool,
}

impl HeadNormWeights<'_> {
    fn centre(norms: Option<Self>) -> Argument {
        Argument::Float(f32::from(u8::from(norms.is_some_and(|norms| norms.zero_centred))))
    }
}

/// Returns q [T, H, hd], k [T, Hkv, hd] and v [T, Hkv, hd] from rows [G query heads of group g, k_g, v_g]. Queries and keys are normalized if `norms`
/// are given, then rotated in the first `turned` columns of each head.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn heads_forward(
    qkv: &Tensor, // [T, Hkv, G + 2, hd] f32 or bf16
    norms: Option<HeadNormWeights<'_>>,
    cos: &Tensor, // [T, 1, turned] f32, both halves alike
    sin: &Tensor, // [T, 1, turned] f32: -sin, then sin
) -> Result<[Tensor; 3]> {
    const OP: &str = "heads_forward";
    let shape = HeadsShape::of(OP, qkv)?;
    let room = |heads: i64| Tensor::f_empty([shape.tokens, heads, 2 * shape.half], (qkv.kind(), qkv.device()));
    let (q, k, v) = (room(shape.groups * shape.queries)?, room(shape.groups)?, room(shape.groups)?);
    let turned = shape.turned(OP, cos)?;
    let (suffix, lanes) = shape.variant(OP, turned, &[qkv, &q, &k, &v])?;
    let mut arguments = vec![shape.address(OP, qkv, shape.slots())?];
    arguments.extend(shape.norms(OP, norms, qkv.kind())?);
    arguments.extend(shape.rotation(OP, turned, cos, sin)?);
    arguments.push(shape.address(OP, &q, shape.groups * shape.queries)?);
    arguments.extend([shape.address(OP, &k, shape.groups)?, shape.address(OP, &v, shape.groups)?]);
    arguments.extend([shape.tokens, shape.groups, shape.queries, shape.half, turned, lanes].map(Argument::Count));
    arguments.push(Argument::Float(norms.map_or(0.0, |norms| norms.eps as f32)));
    arguments.push(HeadNormWeights::centre(norms));
    let grid = blocks((shape.tokens * shape.slots()) as usize, 256 / lanes as usize, usize::MAX);
    // SAFETY: the kernel's parameters in order; a team of lanes for every head.
    unsafe { launch(SOURCE, &format!("{OP}_{suffix}"), shape.gpu, (grid, 256, 0), &arguments)? };
    Ok([q, k, v])
}

/// Results of [`heads_backward`]: the gradient of the projection, and partial sums over tokens in float32.
#[derive(Debug)]
pub struct HeadsGradient {
    /// The gradient of the projection.
    pub d_qkv: Tensor, // [T, Hkv, G + 2, hd]
    /// Partial sums over tokens of the bias gradient, if requested.
    pub d_bias: Option<Tensor>, // [stripes, (H + 2 Hkv) hd] f32
    /// Partial sums of the norm weights' gradients per head, if there are norms.
    pub d_norm: Option<Tensor>, // [stripes, Hkv, G + 2, hd] f32
}

/// Computes the gradient of the projection. `qkv` is the forward's input; it is only read if there are norms.
///
/// # Errors
/// The errors of [`heads_forward`].
#[allow(clippy::too_many_arguments)]
pub fn heads_backward(
    dq: &Tensor,          // [T, H, hd] f32 or bf16
    dk: &Tensor,          // [T, Hkv, hd]
    dv: &Tensor,          // [T, Hkv, hd]
    qkv: Option<&Tensor>, // [T, Hkv, G + 2, hd]
    norms: Option<HeadNormWeights<'_>>,
    cos: &Tensor, // [T, 1, turned] f32
    sin: &Tensor, // [T, 1, turned] f32
    wants_bias: bool,
) -> Result<HeadsGradient> {
    const OP: &str = "heads_backward";
    let ([tokens, heads, head_dim], groups) = (sizes(OP, dq)?, sizes(OP, dk)?[1]);
    let like = [tokens, groups, heads / groups.max(1) + 2, head_dim];
    let d_qkv = Tensor::f_empty(like, (dq.kind(), dq.device()))?;
    let shape = HeadsShape::of(OP, &d_qkv)?;
    let turned = shape.turned(OP, cos)?;
    let (suffix, lanes) = shape.variant(OP, turned, &[dq, dk, dv, &d_qkv, qkv.unwrap_or(dq)])?;
    let (teams, slots) = (256 / lanes as usize, shape.slots() as usize);
    let slot_blocks = slots.div_ceil(teams);
    let threads = (slots.div_ceil(slot_blocks) * lanes as usize).next_multiple_of(32) as u32;
    let stripes = (BACKWARD_BLOCKS / slot_blocks).max(1).min(tokens as usize); // without stripes there are no sums
    let partial = |wanted: bool| {
        let room = || Tensor::f_empty([&[stripes as i64], &like[1..]].concat(), (Kind::Float, dq.device()));
        wanted.then(room).transpose()
    };
    let (d_bias, d_norm) = (partial(wants_bias)?, partial(norms.is_some())?);
    let optional = |tensor, kind, count| address_or_null(OP, tensor, kind, count, shape.gpu);
    if norms.is_some() && qkv.is_none() {
        return Err(invalid(OP, "the projection weights, as this block has query and key norms", "none"));
    }
    let columns = slots * head_dim as usize;
    let mut arguments = vec![shape.address(OP, dq, heads)?];
    arguments.extend([shape.address(OP, dk, groups)?, shape.address(OP, dv, groups)?]);
    arguments.push(optional(qkv, dq.kind(), tokens as usize * columns)?);
    arguments.extend(shape.norms(OP, norms, dq.kind())?);
    arguments.extend(shape.rotation(OP, turned, cos, sin)?);
    arguments.push(shape.address(OP, &d_qkv, shape.slots())?);
    arguments.push(optional(d_bias.as_ref(), Kind::Float, stripes * columns)?);
    arguments.push(optional(d_norm.as_ref(), Kind::Float, stripes * columns)?);
    arguments.extend([tokens, groups, shape.queries, shape.half, turned, lanes, stripes as i64].map(Argument::Count));
    arguments.push(Argument::Float(norms.map_or(0.0, |norms| norms.eps as f32)));
    arguments.push(HeadNormWeights::centre(norms));
    let grid = (stripes * slot_blocks) as u32;
    // SAFETY: the kernel's parameters in order; a team of lanes for every slot of every stripe of tokens.
    unsafe { launch(SOURCE, &format!("{OP}_{suffix}"), shape.gpu, (grid, threads, 0), &arguments)? };
    let d_bias = d_bias.map(|sums| sums.f_view([stripes as i64, columns as i64])).transpose()?;
    Ok(HeadsGradient { d_qkv, d_bias, d_norm })
}

struct HeadsShape {
    gpu: usize,
    kind: Kind,
    tokens: i64,
    groups: i64,
    queries: i64,
    half: i64,
}

impl HeadsShape {
    fn of(op: &'static str, qkv: &Tensor) -> Result<Self> {
        match qkv.size()[..] {
            [tokens, groups, slots, head_dim] if slots > 2 && head_dim % 2 == 0 && head_dim <= MOST_HEAD_DIM => {
                let (gpu, kind, queries) = (ordinal(op, qkv)?, qkv.kind(), slots - 2);
                Ok(Self { gpu, kind, tokens, groups, queries, half: head_dim / 2 })
            }
            _ => Err(invalid(op, format!("[T, Hkv, G + 2, hd], hd even and at most {MOST_HEAD_DIM}"), qkv.size())),
        }
    }

    fn slots(&self) -> i64 {
        self.groups * (self.queries + 2)
    }

    /// The kernel's name suffix and the lanes per head; the wide variant moves 16 bytes per lane.
    fn variant(&self, op: &'static str, turned: i64, tensors: &[&Tensor]) -> Result<(String, i64)> {
        let vector = 16 / self.kind.elt_size_in_bytes() as i64;
        let fits = self.half % vector == 0 && turned % vector == 0 && self.half <= 32 * vector;
        let is_wide = fits && tensors.iter().all(|tensor| is_aligned(tensor));
        let width = if is_wide { vector } else { 1 };
        let lanes = ((self.half / width) as u64).next_power_of_two().min(32) as i64;
        Ok((format!("{}_x{width}", kind_name(op, tensors[0])?), lanes))
    }

    /// The address of a tensor [T, heads, hd] or [T, slots, hd].
    fn address(&self, op: &'static str, tensor: &Tensor, heads: i64) -> Result<Argument> {
        address(op, tensor, self.kind, (self.tokens * heads * 2 * self.half) as usize, self.gpu)
    }

    fn norms(&self, op: &'static str, norms: Option<HeadNormWeights<'_>>, kind: Kind) -> Result<[Argument; 2]> {
        let weight = |weight: &Tensor| address(op, weight, kind, 2 * self.half as usize, self.gpu);
        match norms {
            Some(norms) => Ok([weight(norms.q)?, weight(norms.k)?]),
            None => Ok([Argument::NULL; 2]),
        }
    }

    /// Number of rotated column pairs per head.
    fn turned(&self, op: &'static str, cos: &Tensor) -> Result<i64> {
        match cos.size().last() {
            Some(&columns) if columns % 2 == 0 && columns / 2 <= self.half => Ok(columns / 2),
            _ => Err(invalid(
                op,
                format!("cosines for the rotation of an even number of columns, at most {}", 2 * self.half),
                cos.size(),
            )),
        }
    }

    fn rotation(&self, op: &'static str, turned: i64, cos: &Tensor, sin: &Tensor) -> Result<[Argument; 2]> {
        let rows = |rows: &Tensor| address(op, rows, Kind::Float, (self.tokens * 2 * turned) as usize, self.gpu);
        Ok([rows(cos)?, rows(sin)?])
    }
}

fn sizes(op: &'static str, tensor: &Tensor) -> Result<[i64; 3]> {
    <[i64; 3]>::try_from(tensor.size()).map_err(|size| invalid(op, "[T, heads, hd]", size))
}
