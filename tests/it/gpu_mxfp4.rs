//! Experts in MXFP4 on a GPU: compares quantization with the CPU's bit for bit, and GEMMs with float64 on the rounded weights; checks that bits do not
//! depend on the batch.

use colo_grpo::internal::cuda::kernels::{
    self, ExpertTile, RouteOptions, RoutedTokens, ScaledRows, experts_combine, mxfp4_experts_down,
    mxfp4_experts_gate_up, mxfp4_quantize, route,
};
use colo_grpo::internal::ops::mxfp4;
use tch::{Device, Kind, Tensor};

use crate::gpu_experts::{Case, case};
use crate::on_gpu::{GPU, double, gpu, is_small, poison, rand, relative_error};

/// The size of experts' matrices.
fn size(w: &Tensor) -> [i64; 3] {
    let &[experts, rows, columns] = &w.size()[..] else { unreachable!() };
    [experts, rows, columns]
}

/// Quantizes on the GPU.
fn packed(w: &Tensor /* [E, N, K] on the GPU */) -> ScaledRows {
    let values = Tensor::full([mxfp4::bytes(size(w))], 7, (Kind::Uint8, GPU));
    mxfp4_quantize(w, &values).unwrap();
    ScaledRows { values, scales: Tensor::zeros([0], (Kind::Float, GPU)) }
}

/// The rounded weights in float64.
fn rounded(w: &Tensor /* [E, N, K] on the GPU */) -> Tensor {
    mxfp4::values(&packed(w).values.to_device(Device::Cpu), size(w), Kind::Double).unwrap()
}

/// The configurations that this GPU supports.
fn tiles() -> Vec<ExpertTile> {
    let streamed = [ExpertTile::MXFP4_FEW, ExpertTile::MXFP4_MANY];
    let has_streamed = ExpertTile::of_mxfp4(1, 1, 1, 0).unwrap() != ExpertTile::MXFP4_ANY;
    streamed.into_iter().filter(|_| has_streamed).chain([ExpertTile::MXFP4_ANY]).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_mxfp4_quantization_equals_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for shape in [[1, 2, 32], [3, 70, 96], [2, 64, 160], [5, 386, 352]] {
        let [experts, rows, columns] = shape;
        let wide = rand(&[experts, rows, columns + 64], Kind::BFloat16);
        let exponents = rand(&[experts, rows, columns + 64], Kind::Float) * 12.0; // scales of very different sizes
        let wide = (wide * exponents.exp2()).to_kind(Kind::BFloat16);
        let _ = wide.get(0).get(1).narrow(0, 40, 1).fill_(f64::INFINITY);
        let _ = wide.get(0).get(0).narrow(0, 32, 32).zero_();
        let slice = gpu(&wide).narrow(2, 32, columns); // of a rank that has some of the columns
        let on_cpu = Tensor::zeros([mxfp4::bytes(shape)], (Kind::Uint8, Device::Cpu));
        mxfp4::round(&wide.narrow(2, 32, columns), &on_cpu).unwrap();
        assert!(packed(&slice).values.to_device(Device::Cpu).equal(&on_cpu), "{shape:?}");
    }
}

fn cases() -> Vec<Case> {
    let mut cases = vec![
        case([1, 64, 32, 8, 2], 0..8, Kind::BFloat16),
        case([33, 128, 192, 8, 2], 0..8, Kind::BFloat16),
        case([70, 352, 96, 5, 3], 0..5, Kind::BFloat16),
        case([300, 512, 96, 128, 8], 32..96, Kind::BFloat16),
        case([900, 320, 160, 5, 3], 0..5, Kind::BFloat16),
        case([257, 544, 64, 300, 8], 100..200, Kind::BFloat16),
    ];
    if !is_small() {
        cases.push(case([256, 2048, 768, 8, 4], 0..8, Kind::BFloat16));
        cases.push(case([256, 2880, 2880, 4, 2], 0..4, Kind::BFloat16));
    }
    cases
}

/// Gate and up, down and the weighted sum, with biases and without; half of the experts are chosen more often, so that some have no rows and others
/// several tiles, and that weights which were copied early are sometimes the wrong ones. Both configurations for Hopper give the same bits.
#[test]
#[ignore = "needs a GPU"]
fn gpu_mxfp4_experts_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for case in cases() {
        let Case { tokens, hidden, width, experts, k, kind, .. } = case;
        let (x, router) = (rand(&[tokens, hidden], kind), rand(&[experts, hidden], kind) * 0.1);
        let _ = router.narrow(0, 0, experts / 2).g_mul_scalar_(4.0);
        let own = case.own.len() as i64;
        let random = |shape: &[i64], scale: f64| Tensor::randn(shape, (kind, GPU)) * scale;
        let (gate_up, down) = (random(&[own, 2 * width, hidden], 0.05), random(&[own, hidden, width], 0.05));
        let wide = random(&[own, 2 * width + 8], 1.0);
        let biases = [wide.narrow(1, 8, 2 * width), random(&[own, hidden], 1.0)];
        let (w_gate_up, w_down) = (packed(&gate_up), packed(&down));
        let weights = [rounded(&gate_up), rounded(&down)];
        for has_biases in [false, true] {
            let of = |index: usize| has_biases.then_some(&biases[index]);
            let mut first: Option<Tensor> = None;
            for tile in tiles() {
                let routed = routed(&case, &x, &router, tile);
                let act = poison(&[tokens * k, width], kind);
                let (rows, y) = (poison(&[tokens * k, hidden], kind), poison(&[tokens, hidden], kind));
                mxfp4_experts_gate_up(tile, &gpu(&x), &w_gate_up, of(0), &routed, &act).unwrap();
                mxfp4_experts_down(tile, &act, &w_down, of(1), &routed, &rows).unwrap();
                experts_combine(&rows, &routed, None, &y).unwrap();
                match &first {
                    Some(first) if tile != ExpertTile::MXFP4_ANY => {
                        assert!(y.equal(first), "{case:?}, biases {has_biases}: {} has other bits", tile.name());
                    }
                    _ => {
                        let expected = expected(&case, &x, &weights, has_biases.then_some(&biases), &routed);
                        let error = relative_error(&y, &expected);
                        assert!(error < 1e-2, "{case:?}, biases {has_biases}, tile {}: {error:e}", tile.name());
                        first = Some(y);
                    }
                }
            }
        }
    }
}

fn routed(case: &Case, x: &Tensor, router: &Tensor, tile: ExpertTile) -> RoutedTokens {
    let routed = case.routed(tile.rows);
    let options = RouteOptions { normalised: true, stride: case.k as usize, ..RouteOptions::default() };
    route(&gpu(x), &gpu(router), &routed, &options).unwrap();
    routed
}

/// The sum of this rank's experts' outputs in float64, for the experts that the GPU has chosen: with SiLU, or with biases and the clamped SwiGLU.
fn expected(
    case: &Case,
    x: &Tensor,
    [gate_up, down]: &[Tensor; 2],
    biases: Option<&[Tensor; 2]>,
    routed: &RoutedTokens,
) -> Tensor {
    let (x, weights) = (double(x), double(&routed.weights));
    let chosen = routed.experts.to_device(Device::Cpu).to_kind(Kind::Int64);
    let y = Tensor::zeros([case.tokens, case.hidden], (Kind::Double, Device::Cpu));
    for (index, expert) in case.own.clone().enumerate() {
        let own = |all: &Tensor| double(&all.get(index as i64));
        let is_chosen = chosen.eq(expert as i64);
        let of_token = (&weights * is_chosen.to_kind(Kind::Double)).sum_dim_intlist(1, false, Kind::Double);
        let tokens = is_chosen.any_dim(1, false).nonzero().view(-1);
        let pairs = x.index_select(0, &tokens).matmul(&own(gate_up).tr());
        let out = match biases {
            None => {
                let pairs = pairs.view([-1, case.width, 2]);
                (pairs.select(2, 0).silu() * pairs.select(2, 1)).matmul(&own(down).tr())
            }
            Some([of_pairs, of_down]) => {
                let pairs = (pairs + own(of_pairs)).view([-1, case.width, 2]);
                let (gate, up) = (pairs.select(2, 0).clamp_max(7.0), pairs.select(2, 1).clamp(-7.0, 7.0));
                ((&gate * 1.702).sigmoid() * gate * (up + 1.0)).matmul(&own(down).tr()) + own(of_down)
            }
        };
        let _ = y.shallow_clone().index_add_(0, &tokens, &(out * of_token.index_select(0, &tokens).unsqueeze(1)));
    }
    y
}

/// A token's row does not depend on the other tokens in the batch.
#[test]
#[ignore = "needs a GPU"]
fn gpu_mxfp4_experts_are_independent_of_the_batch_bit_for_bit() {
    kernels::prepare(0, 1).unwrap();
    let all = case([1500, 512, 96, 16, 4], 0..16, Kind::BFloat16);
    let (x, router) = (rand(&[1500, 512], all.kind), rand(&[16, 512], all.kind) * 0.1);
    let random = |shape: &[i64]| packed(&(Tensor::randn(shape, (all.kind, GPU)) * 0.05));
    let (gate_up, down) = (random(&[16, 192, 512]), random(&[16, 512, 96]));
    let run = |tokens: i64| {
        let case = Case { tokens, ..all.clone() };
        let tile = ExpertTile::of_mxfp4(tokens as usize, 4, 16, 0).unwrap();
        let x = x.narrow(0, 0, tokens);
        let routed = routed(&case, &x, &router, tile);
        let act = poison(&[tokens * 4, 96], all.kind);
        let (rows, y) = (poison(&[tokens * 4, 512], all.kind), poison(&[tokens, 512], all.kind));
        mxfp4_experts_gate_up(tile, &gpu(&x), &gate_up, None, &routed, &act).unwrap();
        mxfp4_experts_down(tile, &act, &down, None, &routed, &rows).unwrap();
        experts_combine(&rows, &routed, None, &y).unwrap();
        y
    };
    let expected = run(1500);
    for tokens in [1, 2, 15, 16, 17, 100, 333] {
        assert!(run(tokens).equal(&expected.narrow(0, 0, tokens)), "{tokens} tokens");
    }
}
