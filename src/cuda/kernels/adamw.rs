//! AdamW over a flat shard, in one pass over memory.
#![allow(unsafe_code)]

use std::ops::Range;

use tch::{Kind, Tensor};

use super::launch::{Argument, address, blocks, invalid, kind_name, launch, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::ADAMW;
pub(super) const NAMES: &[&str] = &["adamw_f32_f32", "adamw_f32_bf16", "adamw_bf16_f32", "adamw_bf16_bf16"];

const THREADS: usize = 256;
const PER_THREAD: usize = 4;
const MOST_BLOCKS: usize = 1 << 13;

/// The coefficients of one AdamW step, computed in float64 by the caller.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWScalars {
    /// 1 - lr * weight_decay, applied to the ranges that decay.
    pub keep: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// grad_scale * (1 - beta1).
    pub gain1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// grad_scale * sqrt(1 - beta2).
    pub gain2: f32,
    /// 1 / sqrt(1 - beta2^step).
    pub root_scale: f32,
    /// Epsilon added to the denominator.
    pub eps: f32,
    /// The step size -lr / (1 - beta1^step).
    pub rate: f32,
}

impl AdamWScalars {
    /// The coefficients as the last arguments of a kernel.
    pub(super) fn arguments(&self) -> [Argument; 8] {
        let Self { keep, beta1, gain1, beta2, gain2, root_scale, eps, rate } = *self;
        [keep, beta1, gain1, beta2, gain2, root_scale, eps, rate].map(Argument::Float)
    }
}

/// Computes m = beta1 m + gain1 g; v = beta2 v + (gain2 g)^2; master = keep master + rate m / (root_scale sqrt(v) + eps). `keep` applies only to the
/// `decayed` ranges (ascending, disjoint). If `weight` is given, the new master is copied to it, in its own type.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn adamw(
    master: &mut Tensor,         // [n] f32
    m: &mut Tensor,              // [n] f32
    v: &mut Tensor,              // [n] f32
    grad: &Tensor,               // [n] f32 or bf16
    weight: Option<&mut Tensor>, // [n] f32 or bf16
    scalars: &AdamWScalars,
    decayed: &[Range<i64>],
) -> Result<()> {
    const OP: &str = "adamw";
    let (n, gpu) = (master.numel(), ordinal(OP, master)?);
    let weight_kind = weight.as_ref().map_or(Ok("f32"), |weight| kind_name(OP, weight))?;
    let name = format!("adamw_{}_{weight_kind}", kind_name(OP, grad)?);
    let state = |tensor: &Tensor| address(OP, tensor, Kind::Float, n, gpu);
    let (master, m, v) = (state(master)?, state(m)?, state(v)?);
    let grad_bytes = grad.kind().elt_size_in_bytes();
    let grad = address(OP, grad, grad.kind(), n, gpu)?;
    let weight_bytes = weight.as_ref().map_or(0, |weight| weight.kind().elt_size_in_bytes());
    let weight = weight.map_or(Ok(Argument::NULL), |weight| address(OP, weight, weight.kind(), n, gpu))?;
    let decayed = if scalars.keep == 1.0 { &[] } else { decayed }; // a single run suffices
    for (range, is_decayed) in segments(decayed, n)? {
        let at = |argument, element_bytes| offset(argument, range.start * element_bytes);
        let scalars = AdamWScalars { keep: if is_decayed { scalars.keep } else { 1.0 }, ..*scalars };
        let mut arguments = vec![at(master, 4), at(m, 4), at(v, 4), at(grad, grad_bytes), at(weight, weight_bytes)];
        arguments.push(Argument::Count(range.len() as i64));
        arguments.extend(scalars.arguments());
        let grid = blocks(range.len(), THREADS * PER_THREAD, MOST_BLOCKS);
        // SAFETY: the kernel's parameters in order; all tensors have n elements, of which the range is a part.
        unsafe { launch(SOURCE, &name, gpu, (grid, THREADS as u32, 0), &arguments)? };
    }
    Ok(())
}

/// Adds `bytes` to an address; null stays null.
fn offset(argument: Argument, bytes: usize) -> Argument {
    match argument {
        Argument::Address(start) if !start.is_null() => Argument::Address(start.wrapping_byte_add(bytes)),
        other => other,
    }
}

/// Splits [0, n) into runs in which either all elements decay or none.
fn segments(decayed: &[Range<i64>], n: usize) -> Result<Vec<(Range<usize>, bool)>> {
    let mut segments: Vec<(Range<usize>, bool)> = Vec::new();
    let mut push = |range: Range<usize>, is_decayed| match segments.last_mut() {
        _ if range.is_empty() => (),
        Some((last, same)) if *same == is_decayed => last.end = range.end,
        _ => segments.push((range, is_decayed)),
    };
    let mut at = 0;
    for range in decayed {
        if range.start < at as i64 || range.end < range.start || range.end > n as i64 {
            return Err(invalid("adamw", format!("ascending ranges of weight decay within {n} elements"), decayed));
        }
        push(at..range.start as usize, false);
        push(range.start as usize..range.end as usize, true);
        at = range.end as usize;
    }
    push(at..n, false);
    Ok(segments)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn decay_segments_cover_all_elements_once_and_are_merged() {
        assert_eq!(segments(&[], 5).unwrap(), [(0..5, false)]);
        assert_eq!(segments(&[0..2, 2..5], 5).unwrap(), [(0..5, true)]);
        assert_eq!(segments(&[1..2, 2..4, 4..4], 5).unwrap(), [(0..1, false), (1..4, true), (4..5, false)]);
        assert!(segments(&[], 0).unwrap().is_empty());
        for wrong in [vec![0..1, 1..6], vec![2..4, 1..2], vec![0..1, Range { start: 3, end: 2 }]] {
            assert!(segments(&wrong, 5).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn host_tensors_are_refused() {
        let mut host = [0; 3].map(|_| Tensor::zeros([4], (Kind::Float, tch::Device::Cpu)));
        let grad = host[0].copy();
        let [master, m, v] = &mut host;
        let scalars = AdamWScalars {
            keep: 1.0,
            beta1: 0.9,
            gain1: 0.1,
            beta2: 0.99,
            gain2: 0.1,
            root_scale: 1.0,
            eps: 1e-8,
            rate: -0.1,
        };
        let error = adamw(master, m, v, &grad, None, &scalars, &[]).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { op: "adamw", .. }), "{error}");
    }
}
