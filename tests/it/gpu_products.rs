//! Compares cuBLASLt's GEMMs with float64 on the CPU, and measures their times for the shapes of decode steps.

use colo_grpo::internal::cuda::kernels::{
    Activation, gate_up, gate_up_serves, product, product_serves, product_silu_mul, silu_mul,
};
use colo_grpo::internal::cuda::{Context, CurrentStream, Products, TorchStream, Tuning};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::on_gpu::is_small;

const GPU: Device = Device::Cuda(0);

/// A GEMM context, and the guard that makes its stream libtorch's current one.
pub fn products() -> (Products, CurrentStream) {
    let stream = TorchStream::new(&Context::retain(0).unwrap()).unwrap();
    (Products::new(&stream).unwrap(), stream.make_current().unwrap())
}

/// Computes silu(gate) * up of pairs [T, 2 F] in bfloat16, in which gate and up alternate, with its own kernel: [T, F] in float32.
pub fn swiglu_of(pairs: &Tensor) -> Tensor {
    let size = pairs.size();
    let mut y = Tensor::empty([size[0], size[1] / 2], (Kind::BFloat16, GPU));
    silu_mul(Activation::Silu, pairs, &mut y).unwrap();
    y.to_kind(Kind::Float)
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_gemms_equal_the_cpus_in_any_layout() {
    let (products, _current) = products();
    let rand = |shape: [i64; 2], kind| Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind).to_device(GPU);
    for (m, n, k) in [(1, 64, 128), (7, 512, 3584), (256, 1000, 96), (33, 8, 72), (300, 4608, 512)] {
        for (kind, out_kind) in
            [(Kind::BFloat16, Kind::BFloat16), (Kind::BFloat16, Kind::Float), (Kind::Float, Kind::Float)]
        {
            for layout in 0..4 {
                // Factors as slices of wider matrices, either of them the transpose of one.
                let a = if layout & 1 == 0 {
                    rand([m, k + 64], kind).narrow(1, 64, k)
                } else {
                    rand([k, m + 8], kind).narrow(1, 8, m).tr()
                };
                let b = if layout & 2 == 0 {
                    rand([n, k + 64], kind).narrow(1, 0, k).tr()
                } else {
                    rand([k, n + 8], kind).narrow(1, 0, n)
                };
                let bias = (layout == 0).then(|| rand([1, n], out_kind).view([n]));
                let out = rand([m, n + 16], out_kind).narrow(1, 8, n);
                let beta = if layout == 1 { 1.0 } else { 0.0 };
                let double = |tensor: &Tensor| tensor.to_device(Device::Cpu).to_kind(Kind::Double);
                let mut expected = double(&a).mm(&double(&b)) + double(&out) * beta;
                if let Some(bias) = &bias {
                    expected += double(bias);
                }
                let tuning = if layout < 2 { Tuning::Timed } else { Tuning::First };
                products.run(&a, &b, bias.as_ref(), &out, beta as f32, tuning).unwrap();
                let error = (double(&out) - &expected).norm().double_value(&[]) / expected.norm().double_value(&[]);
                let bound = if out_kind == Kind::Float { 5e-6 } else { 4e-3 };
                assert!(error < bound, "[{m}, {k}] x [{k}, {n}] {kind:?} -> {out_kind:?}, layout {layout}: {error:e}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_fixed_gemm_algorithms_are_independent_of_the_batch() {
    let (products, _current) = products();
    for (n, k) in [(1152, 896), (896, 4864), (9728, 896), (4608, 3584), (3584, 18_944)] {
        let [x, w] = [[1500, k], [n, k]].map(|shape| Tensor::randn(shape, (Kind::BFloat16, GPU)));
        let run = |rows: i64| {
            let out = Tensor::empty([rows, n], (Kind::BFloat16, GPU));
            let outcome = products.run(&x.narrow(0, 0, rows), &w.tr(), None, &out, 0.0, Tuning::Fixed);
            outcome.unwrap_or_else(|error| panic!("{rows} rows of [{n}, {k}]: {error}"));
            out
        };
        let whole = run(1500);
        for rows in [1, 2, 7, 16, 33, 64, 100, 200, 256, 300, 1000, 1100] {
            assert!(run(rows).equal(&whole.narrow(0, 0, rows)), "{rows} rows of [{n}, {k}]");
        }
    }
}

fn assert_written(expected: &Tensor, what: &str, write: impl Fn(&Tensor)) {
    let error = written(expected, what, write);
    assert!(error < 5e-3, "{what}: {error:e}");
}

/// Calls `write` twice on a slice of a wider matrix. Returns the error relative to `expected`, and asserts that nothing beside the slice is written.
pub fn written(expected: &Tensor, what: &str, write: impl Fn(&Tensor)) -> f64 {
    let (rows, columns) = expected.size2().unwrap();
    let wide = Tensor::full([rows + 2, columns + 16], 776.0, (Kind::BFloat16, GPU));
    let out = wide.narrow(0, 0, rows).narrow(1, 8, columns);
    (0..2).for_each(|_| write(&out));
    let difference = out.to_kind(Kind::Float) - expected;
    let error = difference.norm().double_value(&[]) / expected.norm().double_value(&[]);
    for margin in [wide.narrow(0, rows, 2), wide.narrow(1, 0, 8), wide.narrow(1, columns + 8, 8)] {
        assert_eq!(margin.ne(776.0).any().int64_value(&[]), 0, "beside {what}");
    }
    error
}

/// The kernels for few rows compared with float32, with and without SwiGLU, with slices of wider matrices as input and output. A row's bits do not
/// depend on the other rows, and nothing is written beside the output.
#[test]
#[ignore = "needs a GPU"]
fn gpu_gemms_with_few_rows_match_float32() {
    let (_products, _current) = products();
    for (n, k) in [(4608, 3584), (3584, 3584), (37_888, 3584), (3584, 18_944), (8448, 72), (5200, 1000)] {
        if is_small() && k > 1000 {
            continue;
        }
        let rand = |rows: i64, columns: i64| Tensor::randn([rows, columns], (Kind::BFloat16, GPU));
        let (x, w, bias) = (rand(64, k + 8).narrow(1, 0, k), rand(n, k + 64).narrow(1, 64, k), rand(1, n).view([n]));
        assert!(product_serves(64, &w, Some(&bias)).unwrap(), "[{n}, {k}]");
        let sums = x.to_kind(Kind::Float).matmul(&w.to_kind(Kind::Float).tr()); // [64, N]
        let pairs = sums.to_kind(Kind::BFloat16);
        let expected = [sums + bias.to_kind(Kind::Float), swiglu_of(&pairs)];
        for rows in [64, 1, 2, 7, 8, 9, 16, 17, 32, 33, 63] {
            for (expected, columns) in expected.iter().zip([n, n / 2]) {
                let x = x.narrow(0, 0, rows);
                assert_written(
                    &expected.narrow(0, 0, rows),
                    &format!("{rows} rows of [{n}, {k}]"),
                    |out| match columns == n {
                        true => product(&x, &w, Some(&bias), out).unwrap(),
                        false => product_silu_mul(&x, &w, out).unwrap(),
                    },
                );
            }
        }
        let run = |rows: i64| {
            let out = Tensor::empty([rows, n], (Kind::BFloat16, GPU));
            product(&x.narrow(0, 0, rows), &w, None, &out).unwrap();
            out
        };
        let all = run(64);
        for rows in [1, 3, 8, 9, 16, 17, 32, 33] {
            assert!(run(rows).equal(&all.narrow(0, 0, rows)), "{rows} rows of [{n}, {k}]");
        }
    }
}

/// The kernel for many rows compared with float32, with slices of wider matrices as input and output.
#[test]
#[ignore = "needs a GPU"]
fn gpu_fused_gate_up_matches_float32() {
    let (_products, _current) = products();
    for (n, k) in [(37_888, 3584), (35_008, 1000), (37_888, 72)] {
        if is_small() && k > 72 {
            continue;
        }
        let rand = |rows: i64, columns: i64| Tensor::randn([rows, columns], (Kind::BFloat16, GPU));
        let (x, w) = (rand(1024, k + 8).narrow(1, 0, k), rand(n, k + 64).narrow(1, 64, k));
        let sums = x.to_kind(Kind::Float).matmul(&w.to_kind(Kind::Float).tr()); // [1024, N]
        let expected = swiglu_of(&sums.to_kind(Kind::BFloat16));
        let run = |rows: i64| {
            let y = Tensor::empty([rows, n / 2], (Kind::BFloat16, GPU));
            gate_up(&x.narrow(0, 0, rows), &w, &y).unwrap();
            y
        };
        for (most, numbers) in
            [(256, [241, 250, 256]), (512, [497, 505, 512]), (768, [753, 760, 768]), (1024, [1009, 1020, 1024])]
        {
            let whole = run(most);
            for rows in numbers {
                let what = format!("{rows} rows of [{n}, {k}]");
                let x = x.narrow(0, 0, rows);
                assert_written(&expected.narrow(0, 0, rows), &what, |y| gate_up(&x, &w, y).unwrap());
                assert!(run(rows).equal(&whole.narrow(0, 0, rows)), "{what}");
            }
        }
        for rows in [0, 240, 513] {
            assert!(!gate_up_serves(rows, &w).unwrap(), "{rows} rows");
        }
    }
}

/// Measures each GEMM of a decode step of Qwen2.5-7B on one GPU in microseconds, with weights not in cache. The algorithm chosen by timing must not
/// be
/// slower than the library's first suggestion. Best of three, measured alternately.
#[test]
#[ignore = "needs a GPU"]
fn gpu_timed_gemm_algorithms_are_not_slower() {
    let (products, _current) = products();
    for (name, n, k, out_kind) in [
        ("qkv", 4608, 3584, Kind::BFloat16),
        ("o", 3584, 3584, Kind::BFloat16),
        ("gate_up", 37_888, 3584, Kind::BFloat16),
        ("down", 3584, 18_944, Kind::BFloat16),
        ("head", 152_064, 3584, Kind::Float),
    ] {
        let copies = ((400i64 << 20) / (2 * n * k)).max(1);
        let weights: Vec<_> = (0..copies).map(|_| Tensor::randn([n, k], (Kind::BFloat16, GPU)).tr()).collect();
        for m in [1, 8, 64, 128, 256, 512, 1024] {
            let x = Tensor::randn([m, k], (Kind::BFloat16, GPU));
            let out = Tensor::empty([m, n], (out_kind, GPU));
            let time = |tuning| {
                let run = || weights.iter().for_each(|w| products.run(&x, w, None, &out, 0.0, tuning).unwrap());
                run();
                tch::Cuda::synchronize(0);
                let rounds = 40 / copies + 2;
                let start = std::time::Instant::now();
                (0..rounds).for_each(|_| run());
                tch::Cuda::synchronize(0);
                start.elapsed().as_secs_f64() * 1e6 / (rounds * copies) as f64
            };
            // In turn: the chip's clock falls while it works.
            let mut times = [f64::INFINITY; 2];
            for _ in 0..3 {
                for (best, tuning) in times.iter_mut().zip([Tuning::First, Tuning::Timed]) {
                    *best = best.min(time(tuning));
                }
            }
            times.iter_mut().for_each(|us| *us = (*us * 10.0).round() / 10.0);
            println!(
                "{}",
                json!({"test": "product", "name": name, "m": m, "first_us": times[0], "timed_us": times[1]})
            );
            assert!(times[1] < 1.1 * times[0] + 1.5, "{m} rows of {name}: {times:?} us");
        }
    }
}
