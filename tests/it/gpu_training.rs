//! Compares the trainer's fused kernels with the operations that they replace, in float64 on the CPU; and measures times for the shapes of a
//! training step, one JSON line each. Ignored without a GPU.

use colo_grpo::internal::cuda::{Tuning, kernels};
use colo_grpo::internal::ops::heads::{self, HeadGradients, HeadNormWeights};
use colo_grpo::internal::ops::linear::{self, Onto};
use colo_grpo::internal::ops::rope::Rope;
use colo_grpo::internal::ops::swiglu::Activation;
use colo_grpo::internal::ops::{embedding, head};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::gpu_products::products;
use crate::on_gpu::{GPU, relative_error, seconds};

const KINDS: [(Kind, f64); 2] = [(Kind::Float, 1e-5), (Kind::BFloat16, 5e-3)];

#[test]
#[ignore = "needs a GPU"]
fn gpu_attention_heads_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for (kind, bound) in KINDS {
        // Wide heads in 16-byte pieces; 6 and 80 wide take the narrow variant or leave lanes idle.
        for (tokens, groups, group, head_dim) in
            [(1, 1, 1, 2), (37, 2, 7, 128), (300, 4, 7, 64), (65, 3, 1, 80), (9, 2, 2, 6), (40, 8, 5, 256)]
        {
            for (with_norms, zero_centred) in [(false, false), (true, false), (true, true)] {
                // All of a head is turned, or a quarter, as of 256 columns in Qwen3.5, or two columns.
                for turned in [head_dim, (head_dim / 8 * 2).max(2), 2] {
                    compare_heads(kind, bound, [tokens, groups, group, head_dim], turned, (with_norms, zero_centred));
                }
            }
        }
    }
}

fn compare_heads(
    kind: Kind,
    bound: f64,
    [tokens, groups, group, head_dim]: [i64; 4],
    turned: i64,
    (with_norms, zero_centred): (bool, bool),
) {
    let norms = format!("norms {with_norms}, around 0 {zero_centred}");
    let what = format!("{kind:?} [{tokens}, {groups}, {group} + 2, {head_dim}], {turned} columns turned, {norms}");
    let rand = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_kind(kind);
    let positions = Tensor::randint(5000, [tokens], (Kind::Int64, Device::Cpu));
    let rope = Rope::new(turned as usize, 1e6, None);
    let qkv = rand(&[tokens, groups, group + 2, head_dim]);
    let weights = [rand(&[head_dim]), rand(&[head_dim])];
    let kv_heads = [groups * group, groups, groups];
    let d = kv_heads.map(|heads| rand(&[tokens, heads, head_dim]));
    // Everything in float64 on the CPU, and in `kind` on the GPU.
    let run = |kind: Kind, device: Device| {
        let on = |t: &Tensor| t.to_device(device).to_kind(kind);
        let rows = rope.rows(&positions.to_device(device), kind).unwrap();
        let weights = weights.each_ref().map(on);
        // The CPU takes the factors.
        let on_gpu = device == GPU;
        let weights = weights.map(|weight| if zero_centred && !on_gpu { weight + 1.0 } else { weight });
        let zero_centred = zero_centred && on_gpu;
        let norms = with_norms.then_some(HeadNormWeights { q: &weights[0], k: &weights[1], eps: 1e-6, zero_centred });
        let heads = heads::forward(on(&qkv), norms, &rows).unwrap();
        let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
        let lens = [groups * (group + 2) * head_dim, head_dim, head_dim];
        let mut sums = lens.map(|len| Tensor::ones([len], (wide, device)));
        let [d_bias, d_q_weight, d_k_weight] = &mut sums;
        let into = HeadGradients { bias: Some(d_bias), norms: norms.map(|_| [d_q_weight, d_k_weight]) };
        let [dq, dk, dv] = d.each_ref().map(on);
        let d_qkv = heads::backward([&dq, &dk, &dv], heads.qkv.as_ref(), norms, &rows, into).unwrap();
        let [d_bias, d_q_weight, d_k_weight] = sums;
        [heads.q, heads.k, heads.v, d_qkv, d_bias, d_q_weight, d_k_weight]
    };
    let (expected, got, again) = (run(Kind::Double, Device::Cpu), run(kind, GPU), run(kind, GPU));
    let names = ["q", "k", "v", "d_qkv", "d_bias", "d_q_weight", "d_k_weight"];
    for (((expected, got), again), name) in expected.iter().zip(&got).zip(&again).zip(names) {
        assert!(again.equal(got), "{name} of {what}: not the same twice");
        let error = relative_error(got, expected);
        assert!(error < bound, "{name} of {what}: {error:e}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_output_head_equals_the_cpus() {
    let (kind, bound) = KINDS[0];
    head_equals_the_cpus(kind, bound);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_bfloat16_output_head_equals_the_cpus() {
    let (kind, bound) = KINDS[1];
    head_equals_the_cpus(kind, bound);
}

fn head_equals_the_cpus(kind: Kind, bound: f64) {
    kernels::prepare(0, 1).unwrap();
    // A single log-probability near 0 has no relative error worth a bound; this seed draws none.
    tch::manual_seed(7);
    for (tokens, dim, vocabulary, chunk) in [(1, 8, 5, 9), (70, 64, 1003, 32), (33, 96, 151_936, 16), (5, 8, 4096, 5)] {
        for (with_entropy, with_top) in [(false, false), (true, false), (true, true)] {
            let rand = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_kind(kind);
            let (hidden, weight) = (rand(&[tokens, dim]), rand(&[vocabulary, dim]));
            let targets = Tensor::randint(vocabulary, [tokens], (Kind::Int64, Device::Cpu));
            let [dlogprobs, dentropy] = [(); 2].map(|()| rand(&[tokens]));
            let logits = hidden.to_kind(Kind::Double).matmul(&weight.to_kind(Kind::Double).transpose(0, 1));
            let (top_ids, dtop) = (logits.topk(3, 1, true, true).1, rand(&[tokens, 3]));
            let run = |kind: Kind, device: Device| {
                let on = |t: &Tensor| t.to_device(device).to_kind(kind);
                let (hidden, weight, targets) = (on(&hidden), on(&weight), targets.to_device(device));
                let (top_ids, dtop) = (top_ids.to_device(device), on(&dtop));
                let top = if with_top { head::TopTokens::At(&top_ids) } else { head::TopTokens::Nothing };
                let out = head::forward(&hidden, &weight, &targets, 0.7, top, chunk, true).unwrap();
                let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
                let mut dweight = Tensor::zeros([vocabulary, dim], (wide, device));
                let dentropy = with_entropy.then(|| on(&dentropy));
                let d = head::backward(
                    &hidden,
                    &weight,
                    &targets,
                    0.7,
                    out.saved,
                    &on(&dlogprobs),
                    dentropy.as_ref(),
                    with_top.then_some([&top_ids, &dtop]),
                    Some(head::TableSum { sum: &mut dweight, onto: Onto::Sum }),
                )
                .unwrap();
                let top = out.top.map_or_else(|| out.logprobs.shallow_clone(), |top| top.logprobs);
                [out.logprobs, out.entropy, top, d, dweight]
            };
            let (expected, got) = (run(Kind::Double, Device::Cpu), run(kind, GPU));
            // Log-probabilities and entropies are float32 whatever the operands are.
            let bounds = [1e-5, 1e-4, 1e-5, 2.0 * bound, 2.0 * bound];
            for (((expected, got), bound), name) in
                expected.iter().zip(&got).zip(bounds).zip(["logprobs", "entropy", "top", "d_hidden", "dweight"])
            {
                let error = relative_error(got, expected);
                assert!(error < bound, "{name} of {kind:?} [{tokens}, {dim}] x {vocabulary}: {error:e}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_embedding_gradients_are_added_in_order() {
    kernels::prepare(0, 1).unwrap();
    for (kind, bound) in KINDS {
        for (rows, dim, table_rows) in [(0, 8, 3), (1, 1, 1), (500, 33, 7), (3000, 1536, 40), (1000, 5000, 100_000)] {
            let rand = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_kind(kind);
            let (dy, ids) = (rand(&[rows, dim]), Tensor::randint(table_rows, [rows], (Kind::Int64, Device::Cpu)));
            for table_kind in [Kind::Float, kind] {
                let mut expected = Tensor::ones([table_rows, dim], (Kind::Double, Device::Cpu));
                embedding::accumulate(&dy.to_kind(Kind::Double), &ids, &mut expected).unwrap();
                let run = || {
                    let mut table = Tensor::ones([table_rows, dim], (table_kind, GPU));
                    embedding::accumulate(&dy.to_device(GPU), &ids.to_device(GPU), &mut table).unwrap();
                    table
                };
                let got = run();
                assert!(run().equal(&got), "not the same twice");
                let error = relative_error(&got, &expected);
                assert!(error < bound, "{kind:?} [{rows}, {dim}] into {table_kind:?}: {error:e}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_weight_gradients_are_summed_in_float32() {
    kernels::prepare(0, 1).unwrap();
    let rand = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(Kind::BFloat16);
    let (dy, x) = (rand(&[300, 64]), rand(&[300, 96]));
    let mut flat = Tensor::ones([64 * 96 + 64], (Kind::Float, GPU));
    let mut dw = flat.narrow(0, 64, 64 * 96).view([64, 96]);
    for _ in 0..2 {
        linear::accumulate_weight(&dy.to_device(GPU), &x.to_device(GPU), &mut dw).unwrap();
    }
    let exact = dy.to_kind(Kind::Double).tr().mm(&x.to_kind(Kind::Double)) * 2.0 + 1.0;
    assert!(relative_error(&dw, &exact) < 1e-6);
    assert_eq!(flat.narrow_copy(0, 0, 64).sum(Kind::Float).double_value(&[]), 64.0);
    let _ = dw.fill_(f64::NAN);
    linear::weight_gradient(&dy.to_device(GPU), &x.to_device(GPU), &mut dw, Onto::Nothing).unwrap();
    assert!(relative_error(&dw, &((&exact - 1.0) / 2.0)) < 1e-6);
    assert_eq!(flat.narrow_copy(0, 0, 64).sum(Kind::Float).double_value(&[]), 64.0);
    let wide = linear::forward_wide(&x.to_device(GPU), &x.to_device(GPU)).unwrap();
    assert!(relative_error(&wide, &x.to_kind(Kind::Double).mm(&x.to_kind(Kind::Double).tr())) < 1e-6);
    let _ = flat.zero_();
    // Onto a residual stream of float32, which stays as it is.
    let residual = Tensor::randn([300, 300], (Kind::Float, GPU));
    let before = residual.copy();
    let mut y = linear::forward_onto(&residual, &x.to_device(GPU), &x.to_device(GPU)).unwrap();
    let product = x.to_kind(Kind::Double).mm(&x.to_kind(Kind::Double).tr());
    let expected = residual.to_device(Device::Cpu) + &product;
    assert!(relative_error(&y, &expected) < 1e-6 && residual.equal(&before) && y.kind() == Kind::Float);
    linear::accumulate(&x.to_device(GPU), &x.to_device(GPU), &mut y).unwrap();
    assert!(relative_error(&y, &(expected + product)) < 1e-6);
}

/// Microseconds of each kernel on 16,384 tokens of Qwen2.5-1.5B and 7B, and the bytes that must be moved.
#[test]
#[ignore = "needs a GPU"]
fn gpu_training_kernels_run_near_memory_bandwidth() {
    kernels::prepare(0, 1).unwrap();
    const TOKENS: i64 = 16_384;
    let rand = |shape: &[i64], kind| Tensor::randn(shape, (kind, GPU));
    let rope = Rope::new(128, 1e6, None);
    let positions = Tensor::arange(TOKENS, (Kind::Int64, GPU)).remainder(4096);
    let rows = rope.rows(&positions, Kind::BFloat16).unwrap();
    for (model, dim, mlp, groups, group) in [("1.5b", 1536, 8960, 2, 6), ("7b", 3584, 18_944, 4, 7)] {
        let bf16 = |shape: &[i64]| rand(shape, Kind::BFloat16);
        let (x, dy, weight) = (bf16(&[TOKENS, dim]), bf16(&[TOKENS, dim]), bf16(&[dim]));
        let mut dweight = Tensor::zeros([dim], (Kind::Float, GPU));
        let row_bytes = TOKENS * dim * 2;
        let rstd = kernels::rms_norm_forward(&x, &weight, 1e-6, 0.0).unwrap().1;
        report(model, "rms_norm_forward", 2 * row_bytes, || drop(kernels::rms_norm_forward(&x, &weight, 1e-6, 0.0)));
        report(model, "rms_norm_backward", 4 * row_bytes, || {
            drop(kernels::rms_norm_backward(&dy, &x, &weight, &rstd, Some(&x), 0.0, &mut dweight).unwrap());
        });
        let stream = rand(&[TOKENS, dim], Kind::Float);
        report(model, "rms_norm_forward of float32", 3 * row_bytes, || {
            drop(kernels::rms_norm_forward(&stream, &weight, 1e-6, 0.0));
        });
        report(model, "rms_norm_backward of float32", 5 * row_bytes, || {
            drop(kernels::rms_norm_backward(&dy, &stream, &weight, &rstd, Some(&x), 0.0, &mut dweight).unwrap());
        });
        let qkv = bf16(&[TOKENS, groups, group + 2, 128]);
        let qkv_bytes = 2 * qkv.numel() as i64;
        let forward = || heads::forward(qkv.shallow_clone(), None, &rows).unwrap();
        let heads = forward();
        report(model, "heads_forward", 2 * qkv_bytes, || drop(forward()));
        let mut d_bias = Tensor::zeros([groups * (group + 2) * 128], (Kind::Float, GPU));
        report(model, "heads_backward", 2 * qkv_bytes, || {
            let into = HeadGradients { bias: Some(&mut d_bias), norms: None };
            drop(heads::backward([&heads.q, &heads.k, &heads.v], None, None, &rows, into).unwrap());
        });
        let mut gate_up = bf16(&[TOKENS, 2 * mlp]);
        report(model, "swiglu_forward", TOKENS * mlp * 6, || {
            drop(kernels::swiglu_forward(Activation::Silu, &gate_up).unwrap())
        });
        let d_act = bf16(&[TOKENS, mlp]);
        report(model, "swiglu_backward", TOKENS * mlp * 12, || {
            [gate_up, _] = kernels::swiglu_backward(Activation::Silu, &d_act, gate_up.shallow_clone()).unwrap();
        });
        let ids = Tensor::randint(151_936, [TOKENS], (Kind::Int64, GPU));
        let mut table = Tensor::zeros([151_936, dim], (Kind::Float, GPU));
        report(model, "add_rows", row_bytes * 5, || {
            embedding::accumulate(&dy, &ids, &mut table).unwrap();
        });
    }
    let targets = Tensor::randint(151_936, [768], (Kind::Int64, GPU));
    let numbers = [(); 5].map(|()| rand(&[768], Kind::Float));
    let logits = rand(&[768, 151_936], Kind::Float);
    let outputs = [&numbers[0], &numbers[1], &numbers[2]];
    report("head", "head_forward", logits.numel() as i64 * 4, || {
        kernels::head_forward(&logits, &targets, 1.0, outputs).unwrap();
    });
    let of = kernels::HeadRows {
        targets: &targets,
        lse: &numbers[2],
        entropy: &numbers[1],
        dlogprobs: &numbers[3],
        dentropy: Some(&numbers[4]),
    };
    report("head", "head_backward", logits.numel() as i64 * 6, || {
        drop(kernels::head_backward(logits.shallow_clone(), 1.0, &of, Kind::BFloat16).unwrap());
    });
}

/// TFLOP/s of the GEMMs of a training step, with libtorch and with cuBLASLt for each way to choose an algorithm. libtorch's,
/// which training uses, must be nearly as fast.
#[test]
#[ignore = "needs a GPU"]
fn gpu_training_gemms_are_near_the_fastest_algorithm() {
    kernels::prepare(0, 1).unwrap();
    const TOKENS: i64 = 16_384;
    let (products, _current) = products();
    let rand = |shape: &[i64], kind| Tensor::randn(shape, (kind, GPU));
    for (model, dim, mlp, qkv) in [("1.5b", 1536, 8960, 2048), ("7b", 3584, 18_944, 4608)] {
        let shapes = [
            ("qkv", TOKENS, qkv, dim),
            ("o", TOKENS, dim, dim),
            ("gate_up", TOKENS, 2 * mlp, dim),
            ("down", TOKENS, dim, mlp),
            ("head", 768, 151_936, dim),
        ];
        for (name, tokens, n, k) in shapes {
            let (x, w) = (rand(&[tokens, k], Kind::BFloat16), rand(&[n, k], Kind::BFloat16));
            let wide = name == "head";
            let out_kind = if wide { Kind::Float } else { Kind::BFloat16 };
            let (dy, dx) = (rand(&[tokens, n], Kind::BFloat16), rand(&[tokens, k], Kind::BFloat16));
            let (y, mut dw) = (rand(&[tokens, n], out_kind), rand(&[n, k], Kind::Float));
            let rate = |mut run: Box<dyn FnMut() + '_>| (2 * tokens * n * k) as f64 / seconds(&mut run) / 1e12;
            let lt = |a: &Tensor, b: &Tensor, out: &Tensor, beta| {
                [Tuning::First, Tuning::Timed]
                    .map(|tuning| rate(Box::new(|| products.run(a, b, None, out, beta, tuning).unwrap())))
            };
            let torch_forward = rate(Box::new(|| {
                let y = if wide { linear::forward_wide(&x, &w) } else { linear::forward(&x, &w, None) };
                drop(y.unwrap());
            }));
            let forward = lt(&x, &w.tr(), &y, 0.0);
            let torch_dgrad = rate(Box::new(|| drop(linear::backward_input(&dy, &w).unwrap())));
            let dgrad = lt(&dy, &w, &dx, 0.0);
            let torch_wgrad = rate(Box::new(|| linear::accumulate_weight(&dy, &x, &mut dw).unwrap()));
            let wgrad = lt(&dy.tr(), &x, &dw, 1.0);
            let [residual, residual_float32] = [Kind::BFloat16, Kind::Float].map(|kind| {
                let residual = dy.to_kind(kind);
                rate(Box::new(|| drop(linear::forward_onto(&residual, &x, &w).unwrap()))).round()
            });
            for (torch, [_, timed]) in [(torch_forward, forward), (torch_dgrad, dgrad), (torch_wgrad, wgrad)] {
                assert!(torch > 0.6 * timed, "{model}, {name}: {torch} of {timed} TFLOP/s");
            }
            let three = |torch: f64, lt: [f64; 2]| [torch, lt[0], lt[1]].map(f64::round);
            println!(
                "{}",
                json!({"test": "training_product", "model": model, "name": name, "order": "torch, first, timed",
                    "forward": three(torch_forward, forward), "dgrad": three(torch_dgrad, dgrad),
                    "wgrad": three(torch_wgrad, wgrad), "forward_residual": residual,
                    "forward_residual_float32": residual_float32})
            );
        }
    }
}

/// Prints the median time and the bytes per second. Fails below a quarter of the bandwidth of a copy.
fn report(model: &str, kernel: &str, bytes: i64, mut run: impl FnMut()) {
    let seconds = seconds(&mut run);
    let gb_s = bytes as f64 / seconds / 1e9;
    println!(
        "{}",
        json!({"test": "kernel", "model": model, "kernel": kernel, "us": (seconds * 1e7).round() / 10.0, "gb_s": gb_s.round()})
    );
    assert!(gb_s > 1000.0, "{kernel}: {gb_s} GB/s");
}
