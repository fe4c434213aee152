//! Tile sizes of the expert kernels.

use tch::Kind;

use crate::cuda::capability::Capability;
use crate::cuda::context::Context;
use crate::error::Result;

/// A tile configuration of the expert kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertTile {
    /// Suffix of the kernels' names.
    pub(super) name: &'static str,
    /// Rows of one expert that a block processes at once.
    pub rows: usize,
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
    /// Blocks per multiprocessor.
    pub(super) per_processor: usize,
}

/// Extra bytes of shared memory that align the pipeline stages to 128 bytes, or to 1024 for e4m3, which wgmma reads.
pub(super) const SLACK: u32 = 128;
pub(super) const SCALED_SLACK: u32 = 1024;

const fn tile(name: &'static str, rows: usize, threads: u32, stages_kib: u32, per_processor: usize) -> ExpertTile {
    let shared_bytes = if stages_kib == 0 { 0 } else { (stages_kib << 10) + SLACK };
    ExpertTile { name, rows, threads, shared_bytes, per_processor }
}

/// The kernels of experts.cu, in all configurations.
pub(super) const NAMES: &[&str] = &[
    "experts_gate_up_few",
    "experts_down_few",
    "experts_gate_up_adapted_few",
    "experts_down_adapted_few",
    "experts_gate_up_clamped_few",
    "experts_down_biased_few",
    "experts_low_tokens_few",
    "experts_low_rows_few",
    "experts_gate_up_some",
    "experts_down_some",
    "experts_gate_up_adapted_some",
    "experts_down_adapted_some",
    "experts_gate_up_clamped_some",
    "experts_down_biased_some",
    "experts_low_tokens_some",
    "experts_low_rows_some",
    "experts_gate_up_more",
    "experts_down_more",
    "experts_gate_up_adapted_more",
    "experts_down_adapted_more",
    "experts_gate_up_clamped_more",
    "experts_down_biased_more",
    "experts_low_tokens_more",
    "experts_low_rows_more",
    "experts_gate_up_many",
    "experts_down_many",
    "experts_gate_up_adapted_many",
    "experts_down_adapted_many",
    "experts_gate_up_clamped_many",
    "experts_down_biased_many",
    "experts_low_tokens_many",
    "experts_low_rows_many",
    "experts_gate_up_small",
    "experts_down_small",
    "experts_gate_up_adapted_small",
    "experts_down_adapted_small",
    "experts_gate_up_clamped_small",
    "experts_down_biased_small",
    "experts_low_tokens_small",
    "experts_low_rows_small",
    "experts_gate_up_fp8_few",
    "experts_down_fp8_few",
    "experts_gate_up_adapted_fp8_few",
    "experts_down_adapted_fp8_few",
    "experts_gate_up_fp8_some",
    "experts_down_fp8_some",
    "experts_gate_up_adapted_fp8_some",
    "experts_down_adapted_fp8_some",
    "experts_gate_up_fp8_more",
    "experts_down_fp8_more",
    "experts_gate_up_adapted_fp8_more",
    "experts_down_adapted_fp8_more",
    "experts_gate_up_fp8_many",
    "experts_down_fp8_many",
    "experts_gate_up_adapted_fp8_many",
    "experts_down_adapted_fp8_many",
    "experts_gate_up_f32",
    "experts_down_f32",
    "experts_gate_up_adapted_f32",
    "experts_down_adapted_f32",
    "experts_gate_up_clamped_f32",
    "experts_down_biased_f32",
    "experts_low_tokens_f32",
    "experts_low_rows_f32",
];

/// For few, some, more and many rows per expert; for more than a few rows on chips with little shared memory; and for float32.
pub(super) const FEW: ExpertTile = tile("few", 32, 128, 72, 3);
const SOME: ExpertTile = tile("some", 32, 128, 100, 2);
const MORE: ExpertTile = tile("more", 64, 128, 96, 2);
const MANY: ExpertTile = tile("many", 128, 256, 192, 1);
const SMALL: ExpertTile = tile("small", 64, 128, 64, 3);
pub(super) const FLOAT: ExpertTile = tile("f32", 64, 128, 0, 4);
/// GPUs with enough shared memory per block for [`SOME`] and [`MANY`].
const LARGE_SHARED: [Capability; 2] = [Capability::HOPPER, Capability::new(10, 0)];
/// Average rows per expert up to which each configuration is used: nearly all experts then have one tile, so that their weights are read once.
const FEW_ROWS: usize = 20;
const MORE_ROWS: usize = 64;

impl ExpertTile {
    /// All bfloat16 configurations, for benchmarks and tests.
    pub const ALL: [Self; 5] = [FEW, SOME, MORE, MANY, SMALL];
    /// All e4m3 configurations.
    pub const SCALED: [Self; 4] = [FEW, SOME, MORE, MANY];

    /// The configuration for `tokens` tokens with `choices` of `experts` each, for weights of `kind` on a GPU.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn of(tokens: usize, choices: usize, experts: usize, kind: Kind, gpu: usize) -> Result<Self> {
        if kind != Kind::BFloat16 {
            return Ok(FLOAT);
        }
        let rows = tokens * choices / experts;
        let is_large = LARGE_SHARED.contains(&Context::retain(gpu)?.compute_capability()?);
        Ok(match (rows <= FEW_ROWS, rows <= MORE_ROWS) {
            (true, _) => FEW,
            _ if !is_large => SMALL,
            (_, true) => MORE,
            _ => MANY,
        })
    }

    /// The configuration for the down GEMM that follows, with the same tiles of rows; `width` is the number of elements in a row of an expert's down
    /// matrix.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn for_down(self, tokens: usize, choices: usize, experts: usize, width: usize, gpu: usize) -> Result<Self> {
        let is_large = LARGE_SHARED.contains(&Context::retain(gpu)?.compute_capability()?);
        Ok(if is_large { self.narrow(tokens * choices / experts, width) } else { self })
    }

    /// Replaces [`FEW`] by [`SOME`] for narrow slices. [`FEW`] copies 128 columns at once, half of which may be outside of a narrow slice: for 192
    /// columns a quarter of all copied data. [`SOME`] copies 64 columns at once and gives the same bits.
    fn narrow(self, rows: usize, width: usize) -> Self {
        let is_measured = rows > 0 && width > 128;
        if self == FEW && is_measured && width.next_multiple_of(64) < width.next_multiple_of(128) { SOME } else { self }
    }

    /// The configuration's name, for reports.
    pub fn name(self) -> &'static str {
        self.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_slices_use_another_expert_tile() {
        assert_eq!(FEW.rows, SOME.rows, "both read what one router has sorted");
        for rows in [1, 4, 16] {
            assert_eq!(FEW.narrow(rows, 192), SOME); // Qwen3-30B-A3B: 768 over four ranks, 16 to 256 sequences
        }
        for (rows, width) in [(16, 768), (16, 384), (16, 96), (16, 64), (0, 192)] {
            assert_eq!(FEW.narrow(rows, width), FEW, "{rows} rows of {width}");
        }
        for tile in [SOME, MORE, MANY, SMALL, FLOAT] {
            assert_eq!(tile.narrow(16, 192), tile);
        }
    }
}
