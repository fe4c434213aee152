//! Adapters of experts and shared experts on a GPU: compares kernels with float64, requests of one batch with single ones, and log-probabilities
//! with the trainer's.

use colo_grpo::internal::cuda::kernels::{
    self, ExpertAdapter, ExpertTile, LowRows, RouteOptions, RoutedTokens, SharedExpertRows, experts_combine,
    experts_down, experts_gate_up, experts_low, route,
};
use colo_grpo::internal::model::ModelSpec;
use colo_grpo::internal::ranks::{Backend, World};
use colo_grpo::internal::rollout::EngineOptions;
use tch::{Device, Kind, Tensor};

use crate::gpu_engine::{Model, sampled_as_trained};
use crate::gpu_experts::{Case, case};
use crate::on_gpu::{double, gpu, poison, rand, relative_error};
use crate::rollout::{adapters, options};

/// A matrix of each expert, with its adapters.
struct Adapted {
    w: Tensor, // [E, N, K]
    a: Tensor, // [E, r, K]
    b: Tensor, // [E, N, r]
}

impl Adapted {
    fn new([experts, features, inner, k]: [i64; 4], kind: Kind) -> Self {
        let [w, a, b] = [[features, k], [inner, k], [features, inner]]
            .map(|[rows, columns]| rand(&[experts, rows, columns], kind) * (columns as f64).powf(-0.5));
        Self { w, a, b }
    }

    /// Multiplies rows of one expert in float64, using only the adapter columns in `is_own`.
    fn apply(&self, expert: i64, rows: &Tensor, is_own: &Tensor) -> Tensor {
        let [w, a, b] = [&self.w, &self.a, &self.b].map(|all| double(&all.get(expert)));
        let low = rows.matmul(&a.tr()) * is_own;
        rows.matmul(&w.tr()) + low.matmul(&b.tr())
    }
}

/// With every tile size, with two adapters of which each token uses one or none, and with a shared expert.
#[test]
#[ignore = "needs a GPU"]
fn gpu_experts_with_adapters_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    let sizes =
        [([1, 64, 32, 4, 2], 8), ([37, 136, 72, 8, 3], 24), ([300, 512, 96, 16, 4], 136), ([256, 2112, 96, 16, 4], 16)];
    for (sizes, inner) in sizes {
        let [tokens, hidden, width, experts, k] = sizes;
        for kind in [Kind::Float, Kind::BFloat16] {
            let case = case(sizes, 0..experts as usize, kind);
            let (x, router) = (rand(&[tokens, hidden], kind), rand(&[experts, hidden], kind) * 0.1);
            let gate_up = Adapted::new([experts, 2 * width, inner, hidden], kind);
            let down = Adapted::new([experts, hidden, inner, width], kind);
            let (shared, gate) = (rand(&[tokens, hidden], kind), rand(&[1, hidden], kind) * 0.2);
            let owners = Tensor::arange(inner, (Kind::Int, Device::Cpu)).remainder(2);
            let adapters = Tensor::arange(tokens, (Kind::Int, Device::Cpu)).remainder(3) - 1;
            let choice = [&owners, &adapters].map(gpu);
            let tiles = match kind {
                Kind::BFloat16 => ExpertTile::ALL.to_vec(),
                kind => vec![ExpertTile::of(1, 1, 1, kind, 0).unwrap()],
            };
            for tile in tiles {
                let routed = case.routed(tile.rows);
                let normalised = false;
                let options = RouteOptions { normalised, stride: k as usize, ..RouteOptions::default() };
                route(&gpu(&x), &gpu(&router), &routed, &options).unwrap();
                let rows_of = |columns| poison(&[tokens * k, columns], kind);
                let (low, act, out, y) =
                    (rows_of(inner), rows_of(width), rows_of(hidden), poison(&[tokens, hidden], kind));
                let choice = || Some([&choice[0], &choice[1]]);
                let [w, a, b] = [&gate_up.w, &gate_up.a, &gate_up.b].map(gpu);
                experts_low(tile, LowRows::OfTokens(&gpu(&x)), &a, choice(), &routed, &low).unwrap();
                let adapter = ExpertAdapter { low: &low, b: &b };
                experts_gate_up(tile, &gpu(&x), &w, Some(adapter), &routed, &act).unwrap();
                let [w, a, b] = [&down.w, &down.a, &down.b].map(gpu);
                experts_low(tile, LowRows::Sorted(&act), &a, choice(), &routed, &low).unwrap();
                experts_down(tile, &act, &w, Some(ExpertAdapter { low: &low, b: &b }), &routed, &out).unwrap();
                let [rows, gate_on, x_on] = [&shared, &gate, &x].map(gpu);
                let of_shared = SharedExpertRows { rows: &rows, x: &x_on, gate: Some(&gate_on) };
                experts_combine(&out, &routed, Some(of_shared), &y).unwrap();
                let is_own = owners.unsqueeze(0).eq_tensor(&adapters.unsqueeze(1)).to_kind(Kind::Double);
                let share = (double(&x) * double(&gate)).sum_dim_intlist(1, true, Kind::Double).sigmoid();
                let expected = of_choices(&case, &x, (&gate_up, &down), &is_own, &routed) + double(&shared) * share;
                let (error, bound) = (relative_error(&y, &expected), if kind == Kind::Float { 1e-5 } else { 1e-2 });
                assert!(error < bound, "{case:?}, {inner} inner products, tile {}: {error:e}", tile.name());
            }
        }
    }
}

/// A token's outputs do not depend on the other tokens in the batch, for narrow and for wide adapters, and for rows that exceed what a warp holds.
#[test]
#[ignore = "needs a GPU"]
fn gpu_adapted_experts_are_independent_of_the_batch_bit_for_bit() {
    kernels::prepare(0, 1).unwrap();
    for (hidden, inner) in [(512, 16), (2304, 8), (512, 24)] {
        let ([all, width, experts, k], kind) = ([700, 96, 16, 4], Kind::BFloat16);
        let (x, router) = (rand(&[all, hidden], kind), gpu(&(rand(&[experts, hidden], kind) * 0.1)));
        let gate_up = Adapted::new([experts, 2 * width, inner, hidden], kind);
        let down = Adapted::new([experts, hidden, inner, width], kind);
        let of = |adapted: &Adapted| [&adapted.w, &adapted.a, &adapted.b].map(gpu);
        let ([w, a, b], [down_w, down_a, down_b]) = (of(&gate_up), of(&down));
        let by_choice = |tokens: i64| {
            let case = case([tokens, hidden, width, experts, k], 0..experts as usize, kind);
            let tile = ExpertTile::of(tokens as usize, k as usize, experts as usize, kind, 0).unwrap();
            let (x, routed) = (gpu(&x.narrow(0, 0, tokens)), case.routed(tile.rows));
            route(&x, &router, &routed, &RouteOptions { stride: k as usize, ..RouteOptions::default() }).unwrap();
            let rows_of = |columns| poison(&[tokens * k, columns], kind);
            let (low, act, out) = (rows_of(inner), rows_of(width), rows_of(hidden));
            experts_low(tile, LowRows::OfTokens(&x), &a, None, &routed, &low).unwrap();
            experts_gate_up(tile, &x, &w, Some(ExpertAdapter { low: &low, b: &b }), &routed, &act).unwrap();
            experts_low(tile, LowRows::Sorted(&act), &down_a, None, &routed, &low).unwrap();
            experts_down(tile, &act, &down_w, Some(ExpertAdapter { low: &low, b: &down_b }), &routed, &out).unwrap();
            out
        };
        let expected = by_choice(all);
        for tokens in [1, 2, 15, 16, 17, 100, 333] {
            let same = by_choice(tokens).equal(&expected.narrow(0, 0, k * tokens));
            assert!(same, "{tokens} tokens of {hidden} columns, rank {inner}");
        }
    }
}

/// The weighted sum over the experts that the GPU has chosen, in float64.
fn of_choices(
    case: &Case,
    x: &Tensor,
    (gate_up, down): (&Adapted, &Adapted),
    is_own: &Tensor, // [T, r]
    routed: &RoutedTokens,
) -> Tensor {
    let (x, weights) = (double(x), double(&routed.weights));
    let chosen = routed.experts.to_device(Device::Cpu).to_kind(Kind::Int64);
    let y = Tensor::zeros([case.tokens, case.hidden], (Kind::Double, Device::Cpu));
    for expert in 0..case.experts {
        let is_chosen = chosen.eq(expert);
        let of_token = (&weights * is_chosen.to_kind(Kind::Double)).sum_dim_intlist(1, true, Kind::Double);
        let tokens = is_chosen.any_dim(1, false).nonzero().view(-1);
        let of_tokens = |all: &Tensor| all.index_select(0, &tokens);
        let pairs = gate_up.apply(expert, &of_tokens(&x), &of_tokens(is_own)).view([-1, case.width, 2]);
        let act = pairs.select(2, 0).silu() * pairs.select(2, 1);
        let out = down.apply(expert, &act, &of_tokens(is_own)) * of_tokens(&of_token);
        let _ = y.shallow_clone().index_add_(0, &tokens, &out);
    }
    y
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_requests_of_one_batch_use_their_own_expert_adapters() {
    let long = EngineOptions { block_size: 16, max_model_length: 256, records_experts: false, ..options() };
    adapters::compare(World::single_on(Backend::Nccl).unwrap(), "tiny-moe", long);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_sampled_logprobs_of_adapted_experts_match_the_trainer() {
    let spec = ModelSpec::preset("qwen3-30b-a3b").unwrap().with_num_layers(2);
    sampled_as_trained(&Model::of(spec).with_adapters(), "qwen3-30b-a3b, 2 layers, adapted", [1.5, 1.5]);
}

#[test]
fn requests_of_one_batch_use_their_own_expert_adapters() {
    tch::set_num_threads(1);
    adapters::compare(World::single(), "tiny-moe", EngineOptions { records_experts: false, ..options() });
}
