//! Compares every kernel with its reference on the CPU, in float64 or float32. Ignored without a GPU; times are printed as
//! one JSON line each.

use std::ops::Range;

use colo_grpo::internal::cuda::kernels;
use colo_grpo::internal::ops::adamw8bit::{self, Maps, Moments8bit};
use colo_grpo::internal::ops::grouped::Dispatch;
use colo_grpo::internal::ops::linear::Onto;
use colo_grpo::internal::ops::random::RandomKey;
use colo_grpo::internal::ops::swiglu::{Activation, GateUp, SwigluGradient};
use colo_grpo::internal::ops::{adamw, norm, rms_norm};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::on_gpu::{GPU, double, gpu, is_small, rand, relative_error, seconds};

#[test]
#[ignore = "needs a GPU"]
fn gpu_adamw_equals_the_cpus_to_rounding() {
    kernels::prepare(0, 1).unwrap();
    // Odd lengths and ranges: no run is a multiple of a block's work.
    for (n, decayed) in
        [(1, vec![]), (1000, vec![3..700, 700..701]), (3_000_001, vec![0..17, 64..1_000_001, 1_000_002..3_000_001])]
    {
        if is_small() && n > 100_000 {
            continue;
        }
        for (grad_kind, weight_kind) in [
            (Kind::Float, None),
            (Kind::Float, Some(Kind::Float)),
            (Kind::Float, Some(Kind::BFloat16)),
            (Kind::BFloat16, Some(Kind::Float)),
            (Kind::BFloat16, Some(Kind::BFloat16)),
        ] {
            compare_adamw(n, &decayed, grad_kind, weight_kind);
        }
    }
}

fn compare_adamw(n: i64, decayed: &[Range<i64>], grad_kind: Kind, weight_kind: Option<Kind>) {
    let rand = || Tensor::randn([n], (Kind::Float, Device::Cpu));
    let mut host = [rand(), rand() * 0.1, rand().square() * 0.01];
    let mut device = host.each_ref().map(|tensor| tensor.to_device(GPU));
    let mut weight = weight_kind.map(|kind| Tensor::full([n], f64::NAN, (kind, GPU)));
    let hyper = adamw::AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    for step in 1..=3 {
        let grad = rand().to_kind(grad_kind);
        let ([master, m, v], mut unused) = (&mut host, grad.empty_like());
        adamw::step(master, m, v, &grad, &mut unused, &hyper, step, 0.7, decayed).unwrap();
        let ([master, m, v], grad) = (&mut device, grad.to_device(GPU));
        match &mut weight {
            None => kernels::adamw(master, m, v, &grad, None, &scalars(&hyper, step, 0.7), decayed).unwrap(),
            Some(weight) => adamw::step(master, m, v, &grad, weight, &hyper, step, 0.7, decayed).unwrap(),
        }
    }
    for ((host, device), what) in host.iter().zip(&device).zip(["master", "m", "v"]) {
        let error = relative_error(device, host);
        assert!(error < 3e-7, "{what} of {n} elements, gradient {grad_kind:?}: {error:e}");
    }
    if let Some(weight) = weight {
        assert!(weight.equal(&device[0].to_kind(weight.kind())), "the weight is the master, rounded to nearest");
    }
}

/// Both round alike except in single libtorch operations, so a moment near the middle between two levels may get the other code.
#[test]
#[ignore = "needs a GPU"]
fn gpu_adamw8bit_equals_the_cpus_to_rounding() {
    kernels::prepare(0, 1).unwrap();
    let kinds = [Kind::Float, Kind::BFloat16];
    for (num_blocks, grad_kind, weight_kind) in [1, 1000, 10_003]
        .into_iter()
        .flat_map(|blocks| kinds.map(|grad| (blocks, grad)))
        .flat_map(|(blocks, grad)| kinds.map(|weight| (blocks, grad, weight)))
    {
        let n = num_blocks * adamw8bit::BLOCK as i64;
        let rand = || Tensor::randn([n], (Kind::Float, Device::Cpu));
        let maps = [Device::Cpu, GPU].map(|device| Maps::new(device).unwrap());
        let codes = |code: u8| Tensor::full([n], i64::from(code), (Kind::Uint8, Device::Cpu));
        let scales = || Tensor::zeros([num_blocks], (Kind::Float, Device::Cpu));
        let host = [codes(adamw8bit::ZERO_M_CODE), codes(0), scales(), scales()];
        let device = host.each_ref().map(|tensor| tensor.to_device(GPU));
        let [host, device] = [Moments8bit::of(&host), Moments8bit::of(&device)];
        let (mut master, mut weight) = (rand(), Tensor::zeros([n], (weight_kind, Device::Cpu)));
        let [mut own_master, mut own_weight] = [&master, &weight].map(|tensor| tensor.to_device(GPU));
        let hyper = adamw::AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
        for step in 1..=3 {
            let grad = rand() * (rand() * 3.0).exp();
            let _ = grad.narrow(0, 0, 256).fill_(if step == 1 { 0.0 } else { 1.0 }); // moments of 0, then of one size
            let (grad, scale) = (grad.to_kind(grad_kind), 0.7);
            adamw8bit::step(&mut master, &host, &maps[0], &grad, &mut weight, &hyper, step, scale).unwrap();
            let grad = grad.to_device(GPU);
            adamw8bit::step(&mut own_master, &device, &maps[1], &grad, &mut own_weight, &hyper, step, scale).unwrap();
            let what = format!("{num_blocks} blocks, gradient {grad_kind:?}, step {step}");
            for (own, host) in [(&device.m_codes, &host.m_codes), (&device.v_codes, &host.v_codes)] {
                let apart = (own.to_device(Device::Cpu).to_kind(Kind::Int) - host.to_kind(Kind::Int)).abs();
                let share = apart.greater(0).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
                assert!(apart.max().int64_value(&[]) <= 1 && share < 1e-4, "{what}: {share} of the codes differ");
            }
            for (own, host) in [(&device.m_absmax, &host.m_absmax), (&device.v_absmax, &host.v_absmax)] {
                assert!(relative_error(own, host) < 3e-7, "{what}: scales");
            }
            let off = (own_master.to_device(Device::Cpu) - &master).abs().max().double_value(&[]);
            assert!(off < 0.1 * hyper.lr, "{what}: {off}");
            assert!(own_weight.equal(&own_master.to_kind(weight_kind)), "the weight is the master, rounded to nearest");
        }
    }
}

fn scalars(hyper: &adamw::AdamW, step: u64, scale: f64) -> kernels::AdamWScalars {
    let &adamw::AdamW { lr, beta1, beta2, eps, weight_decay } = hyper;
    kernels::AdamWScalars {
        keep: (1.0 - lr * weight_decay) as f32,
        beta1: beta1 as f32,
        gain1: (scale * (1.0 - beta1)) as f32,
        beta2: beta2 as f32,
        gain2: (scale * (1.0 - beta2).sqrt()) as f32,
        root_scale: (1.0 / (1.0 - beta2.powi(step as i32)).sqrt()) as f32,
        eps: eps as f32,
        rate: (-lr / (1.0 - beta1.powi(step as i32))) as f32,
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_sums_of_squares_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for kind in [Kind::Float, Kind::BFloat16] {
        let tensors = [1, 64, 4097, 30_000_001].map(|n| Tensor::randn([n], (Kind::Float, GPU)).to_kind(kind));
        let [got, again] = [0, 1].map(|_| norm::sums_of_squares(&tensors).unwrap());
        assert!(got.equal(&again), "the same bits every time");
        let expected = norm::sums_of_squares(&tensors.map(|x| x.to_device(Device::Cpu))).unwrap();
        let error = (got.to_device(Device::Cpu) / expected - 1.0).abs().max().double_value(&[]);
        assert!(error < 1e-12, "{kind:?}: {error:e}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_normal_random_numbers_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    let key = RandomKey::new(7, 9);
    for n in [1, 5, 1_000_003] {
        let mut host = vec![0f32; n];
        key.fill_normal(0, 0, &mut host);
        let host = Tensor::from_slice(&host) * 0.5;
        for (kind, bound) in [(Kind::Float, 3e-7), (Kind::BFloat16, 4e-3)] {
            let mut device = Tensor::full([n as i64], f64::NAN, (kind, GPU));
            kernels::fill_normal(&mut device, key.words(), 0.5).unwrap();
            let error = (device.to_device(Device::Cpu).to_kind(Kind::Double) - &host).abs();
            let most = (error / (host.abs() + 1e-3)).max().double_value(&[]);
            assert!(most < bound, "{n} numbers of {kind:?}: off by {most:e}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_rms_norm_equals_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    let kinds = [Kind::Float, Kind::BFloat16];
    for (x_kind, kind, bound) in [(kinds[0], kinds[0], 2e-6), (kinds[1], kinds[1], 5e-3), (kinds[0], kinds[1], 5e-3)] {
        for (rows, dim) in [(1, 1), (7, 33), (1000, 128), (3001, 3584), (9, 8192), (5, 12_000)] {
            let x = rand(&[rows, dim], x_kind);
            let rand = |shape: &[i64]| rand(shape, kind);
            let (weight, dy) = (rand(&[dim]), rand(&[rows, dim]));
            let (y, rstd) = rms_norm::forward(&double(&x), &double(&weight), 1e-6).unwrap();
            let mut dweight = Tensor::zeros([dim], (Kind::Double, Device::Cpu));
            let residual = rand(&[rows, dim]);
            let wide = [&dy, &x, &weight, &residual].map(double);
            let dx = rms_norm::backward(&wide[0], &wide[1], &wide[2], &rstd, Some(&wide[3]), &mut dweight).unwrap();
            let (got_y, got_rstd) = kernels::rms_norm_forward(&gpu(&x), &gpu(&weight), 1e-6, 0.0).unwrap();
            let run = || {
                let mut dweight = Tensor::zeros([dim], (Kind::Float, GPU));
                let [dy, x, weight, residual] = [&dy, &x, &weight, &residual].map(gpu);
                let dx = kernels::rms_norm_backward(&dy, &x, &weight, &got_rstd, Some(&residual), 0.0, &mut dweight);
                (dx.unwrap(), dweight)
            };
            let ((got_dx, got_dweight), (again, dweight_again)) = (run(), run());
            assert!(again.equal(&got_dx) && dweight_again.equal(&got_dweight), "not the same twice");
            let pairs = [(&got_y, &y), (&got_rstd, &rstd), (&got_dx, &dx), (&got_dweight, &dweight)];
            for ((got, expected), what) in pairs.into_iter().zip(["y", "rstd", "dx", "dweight"]) {
                let error = relative_error(got, expected);
                assert!(error < bound, "{what} of {x_kind:?}, {kind:?} [{rows}, {dim}]: {error:e}");
            }
            assert_eq!((got_y.kind(), got_dx.kind()), (kind, kind));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_swiglu_equals_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    let bounds = [(Kind::Float, 2e-6), (Kind::BFloat16, 5e-3)];
    let both = |activation| bounds.map(|(kind, bound)| (activation, kind, bound));
    for (activation, kind, bound) in
        [Activation::Silu, Activation::GeluTanh, Activation::ClampedSwiglu].into_iter().flat_map(both)
    {
        for (tokens, width) in [(1, 1), (3, 5), (1000, 512), (33, 18_944)] {
            let rand = |shape: &[i64]| (Tensor::randn(shape, (Kind::Double, Device::Cpu)) * 3.0).to_kind(kind);
            let (gate_up, dy) = (rand(&[tokens, 2 * width]), rand(&[tokens, width]));
            let part = |at| gate_up.to_kind(Kind::Double).view([tokens, width, 2]).select(2, at).contiguous();
            let split = GateUp::Split { gate: part(0), up: part(1) };
            let y = split.activate(activation).unwrap();
            let SwigluGradient { d_gate_up: d, act } = split.backward(activation, &dy.to_kind(Kind::Double)).unwrap();
            let GateUp::Split { gate, up } = d else { unreachable!() };
            let expected = Tensor::stack(&[gate, up], 2).view([tokens, 2 * width]);
            let got_y = kernels::swiglu_forward(activation, &gate_up.to_device(GPU)).unwrap();
            let [got, got_act] =
                kernels::swiglu_backward(activation, &dy.to_device(GPU), gate_up.to_device(GPU)).unwrap();
            let weights = Tensor::rand([tokens, 1], (Kind::Float, Device::Cpu));
            let wide = weights.to_kind(Kind::Double);
            let [weighted, weighted_act, d_weights] =
                kernels::swiglu_weighted_backward(activation, &gpu(&dy), &gpu(&weights), gpu(&gate_up)).unwrap();
            let of_weights = (double(&act) * double(&dy)).sum_dim_intlist(-1, false, Kind::Double);
            let (expected_weighted, expected_act) = (double(&expected) * &wide, double(&act) * &wide);
            let pairs = [
                (got_y, y),
                (got, expected),
                (got_act, act),
                (weighted, expected_weighted),
                (weighted_act, expected_act),
                (d_weights, of_weights),
            ];
            let names = ["y", "d_gate_up", "y of the backward", "weighted d_gate_up", "weighted y", "d_weights"];
            for ((got, expected), what) in pairs.iter().zip(names) {
                let error = relative_error(got, expected);
                assert!(error < bound, "{what} of {activation:?} {kind:?} [{tokens}, {width}]: {error:e}");
            }
        }
    }
}

/// Tokens sorted by expert and grouped GEMMs, compared with one GEMM per group in float64. Expert 2 has no rows; all tokens go to one
/// expert; or nearly all of 512 experts have no rows.
#[test]
#[ignore = "needs a GPU"]
fn gpu_grouped_gemms_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for (kind, bound) in [(Kind::Float, 1e-5), (Kind::BFloat16, 1e-2)] {
        for ([tokens, hidden, width, num_experts, k], all_on) in [
            ([1, 64, 32, 8, 2], None),
            ([77, 64, 48, 8, 3], None),
            ([1000, 256, 96, 128, 8], None),
            ([300, 64, 32, 16, 1], Some(0)),
            ([300, 64, 32, 16, 1], Some(15)),
            ([40, 64, 32, 512, 1], Some(511)),
            ([9, 64, 32, 512, 8], None),
            ([700, 128, 64, 512, 10], None),
        ] {
            let rand = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_kind(kind);
            let (x, dy) = (rand(&[tokens, hidden]), rand(&[tokens, hidden]));
            let (gate_up, down) = (rand(&[num_experts, 2 * width, hidden]), rand(&[num_experts, hidden, width]));
            let scores = Tensor::rand([tokens, num_experts], (Kind::Double, Device::Cpu));
            let _ = scores.narrow(1, 2, 1).fill_(-1.0);
            if let Some(expert) = all_on {
                let _ = scores.narrow(1, expert, 1).fill_(2.0);
            }
            let (weights, experts) = scores.topk(k, 1, true, true);
            let run = |device: Device, kind: Kind| {
                let on = |t: &Tensor| t.to_device(device).to_kind(kind);
                let wide = if kind == Kind::BFloat16 { Kind::Float } else { kind };
                let dispatch =
                    Dispatch::new(&experts.to_device(device), num_experts as usize, 0..num_experts as usize, kind)
                        .unwrap();
                let rows = dispatch.scatter(&on(&x)).unwrap();
                let product = dispatch.gate_up(&rows, &on(&gate_up)).unwrap();
                let act = product.activate(Activation::Silu).unwrap();
                let y = dispatch.forward(&act, &on(&down)).unwrap();
                let y = dispatch.gather(&y, Some(&weights.to_device(device).to_kind(wide))).unwrap();
                let d_rows = dispatch.scatter(&on(&dy)).unwrap();
                let d_act = dispatch.backward_input(&d_rows, &on(&down)).unwrap();
                let mut d_down = Tensor::full(down.size(), f64::NAN, (wide, device));
                dispatch.weight_gradient(&d_rows, &act, &mut d_down, Onto::Nothing).unwrap();
                let d = product.backward(Activation::Silu, &d_act).unwrap().d_gate_up;
                let mut d_gate_up = Tensor::zeros(gate_up.size(), (wide, device));
                dispatch.gate_up_weight_gradient(&d, &rows, &mut d_gate_up, Onto::Sum).unwrap();
                let dx = dispatch.gate_up_backward_input(&d, &on(&gate_up)).unwrap();
                [y, dispatch.gather(&dx, None).unwrap(), d_down, d_gate_up]
            };
            let pairs = run(GPU, kind).into_iter().zip(run(Device::Cpu, Kind::Double));
            for ((got, expected), what) in pairs.zip(["y", "dx", "d_down", "d_gate_up"]) {
                let error = relative_error(&got, &expected);
                assert!(error < bound, "{what} of {kind:?}, {tokens} tokens, {num_experts} experts: {error:e}");
            }
        }
    }
}

/// The contribution is added to a gradient, or overwrites it, without rounding, for any first row of a group. Groups without rows add nothing or
/// overwrite with zeros. Elements outside a slice are unchanged.
#[test]
#[ignore = "needs a GPU"]
fn gpu_grouped_weight_gradients_are_summed_in_float32() {
    kernels::prepare(0, 1).unwrap();
    for (sizes, features, columns) in [
        (vec![100, 0, 1, 63], 256, 256),
        (vec![64, 65, 300, 7], 192, 320),
        (vec![1000, 0, 17], 1536, 2048),
        (vec![3], 8, 72),
    ] {
        let (experts, rows) = (sizes.len() as i64, sizes.iter().sum::<i64>());
        let [dy, x] = [features, columns].map(|width| Tensor::randn([rows, width], (Kind::BFloat16, GPU)));
        let ends = Tensor::from_slice(&sizes).cumsum(0, Kind::Int64).to_kind(Kind::Int).to_device(GPU);
        for adds in [true, false] {
            let whole = Tensor::randn([experts, features + 4, columns + 8], (Kind::Float, GPU));
            let expected = whole.to_device(Device::Cpu).to_kind(Kind::Double);
            let slice = |of: &Tensor| of.narrow(1, 4, features).narrow(2, 8, columns);
            let dw = slice(&whole);
            if !adds {
                let _ = (dw.shallow_clone().fill_(f64::NAN), slice(&expected).fill_(0.0));
            }
            assert!(kernels::grouped_weight_serves(&dy, &x, &dw).unwrap());
            kernels::grouped_weight(&dy, &x, &ends, &dw, adds).unwrap();
            let [dy, x] = [&dy, &x].map(|rows| rows.to_device(Device::Cpu).to_kind(Kind::Double));
            let mut first = 0;
            for (expert, size) in sizes.iter().enumerate() {
                let [dy, x] = [&dy, &x].map(|rows| rows.narrow(0, first, *size));
                let _ = slice(&expected).get(expert as i64).g_add_(&dy.tr().matmul(&x));
                first += size;
            }
            let error = relative_error(&whole, &expected);
            assert!(error < 3e-6, "{sizes:?}, {features} x {columns}, adds: {adds}: {error:e}");
        }
    }
}

/// Times for shapes of Qwen2.5-7B with 16,384 tokens, and the bytes that must be moved.
#[test]
#[ignore = "needs a GPU"]
fn gpu_kernels_run_near_memory_bandwidth() {
    kernels::prepare(0, 1).unwrap();
    const TOKENS: i64 = 16_384;
    let rand = |shape: &[i64], kind| Tensor::randn(shape, (kind, GPU));
    let n = 1i64 << 28;
    let float = || rand(&[n], Kind::Float);
    let (mut master, mut m, mut v) = (float(), float(), float().abs());
    let (grad, mut weight) = (rand(&[n], Kind::BFloat16), rand(&[n], Kind::BFloat16));
    let hyper = adamw::AdamW { lr: 1e-6, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
    let scalars = scalars(&hyper, 10, 1.0);
    report("adamw", n * 28, || {
        kernels::adamw(&mut master, &mut m, &mut v, &grad, Some(&mut weight), &scalars, &[]).unwrap();
    });
    let codes = || Tensor::full([n], 200, (Kind::Uint8, GPU));
    let scales = || Tensor::ones([n / 256], (Kind::Float, GPU));
    let (moments, maps) = (Moments8bit::of(&[codes(), codes(), scales(), scales()]), Maps::new(GPU).unwrap());
    report("adamw8bit", n * 16, || {
        adamw8bit::step(&mut master, &moments, &maps, &grad, &mut weight, &hyper, 10, 1.0).unwrap();
    });
    let (x, scale) = (rand(&[TOKENS, 3584], Kind::BFloat16), rand(&[3584], Kind::BFloat16));
    report("rms_norm_forward", TOKENS * 3584 * 4, || drop(kernels::rms_norm_forward(&x, &scale, 1e-6, 0.0).unwrap()));
    let rstd = kernels::rms_norm_forward(&x, &scale, 1e-6, 0.0).unwrap().1;
    let mut dweight = Tensor::zeros([3584], (Kind::Float, GPU));
    report("rms_norm_backward", TOKENS * 3584 * 6, || {
        drop(kernels::rms_norm_backward(&x, &x, &scale, &rstd, None, 0.0, &mut dweight).unwrap());
    });
    let mut gate_up = rand(&[TOKENS, 37_888], Kind::BFloat16);
    report("swiglu_forward", TOKENS * 18_944 * 6, || {
        drop(kernels::swiglu_forward(Activation::Silu, &gate_up).unwrap())
    });
    let dy = rand(&[TOKENS, 18_944], Kind::BFloat16);
    report("swiglu_backward", TOKENS * 18_944 * 12, || {
        [gate_up, _] = kernels::swiglu_backward(Activation::Silu, &dy, gate_up.shallow_clone()).unwrap();
    });
}

/// Prints the time and the bytes per second. Fails below a quarter of the bandwidth of a copy.
fn report(kernel: &str, bytes: i64, mut run: impl FnMut()) {
    let seconds = seconds(&mut run);
    let (ms, gb_s) = (seconds * 1e3, bytes as f64 / seconds / 1e9);
    println!("{}", json!({"test": "kernel", "kernel": kernel, "ms": ms, "gb_s": gb_s}));
    assert!(gb_s > 1000.0, "{kernel}: {gb_s} GB/s");
}
