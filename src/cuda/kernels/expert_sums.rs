//! Weighted sums of the experts' outputs for each token, in the engine and in training.
//!
//! T tokens, k choices per token, D hidden.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, address_or_null, invalid, kind_name, launch, launch_early, ordinal, width};
use super::route::RoutedTokens;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::EXPERT_SUMS;
pub(super) const NAMES: &[&str] = &[
    "experts_combine_f32_x1",
    "experts_combine_f32_x4",
    "experts_combine_bf16_x1",
    "experts_combine_bf16_x8",
    "experts_gather_f32_x1",
    "experts_gather_f32_x4",
    "experts_gather_bf16_x1",
    "experts_gather_bf16_x8",
];

/// A shared expert's output and its gate. The output is multiplied by the sigmoid of x gate^T, or by 1 without a gate.
#[derive(Debug, Clone, Copy)]
pub struct SharedExpertRows<'a> {
    /// The shared expert's output, of the same type as the other experts'.
    pub rows: &'a Tensor, // [T, D]
    /// The input of the experts.
    pub x: &'a Tensor, // [T, D]
    /// The weight of the gate, if there is one.
    pub gate: Option<&'a Tensor>, // [1, D]
}

/// Computes y = the weighted sum of a token's expert outputs, in the order of its choices, plus the shared expert's output if there is one. Sums are
/// in float32, rounded once. Choices that are padding or another rank's experts are skipped. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn experts_combine(
    rows: &Tensor, // [T k, D] f32 or bf16
    routed: &RoutedTokens,
    shared: Option<SharedExpertRows<'_>>,
    y: &Tensor, // [T, D], like rows
) -> Result<()> {
    const OP: &str = "experts_combine";
    let (&[tokens, dim], &[_, choices], gpu) = (&y.size()[..], &routed.experts.size()[..], ordinal(OP, rows)?) else {
        return Err(invalid(OP, "a matrix", y.size()));
    };
    let width = width(dim as usize, &[rows, y].into_iter().chain(shared.map(|shared| shared.rows)).collect::<Vec<_>>());
    let of_shared = |part: Option<&Tensor>, rows_of_part: i64| {
        address_or_null(OP, part, rows.kind(), (rows_of_part * dim) as usize, gpu)
    };
    let arguments = [
        address(OP, rows, rows.kind(), (tokens * choices * dim) as usize, gpu)?,
        address(OP, &routed.experts, Kind::Int, (tokens * choices) as usize, gpu)?,
        address(OP, &routed.weights, Kind::Float, (tokens * choices) as usize, gpu)?,
        address(OP, y, rows.kind(), (tokens * dim) as usize, gpu)?,
        Argument::Count(dim),
        Argument::Count(choices),
        Argument::Count(routed.own.start as i64),
        Argument::Count(routed.own.len() as i64),
        of_shared(shared.map(|shared| shared.rows), tokens)?,
        of_shared(shared.map(|shared| shared.x), tokens)?,
        of_shared(shared.and_then(|shared| shared.gate), 1)?,
    ];
    let threads = (dim as usize / width).next_multiple_of(32).min(256) as u32;
    let name = format!("{OP}_{}_x{width}", kind_name(OP, rows)?);
    // SAFETY: the kernel's parameters in order; one block a token.
    unsafe { launch_early(SOURCE, &name, gpu, (tokens as u32, threads, 0), &arguments) }
}

/// Sums for each token the rows at its places, in order, in float32; each row is multiplied by its weight if weights are given. [T, D] f32
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::OutOfMemory`]; [`crate::Error::Cuda`].
pub fn experts_gather(
    rows: &Tensor,            // [R, D] f32 or bf16
    places: &Tensor,          // [T, k] int64, below R
    weights: Option<&Tensor>, // [T, k] f32
) -> Result<Tensor> {
    const OP: &str = "experts_gather";
    let (&[_, dim], &[tokens, choices], gpu) = (&rows.size()[..], &places.size()[..], ordinal(OP, rows)?) else {
        return Err(invalid(OP, "matrices", (rows.size(), places.size())));
    };
    let y = Tensor::f_empty([tokens, dim], (Kind::Float, rows.device()))?;
    let width = width(dim as usize, &[rows]);
    let arguments = [
        address(OP, rows, rows.kind(), rows.numel(), gpu)?,
        address(OP, places, Kind::Int64, (tokens * choices) as usize, gpu)?,
        address_or_null(OP, weights, Kind::Float, (tokens * choices) as usize, gpu)?,
        address(OP, &y, Kind::Float, y.numel(), gpu)?,
        Argument::Count(dim),
        Argument::Count(choices),
    ];
    let threads = (dim as usize / width).next_multiple_of(32).min(256) as u32;
    let name = format!("{OP}_{}_x{width}", kind_name(OP, rows)?);
    // SAFETY: the kernel's parameters in order; one block a token; places are rows, the caller's promise.
    unsafe { launch(SOURCE, &name, gpu, (tokens as u32, threads, 0), &arguments)? };
    Ok(y)
}
