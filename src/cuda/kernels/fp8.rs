//! Quantizes rows to e4m3 or int8 with one scale each, on its own or fused with the operation that computes the rows. The type of the destination
//! says which.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::add_rms_norm::NormOptions;
use super::launch::{
    Argument, address, address_or_null, code_name, invalid, is_aligned, kinds_name, launch_early, ordinal, row_len,
    strided,
};
use super::rotation::block_argument;
use super::{Activation, add_rms_norm, rms_norm, swiglu};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::FP8_ROWS;
pub(super) const NAMES: &[&str] = &["fp8_rows", "fp8_rows_long", "int8_rows"];

/// Elements per memory access, and how many accesses one thread makes per row.
const PACK: usize = 8;
const MOST: usize = 4;
const MOST_LONG: usize = 8;
/// Longest rows in an engine's GEMMs and in [`silu_mul_8bit`].
const MOST_COLUMNS: usize = 1024 * MOST * PACK;
/// Longest rows in [`quantize_rows`] and in training.
const MOST_LONG_COLUMNS: usize = 1024 * MOST_LONG * PACK;
/// Most threads per row of SwiGLU: with few rows, with many (several per multiprocessor), and in its backward.
const FEW_ROWS_THREADS: usize = 640;
const MANY_ROWS_THREADS: usize = 320;
const BACKWARD_THREADS: usize = 512;
/// Up to this number rows count as few.
const FEW_ROWS: usize = 1024;
/// Row lengths of GEMM operands must be multiples of this: 16 bytes.
const COLUMNS: usize = 16;

/// Rows quantized to e4m3, or rotated by [`int8_row_block`](super::int8_row_block) and quantized to int8. The largest absolute value of a row is 448 or 127 times its scale.
#[derive(Debug)]
pub struct ScaledRows {
    /// [R, K] e4m3 or int8, contiguous
    pub values: Tensor,
    /// One scale per row. `[R]` f32
    pub scales: Tensor,
}

impl ScaledRows {
    /// Creates another handle to the same memory.
    pub fn shallow_clone(&self) -> Self {
        Self { values: self.values.shallow_clone(), scales: self.scales.shallow_clone() }
    }
}

/// Whether e4m3 GEMMs support a matrix [N, K] on a GPU.
pub fn fp8_serves([rows, columns]: [usize; 2]) -> bool {
    rows.is_multiple_of(COLUMNS) && columns.is_multiple_of(COLUMNS) && columns <= MOST_COLUMNS
}

/// Whether FP8 training supports a matrix [N, K] on a GPU. Training quantizes its rows and its columns, and the operands of its gradient.
pub fn fp8_trains(matrix: [usize; 2]) -> bool {
    matrix.iter().all(|side| side.is_multiple_of(COLUMNS) && *side <= MOST_LONG_COLUMNS)
}

/// Quantizes each row of x to the type of `to` (round to nearest), scaled by its largest absolute value; for int8 it is rotated first
/// ([`ScaledRows`]). e4m3 needs sm_89 or later.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn quantize_rows(
    x: &Tensor,      // [R, K] bf16, each row contiguous
    to: &ScaledRows, // [R, K]
) -> Result<()> {
    round(x, to, false)
}

/// Computes [`quantize_rows`] in an engine step. Since no kernel of a step writes weights, the next kernel may start, and read weights, before this
/// kernel's inputs are ready.
///
/// # Errors
/// The errors of [`quantize_rows`].
pub fn quantize_rows_of_step(
    x: &Tensor,      // [R, K] bf16, each row contiguous
    to: &ScaledRows, // [R, K]
) -> Result<()> {
    round(x, to, true)
}

fn round(x: &Tensor, to: &ScaledRows, early: bool) -> Result<()> {
    const OP: &str = "quantize_rows";
    let code = code_name(OP, &to.values)?;
    let (gpu, size, strides) = (ordinal(OP, x)?, x.size(), x.stride());
    let (&[rows, columns], &[stride, 1]) = (&size[..], &strides[..]) else {
        return Err(invalid(OP, "a matrix with contiguous rows", (size, strides)));
    };
    let [values, scales] = outputs(OP, to, (rows as usize, columns as usize), MOST_LONG_COLUMNS, gpu)?;
    if stride % PACK as i64 != 0 || !is_aligned(x) {
        return Err(invalid(OP, "rows that begin at multiples of 16 bytes", strides));
    }
    let from = strided(OP, x, Kind::BFloat16, &[rows, columns], gpu)?;
    let counts = [columns, stride, i64::from(early)].map(Argument::Count);
    let block = (to.values.kind() == Kind::Int8).then(|| block_argument(Kind::Int8, columns as usize));
    let arguments: Vec<Argument> = [from, values, scales].into_iter().chain(counts).chain(block).collect();
    let columns = columns as usize;
    let (suffix, most) = if columns <= MOST_COLUMNS { ("", MOST) } else { ("_long", MOST_LONG) };
    let shape = (rows as u32, threads(columns, most), 0);
    // SAFETY: the kernel's parameters in order; one block a row, all of whose packs have a thread.
    unsafe { launch_early(SOURCE, &format!("{code}_rows{suffix}"), gpu, shape, &arguments) }
}

/// Computes [`add_rms_norm`](super::add_rms_norm()), rounds the result to bfloat16, and quantizes it like [`quantize_rows`]; also writes it to y if given.
/// The next kernel may start early, as with [`quantize_rows_of_step`]. The weight is read while the preceding operation runs, which must not write it.
///
/// # Errors
/// The errors of [`quantize_rows`].
pub fn add_rms_norm_8bit(
    x: &mut Tensor,         // [T, D] f32 or bf16
    delta: Option<&Tensor>, // [T, D] bf16
    weight: &Tensor,        // [D] bf16
    y: Option<&mut Tensor>, // [T, D] bf16
    to: &ScaledRows,        // [T, D]
    norm: NormOptions,
) -> Result<()> {
    const OP: &str = "add_rms_norm_8bit";
    let (gpu, numel, dim) = (ordinal(OP, x)?, x.numel(), row_len(OP, x)?);
    let y = y.as_deref();
    let packed = |tensor: &Tensor| is_aligned(tensor);
    if dim > add_rms_norm::most_columns(PACK) || ![Some(&*x), delta, Some(weight), y].into_iter().flatten().all(packed)
    {
        return Err(invalid(OP, "shorter rows that begin at multiples of 16 bytes", x.size()));
    }
    let delta = address_or_null(OP, delta, Kind::BFloat16, numel, gpu)?;
    let [x_address, others @ ..] = norm_arguments(OP, (x, weight, y), to, norm, gpu)?;
    let arguments = [&[x_address, delta][..], &others].concat();
    let name = format!("add_rms_norm_{}_{}_x{PACK}", code_name(OP, &to.values)?, kinds_name(OP, x, weight)?);
    let threads = threads(dim, 1).min(1024); // as many as in `add_rms_norm`, so that sums of squares have the same bits
    // SAFETY: the kernel's parameters in order; one block a row, all of whose packs have a thread.
    unsafe { launch_early(add_rms_norm::SOURCE, &name, gpu, ((numel / dim) as u32, threads, 0), &arguments) }
}

/// Computes [`rms_norm_forward`](super::rms_norm_forward()), rounds the result to bfloat16, and quantizes it to e4m3 like [`quantize_rows`]; also writes it
/// to y if given. Use it for many rows, and [`add_rms_norm_8bit`] for few.
///
/// # Errors
/// The errors of [`quantize_rows`].
pub fn rms_norm_8bit(
    x: &Tensor,             // [T, D] f32 or bf16
    weight: &Tensor,        // [D] bf16
    y: Option<&mut Tensor>, // [T, D] bf16
    to: &ScaledRows,        // [T, D]
    norm: NormOptions,
) -> Result<()> {
    const OP: &str = "rms_norm_forward_fp8";
    let (gpu, numel, dim, y) = (ordinal(OP, x)?, x.numel(), row_len(OP, x)?, y.as_deref());
    if to.values.kind() != Kind::Float8e4m3fn {
        return Err(invalid(OP, "a destination in e4m3", to.values.kind()));
    }
    if !fp8_norm_serves(x, weight) || !y.is_none_or(is_aligned) {
        return Err(invalid(
            OP,
            "shorter rows of a multiple of 16 elements that begin at multiples of 16 bytes",
            x.size(),
        ));
    }
    let arguments = norm_arguments(OP, (x, weight, y), to, norm, gpu)?;
    let name = format!("{OP}_{}", kinds_name(OP, x, weight)?);
    // SAFETY: the kernel's parameters in order; one block a row, all of whose packs have a thread.
    unsafe { launch_early(rms_norm::SOURCE, &name, gpu, ((numel / dim) as u32, threads(dim, MOST), 0), &arguments) }
}

/// Computes [`silu_mul`](super::silu_mul()), rounds the result to bfloat16, and quantizes it like [`quantize_rows`]; also writes it to y if given.
///
/// # Errors
/// The errors of [`quantize_rows`].
pub fn silu_mul_8bit(
    activation: Activation,
    gate_up: &Tensor,       // [T, 2 F] bf16: g0 u0 g1 u1 ..
    y: Option<&mut Tensor>, // [T, F] bf16
    to: &ScaledRows,        // [T, F]
) -> Result<()> {
    const OP: &str = "silu_mul_8bit";
    let (gpu, columns) = (ordinal(OP, gate_up)?, row_len(OP, gate_up)? / 2);
    let (rows, y) = (gate_up.numel() / (2 * columns).max(1), y.as_deref());
    if ![Some(gate_up), y].into_iter().flatten().all(is_aligned) {
        return Err(invalid(OP, "rows that begin at multiples of 16 bytes", gate_up.size()));
    }
    let [values, scales] = outputs(OP, to, (rows, columns), MOST_COLUMNS, gpu)?;
    let arguments = [
        address(OP, gate_up, Kind::BFloat16, 2 * rows * columns, gpu)?,
        address_or_null(OP, y, Kind::BFloat16, rows * columns, gpu)?,
        values,
        scales,
        Argument::Count(columns as i64),
        block_argument(to.values.kind(), columns),
    ];
    let shape = forward_shape([rows, columns], to.values.kind());
    let name = format!("{}_forward_{}", activation.unit(), code_name(OP, &to.values)?);
    // SAFETY: the kernel's parameters in order; one block a row, which fits its shared memory.
    unsafe { launch_early(swiglu::SOURCE, &name, gpu, shape, &arguments) }
}

/// Computes [`swiglu_backward`](super::swiglu_backward()), with gradients in bfloat16 and quantized like [`quantize_rows`]. Returns d_gate_up in the
/// memory of `gate_up`, and the forward's y. A row is kept in shared memory until its largest value is known.
///
/// # Errors
/// The errors of [`quantize_rows`].
pub fn swiglu_backward_fp8(
    activation: Activation,
    dy: &Tensor,     // [T, F] bf16
    gate_up: Tensor, // [T, 2 F] bf16: g0 u0 g1 u1 ..
    to: &ScaledRows, // [T, 2 F]
) -> Result<[Tensor; 2]> {
    const OP: &str = "swiglu_backward_fp8";
    let (gpu, columns) = (ordinal(OP, &gate_up)?, row_len(OP, dy)?);
    let (rows, y) = (dy.numel() / columns, dy.f_empty_like()?); // [T, F]
    let is_e4m3 = to.values.kind() == Kind::Float8e4m3fn;
    if !is_e4m3 || !fp8_swiglu_serves(&gate_up) || ![dy, &gate_up, &y].into_iter().all(is_aligned) {
        return Err(invalid(
            OP,
            format!("rows of a multiple of {COLUMNS} elements that begin at multiples of 16 bytes, for e4m3"),
            gate_up.size(),
        ));
    }
    let [values, scales] = outputs(OP, to, (rows, 2 * columns), MOST_LONG_COLUMNS, gpu)?;
    let pairs = address(OP, &gate_up, Kind::BFloat16, 2 * rows * columns, gpu)?;
    let half = |tensor: &Tensor| address(OP, tensor, Kind::BFloat16, rows * columns, gpu);
    let arguments = [half(dy)?, pairs, pairs, half(&y)?, values, scales, Argument::Count(columns as i64)];
    let shape = backward_shape([rows, columns]);
    // SAFETY: the kernel's parameters in order; one block a row, which fits its shared memory.
    unsafe { launch_early(swiglu::SOURCE, &format!("{}_backward_fp8", activation.unit()), gpu, shape, &arguments)? };
    Ok([gate_up, y])
}

/// Whether [`silu_mul_8bit`] and [`swiglu_backward_fp8`] support such pairs [.., 2 F].
pub fn fp8_swiglu_serves(gate_up: &Tensor) -> bool {
    let pairs = gate_up.size().last().map_or(0, |&pairs| pairs as usize);
    rounds(gate_up) && fp8_trains([pairs, pairs / 2]) && pairs / 2 <= MOST_COLUMNS
}

/// Whether [`add_rms_norm_8bit`] supports rows [.., D] with such a weight.
pub fn fp8_norm_serves(x: &Tensor, weight: &Tensor) -> bool {
    let dim = weight.numel();
    let fits = fp8_serves([COLUMNS, dim]) && dim <= add_rms_norm::most_columns(PACK);
    super::launch::serve(x) && rounds(weight) && fits && is_aligned(x) && is_aligned(weight)
}

/// Arguments of both norm kernels, in order: x, weight, y, values, scales, D, epsilon, the number added to the weight, and the rotation.
fn norm_arguments(
    op: &'static str,
    (x, weight, y): (&Tensor, &Tensor, Option<&Tensor>), // [T, D], [D], [T, D]
    to: &ScaledRows,                                     // [T, D]
    norm: NormOptions,
    gpu: usize,
) -> Result<[Argument; 9]> {
    let (numel, dim) = (x.numel(), row_len(op, x)?);
    let [values, scales] = outputs(op, to, (numel / dim, dim), MOST_COLUMNS, gpu)?;
    let [eps, centre] = norm.arguments();
    Ok([
        address(op, x, x.kind(), numel, gpu)?,
        address(op, weight, Kind::BFloat16, dim, gpu)?,
        address_or_null(op, y, Kind::BFloat16, numel, gpu)?,
        values,
        scales,
        Argument::Count(dim as i64),
        eps,
        centre,
        block_argument(to.values.kind(), dim),
    ])
}

/// Whether kernels can quantize the tensor: it must be bfloat16 and on a GPU.
fn rounds(tensor: &Tensor) -> bool {
    tensor.device().is_cuda() && tensor.kind() == Kind::BFloat16
}

/// The addresses of the values and scales of quantized rows, after checking their sizes.
fn outputs(
    op: &'static str,
    to: &ScaledRows,
    (rows, columns): (usize, usize),
    most: usize,
    gpu: usize,
) -> Result<[Argument; 2]> {
    let kind = to.values.kind();
    let most = if kind == Kind::Int8 { most.min(MOST_COLUMNS) } else { most };
    if !columns.is_multiple_of(COLUMNS) || columns > most || !is_aligned(&to.values) {
        return Err(invalid(op, format!("rows of a multiple of {COLUMNS} elements, at most {most}"), columns));
    }
    Ok([address(op, &to.values, kind, rows * columns, gpu)?, address(op, &to.scales, Kind::Float, rows, gpu)?])
}

/// Number of threads for a row, in whole warps, with at most `most` memory accesses each.
fn threads(columns: usize, most: usize) -> u32 {
    (columns / PACK).div_ceil(most).next_multiple_of(32) as u32
}

/// Number of threads for a row, in whole warps and at most `most`, such that their numbers of memory accesses are nearly equal.
fn even_threads(columns: usize, most: usize) -> u32 {
    let packs = columns / PACK;
    packs.div_ceil(packs.div_ceil(most).max(1)).next_multiple_of(32) as u32
}

/// Number of blocks, threads and bytes of shared memory of [`silu_mul_8bit`].
fn forward_shape([rows, columns]: [usize; 2], kind: Kind) -> (u32, u32, u32) {
    let most = if rows <= FEW_ROWS { FEW_ROWS_THREADS } else { MANY_ROWS_THREADS };
    let bytes = if kind == Kind::Int8 { 2 * row_bytes(columns) } else { row_bytes(columns) }; // rotated rows wait in float32
    (rows as u32, even_threads(columns, most), bytes)
}

/// Number of blocks, threads and bytes of shared memory of [`swiglu_backward_fp8`].
fn backward_shape([rows, columns]: [usize; 2]) -> (u32, u32, u32) {
    (rows as u32, even_threads(columns, BACKWARD_THREADS), row_bytes(2 * columns))
}

/// Bytes of shared memory for a row in bfloat16.
fn row_bytes(columns: usize) -> u32 {
    (columns * Kind::BFloat16.elt_size_in_bytes()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::capability::Capability;
    use crate::cuda::image::{HOPPER_SHARED_BYTES, limits};
    use crate::cuda::kernel::must_ask;
    use crate::cuda::kernels::launch::assert_declared;

    /// Every supported row length is launched with threads and shared memory within the kernel's limits. A row of Qwen3-8B's or Qwen3.5-9B's
    /// gradients needs 48 KiB, which is all a launch gets by default, and the kernel has static shared memory too: such a launch must request more.
    #[test]
    fn the_longest_row_fits_into_a_thread_block() {
        tch::set_num_threads(1); // links libtorch; NVRTC is found beside it
        let limits_of = |source| limits(&nvrtc::cubin(source, Capability::HOPPER).unwrap());
        let (swiglu, rounding) = (limits_of(swiglu::SOURCE), limits_of(SOURCE));
        let kernels = ["swiglu_forward_fp8", "swiglu_forward_int8", "swiglu_backward_fp8"];
        let [forward, of_int8, backward] = kernels.map(|name| swiglu[name]);
        let [short, long, short_int8] = NAMES else { panic!("{NAMES:?}") };
        for columns in (COLUMNS..=MOST_COLUMNS).step_by(COLUMNS) {
            let shape = |rows, kind| forward_shape([rows, columns], kind);
            let of_forward = [1, FEW_ROWS + 1].map(|rows| (shape(rows, Kind::Float8e4m3fn), forward));
            let of_others = [(shape(1, Kind::Int8), of_int8), (backward_shape([1, columns]), backward)];
            for ((_, block, shared_bytes), kernel) in of_forward.into_iter().chain(of_others) {
                assert!((1..=kernel.threads).contains(&(block as usize)), "{columns}: {block} of {kernel:?}");
                let bytes = shared_bytes as usize + kernel.static_bytes;
                assert!(bytes <= HOPPER_SHARED_BYTES, "{columns}: {bytes}");
            }
            assert!([short, short_int8].iter().all(|&name| threads(columns, MOST) as usize <= rounding[*name].threads));
            assert!(threads(2 * columns, MOST_LONG) as usize <= rounding[*long].threads);
        }
        let shared_bytes = backward_shape([16_384, 12_288]).2;
        assert_eq!(shared_bytes, 48 << 10);
        assert!(backward.static_bytes > 0 && must_ask(backward.static_bytes as u32, shared_bytes));
    }

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("MOST", MOST), ("MOST_LONG", MOST_LONG)]);
        assert_declared(rms_norm::SOURCE, &[("MOST", MOST)]);
    }

    #[test]
    fn matrix_sizes_of_known_models_are_supported() {
        for matrix in [[4608, 3584], [37_888, 3584], [3584, 18_944], [55_296, 5120], [5120, 27_648], [1152, 896]] {
            assert!(fp8_serves(matrix), "{matrix:?}");
        }
        for matrix in [[8, 64], [64, 72], [64, 32_784]] {
            assert!(!fp8_serves(matrix), "{matrix:?}");
        }
        for matrix in [[37_888, 3584], [16, 65_536], [59_136, 8192]] {
            assert!(fp8_trains(matrix) && fp8_trains([matrix[1], matrix[0]]), "{matrix:?}");
        }
        assert!(!fp8_trains([65_552, 16]) && !fp8_trains([16, 24]));
        assert_eq!(
            [threads(3584, MOST), threads(18_944, MOST), threads(32_768, MOST), threads(16, 2)],
            [128, 608, 1024, 32]
        );
        let even = [FEW_ROWS_THREADS, MANY_ROWS_THREADS, BACKWARD_THREADS].map(|most| even_threads(18_944, most));
        assert_eq!(even, [608, 320, 480]);
        assert_eq!([even_threads(16, 320), even_threads(32_768, 512)], [32, 512]);
    }
}
