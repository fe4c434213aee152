//! Compares the kernels of decode steps with the CPU's operations in float64. Ignored without a GPU.

use colo_grpo::internal::cuda::kernels::{
    self, AttentionPlan, AttentionShape, HeadTransform, KvBlocks, NormOptions, QkvViews, SharedPrefixes,
};
use colo_grpo::internal::ops::attention::{Attended, PagedLayout, kv_rows, paged_decode, sinks, write_kv};
use colo_grpo::internal::ops::exact::SPLIT_TOKENS;
use colo_grpo::internal::ops::heads::{self, HeadNormWeights};
use colo_grpo::internal::ops::rms_norm;
use colo_grpo::internal::ops::rope::{self, Rope};
use colo_grpo::internal::ops::swiglu::{Activation, GateUp};
use colo_grpo::internal::torch::{Varlen, flash_forward};
use tch::{Device, Kind, Tensor};

use crate::on_gpu::{GPU, double, gpu, ints, is_small, poison, rand, random_ints, random_permutation, relative_error};

/// Data types of the residual stream and of everything else, with the error of one rounding to the latter.
const KINDS: [(Kind, Kind, f64); 3] =
    [(Kind::Float, Kind::Float, 2e-6), (Kind::BFloat16, Kind::BFloat16, 5e-3), (Kind::Float, Kind::BFloat16, 5e-3)];

#[test]
#[ignore = "needs a GPU"]
fn gpu_embedding_norms_and_gemms_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for (residual, kind, bound) in KINDS {
        for (tokens, dim) in [(1, 1), (5, 33), (3, 128), (256, 3584), (7, 8192)] {
            if is_small() && tokens * dim > 1000 {
                continue;
            }
            let table = rand(&[40, dim], kind);
            let ids = random_ints(0, 60, tokens);
            let mut x = poison(&[tokens, dim], residual);
            kernels::embed(&ints(&ids), &gpu(&table), 10, &mut x).unwrap();
            let padded = Tensor::cat(&[rand(&[10, dim], kind) * 0.0, table, rand(&[10, dim], kind) * 0.0], 0);
            assert!(double(&x).equal(&double(&padded.index_select(0, &Tensor::from_slice(&ids)))), "{tokens} {dim}");

            let (weight, delta) = (rand(&[dim], kind), rand(&[tokens, dim], kind));
            let mut y = poison(&[tokens, dim], kind);
            for delta in [Some(&delta), None] {
                let sum = delta.map_or_else(|| x.copy(), |delta| &x + gpu(delta));
                kernels::add_rms_norm(&mut x, delta.map(gpu).as_ref(), &gpu(&weight), &mut y, NormOptions::plain(1e-6))
                    .unwrap();
                assert!(x.equal(&sum), "the sum rounds once");
                let (expected, _) = rms_norm::forward(&double(&sum), &double(&weight), 1e-6).unwrap();
                let error = relative_error(&y, &expected);
                assert!(error < bound, "norm of {residual:?}, {kind:?} [{tokens}, {dim}]: {error:e}");
            }

            let gate_up = rand(&[tokens, 2 * dim], kind) * 3.0;
            let part = |at| double(&gate_up).view([tokens, dim, 2]).select(2, at).contiguous();
            kernels::silu_mul(Activation::Silu, &gpu(&gate_up), &mut y).unwrap();
            let error =
                relative_error(&y, &GateUp::Split { gate: part(0), up: part(1) }.activate(Activation::Silu).unwrap());
            assert!(error < bound, "silu of {kind:?} [{tokens}, {dim}]: {error:e}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_rope_and_cache_write_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    // Rounding after every step, as the trainer's: looser than one rounding.
    for (kind, bound) in [(Kind::Float, 1e-5), (Kind::BFloat16, 1e-2)] {
        for (kv_heads, group, dim) in [(2, 7, 128), (4, 1, 64), (1, 3, 96), (2, 2, 6), (1, 2, 256)] {
            for (is_split, has_norm) in [(false, false), (false, true), (kv_heads == 1, true)] {
                compare_rope(kind, bound, (kv_heads, group, dim), is_split, has_norm);
            }
        }
    }
}

fn compare_rope(kind: Kind, bound: f64, (kv_heads, group, dim): (i64, i64, i64), is_split: bool, has_norm: bool) {
    const TOKENS: i64 = 9;
    let (block_size, blocks, eps) = (16, 5, 1e-6);
    let product = |rows: &[i64]| -> Vec<Tensor> {
        let columns = |heads: i64| [rows, &[heads * dim]].concat();
        match is_split {
            true => vec![rand(&columns(group), kind), rand(&columns(2), kind)],
            false => vec![rand(&columns(kv_heads * (group + 2)), kind)],
        }
    };
    let views = |products: &[Tensor]| match products {
        [q, kv] => QkvViews::split(q, kv, group as usize, false),
        products => QkvViews::grouped(&products[0], kv_heads as usize, group as usize, false),
    };
    let (products, norms) = (product(&[TOKENS]), [rand(&[dim], kind), rand(&[dim], kind)]);
    let positions = random_ints(0, 1000, TOKENS);
    let slots = [3, 16, 17, -1, 79, 40, 41, 0, 64];
    let rope = Rope::new(dim as usize, 10_000.0, None);

    // On the CPU in float64.
    let wide = views(&products);
    let turned = |x: &Tensor, norm: &Tensor| {
        let mut x = double(x);
        if has_norm {
            x = rms_norm::forward(&x, &double(norm), eps).unwrap().0;
        }
        rope::forward(&x, &rope.rows(&Tensor::from_slice(&positions), Kind::Double).unwrap()).unwrap()
    };
    let q = turned(&wide.q, &norms[0]).view([TOKENS, -1, dim]);
    let (k, v) = (turned(&wide.k, &norms[1]), double(&wide.v));
    let cache = || Tensor::zeros([blocks, kv_heads, block_size, dim], (Kind::Double, Device::Cpu));
    let (k_cache, v_cache) = (cache(), cache());
    let kept = Tensor::from_slice(&[0i64, 1, 2, 4, 5, 6, 7, 8]);
    let kept_slots = Tensor::from_slice(&slots).index_select(0, &kept);
    let rows = kv_rows(&kept_slots, block_size as usize, kv_heads as usize).unwrap();
    write_kv(&k_cache, &v_cache, &k.index_select(0, &kept), &v.index_select(0, &kept), &rows).unwrap();

    let products: Vec<_> = products.iter().map(gpu).collect();
    let (got, norms) = (views(&products), norms.each_ref().map(gpu));
    let mut q_out = poison(&[TOKENS, kv_heads * group, dim], kind);
    let [got_k, got_v] = [&k_cache, &v_cache].map(|cache| cache.zeros_like().to_kind(kind).to_device(GPU));
    let transform = HeadTransform {
        norms: has_norm.then_some((&norms[0], &norms[1], NormOptions::plain(eps))),
        rope: &rope.table(1000, GPU).unwrap(),
    };
    kernels::rope_write_kv(&got, &transform, &ints(&positions), &ints(&slots), &mut q_out, &got_k, &got_v).unwrap();
    let pairs = [(&q_out, &q), (&got.k, &k), (&got.v, &v), (&got_k, &k_cache), (&got_v, &v_cache)];
    for ((got, expected), what) in pairs.into_iter().zip(["q", "k", "v", "k_cache", "v_cache"]) {
        let error = relative_error(got, expected);
        assert!(error < bound, "{what} of {kind:?} {kv_heads} x {group} x {dim}, {is_split}: {error:e}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_norms_over_all_heads_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    const TOKENS: i64 = 9;
    for (_, kind, bound) in KINDS {
        for (kv_heads, group, dim) in [(2, 7, 128), (16, 1, 128), (1, 3, 6)] {
            let eps = 1e-6;
            let qkv = rand(&[TOKENS, kv_heads, group + 2, dim], kind);
            let weights = [rand(&[kv_heads * group * dim], kind), rand(&[kv_heads * dim], kind)];
            let [q, k] = weights.each_ref().map(double);
            let expected =
                heads::norm_all(&double(&qkv), HeadNormWeights { q: &q, k: &k, eps, zero_centred: false }, None)
                    .unwrap();
            let [q, k] = weights.each_ref().map(gpu);
            let on_gpu = gpu(&qkv);
            let of_trainer =
                heads::norm_all(&on_gpu, HeadNormWeights { q: &q, k: &k, eps, zero_centred: false }, None).unwrap();
            let views = QkvViews::grouped(&on_gpu.view([TOKENS, -1]), kv_heads as usize, group as usize, false);
            let mut sums = poison(&[TOKENS, 2], Kind::Float);
            kernels::qk_squares(&views, true, &mut sums).unwrap();
            let widths = [kv_heads * group * dim, kv_heads * dim].map(|width| width as usize);
            kernels::qk_scale(&views, [&q, &k], &sums, widths, eps).unwrap();
            for (got, whose) in [(&on_gpu, "engine"), (&of_trainer, "trainer")] {
                let error = relative_error(got, &expected);
                assert!(error < bound, "{whose}, {kind:?} {kv_heads} x {group} x {dim}: {error:e}");
            }
            kernels::qk_squares(&views, false, &mut sums).unwrap();
            assert_eq!(double(&sums).select(1, 1).abs().max().double_value(&[]), 0.0, "another rank counts the keys");
        }
    }
}

/// Rows with random contexts in a paged KV cache. Some rows share their first blocks.
pub struct Contexts {
    pub lens: Vec<i64>,
    pub groups: Vec<i64>,
    pub shared: Vec<i64>,
    pub tables: Vec<i64>, // [S, max_blocks]
    pub max_blocks: i64,
    pub num_blocks: i64,
}

impl Contexts {
    /// Random contexts. Each prefix is shared by `group` rows; 0 means no sharing.
    pub fn random(rows: i64, longest: i64, block_size: i64, group: i64) -> Self {
        let mut lens = random_ints(1, longest, rows);
        for (len, special) in lens.iter_mut().zip([0, 1, 15, 16, 17, longest]) {
            *len = special;
        }
        let mut groups = vec![-1; rows as usize];
        let mut shared = vec![0; rows as usize];
        for row in (0..rows as usize).filter(|_| group > 0) {
            let number = row as i64 / group;
            (groups[row], shared[row]) = (number, [9, 20, 0, 3, 1][number as usize % 5] * 16 / block_size);
            if lens[row] > 0 {
                lens[row] = lens[row].max(shared[row] * block_size + 1);
            }
        }
        let max_blocks = lens.iter().max().unwrap() / block_size + 2;
        let mut free = random_permutation(rows * max_blocks).into_iter();
        let mut tables = vec![-1; (rows * max_blocks) as usize];
        for row in 0..rows as usize {
            for at in 0..(lens[row] + block_size - 1) / block_size {
                let place = row * max_blocks as usize + at as usize;
                let leader = row as i64 / group.max(1) * group;
                let is_first = at >= shared[row] || (leader as usize..row).all(|other| lens[other] == 0);
                tables[place] = if is_first {
                    free.next().unwrap()
                } else {
                    let first = (leader as usize..row).find(|&other| lens[other] > 0).unwrap();
                    tables[first * max_blocks as usize + at as usize]
                };
            }
        }
        Self { lens, groups, shared, tables, max_blocks, num_blocks: rows * max_blocks }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_paged_attention_in_float32_equals_the_cpus() {
    compare_attention_of_all_shapes(Kind::Float, 1e-5);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_paged_attention_in_bfloat16_equals_the_cpus() {
    compare_attention_of_all_shapes(Kind::BFloat16, 5e-3);
}

/// Compares shapes of heads and blocks, each with windows, sinks, shared prefixes and splits of contexts.
fn compare_attention_of_all_shapes(kind: Kind, bound: f64) {
    kernels::prepare(0, 1).unwrap();
    for (kv_heads, group, dim, block_size) in [
        (2, 7, 128, 16),
        (2, 6, 128, 32),
        (1, 8, 64, 16),
        (2, 1, 64, 64),
        (1, 12, 128, 16),
        (2, 2, 40, 16),
        (16, 1, 128, 16),
        (16, 4, 64, 16),
        (8, 7, 128, 16),
    ] {
        if is_small() && (group, dim) != (7, 128) {
            continue;
        }
        for (window, sharing, split) in [
            (None, 0, None),
            (Some(100), 0, None),
            (None, 0, Some(64)),
            (None, 0, Some(SPLIT_TOKENS)),
            (Some(100), 0, Some(SPLIT_TOKENS)),
            (None, 5, None),
            (None, 11, None),
            (None, 5, Some(SPLIT_TOKENS)),
            (None, 11, Some(SPLIT_TOKENS)),
        ] {
            let shape = AttentionShape {
                num_heads: kv_heads * group,
                num_kv_heads: kv_heads,
                head_dim: dim,
                block_size,
                sliding_window: window,
                scale: 0.2,
            };
            // With sinks pieces of this split are not joined, and no prefixes shared.
            let with_sinks = split != Some(SPLIT_TOKENS);
            for has_sinks in [false, true].into_iter().filter(|&has| !has || with_sinks) {
                // The reference takes long for many heads.
                let rows = if kv_heads < 8 || sharing == 11 { 37 } else { 16 };
                let sizes = (rows, if is_small() { 150 } else { 700 });
                compare_attention((shape, has_sinks), sizes, kind, bound, sharing, split);
            }
        }
    }
}

/// Every block takes several short contexts, in many of which some of its warps have no tokens.
#[test]
#[ignore = "needs a GPU"]
fn gpu_paged_attention_of_many_short_contexts_equals_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for (head_dim, longest) in [(128, 40), (128, 200), (64, 90)] {
        let shape = AttentionShape {
            num_heads: 14,
            num_kv_heads: 2,
            head_dim,
            block_size: 32,
            sliding_window: None,
            scale: 0.2,
        };
        for sharing in [0, 5] {
            compare_attention(
                (shape, false),
                (if is_small() { 40 } else { 500 }, longest),
                Kind::BFloat16,
                5e-3,
                sharing,
                None,
            );
        }
    }
}

fn compare_attention(
    (shape, has_sinks): (AttentionShape, bool),
    (rows, longest): (i64, i64),
    kind: Kind,
    bound: f64,
    sharing: i64,
    split: Option<usize>,
) {
    let [heads, kv_heads, dim, block_size] =
        [shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size].map(|size| size as i64);
    let contexts = Contexts::random(rows, longest, block_size, sharing);
    let cache_shape = [contexts.num_blocks, kv_heads, block_size, dim];
    let (q, k, v) = (rand(&[rows, heads, dim], kind), rand(&cache_shape, kind), rand(&cache_shape, kind));
    let tables = Tensor::from_slice(&contexts.tables).view([rows, contexts.max_blocks]);
    let layout = PagedLayout::new(
        &tables.clamp_min(0),
        &Tensor::from_slice(&contexts.lens),
        shape.block_size,
        shape.num_kv_heads,
        shape.sliding_window,
    )
    .unwrap();
    let sinks = has_sinks.then(|| rand(&[heads], kind));
    let (o, lse) = paged_decode(&double(&q), &double(&k), &double(&v), &layout, shape.scale, true).unwrap();
    let expected = Attended { o, lse: lse.unwrap() };
    let expected = match &sinks {
        Some(own) => sinks::join(expected, &double(own)).unwrap().o,
        None => expected.o,
    };
    let sinks = sinks.as_ref().map(gpu);
    let _ = expected.get(0).fill_(0.0); // the row without a sequence

    let (q, lens, tables) = (gpu(&q), ints(&contexts.lens), gpu(&tables.to_kind(Kind::Int)));
    let [k, v] = [k, v].map(|cache| gpu(&poison_unused(cache, &contexts, block_size)));
    let (groups, shared) = (ints(&contexts.groups), ints(&contexts.shared));
    let prefixes = (sharing > 0).then_some(SharedPrefixes { groups: &groups, num_shared_blocks: &shared });
    let plan = |most: usize| AttentionPlan::new(shape, (kind, GPU), most, contexts.max_blocks as usize, split).unwrap();
    let whole = plan(rows as usize).joining();
    let what = format!("{shape:?} {kind:?}, groups of {sharing}, split {split:?}, sinks {has_sinks}");
    let mut o = poison(&[rows, heads, dim], kind);
    for _ in 0..2 {
        let before = o.copy();
        whole.update(&lens, prefixes).unwrap();
        let cache = KvBlocks::plain(&k, &v);
        kernels::paged_attention(&whole, &q, cache, &tables, &lens, sinks.as_ref(), &mut o).unwrap();
        let error = relative_error(&o, &expected);
        assert!(error < bound, "{what}: {error:e}");
        assert!(before.isnan().any().int64_value(&[]) == 1 || before.equal(&o), "{what}: not the same twice");
    }
    let ringed = plan(rows as usize).through_rings();
    if split.is_none() && kind == Kind::BFloat16 {
        let mut own = poison(&[rows, heads, dim], kind);
        for _ in 0..2 {
            ringed.update(&lens, prefixes).unwrap();
            let cache = KvBlocks::plain(&k, &v);
            kernels::paged_attention(&ringed, &q, cache, &tables, &lens, sinks.as_ref(), &mut own).unwrap();
            assert!(own.equal(&o), "{what}: rings change bits");
        }
    }
    if split.is_some() {
        // With a fixed split a row alone has the same bits; those of the second group share a whole one.
        let alone = plan(1);
        for row in (0..6).chain(11..14) {
            let of_row = |tensor: &Tensor| tensor.narrow(0, row, 1).contiguous();
            let (mut own, len) = (poison(&[1, heads, dim], kind), of_row(&lens));
            alone.update(&len, None).unwrap();
            let (cache, tables) = (KvBlocks::plain(&k, &v), of_row(&tables));
            kernels::paged_attention(&alone, &of_row(&q), cache, &tables, &len, sinks.as_ref(), &mut own).unwrap();
            assert!(own.equal(&of_row(&o)), "{what}: row {row} depends on its neighbours");
        }
    }
}

/// Sets cache entries that belong to no context to NaN.
fn poison_unused(cache: Tensor, contexts: &Contexts, block_size: i64) -> Tensor {
    let poisoned = cache.full_like(f64::NAN);
    for (row, &len) in contexts.lens.iter().enumerate() {
        for at in 0..(len + block_size - 1) / block_size {
            let block = contexts.tables[row * contexts.max_blocks as usize + at as usize];
            let used = (len - at * block_size).min(block_size);
            poisoned.get(block).narrow(1, 0, used).copy_(&cache.get(block).narrow(1, 0, used));
        }
    }
    poisoned
}

/// The attention of prompts in bfloat16: whole prompts, and rests of prompts whose first tokens are in the cache, with every window.
#[test]
#[ignore = "needs a GPU"]
fn gpu_prompt_attention_with_windows_equals_the_cpus() {
    const KIND: Kind = Kind::BFloat16;
    kernels::prepare(0, 1).unwrap();
    // Tokens of each prompt, and how many of them are new.
    let cases: [&[(i64, i64)]; 2] =
        [&[(300, 300), (1, 1), (70, 70)], &[(300, 172), (717, 17), (1, 1), (501, 1), (64, 63)]];
    for runs in cases {
        for (kv_heads, group, dim) in [(2, 8, 64), (2, 4, 128), (4, 2, 256)] {
            for window in [None, Some(1), Some(64), Some(300)] {
                let scale = (dim as f64).powf(-0.5);
                let (contexts, new): (Vec<i64>, Vec<i64>) = runs.iter().copied().unzip();
                let bounds = |lens: &[i64]| {
                    let sums = lens.iter().scan(0, |sum, len| {
                        *sum += len;
                        Some(*sum)
                    });
                    [0].into_iter().chain(sums).collect::<Vec<_>>()
                };
                let (of_queries, of_keys) = (bounds(&new), bounds(&contexts));
                let (num_queries, num_keys) = (of_queries[runs.len()], of_keys[runs.len()]);
                let q = rand(&[num_queries, kv_heads * group, dim], KIND);
                let [k, v] = [(); 2].map(|()| rand(&[num_keys, kv_heads, dim], KIND));
                let varlen = Varlen {
                    cu_seqlens_q: ints(&of_queries),
                    cu_seqlens_k: ints(&of_keys),
                    max_len_q: new.iter().max().copied().unwrap(),
                    max_len_k: contexts.iter().max().copied().unwrap(),
                    causal: true,
                    window,
                };
                let got = flash_forward(&gpu(&q), &gpu(&k), &gpu(&v), &varlen, scale).unwrap().o;
                for (run, &(len, rows)) in runs.iter().enumerate() {
                    let own = |t: &Tensor| t.narrow(0, of_queries[run], rows);
                    let [k, v] = [&k, &v].map(|t| double(&t.narrow(0, of_keys[run], len)));
                    let expected = last_rows_attended(&double(&own(&q)), [&k, &v], window, scale);
                    let error = relative_error(&own(&got), &expected);
                    assert!(
                        error < 1e-2,
                        "{rows} of {len} tokens, {kv_heads} x {group} x {dim}, {window:?}: {error:e}"
                    );
                }
            }
        }
    }
}

/// Causal attention of the last tokens of a sequence over at most `window` tokens. [S, H, hd]
fn last_rows_attended(
    q: &Tensor,           // [S, H, hd]
    [k, v]: [&Tensor; 2], // [L, Hkv, hd]
    window: Option<i64>,
    scale: f64,
) -> Tensor {
    let (rows, len, group) = (q.size()[0], k.size()[0], q.size()[1] / k.size()[1]);
    let [k, v] = [k, v].map(|t| t.repeat_interleave_self_int(group, 1, None).transpose(0, 1)); // [H, L, hd]
    let at = Tensor::arange_start(len - rows, len, (Kind::Int64, Device::Cpu)).unsqueeze(1);
    let keys = Tensor::arange(len, (Kind::Int64, Device::Cpu));
    let hidden = keys.gt_tensor(&at).logical_or(&keys.le_tensor(&(&at - window.unwrap_or(len))));
    let scores = (q.transpose(0, 1).matmul(&k.transpose(1, 2)) * scale).masked_fill(&hidden, f64::NEG_INFINITY);
    scores.softmax(-1, None::<Kind>).matmul(&v).transpose(0, 1)
}
