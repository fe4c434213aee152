//! The kernel that turns the output of the QKV GEMM into queries for attention and entries of the paged KV cache.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::add_rms_norm::NormOptions;
use super::fp8::ScaledRows;
use super::launch::{
    Argument, address, address_or_null, code_name, invalid, kind_name, launch_early, ordinal, strided,
};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::ROPE_WRITE_KV;
pub(super) const NAMES: &[&str] = &[
    "rope_write_kv_f32_x1",
    "rope_write_kv_f32_x4",
    "rope_write_kv_bf16_x1",
    "rope_write_kv_bf16_x8",
    "rope_write_kv_fp8_x1",
    "rope_write_kv_fp8_x8",
    "rope_write_kv_int8_x1",
    "rope_write_kv_int8_x8",
];

const THREADS: usize = 256;
/// Largest head width for any alignment: for float32, and for half heads that 16-byte accesses cannot cover.
pub(super) const MOST_HEAD_DIM: usize = 256;

/// Size of the largest Hadamard matrix.
const MOST_BLOCK: usize = 32;

/// Size of the Hadamard matrices for heads whose first `columns` columns are rotated by position: the largest power of two up to 32 that divides half
/// of the head and half of the rotated columns.
pub fn hadamard_block(head_dim: usize, columns: usize) -> usize {
    let powers = [head_dim / 2, columns / 2].map(|half| 1 << half.trailing_zeros().min(MOST_BLOCK.trailing_zeros()));
    powers[0].min(powers[1])
}

/// Queries, keys and values as views of the QKV GEMM's output (or of two GEMMs' outputs, if a tensor-parallel group has more ranks than key/value
/// heads). Rows and heads may have any stride; each head is contiguous.
#[derive(Debug)]
pub struct QkvViews {
    /// Queries. [T, Hkv, G, hd] f32 or bf16; the G heads of a group have a constant stride.
    pub q: Tensor,
    /// Keys, with the same strides as `v`. [T, Hkv, hd]
    pub k: Tensor,
    /// Values. [T, Hkv, hd]
    pub v: Tensor,
    /// Gates of the queries, if attention's output has gates. [T, Hkv, G, hd]
    pub gate: Option<Tensor>,
}

impl QkvViews {
    /// Views of a GEMM output [T, (H + 2 Hkv) hd] whose columns are grouped by key/value head; [T, (2 H + 2 Hkv) hd] if a gate follows each query.
    pub fn grouped(product: &Tensor, num_kv_heads: usize, heads_per_group: usize, is_gated: bool) -> Self {
        let queries = heads_per_group as i64 * if is_gated { 2 } else { 1 };
        let heads = product.view([product.size()[0], num_kv_heads as i64, queries + 2, -1]);
        let (q, gate) = queries_and_gates(&heads.narrow(2, 0, queries), is_gated);
        Self { q, k: heads.select(2, queries), v: heads.select(2, queries + 1), gate }
    }

    /// Views of a query GEMM's output [T, H hd], or [T, 2 H hd] with gates, and of the output for one key/value head [T, 2 hd].
    pub fn split(q: &Tensor, kv: &Tensor, num_heads: usize, is_gated: bool) -> Self {
        let tokens = q.size()[0];
        let kv = kv.view([tokens, 1, 2, -1]);
        let queries = num_heads as i64 * if is_gated { 2 } else { 1 };
        let (q, gate) = queries_and_gates(&q.view([tokens, 1, queries, -1]), is_gated);
        Self { q, k: kv.select(2, 0), v: kv.select(2, 1), gate }
    }
}

/// Splits heads [T, Hkv, 2 G, hd], in which gates follow their queries, into queries and gates; without gates [T, Hkv, G, hd] are all queries.
fn queries_and_gates(heads: &Tensor, is_gated: bool) -> (Tensor, Option<Tensor>) {
    if !is_gated {
        return (heads.shallow_clone(), None);
    }
    let every_second = |first: i64| heads.slice(2, first, None, 2);
    (every_second(0), Some(every_second(1)))
}

/// The norm and rotary embedding that [`rope_write_kv`] applies to every head.
#[derive(Debug, Clone, Copy)]
pub struct HeadTransform<'a> {
    /// Weights of the query and the key norm, `[hd]` each, and their options.
    pub norms: Option<(&'a Tensor, &'a Tensor, NormOptions)>,
    /// Cosines, then sines, of every position: [positions, rotated columns] f32, from [`crate::ops::rope::Rope::table`].
    pub rope: &'a Tensor,
}

/// Computes q_out = rope(norm(q)). Transforms k in place, and writes it with v into the cache at `slot_mapping`. Every step rounds to the tensors'
/// type. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn rope_write_kv(
    qkv: &QkvViews,
    transform: &HeadTransform,
    positions: &Tensor,    // [T] i32, rows of the table
    slot_mapping: &Tensor, // [T] i32: block * block_size + offset; -1 writes no key and value
    q_out: &mut Tensor,    // [T, H, hd]
    k_cache: &Tensor,      // [num_blocks, Hkv, block_size, hd]
    v_cache: &Tensor,      // like k_cache
) -> Result<()> {
    run(qkv, transform, [positions, slot_mapping], q_out, [k_cache, v_cache], None)
}

/// Computes [`rope_write_kv`] for an 8-bit cache: e4m3 (sm_89 or later), quantized like [`quantize_rows`](super::quantize_rows), or int8, quantized like
/// [`crate::ops::int8`], depending on the type of its values. Each token and head has its own scale. For int8, q_out and k are also multiplied by
/// Hadamard matrices.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn rope_write_kv_scaled(
    qkv: &QkvViews, // bf16
    transform: &HeadTransform,
    positions: &Tensor,    // [T] i32, rows of the table
    slot_mapping: &Tensor, // [T] i32, as for rope_write_kv
    q_out: &mut Tensor,    // [T, H, hd] bf16
    k_cache: &ScaledRows,  // [num_blocks, Hkv, block_size, hd], scales [num_blocks, Hkv, block_size]
    v_cache: &ScaledRows,  // like k_cache
) -> Result<()> {
    let (values, scales) = ([&k_cache.values, &v_cache.values], [&k_cache.scales, &v_cache.scales]);
    run(qkv, transform, [positions, slot_mapping], q_out, values, Some(scales))
}

fn run(
    qkv: &QkvViews,
    transform: &HeadTransform,
    [positions, slot_mapping]: [&Tensor; 2],
    q_out: &mut Tensor,
    [k_cache, v_cache]: [&Tensor; 2],
    scales: Option<[&Tensor; 2]>,
) -> Result<()> {
    const OP: &str = "rope_write_kv";
    if scales.is_some() && qkv.q.kind() != Kind::BFloat16 {
        return Err(invalid(OP, "bfloat16 with an 8-bit cache", qkv.q.kind()));
    }
    let (gpu, kind) = (ordinal(OP, &qkv.q)?, qkv.q.kind());
    let shape = RopeShape::of(&qkv.q, k_cache)?;
    let RopeShape { tokens, kv_heads, group, dim, block_size } = shape;
    let [(q, q_row, q_group), (k, kv_row, kv_group), (v, v_row, v_group)] = shape.addresses(qkv, kind, gpu)?;
    let turned = match transform.rope.size()[..] {
        [_, columns] if columns % 2 == 0 && (2..=dim as i64).contains(&columns) => columns as usize / 2,
        _ => {
            return Err(invalid(
                OP,
                format!("a table of at most {dim} columns, an even number"),
                transform.rope.size(),
            ));
        }
    };
    if (kv_row, kv_group) != (v_row, v_group) {
        return Err(invalid(OP, "keys and values with equal strides", (qkv.k.stride(), qkv.v.stride())));
    }
    let norms = transform.norms.map(|(q, k, _)| [q, k]);
    let [q_norm, k_norm] = [0, 1].map(|at| address_or_null(OP, norms.map(|norms| norms[at]), kind, dim, gpu));
    let cache_len = k_cache.numel();
    let width = shape.width(turned, qkv, transform, &[&*q_out, k_cache, v_cache], kind);
    let lanes = (dim / 2 / width).next_power_of_two().min(32);
    let packs_per_lane = if width == 1 { 4 } else { 1 }; // as in the source
    debug_assert!(2 * 32 * packs_per_lane * width >= MOST_HEAD_DIM);
    if dim / 2 > lanes * packs_per_lane * width {
        return Err(invalid(OP, format!("heads of at most {} columns", 2 * 32 * packs_per_lane * width), dim));
    }
    let cache_kind = if scales.is_some() { k_cache.kind() } else { kind };
    let [eps, centre] = transform.norms.map_or(NormOptions::plain(0.0), |norms| norms.2).arguments();
    let mut arguments = vec![
        q,
        k,
        v,
        Argument::Count(q_row),
        Argument::Count(q_group),
        Argument::Count(qkv.q.stride()[2]),
        Argument::Count(kv_row),
        Argument::Count(kv_group),
        q_norm?,
        k_norm?,
        address(OP, transform.rope, Kind::Float, transform.rope.numel(), gpu)?,
        address(OP, positions, Kind::Int, tokens, gpu)?,
        address(OP, slot_mapping, Kind::Int, tokens, gpu)?,
        address(OP, q_out, kind, tokens * kv_heads * group * dim, gpu)?,
        address(OP, k_cache, cache_kind, cache_len, gpu)?,
        address(OP, v_cache, cache_kind, cache_len, gpu)?,
        Argument::Count(tokens as i64),
        Argument::Count(kv_heads as i64),
        Argument::Count(group as i64),
        Argument::Count((dim / 2) as i64),
        Argument::Count(turned as i64),
        Argument::Count(block_size as i64),
        Argument::Count(lanes as i64),
        eps,
        centre,
    ];
    for scales in scales.into_iter().flatten() {
        arguments.push(address(OP, scales, Kind::Float, cache_len / dim, gpu)?);
    }
    if scales.is_some() {
        arguments.push(Argument::Count(hadamard_block(dim, 2 * turned) as i64));
    }
    let threads = tokens * kv_heads * (group + 2) * lanes;
    let grid = threads.div_ceil(THREADS) as u32;
    let kind = if scales.is_some() { code_name(OP, k_cache)? } else { kind_name(OP, &qkv.q)? };
    let name = format!("rope_write_kv_{kind}_x{width}");
    // SAFETY: the kernel's parameters in order; strides and shapes were read from the tensors, positions and slots are the
    // caller's, within the table and the cache.
    unsafe { launch_early(SOURCE, &name, gpu, (grid, THREADS as u32, 0), &arguments) }
}

struct RopeShape {
    tokens: usize,
    kv_heads: usize,
    group: usize,
    dim: usize,
    block_size: usize,
}

impl RopeShape {
    fn of(q: &Tensor, k_cache: &Tensor) -> Result<Self> {
        let (size, cache) = (q.size(), k_cache.size());
        match (size.as_slice(), cache.as_slice()) {
            (&[tokens, kv_heads, group, dim], &[_, cache_heads, block_size, cache_dim])
                if (kv_heads, dim) == (cache_heads, cache_dim) && dim % 2 == 0 && dim > 0 =>
            {
                let [tokens, kv_heads, group, dim, block_size] =
                    [tokens, kv_heads, group, dim, block_size].map(|size| size as usize);
                Ok(Self { tokens, kv_heads, group, dim, block_size })
            }
            _ => {
                let expected = "q [T, Hkv, G, hd] and a cache [num_blocks, Hkv, block_size, hd], hd even";
                Err(invalid("rope_write_kv", expected, (size, cache)))
            }
        }
    }

    /// Returns (address, row stride, head stride) of q, k and v.
    fn addresses(&self, views: &QkvViews, kind: Kind, gpu: usize) -> Result<[(Argument, i64, i64); 3]> {
        let [rows, kv_heads, group, dim] = [self.tokens, self.kv_heads, self.group, self.dim].map(|size| size as i64);
        let one = |tensor: &Tensor, shape: &[i64]| {
            let at = strided("rope_write_kv", tensor, kind, shape, gpu)?;
            let stride = tensor.stride();
            if stride[shape.len() - 1] != 1 {
                return Err(invalid("rope_write_kv", "contiguous heads", stride));
            }
            Ok((at, stride[0], stride[1]))
        };
        let (heads, one_head) = ([rows, kv_heads, group, dim], [rows, kv_heads, dim]);
        Ok([one(&views.q, &heads)?, one(&views.k, &one_head)?, one(&views.v, &one_head)?])
    }

    /// The widest memory access that half a head, all strides and all addresses permit.
    fn width(&self, turned: usize, qkv: &QkvViews, transform: &HeadTransform, others: &[&Tensor], kind: Kind) -> usize {
        let widest = 16 / kind.elt_size_in_bytes();
        let norms = transform.norms.iter().flat_map(|norms| [norms.0, norms.1]);
        let all = [&qkv.q, &qkv.k, &qkv.v, transform.rope].into_iter().chain(norms).chain(others.iter().copied());
        let fits = |tensor: &Tensor| {
            let strides = tensor.stride();
            let outer = &strides[..strides.len() - 1];
            (tensor.data_ptr() as usize).is_multiple_of(16) && outer.iter().all(|stride| *stride % widest as i64 == 0)
        };
        let is_wide =
            (self.dim / 2).is_multiple_of(widest) && turned.is_multiple_of(widest) && all.into_iter().all(fits);
        if is_wide { widest } else { 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hadamard_blocks_divide_the_head_and_its_rotated_columns() {
        for (head_dim, columns, block) in [
            (128, 128, 32),
            (64, 64, 32),
            (256, 64, 32),
            (96, 96, 16),
            (128, 96, 16),
            (80, 80, 8),
            (8, 8, 4),
            (6, 6, 1),
        ] {
            assert_eq!(hadamard_block(head_dim, columns), block, "{head_dim}, {columns}");
        }
    }
}
