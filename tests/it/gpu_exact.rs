//! Exact GEMMs on a GPU, and runs in which sampler and trainer are equal. Ignored without a GPU; results are printed as one
//! JSON line each.

use std::fmt::Display;
use std::path::Path;

use colo_grpo::internal::cuda::kernels::{self, AttentionBlocks, AttentionPlan, KvBlocks};
use colo_grpo::internal::cuda::{Context, Products, Tuning};
use colo_grpo::internal::ops::attention::{Bounds, PackedLayout, SharedBounds, packed_forward};
use colo_grpo::internal::ops::exact::{CachedTiles, ExactAttention, SPLIT_TOKENS};
use colo_grpo::internal::torch;
use serde_json::json;
use tch::{Kind, Tensor};

use crate::on_gpu::{GPU, is_small};
use crate::program::{SMALL_RUN, VARIED_REWARDS, golden_model, metrics, random_model_of, run};

const MAX: &str = "sampling/sampling_logp_difference/max";

/// A matrix of standard normal numbers in bfloat16.
fn rand(rows: i64, columns: i64) -> Tensor {
    Tensor::randn([rows, columns], (Kind::BFloat16, GPU))
}

/// The reference GEMM equals float64 up to rounding.
#[test]
#[ignore = "needs a GPU"]
fn gpu_exact_reference_gemm_matches_float64() {
    kernels::prepare(0, 1).unwrap();
    for [rows, features, k] in [[1, 8, 64], [7, 100, 72], [130, 70, 200], [64, 64, 1024]] {
        let (x, w) = (rand(rows, k), rand(features, k));
        let out = Tensor::full([rows, features], f64::NAN, (Kind::Float, GPU));
        kernels::exact_reference(&x, &w, &out).unwrap();
        let expected = x.to_kind(Kind::Double).matmul(&w.to_kind(Kind::Double).tr());
        let off = (out.to_kind(Kind::Double) - &expected).abs().max().double_value(&[]);
        assert!(off < 1e-5 * (k as f64), "bfloat16 {rows} x {features} x {k}: {off}");
        let [x, w] = [&x, &w].map(|t| t.to_kind(Kind::Float));
        let bias = Tensor::randn([features], (Kind::Float, GPU));
        kernels::exact_product(&x, &w, Some(&bias), &out, false).unwrap();
        let off = (out.to_kind(Kind::Double) - &expected - &bias).abs().max().double_value(&[]);
        assert!(off < 1e-5 * (k as f64), "float32 {rows} x {features} x {k}: {off}");
    }
}

/// For the GEMMs of Qwen2.5-7B, some cuBLASLt algorithms have the reference's bits for every number of rows. Prints them.
#[test]
#[ignore = "needs a GPU"]
fn gpu_some_cublaslt_algorithms_match_the_reference_for_all_row_counts() {
    kernels::prepare(0, 1).unwrap();
    Context::retain(0).unwrap();
    let products = Products::of_current_stream(0).unwrap();
    let shapes = [("qkv", 4608, 3584), ("o", 3584, 3584), ("gate_up", 37_888, 3584), ("down", 3584, 18_944)];
    for (name, features, k) in shapes {
        let (features, k) = if is_small() { (features / 64 * 8, k / 64 * 8) } else { (features, k) };
        let w = rand(features, k);
        let bias = (name == "qkv").then(|| Tensor::randn([features], (Kind::BFloat16, GPU)));
        for rows in [1, 8, 64, 256, 1024, 8192] {
            let (x, out) = (rand(rows, k), Tensor::empty([rows, features], (Kind::BFloat16, GPU)));
            let verdicts = products.exact_verdicts(&x, &w.tr(), bias.as_ref(), &out).unwrap();
            let of = |is_equal: bool| -> Vec<&str> {
                let found = verdicts.iter().filter(|verdict| verdict.is_equal == is_equal);
                found.map(|verdict| &*verdict.algorithm).collect()
            };
            let (equal, unequal) = (of(true), of(false));
            assert!(!equal.is_empty(), "{name}, {rows} rows: {unequal:?}");
            let some = |all: &[&str]| all.iter().take(4).map(|&one| one.to_owned()).collect::<Vec<_>>();
            println!(
                "{}",
                json!({"product": name, "rows": rows, "num_equal": equal.len(), "num_unequal": unequal.len(),
                    "first_is_equal": verdicts.first().map(|first| first.is_equal), "equal": some(&equal), "unequal": some(&unequal)})
            );
        }
    }
    let (w, x) = (rand(152_064, 512), rand(256, 512));
    let out = Tensor::empty([256, 152_064], (Kind::Float, GPU));
    let verdicts = products.exact_verdicts(&x, &w.tr(), None, &out).unwrap();
    let num_equal = verdicts.iter().filter(|verdict| verdict.is_equal).count();
    assert!(num_equal > 0, "no algorithm for the head");
    println!("{}", json!({"product": "head, float32", "rows": 256, "num_equal": num_equal, "num": verdicts.len()}));
}

/// A row's bits are the same for every number of rows and equal the reference's. A long K is split in halves, whose results are added.
#[test]
#[ignore = "needs a GPU"]
fn gpu_exact_rows_are_independent_of_the_batch() {
    kernels::prepare(0, 1).unwrap();
    let products = Products::of_current_stream(0).unwrap();
    for (features, k, parts) in [(3584, 3584, 1), (1152, 896, 1), (896, 4864, 1), (1536, 8960, 2)] {
        let (w, x) = (rand(features, k), rand(4096, k));
        let of = |rows: i64, tuning| {
            let out = Tensor::empty([rows, features], (Kind::BFloat16, GPU));
            products.run(&x.narrow(0, 0, rows), &w.tr(), None, &out, 0.0, tuning).unwrap();
            out
        };
        let all = of(4096, Tuning::Exact);
        for rows in [1, 2, 17, 31, 64, 65, 100, 129, 256, 700, 1000, 1025, 2048, 2500, 3333] {
            assert!(of(rows, Tuning::Exact).equal(&all.narrow(0, 0, rows)), "{rows} rows of {features} x {k}");
        }
        let sums = (0..parts).map(|part| {
            let sums = Tensor::empty([4096, features], (Kind::Float, GPU));
            let own = |factor: &Tensor| factor.narrow(1, part * (k / parts), k / parts);
            kernels::exact_reference(&own(&x), &own(&w), &sums).unwrap();
            sums
        });
        let sums = sums.reduce(|all, sums| all + sums).unwrap();
        assert!(sums.to_kind(Kind::BFloat16).equal(&all), "{features} x {k}");
    }
    torch::release_memory(GPU).unwrap();
}

/// Attention of the last `q.size()[0]` tokens of a sequence, one by one with the kernel of decode steps.
fn by_row([q, k, v]: [&Tensor; 3], window: Option<usize>, scale: f64) -> Tensor {
    let ([rows, heads, hd], [len, kv_heads, _]) = (q.size()[..].try_into().unwrap(), k.size()[..].try_into().unwrap());
    let (rows, heads, hd, len, kv_heads): (i64, i64, i64, i64, i64) = (rows, heads, hd, len, kv_heads);
    let blocks = (len + 15) / 16;
    let cache = |t: &Tensor| {
        let padded = t.constant_pad_nd([0, 0, 0, 0, 0, blocks * 16 - len]);
        padded.view([blocks, 16, kv_heads, hd]).transpose(1, 2).contiguous()
    };
    let shape = kernels::AttentionShape {
        num_heads: heads as usize,
        num_kv_heads: kv_heads as usize,
        head_dim: hd as usize,
        block_size: 16,
        sliding_window: window,
        scale,
    };
    let options = (Kind::BFloat16, GPU);
    let plan = kernels::AttentionPlan::new(shape, options, rows as usize, blocks as usize, Some(SPLIT_TOKENS)).unwrap();
    let lens = Tensor::arange_start(len - rows + 1, len + 1, (Kind::Int, GPU));
    let tables = Tensor::arange(blocks, (Kind::Int, GPU)).repeat([rows, 1]);
    plan.update(&lens, None).unwrap();
    let mut o = q.empty_like();
    kernels::paged_attention(
        &plan,
        &q.contiguous(),
        KvBlocks::plain(&cache(k), &cache(v)),
        &tables,
        &lens,
        None,
        &mut o,
    )
    .unwrap();
    o
}

/// A row's attention has the bits of a decode step, for any neighboring rows and any context. The log-sum-exp is as the backward pass
/// expects.
#[test]
#[ignore = "needs a GPU"]
fn gpu_tiled_attention_equals_decode_bit_for_bit() {
    kernels::prepare(0, 1).unwrap();
    let (prompts, completions) = (vec![0, 20, 36, 536], vec![536, 539, 559, 561, 1300, 1301, 1600]);
    let groups = vec![536, 559, 561, 1600];
    let of_group = [0, 0, 1, 2, 2, 2];
    let shared = Bounds::Shared(SharedBounds { prompts: prompts.clone(), groups, completions: completions.clone() });
    let separate = vec![0, 1, 17, 80, 335, 591, 848, 3900];
    let row_ranges = |bounds: &[i64]| bounds.windows(2).map(|pair| (pair[0], pair[1])).collect::<Vec<_>>();
    let of_completions = row_ranges(&completions).into_iter().zip(of_group).map(|(own, group)| {
        let prompt = (prompts[group], prompts[group + 1]);
        (Some(prompt), own)
    });
    let alone = |bounds: &[i64]| row_ranges(bounds).into_iter().map(|own| (None, own)).collect::<Vec<_>>();
    let cases = [
        (shared, alone(&prompts).into_iter().chain(of_completions).collect::<Vec<_>>()),
        (Bounds::Separate(separate.clone()), alone(&separate)),
    ];
    for (bounds, sequences) in &cases {
        let tokens = sequences.iter().map(|(_, own)| own.1).max().unwrap();
        for (heads, kv_heads, hd) in [(28, 4, 128), (14, 2, 64), (16, 16, 64), (24, 2, 128)] {
            // Scores of some hundred, so that maxima rise and weights vanish.
            let wide = |n: i64| {
                let x = Tensor::randn([tokens, n, hd], (Kind::Float, GPU));
                let scales = Tensor::randint_low(-3, 4, [tokens, n, 1], (Kind::Float, GPU)).exp2();
                (x * scales).to_kind(Kind::BFloat16)
            };
            let [q, k, v] = [wide(heads), wide(kv_heads), wide(kv_heads)];
            for window in [None, Some(1), Some(100), Some(512)] {
                let attention = ExactAttention::new(bounds, window, GPU).unwrap();
                let layout = PackedLayout::of(bounds, kv_heads as usize, window, GPU);
                let scale = (hd as f64).powf(-0.5);
                let found = attention.attend([&q, &k, &v], &layout, scale).unwrap();
                for &(prompt, (from, to)) in sequences {
                    let rows = |t: &Tensor, (from, to): (i64, i64)| t.narrow(0, from, to - from);
                    let context = |t: &Tensor| match prompt {
                        Some(prompt) => Tensor::cat(&[rows(t, prompt), rows(t, (from, to))], 0),
                        None => rows(t, (from, to)),
                    };
                    let expected = by_row([&rows(&q, (from, to)), &context(&k), &context(&v)], window, scale);
                    let off = rows(&found.o, (from, to)).ne_tensor(&expected).sum(Kind::Int64).int64_value(&[]);
                    assert_eq!(
                        off, 0,
                        "{heads}/{kv_heads} x {hd}, window {window:?}, rows {from} to {to} behind {prompt:?}"
                    );
                }
                if window.is_some() && matches!(bounds, Bounds::Shared(_)) {
                    continue; // a layout of shared prompts takes no window
                }
                let of_layout = packed_forward(&q, &k, &v, &layout, scale).unwrap();
                let greatest = of_layout.lse.abs().max().double_value(&[]).max(1.0);
                let off = (found.lse - of_layout.lse).abs().max().double_value(&[]);
                assert!(
                    off < 1e-3 * greatest,
                    "{heads}/{kv_heads} x {hd}, window {window:?}: log-sum-exp off by {off}"
                );
            }
        }
    }
}

/// Prompts over a paged KV cache, and rests of prompts whose first tokens are already in the cache.
#[test]
#[ignore = "needs a GPU"]
fn gpu_tiled_prefill_equals_decode_bit_for_bit() {
    kernels::prepare(0, 1).unwrap();
    let runs = [(0, 700), (300, 333), (0, 17), (1000, 300), (15, 2), (0, 512), (0, 1), (255, 260)];
    for (heads, kv_heads, hd, block_size) in [(28, 4, 128, 16), (14, 2, 64, 32), (24, 2, 128, 16)] {
        let wide = |size: &[i64]| {
            let scales =
                Tensor::randint_low(-3, 4, [&size[..size.len() - 1], &[1]].concat(), (Kind::Float, GPU)).exp2();
            (Tensor::randn(size, (Kind::Float, GPU)) * scales).to_kind(Kind::BFloat16)
        };
        let max_blocks = runs.iter().map(|(before, rows)| (before + rows + block_size - 1) / block_size).max().unwrap();
        let num_blocks = max_blocks * runs.len() as i64;
        let tables = Tensor::randperm(num_blocks, (Kind::Int, GPU)).view([-1, max_blocks]);
        let [k, v] = [(); 2].map(|()| wide(&[num_blocks, kv_heads, block_size, hd]));
        let tokens: i64 = runs.iter().map(|run| run.1).sum();
        let (q, scale) = (wide(&[tokens, heads, hd]), (hd as f64).powf(-0.5));
        for window in [None, Some(1), Some(100), Some(512)] {
            let shape = kernels::AttentionShape {
                num_heads: heads as usize,
                num_kv_heads: kv_heads as usize,
                head_dim: hd as usize,
                block_size: block_size as usize,
                sliding_window: window,
                scale,
            };
            let options = (Kind::BFloat16, GPU);
            let plan = AttentionPlan::new(shape, options, 700, max_blocks as usize, Some(SPLIT_TOKENS)).unwrap();
            let of_runs = runs.map(|(before, rows)| (before as usize, rows as usize));
            // As many blocks as let tiles pay for any window.
            let tiles =
                CachedTiles::new(&of_runs, window, AttentionBlocks { num_blocks: 16, ..plan.blocks().unwrap() }, GPU)
                    .unwrap()
                    .unwrap();
            let mut found = q.full_like(f64::NAN);
            tiles.attend(&q, [&k, &v], &tables, scale, &mut found).unwrap();
            let mut first = 0;
            for (run, (before, rows)) in (0..).zip(runs) {
                let lens = Tensor::arange_start(before + 1, before + rows + 1, (Kind::Int, GPU));
                plan.update(&lens, None).unwrap();
                let own = |t: &Tensor| t.narrow(0, first, rows);
                let (mut expected, table) = (own(&q).empty_like(), tables.narrow(0, run, 1).repeat([rows, 1]));
                kernels::paged_attention(&plan, &own(&q), KvBlocks::plain(&k, &v), &table, &lens, None, &mut expected)
                    .unwrap();
                assert!(expected.equal(&own(&found)), "{shape:?}, {rows} rows behind {before}");
                first += rows;
            }
        }
    }
}

/// The metrics of all steps of a run, which must succeed.
fn steps(keys: &str) -> Vec<serde_json::Value> {
    let folder = tempfile::tempdir().unwrap();
    let line = format!("{SMALL_RUN} device=cuda learning_rate=1e-3 {keys} output_dir={}", folder.path().display());
    let ended = run(&line);
    assert_eq!(ended.code, Some(0), "{line}\n{}", ended.stderr);
    metrics(folder.path()).into_iter().filter(|line| line["loss"].is_number()).collect()
}

/// Runs of four steps, each with other keys, in which the trainer's log-probabilities must equal the sampler's. All are made before any fails.
fn assert_all_exact(runs: &[impl Display]) {
    let mut off = Vec::new();
    for keys in runs {
        let steps = steps(&format!("exact=true max_steps=4 {VARIED_REWARDS} {keys}"));
        let greatest: Vec<_> = steps.iter().map(|step| step[MAX].clone()).collect();
        let is_learning = steps.iter().any(|step| step["grad_norm"].as_f64() > Some(0.0));
        println!(
            "{}",
            json!({"exact": keys.to_string(), "greatest_differences": greatest, "is_learning": is_learning})
        );
        // With partial rollouts a step may train only on tokens of older weights, whose log-probabilities differ.
        let is_partial = keys.to_string().contains("partial_rollout=true");
        let is_exact = |step: &serde_json::Value| match step[MAX].as_f64() {
            Some(greatest) => greatest == 0.0,
            None => is_partial && step["partial_rollout/continued_token_share"].as_f64() == Some(1.0),
        };
        let num_compared = greatest.iter().filter(|max| max.is_number()).count();
        if steps.len() != 4 || !steps.iter().all(is_exact) || num_compared < 2 || !is_learning {
            off.push(format!("{keys}: {greatest:?}, is learning: {is_learning}"));
        }
    }
    assert!(off.is_empty(), "{off:#?}");
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_exact_sampler_and_trainer_agree() {
    assert_all_exact(&[
        "dtype=bfloat16 share_prompts=true gradient_checkpointing=full",
        "dtype=bfloat16 share_prompts=false gradient_checkpointing=none residual_dtype=float32 max_tokens_per_micro_batch=64",
        "dtype=float32 share_prompts=true gradient_checkpointing=selective temperature=0.7",
        "dtype=bfloat16 lora.r=8 lora.target_modules=all-linear oversample=0.5 partial_rollout=true",
        "dtype=float32 lora.r=4 lora.target_modules=all-linear",
    ]);
}

/// The tiny Gemma 3 of tests/golden, with windows of 8 tokens, GELU and heads of 16, which attend row by row; and its shape with heads of 64, which
/// attend in tiles.
#[test]
#[ignore = "needs a GPU"]
fn gpu_exact_sampler_and_trainer_agree_with_windows_and_gelu() {
    let folder = tempfile::tempdir().unwrap();
    let golden = golden_model(&folder.path().join("golden"), "gemma3");
    let wide = random_model_of(folder.path(), "tests/golden/gemma3/config.json", &json!({"head_dim": 64}));
    let run = |model: &Path, keys: &str| {
        format!("max_train_samples=16 max_completion_length=40 model_name_or_path={} {keys}", model.display())
    };
    assert_all_exact(&[
        run(&golden, "dtype=bfloat16"),
        run(&golden, "dtype=float32 gradient_checkpointing=full"),
        run(&wide, "dtype=bfloat16 gradient_checkpointing=selective"),
        run(&wide, "dtype=bfloat16 lora.r=8 lora.target_modules=all-linear"),
    ]);
}

/// Two trainers, with ZeRO 0 to 3.
#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_exact_sampler_and_trainer_agree() {
    assert_all_exact(&[
        "--nproc 2 zero.stage=0 dtype=bfloat16 lora.r=8 lora.target_modules=all-linear",
        "--nproc 2 zero.stage=1 dtype=bfloat16 share_prompts=true",
        "--nproc 2 zero.stage=2 dtype=bfloat16 share_prompts=true gradient_checkpointing=full oversample=1.0 \
         partial_rollout=true max_completion_length=24",
        "--nproc 2 zero.stage=3 dtype=bfloat16 share_prompts=false residual_dtype=float32 max_tokens_per_micro_batch=64",
        "--nproc 2 zero.stage=3 dtype=float32 gradient_checkpointing=selective temperature=0.7 top_p=0.9",
    ]);
}

/// One rank trains, the other one generates.
#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_exact_sampler_and_trainer_agree_in_split_mode() {
    let split = "--nproc 2 zero.stage=0 mode=split split.rollout_gpus=1 residency.optimizer=resident";
    assert_all_exact(&[
        format!("{split} dtype=bfloat16"),
        format!("{split} dtype=float32"),
        format!("{split} dtype=bfloat16 lora.r=8 lora.target_modules=all-linear"),
    ]);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_an_exact_run_ends_when_a_gemm_differs() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!(
        "{SMALL_RUN} device=cuda dtype=bfloat16 max_steps=3 exact=true fault=0:1:forward_backward:unequal output_dir={}",
        folder.path().display()
    );
    let ended = run(&line);
    assert_eq!(ended.code, Some(16), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("log-probabilities of the trainer and of the sampler differ by up to"),
        "{}",
        ended.stderr
    );
}

/// The error comes before the first step and contains the supported values.
#[test]
#[ignore = "needs a GPU"]
fn gpu_exact_refuses_unsupported_models() {
    for (keys, told) in [
        ("kv_block_size=48", "kv_block_size = 48"),
        ("lora.r=4 lora.target_modules=all-linear", "a multiple of 8 with exact = true"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let line = format!(
            "{SMALL_RUN} device=cuda dtype=bfloat16 exact=true max_steps=1 {keys} output_dir={}",
            folder.path().display()
        );
        let ended = run(&line);
        assert_eq!(ended.code, Some(2), "{keys}: {}", ended.stderr);
        assert!(ended.stderr.contains(told), "{keys}: {}", ended.stderr);
    }
}
