//! Small model shapes of every family.

use super::delta_net::{hybrid, hybrid_with_experts};
use crate::model::{DenseSpec, ExpertsSpec, Family, Mlp, ModelSpec, NormPlaces, QkNorm, SharedExpertSpec};
use crate::ops::rope::{Llama3Scaling, RopeScaling};
use crate::ops::router::{RouterOptions, RouterScores};
use crate::ops::swiglu::Activation;

/// One small shape per family: (name, spec).
pub(in crate::model) fn families() -> [(&'static str, ModelSpec); 10] {
    let micro = ModelSpec { vocab_size: 23, ..ModelSpec::preset("micro").unwrap() }.with_widths(24, 20);
    let unbiased = micro.clone().map_attention(|_, attention| attention.qkv_bias = false);
    let plain = |family| ModelSpec { family, tie_word_embeddings: false, ..unbiased.clone() };
    let scaling = Llama3Scaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 512.0,
    };
    [
        ("qwen2, group 7, tied", with_heads(micro, 14, 2)),
        (
            "qwen3, group 1",
            with_heads(plain(Family::Qwen3), 4, 4).map_attention(|_, attention| attention.qk_norm = Some(QkNorm::Head)),
        ),
        (
            "llama 3, group 2",
            plain(Family::Llama).map_attention(|_, attention| {
                attention.rope.as_mut().unwrap().scaling = Some(RopeScaling::Llama3(scaling));
            }),
        ),
        ("mistral, group 2", plain(Family::Mistral).map_attention(|_, attention| attention.window = Some(4))),
        (
            "smollm 3, group 2",
            plain(Family::SmolLm3).with_num_layers(3).map_attention(|layer, attention| match layer {
                1 => attention.rope = None,
                2 => (attention.rope, attention.window) = (None, Some(4)),
                _ => {}
            }),
        ),
        ("granite 3, group 2", with_factors(plain(Family::Granite))),
        ("gemma 3, group 2", as_gemma3(plain(Family::Gemma3))),
        (
            "glm 4, group 2",
            plain(Family::Glm4)
                .map_attention(|_, attention| {
                    attention.qkv_bias = true;
                    attention.rope.as_mut().unwrap().partial_rotary_factor = 0.5;
                })
                .map_blocks(|_, block| block.norms = NormPlaces::BOTH),
        ),
        ("phi 4, group 2", plain(Family::Phi3)),
        (
            "olmo 2, group 2",
            plain(Family::Olmo2)
                .map_attention(|_, attention| attention.qk_norm = Some(QkNorm::All))
                .map_blocks(|_, block| block.norms = NormPlaces::POST),
        ),
    ]
}

/// Returns the spec with multipliers like Granite's.
fn with_factors(spec: ModelSpec) -> ModelSpec {
    let spec = ModelSpec { embedding_multiplier: 1.5, logits_scaling: 3.0, ..spec };
    spec.map_attention(|_, attention| attention.scale = 0.4).map_blocks(|_, block| block.residual_scale = 0.7)
}

/// Returns a spec like Gemma 3's: one layer with a window and its own rotary embedding, one without; norms before and after sublayers; GELU.
fn as_gemma3(spec: ModelSpec) -> ModelSpec {
    let spec = spec.map_attention(|layer, attention| {
        attention.qk_norm = Some(QkNorm::Head);
        attention.scale = 0.3;
        if layer == 0 {
            attention.window = Some(4);
            attention.rope.as_mut().unwrap().theta = 100.0;
        }
    });
    let spec = spec.map_blocks(|_, block| {
        block.norms = NormPlaces::BOTH;
        block.mlp = block.mlp.activated_by(Activation::GeluTanh);
    });
    let embedding_multiplier = (spec.hidden_size as f64).sqrt();
    ModelSpec { zero_centred_norms: true, embedding_multiplier, rounds_embedding_multiplier: true, ..spec }
}

/// Returns the spec with these numbers of query heads and key/value heads.
pub(in crate::model) fn with_heads(spec: ModelSpec, num_heads: usize, num_kv_heads: usize) -> ModelSpec {
    spec.map_attention(|_, attention| (attention.num_heads, attention.num_kv_heads) = (num_heads, num_kv_heads))
}

/// Returns the spec with `num_experts` experts and expert parallelism.
pub(in crate::model) fn in_parallel(spec: ModelSpec, num_experts: usize) -> ModelSpec {
    let spec = spec.map_experts(|experts| (experts.num_experts, experts.own) = (num_experts, num_experts));
    spec.with_expert_parallel(true).unwrap()
}

/// Small shapes like Qwen3's, with experts: (name, spec).
pub(in crate::model) fn with_experts() -> [(&'static str, ModelSpec); 2] {
    let [_, (_, qwen3), ..] = families();
    let experts = ExpertsSpec {
        expert: DenseSpec::new(qwen3.hidden_size, 12),
        num_experts: 5,
        own: 5,
        is_parallel: false,
        router: RouterOptions { num_experts_per_tok: 3, norm_topk_prob: true, scores: RouterScores::Softmax },
        shared: None,
        gates_shared: true,
        has_biases: false,
    };
    let all = qwen3.clone().map_blocks(|_, block| block.mlp = Mlp::Experts(experts));
    let mut some = all.clone().map_experts(|experts| experts.router.norm_topk_prob = false);
    some.layers[0].mlp = qwen3.layers[0].mlp;
    let moe = |spec| ModelSpec { family: Family::Qwen3Moe, router_aux_loss_coef: 0.0, ..spec };
    [
        ("experts in all layers", moe(all)),
        ("experts in one layer, norms behind", moe(some.map_blocks(|_, block| block.norms = NormPlaces::POST))),
    ]
}

/// A small shape like Qwen2's, with experts and a shared expert: (name, spec).
pub(super) fn with_shared_expert() -> (&'static str, ModelSpec) {
    let ([(_, qwen2), ..], [(_, moe), _]) = (families(), with_experts());
    let mut experts = with_shared(moe.experts().unwrap(), 16);
    experts.router.norm_topk_prob = false;
    let spec = with_heads(qwen2, 8, 2).map_blocks(|layer, block| {
        if layer % 2 == 1 {
            block.mlp = Mlp::Experts(experts);
        }
    });
    ("shared expert", ModelSpec { family: Family::Qwen2Moe, router_aux_loss_coef: 0.0, ..spec })
}

/// A small shape like GLM-4.5's: (name, spec).
fn with_sigmoid_scores() -> (&'static str, ModelSpec) {
    let (_, spec) = with_shared_expert();
    let scores = RouterScores::Sigmoid { num_groups: 1, groups_per_tok: 1, scale: 1.5 };
    let spec = spec.map_experts(|experts| {
        experts.router.scores = scores;
        experts.gates_shared = false;
    });
    ("sigmoid scores", ModelSpec { family: Family::Glm4Moe, ..spec })
}

/// A small shape like gpt-oss's: (name, spec).
fn with_sinks() -> (&'static str, ModelSpec) {
    let [(_, spec), _] = with_experts();
    let spec = spec.map_attention(|layer, attention| {
        (attention.qk_norm, attention.qkv_bias, attention.o_bias, attention.sinks) = (None, true, true, true);
        attention.window = (layer == 0).then_some(4);
    });
    let spec = spec.map_experts(|experts| {
        experts.expert.activation = Activation::ClampedSwiglu;
        (experts.has_biases, experts.gates_shared) = (true, false);
    });
    ("sinks and biases", ModelSpec { family: Family::GptOss, ..spec })
}

/// Returns the experts with a shared expert of this width added.
pub(super) fn with_shared(experts: ExpertsSpec, intermediate: usize) -> ExpertsSpec {
    let shared = SharedExpertSpec(DenseSpec { intermediate, ..experts.expert });
    ExpertsSpec { shared: Some(shared), ..experts }
}

/// Small shapes with a shared expert, with sinks, with gated delta nets, and with several of these: (name, spec).
pub(super) fn others() -> [(&'static str, ModelSpec); 5] {
    [with_shared_expert(), with_sigmoid_scores(), with_sinks(), hybrid(), hybrid_with_experts()]
}
