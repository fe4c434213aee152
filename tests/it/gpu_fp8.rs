//! FP8 rounding on a GPU equals the CPU's bit for bit, alone and inside other kernels; GEMMs of rounded operands.

mod cache;

use colo_grpo::internal::cuda::Tuning;
use colo_grpo::internal::cuda::kernels::{
    Activation, NormOptions, ScaledRows, add_rms_norm, add_rms_norm_8bit, gate_up_8bit, gate_up_serves, product_8bit,
    product_serves, product_silu_mul_8bit, quantize_rows, silu_mul, silu_mul_8bit, wide_product_8bit,
    wide_product_serves, wide_product_silu_mul_8bit, wide_product_silu_mul_serves,
};
use colo_grpo::internal::ops::fp8;
use tch::{Device, Kind, Tensor};

use crate::gpu_products::{products, swiglu_of, written};
use crate::on_gpu::{GPU, double, is_small};

fn on_gpu(shape: [i64; 2]) -> ScaledRows {
    fp8::empty(shape, GPU).unwrap()
}

/// Rounds to FP8 with the kernel.
fn rounded(x: &Tensor) -> ScaledRows {
    let rows = on_gpu(x.size2().map(|(rows, columns)| [rows, columns]).unwrap());
    quantize_rows(x, &rows).unwrap();
    rows
}

fn codes(rows: &ScaledRows) -> Tensor {
    rows.values.view_dtype(Kind::Uint8).to_device(Device::Cpu)
}

fn assert_same(got: &ScaledRows, expected: &ScaledRows, what: &str) {
    assert!(got.scales.to_device(Device::Cpu).equal(&expected.scales.to_device(Device::Cpu)), "scales of {what}");
    let apart = codes(got).ne_tensor(&codes(expected)).sum(Kind::Int64).int64_value(&[]);
    assert_eq!(apart, 0, "codes of {what}");
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_fp8_row_rounding_equals_the_cpus() {
    let _products = products();
    for (rows, columns) in [(1, 16), (3, 128), (300, 896), (37, 3584), (5, 18_944), (2, 32_768)] {
        let wide = Tensor::randn([rows, columns + 16], (Kind::Float, Device::Cpu));
        let sizes = (Tensor::randn([rows, 1], (Kind::Float, Device::Cpu)) * 12.0).exp(); // rows of all magnitudes
        let wide = (wide * sizes).to_kind(Kind::BFloat16);
        let _ = wide.get(0).fill_(0.0);
        let _ = wide.narrow(0, rows - 1, 1).narrow(1, 8, 1).fill_(3e38);
        let (x, expected) = (wide.narrow(1, 8, columns), fp8::empty([rows, columns], Device::Cpu).unwrap());
        fp8::round_rows(&x, &expected).unwrap();
        assert_same(&rounded(&wide.to_device(GPU).narrow(1, 8, columns)), &expected, &format!("[{rows}, {columns}]"));
    }
    let broken = Tensor::from_slice(&[1.0, f32::NAN, 2.0, f32::INFINITY]).view([2, 2]).repeat([1, 8]);
    let scales = rounded(&broken.to_kind(Kind::BFloat16).to_device(GPU)).scales;
    assert_eq!(scales.isfinite().any().int64_value(&[]), 0);
}

/// The kernels of norm and SwiGLU round to FP8 like the separate rounding kernel applied to their unrounded outputs.
#[test]
#[ignore = "needs a GPU"]
fn gpu_fused_fp8_rounding_equals_separate_rounding_bit_for_bit() {
    let _products = products();
    let rand = |shape: [i64; 2], kind| Tensor::randn(shape, (kind, GPU));
    for (rows, columns) in [(1, 64), (7, 896), (256, 3584), (3, 8192)] {
        for kind in [Kind::BFloat16, Kind::Float] {
            for has_delta in [false, true] {
                let what = format!("the norm of [{rows}, {columns}] {kind:?}, {has_delta}");
                let (x, weight) =
                    (rand([rows, columns], kind) * 30, rand([1, columns], Kind::BFloat16).view([columns]));
                let delta = has_delta.then(|| rand([rows, columns], Kind::BFloat16));
                let (mut plain, mut fused) = (x.copy(), x.copy());
                let [mut expected, mut y] = [(); 2].map(|()| Tensor::empty([rows, columns], (Kind::BFloat16, GPU)));
                add_rms_norm(&mut plain, delta.as_ref(), &weight, &mut expected, NormOptions::plain(1e-6)).unwrap();
                let to = on_gpu([rows, columns]);
                add_rms_norm_8bit(&mut fused, delta.as_ref(), &weight, Some(&mut y), &to, NormOptions::plain(1e-6))
                    .unwrap();
                assert!(fused.equal(&plain) && y.equal(&expected), "{what}");
                assert_same(&to, &rounded(&expected), &what);
                let alone = on_gpu([rows, columns]);
                add_rms_norm_8bit(&mut x.copy(), delta.as_ref(), &weight, None, &alone, NormOptions::plain(1e-6))
                    .unwrap();
                assert_same(&alone, &to, &what);
            }
        }
    }
    for (rows, columns) in [(1, 16), (5, 4864), (256, 18_944), (2, 27_648)] {
        let pairs = rand([rows, 2 * columns], Kind::BFloat16) * 3;
        let [mut expected, mut y] = [(); 2].map(|()| Tensor::empty([rows, columns], (Kind::BFloat16, GPU)));
        silu_mul(Activation::Silu, &pairs, &mut expected).unwrap();
        for asks in [true, false] {
            let to = on_gpu([rows, columns]);
            silu_mul_8bit(Activation::Silu, &pairs, asks.then_some(&mut y), &to).unwrap();
            assert_same(&to, &rounded(&expected), &format!("silu(gate) up of [{rows}, {columns}]"));
        }
        assert!(y.equal(&expected));
    }
}

/// The product of two quantized matrices, in float64 on the CPU.
fn exact(x: &ScaledRows, w: &ScaledRows) -> Tensor {
    let rows = |rows: &ScaledRows| double(&rows.values.to_kind(Kind::Float)) * double(&rows.scales).unsqueeze(1);
    rows(x).mm(&rows(w).tr())
}

/// Operands whose rows have different sizes, so that a wrong scale is noticed.
fn factors(rows: i64, features: i64, k: i64) -> (ScaledRows, ScaledRows) {
    let rand = |rows: i64| {
        let sizes = Tensor::randn([rows, 1], (Kind::Float, GPU)).exp();
        rounded(&(Tensor::randn([rows, k], (Kind::Float, GPU)) * sizes).to_kind(Kind::BFloat16))
    };
    (rand(rows), rand(features))
}

/// Asserts that the output is as close as permitted by bfloat16 and by tensor-core sums, which keep 14 bits for e4m3.
fn assert_written(expected: &Tensor, what: &str, write: impl Fn(&Tensor)) {
    let error = written(expected, what, write);
    println!("{what}: {error:.1e}");
    assert!(error < 1.5e-2, "{what}: {error:e}");
}

fn first(x: &ScaledRows, rows: i64) -> ScaledRows {
    ScaledRows { values: x.values.narrow(0, 0, rows), scales: x.scales.narrow(0, 0, rows) }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_fp8_gemms_equal_gemms_of_rounded_rows() {
    let (products, _current) = products();
    for (n, k) in [(64, 128), (4608, 3584), (3584, 18_944), (1152, 896), (2048, 1536)] {
        let (x, w) = factors(300, n, k);
        let bias = Tensor::randn([n], (Kind::BFloat16, GPU));
        let sums = exact(&x, &w);
        for rows in [1, 2, 7, 8, 33, 64, 256, 300] {
            // Only query, key and value have a bias, and cuBLASLt has no product in FP8 with one over sums of 18,944.
            for bias in [None, (k <= 8192).then_some(&bias)] {
                for tuning in [Tuning::First, Tuning::Timed] {
                    let expected = bias.map_or_else(|| sums.copy(), |bias| &sums + double(bias)).narrow(0, 0, rows);
                    let expected = expected.to_kind(Kind::Float).to_device(GPU);
                    assert_written(&expected, &format!("{rows} rows of [{n}, {k}] {tuning:?}"), |out| {
                        products.run_fp8(&first(&x, rows), &w, bias, out, tuning).unwrap();
                    });
                }
            }
        }
        assert!(
            products.run_fp8(&x, &w, None, &Tensor::empty([300, n], (Kind::BFloat16, GPU)), Tuning::Fixed).is_err()
        );
    }
}

/// The kernels for few rows, with and without SwiGLU. A row's bits do not depend on the other rows.
#[test]
#[ignore = "needs a GPU"]
fn gpu_own_fp8_gemm_kernels_equal_gemms_of_rounded_rows() {
    let (_products, _current) = products();
    for (n, k) in [(4608, 3584), (3584, 3584), (37_888, 3584), (3584, 18_944), (8448, 144), (5200, 1008)] {
        if is_small() && k > 1008 {
            continue;
        }
        let (x, w) = factors(64, n, k);
        let bias = Tensor::randn([n], (Kind::BFloat16, GPU));
        let sums = exact(&x, &w).to_kind(Kind::Float).to_device(GPU); // [64, N]
        let y = swiglu_of(&sums.to_kind(Kind::BFloat16));
        let expected = [&sums + bias.to_kind(Kind::Float), y];
        let run = |rows: i64| {
            let out = Tensor::empty([rows, n], (Kind::BFloat16, GPU));
            product_8bit(&first(&x, rows), &w, None, &out).unwrap();
            out
        };
        assert!(product_serves(64, &w.values, Some(&bias)).unwrap(), "[{n}, {k}]");
        let whole = run(64);
        for rows in [64, 1, 2, 3, 5, 7, 8, 9, 16, 17, 32, 33, 63] {
            let (x, what) = (first(&x, rows), format!("{rows} rows of [{n}, {k}]"));
            assert_written(&expected[0].narrow(0, 0, rows), &what, |out| {
                product_8bit(&x, &w, Some(&bias), out).unwrap()
            });
            assert_written(&expected[1].narrow(0, 0, rows), &what, |out| {
                product_silu_mul_8bit(&x, &w, out).unwrap();
            });
            assert!(run(rows).equal(&whole.narrow(0, 0, rows)), "{what}");
        }
        // A row that is not a number leaves the others what they were.
        let before = run(8);
        let _ = x.scales.narrow(0, 5, 1).fill_(f64::NAN);
        let after = run(8);
        assert_eq!(after.get(5).isfinite().any().int64_value(&[]), 0);
        for (from, len) in [(0, 5), (6, 2)] {
            assert!(after.narrow(0, from, len).equal(&before.narrow(0, from, len)), "[{n}, {k}]");
        }
    }
}

/// Gate and up with SwiGLU, for 256 and 512 rows and for slightly fewer.
#[test]
#[ignore = "needs a GPU"]
fn gpu_fp8_gate_up_kernel_equals_gemms_of_rounded_rows() {
    let (_products, _current) = products();
    for (n, k) in [(37_888, 3584), (75_776, 144)] {
        if is_small() && k > 144 {
            continue;
        }
        let (x, w) = factors(512, n, k);
        let sums = exact(&x, &w).to_kind(Kind::BFloat16).to_device(GPU); // [512, 2 F]
        let y = swiglu_of(&sums);
        let run = |rows: i64| {
            let out = Tensor::empty([rows, n / 2], (Kind::BFloat16, GPU));
            gate_up_8bit(&first(&x, rows), &w, &out).unwrap();
            out
        };
        for (most, fewer) in [(256, 241), (512, 497)] {
            for rows in [most, fewer] {
                assert!(gate_up_serves(rows as usize, &w.values).unwrap(), "{rows} rows of [{n}, {k}]");
                assert_written(&y.narrow(0, 0, rows), &format!("{rows} rows of [{n}, {k}]"), |out| {
                    gate_up_8bit(&first(&x, rows), &w, out).unwrap();
                });
            }
            assert!(run(fewer).equal(&run(most).narrow(0, 0, fewer)), "[{n}, {k}]");
        }
    }
}

/// The kernel for more rows, with all its tilings. A row's bits do not depend on the other rows.
#[test]
#[ignore = "needs a GPU"]
fn gpu_wide_fp8_gemms_equal_gemms_of_rounded_rows() {
    let (_products, _current) = products();
    let shapes = [
        (3584, 18_944),
        (4608, 3584),
        (4096, 12_288),
        (3584, 3568),
        (3336, 8208),
        (1152, 3584), // slices of four ranks
        (3584, 896),
        (3584, 4736),
        (8200, 400),
        (4600, 400),
        (1144, 400),
        (3336, 400),
        (12_480, 400),
    ];
    for (n, k) in shapes {
        if is_small() && k > 400 {
            continue;
        }
        let (x, w) = factors(256, n, k);
        let bias = Tensor::randn([n], (Kind::BFloat16, GPU));
        let sums = exact(&x, &w).to_kind(Kind::Float).to_device(GPU); // [256, N]
        let with_bias = &sums + bias.to_kind(Kind::Float);
        let run = |rows: i64| {
            let out = Tensor::empty([rows, n], (Kind::BFloat16, GPU));
            wide_product_8bit(&first(&x, rows), &w, None, &out).unwrap();
            out
        };
        let numbers = [(128, [65, 100, 128]), (256, [129, 200, 256])];
        for (most, numbers) in numbers {
            if !wide_product_serves(most as usize, &w.values, None).unwrap() {
                assert!(most == 128 && [1152, 1144].contains(&n), "[{n}, {k}]");
                continue; // too narrow for tiles of all rows
            }
            let whole = run(most);
            for rows in numbers {
                let (x, what) = (first(&x, rows), format!("{rows} rows of [{n}, {k}]"));
                assert!(wide_product_serves(rows as usize, &w.values, Some(&bias)).unwrap(), "{what}");
                assert_written(&sums.narrow(0, 0, rows), &what, |out| wide_product_8bit(&x, &w, None, out).unwrap());
                assert_written(&with_bias.narrow(0, 0, rows), &what, |out| {
                    wide_product_8bit(&x, &w, Some(&bias), out).unwrap();
                });
                assert!(run(rows).equal(&whole.narrow(0, 0, rows)), "{what}");
            }
        }
        for rows in [64, 257] {
            assert!(!wide_product_serves(rows, &w.values, None).unwrap());
        }
        let out = Tensor::empty([64, n], (Kind::BFloat16, GPU));
        assert!(wide_product_8bit(&first(&x, 64), &w, None, &out).is_err());
        // A row that is not a number leaves the others what they were.
        let rows = if wide_product_serves(128, &w.values, None).unwrap() { 128 } else { 256 };
        let expected = run(rows);
        let _ = x.scales.narrow(0, 70, 1).fill_(f64::NAN);
        let got = run(rows);
        assert_eq!(got.get(70).isfinite().any().int64_value(&[]), 0);
        for (from, len) in [(0, 70), (71, rows - 71)] {
            assert!(got.narrow(0, from, len).equal(&expected.narrow(0, from, len)), "[{n}, {k}]");
        }
    }
}

/// Gate and up with SwiGLU, for a tensor-parallel slice that is too narrow for `gate_up.cu`.
#[test]
#[ignore = "needs a GPU"]
fn gpu_narrow_fp8_gate_up_equals_gemms_of_rounded_rows() {
    let (_products, _current) = products();
    for (n, k) in [(9472, 3584), (9488, 400), (5200, 400)] {
        if is_small() && k > 400 {
            continue;
        }
        let (x, w) = factors(256, n, k);
        let sums = exact(&x, &w).to_kind(Kind::BFloat16).to_device(GPU); // [256, N]
        let expected = swiglu_of(&sums);
        let whole = Tensor::empty([256, n / 2], (Kind::BFloat16, GPU));
        wide_product_silu_mul_8bit(&x, &w, &whole).unwrap();
        for rows in [129, 200, 256] {
            let (x, what) = (first(&x, rows), format!("{rows} rows of [{n}, {k}] with SwiGLU"));
            assert!(wide_product_silu_mul_serves(rows as usize, &w.values).unwrap(), "{what}");
            assert_written(&expected.narrow(0, 0, rows), &what, |out| {
                wide_product_silu_mul_8bit(&x, &w, out).unwrap();
            });
            let out = Tensor::empty([rows, n / 2], (Kind::BFloat16, GPU));
            wide_product_silu_mul_8bit(&x, &w, &out).unwrap();
            assert!(out.equal(&whole.narrow(0, 0, rows)), "{what}");
        }
        assert!(!wide_product_silu_mul_serves(128, &w.values).unwrap());
        assert!(wide_product_silu_mul_8bit(&first(&x, 128), &w, &whole).is_err());
    }
}
