//! An independent, plain implementation of the network for autograd: separate q, k, v, gate and up, one sequence at a time, heads repeated, an
//! explicit mask. It shares no operation with the crate, only the layout of flat weights.

use std::f64::consts::PI;

use tch::{Kind, Tensor};

use super::delta_net;
use crate::model::{AttentionSpec, BlockSpec, ExpertsSpec, Mixer, ModelSpec, ParamName, ParamTable, QkNorm, Unit};
use crate::ops::rope::RopeScaling;
use crate::ops::router::RouterScores;
use crate::ops::swiglu::Activation;

/// Returns (log-probabilities, entropies) of all rows except the last of each sequence, for the next token, at `temperature`.
pub(super) fn scores(
    table: &ParamTable,
    flats: &[Tensor], // one leaf per unit, f64
    sequences: &[Vec<i64>],
    temperature: f64,
) -> (Tensor, Tensor) {
    let spec = &table.spec;
    let get = |unit, name| weight(table, flats, unit, name).unwrap();
    let embedding = get(Unit::Embedding, ParamName::Embedding);
    let head = weight(table, flats, Unit::Head, ParamName::LmHead).unwrap_or_else(|| embedding.shallow_clone());
    let (mut logprobs, mut entropies) = (Vec::new(), Vec::new());
    for ids in sequences {
        let ids = Tensor::from_slice(ids);
        let mut x = embedding.index_select(0, &ids) * spec.embedding_multiplier;
        for layer in 0..spec.num_layers() {
            x = block(spec, layer, &|name| weight(table, flats, Unit::Block(layer), name), &x);
        }
        let scored = ids.size()[0] - 1;
        let final_norm = scale(spec, get(Unit::Head, ParamName::FinalNorm));
        let x = rms_norm(&x.narrow(0, 0, scored), &final_norm, spec.rms_norm_eps);
        let p = (x.matmul(&head.tr()) / spec.logits_scaling / temperature).softmax(-1, None::<Kind>);
        logprobs.push(p.gather(1, &ids.narrow(0, 1, scored).unsqueeze(1), false).squeeze_dim(1).log());
        entropies.push(-(&p * p.log()).sum_dim_intlist(-1, false, None));
    }
    (Tensor::cat(&logprobs, 0), Tensor::cat(&entropies, 0))
}

fn weight(table: &ParamTable, flats: &[Tensor], unit: Unit, name: ParamName) -> Option<Tensor> {
    let index = table.units.iter().position(|layout| layout.unit == unit).unwrap();
    table.units[index].view(name, &flats[index])
}

/// Computes one block over one sequence.
pub(in crate::model) fn block(
    spec: &ModelSpec,
    layer: usize,
    get: &dyn Fn(ParamName) -> Option<Tensor>,
    x: &Tensor, // [S, D]
) -> Tensor {
    let BlockSpec { mixer, mlp, residual_scale, .. } = spec.layers[layer];
    let activation = mlp.activation();
    let has_shared = get(ParamName::SharedGateUp).is_some();
    let (need, eps) = (|name| get(name).unwrap(), spec.rms_norm_eps);
    // An absent norm returns its input.
    let norm =
        |name, x: &Tensor| get(name).map_or_else(|| x.shallow_clone(), |weight| rms_norm(x, &scale(spec, weight), eps));
    let normed = norm(ParamName::InputNorm, x);
    let mixed = match mixer {
        Mixer::DeltaNet(_) => delta_net::mix(spec, get, &normed, &need(ParamName::DeltaQkv)),
        Mixer::Attention(attention) => attend(spec, attention, get, &normed),
    };
    let h = x + norm(ParamName::MixerPostNorm, &mixed) * residual_scale;
    let normed = norm(ParamName::PostNorm, &h);
    let (gate_up, down) = (need(ParamName::GateUp), need(ParamName::Down));
    let mlp = match get(ParamName::Router) {
        Some(router) => experts(spec, &normed, &router, get, [&gate_up, &down]),
        None => dense(activation, &normed, &gate_up, &down, [None, None]),
    };
    let mlp = match get(ParamName::SharedGate) {
        Some(gate) => {
            let shared =
                dense(activation, &normed, &need(ParamName::SharedGateUp), &need(ParamName::SharedDown), [None, None]);
            mlp + shared * normed.matmul(&gate.tr()).sigmoid()
        }
        None if has_shared => {
            mlp + dense(activation, &normed, &need(ParamName::SharedGateUp), &need(ParamName::SharedDown), [None, None])
        }
        None => mlp,
    };
    h + norm(ParamName::MlpPostNorm, &mlp) * residual_scale
}

/// The multipliers of a norm.
fn scale(spec: &ModelSpec, weight: Tensor) -> Tensor {
    if spec.zero_centred_norms { weight + 1.0 } else { weight }
}

/// Computes attention over one sequence.
fn attend(
    spec: &ModelSpec,
    attention: AttentionSpec,
    get: &dyn Fn(ParamName) -> Option<Tensor>,
    normed: &Tensor, // [S, D]
) -> Tensor {
    let AttentionSpec { num_heads, num_kv_heads, head_dim, .. } = attention;
    let (heads, kv_heads, hd) = (num_heads as i64, num_kv_heads as i64, head_dim as i64);
    let (len, group, eps) = (normed.size()[0], heads / kv_heads, spec.rms_norm_eps);
    let need = |name| get(name).unwrap();
    let all = need(ParamName::Qkv);
    let (grouped, gates) = match attention.output_gate {
        false => (all.view([kv_heads, group + 2, hd, -1]), None),
        true => {
            let slots = all.view([kv_heads, 2 * group + 2, hd, -1]);
            let every_second = |first: i64| slots.slice(1, first, 2 * group, 2); // [Hkv, G, hd, D]
            let gates = normed.matmul(&every_second(1).reshape([heads * hd, -1]).tr());
            (Tensor::cat(&[every_second(0), slots.narrow(1, 2 * group, 2)], 1), Some(gates.sigmoid()))
        }
    };
    let bias = get(ParamName::QkvBias).map(|bias| bias.view([kv_heads, group + 2, hd]));
    let project = |first: i64, count: i64| {
        let w = grouped.narrow(1, first, count).reshape([kv_heads * count * hd, -1]);
        let y = normed.matmul(&w.tr());
        let y = bias.as_ref().map_or(y.shallow_clone(), |b| y + b.narrow(1, first, count).reshape([-1]));
        y.view([len, kv_heads * count, hd]).transpose(0, 1) // [heads, S, hd]
    };
    let (mut q, mut k, v) = (project(0, group), project(group, 1), project(group + 1, 1));
    if let (Some(q_norm), Some(k_norm)) = (get(ParamName::QNorm), get(ParamName::KNorm)) {
        (q, k) = match attention.qk_norm {
            Some(QkNorm::Head) => {
                let norm = |x: &Tensor, weight| rms_norm(x, &scale(spec, weight), eps);
                (norm(&q, q_norm), norm(&k, k_norm))
            }
            _ => {
                let all = |t: Tensor, weight| {
                    let rows = rms_norm(&t.transpose(0, 1).reshape([len, -1]), weight, eps);
                    rows.view([len, -1, hd]).transpose(0, 1)
                };
                (all(q, &q_norm), all(k, &k_norm))
            }
        };
    }
    let (q, k) = (rotate(attention, &q), rotate(attention, &k));
    let repeat = |t: Tensor| t.unsqueeze(1).expand([kv_heads, group, len, hd], false).reshape([heads, len, hd]);
    let scores = q.matmul(&repeat(k).transpose(1, 2)) * attention.scale;
    let hidden: Vec<bool> = (0..len * len)
        .map(|at| (at / len, at % len))
        .map(|(i, j)| j > i || attention.window.is_some_and(|window| i - j >= window as i64))
        .collect();
    let scores = scores.masked_fill(&Tensor::from_slice(&hidden).view([len, len]), f64::NEG_INFINITY);
    let weights = match get(ParamName::Sinks) {
        Some(sinks) => {
            let sinks = sinks.view([heads, 1, 1]).expand([heads, len, 1], false);
            Tensor::cat(&[scores, sinks], -1).softmax(-1, None::<Kind>).narrow(-1, 0, len)
        }
        None => scores.softmax(-1, None::<Kind>),
    };
    let o = weights.matmul(&repeat(v)).transpose(0, 1).reshape([len, heads * hd]);
    let mixed = gates.map_or(o.shallow_clone(), |gates| o * gates).matmul(&need(ParamName::O).tr());
    get(ParamName::OBias).map_or(mixed.shallow_clone(), |bias| mixed + bias)
}

fn dense(
    activation: Activation,
    x: &Tensor,
    gate_up: &Tensor, /* [2 F, D] */
    down: &Tensor,    /* [D, F] */
    [gate_up_bias, down_bias]: [Option<Tensor>; 2],
) -> Tensor {
    let product = |y: Tensor, bias: Option<Tensor>| bias.map_or(y.shallow_clone(), |bias| y + bias);
    let pairs = product(x.matmul(&gate_up.tr()), gate_up_bias).view([x.size()[0], -1, 2]);
    let (gate, up) = (pairs.select(2, 0), pairs.select(2, 1));
    let (gate, up) = match activation {
        Activation::ClampedSwiglu => (gate.clamp_max(7.0), up.clamp(-7.0, 7.0) + 1.0),
        _ => (gate, up),
    };
    let activated = match activation {
        Activation::ClampedSwiglu => (&gate * 1.702).sigmoid() * gate,
        Activation::Silu => gate.sigmoid() * gate,
        Activation::GeluTanh => {
            let inner: Tensor = (&gate + 0.044715 * &gate * &gate * &gate) * (2.0 / PI).sqrt();
            0.5 * &gate * (1.0 + inner.tanh())
        }
    };
    product((activated * up).matmul(&down.tr()), down_bias)
}

/// Computes every expert for every token; experts that were not chosen have the weight 0.
fn experts(
    spec: &ModelSpec,
    x: &Tensor,
    router: &Tensor,
    get: &dyn Fn(ParamName) -> Option<Tensor>,
    [gate_up, down]: [&Tensor; 2],
) -> Tensor {
    let ExpertsSpec { num_experts, router: options, .. } = spec.experts().unwrap();
    let logits = x.matmul(&router.tr());
    let logits = get(ParamName::RouterBias).map_or(logits.shallow_clone(), |bias| logits + bias);
    let correction = get(ParamName::RouterCorrection); // [3 E], three summands
    let (probs, scale) = match options.scores {
        RouterScores::Softmax => (logits.softmax(-1, None::<Kind>), 1.0),
        RouterScores::Sigmoid { scale, .. } => (logits.sigmoid(), scale),
    };
    let correction = correction.map(|parts| parts.detach().view([3, -1]).sum_dim_intlist(0, false, None));
    let corrected = correction.map_or_else(|| probs.detach(), |correction| probs.detach() + correction);
    let (_, chosen) = corrected.topk(options.num_experts_per_tok as i64, -1, true, true);
    let weights = &probs * probs.detach().zeros_like().scatter_value_(1, &chosen, 1.0);
    let sum = if options.norm_topk_prob { weights.sum_dim_intlist(-1, true, None) } else { Tensor::from(1.0) };
    let weights = weights / sum * scale;
    let activation = spec.experts().unwrap().expert.activation;
    let of_expert = |expert: i64| {
        let biases = [ParamName::GateUpBias, ParamName::DownBias].map(|name| get(name).map(|bias| bias.get(expert)));
        dense(activation, x, &gate_up.get(expert), &down.get(expert), biases) * weights.narrow(1, expert, 1)
    };
    (0..num_experts as i64).map(of_expert).reduce(|a, b| a + b).unwrap()
}

pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    x / (x.square().mean_dim(-1, true, None::<Kind>) + eps).sqrt() * weight
}

/// Returns x * cos + rotate_half(x) * sin for the rotated columns, with Llama 3's scaling in its wavelength form.
fn rotate(attention: AttentionSpec, x: &Tensor /* [heads, S, hd] */) -> Tensor {
    let Some(rope) = attention.rope else { return x.shallow_clone() };
    let (len, hd) = (x.size()[1], (attention.head_dim as f64 * rope.partial_rotary_factor) as usize);
    let rest = x.narrow(-1, hd as i64, (attention.head_dim - hd) as i64);
    let x = x.narrow(-1, 0, hd as i64);
    let inv_freq = (0..hd / 2).map(|i| 1.0 / rope.theta.powf((2 * i) as f64 / hd as f64));
    let scaled = inv_freq.map(|inv_freq| {
        let Some(RopeScaling::Llama3(s)) = &rope.scaling else { return inv_freq };
        let (wavelength, context) = (2.0 * PI / inv_freq, s.original_max_position_embeddings);
        if wavelength < context / s.high_freq_factor {
            inv_freq
        } else if wavelength > context / s.low_freq_factor {
            inv_freq / s.factor
        } else {
            let smooth = (context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
            (1.0 - smooth) * inv_freq / s.factor + smooth * inv_freq
        }
    });
    let inv_freq: Vec<f64> = scaled.collect();
    let positions = Tensor::arange(len, (Kind::Double, x.device()));
    let angle = positions.unsqueeze(1) * Tensor::from_slice(&inv_freq);
    let angle = Tensor::cat(&[&angle, &angle], 1);
    let halves = x.chunk(2, -1);
    let turned = &x * angle.cos() + Tensor::cat(&[&-&halves[1], &halves[0]], -1) * angle.sin();
    Tensor::cat(&[turned, rest], -1)
}
