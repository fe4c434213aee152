//! An engine's copy of its blocks' matrices in FP8, made anew at every wake, since weights change in between. The policy keeps its own
//! weights, norms and the router stay as they are, and so do embedding and head.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::engine::EngineOptions;
use super::weights::EngineWeights;
use crate::config::{KvCacheDtype, RolloutQuantization};
use crate::cuda::{Context, kernels};
use crate::error::{Error, Result};
use crate::memory::Arena;
use crate::model::{LinearSpec, ModelSpec};
use crate::ops::fp8::{self, Fp8Rows};

const KEY: &str = "rollout_quantization";
/// Sections of the copy begin at multiples of this, in bytes.
const ALIGNMENT: usize = 256;
/// Sections of a matrix, at most: values and scales, of two pieces where ranks share a key/value head.
const SECTIONS: usize = 4;

/// The memory of the copy, mapped while the engine is awake.
#[derive(Debug)]
pub(super) struct Fp8Copy {
    arena: Arena,
}

/// Bytes of one rank's copy in FP8: a byte an element and 4 a row of the blocks' matrices.
pub fn fp8_weight_bytes(spec: &ModelSpec, tp_size: usize) -> usize {
    let bytes = |linear: LinearSpec| linear.rows() * (linear.columns + size_of::<f32>()) + SECTIONS * ALIGNMENT;
    spec.layers.iter().flat_map(|block| block.tp_slice(tp_size).linears()).map(bytes).sum()
}

/// Whether an engine with weights of `kind`, on a GPU or not, can multiply in FP8 by a slice of this model's matrices.
///
/// # Errors
/// [`Error::InvalidValue`] on `rollout_quantization` for experts and gated delta nets, and on a GPU for weights of another kind than bfloat16 or a matrix whose
/// sides are no multiples of 16.
pub fn check_fp8(spec: &ModelSpec, kind: Kind, on_gpu: bool, tp_size: usize) -> Result<()> {
    if spec.num_expert_layers() > 0 {
        return refuse("experts are not multiplied in FP8 yet");
    }
    if spec.delta_net().is_some() {
        return refuse("gated delta nets are not multiplied in FP8 yet");
    }
    if on_gpu && kind != Kind::BFloat16 {
        return refuse(&format!("on a GPU FP8 is rounded from dtype = bfloat16, not from {kind:?}"));
    }
    let ragged = |linear: &LinearSpec| on_gpu && !kernels::fp8_serves([linear.rows(), linear.columns]);
    let mut linears = spec.layers.iter().flat_map(|block| block.tp_slice(tp_size).linears());
    if let Some(linear) = linears.find(|linear| ragged(linear)) {
        let (matrix, rows, columns) = (linear.matrix, linear.rows(), linear.columns);
        return refuse(&format!(
            "sides of a rank's matrices have to be multiples of 16, and rows at most 32768 long; {matrix:?} is [{rows}, {columns}]"
        ));
    }
    Ok(())
}

/// Whether an engine on this device can keep keys and values in FP8.
pub(super) fn check_fp8_cache(kind: Kind, device: Device) -> Result<()> {
    let refuse = |reason: String| Err(Error::invalid_value("kv_cache_dtype", KvCacheDtype::Fp8.name(), reason));
    let Device::Cuda(ordinal) = device else { return Ok(()) };
    if kind != Kind::BFloat16 {
        return refuse(format!("auto: on a GPU FP8 is rounded from dtype = bfloat16, not from {kind:?}"));
    }
    let context = Context::retain(ordinal)?;
    let (major, minor) = context.compute_capability()?;
    if (major, minor) >= (8, 9) {
        return Ok(());
    }
    refuse(format!(
        "auto: it needs a GPU of compute capability 8.9 or later, and {} has {major}.{minor}",
        context.name()?
    ))
}

/// Whether the chip multiplies in FP8.
fn check_chip(device: Device) -> Result<()> {
    let Device::Cuda(ordinal) = device else { return Ok(()) };
    Context::retain(ordinal)?.fp8_refusal()?.map_or(Ok(()), |reason| refuse(&reason))
}

fn refuse<T>(reason: &str) -> Result<T> {
    Err(Error::invalid_value(KEY, RolloutQuantization::Fp8.name(), format!("none: {reason}")))
}

impl Fp8Copy {
    /// Reserves the addresses, if these options ask for a copy.
    ///
    /// # Errors
    /// The errors of [`check_fp8`]; [`Error::InvalidValue`] with `strict` and on a chip without such products.
    pub(super) fn reserve(spec: &ModelSpec, options: &EngineOptions, tp_size: usize) -> Result<Option<Self>> {
        let EngineOptions { kind, device, .. } = *options;
        if options.quantization == RolloutQuantization::None {
            return Ok(None);
        }
        if options.strict {
            return refuse(
                "with strict = true a product adds up in one order for all numbers of rows, in FP8 it does not",
            );
        }
        check_fp8(spec, kind, device.is_cuda(), tp_size)?;
        check_chip(device)?;
        Ok(Some(Self { arena: Arena::reserve("engine_fp8_weights", fp8_weight_bytes(spec, tp_size), device)? }))
    }

    /// Maps the memory and rounds all matrices, on libtorch's current stream.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for blocks that are stored as NF4; [`Error::OutOfMemory`].
    pub(super) fn fill(&mut self, weights: &mut EngineWeights) -> Result<()> {
        if weights.quantized.is_some() {
            return refuse("quantization = nf4 dequantises one block after the other");
        }
        self.arena.map(self.arena.reserved_bytes())?;
        let (arena, mut at) = (&self.arena, 0);
        let mut section = |shape: &[i64], kind: Kind| -> Result<Tensor> {
            // SAFETY: sections do not overlap, as `at` grows; the blocks, which have the views, are dropped before the arena is unmapped or
            // not used after that: both are the engine's that is awake.
            let section = unsafe { arena.tensor(at, shape, kind) }?;
            at += (section.numel() * kind.elt_size_in_bytes()).next_multiple_of(ALIGNMENT);
            Ok(section)
        };
        let mut round = |weight: &Tensor| -> Result<Fp8Rows> {
            let size = weight.size();
            let values = section(&size, Kind::Float8e4m3fn)?;
            let rounded = Fp8Rows { values, scales: section(&size[..1], Kind::Float)? };
            fp8::round_rows(weight, &rounded)?;
            Ok(rounded)
        };
        weights.blocks.iter_mut().try_for_each(|block| block.round(&mut round))
    }

    /// Memory that filling has to map.
    pub(super) fn absent_bytes(&self) -> usize {
        self.arena.absent_bytes()
    }

    /// Gives the memory back. Never fails: the arena keeps an error for the next wake.
    pub(super) fn sleep(&mut self) {
        self.arena.unmap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copy_takes_half_of_bfloat16() {
        let spec = ModelSpec::preset("qwen2.5-7b").unwrap();
        let matrices: usize =
            (0..28).flat_map(|layer| spec.layers[layer].linears()).map(|it| it.rows() * it.columns).sum();
        let bytes = fp8_weight_bytes(&spec, 1);
        assert!((matrices..matrices + matrices / 500).contains(&bytes), "{bytes} for {matrices}");
        let halves = fp8_weight_bytes(&spec, 2);
        assert!(halves < bytes * 51 / 100, "{halves} of {bytes}");
        assert!(fp8_weight_bytes(&spec, 8) * 8 > bytes, "ranks share key/value heads");
    }
}
