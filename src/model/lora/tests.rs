//! Adapters against autograd over merged weights in float64, projection by projection; their slices; dropout.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::*;
use crate::config::GradientCheckpointing;
use crate::config::TargetModule::{DownProj, GateProj, KProj, OProj, QProj, UpProj, VProj};
use crate::dist::Collective;
use crate::dist::testing::threads;
use crate::model::params::{ParamName, UnitLayout};
use crate::model::tests::{SliceAttention, families, reference, with_experts};
use crate::model::{
    BlockContext, BlockParams, ModelSpec, PackedMixer, ParamTable, Unit, attention_scale, block_backward, block_forward,
};
use crate::ops::attention::PackedLayout;
use crate::ops::dropout::Dropout;
use crate::ops::random::RandomKey;
use crate::ops::testing::{assert_close, leaf, rand};

const LEN: i64 = 11;

fn every_choice() -> [Vec<TargetModule>; 4] {
    [
        vec![QProj, KProj, VProj, OProj, GateProj, UpProj, DownProj],
        vec![QProj, VProj],
        vec![KProj, UpProj],
        vec![OProj, GateProj],
    ]
}

/// A random block and its adapters in one layout each.
struct Block {
    spec: ModelSpec,
    lora: LoraSpec,
    layout: UnitLayout,
    flat: Tensor,
    adapter_layout: UnitLayout,
    adapters: Tensor,
}

impl Block {
    fn new(spec: &ModelSpec, targets: Vec<TargetModule>) -> Self {
        let lora = LoraSpec { r: 3, alpha: 5.0, dropout: 0.0, targets };
        let shared = Arc::new(spec.clone());
        let layout = ParamTable::new(shared.clone(), 1).unit(Unit::Block(1)).clone();
        let adapter_layout = ParamTable::adapters(shared, &lora, 2).unit(Unit::Block(1)).clone();
        let (flat, adapters) = (rand(&[layout.len as i64]) * 0.4, rand(&[adapter_layout.len as i64]) * 0.4);
        Self { spec: spec.clone(), lora, layout, flat, adapter_layout, adapters }
    }

    fn params(&self, dropout: Option<Dropout>) -> BlockParams {
        let lora = BlockLora::expand(&self.spec, &self.lora, &self.adapter_layout, &self.adapters, dropout).unwrap();
        BlockParams::view(&self.spec, &self.layout, &self.flat).with_adapters(lora)
    }

    /// (y, dx, gradient of the adapters' flat tensor) for x and dy [LEN, D].
    fn run(&self, x: &Tensor, dy: &Tensor, keep: GradientCheckpointing, dropout: Option<Dropout>) -> [Tensor; 3] {
        let spec = &self.spec;
        let positions = Tensor::arange(LEN, (Kind::Int64, Device::Cpu));
        let rope = spec.rope().rows(&positions, Kind::Double);
        let rope = rope.unwrap();
        let ctx = BlockContext { spec, rope: &rope, tp: None, routes: None };
        let packed = PackedMixer::new(spec, &[0, LEN], Device::Cpu);
        let w = self.params(dropout);
        let (y, saved) = block_forward(&ctx, 1, &w, x, &packed, Some(keep)).unwrap();
        let flat = Tensor::zeros_like(&self.adapters);
        let gradients = BlockLora::gradients(spec, &self.lora, &self.adapter_layout, &flat).unwrap();
        let mut grads = BlockParams::default().with_adapters(gradients);
        let dx = block_backward(&ctx, &w, dy, saved.unwrap(), &packed, &mut grads).unwrap();
        BlockLora::add_to(&grads, spec, &self.lora, &self.adapter_layout, &flat).unwrap();
        [y, dx, flat]
    }
}

/// Rows of the fused matrix that adapters [out, r] x [r, in] add, from leaves per projection, each spelt out.
fn merged(spec: &ModelSpec, name: ParamName, delta: &dyn Fn(TargetModule, i64, i64) -> Tensor) -> Option<Tensor> {
    let [hidden, mlp, head_dim, kv] =
        [spec.hidden_size, spec.intermediate_size, spec.head_dim, spec.num_kv_heads].map(|size| size as i64);
    let width = spec.num_heads as i64 * head_dim;
    match name {
        ParamName::Qkv => {
            let heads = |module, rows: i64| delta(module, rows, hidden).view([kv, -1, head_dim, hidden]);
            let all = [heads(QProj, width), heads(KProj, kv * head_dim), heads(VProj, kv * head_dim)];
            Some(Tensor::cat(&all, 1).view([-1, hidden]))
        }
        ParamName::O => Some(delta(OProj, hidden, width)),
        ParamName::GateUp => {
            Some(Tensor::stack(&[delta(GateProj, mlp, hidden), delta(UpProj, mlp, hidden)], 1).view([-1, hidden]))
        }
        ParamName::Down => Some(delta(DownProj, hidden, mlp)),
        _ => None,
    }
}

/// Leaves [r, in] and [out, r] of every adapted projection, cut out of the flat tensor by hand.
fn leaves(block: &Block, flat: &Tensor) -> Vec<(TargetModule, Tensor, Tensor)> {
    let (spec, r) = (&block.spec, block.lora.r as i64);
    let (kv, group, head_dim) = (spec.num_kv_heads as i64, spec.heads_per_group() as i64, spec.head_dim as i64);
    let param = |name| block.adapter_layout.view(name, flat);
    let mut found = Vec::new();
    let mut cut = |modules: &[(TargetModule, i64)], a, b, groups: i64, inner: i64| {
        let adapted: Vec<_> = modules.iter().filter(|(module, _)| block.lora.targets.contains(module)).collect();
        let (Some(a), Some(b)) = (param(a), param(b)) else { return assert!(adapted.is_empty()) };
        let b = b.view([groups, -1, inner, r]);
        let mut first = 0;
        for (index, (module, heads)) in adapted.into_iter().enumerate() {
            let rows = b.narrow(1, first, *heads).reshape([-1, r]);
            found.push((*module, leaf(&a.narrow(0, index as i64 * r, r)), leaf(&rows)));
            first += heads;
        }
    };
    cut(&[(QProj, group), (KProj, 1), (VProj, 1)], ParamName::QkvA, ParamName::QkvB, kv, head_dim);
    cut(&[(OProj, 1)], ParamName::OA, ParamName::OB, 1, spec.hidden_size as i64);
    cut(&[(GateProj, 1), (UpProj, 1)], ParamName::GateUpA, ParamName::GateUpB, spec.intermediate_size as i64, 1);
    cut(&[(DownProj, 1)], ParamName::DownA, ParamName::DownB, 1, spec.hidden_size as i64);
    found
}

#[test]
fn every_family_and_choice_matches_autograd_over_merged_weights() {
    let attention = [vec![QProj, KProj, VProj, OProj], vec![VProj]];
    let dense = families().map(|(name, spec)| (name, spec, every_choice().to_vec()));
    let experts = with_experts().map(|(name, spec)| (name, spec, attention.to_vec()));
    for (name, spec, choices) in dense.into_iter().chain(experts) {
        for targets in choices {
            println!("{name}: {targets:?}");
            let block = Block::new(&spec, targets);
            let (x, dy) = (rand(&[LEN, spec.hidden_size as i64]), rand(&[LEN, spec.hidden_size as i64]));
            let (x_leaf, projections) = (leaf(&x), leaves(&block, &block.adapters));
            let delta = |module, rows: i64, columns: i64| {
                let own = projections.iter().find(|(own, ..)| *own == module);
                let zeros = || Tensor::zeros([rows, columns], (Kind::Double, Device::Cpu));
                own.map_or_else(zeros, |(_, a, b)| b.matmul(a) * (5.0 / 3.0))
            };
            let weight = |name| {
                let base = block.layout.view(name, &block.flat)?;
                if base.dim() == 3 {
                    return Some(base); // of experts
                }
                Some(merged(&spec, name, &delta).map_or_else(|| base.shallow_clone(), |delta| &base + delta))
            };
            let expected_y = reference::block(&spec, &weight, &x_leaf);
            let mut wanted = vec![&x_leaf];
            wanted.extend(projections.iter().flat_map(|(_, a, b)| [a, b]));
            let expected = Tensor::run_backward(&[(&expected_y * &dy).sum(None)], &wanted, false, false);
            for keep in [GradientCheckpointing::None, GradientCheckpointing::Full] {
                let [y, dx, gradient] = block.run(&x, &dy, keep, None);
                assert_close(&y, &expected_y);
                assert_close(&dx, &expected[0]);
                for ((_, a, b), expected) in leaves(&block, &gradient).iter().zip(expected[1..].chunks(2)) {
                    assert_close(a, &expected[0]);
                    assert_close(b, &expected[1]);
                }
            }
        }
    }
}

/// The gradient along a random direction is the difference quotient, masks and all; recomputation draws the same masks.
#[test]
fn dropout_is_differentiated() {
    let (_, spec) = families().into_iter().next().unwrap();
    let mut block = Block::new(&spec, every_choice()[0].clone());
    let dropout = Some(Dropout { rate: 0.3, key: RandomKey::new(7, 1) });
    let (x, dy) = (rand(&[LEN, spec.hidden_size as i64]), rand(&[LEN, spec.hidden_size as i64]));
    let [y, dx, gradient] = block.run(&x, &dy, GradientCheckpointing::None, dropout);
    let again = block.run(&x, &dy, GradientCheckpointing::Full, dropout);
    assert!(again.iter().zip([&y, &dx, &gradient]).all(|(again, first)| again.equal(first)));
    assert!(!block.run(&x, &dy, GradientCheckpointing::None, None)[0].equal(&y));
    let (direction, x_direction, step) = (rand(&gradient.size()), rand(&x.size()), 1e-6);
    let base = block.adapters.copy();
    let mut loss = |sign: f64| {
        block.adapters = &base + &direction * (sign * step);
        let x = &x + &x_direction * (sign * step);
        let [y, ..] = block.run(&x, &dy, GradientCheckpointing::None, dropout);
        (y * &dy).sum(Kind::Double).double_value(&[])
    };
    let quotient = (loss(1.0) - loss(-1.0)) / (2.0 * step);
    let slope = ((gradient * &direction).sum(None) + (dx * &x_direction).sum(None)).double_value(&[]);
    assert!((quotient - slope).abs() < 1e-6 * slope.abs().max(1.0), "{quotient} {slope}");
}

#[test]
fn slices_add_up_to_the_block() {
    let [(_, qwen2), (_, qwen3), .., (_, norms_behind)] = families();
    let eight = ModelSpec { num_heads: 8, ..qwen2 };
    for (spec, tp_sizes) in [(eight, vec![1, 2, 4]), (qwen3, vec![2, 4]), (norms_behind, vec![2, 4])] {
        for targets in every_choice() {
            let block = Block::new(&spec, targets);
            let x = rand(&[5, spec.hidden_size as i64]);
            let host = |t: &Tensor| Vec::<f64>::try_from(t.view(-1)).unwrap();
            let (flat, adapters, x) = (host(&block.flat), host(&block.adapters), host(&x));
            let (spec, lora) = (&block.spec, &block.lora);
            let run = |tp_size: usize| {
                let layouts = (&block.layout, &block.adapter_layout);
                threads(tp_size, |tp: Arc<dyn Collective>| sliced(spec, lora, layouts, (&flat, &adapters, &x), &*tp))
            };
            let whole = run(1).remove(0);
            for &tp_size in &tp_sizes {
                for y in run(tp_size) {
                    assert_close(&Tensor::from_slice(&y), &Tensor::from_slice(&whole));
                }
            }
        }
    }
}

fn sliced(
    spec: &ModelSpec,
    lora: &LoraSpec,
    (layout, adapter_layout): (&UnitLayout, &UnitLayout),
    (flat, adapters, x): (&[f64], &[f64], &[f64]),
    tp: &dyn Collective,
) -> Vec<f64> {
    let (flat, adapters) = (Tensor::from_slice(flat), Tensor::from_slice(adapters));
    let lora = BlockLora::expand(spec, lora, adapter_layout, &adapters, None).unwrap();
    let whole = BlockParams::view(spec, layout, &flat).with_adapters(lora);
    let w = whole.tp_slice(tp.rank(), tp.size()).unwrap();
    let x = Tensor::from_slice(x).view([-1, spec.hidden_size as i64]);
    let rope = spec.rope().rows(&Tensor::from_slice(&[0i64, 1, 2, 0, 1]), Kind::Double);
    let rope = rope.unwrap();
    let ctx = BlockContext { spec, rope: &rope, tp: Some(tp), routes: None };
    let layout = PackedLayout::new(&[0, 3, 5], spec.tp_heads(tp.size()).1, None, Device::Cpu);
    let attention = SliceAttention(layout, attention_scale(spec));
    let (y, _) = block_forward(&ctx, 0, &w, &x, &attention, None).unwrap();
    Vec::try_from(y.flatten(0, 1)).unwrap()
}

#[test]
fn adapters_beside_experts_are_refused_by_name() {
    let [(_, spec), _] = with_experts();
    let check = |targets| LoraSpec { r: 3, alpha: 5.0, dropout: 0.0, targets }.check(&spec);
    check(vec![QProj, OProj]).unwrap();
    let error = check(vec![QProj, DownProj]).unwrap_err().to_string();
    assert!(error.starts_with("lora.target_modules = q_proj, down_proj: expected some of q_proj, k_proj"), "{error}");
}
