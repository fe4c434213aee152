//! Compares every kind of attention with dense attention with an explicit mask, in float64.

use super::*;
use crate::ops::fp8::ScaledRows;
use crate::ops::testing::{assert_close, leaf, rand};
use tch::{Device, Kind, Tensor};

const LENS: [i64; 5] = [5, 0, 40, 3, 33];
const HD: i64 = 8;
const SCALE: f64 = 0.3;

fn cu_seqlens(lens: &[i64]) -> Vec<i64> {
    std::iter::once(0)
        .chain(lens.iter().scan(0, |sum, len| {
            Some({
                *sum += len;
                *sum
            })
        }))
        .collect()
}

/// Dense attention of the last `q` rows of one context, with repeated heads and an explicit mask. Returns (o, log-sum-exp).
fn reference(q: &Tensor, k: &Tensor, v: &Tensor, window: Option<usize>) -> (Tensor, Tensor) {
    let (new, context, group) = (q.size()[0], k.size()[0], q.size()[1] / k.size()[1]);
    let repeat = |t: &Tensor| t.repeat_interleave_self_int(group, 1, None).transpose(0, 1);
    let scores = q.transpose(0, 1).matmul(&repeat(k).transpose(1, 2)) * SCALE; // [H, S, context]
    let hidden: Vec<bool> = (0..new * context)
        .map(|at| (at / context + context - new, at % context))
        .map(|(i, j)| j > i || window.is_some_and(|window| j <= i - window as i64))
        .collect();
    let hidden = Tensor::from_slice(&hidden).view([new, context]);
    let scores = scores.masked_fill(&hidden, f64::NEG_INFINITY);
    let o = scores.softmax(-1, None::<Kind>).matmul(&repeat(v)).transpose(0, 1);
    (o, scores.logsumexp([-1i64], false).transpose(0, 1))
}

/// Covers every group size, with and without a window, and short (explicit) and long (flash) sequences.
#[test]
fn packed_attention_matches_autograd() {
    for (group, heads, window, lens) in [
        (1, 3, None, &LENS[..]),
        (7, 2, None, &LENS),
        (2, 2, Some(6), &LENS),
        (7, 2, None, &[150, 20]),
        (2, 1, Some(50), &[150, 160]),
        (1, 1, Some(2), &[4]),
    ] {
        let cu = cu_seqlens(lens);
        let tokens = *cu.last().unwrap();
        let q = leaf(&rand(&[tokens, heads * group, HD]));
        // v is a strided part of the fused projection, as in a block.
        let (k, v) = (leaf(&rand(&[tokens, heads, HD])), leaf(&rand(&[tokens, heads, 3, HD]).select(2, 1)));
        let parts = cu.windows(2).filter(|w| w[1] > w[0]).map(|w| {
            let [q, k, v] = [&q, &k, &v].map(|t| t.narrow(0, w[0], w[1] - w[0]));
            reference(&q, &k, &v, window)
        });
        let (o, lse): (Vec<_>, Vec<_>) = parts.unzip();
        let (expected, expected_lse) = (Tensor::cat(&o, 0), Tensor::cat(&lse, 0));
        let layout = PackedLayout::new(&cu, heads as usize, window, Device::Cpu);
        assert_equals_autograd([q, k, v], &expected, &expected_lse, &layout);
    }
}

/// Compares forward and backward over `layout` with the results of `reference` for the leaves `q`, `k`, `v`, and with autograd's gradients.
fn assert_equals_autograd([q, k, v]: [Tensor; 3], expected: &Tensor, expected_lse: &Tensor, layout: &PackedLayout) {
    let d_o = rand(&expected.size());
    let grads = Tensor::run_backward(&[(expected * &d_o).sum(None)], &[&q, &k, &v], false, false);
    let [q, k, v] = [q, k, v].map(|t| t.detach());
    let Attended { o, lse } = packed_forward(&q, &k, &v, layout, SCALE).unwrap();
    assert_close(&o, expected);
    assert_close(&lse, expected_lse);
    let QkvGradients { dq, dk, dv } =
        packed_backward(&d_o, SavedAttention { q: &q, k: &k, v: &v, o: &o, lse: &lse }, layout, SCALE).unwrap();
    assert_close(&dq, &grads[0]);
    assert_close(&dk, &grads[1]);
    assert_close(&dv, &grads[2]);
}

/// Compares gradients of shared prompts with those of whole sequences, in which every completion has a copy of its prompt.
#[test]
fn shared_prompts_equal_separate_sequences() {
    for (heads, group, prompts, completions) in [
        (2, 2, &[5i64, 3][..], &[&[4i64, 1, 7][..], &[2, 2]][..]), // short: explicit
        (1, 7, &[1, 60], &[&[3], &[70, 9]]),
        (2, 1, &[80, 70, 9], &[&[60, 3], &[50], &[100, 1, 1]]), // long: flash, padded keys
    ] {
        let shared = shared_bounds(prompts, completions);
        let tokens = shared.completions.last().copied().unwrap();
        let (q, k, v) = (
            leaf(&rand(&[tokens, heads * group, HD])),
            leaf(&rand(&[tokens, heads, HD])),
            leaf(&rand(&[tokens, heads, 3, HD]).select(2, 1)),
        );
        let rows = rows_of_sequences(&shared);
        let parts = rows.iter().map(|(rows, prompt_len)| {
            let [q, k, v] = [&q, &k, &v].map(|t| t.index_select(0, rows));
            let (o, lse) = reference(&q, &k, &v, None);
            (o.slice(0, *prompt_len, None, 1), lse.slice(0, *prompt_len, None, 1))
        });
        let (own, own_lse): (Vec<_>, Vec<_>) = parts.unzip();
        let of_prompts = shared.prompts.windows(2).map(|w| {
            let [q, k, v] = [&q, &k, &v].map(|t| t.narrow(0, w[0], w[1] - w[0]));
            reference(&q, &k, &v, None)
        });
        let (mut o, mut lse): (Vec<_>, Vec<_>) = of_prompts.unzip();
        o.extend(own);
        lse.extend(own_lse);
        let (expected, expected_lse) = (Tensor::cat(&o, 0), Tensor::cat(&lse, 0));
        let layout = PackedLayout::of(&Bounds::Shared(shared), heads as usize, None, Device::Cpu);
        assert_equals_autograd([q, k, v], &expected, &expected_lse, &layout);
    }
}

fn shared_bounds(prompts: &[i64], completions: &[&[i64]]) -> SharedBounds {
    let prompts = cu_seqlens(prompts);
    let from = *prompts.last().unwrap();
    let offset = |lens: &[i64]| cu_seqlens(lens).into_iter().map(|bound| bound + from).collect();
    let groups: Vec<i64> = completions.iter().map(|lens| lens.iter().sum()).collect();
    SharedBounds { prompts, groups: offset(&groups), completions: offset(&completions.concat()) }
}

/// The rows of each prompt with one of its completions, and the prompt's length.
fn rows_of_sequences(bounds: &SharedBounds) -> Vec<(Tensor, i64)> {
    let with_prompt = |completion: &[i64]| {
        let group = bounds.groups[1..].iter().position(|&end| completion[0] < end).unwrap();
        let prompt = &bounds.prompts[group..group + 2];
        let rows: Vec<i64> = (prompt[0]..prompt[1]).chain(completion[0]..completion[1]).collect();
        (Tensor::from_slice(&rows), prompt[1] - prompt[0])
    };
    bounds.completions.windows(2).map(with_prompt).collect()
}

#[test]
fn attention_accepts_an_empty_batch() {
    let layout = PackedLayout::new(&[0], 2, None, Device::Cpu);
    let (q, k) = (rand(&[0, 4, HD]), rand(&[0, 2, HD]));
    let Attended { o, lse } = packed_forward(&q, &k, &k, &layout, SCALE).unwrap();
    let QkvGradients { dq, dk, .. } =
        packed_backward(&o, SavedAttention { q: &q, k: &k, v: &k, o: &o, lse: &lse }, &layout, SCALE).unwrap();
    assert_eq!((dq.size(), dk.size()), (vec![0, 4, HD], vec![0, 2, HD]));
}

#[test]
fn bfloat16_attention_is_close_to_float32() {
    let (q, kv) = (rand(&[150, 4, HD]), rand(&[150, 2, HD]));
    for cu in [[0, 100, 150], [0, 0, 150]] {
        let layout = PackedLayout::new(&cu, 2, None, Device::Cpu);
        let Attended { o: exact, lse: exact_lse } = packed_forward(&q, &kv, &kv, &layout, SCALE).unwrap();
        let [narrow_q, narrow_kv] = [&q, &kv].map(|t| t.to_kind(Kind::BFloat16));
        let Attended { o, lse } = packed_forward(&narrow_q, &narrow_kv, &narrow_kv, &layout, SCALE).unwrap();
        assert_eq!((o.kind(), lse.kind()), (Kind::BFloat16, Kind::Float));
        let saved = SavedAttention { q: &narrow_q, k: &narrow_kv, v: &narrow_kv, o: &o, lse: &lse };
        let QkvGradients { dq, .. } = packed_backward(&o, saved, &layout, SCALE).unwrap();
        assert_eq!(dq.kind(), Kind::BFloat16);
        assert!(f64::try_from((o.to_kind(Kind::Double) - exact).abs().max()).unwrap() < 0.05);
        assert!(f64::try_from((lse.to_kind(Kind::Double) - exact_lse).abs().max()).unwrap() < 0.05);
    }
}

/// A cache with contexts of length `lens` in scattered blocks: (caches, block tables, k and v of all contexts packed).
fn paged(lens: &[i64], heads: i64, block_size: i64) -> ([Tensor; 2], Tensor, [Tensor; 2]) {
    let max_blocks = lens.iter().map(|len| (len + block_size - 1) / block_size).max().unwrap();
    let num_blocks = max_blocks * lens.len() as i64 + 1;
    let tables = Tensor::randperm(num_blocks - 1, (Kind::Int64, Device::Cpu)) + 1;
    let tables = tables.view([lens.len() as i64, max_blocks]);
    let caches = [(); 2].map(|()| rand(&[num_blocks, heads, block_size, HD]));
    let total: i64 = lens.iter().sum();
    let (k, v) = (rand(&[total, heads, HD]), rand(&[total, heads, HD]));
    let slots: Vec<i64> = lens
        .iter()
        .enumerate()
        .flat_map(|(n, &len)| (0..len).map(move |position| (n, position)))
        .map(|(n, at)| tables.int64_value(&[n as i64, at / block_size]) * block_size + at % block_size)
        .collect();
    let rows = kv_rows(&Tensor::from_slice(&slots), block_size as usize, heads as usize).unwrap();
    write_kv(&caches[0], &caches[1], &k, &v, &rows).unwrap();
    (caches, tables, [k, v])
}

#[test]
fn decode_attention_equals_the_last_row_of_packed_attention() {
    for (group, heads, window) in [(1, 2, None), (7, 2, None), (2, 3, Some(5))] {
        let lens = [9, 1, 17, 4];
        let ([k_cache, v_cache], tables, [k, v]) = paged(&lens, heads, 4);
        let cu = cu_seqlens(&lens);
        let q = rand(&[*cu.last().unwrap(), heads * group, HD]);
        let layout = PackedLayout::new(&cu, heads as usize, window, Device::Cpu);
        let last = Tensor::from_slice(&cu[1..]) - 1;
        let expected = packed_forward(&q, &k, &v, &layout, SCALE).unwrap().o.index_select(0, &last);
        let layout = PagedLayout::new(&tables, &Tensor::from_slice(&lens), 4, heads as usize, window).unwrap();
        let o = paged_decode(&q.index_select(0, &last), &k_cache, &v_cache, &layout, SCALE, false).unwrap().0;
        assert_close(&o, &expected);
    }
}

#[test]
fn padding_rows_of_attention_stay_finite() {
    let ([k_cache, v_cache], tables, _) = paged(&[3, 2], 2, 4);
    let layout = PagedLayout::new(&tables, &Tensor::from_slice(&[3i64, 0]), 4, 2, None).unwrap();
    let o = paged_decode(&rand(&[2, 4, HD]), &k_cache, &v_cache, &layout, SCALE, false).unwrap().0;
    assert!(bool::try_from(o.isfinite().all()).unwrap());
}

#[test]
fn prefill_after_a_cached_prefix_equals_full_prefill() {
    for window in [None, Some(6)] {
        let (lens, new) = ([9, 13, 5, 8], [4, 13, 0, 1]);
        let ([k_cache, v_cache], tables, [k, v]) = paged(&lens, 2, 4);
        let (cu, cu_new) = (cu_seqlens(&lens), cu_seqlens(&new));
        let q = rand(&[*cu_new.last().unwrap(), 6, HD]);
        let context =
            PrefillContext { block_tables: &tables, cu_seqlens_q: &cu_new, context_lens: &lens, num_hidden: 0 };
        let (o, lse) = paged_prefill(&q, [&k_cache, &v_cache], context, SCALE, window, false).unwrap();
        assert!(lse.is_none());
        for n in [0, 1, 3] {
            let [k, v] = [&k, &v].map(|t| t.narrow(0, cu[n], lens[n]));
            let rows = |t: &Tensor| t.narrow(0, cu_new[n], new[n]);
            assert_close(&rows(&o), &reference(&rows(&q), &k, &v, window).0);
        }
    }
}

/// Checks that an 8-bit cache stores each entry rounded by its own scale, and that attention over it equals attention over the rounded entries.
#[test]
fn attention_over_an_8_bit_cache_equals_attention_over_rounded_entries() {
    is_of_rounded_entries(Kind::Float8e4m3fn, 1.0 / 16.0); // half a unit of three bits
    is_of_rounded_entries(Kind::Int8, 0.501 / 127.0);
}

fn is_of_rounded_entries(kind: Kind, most: f64) {
    let (heads, size, hd) = (2, 4, 16);
    let new = || {
        let values = Tensor::zeros([6, heads, size, hd], (Kind::Uint8, Device::Cpu)).view_dtype(kind);
        ScaledRows { values, scales: Tensor::zeros([6, heads, size], (Kind::Float, Device::Cpu)) }
    };
    let (k_cache, v_cache) = (new(), new());
    let sizes = rand(&[9, heads, 1]).exp(); // entries of all magnitudes
    let [k, v] = [(); 2].map(|()| (rand(&[9, heads, hd]) * &sizes).to_kind(Kind::Float));
    let slots = Tensor::from_slice(&[8i64, 9, 10, 11, 20, 21, 0, 1, 2]); // blocks 2 and 5, and block 0
    let rows = kv_rows(&slots, size as usize, heads as usize).unwrap();
    write_kv(&k_cache, &v_cache, &k, &v, &rows).unwrap();
    let plain = [&k_cache, &v_cache].map(|cache| cache.values.to_kind(Kind::Float) * cache.scales.unsqueeze(-1));
    for (cache, new) in plain.iter().zip([&k, &v]) {
        let kept = cache.view([-1, hd]).index_select(0, &rows).view_as(new);
        let off = f64::try_from(((&kept - new).abs() / new.abs().amax([-1], true)).max()).unwrap();
        assert!(off > 0.0 && off < most, "{kind:?}: {off}");
    }
    let tables = Tensor::from_slice(&[2i64, 5, 0, 0]).view([2, 2]);
    let layout =
        PagedLayout::new(&tables, &Tensor::from_slice(&[6i64, 3]), size as usize, heads as usize, None).unwrap();
    let q = rand(&[2, 4, hd]).to_kind(Kind::Float);
    let [own, expected] = [
        paged_decode(&q, &k_cache, &v_cache, &layout, 0.25, false).unwrap().0,
        paged_decode(&q, &plain[0], &plain[1], &layout, 0.25, false).unwrap().0,
    ];
    assert!(own.equal(&expected));
    let q = rand(&[3, 4, hd]).to_kind(Kind::Float);
    let context =
        PrefillContext { block_tables: &tables, cu_seqlens_q: &[0, 2, 3], context_lens: &[6, 3], num_hidden: 0 };
    let prefill =
        |k: &dyn KvEntries, v: &dyn KvEntries| paged_prefill(&q, [k, v], context, 0.25, None, false).unwrap().0;
    assert!(prefill(&k_cache, &v_cache).equal(&prefill(&plain[0], &plain[1])));
}
