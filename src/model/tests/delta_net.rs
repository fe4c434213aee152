//! Gated delta nets for tests: a plain recurrence for autograd, and small hybrid models.

use tch::{Kind, Tensor};

use super::reference::rms_norm;
use super::shapes::{families, with_experts, with_heads, with_shared};
use crate::model::{DeltaNetSpec, Family, Mixer, Mlp, ModelSpec, ParamName};
use crate::ops::delta_net::DeltaHeads;

/// A small model of Qwen3.5's shape: (name, spec).
pub(in crate::model) fn hybrid() -> (&'static str, ModelSpec) {
    let [_, (_, qwen3), ..] = families();
    let heads = DeltaHeads { num_key_heads: 2, num_value_heads: 4, key_dim: 6, value_dim: 4, conv_width: 3 };
    let spec = with_heads(qwen3, 4, 2).with_num_layers(3).map_attention(|_, attention| {
        attention.output_gate = true;
        attention.rope.as_mut().unwrap().partial_rotary_factor = 0.5;
    });
    let spec = spec.map_blocks(|layer, block| {
        if layer != 1 {
            block.mixer = Mixer::DeltaNet(DeltaNetSpec { hidden: block.hidden, heads });
        }
    });
    ("qwen3.5", ModelSpec { family: Family::Qwen3_5, zero_centred_norms: true, ..spec })
}

/// Returns the spec with these numbers of key and value heads in its gated delta nets.
pub(in crate::model) fn with_delta_heads(spec: ModelSpec, num_key_heads: usize, num_value_heads: usize) -> ModelSpec {
    spec.map_blocks(|_, block| {
        if let Mixer::DeltaNet(delta_net) = &mut block.mixer {
            delta_net.heads = DeltaHeads { num_key_heads, num_value_heads, ..delta_net.heads };
        }
    })
}

/// A small model of Qwen3.5's shape with experts and a shared expert in all layers: (name, spec).
pub(super) fn hybrid_with_experts() -> (&'static str, ModelSpec) {
    let ((_, spec), [(_, with_experts), _]) = (hybrid(), with_experts());
    let experts = Mlp::Experts(with_shared(with_experts.experts().unwrap(), 16));
    let spec = spec.map_blocks(|_, block| block.mlp = experts);
    ("qwen3.5 with experts", ModelSpec { family: Family::Qwen3_5Moe, ..spec })
}

/// Computes a gated delta net over one sequence, token by token.
pub(super) fn mix(
    spec: &ModelSpec,
    get: &dyn Fn(ParamName) -> Option<Tensor>,
    x: &Tensor,   // [S, D]
    qkv: &Tensor, // [C, D]
) -> Tensor {
    let heads = spec.delta_net().unwrap().heads;
    let [keys, values, k_dim, v_dim, width] =
        [heads.num_key_heads, heads.num_value_heads, heads.key_dim, heads.value_dim, heads.conv_width]
            .map(|size| size as i64);
    let project = |name| x.matmul(&get(name).unwrap().tr());
    let need = |name| get(name).unwrap();
    let (z, b, a) = (project(ParamName::DeltaZ), project(ParamName::DeltaB), project(ParamName::DeltaA));
    let rows = x.matmul(&qkv.tr());
    let before = Tensor::zeros([width - 1, rows.size()[1]], (rows.kind(), rows.device()));
    let (rows, taps) = (Tensor::cat(&[before, rows], 0), need(ParamName::DeltaConv).tr());
    let unit = |t: Tensor| &t / ((&t * &t).sum_dim_intlist(-1, true, None::<Kind>) + 1e-6).sqrt();
    let shared = |t: Tensor| t.repeat_interleave_self_int(values / keys, 0, None).unsqueeze(1); // [H, 1, dk]
    let mut state = Tensor::zeros([values, k_dim, v_dim], (x.kind(), x.device()));
    let mut outputs = Vec::new();
    for at in 0..x.size()[0] {
        let mixed = (rows.narrow(0, at, width) * &taps).sum_dim_intlist(0, false, None::<Kind>);
        let mixed = &mixed * mixed.sigmoid();
        let head = |first, count, dim| mixed.narrow(0, first, count * dim).view([count, dim]);
        let q = shared(unit(head(0, keys, k_dim)) / (k_dim as f64).sqrt());
        let k = shared(unit(head(keys * k_dim, keys, k_dim)));
        let v = head(2 * keys * k_dim, values, v_dim).unsqueeze(1);
        let decay = (-need(ParamName::DeltaALog).exp() * (a.get(at) + need(ParamName::DeltaDtBias)).softplus()).exp();
        let decayed = &state * decay.view([values, 1, 1]);
        let strength = b.get(at).sigmoid().view([values, 1, 1]);
        state = &decayed + k.transpose(1, 2).matmul(&((v - k.matmul(&decayed)) * strength));
        let normed = rms_norm(&q.matmul(&state).squeeze_dim(1), &need(ParamName::DeltaNorm), spec.rms_norm_eps);
        let gate = z.get(at).view([values, v_dim]);
        outputs.push((normed * &gate * gate.sigmoid()).flatten(0, 1));
    }
    Tensor::stack(&outputs, 0).matmul(&need(ParamName::DeltaOut).tr())
}
