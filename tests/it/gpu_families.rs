//! GPU kernels for single model families: routers with biases and with sigmoid scores, and experts with biases, compared with the CPU's operations;
//! log-probabilities of their engines compared with the trainer's.

use colo_grpo::internal::cuda::kernels::{
    self, ExpertTile, RouteOptions, RouteScores, experts_combine, experts_down_biased, experts_gate_up_clamped, route,
};
use colo_grpo::internal::model::ModelSpec;
use colo_grpo::internal::ops::router::{self, RouterOptions, RouterScores, Routing};
use tch::{Device, Kind, Tensor};

use crate::gpu_engine::{Model, sampled_as_trained};
use crate::gpu_experts::{Case, case};
use crate::on_gpu::{double, gpu, poison, rand, relative_error};

/// Numbers of tokens, experts and groups, and of chosen groups and experts per token.
const GROUPED: [[i64; 5]; 6] =
    [[1, 8, 1, 1, 2], [33, 128, 1, 1, 8], [70, 160, 8, 3, 6], [40, 12, 6, 2, 3], [17, 8, 8, 3, 3], [50, 512, 32, 4, 8]];

#[test]
#[ignore = "needs a GPU"]
fn gpu_grouped_sigmoid_routing_equals_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for (kind, [tokens, experts, groups, groups_per_tok, k]) in
        [Kind::BFloat16, Kind::Float].into_iter().flat_map(|kind| GROUPED.map(|sizes| (kind, sizes)))
    {
        let case = case([tokens, 96, 32, experts, k], 0..experts as usize, kind);
        let (x, w, parts) =
            (rand(&[tokens, 96], kind), rand(&[experts, 96], kind) * 0.1, rand(&[3 * experts], kind) * 0.1);
        let (num_groups, groups_per_tok) = (groups as usize, groups_per_tok as usize);
        let correction = double(&parts).view([3, experts]).sum_dim_intlist(0, false, None::<Kind>);
        let on_gpu = gpu(&parts);
        let scores = RouteScores::Sigmoid { parts: &on_gpu, num_groups, groups_per_tok, scale: 2.5 };
        let of_cpu = RouterScores::Sigmoid { num_groups, groups_per_tok, scale: 2.5 };
        for normalised in [false, true] {
            let options = RouterOptions { num_experts_per_tok: k as usize, norm_topk_prob: normalised, scores: of_cpu };
            let probs = router::probabilities(&double(&x), &double(&w), None, options).unwrap();
            let expected = router::choose(&probs, Some(&correction), options).unwrap();
            routes_equal(&case, (&x, &w), scores, (probs + correction.shallow_clone(), expected), options);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_routing_with_biases_equals_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    for (kind, [tokens, experts, .., k]) in
        [Kind::BFloat16, Kind::Float].into_iter().flat_map(|kind| GROUPED.map(|sizes| (kind, sizes)))
    {
        let case = case([tokens, 96, 32, experts, k], 0..experts as usize, kind);
        let (x, w, bias) = (rand(&[tokens, 96], kind), rand(&[experts, 96], kind) * 0.1, rand(&[experts], kind));
        let options =
            RouterOptions { num_experts_per_tok: k as usize, norm_topk_prob: true, scores: RouterScores::Softmax };
        let probs = router::probabilities(&double(&x), &double(&w), Some(&double(&bias)), options).unwrap();
        let expected = router::choose(&probs, None, options).unwrap();
        routes_equal(&case, (&x, &w), RouteScores::Biased(&gpu(&bias)), (probs, expected), options);
    }
}

/// Chosen experts and weights of every token. If the compared scores are closer than rounding, either expert is accepted.
fn routes_equal(
    case: &Case,
    (x, w): (&Tensor, &Tensor),
    scores: RouteScores<'_>,
    (compared, expected): (Tensor, Tensor), // [T, E], [T, K]
    options: RouterOptions,
) {
    let routed = case.routed(32);
    let how =
        RouteOptions { scores, normalised: options.norm_topk_prob, stride: case.k as usize, ..RouteOptions::default() };
    route(&gpu(x), &gpu(w), &routed, &how).unwrap();
    let got = routed.experts.to_device(Device::Cpu).to_kind(Kind::Int64);
    let of = |experts: &Tensor| compared.gather(1, experts, false);
    let apart = (of(&got) - of(&expected)).abs().max().double_value(&[]);
    assert!(apart < 1e-5, "{case:?}, {options:?}: {apart} apart\n{got}\n{expected}");
    let probs = match options.scores {
        RouterScores::Softmax => compared,
        RouterScores::Sigmoid { .. } => double(x).matmul(&double(w).tr()).sigmoid(),
    };
    let weights = Routing::new(probs, got, options).unwrap().weights;
    assert!(relative_error(&routed.weights, &weights) < 1e-5, "{case:?}, {options:?}: weights");
}

/// gpt-oss's experts with every tile size and slices of wider weights, compared with float64. All tile sizes give the same bits.
#[test]
#[ignore = "needs a GPU"]
fn gpu_experts_with_biases_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    let sizes = [([1, 64, 32, 8, 2], 0..8), ([70, 328, 72, 5, 3], 0..5), ([300, 512, 96, 32, 4], 8..24)];
    for (kind, (sizes, own)) in
        [Kind::BFloat16, Kind::Float].into_iter().flat_map(|kind| sizes.clone().map(|case| (kind, case)))
    {
        let case = case(sizes, own.clone(), kind);
        let Case { tokens, hidden, width, experts, k, .. } = case;
        let (x, router, own) = (rand(&[tokens, hidden], kind), rand(&[experts, hidden], kind) * 0.1, own.len() as i64);
        let (gate_up, down) = (rand(&[own, 2 * width, hidden], kind) * 0.3, rand(&[own, hidden, width], kind) * 0.05);
        let wide = gpu(&rand(&[own, 2 * width + 8], kind));
        let (b_gate_up, b_down) = (wide.narrow(1, 8, 2 * width), gpu(&rand(&[own, hidden], kind)));
        let tiles: Vec<ExpertTile> = match kind {
            Kind::BFloat16 => ExpertTile::ALL.to_vec(),
            kind => vec![ExpertTile::of(1, 1, 1, kind, 0).unwrap()],
        };
        let mut first: Option<Tensor> = None;
        for tile in tiles {
            let routed = case.routed(tile.rows);
            let options = RouteOptions { normalised: true, stride: k as usize, ..RouteOptions::default() };
            route(&gpu(&x), &gpu(&router), &routed, &options).unwrap();
            let act = poison(&[tokens * k, width], kind);
            let (rows, y) = (poison(&[tokens * k, hidden], kind), poison(&[tokens, hidden], kind));
            experts_gate_up_clamped(tile, &gpu(&x), &gpu(&gate_up), &b_gate_up, &routed, &act).unwrap();
            experts_down_biased(tile, &act, &gpu(&down), &b_down, &routed, &rows).unwrap();
            experts_combine(&rows, &routed, None, &y).unwrap();
            if let Some(first) = &first {
                assert!(y.equal(first), "{case:?}: {} has other bits", tile.name());
                continue;
            }
            let (x, weights) = (double(&x), double(&routed.weights));
            let chosen = routed.experts.to_device(Device::Cpu).to_kind(Kind::Int64);
            let mut expected = Tensor::zeros([tokens, hidden], (Kind::Double, Device::Cpu));
            for (index, expert) in case.own.clone().enumerate() {
                let of = |all: &Tensor| double(&all.get(index as i64));
                let share =
                    (&weights * chosen.eq(expert as i64).to_kind(Kind::Double)).sum_dim_intlist(1, true, None::<Kind>);
                let pairs = (x.matmul(&of(&gate_up).tr()) + of(&b_gate_up)).view([tokens, width, 2]);
                let (gate, up) = (pairs.select(2, 0).clamp_max(7.0), pairs.select(2, 1).clamp(-7.0, 7.0));
                let act = (&gate * 1.702).sigmoid() * gate * (up + 1.0);
                expected += (act.matmul(&of(&down).tr()) + of(&b_down)) * share;
            }
            let error = relative_error(&y, &expected);
            assert!(error < if kind == Kind::BFloat16 { 1e-2 } else { 1e-5 }, "{case:?}, {}: {error:e}", tile.name());
            first = Some(y);
        }
    }
}

/// gpt-oss: sinks, a layer with and one without a window, experts with biases. GLM-4.5: a dense layer, then one whose router has sigmoid scores
/// and a correction bias, with a shared expert. With the sampler's routes, the trainer's log-probabilities are as close as for other
/// models.
#[test]
#[ignore = "needs a GPU"]
fn gpu_sampled_logprobs_of_gpt_oss_and_glm_are_the_trainers() {
    for name in ["gpt-oss-20b", "glm-4.5-air"] {
        let spec = ModelSpec::preset(name).unwrap().with_num_layers(2);
        sampled_as_trained(&Model::of(spec), &format!("{name}, 2 layers"), [1.5, 1.5]);
    }
}

/// The other families with two layers: GLM-4 with norms on both sides and rotated pairs, Phi-4, Mistral Small 3, and Ministral, whose window is
/// as long as its context.
#[test]
#[ignore = "needs a GPU"]
fn gpu_sampled_logprobs_of_dense_families_are_the_trainers() {
    for name in ["glm-4-9b", "phi-4", "mistral-small-24b", "ministral-8b"] {
        let spec = ModelSpec::preset(name).unwrap().with_num_layers(2);
        sampled_as_trained(&Model::of(spec), &format!("{name}, 2 layers"), [1.5, 1.5]);
    }
}

/// Windows of 64 tokens and contexts of up to 1,020: Gemma 3 with five windowed layers of six and heads of 256; Ministral and Qwen2 with a window in
/// one of two layers; Mistral with windows in all.
#[test]
#[ignore = "needs a GPU"]
fn gpu_sampled_logprobs_with_short_windows_are_the_trainers() {
    const WINDOW: usize = 64;
    let cases: [(&str, usize, &[usize]); 4] = [
        ("gemma-3-1b", 6, &[0, 1, 2, 3, 4]),
        ("ministral-8b", 2, &[1]),
        ("qwen2.5-0.5b", 2, &[1]),
        ("mistral-small-24b", 2, &[0, 1]),
    ];
    for (name, num_layers, windowed) in cases {
        let spec = ModelSpec::preset(name).unwrap().with_num_layers(num_layers);
        let spec =
            spec.map_attention(|layer, attention| attention.window = windowed.contains(&layer).then_some(WINDOW));
        sampled_as_trained(&Model::of(spec), &format!("{name}, {num_layers} layers, window {WINDOW}"), [1.5, 1.5]);
    }
}
