//! AdamW with 8-bit moments and Muon on real ranks: all ZeRO stages and locations of state are equal bit for bit, and equal a step on
//! autograd's gradients for each matrix of a checkpoint separately.

use colo_grpo::internal::config::AdjustLr;
use colo_grpo::internal::model::{Param, ParamName, Unit};
use colo_grpo::internal::ops::adamw8bit::{BLOCK, Maps};
use colo_grpo::internal::ops::muon;
use colo_grpo::internal::ranks::{Mesh, World};
use colo_grpo::internal::train::{MuonOptions, Optim, OptimizerHome};
use tch::{Device, Kind, Tensor};

use super::autograd::Model;
use super::run::{ADAM, ENTROPY_COEF, LR, MAX_GRAD_NORM, Run, TEMPERATURE, max_difference, unpadded, weights};
use super::state::{read, saved_state, state};
use crate::ranks;

const MUON: MuonOptions =
    MuonOptions { momentum: 0.95, nesterov: true, ns_steps: 5, adjust_lr: AdjustLr::MatchRmsAdamw };
/// Muon options with which query and key get different learning rate multipliers.
const ORIGINAL: MuonOptions = MuonOptions { nesterov: false, adjust_lr: AdjustLr::Original, ..MUON };

fn run(stage: u8, kind: Kind, optim: Optim) -> Run {
    Run { optim, ..Run::new(stage, kind) }
}

#[test]
fn muon_steps_every_matrix_separately() {
    let mesh = World::single().mesh(1, 1).unwrap();
    for optim in [Optim::AdamW8bit, Optim::Muon(MUON), Optim::Muon(ORIGINAL)] {
        follows(&mesh, run(0, Kind::Double, optim));
    }
    for optim in [Optim::Muon(MUON), Optim::Muon(ORIGINAL)] {
        follows(&mesh, Run { delta_nets: true, ..run(0, Kind::Double, optim) });
    }
}

#[test]
fn optimizer_steps_are_equal_for_all_zero_stages_and_residencies() {
    ranks::run(
        2,
        "train::optimizers::optimizer_steps_are_equal_for_all_zero_stages_and_residencies",
        |world: World| {
            let (mesh, alone) = (world.mesh(1, 2).unwrap(), World::single().mesh(1, 1).unwrap());
            for optim in [Optim::AdamW8bit, Optim::Muon(ORIGINAL)] {
                for delta_nets in [false, true] {
                    stages_step_alike(&mesh, Run { delta_nets, ..run(0, Kind::BFloat16, optim) });
                    follows(&mesh, Run { delta_nets, ..run(3, Kind::Double, optim) });
                }
                state_moves(&mesh, &alone, optim);
            }
        },
    );
}

/// Compares resident state at stage 0 with streamed and swapped state at the other stages, for one micro-batch.
fn stages_step_alike(mesh: &Mesh, of_stage_0: Run) {
    let first = Run { budget: 1000, ..of_stage_0 };
    let (run, optim) = (|stage| Run { stage, ..first }, first.optim);
    let mut expected = first.policy(mesh);
    let mut others = [1, 2, 3].map(|stage| {
        let run = run(stage);
        let home = if stage == 2 { OptimizerHome::Swap(run.pool(mesh)) } else { OptimizerHome::Stream(run.pool(mesh)) };
        (run, run.policy_in(mesh, home))
    });
    for _ in 0..2 {
        let outcome = first.step(&mut expected, mesh);
        for (run, policy) in &mut others {
            assert_eq!(run.step(policy, mesh), outcome, "{optim:?}, stage {}", run.stage);
            assert!(weights(policy) == weights(&expected), "{optim:?}, stage {}", run.stage);
            assert!(saved_state(policy, mesh) == saved_state(&expected, mesh), "{optim:?}, stage {}", run.stage);
            policy.drop_gradients();
            policy.offload_optimizer().unwrap();
            policy.finish_offload().unwrap();
            policy.reload_optimizer().unwrap();
        }
    }
}

/// State is moved from two ranks at stage 3 to one rank, and back.
fn state_moves(mesh: &Mesh, alone: &Mesh, optim: Optim) {
    let (from, to) = (run(3, Kind::Float, optim), Run { num_sharers: 1, ..run(0, Kind::Float, optim) });
    let (mut policy, mut moved, mut back) = (from.policy(mesh), to.policy(alone), from.policy(mesh));
    for _ in 0..2 {
        let _ = from.step(&mut policy, mesh);
    }
    let saved = saved_state(&policy, mesh);
    for policy in [&mut moved, &mut back] {
        policy.import_state(2, &mut |unit, name, range| read(&saved, unit, name, range)).unwrap();
    }
    assert!(saved_state(&moved, alone) == saved && state(&back) == state(&policy), "{optim:?}: changed on its way");
    let _ = (from.step(&mut policy, mesh), to.step(&mut moved, alone), from.step(&mut back, mesh));
    assert!(weights(&back) == weights(&policy), "{optim:?}");
    let difference = max_difference(&weights(&moved), &weights(&policy));
    assert!(difference < tolerance(optim), "{optim:?}: off by {difference}");
    let plain = Run { optim: Optim::AdamW, ..to };
    if optim != Optim::AdamW8bit {
        let refused = plain.policy(alone).import_state(2, &mut |unit, name, range| read(&saved, unit, name, range));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("optim = adamw: expected the optimizer of the checkpoint"), "{refused}");
    }
}

/// Tolerance for an 8-bit code, or an element of a bfloat16 matrix, that is rounded differently.
fn tolerance(optim: Optim) -> f64 {
    match optim {
        Optim::AdamW | Optim::AdamW8bit => 0.05 * LR,
        Optim::Muon(_) => 0.05 * LR * 2.0,
    }
}

fn follows(mesh: &Mesh, run: Run) {
    let (mut policy, mut plain) = (run.policy(mesh), run.autograd());
    let mut reference = Reference::new(&plain);
    let sequences = run.sequences();
    for step in 0..3 {
        let outcome = run.step(&mut policy, mesh);
        let losses = sequences.iter().map(|sequence| {
            let (logprobs, entropy) = plain.scores(sequence, TEMPERATURE);
            let terms = logprobs * -f64::from(sequence.advantage) + entropy * ENTROPY_COEF;
            terms.sum(Kind::Double) / run.denominator()
        });
        let loss = losses.reduce(|a, b| a + b).unwrap();
        let norm = reference.step(&mut plain, loss, run.optim);
        assert!((outcome.grad_norm / norm - 1.0).abs() < 1e-4, "{run:?}: norm {} against {norm}", outcome.grad_norm);
        let expected = unpadded(&plain.table, |unit| plain.units[plain.table.index(unit)].detach());
        let difference = max_difference(&weights(&policy), &expected);
        assert!(difference < tolerance(run.optim), "{run:?}: off by {difference} after step {step}");
    }
}

/// The moments of every unit, with their optimizer options.
struct Reference {
    moments: Vec<[Tensor; 2]>,
    maps: Maps,
    num_updates: i32,
}

impl Reference {
    fn new(plain: &Model) -> Self {
        let zeros = |unit: &Tensor| [unit.detach().zeros_like(), unit.detach().zeros_like()];
        Self { moments: plain.units.iter().map(zeros).collect(), maps: Maps::new(Device::Cpu).unwrap(), num_updates: 0 }
    }

    /// Makes one step of every parameter with the gradient of `loss`. Returns the gradient's norm.
    fn step(&mut self, plain: &mut Model, loss: Tensor, optim: Optim) -> f64 {
        let gradients = Tensor::run_backward(&[loss], &plain.units, false, false);
        let norm = gradients.iter().map(|g| g.square().sum(Kind::Double).double_value(&[])).sum::<f64>().sqrt();
        let clip = (MAX_GRAD_NORM / (norm + 1e-6)).min(1.0);
        self.num_updates += 1;
        for (index, layout) in plain.table.units.iter().enumerate() {
            let unit = plain.units[index].detach().copy();
            for param in &layout.params {
                let cut = |flat: &Tensor| flat.narrow(0, param.offset as i64, param.numel() as i64);
                let [m, v] = self.moments[index].each_ref().map(cut);
                let g = cut(&gradients[index]) * clip;
                let is_block =
                    matches!(layout.unit, Unit::Block(_)) && param.decay && param.name != ParamName::DeltaConv;
                match optim {
                    Optim::Muon(options) if is_block => {
                        step_muon(&plain.table.spec, param, [&cut(&unit), &m, &g], options);
                    }
                    _ => self.step_adamw(param, [&cut(&unit), &m, &v, &g]),
                }
                let is_small = !param.decay || param.numel() < 4096 || param.name == ParamName::Embedding;
                if optim == Optim::AdamW8bit && !is_small {
                    rounded(&m, &self.maps.m.levels);
                    rounded(&v, &self.maps.v.levels);
                }
            }
            plain.units[index] = unit.set_requires_grad(true);
        }
        norm
    }

    fn step_adamw(&self, param: &Param, [p, m, v, g]: [&Tensor; 4]) {
        let (mut p, mut m, mut v) = (p.shallow_clone(), m.shallow_clone(), v.shallow_clone());
        m.copy_(&(&m * ADAM.beta1 + g * (1.0 - ADAM.beta1)));
        v.copy_(&(&v * ADAM.beta2 + g.square() * (1.0 - ADAM.beta2)));
        let m_hat = &m / (1.0 - ADAM.beta1.powi(self.num_updates));
        let v_hat = &v / (1.0 - ADAM.beta2.powi(self.num_updates));
        let decay = if param.decay { LR * ADAM.weight_decay } else { 0.0 };
        p.copy_(&(&p * (1.0 - decay) - m_hat / (v_hat.sqrt() + ADAM.eps) * LR));
    }
}

/// Rounds every block of a parameter's moments to the nearest levels times the block's maximum, by exhaustive search.
fn rounded(moments: &Tensor, levels: &Tensor) {
    let (n, levels) = (moments.size()[0], levels.to_kind(Kind::Double));
    for start in (0..n).step_by(BLOCK) {
        let mut block = moments.narrow(0, start, (n - start).min(BLOCK as i64));
        let absmax = block.abs().max();
        let nearest = (&block / &absmax).unsqueeze(1).subtract(&levels.unsqueeze(0)).abs().argmin(1, false);
        block.copy_(&(levels.index_select(0, &nearest) * absmax.to_kind(Kind::Float).to_kind(Kind::Double)));
    }
}

/// Makes Muon steps for query, key and value, and for gate and up, each separately, in the layout documented in `model/params.rs`.
fn step_muon(
    spec: &colo_grpo::internal::model::ModelSpec,
    param: &Param,
    [p, m, g]: [&Tensor; 3],
    options: MuonOptions,
) {
    let (kv_heads, group, head_dim) = {
        let own = spec.attention();
        (own.num_kv_heads as i64, own.heads_per_group() as i64, own.head_dim as i64)
    };
    let columns = param.shape[1];
    let (shape, parts) = match param.name {
        ParamName::Qkv => {
            let queries = if spec.attention().output_gate { 2 * group } else { group };
            ([kv_heads, queries + 2, head_dim * columns], vec![(0, queries), (queries, 1), (queries + 1, 1)])
        }
        ParamName::GateUp => ([param.shape[0] / 2, 2, columns], vec![(0, 1), (1, 1)]),
        _ => ([1, 1, param.numel() as i64], vec![(0, 1)]),
    };
    for (first, count) in parts {
        let [mut p, mut m, g] = [p, m, g].map(|t| t.view(shape).narrow(1, first, count));
        m.copy_(&(&m * options.momentum + &g * (1.0 - options.momentum)));
        let direction = if options.nesterov { &g * (1.0 - options.momentum) + &m * options.momentum } else { m.copy() };
        let matrix = direction.reshape([1, -1, columns]);
        let update = muon::orthogonalized(&matrix, options.ns_steps).unwrap();
        let (rows, columns) = (matrix.size()[1] as f64, columns as f64);
        let ratio = match options.adjust_lr {
            AdjustLr::Original => (rows / columns).max(1.0).sqrt(),
            AdjustLr::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
        };
        let change = update.to_kind(Kind::Double).reshape(p.size()) * (LR * ratio);
        p.copy_(&(&p * (1.0 - LR * ADAM.weight_decay) - change));
    }
}
