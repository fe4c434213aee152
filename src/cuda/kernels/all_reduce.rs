//! The all-reduce of a tensor-parallel group, fused with the residual sum and the RMSNorm that follow, through memory that all ranks map.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::add_rms_norm::NormOptions;
use super::fp8::{ScaledRows, fp8_serves};
use super::launch::{Argument, address, invalid, kind_name, launch_early};
use super::rotation::block_argument;
use crate::cuda::PeerMemory;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::ALL_REDUCE;
pub(super) const NAMES: &[&str] = &[
    "all_reduce_read_bf16_2",
    "all_reduce_read_bf16_4",
    "all_reduce_read_bf16_8",
    "all_reduce_read_f32_2",
    "all_reduce_read_f32_4",
    "all_reduce_read_f32_8",
    "all_reduce_share_bf16_2",
    "all_reduce_share_bf16_4",
    "all_reduce_share_bf16_8",
    "all_reduce_share_f32_2",
    "all_reduce_share_f32_4",
    "all_reduce_share_f32_8",
];

// These must equal the constants in the .cu file; a test checks that.
const MOST_RANKS: usize = 8;
const MOST_BLOCKS: usize = 512;
const CONTROL_BYTES: usize = 4 * MOST_BLOCKS * (1 + 2 * MOST_RANKS);
/// Elements that one thread processes.
const PACK: usize = 8;
/// With more than two ranks, the largest number of bytes that each rank reads from its peers; above it the rows are divided among the ranks.
const MOST_READ_BYTES: usize = 1 << 20;
/// Alignment in bytes of the parts of the memory.
const ALIGNMENT: usize = 256;

/// How the ranks sum rows. Both methods give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllReduceMethod {
    /// After a barrier every rank reads all ranks' parts and sums all rows.
    Read,
    /// After a barrier every rank sums and normalizes every N-th row, and writes the normalized rows to all ranks. Only this rank's copy of x is
    /// updated for these rows.
    Share,
}

/// The form in which an all-reduce writes the normalized rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormedRows {
    /// In bf16.
    Plain,
    /// Quantized to this type (e4m3 or int8) with one scale per row, as in [`quantize_rows`](super::quantize_rows()).
    Rounded(Kind),
    /// In both forms.
    Both(Kind),
}

impl NormedRows {
    /// Rows quantized to `kind`, or unquantized ones; both if unquantized rows are read beside quantized ones.
    pub fn new(kind: Option<Kind>, is_read: bool) -> Self {
        match kind {
            None => Self::Plain,
            Some(kind) if is_read => Self::Both(kind),
            Some(kind) => Self::Rounded(kind),
        }
    }
}

/// Places in the shared memory for the all-reduce of up to T rows `[D]`: two for this rank's partial sums, which calls use alternately, and two for
/// the normalized rows, in bf16 and quantized.
#[derive(Debug, Clone)]
pub struct RowSums {
    memory: Arc<PeerMemory>,
    rows: usize,
    dim: usize,
}

impl RowSums {
    /// Whether `num_ranks` ranks can all-reduce rows [D = `dim`] of `kind` in this way.
    pub fn serve(kind: Kind, dim: usize, num_ranks: usize) -> bool {
        let is_row = dim.is_multiple_of(PACK) && (1..=1024 * PACK).contains(&dim);
        kind == Kind::BFloat16 && is_row && [2, 4, 8].contains(&num_ranks)
    }

    /// Bytes of memory that each rank needs for `rows` rows [D = `dim`].
    pub fn bytes(rows: usize, dim: usize) -> usize {
        let Places { scales, .. } = Places::new(rows, dim);
        scales + rows * size_of::<f32>()
    }

    /// Creates the places in `memory`, which must have at least [`RowSums::bytes`] and no other users.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] if the memory is too small, or the sizes are not supported.
    pub fn new(memory: Arc<PeerMemory>, rows: usize, dim: usize) -> Result<Self> {
        let needed = Self::bytes(rows, dim);
        if memory.bytes() < needed || !Self::serve(Kind::BFloat16, dim, memory.num_ranks()) {
            let got = format!("{} bytes of {} ranks, rows of {dim}", memory.bytes(), memory.num_ranks());
            return Err(invalid(
                "RowSums::new",
                format!("at least {needed} bytes shared by 2, 4 or 8 ranks, and a supported row size"),
                got,
            ));
        }
        Ok(Self { memory, rows, dim })
    }

    /// The fastest method for a step of `rows` rows, as measured on H200 GPUs.
    pub fn way(&self, rows: usize) -> AllReduceMethod {
        let from_peers = (self.memory.num_ranks() - 1) * rows * self.dim * 2; // bytes that each rank reads
        let is_few = self.memory.num_ranks() == 2 || from_peers <= MOST_READ_BYTES;
        if is_few { AllReduceMethod::Read } else { AllReduceMethod::Share }
    }

    /// Maximum number of rows per call.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The memory that all ranks map.
    pub fn memory(&self) -> &PeerMemory {
        &self.memory
    }

    /// The place for this rank's partial sums in a call; calls alternate between `turn` 0 and 1. [T, D] bf16
    ///
    /// # Errors
    /// Only errors of libtorch that cannot be handled.
    pub fn part(&self, turn: usize) -> Result<Tensor> {
        self.matrix(self.places().parts[turn])
    }

    /// The normalized rows after a call. [T, D] bf16
    ///
    /// # Errors
    /// The errors of [`RowSums::part`].
    pub fn normed(&self) -> Result<Tensor> {
        self.matrix(self.places().normed)
    }

    /// Whether `x` starts at the same address as [`RowSums::normed`].
    pub fn are_normed(&self, x: &Tensor) -> bool {
        x.data_ptr() as usize == self.memory.address() + self.places().normed
    }

    /// The normalized rows after a call that quantized them to `kind`. [T, D]
    ///
    /// # Errors
    /// The errors of [`RowSums::part`].
    pub fn rounded(&self, kind: Kind) -> Result<ScaledRows> {
        let places = self.places();
        let values = self.memory.matrix(places.values, (self.rows, self.dim), kind)?;
        let scales = self.memory.matrix(places.scales, (self.rows, 1), Kind::Float)?.f_view([-1])?;
        Ok(ScaledRows { values, scales })
    }

    /// Adds the ranks' parts of `turn` to x (f32 or bf16), in rank order in float32, rounded once. Writes the normalized rows x / sqrt(mean(x^2) +
    /// eps) * weight, or (1 + weight). `turn` must differ from that of the previous call. After [`AllReduceMethod::Share`] only the rows i of x with
    /// i % N = rank are valid, so later calls must use the same method. Allocates nothing. Collective: all ranks must make the same call.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for tensors that do not fit, too many rows, or a row length that cannot be quantized;
    /// [`crate::Error::Cuda`].
    pub fn add_rms_norm(
        &self,
        way: AllReduceMethod,
        turn: usize,
        x: &mut Tensor,
        weight: &Tensor,
        norm: NormOptions,
        leaves: NormedRows,
    ) -> Result<()> {
        const OP: &str = "RowSums::add_rms_norm";
        let (memory, places) = (&*self.memory, self.places());
        let (gpu, num_ranks, rows) = (memory.ordinal(), memory.num_ranks(), x.numel() / self.dim);
        if rows > self.rows {
            return Err(invalid(OP, format!("at most {} rows", self.rows), rows));
        }
        if leaves != NormedRows::Plain && !fp8_serves([2 * PACK, self.dim]) {
            return Err(invalid(OP, "rows of a multiple of 16 elements, as the sums are rounded to 8 bits", self.dim));
        }
        let place = |is_wanted, place: usize| Argument::Count(if is_wanted { place as i64 } else { -1 });
        let mut ranks = [std::ptr::null_mut::<c_void>(); MOST_RANKS];
        ranks.iter_mut().zip(memory.addresses()).for_each(|(rank, &address)| *rank = address as *mut c_void);
        let packs = self.dim / PACK;
        let [eps, centre] = norm.arguments();
        let arguments = [
            Argument::Addresses(ranks),
            Argument::Count(memory.rank() as i64),
            Argument::Count(places.parts[turn] as i64),
            place(!matches!(leaves, NormedRows::Rounded(_)), places.normed),
            place(leaves != NormedRows::Plain, places.values),
            place(leaves != NormedRows::Plain, places.scales),
            Argument::Address(memory.abort_address()),
            address(OP, x, x.kind(), rows * self.dim, gpu)?,
            address(OP, weight, Kind::BFloat16, self.dim, gpu)?,
            Argument::Count(rows as i64),
            Argument::Count(packs as i64),
            eps,
            centre,
            match leaves {
                NormedRows::Plain => Argument::Count(0),
                NormedRows::Rounded(kind) | NormedRows::Both(kind) => block_argument(kind, self.dim),
            },
        ];
        let kind = kind_name(OP, x)?;
        let (name, blocks) = match way {
            AllReduceMethod::Read => ("read", rows),
            AllReduceMethod::Share => ("share", rows.div_ceil(num_ranks)),
        };
        let shape = (blocks.min(MOST_BLOCKS) as u32, packs.next_multiple_of(32) as u32, 0);
        // SAFETY: the kernel's parameters in order; every rank's memory has the same layout, and is never freed.
        unsafe { launch_early(SOURCE, &format!("all_reduce_{name}_{kind}_{num_ranks}"), gpu, shape, &arguments) }
    }

    fn matrix(&self, place: usize) -> Result<Tensor> {
        self.memory.matrix(place, (self.rows, self.dim), Kind::BFloat16)
    }

    fn places(&self) -> Places {
        Places::new(self.rows, self.dim)
    }
}

/// Byte offsets in every rank's memory.
struct Places {
    parts: [usize; 2],
    normed: usize,
    values: usize,
    scales: usize,
}

impl Places {
    fn new(rows: usize, dim: usize) -> Self {
        let (first, matrix) = (CONTROL_BYTES.next_multiple_of(ALIGNMENT), (rows * dim * 2).next_multiple_of(ALIGNMENT));
        let values = first + 3 * matrix;
        let scales = values + (rows * dim).next_multiple_of(ALIGNMENT);
        Self { parts: [first, first + matrix], normed: first + 2 * matrix, values, scales }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("MOST_RANKS", MOST_RANKS), ("MOST_BLOCKS", MOST_BLOCKS)]);
        assert!(SOURCE.text.contains("constexpr int CONTROL_BYTES = 4 * MOST_BLOCKS * (1 + 2 * MOST_RANKS);"));
    }
}
