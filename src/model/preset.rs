//! Shapes of published models, and of tiny ones for tests and the demo.

use tch::Kind;

use super::spec::{
    AttentionSpec, BlockSpec, DeltaNetSpec, DenseSpec, ExpertsSpec, Family, Mixer, Mlp, ModelSpec, NormPlaces, QkNorm,
    RopeSpec, SharedExpertSpec,
};
use crate::ops::delta_net::DeltaHeads;
use crate::ops::rope::{Llama3Scaling, RopeScaling, YarnScaling};
use crate::ops::router::{RouterOptions, RouterScores};
use crate::ops::swiglu::Activation;

/// Names that [`ModelSpec::preset`] knows.
pub const PRESETS: [&str; 33] = [
    "micro",
    "tiny",
    "tiny-moe",
    "tiny-hybrid",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "qwen3.5-9b",
    "qwen3.5-35b-a3b",
    "llama3.2-1b",
    "llama3.1-8b",
    "olmo2-1b",
    "olmo2-7b",
    "smollm3-3b",
    "granite3.1-8b",
    "gemma-3-1b",
    "gemma-3-4b",
    "gemma-3-12b",
    "gemma-3-27b",
    "glm-4-9b",
    "glm-4.5-air",
    "phi-4",
    "ministral-8b",
    "mistral-small-24b",
    "gpt-oss-20b",
];

impl ModelSpec {
    /// The shape with this name, one of [`PRESETS`]. `micro` (for tests) and `tiny` (for the demo) have Qwen2's architecture with 27,936 and 796,800
    /// weights, vocabularies of 96 and 64, and no end-of-sequence id. The others are as published.
    pub fn preset(name: &str) -> Option<Self> {
        // vocabulary, hidden, MLP, layers, heads, key/value heads, head width
        let spec = match name {
            "micro" => qwen2([96, 32, 96, 2, 4, 2, 8], true),
            "tiny" => qwen2([64, 128, 384, 4, 4, 2, 32], true),
            "tiny-moe" => ModelSpec {
                max_position_embeddings: 512,
                ..with_experts(Family::Qwen3Moe, [8, 2, 192], None, qwen3([64, 128, 384, 4, 4, 2, 32], true))
            },
            "tiny-hybrid" => qwen3_5([64, 128, 384, 4, 4, 2, 32], [2, 4, 32], true),
            "qwen2.5-0.5b" => qwen2([151_936, 896, 4_864, 24, 14, 2, 64], true),
            "qwen2.5-1.5b" => qwen2([151_936, 1_536, 8_960, 28, 12, 2, 128], true),
            "qwen2.5-3b" => qwen2([151_936, 2_048, 11_008, 36, 16, 2, 128], true),
            "qwen2.5-7b" => qwen2([152_064, 3_584, 18_944, 28, 28, 4, 128], false),
            "qwen2.5-14b" => qwen2([152_064, 5_120, 13_824, 48, 40, 8, 128], false),
            "qwen2.5-32b" => qwen2([152_064, 5_120, 27_648, 64, 40, 8, 128], false),
            "qwen3-0.6b" => qwen3([151_936, 1_024, 3_072, 28, 16, 8, 128], true),
            "qwen3-1.7b" => qwen3([151_936, 2_048, 6_144, 28, 16, 8, 128], true),
            "qwen3-4b" => qwen3([151_936, 2_560, 9_728, 36, 32, 8, 128], true),
            "qwen3-30b-a3b" => {
                let dense = qwen3([151_936, 2_048, 6_144, 48, 32, 4, 128], false);
                with_experts(Family::Qwen3Moe, [128, 8, 768], None, dense)
            }
            "qwen3-8b" => qwen3([151_936, 4_096, 12_288, 36, 32, 8, 128], false),
            "qwen3.5-9b" => qwen3_5([248_320, 4_096, 12_288, 32, 16, 4, 256], [16, 32, 128], false),
            "qwen3.5-35b-a3b" => {
                let dense = qwen3_5([248_320, 2_048, 512, 40, 16, 2, 256], [16, 32, 128], false);
                with_experts(Family::Qwen3_5Moe, [256, 8, 512], Some(512), dense)
            }
            "llama3.2-1b" => llama3([128_256, 2_048, 8_192, 16, 32, 8, 64], true, 32.0),
            "llama3.1-8b" => llama3([128_256, 4_096, 14_336, 32, 32, 8, 128], false, 8.0),
            "olmo2-1b" => olmo2([100_352, 2_048, 8_192, 16, 16, 16, 128]),
            "olmo2-7b" => olmo2([100_352, 4_096, 11_008, 32, 32, 32, 128]),
            "smollm3-3b" => smollm3([128_256, 2_048, 11_008, 36, 16, 4, 128]),
            "granite3.1-8b" => granite([49_155, 4_096, 12_800, 40, 32, 8, 128]),
            "gemma-3-1b" => gemma3([262_144, 1_152, 6_912, 26, 4, 1, 256], 256, 512),
            "gemma-3-4b" => gemma3([262_208, 2_560, 10_240, 34, 8, 4, 256], 256, 1_024),
            "gemma-3-12b" => gemma3([262_208, 3_840, 15_360, 48, 16, 8, 256], 256, 1_024),
            "gemma-3-27b" => gemma3([262_208, 5_376, 21_504, 62, 32, 16, 128], 168, 1_024),
            "glm-4-9b" => glm4([151_552, 4_096, 13_696, 40, 32, 2, 128]),
            "glm-4.5-air" => glm4_moe([151_552, 4_096, 10_944, 46, 96, 8, 128], [128, 8, 1_408]),
            "phi-4" => {
                let spec = llama([100_352, 5_120, 17_920, 40, 40, 10, 128], 2.5e5);
                let ids = (Some(100_257), vec![100_265]);
                ModelSpec { family: Family::Phi3, max_position_embeddings: 16_384, ..with_ids(spec, ids) }
            }
            // A window in all layers, as long as the context.
            "ministral-8b" => mistral([131_072, 4_096, 12_288, 36, 32, 8, 128], Some(32_768)),
            "mistral-small-24b" => mistral([131_072, 5_120, 32_768, 40, 32, 8, 128], None),
            "gpt-oss-20b" => gpt_oss([201_088, 2_880, 2_880, 24, 64, 8, 64], [32, 4]),
            _ => return None,
        };
        Some(spec)
    }
}

fn qwen2(sizes: [usize; 7], tie_word_embeddings: bool) -> ModelSpec {
    let [vocab_size, hidden, intermediate, num_layers, num_heads, num_kv_heads, head_dim] = sizes;
    let published = vocab_size > 151_645;
    let attention = AttentionSpec {
        hidden,
        num_heads,
        num_kv_heads,
        head_dim,
        qkv_bias: true,

        o_bias: false,
        sinks: false,
        qk_norm: None,
        output_gate: false,
        rope: Some(RopeSpec { theta: if published { 1e6 } else { 1e4 }, scaling: None, partial_rotary_factor: 1.0 }),
        window: None,
        scale: AttentionSpec::usual_scale(head_dim),
    };
    ModelSpec {
        family: Family::Qwen2,
        vocab_size,
        hidden_size: hidden,
        layers: vec![BlockSpec::dense(attention, intermediate, NormPlaces::PRE); num_layers],
        draft_head: None,
        embedding_multiplier: 1.0,
        rounds_embedding_multiplier: false,
        logits_scaling: 1.0,
        rms_norm_eps: 1e-6,
        tie_word_embeddings,
        zero_centred_norms: false,
        router_aux_loss_coef: 0.0,
        max_position_embeddings: if published { 32_768 } else { 512 },
        bos_token_id: published.then_some(151_643),
        eos_token_ids: if published { vec![151_645, 151_643] } else { Vec::new() },
        dtype: if published { Kind::BFloat16 } else { Kind::Float },
        is_text_part: false,
    }
}

fn qwen3(sizes: [usize; 7], tie_word_embeddings: bool) -> ModelSpec {
    let spec = qwen2(sizes, tie_word_embeddings).map_attention(|_, attention| {
        attention.qkv_bias = false;
        attention.qk_norm = Some(QkNorm::Head);
    });
    ModelSpec { family: Family::Qwen3, max_position_embeddings: 40_960, ..spec }
}

/// Qwen3.5: three of four layers have a gated delta net, whose numbers of key heads and value heads and head width are `delta`. This is the published
/// model's text part; no end-of-sequence id is set.
fn qwen3_5(sizes: [usize; 7], delta: [usize; 3], tie_word_embeddings: bool) -> ModelSpec {
    let [num_key_heads, num_value_heads, width] = delta;
    let heads = DeltaHeads { num_key_heads, num_value_heads, key_dim: width, value_dim: width, conv_width: 4 };
    let qwen3 = qwen3(sizes, tie_word_embeddings);
    let published = qwen3.vocab_size > 64;
    let theta = if published { 1e7 } else { 1e4 };
    let spec = qwen3.map_attention(|_, attention| {
        attention.output_gate = true;
        attention.rope = Some(RopeSpec { theta, scaling: None, partial_rotary_factor: 0.25 });
    });
    let spec = spec.map_blocks(|layer, block| {
        if layer % 4 != 3 {
            block.mixer = Mixer::DeltaNet(DeltaNetSpec { hidden: block.hidden, heads });
        }
    });
    ModelSpec {
        family: Family::Qwen3_5,
        zero_centred_norms: true,
        max_position_embeddings: if published { 262_144 } else { 512 },
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        ..spec
    }
}

/// Adds experts to all layers. The array has the number of experts, the experts per token, and an expert's width; the last argument is the shared
/// expert's width.
fn with_experts(
    family: Family,
    [num_experts, num_experts_per_tok, intermediate]: [usize; 3],
    shared: Option<usize>,
    dense: ModelSpec,
) -> ModelSpec {
    let hidden = dense.hidden_size;
    let experts = ExpertsSpec {
        expert: DenseSpec::new(hidden, intermediate),
        num_experts,
        own: num_experts,
        is_parallel: false,
        router: RouterOptions { num_experts_per_tok, norm_topk_prob: true, scores: RouterScores::Softmax },
        gates_shared: true,
        has_biases: false,
        shared: shared.map(|intermediate| SharedExpertSpec(DenseSpec::new(hidden, intermediate))),
    };
    let spec = dense.map_blocks(|_, block| block.mlp = Mlp::Experts(experts));
    ModelSpec { family, router_aux_loss_coef: 0.001, ..spec }
}

fn olmo2(sizes: [usize; 7]) -> ModelSpec {
    let spec = qwen2(sizes, false).map_attention(|_, attention| {
        attention.qkv_bias = false;
        attention.qk_norm = Some(QkNorm::All);
        attention.rope.iter_mut().for_each(|rope| rope.theta = 5e5);
    });
    ModelSpec {
        family: Family::Olmo2,
        max_position_embeddings: 4_096,
        bos_token_id: None,
        eos_token_ids: vec![100_257],
        dtype: Kind::BFloat16,
        ..spec.map_blocks(|_, block| block.norms = NormPlaces::POST)
    }
}

fn llama3(sizes: [usize; 7], tie_word_embeddings: bool, factor: f64) -> ModelSpec {
    let scaling = Llama3Scaling {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8_192.0,
    };
    let rope = RopeSpec { theta: 5e5, scaling: Some(RopeScaling::Llama3(scaling)), partial_rotary_factor: 1.0 };
    let spec = qwen2(sizes, tie_word_embeddings).map_attention(|_, attention| {
        attention.qkv_bias = false;
        attention.rope = Some(rope);
    });
    ModelSpec {
        family: Family::Llama,
        rms_norm_eps: 1e-5,
        max_position_embeddings: 131_072,
        bos_token_id: Some(128_000),
        eos_token_ids: vec![128_001, 128_008, 128_009],
        dtype: Kind::BFloat16,
        ..spec
    }
}

/// SmolLM3: every fourth layer has no rotary embedding.
fn smollm3(sizes: [usize; 7]) -> ModelSpec {
    let spec = qwen2(sizes, true).map_attention(|layer, attention| {
        attention.qkv_bias = false;
        attention.rope = attention.rope.filter(|_| layer % 4 != 3).map(|rope| RopeSpec { theta: 5e6, ..rope });
    });
    ModelSpec {
        family: Family::SmolLm3,
        max_position_embeddings: 65_536,
        bos_token_id: None,
        eos_token_ids: vec![128_012],
        dtype: Kind::BFloat16,
        ..spec
    }
}

fn granite(sizes: [usize; 7]) -> ModelSpec {
    let spec = qwen2(sizes, true).map_attention(|_, attention| {
        attention.qkv_bias = false;
        attention.scale = 0.0078125;
        attention.rope.iter_mut().for_each(|rope| rope.theta = 1e7);
    });
    ModelSpec {
        family: Family::Granite,
        embedding_multiplier: 12.0,
        logits_scaling: 16.0,
        rms_norm_eps: 1e-5,
        max_position_embeddings: 131_072,
        bos_token_id: Some(0),
        eos_token_ids: vec![0],
        dtype: Kind::BFloat16,
        ..spec.map_blocks(|_, block| block.residual_scale = 0.22)
    }
}

/// Llama with unscaled rotary frequencies.
fn llama(sizes: [usize; 7], theta: f64) -> ModelSpec {
    let rope = RopeSpec { theta, scaling: None, partial_rotary_factor: 1.0 };
    let spec = llama3(sizes, false, 1.0).map_attention(|_, attention| attention.rope = Some(rope));
    ModelSpec { max_position_embeddings: 32_768, ..spec }
}

fn mistral(sizes: [usize; 7], window: Option<usize>) -> ModelSpec {
    let spec = llama(sizes, 1e8).map_attention(|_, attention| attention.window = window);
    ModelSpec { family: Family::Mistral, ..with_ids(spec, (Some(1), vec![2])) }
}

fn with_ids(spec: ModelSpec, (bos_token_id, eos_token_ids): (Option<u32>, Vec<u32>)) -> ModelSpec {
    ModelSpec { bos_token_id, eos_token_ids, ..spec }
}

fn glm4(sizes: [usize; 7]) -> ModelSpec {
    let spec = llama(sizes, 1e4).map_attention(|_, attention| {
        attention.qkv_bias = true;
        attention.rope.iter_mut().for_each(|rope| rope.partial_rotary_factor = 0.5);
    });
    let spec = with_ids(spec, (None, vec![151_329, 151_336, 151_338]));
    ModelSpec { family: Family::Glm4, ..spec.map_blocks(|_, block| block.norms = NormPlaces::BOTH) }
}

/// GLM-4.5: the first layer has a dense MLP instead of experts.
fn glm4_moe(sizes: [usize; 7], experts: [usize; 3]) -> ModelSpec {
    let dense = glm4(sizes).map_attention(|_, attention| attention.rope.iter_mut().for_each(|rope| rope.theta = 1e6));
    let spec = dense.map_blocks(|_, block| block.norms = NormPlaces::PRE);
    let first = spec.layers[0].mlp;
    let spec = with_experts(Family::Glm4Moe, experts, Some(experts[2]), spec).map_experts(|experts| {
        experts.router.scores = RouterScores::Sigmoid { num_groups: 1, groups_per_tok: 1, scale: 1.0 };
        experts.gates_shared = false;
    });
    let spec = spec.map_blocks(|layer, block| block.mlp = if layer == 0 { first } else { block.mlp });
    ModelSpec { router_aux_loss_coef: 0.0, max_position_embeddings: 131_072, ..spec }
}

/// gpt-oss with the given number of experts and experts per token.
fn gpt_oss(sizes: [usize; 7], [num_experts, per_token]: [usize; 2]) -> ModelSpec {
    let scaling = YarnScaling {
        factor: 32.0,
        original_max_position_embeddings: 4_096.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: YarnScaling::default_attention_factor(32.0, None),
        truncate: false,
    };
    let rope = RopeSpec { theta: 1.5e5, scaling: Some(RopeScaling::Yarn(scaling)), partial_rotary_factor: 1.0 };
    let dense = qwen2(sizes, false).map_attention(|layer, attention| {
        (attention.rope, attention.sinks, attention.o_bias) = (Some(rope), true, true);
        attention.window = layer.is_multiple_of(2).then_some(128);
    });
    let spec = with_experts(Family::GptOss, [num_experts, per_token, sizes[2]], None, dense).map_experts(|experts| {
        experts.expert.activation = Activation::ClampedSwiglu;
        (experts.has_biases, experts.gates_shared) = (true, false);
    });
    let spec = with_ids(spec, (None, vec![200_002]));
    ModelSpec { router_aux_loss_coef: 0.0, rms_norm_eps: 1e-5, max_position_embeddings: 131_072, ..spec }
}

/// Gemma 3's text part. The smallest model has no rope scaling, as its context is 32,768 tokens.
fn gemma3(sizes: [usize; 7], query_pre_attn_scalar: usize, window: usize) -> ModelSpec {
    let is_long = sizes[1] > 1_152;
    let scaling = is_long.then_some(RopeScaling::Linear { factor: 8.0 });
    let [local, global] = [(1e4, None), (1e6, scaling)]
        .map(|(theta, scaling)| Some(RopeSpec { theta, scaling, partial_rotary_factor: 1.0 }));
    let spec = qwen2(sizes, true).map_attention(|layer, attention| {
        attention.qkv_bias = false;
        attention.qk_norm = Some(QkNorm::Head);
        attention.scale = (query_pre_attn_scalar as f64).powf(-0.5);
        (attention.window, attention.rope) = if layer % 6 == 5 { (None, global) } else { (Some(window), local) };
    });
    ModelSpec {
        family: Family::Gemma3,
        embedding_multiplier: (sizes[1] as f64).sqrt(),
        rounds_embedding_multiplier: true,
        zero_centred_norms: true,
        max_position_embeddings: if is_long { 131_072 } else { 32_768 },
        bos_token_id: Some(2),
        eos_token_ids: vec![1, 106],
        dtype: Kind::BFloat16,
        ..spec.map_blocks(|_, block| {
            block.norms = NormPlaces::BOTH;
            block.mlp = block.mlp.activated_by(Activation::GeluTanh);
        })
    }
}
