//! Rotated int8 rows on a GPU equal the CPU's bit for bit, alone and inside other kernels; so do their GEMMs, for every number of rows.

use colo_grpo::internal::cuda::kernels::{
    Activation, NormOptions, ScaledRows, add_rms_norm, add_rms_norm_8bit, int8_product, int8_silu_mul, quantize_rows,
    silu_mul, silu_mul_8bit,
};
use colo_grpo::internal::ops::int8;
use tch::{Device, Kind, Tensor};

use crate::gpu_products::{products, swiglu_of, written};
use crate::on_gpu::{GPU, is_small};

fn on_gpu([rows, columns]: [i64; 2]) -> ScaledRows {
    let values = Tensor::full([rows, columns], 99, (Kind::Int8, GPU));
    ScaledRows { values, scales: Tensor::full([rows], f64::NAN, (Kind::Float, GPU)) }
}

fn rounded(x: &Tensor) -> ScaledRows {
    let rows = on_gpu(x.size2().map(|(rows, columns)| [rows, columns]).unwrap());
    quantize_rows(x, &rows).unwrap();
    rows
}

fn on_cpu(rows: &ScaledRows) -> ScaledRows {
    ScaledRows { values: rows.values.to_device(Device::Cpu), scales: rows.scales.to_device(Device::Cpu) }
}

fn first(x: &ScaledRows, rows: i64) -> ScaledRows {
    ScaledRows { values: x.values.narrow(0, 0, rows), scales: x.scales.narrow(0, 0, rows) }
}

fn assert_same(got: &ScaledRows, expected: &ScaledRows, what: &str) {
    let (got, expected) = (on_cpu(got), on_cpu(expected));
    assert!(got.scales.equal(&expected.scales), "scales of {what}");
    let apart = got.values.ne_tensor(&expected.values).sum(Kind::Int64).int64_value(&[]);
    assert_eq!(apart, 0, "codes of {what}");
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_int8_row_rounding_equals_the_cpus() {
    let _products = products();
    for (rows, columns) in [(1, 16), (3, 80), (5, 576), (300, 896), (37, 3584), (5, 18_944), (2, 32_768)] {
        let wide = Tensor::randn([rows, columns + 16], (Kind::Float, Device::Cpu));
        let sizes = (Tensor::randn([rows, 1], (Kind::Float, Device::Cpu)) * 12.0).exp(); // rows of all magnitudes
        let wide = (wide * sizes).to_kind(Kind::BFloat16);
        let _ = wide.get(0).fill_(0.0);
        let x = wide.narrow(1, 8, columns);
        let got = rounded(&wide.to_device(GPU).narrow(1, 8, columns));
        assert_same(&got, &int8::rotated_rows(&x).unwrap(), &format!("[{rows}, {columns}]"));
    }
    let broken = Tensor::from_slice(&[1.0, f32::NAN, 2.0, f32::INFINITY]).view([2, 2]).repeat([1, 8]);
    let scales = rounded(&broken.to_kind(Kind::BFloat16).to_device(GPU)).scales;
    assert_eq!(scales.isfinite().any().int64_value(&[]), 0);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_fused_int8_rounding_equals_separate_rounding_bit_for_bit() {
    let _products = products();
    let rand = |shape: [i64; 2], kind| Tensor::randn(shape, (kind, GPU));
    for (rows, columns) in [(1, 64), (7, 896), (256, 3584), (3, 8192), (2, 80)] {
        for kind in [Kind::BFloat16, Kind::Float] {
            let what = format!("the norm of [{rows}, {columns}] {kind:?}");
            let (x, weight) = (rand([rows, columns], kind) * 30, rand([1, columns], Kind::BFloat16).view([columns]));
            let delta = rand([rows, columns], Kind::BFloat16);
            let (mut plain, mut fused) = (x.copy(), x.copy());
            let [mut expected, mut y] = [(); 2].map(|()| Tensor::empty([rows, columns], (Kind::BFloat16, GPU)));
            let norm = NormOptions::plain(1e-6);
            add_rms_norm(&mut plain, Some(&delta), &weight, &mut expected, norm).unwrap();
            let to = on_gpu([rows, columns]);
            add_rms_norm_8bit(&mut fused, Some(&delta), &weight, Some(&mut y), &to, norm).unwrap();
            assert!(fused.equal(&plain) && y.equal(&expected), "{what}");
            assert_same(&to, &rounded(&expected), &what);
        }
    }
    for (rows, columns) in [(1, 16), (5, 4864), (256, 18_944), (1025, 80), (2, 27_648)] {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let pairs = rand([rows, 2 * columns], Kind::BFloat16) * 3;
            let [mut expected, mut y] = [(); 2].map(|()| Tensor::empty([rows, columns], (Kind::BFloat16, GPU)));
            silu_mul(activation, &pairs, &mut expected).unwrap();
            let to = on_gpu([rows, columns]);
            silu_mul_8bit(activation, &pairs, Some(&mut y), &to).unwrap();
            assert_same(&to, &rounded(&expected), &format!("{activation:?} of [{rows}, {columns}]"));
            assert!(y.equal(&expected));
        }
    }
}

/// Operands whose rows have different sizes, so that a wrong scale is noticed.
fn factors([rows, features, k]: [i64; 3]) -> [ScaledRows; 2] {
    [rows, features].map(|rows| {
        let sizes = Tensor::randn([rows, 1], (Kind::Float, GPU)).exp();
        rounded(&(Tensor::randn([rows, k], (Kind::Float, GPU)) * sizes).to_kind(Kind::BFloat16))
    })
}

/// Shapes [N, K] of 7B, of slices of it, of small models, and odd ones.
const SHAPES: [(i64, i64); 9] = [
    (4608, 3584),
    (3584, 3584),
    (3584, 18_944),
    (1152, 3584),
    (9472, 3584),
    (896, 4864),
    (3344, 400),
    (16, 16),
    (5200, 1008),
];

/// Every kernel computes the integer sums exactly, and scales and rounds them as the CPU does.
#[test]
#[ignore = "needs a GPU"]
fn gpu_int8_gemms_equal_integer_sums_bit_for_bit() {
    let (_products, _current) = products();
    for (n, k) in SHAPES {
        if is_small() && k > 1008 {
            continue;
        }
        let [x, w] = factors([600, n, k]);
        let bias = Tensor::randn([n], (Kind::BFloat16, GPU));
        for bias in [None, Some(&bias)] {
            let on_cpu_bias = bias.map(|bias| bias.to_device(Device::Cpu));
            let expected = int8::forward(&on_cpu(&x), &on_cpu(&w), on_cpu_bias.as_ref(), Kind::BFloat16).unwrap();
            let expected = expected.to_device(GPU).to_kind(Kind::Float);
            for rows in [1, 8, 9, 64, 65, 128, 200, 256, 257, 512, 600] {
                let (x, what) = (first(&x, rows), format!("{rows} rows of [{n}, {k}]"));
                let expected = expected.narrow(0, 0, rows);
                assert_eq!(written(&expected, &what, |out| int8_product(&x, &w, bias, out).unwrap()), 0.0, "{what}");
            }
        }
    }
}

/// With SwiGLU a row has the same bits for every number of rows, and they are near those of separate kernels.
#[test]
#[ignore = "needs a GPU"]
fn gpu_int8_gate_up_is_independent_of_the_number_of_rows() {
    let (_products, _current) = products();
    for (n, k) in [(37_888, 3584), (9472, 3584), (9488, 400), (9728, 896), (64, 64)] {
        if is_small() && k > 400 {
            continue;
        }
        let [x, w] = factors([600, n, k]);
        let pairs = Tensor::empty([600, n], (Kind::BFloat16, GPU));
        int8_product(&x, &w, None, &pairs).unwrap();
        let expected = swiglu_of(&pairs);
        let whole = Tensor::empty([600, n / 2], (Kind::BFloat16, GPU));
        int8_silu_mul(&x, &w, &whole).unwrap();
        for rows in [1, 8, 9, 64, 65, 128, 200, 241, 256, 257, 500, 512, 600] {
            let (x, what) = (first(&x, rows), format!("{rows} rows of [{n}, {k}]"));
            let error = written(&expected.narrow(0, 0, rows), &what, |out| int8_silu_mul(&x, &w, out).unwrap());
            assert!(error < 3e-3, "{what}: {error:e}");
            let out = Tensor::empty([rows, n / 2], (Kind::BFloat16, GPU));
            int8_silu_mul(&x, &w, &out).unwrap();
            assert!(out.equal(&whole.narrow(0, 0, rows)), "{what}");
        }
    }
}
