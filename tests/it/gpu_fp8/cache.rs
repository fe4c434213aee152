//! 8-bit KV caches: written entries, and attention over them.

use colo_grpo::internal::cuda::kernels::{
    self, AttentionPlan, AttentionShape, HeadTransform, KvBlocks, NormOptions, QkvViews, ScaledRows, SharedPrefixes,
};
use colo_grpo::internal::ops::attention::{PagedLayout, paged_decode};
use colo_grpo::internal::ops::rope::Rope;
use colo_grpo::internal::ops::{fp8, int8};
use tch::{Device, Kind, Tensor};

use super::{assert_same, rounded};
use crate::gpu_decode::Contexts;
use crate::on_gpu::{GPU, double, gpu, ints, is_small, poison, rand, random_ints, relative_error};

const CODES: [Kind; 2] = [Kind::Float8e4m3fn, Kind::Int8];

/// Converts rows [R, hd] to cache entries.
fn entries(rows: ScaledRows, shape: &[i64]) -> ScaledRows {
    ScaledRows { values: rows.values.view(shape), scales: rows.scales.view(&shape[..3]) }
}

/// Queries and keys are those of the bfloat16 kernel, and each cache entry is rounded separately.
#[test]
#[ignore = "needs a GPU"]
fn gpu_fp8_cache_entries_are_rounded_one_by_one() {
    kernels::prepare(0, 1).unwrap();
    const TOKENS: i64 = 9;
    let (block_size, blocks) = (16, 5);
    for (kv_heads, group, dim) in [(2, 7, 128), (4, 1, 64), (1, 3, 96), (1, 2, 48)] {
        let sizes = (rand(&[TOKENS, 1], Kind::Float) * 3.0).exp();
        let product = (rand(&[TOKENS, kv_heads * (group + 2) * dim], Kind::Float) * sizes).to_kind(Kind::BFloat16);
        let (positions, slots) = (ints(&random_ints(0, 1000, TOKENS)), ints(&[3, 16, 17, -1, 79, 40, 41, 0, 64]));
        let rope = Rope::new(dim as usize, 10_000.0, None).table(1000, GPU).unwrap();
        let norm = gpu(&rand(&[dim], Kind::BFloat16));
        for norms in [None, Some((&norm, &norm, NormOptions::plain(1e-6)))] {
            let transform = HeadTransform { norms, rope: &rope };
            let shape = [blocks, kv_heads, block_size, dim];
            let plain = [(); 2].map(|()| Tensor::zeros(shape, (Kind::BFloat16, GPU)));
            let caches = plain.each_ref().map(|cache| entries(rounded(&cache.view([-1, dim])), &shape));
            let run = |write: &dyn Fn(&QkvViews, &mut Tensor)| {
                let product = gpu(&product);
                let views = QkvViews::grouped(&product, kv_heads as usize, group as usize, false);
                let mut q = poison(&[TOKENS, kv_heads * group, dim], Kind::BFloat16);
                write(&views, &mut q);
                (q, product)
            };
            let [k, v] = &plain;
            let expected =
                run(&|views, q| kernels::rope_write_kv(views, &transform, &positions, &slots, q, k, v).unwrap());
            let [k, v] = &caches;
            let got =
                run(&|views, q| kernels::rope_write_kv_scaled(views, &transform, &positions, &slots, q, k, v).unwrap());
            let what = format!("{kv_heads} x {group} x {dim}, norms {}", norms.is_some());
            assert!(got.0.equal(&expected.0) && got.1.equal(&expected.1), "{what}");
            for (cache, plain) in caches.iter().zip(&plain) {
                assert_same(cache, &entries(rounded(&plain.view([-1, dim])), &shape), &what);
            }
        }
    }
}

/// int8 codes equal those that a CPU computes from rotated keys and from values, except near ties; queries and keys are rotated.
#[test]
#[ignore = "needs a GPU"]
fn gpu_int8_cache_entries_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    const TOKENS: i64 = 9;
    let (block_size, blocks) = (16, 5);
    for (kv_heads, group, dim, columns) in [
        (2, 7, 128, 128),
        (4, 1, 64, 64),
        (1, 3, 96, 96),
        (1, 2, 48, 48),
        (1, 2, 128, 64),
        (1, 4, 256, 64),
        (1, 1, 36, 36),
    ] {
        let product = rand(&[TOKENS, kv_heads * (group + 2) * dim], Kind::BFloat16);
        let (positions, slots) = (ints(&random_ints(0, 1000, TOKENS)), ints(&[3, 16, 17, 18, 79, 40, 41, 0, 64]));
        let rope = Rope::new(columns as usize, 10_000.0, None).table(1000, GPU).unwrap();
        let transform = HeadTransform { norms: None, rope: &rope };
        let shape = [blocks, kv_heads, block_size, dim];
        let plain = [(); 2].map(|()| Tensor::zeros(shape, (Kind::BFloat16, GPU)));
        let whole = [(); 2].map(|()| ScaledRows {
            values: Tensor::zeros(shape, (Kind::Int8, GPU)),
            scales: Tensor::zeros(&shape[..3], (Kind::Float, GPU)),
        });
        let run = |write: &dyn Fn(&QkvViews, &mut Tensor)| {
            let product = gpu(&product);
            let views = QkvViews::grouped(&product, kv_heads as usize, group as usize, false);
            let mut q = poison(&[TOKENS, kv_heads * group, dim], Kind::BFloat16);
            write(&views, &mut q);
            (q, views.k.contiguous())
        };
        let [k, v] = &plain;
        let expected = run(&|views, q| kernels::rope_write_kv(views, &transform, &positions, &slots, q, k, v).unwrap());
        let [k, v] = &whole;
        let got =
            run(&|views, q| kernels::rope_write_kv_scaled(views, &transform, &positions, &slots, q, k, v).unwrap());
        let block = int8::hadamard_block(dim as usize, columns as usize);
        let turn = |x: &Tensor| int8::turned_by_hadamard(&x.to_device(Device::Cpu), block).unwrap();
        let what = format!("{kv_heads} x {group} x {dim}, {columns} turned");
        for (got, expected) in [(&got.0, &expected.0), (&got.1, &expected.1)] {
            let error = relative_error(got, &double(&turn(expected)));
            assert!(error < 3e-3, "{what}: {error:e}");
        }
        for (index, (cache, plain)) in whole.iter().zip(&plain).enumerate() {
            let rows = plain.to_device(Device::Cpu).view([-1, dim]);
            let rows = if index == 0 { turn(&rows) } else { rows };
            let values = Tensor::zeros(rows.size(), (Kind::Int8, Device::Cpu));
            let expected = ScaledRows { values, scales: Tensor::zeros([rows.size()[0]], (Kind::Float, Device::Cpu)) };
            int8::round_rows(&rows, &expected).unwrap();
            let cpu = |t: &Tensor| t.to_device(Device::Cpu).to_kind(Kind::Double).flatten(0, -1);
            let off = (cpu(&cache.values) - cpu(&expected.values)).abs();
            let (most, mean) = (off.max().double_value(&[]), off.mean(Kind::Double).double_value(&[]));
            // Sums of 32 columns in another order may round to another bfloat16, which is up to half a step of 127.
            let bounds = if index == 0 { (1.0, 0.1) } else { (0.0, 0.0) };
            assert!(most <= bounds.0 && mean <= bounds.1, "{what}, side {index}: {most}, {mean}");
            let scales = (cpu(&cache.scales) - cpu(&expected.scales)).abs().max().double_value(&[]);
            assert!(scales < 1e-3 * cpu(&expected.scales).max().double_value(&[]) + 1e-9, "{what}: {scales:e}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_paged_attention_over_fp8_equals_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for (kv_heads, group, dim, block_size) in
        [(2, 7, 128, 16), (2, 6, 128, 32), (1, 8, 64, 16), (2, 1, 64, 64), (1, 12, 128, 16), (2, 2, 48, 16)]
    {
        if is_small() && (group, dim) != (7, 128) {
            continue;
        }
        for (window, sharing, split) in
            [(None, 0, None), (Some(100), 0, None), (None, 0, Some(64)), (None, 5, None), (None, 11, None)]
        {
            let shape = AttentionShape {
                num_heads: kv_heads * group,
                num_kv_heads: kv_heads,
                head_dim: dim,
                block_size,
                sliding_window: window,
                scale: 0.2,
            };
            for kind in CODES {
                compare(kind, shape, sharing, split, false);
            }
        }
    }
}

/// Values that are all zero or tiny, next to others: scales of 0 and 1e-38.
#[test]
#[ignore = "needs a GPU"]
fn gpu_paged_attention_over_fp8_accepts_zero_values() {
    kernels::prepare(0, 1).unwrap();
    for (group, dim) in [(7, 128), (1, 64), (2, 48)] {
        for (sharing, split) in [(0, None), (0, Some(64)), (5, None)] {
            for kind in CODES {
                compare(kind, shape_of(group, dim), sharing, split, true);
            }
        }
    }
}

/// A query with NaN gives a row of NaN and does not change other rows; also over a bfloat16 cache.
#[test]
#[ignore = "needs a GPU"]
fn gpu_paged_attention_over_fp8_propagates_nan() {
    kernels::prepare(0, 1).unwrap();
    const ROWS: i64 = 5;
    for (group, dim) in [(7, 128), (1, 64), (2, 48)] {
        let shape = shape_of(group, dim);
        let (heads, dim, block) = (shape.num_heads as i64, dim as i64, shape.block_size as i64);
        let rows = rounded(&gpu(&rand(&[2 * ROWS * 2 * block, dim], Kind::BFloat16)));
        let cache = entries(rows, &[2 * ROWS, 2, block, dim]);
        let (tables, lens) = (ints(&(0..2 * ROWS).collect::<Vec<_>>()).view([ROWS, 2]), ints(&[20, 32, 1, 17, 31]));
        let plan = AttentionPlan::new(shape, (Kind::BFloat16, GPU), ROWS as usize, 2, None).unwrap();
        plan.update(&lens, None).unwrap();
        let plain = gpu(&rand(&[2 * ROWS, 2, block, dim], Kind::BFloat16));
        for is_fp8 in [true, false] {
            let attend = |q: &Tensor| {
                let mut o = poison(&[ROWS, heads, dim], Kind::BFloat16);
                let cache = match is_fp8 {
                    true => KvBlocks::scaled(&cache, &cache),
                    false => KvBlocks::plain(&plain, &plain),
                };
                kernels::paged_attention(&plan, q, cache, &tables, &lens, None, &mut o).unwrap();
                o
            };
            let q = gpu(&rand(&[ROWS, heads, dim], Kind::BFloat16));
            let expected = attend(&q);
            let _ = q.get(3).select(1, 5).fill_(f64::NAN);
            let (got, what) = (attend(&q), format!("{group} x {dim}, FP8 {is_fp8}"));
            assert_eq!(got.get(3).isfinite().any().int64_value(&[]), 0, "{what}");
            for row in [0, 1, 2, 4] {
                assert!(got.get(row).equal(&expected.get(row)), "{what}, row {row}");
            }
        }
    }
}

fn shape_of(group: usize, head_dim: usize) -> AttentionShape {
    AttentionShape { num_heads: 2 * group, num_kv_heads: 2, head_dim, block_size: 16, sliding_window: None, scale: 0.2 }
}

fn compare(kind: Kind, shape: AttentionShape, sharing: i64, split: Option<usize>, has_none: bool) {
    const ROWS: i64 = 37;
    let [heads, kv_heads, dim, block_size] =
        [shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size].map(|size| size as i64);
    let contexts = Contexts::random(ROWS, if is_small() { 150 } else { 700 }, block_size, sharing);
    let cache_shape = [contexts.num_blocks, kv_heads, block_size, dim];
    let q = rand(&[ROWS, heads, dim], Kind::BFloat16);
    // Values of magnitudes that differ by far from token to token, and keys' that scores bear.
    let cache = |spread: f64| {
        let sizes = (rand(&[contexts.num_blocks, kv_heads, block_size, 1], Kind::Float) * spread).exp();
        let plain = (rand(&cache_shape, Kind::Float) * sizes).to_kind(Kind::BFloat16).view([-1, dim]);
        let values = Tensor::empty(plain.size(), (kind, Device::Cpu));
        let rows = ScaledRows { values, scales: Tensor::empty([plain.size()[0]], (Kind::Float, Device::Cpu)) };
        match kind {
            Kind::Int8 => int8::round_rows(&plain, &rows).unwrap(),
            _ => fp8::round_rows(&plain, &rows).unwrap(),
        }
        entries(rows, &cache_shape)
    };
    let (k, v) = (cache(0.5), cache(3.0));
    if has_none {
        let none = Tensor::from_slice(&[1.0f32, 0.0, 1.0, 1e-38, 1.0]).repeat([v.scales.numel() as i64 / 5 + 1]);
        let scaled = &v.scales * none.narrow(0, 0, v.scales.numel() as i64).view_as(&v.scales);
        v.scales.shallow_clone().copy_(&scaled);
    }
    let tables = Tensor::from_slice(&contexts.tables).view([ROWS, contexts.max_blocks]);
    let layout = PagedLayout::new(
        &tables.clamp_min(0),
        &Tensor::from_slice(&contexts.lens),
        shape.block_size,
        shape.num_kv_heads,
        shape.sliding_window,
    )
    .unwrap();
    let expected = paged_decode(&double(&q), &k, &v, &layout, shape.scale, false).unwrap().0;
    let _ = expected.get(0).fill_(0.0); // the row without a sequence

    let (q, lens, tables) = (gpu(&q), ints(&contexts.lens), gpu(&tables.to_kind(Kind::Int)));
    let on_gpu = |rows: &ScaledRows| ScaledRows { values: gpu(&rows.values), scales: gpu(&rows.scales) };
    let (k, v) = (on_gpu(&k), on_gpu(&v));
    let (groups, shared) = (ints(&contexts.groups), ints(&contexts.shared));
    let prefixes = (sharing > 0).then_some(SharedPrefixes { groups: &groups, num_shared_blocks: &shared });
    let place = (Kind::BFloat16, GPU);
    let plan = AttentionPlan::new(shape, place, ROWS as usize, contexts.max_blocks as usize, split).unwrap();
    let mut o = poison(&[ROWS, heads, dim], Kind::BFloat16);
    for _ in 0..2 {
        plan.update(&lens, prefixes).unwrap();
        kernels::paged_attention(&plan, &q, KvBlocks::scaled(&k, &v), &tables, &lens, None, &mut o).unwrap();
        // Row by row: magnitudes differ.
        for row in 1..ROWS {
            let error = relative_error(&o.get(row), &expected.get(row));
            assert!(error < 6e-3, "{kind:?}, {shape:?}, groups of {sharing}, split {split:?}, row {row}: {error:e}");
        }
    }
}
