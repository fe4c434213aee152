//! Bit-exact operations on a GPU: the kernels of the engine's steps, applied to the rows of a micro-batch.
//!
//! If `tiles` does not support an attention, it uses the decode kernel, row by row, over a paged cache of one layer. The cache contains the
//! micro-batch's keys and values: a prompt's blocks once, followed by those of its completions. If the prompt's last block is not full, each
//! completion has a copy of it.

use tch::{Device, Kind, Tensor};

use crate::cuda::kernels::{
    self, AttentionPlan, AttentionShape, Draws, HeadTransform, KvBlocks, NormOptions, QkvViews,
};
use crate::cuda::{Products, Tuning};
use crate::error::{Error, Result};
use crate::ops::attention::{Bounds, SharedBounds, kv_rows, write_kv};
use crate::ops::heads::{HeadNormWeights, Heads};
use crate::ops::linear;
use crate::ops::rope::RopeRows;
use crate::phase;
use crate::torch::tensor_on;

/// Tokens per cache block.
const BLOCK_SIZE: usize = 16;
/// Tokens of a context that are summed in one piece, both in exact steps of an engine and here.
pub const SPLIT_TOKENS: usize = 256;
/// Rows that attention processes at once, to bound the memory of partial results.
const MOST_ROWS: i64 = 512;

fn ordinal(x: &Tensor) -> usize {
    match x.device() {
        Device::Cuda(ordinal) => ordinal,
        other => panic!("a tensor on a GPU, not on {other:?}"),
    }
}

/// Computes x w^T + bias, in the type `kind`.
pub(super) fn product(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, kind: Kind) -> Result<Tensor> {
    if phase::fires_unequal() {
        return in_halves(x, w, bias, kind);
    }
    let out = Tensor::f_empty([x.size()[0], w.size()[0]], (kind, x.device()))?;
    Products::of_current_stream(ordinal(x))?.run(x, &w.tr(), bias, &out, 0.0, Tuning::Exact)?;
    Ok(out)
}

/// Computes the GEMM in another summation order, as two rounded halves of K. An injected fault uses this in place of [`product`].
fn in_halves(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, kind: Kind) -> Result<Tensor> {
    let (k, half) = (w.size()[1], w.size()[1] / 2);
    let part = |first: i64, len: i64| linear::forward(&x.narrow(1, first, len), &w.narrow(1, first, len), None);
    let sum = part(0, half)?.f_add(&part(half, k - half)?)?;
    Ok(bias.map_or_else(|| Ok(sum.shallow_clone()), |bias| sum.f_add(bias))?.f_to_kind(kind)?)
}

/// Computes y += (x A^T) B^T in the same way as an engine step.
pub(super) fn adapt(x: &Tensor, a: &Tensor, b: &Tensor, y: &Tensor) -> Result<()> {
    if kernels::adapt_serves(x, a, b, y) {
        let low = Tensor::f_empty([x.size()[0], a.size()[0]], (x.kind(), x.device()))?;
        return kernels::adapt(x, a, b, &low, y);
    }
    let low = product(x, a, None, x.kind())?;
    Products::of_current_stream(ordinal(x))?.run(&low, &b.tr(), None, y, 1.0, Tuning::Exact)
}

/// Normalizes rows; the result has the weight's type.
pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, norm: NormOptions) -> Result<Tensor> {
    let mut y = Tensor::f_empty(x.size(), (weight.kind(), x.device()))?;
    if x.numel() > 0 {
        kernels::add_rms_norm(&mut x.f_contiguous()?, None, weight, &mut y, norm)?; // without a summand x is only read
    }
    Ok(y)
}

/// Makes a contiguous copy.
pub(super) fn copy(of: &Tensor) -> Result<Tensor> {
    let mut copy = Tensor::f_empty(of.size(), (of.kind(), of.device()))?;
    copy.f_copy_(of)?;
    Ok(copy)
}

/// Normalizes and rotates heads.
pub(super) fn heads(qkv: Tensor, norms: Option<HeadNormWeights<'_>>, rows: &RopeRows) -> Result<Heads> {
    let [tokens, kv_heads, slots, head_dim] = qkv.size()[..] else { panic!("a projection, not {:?}", qkv.size()) };
    let (group, options) = (slots - 2, (qkv.kind(), qkv.device()));
    // Keys are rotated in place, but the norms' backward needs them unchanged.
    let own = if norms.is_some() { copy(&qkv)? } else { qkv.f_contiguous()? };
    let views = QkvViews::grouped(&own.f_view([tokens, -1])?, kv_heads as usize, group as usize, false);
    let mut q = Tensor::f_empty([tokens, kv_heads * group, head_dim], options)?;
    let (table, positions) = rows.table_and_positions();
    let norm_of = |norms: &HeadNormWeights<'_>| NormOptions { eps: norms.eps, zero_centred: norms.zero_centred };
    let transform =
        HeadTransform { norms: norms.as_ref().map(|norms| (norms.q, norms.k, norm_of(norms))), rope: table };
    if tokens > 0 {
        let nowhere = Tensor::f_full([tokens], -1, (Kind::Int, qkv.device()))?;
        let cache = Tensor::f_zeros([1, kv_heads, BLOCK_SIZE as i64, head_dim], options)?; // written to by no token
        kernels::rope_write_kv(&views, &transform, positions, &nowhere, &mut q, &cache, &cache)?;
    }
    let [k, v] = [views.k.f_contiguous()?, views.v.f_contiguous()?];
    Ok(Heads { q, k, v, qkv: norms.map(|_| qkv) })
}

/// Applies one norm over all query heads and one over all key heads, in place.
pub(super) fn norm_all(qkv: &Tensor /* [T, Hkv, G + 2, hd] */, norms: HeadNormWeights<'_>) -> Result<()> {
    let [tokens, kv_heads, slots, head_dim] = qkv.size()[..] else { panic!("a projection, not {:?}", qkv.size()) };
    if tokens == 0 {
        return Ok(());
    }
    let views = QkvViews::grouped(&qkv.f_view([tokens, -1])?, kv_heads as usize, slots as usize - 2, false);
    let mut sums = Tensor::f_empty([tokens, 2], (Kind::Float, qkv.device()))?;
    let widths = [kv_heads * (slots - 2) * head_dim, kv_heads * head_dim].map(|width| width as usize);
    kernels::qk_squares(&views, true, &mut sums)?;
    kernels::qk_scale(&views, [norms.q, norms.k], &sums, widths, norms.eps)
}

/// Computes the log-sum-exp of each row's logits / temperature, in float64, with the sampling kernel. [c]
pub(super) fn log_sum_exps(logits: &Tensor /* [c, V] f32 */, temperature: f32) -> Result<Tensor> {
    let (rows, device) = (logits.size()[0], logits.device());
    let mut candidates = Tensor::f_empty([1, rows, kernels::CANDIDATE_WORDS], (Kind::Double, device))?;
    if rows > 0 {
        let draws = Draws {
            keys: &Tensor::f_zeros([rows, 2], (Kind::Int, device))?,
            positions: &Tensor::f_ones([rows], (Kind::Int, device))?,
            temperatures: &Tensor::f_full([rows], f64::from(temperature), (Kind::Float, device))?,
            penalties: None,
            cuts: None,
        };
        kernels::sample(logits, 0, &draws, &mut candidates)?;
    }
    Ok(candidates.select(0, 0).select(1, 2))
}

/// Positions of a micro-batch's rows in a paged cache of one layer.
#[derive(Debug)]
pub(super) struct PagedRows {
    window: Option<usize>,
    num_blocks: i64,
    /// Rows whose keys and values are written, and the slots to which they are written.
    written: [Tensor; 2], // [W] i64
    slices: Vec<CachedRows>,
    max_blocks: usize,
}

/// A run of consecutive rows.
#[derive(Debug)]
struct CachedRows {
    first: i64,
    block_tables: Tensor, // [n, max_blocks] i32
    context_lens: Tensor, // [n] i32
}

/// Host-side construction of the cache: which row is stored where.
#[derive(Default)]
struct CacheFilling {
    num_blocks: usize,
    rows: Vec<i64>,
    slots: Vec<i64>,
    /// Block tables of prompts and sequences.
    tables: Vec<Vec<i32>>,
    /// For each row, the index of its block table and the number of tokens that it attends to.
    of_row: Vec<(usize, i32)>,
}

impl CacheFilling {
    /// Adds rows `from..to` after the tokens of `prompt`, given as (first row, length, block table).
    fn add(&mut self, rows: (i64, i64), prompt: Option<(i64, usize, usize)>) -> usize {
        let (prompt_row, prompt_len, whole) = match prompt {
            Some((row, len, table)) => (row, len, self.tables[table][..len / BLOCK_SIZE].to_vec()),
            None => (0, 0, Vec::new()),
        };
        let shared = whole.len() * BLOCK_SIZE;
        let len = prompt_len + (rows.1 - rows.0) as usize;
        let mut table = whole;
        while table.len() * BLOCK_SIZE < len {
            table.push(self.num_blocks as i32);
            self.num_blocks += 1;
        }
        for at in shared..len {
            let row = if at < prompt_len { prompt_row + at as i64 } else { rows.0 + (at - prompt_len) as i64 };
            self.rows.push(row);
            self.slots.push(i64::from(table[at / BLOCK_SIZE]) * BLOCK_SIZE as i64 + (at % BLOCK_SIZE) as i64);
        }
        self.tables.push(table);
        let own = self.tables.len() - 1;
        self.of_row.extend((prompt_len..len).map(|at| (own, at as i32 + 1)));
        own
    }

    fn of(bounds: &Bounds) -> Self {
        let mut filling = Self::default();
        match bounds {
            Bounds::Separate(bounds) => {
                for pair in bounds.windows(2) {
                    filling.add((pair[0], pair[1]), None);
                }
            }
            Bounds::Shared(SharedBounds { prompts, groups, completions }) => {
                let tables: Vec<usize> = prompts.windows(2).map(|pair| filling.add((pair[0], pair[1]), None)).collect();
                for pair in completions.windows(2) {
                    let group = groups.windows(2).position(|rows| (rows[0]..rows[1]).contains(&pair[0]));
                    let prompt = group
                        .map(|group| (prompts[group], (prompts[group + 1] - prompts[group]) as usize, tables[group]));
                    filling.add((pair[0], pair[1]), prompt);
                }
            }
        }
        filling
    }
}

impl PagedRows {
    pub(super) fn new(bounds: &Bounds, window: Option<usize>, device: Device) -> Result<Self> {
        let CacheFilling { num_blocks, rows, slots, tables, of_row } = CacheFilling::of(bounds);
        let max_blocks = tables.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let padded = tables.iter().flat_map(|table| table.iter().copied().chain(std::iter::repeat(0)).take(max_blocks));
        let tables = tensor_on(&padded.collect::<Vec<i32>>(), device)?.view([-1, max_blocks as i64]);
        let slice = |(index, rows): (usize, &[(usize, i32)])| {
            let (of_rows, lens): (Vec<i32>, Vec<i32>) = rows.iter().map(|&(table, len)| (table as i32, len)).unzip();
            Ok(CachedRows {
                first: index as i64 * MOST_ROWS,
                block_tables: tables.f_index_select(0, &tensor_on(&of_rows, device)?)?,
                context_lens: tensor_on(&lens, device)?,
            })
        };
        Ok(Self {
            window,
            num_blocks: num_blocks.max(1) as i64,
            written: [tensor_on(&rows, device)?, tensor_on(&slots, device)?],
            slices: of_row.chunks(MOST_ROWS as usize).enumerate().map(slice).collect::<Result<_>>()?,
            max_blocks,
        })
    }

    /// Computes softmax(scale q k^T) v for each row over its context.
    pub(super) fn attend(&self, [q, k, v]: [&Tensor; 3], scale: f64) -> Result<Tensor> {
        let [_, heads, head_dim] = q.size()[..] else { panic!("queries [T, H, hd], not {:?}", q.size()) };
        let kv_heads = k.size()[1];
        let cache = || {
            let size = [self.num_blocks, kv_heads, BLOCK_SIZE as i64, head_dim];
            Ok::<_, Error>(Tensor::f_zeros(size, (q.kind(), q.device()))?)
        };
        let (k_cache, v_cache, [rows, slots]) = (cache()?, cache()?, &self.written);
        let [k, v] = [k.f_index_select(0, rows)?, v.f_index_select(0, rows)?];
        write_kv(&k_cache, &v_cache, &k, &v, &kv_rows(slots, BLOCK_SIZE, kv_heads as usize)?)?;
        let shape = AttentionShape {
            num_heads: heads as usize,
            num_kv_heads: kv_heads as usize,
            head_dim: head_dim as usize,
            block_size: BLOCK_SIZE,
            sliding_window: self.window,
            scale,
        };
        let options = (q.kind(), q.device());
        let plan = AttentionPlan::new(shape, options, MOST_ROWS as usize, self.max_blocks, Some(SPLIT_TOKENS))?;
        let o = q.f_empty_like()?;
        for CachedRows { first, block_tables, context_lens } in &self.slices {
            let of_slice = |tensor: &Tensor| tensor.narrow(0, *first, context_lens.size()[0]);
            plan.update(context_lens, None)?;
            kernels::paged_attention(
                &plan,
                &of_slice(q),
                KvBlocks::plain(&k_cache, &v_cache),
                block_tables,
                context_lens,
                None,
                &mut of_slice(&o),
            )?;
        }
        Ok(o)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prompts of 20 and 16 tokens; completions of 3 and 20 tokens for the first and of 2 for the second.
    #[test]
    fn shared_prompt_blocks_are_stored_once_except_the_last() {
        let bounds = Bounds::Shared(SharedBounds {
            prompts: vec![0, 20, 36],
            groups: vec![36, 59, 61],
            completions: vec![36, 39, 59, 61],
        });
        let CacheFilling { num_blocks, rows, slots, tables, of_row } = CacheFilling::of(&bounds);
        assert_eq!(tables, [vec![0, 1], vec![2], vec![0, 3], vec![0, 4, 5], vec![2, 6]]);
        assert_eq!((num_blocks, of_row.len()), (7, 61));
        assert_eq!((of_row[0], of_row[35], of_row[36], of_row[60]), ((0, 1), (1, 16), (2, 21), (4, 18)));
        let at = |slot: i64| slots.iter().position(|own| *own == slot).map(|at| rows[at]);
        // The prompt's token 16 is in its own block and in both copies, followed by the completions' first tokens.
        assert_eq!([16, 48, 64].map(at), [Some(16); 3]);
        assert_eq!([at(52), at(68), at(96)], [Some(36), Some(39), Some(59)]);
        let mut places = slots.clone();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), slots.len(), "every slot is written once");
    }
}
