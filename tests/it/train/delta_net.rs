//! Models with gated delta nets: every ZeRO stage, shared prompts and recomputation, compared with the recurrence under autograd.

use colo_grpo::internal::config::GradientCheckpointing;
use colo_grpo::internal::model::{BlockParams, Matrix, ModelSpec, ParamName};
use colo_grpo::internal::ranks::World;
use tch::{Kind, Tensor};

use super::autograd::norm;
use super::run::{LR, Run};
use super::{follows_plain_adamw, stages_equal};
use crate::ranks;

/// With and without shared prompts, in which a completion begins with a copy of its prompt's state.
#[test]
fn gated_delta_nets_train_like_plain_adamw() {
    let mesh = World::single().mesh(1, 1).unwrap();
    for recompute in [GradientCheckpointing::None, GradientCheckpointing::Selective, GradientCheckpointing::Full] {
        for (budget, share_prompts) in [(24, false), (24, true), (1000, true)] {
            let run = Run { delta_nets: true, recompute, budget, share_prompts, ..Run::new(0, Kind::Double) };
            follows_plain_adamw(&mesh, run, 1e-10);
        }
    }
    // With experts in two layers, one of them behind a gated delta net.
    for recompute in [GradientCheckpointing::None, GradientCheckpointing::Full] {
        let both = Run { delta_nets: true, experts: true, recompute, share_prompts: true, ..Run::new(0, Kind::Double) };
        follows_plain_adamw(&mesh, Run { aux_loss_coef: 0.5, budget: 1000, ..both }, 1e-10);
    }
    let turns = Run { delta_nets: true, has_turns: true, share_prompts: true, ..Run::new(0, Kind::Double) };
    follows_plain_adamw(&mesh, turns, 1e-10);
}

#[test]
fn two_ranks_with_gated_delta_nets_train_like_plain_adamw() {
    ranks::run(2, "train::delta_net::two_ranks_with_gated_delta_nets_train_like_plain_adamw", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for stage in 0..=3 {
            let run = |kind| Run { delta_nets: true, share_prompts: true, ..Run::new(stage, kind) };
            follows_plain_adamw(&mesh, run(Kind::Double), 1e-10);
            follows_plain_adamw(&mesh, run(Kind::Float), 0.1 * LR);
        }
    });
}

#[test]
fn zero_stages_with_gated_delta_nets_are_bitwise_equal() {
    ranks::run(2, "train::delta_net::zero_stages_with_gated_delta_nets_are_bitwise_equal", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for (kind, share_prompts) in [(Kind::Float, true), (Kind::BFloat16, false), (Kind::BFloat16, true)] {
            stages_equal(&mesh, Run { delta_nets: true, budget: 1000, share_prompts, ..Run::new(0, kind) });
        }
    });
}

/// A gated delta net over one sequence, token by token. Returns [T, D].
pub fn mix(spec: &ModelSpec, w: &BlockParams, x: &Tensor /* [T, D] */) -> Tensor {
    let heads = spec.delta_net().unwrap().heads;
    let [keys, values, k_dim, v_dim, width] =
        [heads.num_key_heads, heads.num_value_heads, heads.key_dim, heads.value_dim, heads.conv_width]
            .map(|size| size as i64);
    let (len, own) = (x.size()[0], |name| w.norm(name).unwrap());
    let project = |matrix| x.matmul(&w.linear(matrix).weight().tr());
    let rows = project(Matrix::DeltaQkv).constant_pad_nd([0, 0, width - 1, 0]);
    let tap = |at: i64| rows.narrow(0, at, len) * own(ParamName::DeltaConv).select(1, at);
    let mixed = (0..width).map(tap).reduce(|a, b| a + b).unwrap().silu();
    let split = mixed.split_with_sizes([keys * k_dim, keys * k_dim, values * v_dim], 1);
    let per_value_head = |t: &Tensor| {
        let heads = t.view([len, keys, k_dim]);
        let length = (heads.square().sum_dim_intlist(-1, true, None::<Kind>) + 1e-6).sqrt();
        (heads / length).repeat_interleave_self_int(values / keys, 1, None)
    };
    let (q, k) = (per_value_head(&split[0]) / (k_dim as f64).sqrt(), per_value_head(&split[1]));
    let v = split[2].view([len, values, v_dim]);
    let rates = own(ParamName::DeltaALog).exp();
    let decays = ((project(Matrix::DeltaA) + own(ParamName::DeltaDtBias)).softplus() * -rates).exp();
    let strengths = project(Matrix::DeltaB).sigmoid();
    let mut state = Tensor::zeros([values, k_dim, v_dim], (x.kind(), x.device()));
    let mut outputs = Vec::new();
    for at in 0..len {
        let (q, k, v) = (q.get(at), k.get(at), v.get(at));
        let decayed = &state * decays.get(at).view([values, 1, 1]);
        let read = Tensor::einsum("hkv,hk->hv", &[&decayed, &k], None::<i64>);
        let news = (v - read) * strengths.get(at).view([values, 1]);
        state = decayed + k.unsqueeze(2) * news.unsqueeze(1);
        outputs.push(Tensor::einsum("hkv,hk->hv", &[&state, &q], None::<i64>));
    }
    let normed = norm(&Tensor::stack(&outputs, 0), own(ParamName::DeltaNorm), spec.rms_norm_eps);
    let gated = normed * project(Matrix::DeltaZ).view([len, values, v_dim]).silu();
    gated.flatten(1, 2).matmul(&w.linear(Matrix::DeltaOut).weight().tr())
}
