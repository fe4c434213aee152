//! Tests that a row's results do not depend on other rows of the batch.

use tch::{Device, Kind, Tensor};

use super::{ExactAttention, VisibleKeys, activate, attend, heads, logprobs, product, product_wide, rms_norm};
use crate::ops::attention::{Attended, Bounds, PackedLayout, SharedBounds, packed_forward};
use crate::ops::heads::HeadNormWeights;
use crate::ops::rms_norm::NormOptions;
use crate::ops::rope::Rope;
use crate::ops::swiglu::{Activation, GateUp};
use crate::ops::{self};

const KINDS: [Kind; 2] = [Kind::Float, Kind::BFloat16];

fn rand(size: &[i64], kind: Kind) -> Tensor {
    Tensor::randn(size, (Kind::Float, Device::Cpu)).to_kind(kind)
}

fn assert_near(got: &Tensor, expected: &Tensor) {
    let off = (got.to_kind(Kind::Float) - expected.to_kind(Kind::Float)).abs().max().double_value(&[]);
    let most = expected.to_kind(Kind::Float).abs().max().double_value(&[]);
    let rounding = if got.kind() == Kind::BFloat16 { 0.02 } else { 1e-5 };
    assert!(off <= rounding * most.max(1.0), "{off} of {most}");
}

/// Covers sizes around those at which libtorch splits rows and elements.
#[test]
fn exact_rows_have_the_same_bits_in_any_batch() {
    for kind in KINDS {
        for [rows, columns, k] in [[1, 3, 5], [7, 33, 64], [67, 30, 131]] {
            let (x, w, bias) = (rand(&[rows, k], kind), rand(&[columns, k], kind), rand(&[columns], kind));
            let norm = NormOptions { eps: 1e-6, zero_centred: true };
            let weight = rand(&[k], kind);
            let gate_up = |x: &Tensor| GateUp::Split { gate: x.narrow(1, 0, 2), up: x.narrow(1, 2, 2) };
            let all = |x: &Tensor| {
                let targets = Tensor::full([x.size()[0]], 2, (Kind::Int64, Device::Cpu));
                let wide = product_wide(x, &w).unwrap();
                [
                    product(x, &w, Some(&bias)).unwrap(),
                    rms_norm(x, &weight, norm).unwrap(),
                    activate(Activation::Silu, &gate_up(x)).unwrap(),
                    logprobs(&wide, &targets, 0.7).unwrap(),
                    wide,
                ]
            };
            let together = all(&x);
            assert_near(&together[0], &ops::linear::forward(&x, &w, Some(&bias)).unwrap());
            assert_near(&together[1], &norm.forward(&x, &weight).unwrap().0);
            assert_near(&together[2], &gate_up(&x).activate(Activation::Silu).unwrap());
            for row in 0..rows {
                for (alone, together) in all(&x.narrow(0, row, 1)).iter().zip(&together) {
                    assert!(alone.equal(&together.narrow(0, row, 1)), "{kind:?}, row {row} of {rows} x {k}");
                }
            }
        }
    }
}

#[test]
fn exact_heads_match_plain_operations_and_any_batch() {
    let (tokens, groups, group, hd) = (9, 2, 3, 12);
    for kind in KINDS {
        for partial in [8, 12] {
            let rope = Rope::new(partial, 1e4, None);
            let positions = Tensor::from_slice(&[0i64, 1, 2, 7, 900, 3, 3, 0, 65]);
            let (qkv, weights) = (rand(&[tokens, groups, group + 2, hd], kind), [rand(&[hd], kind), rand(&[hd], kind)]);
            let norms = HeadNormWeights { q: &weights[0], k: &weights[1], eps: 1e-6, zero_centred: false };
            for norms in [None, Some(norms)] {
                let of = |qkv: &Tensor, positions: &Tensor| {
                    let made = heads(qkv.copy(), norms, &rope.exact_rows(positions, kind).unwrap()).unwrap();
                    [made.q, made.k, made.v]
                };
                let together = of(&qkv, &positions);
                let plain = ops::heads::forward(qkv.copy(), norms, &rope.rows(&positions, kind).unwrap()).unwrap();
                for (got, expected) in together.iter().zip([&plain.q, &plain.k, &plain.v]) {
                    assert_near(got, expected);
                }
                for token in 0..tokens {
                    let alone = of(&qkv.narrow(0, token, 1), &positions.narrow(0, token, 1));
                    assert!(alone.iter().zip(&together).all(|(own, all)| own.equal(&all.narrow(0, token, 1))));
                }
            }
        }
    }
}

/// A query must have the same output with shared prompts, with repeated prompts, and with a cache of keys.
#[test]
fn exact_attention_is_independent_of_the_cache_layout() {
    let (heads, kv_heads, hd) = (4, 2, 8);
    let shared = Bounds::Shared(SharedBounds { prompts: vec![0, 5], groups: vec![5, 12], completions: vec![5, 8, 12] });
    for kind in KINDS {
        let [q, k, v] = [heads, kv_heads, kv_heads].map(|heads| rand(&[12, heads, hd], kind));
        let layout = PackedLayout::of(&shared, kv_heads as usize, None, Device::Cpu);
        let together = ExactAttention::new(&shared, None, Device::Cpu).unwrap().attend([&q, &k, &v], &layout, 0.3);
        let Attended { o, lse } = together.unwrap();
        let Attended { o: expected, lse: expected_lse } = packed_forward(&q, &k, &v, &layout, 0.3).unwrap();
        assert_near(&o, &expected);
        assert_near(&lse, &expected_lse);
        for completion in [5..8, 8..12] {
            let rows: Vec<i64> = (0..5).chain(completion.clone()).collect();
            let len = rows.len();
            let [q, k, v] = [&q, &k, &v].map(|t| t.index_select(0, &Tensor::from_slice(&rows)));
            let alone = attend(&q, &k, &v, &VisibleKeys::of_tokens(0..0, 0..len, 0, None), 0.3).unwrap().o;
            assert!(alone.narrow(0, 0, 5).equal(&o.narrow(0, 0, 5)));
            let own = completion.end - completion.start;
            assert!(alone.narrow(0, 5, own).equal(&o.narrow(0, completion.start, own)));
        }
    }
}

#[test]
fn exact_attention_windows_keep_the_last_keys() {
    let context = |first, window| VisibleKeys::of_tokens(2..6, 9..12, first, window);
    assert_eq!(context(11, None), [VisibleKeys { prompt: 2..6, own: 9..12 }]);
    assert_eq!(
        context(10, Some(4)),
        [VisibleKeys { prompt: 4..6, own: 9..11 }, VisibleKeys { prompt: 5..6, own: 9..12 }]
    );
    assert_eq!(context(11, Some(2)), [VisibleKeys { prompt: 6..6, own: 10..12 }]);
}
