//! Experts in FP8 on a GPU: compares GEMMs with float64 on the rounded values, with and without adapters; checks that bits do not depend on the
//! batch;
//! tests the GEMMs of training.

use colo_grpo::internal::cuda::kernels::{
    self, ExpertAdapter, ExpertTile, LowRows, NormOptions, RouteOptions, RouteScores, RoutedTokens, RouterNorm,
    ScaledRows, add_rms_norm_fp8, experts_down_fp8, experts_gate_up_fp8, experts_low, fp8_rows, norm_route_fp8,
    norm_route_serves, route, streamed_down_serves, streamed_experts_down, streamed_experts_gate_up,
    streamed_gate_up_serves,
};
use colo_grpo::internal::ops::fp8;
use colo_grpo::internal::ops::grouped::Dispatch;
use tch::{Device, Kind, Tensor};

use crate::gpu_experts::{Case, case};
use crate::gpu_products::products;
use crate::on_gpu::{GPU, double, gpu, is_small, poison, rand, relative_error};

/// Rounds to FP8 on the GPU.
fn rounded(x: &Tensor /* [R, K] */) -> ScaledRows {
    let values = Tensor::zeros(x.size(), (Kind::Float8e4m3fn, GPU));
    let to = ScaledRows { values, scales: poison(&[x.size()[0]], Kind::Float) };
    fp8_rows(&gpu(x), &to).unwrap();
    to
}

/// The rounded values in float64.
fn whole(rows: &ScaledRows) -> Tensor {
    double(&rows.values.to_kind(Kind::Float)) * double(&rows.scales).unsqueeze(1)
}

fn routed(case: &Case, x: &Tensor, router: &Tensor, tile: ExpertTile) -> RoutedTokens {
    let routed = case.routed(tile.rows);
    let (normalised, stride) = (true, case.k as usize);
    let options = RouteOptions { normalised, stride, ..RouteOptions::default() };
    route(&gpu(x), &gpu(router), &routed, &options).unwrap();
    routed
}

/// Multiplies sorted rows [T k, N] by their experts' matrices [E N, K] in float64. Rows of other ranks' experts are left out.
fn product(case: &Case, routed: &RoutedTokens, rows: &Tensor, w: &Tensor) -> Tensor {
    let list = |t: &Tensor| t.to_device(Device::Cpu).to_kind(Kind::Int64).reshape([-1]);
    let experts = list(&routed.experts).index_select(0, &list(&routed.order)); // of sorted rows
    let own = case.own.len() as i64;
    let w = w.view([own, w.size()[0] / own, -1]);
    let y = Tensor::zeros([rows.size()[0], w.size()[1]], (Kind::Double, Device::Cpu));
    for (index, expert) in case.own.clone().enumerate() {
        let of_expert = experts.eq(expert as i64).nonzero().view(-1);
        let part = rows.index_select(0, &of_expert).matmul(&w.get(index as i64).tr());
        let _ = y.shallow_clone().index_copy_(0, &of_expert, &part);
    }
    y
}

/// With every tile size, with and without adapters.
#[test]
#[ignore = "needs a GPU"]
fn gpu_experts_in_fp8_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    let cases = [
        case([1, 64, 32, 8, 2], 0..8, Kind::BFloat16),
        case([33, 128, 192, 8, 2], 0..8, Kind::BFloat16),
        case([300, 512, 96, 128, 8], 0..128, Kind::BFloat16),
        case([257, 528, 48, 300, 8], 0..300, Kind::BFloat16),
        case([900, 320, 80, 5, 3], 0..5, Kind::BFloat16),
    ];
    for case in cases {
        let Case { tokens, hidden, width, experts, k, kind, .. } = case;
        let (x, router) = (rand(&[tokens, hidden], kind), rand(&[experts, hidden], kind) * 0.1);
        let weights = |rows: i64, columns: i64| rounded(&(rand(&[experts * rows, columns], kind) * 0.05));
        let (gate_up, down, x8) = (weights(2 * width, hidden), weights(hidden, width), rounded(&x));
        for tile in ExpertTile::SCALED {
            let routed = routed(&case, &x, &router, tile);
            let order = routed.order.to_device(Device::Cpu).to_kind(Kind::Int64);
            let of_tokens = order.floor_divide(&Tensor::from(k));
            let pairs = product(&case, &routed, &whole(&x8).index_select(0, &of_tokens), &whole(&gate_up));
            let rank = 16;
            let [a, b] = [[rank, hidden], [2 * width, rank]]
                .map(|[rows, columns]| rand(&[experts, rows, columns], kind) * (columns as f64).powf(-0.5));
            let low = poison(&[tokens * k, rank], kind);
            experts_low(tile, LowRows::OfTokens(&gpu(&x)), &gpu(&a), None, &routed, &low).unwrap();
            for is_adapted in [false, true] {
                let b = gpu(&b);
                let adapter = is_adapted.then_some(ExpertAdapter { low: &low, b: &b });
                let act = poison(&[tokens * k, width], kind);
                experts_gate_up_fp8(tile, &x8, &gate_up, adapter, &routed, &act).unwrap();
                let of_adapter = product(&case, &routed, &double(&low), &double(&b.view([-1, rank])));
                let sums = if is_adapted { &pairs + of_adapter } else { pairs.shallow_clone() };
                let sums = sums.view([-1, width, 2]);
                let expected = sums.select(2, 0).silu() * sums.select(2, 1);
                let error = relative_error(&act, &expected);
                assert!(error < 2e-2, "{case:?}, tile {}, adapted {is_adapted}: {error:e}", tile.name());
                let act8 = rounded(&act.to_device(Device::Cpu));
                let rows = poison(&[tokens * k, hidden], kind);
                experts_down_fp8(tile, &act8, &down, None, &routed, &rows).unwrap();
                let expected = product(&case, &routed, &whole(&act8), &whole(&down));
                let sorted = rows.to_device(Device::Cpu).index_select(0, &order);
                let error = relative_error(&sorted, &expected);
                assert!(error < 2e-2, "{case:?}, tile {}: down {error:e}", tile.name());
            }
        }
    }
}

/// A token's row does not depend on the other tokens in the batch.
#[test]
#[ignore = "needs a GPU"]
fn gpu_fp8_experts_are_independent_of_the_batch_bit_for_bit() {
    kernels::prepare(0, 1).unwrap();
    let all = case([700, 512, 96, 16, 4], 0..16, Kind::BFloat16);
    let (x, router) = (rand(&[700, 512], all.kind), rand(&[16, 512], all.kind) * 0.1);
    let gate_up = rounded(&(rand(&[16 * 192, 512], all.kind) * 0.05));
    let by_choice = |tokens: i64| {
        let case = Case { tokens, ..all.clone() };
        let tile = ExpertTile::of(tokens as usize, 4, 16, all.kind, 0).unwrap();
        let (x, act) = (x.narrow(0, 0, tokens), poison(&[tokens * 4, 96], all.kind));
        let routed = routed(&case, &x, &router, tile);
        experts_gate_up_fp8(tile, &rounded(&x), &gate_up, None, &routed, &act).unwrap();
        let places = routed.order.to_kind(Kind::Int64);
        act.zeros_like().index_copy(0, &places, &act)
    };
    let expected = by_choice(700);
    for tokens in [1, 2, 15, 16, 17, 100, 333] {
        assert!(by_choice(tokens).equal(&expected.narrow(0, 0, 4 * tokens)), "{tokens} tokens");
    }
}

/// The norm within the router's kernel gives the bits of both kernels, for residual streams of both types and any number of tokens.
#[test]
#[ignore = "needs a GPU"]
fn gpu_norm_in_the_router_equals_the_norm_before_it() {
    kernels::prepare(0, 1).unwrap();
    for (tokens, experts, k, kind) in [
        (1, 128, 8, Kind::BFloat16),
        (17, 60, 4, Kind::BFloat16),
        (256, 128, 8, Kind::BFloat16),
        (256, 128, 8, Kind::Float),
        (40, 512, 10, Kind::BFloat16),
        (300, 512, 10, Kind::Float),
    ] {
        let case = case([tokens, 2048, 32, experts, k], 0..experts as usize, Kind::BFloat16);
        let shape = [tokens, 2048];
        let (x, delta) = (gpu(&rand(&shape, kind)), gpu(&(rand(&shape, Kind::BFloat16) * 0.7)));
        let weight = gpu(&rand(&[2048], Kind::BFloat16));
        let router = gpu(&(rand(&[experts, 2048], Kind::BFloat16) * 0.1));
        assert!(norm_route_serves(&weight, RouteScores::Softmax).unwrap());
        let options = RouteOptions { normalised: true, stride: k as usize, ..RouteOptions::default() };
        for zero_centred in [false, true] {
            let norm = NormOptions { eps: 1e-6, zero_centred };
            let results = [false, true].map(|is_fused| {
                let (mut x, mut y) = (x.copy(), poison(&shape, Kind::BFloat16));
                let values = Tensor::zeros(shape, (Kind::Float8e4m3fn, GPU));
                let to = ScaledRows { values, scales: poison(&[tokens], Kind::Float) };
                let routed = case.routed(32);
                if is_fused {
                    let of_norm = to.shallow_clone();
                    let before =
                        RouterNorm { x: &mut x, delta: &delta, weight: &weight, y: Some(&mut y), to: of_norm, norm };
                    norm_route_fp8(before, &router, &routed, &options).unwrap();
                } else {
                    add_rms_norm_fp8(&mut x, Some(&delta), &weight, Some(&mut y), &to, norm).unwrap();
                    route(&y, &router, &routed, &options).unwrap();
                }
                let RoutedTokens { experts, weights, order, tiles, counters, .. } = routed;
                [x, y, to.values.view_dtype(Kind::Uint8), to.scales, experts, weights, order, tiles, counters]
            });
            for (index, (apart, fused)) in results[0].iter().zip(&results[1]).enumerate() {
                assert!(apart.equal(fused), "{case:?} {kind:?} {zero_centred}: result {index}");
            }
        }
    }
}

/// The kernel that streams weights for few rows gives the bits of the other kernels: for experts with no rows, one row and several tiles, and a
/// rank's share of experts. Half of the experts are chosen more often, so that prefetched weights are sometimes the wrong ones.
#[test]
#[ignore = "needs a GPU"]
fn gpu_streamed_experts_equal_tiled_ones_bit_for_bit() {
    kernels::prepare(0, 1).unwrap();
    let few = ExpertTile::SCALED[0];
    let cases = [
        case([1, 64, 32, 8, 2], 0..8, Kind::BFloat16),
        case([33, 128, 192, 8, 2], 0..8, Kind::BFloat16),
        case([256, 2048, 768, 128, 8], 0..128, Kind::BFloat16),
        case([256, 512, 208, 128, 8], 32..96, Kind::BFloat16),
        case([257, 528, 48, 300, 8], 0..300, Kind::BFloat16),
        case([900, 320, 80, 5, 3], 0..5, Kind::BFloat16),
        case([40, 4096, 2048, 16, 2], 0..16, Kind::BFloat16),
    ];
    for case in cases {
        let Case { tokens, hidden, width, experts, k, kind, .. } = case;
        let (x, router) = (rand(&[tokens, hidden], kind), rand(&[experts, hidden], kind) * 0.1);
        let _ = router.narrow(0, 0, experts / 2).g_mul_scalar_(4.0);
        let own = case.own.len() as i64;
        let weights = |rows: i64, columns: i64| rounded(&(rand(&[own * rows, columns], kind) * 0.05));
        let (gate_up, down, x8) = (weights(2 * width, hidden), weights(hidden, width), rounded(&x));
        let routed = routed(&case, &x, &router, few);
        assert!(streamed_gate_up_serves(few, &gate_up, &routed).unwrap(), "{case:?}");
        assert!(streamed_down_serves(few, &down, &routed).unwrap(), "{case:?}");
        let bits = |rows: &Tensor| rows.view_dtype(Kind::Int16);
        let [act, expected] = [(); 2].map(|()| poison(&[tokens * k, width], kind));
        experts_gate_up_fp8(few, &x8, &gate_up, None, &routed, &expected).unwrap();
        streamed_experts_gate_up(&x8, &gate_up, &routed, &act).unwrap();
        assert!(bits(&act).equal(&bits(&expected)), "{case:?}: gate and up");
        let act = rand(&[tokens * k, width], kind);
        let [rows, expected] = [(); 2].map(|()| poison(&[tokens * k, hidden], kind));
        experts_down_fp8(few, &rounded(&act), &down, None, &routed, &expected).unwrap();
        streamed_experts_down(&gpu(&act), &down, &routed, &rows).unwrap();
        assert!(bits(&rows).equal(&bits(&expected)), "{case:?}: down");
    }
    let case = case([8, 6144, 16, 8, 2], 0..8, Kind::BFloat16);
    let routed = case.routed(few.rows);
    let wide = ScaledRows {
        values: Tensor::zeros([8 * 32, 6144], (Kind::Float8e4m3fn, GPU)),
        scales: poison(&[256], Kind::Float),
    };
    assert!(!streamed_gate_up_serves(few, &wide, &routed).unwrap(), "no room for the rows");
    assert!(!streamed_down_serves(ExpertTile::SCALED[1], &wide, &routed).unwrap(), "another tile");
}

/// For rows sorted by expert the grouped GEMM is that of the rounded rows. Some experts have no rows.
#[test]
#[ignore = "needs a GPU"]
fn gpu_fp8_grouped_gemms_equal_gemms_of_rounded_rows() {
    let _products = products();
    for [tokens, columns, features, experts, k] in [[33, 64, 48, 8, 2], [5, 96, 272, 16, 4], [700, 2048, 1536, 12, 3]] {
        if is_small() && tokens > 100 {
            continue;
        }
        let rand = |shape: &[i64]| Tensor::randn(shape, (Kind::BFloat16, Device::Cpu));
        let (x, w) = (rand(&[tokens, columns]), rand(&[experts, features, columns]));
        let chosen = Tensor::rand([tokens, experts - 1], (Kind::Float, Device::Cpu)).argsort(1, true).narrow(1, 0, k);
        let forward = |device: Device| {
            let on = |t: &Tensor| t.to_device(device);
            let own = 0..experts as usize;
            let dispatch = Dispatch::new(&on(&chosen), experts as usize, own, Kind::BFloat16).unwrap();
            let rows = dispatch.scatter_fp8(&fp8::rounded(&on(&x)).unwrap()).unwrap();
            let rounded = fp8::rounded(&on(&w).view([experts * features, columns])).unwrap();
            dispatch.forward_fp8(&rows, &rounded, Kind::BFloat16).unwrap()
        };
        let error = relative_error(&forward(GPU), &double(&forward(Device::Cpu)));
        println!("{tokens} tokens, {columns} columns, {features} features, {experts} experts: {error:e}");
        assert!(error < 1e-2, "{tokens} tokens, {columns} columns, {features} features, {experts} experts: {error:e}");
    }
}
