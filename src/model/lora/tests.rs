//! Tests adapters against autograd over merged weights in float64, projection by projection; tests their slices and dropout.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::*;
use crate::config::TargetModule::{
    DownProj, GateProj, InProjA, InProjB, InProjQkv, InProjZ, KProj, OProj, OutProj, QProj, UpProj, VProj,
};
use crate::config::{GradientCheckpointing, TargetModule};
use crate::error::Result;
use crate::model::params::UnitLayout;
use crate::model::spec::ParamName;
use crate::model::tests::delta_net::{hybrid, with_delta_heads};
use crate::model::tests::{families, in_parallel, reference, slice_mixer, with_experts, with_heads};
use crate::model::{
    BlockContext, BlockParams, Exact, Family, Mixer, Mlp, ModelSpec, NormPlaces, PackedMixer, ParamTable, Plain, Unit,
    block_backward, block_forward,
};
use crate::ops::dropout::Dropout;
use crate::ops::random::RandomKey;
use crate::ops::testing::{assert_close, leaf, rand};
use crate::ranks::Collective;
use crate::ranks::testing::threads;

const LEN: i64 = 11;

fn hybrid_choices() -> [Vec<TargetModule>; 3] {
    [TargetModule::ALL.to_vec(), vec![InProjQkv, OutProj, QProj], vec![UpProj, InProjZ, InProjA]]
}

fn every_choice() -> [Vec<TargetModule>; 4] {
    [
        vec![QProj, KProj, VProj, OProj, GateProj, UpProj, DownProj],
        vec![QProj, VProj],
        vec![KProj, UpProj],
        vec![OProj, GateProj],
    ]
}

/// Sets of expert projections whose adapters PEFT can read: all three, or down alone.
fn beside_experts() -> [Vec<TargetModule>; 2] {
    [vec![GateProj, UpProj, DownProj], vec![DownProj]]
}

/// A random block and its adapters, each in its layout.
struct Block {
    spec: ModelSpec,
    layer: usize,
    lora: LoraSpec,
    layout: UnitLayout,
    flat: Tensor,
    adapter_layout: UnitLayout,
    adapters: Tensor,
}

impl Block {
    fn new(spec: &ModelSpec, layer: usize, targets: Vec<TargetModule>) -> Self {
        let lora = LoraSpec { r: 3, alpha: 5.0, dropout: 0.0, targets };
        let shared = Arc::new(spec.clone());
        let layout = ParamTable::new(shared.clone(), 1).unit(Unit::Block(layer)).clone();
        let adapter_layout = ParamTable::adapters(shared, &lora, 2).unit(Unit::Block(layer)).clone();
        let (flat, adapters) = (rand(&[layout.len as i64]) * 0.4, rand(&[adapter_layout.len as i64]) * 0.4);
        Self { spec: spec.clone(), layer, lora, layout, flat, adapter_layout, adapters }
    }

    fn params(&self, dropout: Option<Dropout>) -> BlockParams {
        let lora = BlockLora::expand(&self.spec, &self.lora, &self.adapter_layout, &self.adapters, dropout).unwrap();
        BlockParams::view(&self.spec, &self.layout, &self.flat).with_adapters(lora)
    }

    /// Returns (y, dx, gradient of the adapters' flat tensor) for x and dy [LEN, D].
    fn run(&self, x: &Tensor, dy: &Tensor, keep: GradientCheckpointing, dropout: Option<Dropout>) -> [Tensor; 3] {
        let spec = &self.spec;
        let positions = Tensor::arange(LEN, (Kind::Int64, Device::Cpu));
        let ropes = spec.ropes().rows(&positions, Kind::Double);
        let ropes = ropes.unwrap();
        let ctx = BlockContext::new(spec, &ropes, None, None);
        let packed = PackedMixer::new(spec, &[0, LEN], Device::Cpu);
        let w = self.params(dropout);
        let (y, saved) = block_forward(&ctx, self.layer, &w, x, &packed, Some(keep)).unwrap();
        let flat = Tensor::zeros_like(&self.adapters);
        let gradients = BlockLora::gradients(spec, &self.lora, &self.adapter_layout, &flat).unwrap();
        let mut grads = BlockParams::default().with_adapters(gradients);
        let dx = block_backward(&ctx, &w, dy, saved.unwrap(), &packed, &mut grads).unwrap();
        let own = |matrix| grads.linear(matrix).lora.as_ref();
        BlockLora::add_to(own, spec, &self.lora, &self.adapter_layout, &flat).unwrap();
        [y, dx, flat]
    }
}

/// A projection and, if it belongs to an expert, the expert's index.
type Planted = (TargetModule, Option<i64>);

/// Rows that adapters [out, r] x [r, in] add to the fused matrix, built projection by projection.
fn merged(spec: &ModelSpec, name: ParamName, delta: &dyn Fn(Planted, i64, i64) -> Tensor) -> Option<Tensor> {
    let [hidden, head_dim, kv] = {
        let attention = spec.attention();
        [spec.hidden_size, attention.head_dim, attention.num_kv_heads].map(|size| size as i64)
    };
    let width = spec.attention().num_heads as i64 * head_dim;
    let of_mlp = |expert: Option<i64>, mlp: i64| match name {
        ParamName::GateUp => {
            let all = [GateProj, UpProj].map(|module| delta((module, expert), mlp, hidden));
            Tensor::stack(&all, 1).view([-1, hidden])
        }
        _ => delta((DownProj, expert), hidden, mlp),
    };
    let [channels, values, heads] = delta_rows(spec);
    match (name, spec.experts()) {
        (ParamName::Qkv, _) => {
            let heads = |module, rows: i64| delta((module, None), rows, hidden).view([kv, -1, head_dim, hidden]);
            let queries = if spec.attention().output_gate { 2 * width } else { width };
            let all = [heads(QProj, queries), heads(KProj, kv * head_dim), heads(VProj, kv * head_dim)];
            Some(Tensor::cat(&all, 1).view([-1, hidden]))
        }
        (ParamName::O, _) => Some(delta((OProj, None), hidden, width)),
        (ParamName::GateUp | ParamName::Down, None) => Some(of_mlp(None, spec.dense().unwrap().intermediate as i64)),
        (ParamName::GateUp | ParamName::Down, Some(experts)) => {
            let of_expert = |expert| of_mlp(Some(expert), experts.expert.intermediate as i64);
            Some(Tensor::stack(&(0..experts.num_experts as i64).map(of_expert).collect::<Vec<_>>(), 0))
        }
        (ParamName::DeltaQkv, _) => Some(delta((InProjQkv, None), channels, hidden)),
        (ParamName::DeltaZ, _) => Some(delta((InProjZ, None), values, hidden)),
        (ParamName::DeltaB, _) => Some(delta((InProjB, None), heads, hidden)),
        (ParamName::DeltaA, _) => Some(delta((InProjA, None), heads, hidden)),
        (ParamName::DeltaOut, _) => Some(delta((OutProj, None), hidden, values)),
        _ => None,
    }
}

/// Numbers of rows of a gated delta net's projections: queries, keys and values; gates; write strengths or decays.
fn delta_rows(spec: &ModelSpec) -> [i64; 3] {
    let heads = spec.delta_net().map(|delta_net| delta_net.heads);
    heads.map_or([0; 3], |heads| {
        [heads.channels(), heads.num_value_heads * heads.value_dim, heads.num_value_heads].map(|rows| rows as i64)
    })
}

/// The leaves [r, in] and [out, r] of every adapted projection, cut from the flat tensor by explicit indices.
fn leaves(block: &Block, flat: &Tensor) -> Vec<(Planted, Tensor, Tensor)> {
    let (spec, r) = (&block.spec, block.lora.r as i64);
    let (kv, group, head_dim) = (
        spec.attention().num_kv_heads as i64,
        spec.attention().heads_per_group() as i64,
        spec.attention().head_dim as i64,
    );
    let param = |name| block.adapter_layout.view(name, flat);
    let mut found = Vec::new();
    let mut cut = |modules: &[(TargetModule, i64)], a, b, groups: i64, inner: i64| {
        let adapted: Vec<_> = modules.iter().filter(|(module, _)| block.lora.targets.contains(module)).collect();
        let (Some(a), Some(b)) = (param(a), param(b)) else { return assert!(adapted.is_empty()) };
        let experts = if a.dim() == 3 { (0..a.size()[0]).map(Some).collect() } else { vec![None] };
        for expert in experts {
            let own = |all: &Tensor| expert.map_or_else(|| all.shallow_clone(), |expert| all.get(expert));
            let (a, b) = (own(&a), own(&b).view([groups, -1, inner, r]));
            let mut first = 0;
            for (index, (module, heads)) in adapted.iter().enumerate() {
                let rows = b.narrow(1, first, *heads).reshape([-1, r]);
                found.push(((*module, expert), leaf(&a.narrow(0, index as i64 * r, r)), leaf(&rows)));
                first += heads;
            }
        }
    };
    let is_delta_net = matches!(spec.layers[block.layer].mixer, Mixer::DeltaNet(_));
    if is_delta_net {
        let [channels, values, heads] = delta_rows(spec);
        cut(&[(InProjQkv, 1)], ParamName::DeltaQkvLoraA, ParamName::DeltaQkvLoraB, 1, channels);
        cut(&[(InProjZ, 1)], ParamName::DeltaZLoraA, ParamName::DeltaZLoraB, 1, values);
        cut(&[(InProjB, 1)], ParamName::DeltaBLoraA, ParamName::DeltaBLoraB, 1, heads);
        cut(&[(InProjA, 1)], ParamName::DeltaALoraA, ParamName::DeltaALoraB, 1, heads);
        cut(&[(OutProj, 1)], ParamName::DeltaOutLoraA, ParamName::DeltaOutLoraB, 1, spec.hidden_size as i64);
    } else {
        let queries = if spec.attention().output_gate { 2 * group } else { group };
        cut(&[(QProj, queries), (KProj, 1), (VProj, 1)], ParamName::QkvA, ParamName::QkvB, kv, head_dim);
        cut(&[(OProj, 1)], ParamName::OA, ParamName::OB, 1, spec.hidden_size as i64);
    }
    let width = match spec.layers[block.layer].mlp {
        Mlp::Dense(dense) => dense.intermediate,
        Mlp::Experts(experts) => experts.expert.intermediate,
    };
    cut(&[(GateProj, 1), (UpProj, 1)], ParamName::GateUpA, ParamName::GateUpB, width as i64, 1);
    cut(&[(DownProj, 1)], ParamName::DownA, ParamName::DownB, 1, spec.hidden_size as i64);
    found
}

#[test]
fn lora_gradients_match_autograd_over_merged_weights() {
    let attention = vec![vec![QProj, KProj, VProj, OProj], vec![VProj]];
    // Modules with an A of their own. Those that share an A are tested against PEFT.
    let alone = |spec| ModelSpec { family: Family::Llama, ..spec };
    let dense = families().map(|(name, spec)| (name, alone(spec), 1, every_choice().to_vec()));
    let [(all, everywhere), (some, in_some_layers)] = with_experts();
    let unnormalised = everywhere.clone().map_experts(|experts| experts.router.norm_topk_prob = false);
    let behind = unnormalised.map_blocks(|_, block| block.norms = NormPlaces::POST);
    let experts = [
        (all, everywhere, 1, [attention.clone(), beside_experts().to_vec()].concat()),
        ("experts, norms behind", behind, 1, beside_experts().to_vec()),
        (some, in_some_layers, 1, attention),
    ];
    // Layer 0 has a gated delta net, layer 1 attention with an output gate.
    let hybrids = [0, 1].map(|layer| {
        let (name, spec) = hybrid();
        (name, spec, layer, hybrid_choices().to_vec())
    });
    for (name, spec, layer, choices) in dense.into_iter().chain(experts).chain(hybrids) {
        for targets in choices {
            println!("{name}, layer {layer}: {targets:?}");
            let block = Block::new(&spec, layer, targets);
            let (x, dy) = (rand(&[LEN, spec.hidden_size as i64]), rand(&[LEN, spec.hidden_size as i64]));
            let (x_leaf, projections) = (leaf(&x), leaves(&block, &block.adapters));
            let delta = |place, rows: i64, columns: i64| {
                let own = projections.iter().find(|(own, ..)| *own == place);
                let zeros = || Tensor::zeros([rows, columns], (Kind::Double, Device::Cpu));
                own.map_or_else(zeros, |(_, a, b)| b.matmul(a) * (5.0 / 3.0))
            };
            let weight = |name| {
                let base = block.layout.view(name, &block.flat)?;
                Some(merged(&spec, name, &delta).map_or_else(|| base.shallow_clone(), |delta| &base + delta))
            };
            let expected_y = reference::block(&spec, layer, &weight, &x_leaf);
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

/// Checks the gradient along a random direction against the difference quotient, with dropout masks; recomputation must draw the same masks.
#[test]
fn lora_dropout_is_differentiated() {
    let (_, spec) = families().into_iter().next().unwrap();
    let mut block = Block::new(&spec, 1, every_choice()[0].clone());
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
fn tensor_parallel_lora_slices_sum_to_the_block() {
    let [(_, qwen2), (_, qwen3), .., (_, norms_behind)] = families();
    let eight = with_heads(qwen2, 8, 2);
    let [(_, experts), _] = with_experts();
    let parallel = |num_experts| in_parallel(experts.clone(), num_experts);
    let all = [
        (eight, 1, every_choice().to_vec(), vec![1, 2, 4]),
        (qwen3, 1, every_choice().to_vec(), vec![2, 4]),
        (norms_behind, 1, every_choice().to_vec(), vec![2, 4]),
        (parallel(6), 1, beside_experts().to_vec(), vec![2]),
        (parallel(8), 1, beside_experts().to_vec(), vec![4]),
        (experts, 1, beside_experts().to_vec(), vec![2, 4]),
    ];
    let hybrids =
        [0, 1].map(|layer| (with_delta_heads(hybrid().1, 4, 8), layer, hybrid_choices().to_vec(), vec![2, 4]));
    for (spec, layer, choices, tp_sizes) in all.into_iter().chain(hybrids) {
        for targets in choices {
            let block = Block::new(&spec, layer, targets);
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
    let ropes = spec.ropes().rows(&Tensor::from_slice(&[0i64, 1, 2, 0, 1]), Kind::Double);
    let ropes = ropes.unwrap();
    let ctx = BlockContext::new(spec, &ropes, Some(tp), None);
    let Unit::Block(layer) = adapter_layout.unit else { unreachable!() };
    let (y, _) = block_forward(&ctx, layer, &w, &x, &slice_mixer(spec, tp.size()), None).unwrap();
    Vec::try_from(y.flatten(0, 1)).unwrap()
}

/// Counts computed by hand for Qwen3-30B-A3B at rank 16: 48 layers, 128 experts of width 768, D = 2048.
#[test]
fn the_plan_counts_adapters_of_experts() {
    let spec = ModelSpec::preset("qwen3-30b-a3b").unwrap();
    let lora = LoraSpec { r: 16, alpha: 32.0, dropout: 0.0, targets: vec![GateProj, UpProj, DownProj] };
    let table = ParamTable::adapters(Arc::new(spec.clone()), &lora, 1);
    let of_expert = 3 * 16 * (2048 + 768);
    assert_eq!(table.num_params(), 48 * 128 * of_expert);
    // The rows of gate and of up each have columns for both projections.
    assert_eq!(lora.num_expanded(&spec).all, 48 * 128 * (2 * 768 * 32 + 2048 * 16));
}

/// Every row of a batch has its own adapter, or none.
#[test]
fn rows_of_a_batch_choose_among_adapters_of_experts() {
    let [(_, spec), _] = with_experts();
    let [first, second] = beside_experts().map(|targets| Block::new(&spec, 1, targets));
    let expanded =
        |block: &Block| BlockLora::expand(&spec, &block.lora, &block.adapter_layout, &block.adapters, None).unwrap();
    let x = rand(&[LEN, spec.hidden_size as i64]);
    let forward = |w: &BlockParams| {
        let positions = Tensor::arange(LEN, (Kind::Int64, Device::Cpu));
        let ropes = spec.ropes().rows(&positions, Kind::Double).unwrap();
        let ctx = BlockContext::new(&spec, &ropes, None, None);
        let packed = PackedMixer::new(&spec, &[0, LEN], Device::Cpu);
        block_forward(&ctx, 1, w, &x, &packed, None).unwrap().0
    };
    let base = || BlockParams::view(&spec, &first.layout, &first.flat);
    // Only the MLP has adapters, so rows do not influence each other.
    let alone = [&first, &second].map(|block| forward(&base().with_adapters(expanded(block))));
    let both = base().with_adapters(BlockLora::stacked(&[expanded(&first), expanded(&second)]).unwrap());
    let chosen: Vec<i32> = (0..LEN as i32).map(|row| row % 3 - 1).collect();
    let got = forward(&both.for_rows(&Tensor::from_slice(&chosen)).unwrap());
    let base = forward(&base());
    for (row, &adapter) in chosen.iter().enumerate() {
        let expected = if adapter < 0 { &base } else { &alone[adapter as usize] };
        assert_close(&got.get(row as i64), &expected.get(row as i64));
    }
    assert!((&alone[0] - &base).abs().max().double_value(&[]) > 1e-3 && !alone[0].equal(&alone[1]));
}

#[test]
fn lora_settings_that_peft_or_gpus_do_not_support_are_refused() {
    let [(_, spec), (_, mixed)] = with_experts();
    let lora = |targets: &[TargetModule]| LoraSpec { r: 3, alpha: 5.0, dropout: 0.0, targets: targets.to_vec() };
    for accepted in [&[QProj, OProj][..], &[DownProj], &[QProj, GateProj, UpProj, DownProj]] {
        lora(accepted).check(&spec).unwrap();
    }
    let refused = |outcome: Result<()>, message: &str| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    };
    let together = "expected gate_proj, up_proj and down_proj together, down_proj alone";
    refused(lora(&[QProj, UpProj]).check(&spec), &format!("lora.target_modules = q_proj, up_proj: {together}"));
    refused(lora(&[GateProj, UpProj]).check(&spec), &format!("lora.target_modules = gate_proj, up_proj: {together}"));
    let dropping = LoraSpec { dropout: 0.1, ..lora(&[DownProj]) };
    refused(dropping.check(&spec), "lora.dropout = 0.1: expected 0, or lora.target_modules");
    LoraSpec { dropout: 0.1, ..lora(&[QProj]) }.check(&spec).unwrap();
    let error = lora(&[DownProj]).check(&mixed).unwrap_err().to_string();
    assert!(error.contains("or a model with experts in all layers or in none: PEFT cannot load adapters"), "{error}");
    lora(&[VProj]).check(&mixed).unwrap();
    let odd = lora(&[DownProj]).check_gpu(&spec, Kind::BFloat16, &Plain);
    refused(
        odd,
        "lora.r = 3: expected a multiple of 8 for adapters of experts (gate_proj, up_proj, down_proj) on a GPU in \
         bfloat16",
    );
    lora(&[DownProj]).check_gpu(&spec, Kind::Float, &Plain).unwrap();
    LoraSpec { r: 16, ..lora(&[DownProj]) }.check_gpu(&spec, Kind::BFloat16, &Plain).unwrap();
    lora(&[VProj]).check_gpu(&spec, Kind::BFloat16, &Plain).unwrap();
    let [(_, dense), ..] = families();
    lora(&[DownProj]).check_gpu(&dense, Kind::BFloat16, &Plain).unwrap();
    let exact = |r, kind| LoraSpec { r, ..lora(&[VProj]) }.check_gpu(&dense, kind, &Exact);
    assert!(exact(4, Kind::BFloat16).unwrap_err().to_string().contains("a multiple of 8 with exact = true"));
    exact(4, Kind::Float).unwrap();
    exact(24, Kind::BFloat16).unwrap();
}
