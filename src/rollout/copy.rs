//! The engine's quantized copy of its blocks' weight matrices. It is made again at every wake, because the weights change in between. The policy
//! keeps its own weights. Norms, routers, the embedding and the head are not copied.
#![allow(unsafe_code)]

use tch::Tensor;

use super::options::EngineOptions;
use super::weights::EngineWeights;
use crate::error::Result;
use crate::memory::Arena;
use crate::model::{BlockParams, Format, LinearSpec, ModelSpec, Section, Use};

/// Alignment of each section of the copy, in bytes.
const ALIGNMENT: usize = 256;
/// Maximum number of sections of a matrix: values and scales, of two pieces where ranks share a key/value head.
const SECTIONS: usize = 4;

/// Memory of the quantized weight copy, mapped while the engine is awake.
#[derive(Debug)]
pub(super) struct WeightCopy {
    format: &'static dyn Format,
    of: Use,
    arena: Arena,
}

/// Bytes of one rank's weight copy in `format`; 0 if GEMMs read all weights unquantized.
pub fn weight_copy_bytes(format: &dyn Format, spec: &ModelSpec, tp_size: usize) -> usize {
    let section = |(shape, kind): Section| shape.iter().product::<i64>() as usize * kind.elt_size_in_bytes();
    let bytes =
        |linear: LinearSpec| format.sections(&linear.shape()).map(section).iter().sum::<usize>() + SECTIONS * ALIGNMENT;
    let linears = spec.layers.iter().flat_map(|block| block.tp_slice(tp_size).linears());
    linears.filter(|linear| format.copies(linear.matrix, linear.experts.is_some())).map(bytes).sum()
}

impl WeightCopy {
    /// Reserves addresses for the copy if these options request one.
    ///
    /// # Errors
    /// [`Error::InvalidValue`](crate::Error::InvalidValue) for models that the format does not support and for GPUs without GEMMs in it; the errors
    /// of [`Arena::reserve`].
    pub(super) fn reserve(spec: &ModelSpec, options: &EngineOptions, tp_size: usize) -> Result<Option<Self>> {
        let device = options.device;
        let (format, of) = (options.quantization.format(), Use::Engine { tp_size });
        format.check(of, spec, device.is_cuda())?;
        format.check_device(of, device)?;
        let bytes = weight_copy_bytes(format, spec, tp_size);
        if bytes == 0 {
            return Ok(None);
        }
        Ok(Some(Self { format, of, arena: Arena::reserve("engine_weight_copy", bytes, device)? }))
    }

    /// Maps the memory and quantizes all matrices into it, on libtorch's current stream.
    ///
    /// # Errors
    /// [`Error::InvalidValue`](crate::Error::InvalidValue) if the blocks are already stored in a quantized format;
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub(super) fn fill(&mut self, weights: &mut EngineWeights) -> Result<()> {
        if weights.stored.is_some() {
            return self.format.refuse(self.of, "the base is stored with quantization = nf4, which the engine dequantizes one block at a time; a quantized copy needs all blocks");
        }
        let adapts_experts =
            |block: &BlockParams| block.linears().any(|(_, linear)| linear.lora.is_some() && linear.is_of_experts());
        if weights.blocks.iter().any(adapts_experts) {
            self.format.check_expert_adapters(self.of)?;
        }
        self.arena.map(self.arena.reserved_bytes())?;
        let (arena, mut at) = (&self.arena, 0);
        let mut room = |(shape, kind): Section| -> Result<Tensor> {
            // SAFETY: sections do not overlap, as `at` grows; the blocks, which have the views, are dropped before the arena is unmapped or
            // not used after that: both are the engine's that is awake.
            let section = unsafe { arena.tensor(at, &shape, kind) }?;
            at += (section.numel() * kind.elt_size_in_bytes()).next_multiple_of(ALIGNMENT);
            Ok(section)
        };
        weights.blocks.iter_mut().try_for_each(|block| block.prepare(self.format, &mut room))
    }

    /// Bytes that [`WeightCopy::fill`] has to map.
    pub(super) fn absent_bytes(&self) -> usize {
        self.arena.absent_bytes()
    }

    /// Unmaps the memory. Never fails: the arena keeps an error for the next wake.
    pub(super) fn sleep(&mut self) {
        self.arena.unmap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RolloutQuantization;
    use crate::model::Fp8;

    #[test]
    fn an_fp8_copy_of_the_weights_takes_half_of_bfloat16() {
        let spec = ModelSpec::preset("qwen2.5-7b").unwrap();
        let matrices: usize =
            (0..28).flat_map(|layer| spec.layers[layer].linears()).map(|it| it.rows() * it.columns).sum();
        let bytes = weight_copy_bytes(&Fp8::ROWS, &spec, 1);
        assert!((matrices..matrices + matrices / 500).contains(&bytes), "{bytes} for {matrices}");
        let halves = weight_copy_bytes(&Fp8::ROWS, &spec, 2);
        assert!(halves < bytes * 51 / 100, "{halves} of {bytes}");
        assert!(weight_copy_bytes(&Fp8::ROWS, &spec, 8) * 8 > bytes, "ranks share key/value heads");
    }

    #[test]
    fn an_mxfp4_copy_has_the_experts_in_17_bits_for_four_weights() {
        let spec = ModelSpec::preset("gpt-oss-20b").unwrap();
        let linears = spec.layers.iter().flat_map(|block| block.linears());
        let weights: usize = linears.map(|it| it.experts.unwrap_or(0) * it.rows() * it.columns).sum();
        let format = RolloutQuantization::Mxfp4.format();
        let bytes = weight_copy_bytes(format, &spec, 1);
        assert!((weights * 17 / 32..weights * 17 / 32 + (1 << 20)).contains(&bytes), "{bytes} for {weights}");
        assert_eq!(weight_copy_bytes(RolloutQuantization::None.format(), &spec, 1), 0);
        assert_eq!(weight_copy_bytes(format, &ModelSpec::preset("qwen2.5-7b").unwrap(), 1), 0);
    }
}
