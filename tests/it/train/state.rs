//! Optimizer state: where it is stored, how it is copied, and its memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use colo_grpo::Result;
use colo_grpo::internal::memory::{Account, HostPool, Ledger, MemoryKind};
use colo_grpo::internal::model::{ModelSpec, ParamName, ParamTable, Unit, UnitLayout};
use colo_grpo::internal::ranks::{Mesh, World, all_gather_bytes};
use colo_grpo::internal::train::{
    GradientOptions, OptimizerHome, ParamShard, ParamState, Policy, Reference, StateForm, StatePart, TrainedModel,
    reference_bytes,
};
use tch::{Kind, Tensor};

use super::run::{LR, MAX_GRAD_NORM, Run, initial, max_difference, spec, weights};
use crate::ranks;

#[test]
fn offloaded_optimizer_state_returns_bit_for_bit() {
    ranks::run(2, "train::state::offloaded_optimizer_state_returns_bit_for_bit", |world: World| {
        offloads(&world.mesh(1, 2).unwrap())
    });
}

pub fn offloads(mesh: &Mesh) {
    for stage in [0, 3] {
        let run = Run::new(stage, Kind::Float);
        let (mut policy, mut resident) = (run.policy_in(mesh, OptimizerHome::Swap(run.pool(mesh))), run.policy(mesh));
        for _ in 0..2 {
            let _ = run.step(&mut policy, mesh);
            let _ = run.step(&mut resident, mesh);
            let before = state(&policy);
            for _ in 0..2 {
                policy.drop_gradients();
                policy.offload_optimizer().unwrap();
                policy.offload_optimizer().unwrap();
                policy.finish_offload().unwrap();
                let refused = policy.optimizer_step(LR, MAX_GRAD_NORM).unwrap_err();
                assert!(refused.to_string().contains("offloaded"), "{refused}");
                assert!(state(&policy) == before, "stage {stage}: in the pool");
                policy.reload_optimizer().unwrap();
                policy.reload_optimizer().unwrap();
                assert!(state(&policy) == before, "stage {stage}: on its way back");
            }
            let _ = (run.step(&mut policy, mesh), run.step(&mut resident, mesh));
            let moved = policy.take_transitions().unwrap();
            assert_eq!(moved.bytes, 3 * policy.optimizer_bytes(), "what has not changed does not leave again");
        }
        assert!(weights(&policy) == weights(&resident) && state(&policy) == state(&resident), "stage {stage}");
        // Turned back half way.
        policy.drop_gradients();
        policy.offload_optimizer().unwrap();
        policy.reload_optimizer().unwrap();
        assert!(state(&policy) == state(&resident), "stage {stage}");
    }
}

/// A step waits until the state is copied back, and the transition reports this. If the copy ends in time, no waiting is reported.
pub fn counts_waiting(mesh: &Mesh) {
    let run = Run::new(0, Kind::Float);
    let table = Arc::new(ParamTable::new(Arc::new(ModelSpec { vocab_size: 1 << 21, ..spec(false) }), 1));
    let bytes = TrainedModel::whole(&table, run.stage, run.kind, run.gradients).bytes().optimizer;
    let pool = HostPool::new("train_test", bytes, mesh.world.device(), &mut |_, _| ()).unwrap();
    let zeros = |layout: &UnitLayout| Ok(Tensor::zeros([layout.len as i64], (Kind::Float, mesh.world.device())));
    let mut policy = Policy::with_home(table, mesh, run.options(mesh), OptimizerHome::Swap(pool), &zeros).unwrap();
    let _ = policy.optimizer_step(LR, MAX_GRAD_NORM).unwrap(); // compiles and loads what a step needs
    let _ = policy.take_transitions().unwrap();
    for comes_in_time in [false, true, false] {
        policy.offload_optimizer().unwrap();
        policy.finish_offload().unwrap();
        let out = policy.take_transitions().unwrap();
        policy.reload_optimizer().unwrap();
        if comes_in_time {
            while !policy.reload_is_queued() {
                std::thread::yield_now();
            }
            tch::Cuda::synchronize(0);
        }
        let _ = policy.optimizer_step(LR, MAX_GRAD_NORM).unwrap();
        let back = policy.take_transitions().unwrap();
        assert_eq!((out.bytes, back.bytes), (policy.optimizer_bytes(), policy.optimizer_bytes()));
        let is_exposed = back.exposed > back.copying / 2;
        assert_eq!(is_exposed, !comes_in_time, "{back:?}");
    }
}

#[test]
fn streamed_optimizer_state_steps_like_resident_state() {
    ranks::run(2, "train::state::streamed_optimizer_state_steps_like_resident_state", |world: World| {
        streams(&world.mesh(1, 2).unwrap())
    });
}

pub fn streams(mesh: &Mesh) {
    for (stage, kind) in [(0, Kind::Float), (1, Kind::BFloat16), (2, Kind::Float), (3, Kind::BFloat16)] {
        let run = Run { tied: stage == 1, ..Run::new(stage, kind) };
        let mut policy = run.policy_in(mesh, OptimizerHome::Stream(run.pool(mesh)));
        let on_device = |account: &Account| (account.kind, account.owner) == (MemoryKind::Device, "optimizer");
        assert!(!Ledger::report().iter().any(on_device), "{:?}", Ledger::report());
        let mut resident = run.policy(mesh);
        for _ in 0..3 {
            assert_eq!(run.step(&mut policy, mesh), run.step(&mut resident, mesh), "stage {stage}");
            assert!(weights(&policy) == weights(&resident) && state(&policy) == state(&resident), "stage {stage}");
            policy.offload_optimizer().unwrap(); // it is away already
            policy.finish_offload().unwrap();
            policy.reload_optimizer().unwrap();
        }
        assert_eq!(policy.take_transitions().unwrap().bytes, 0);
        let saved = saved_state(&policy, mesh);
        resident.import_state(7, &mut |unit, name, range| read(&saved, unit, name, range)).unwrap();
        policy.import_state(7, &mut |unit, name, range| read(&saved, unit, name, range)).unwrap();
        let _ = (run.step(&mut policy, mesh), run.step(&mut resident, mesh));
        assert!(weights(&policy) == weights(&resident), "stage {stage}: after a checkpoint");
    }
}

#[test]
fn optimizer_state_moves_to_another_world_size_and_zero_stage() {
    ranks::run(2, "train::state::optimizer_state_moves_to_another_world_size_and_zero_stage", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        let alone = World::single().mesh(1, 1).unwrap();
        let (from, to) = (Run::new(3, Kind::Double), Run { num_sharers: 1, ..Run::new(0, Kind::Double) });
        let (mut policy, mut moved) = (from.policy(&mesh), to.policy(&alone));
        for _ in 0..2 {
            let _ = from.step(&mut policy, &mesh);
        }
        let saved = saved_state(&policy, &mesh);
        moved.import_state(policy.num_updates(), &mut |unit, name, range| read(&saved, unit, name, range)).unwrap();
        assert!(weights(&moved) == weights(&policy));
        assert!(saved_state(&moved, &alone) == saved, "state changed on its way");
        // And back: each rank asks for what it owns.
        let mut back = from.policy(&mesh);
        back.import_state(policy.num_updates(), &mut |unit, name, range| read(&saved, unit, name, range)).unwrap();
        assert!(state(&back) == state(&policy));

        let _ = (from.step(&mut policy, &mesh), to.step(&mut moved, &alone), from.step(&mut back, &mesh));
        assert!(weights(&back) == weights(&policy));
        let difference = max_difference(&weights(&moved), &weights(&policy));
        assert!(difference < 1e-10, "{difference}");
    });
}

#[test]
fn ledger_bytes_match_the_formulas() {
    ranks::run(2, "train::state::ledger_bytes_match_the_formulas", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for (stage, tied, kind) in
            [(0, true, Kind::Float), (1, false, Kind::BFloat16), (2, true, Kind::BFloat16), (3, false, Kind::Float)]
        {
            let run = Run { tied, ..Run::new(stage, kind) };
            let mut policy = run.policy(&mesh);
            let source = |layout: &UnitLayout| Ok(initial(layout));
            let table = run.table(mesh.shard.size());
            let _reference = Reference::new(table.clone(), &mesh, run.options(&mesh).network, &source).unwrap();
            let _ = run.step(&mut policy, &mesh);
            run.accumulate(&mut policy, &mesh);
            let bytes = TrainedModel::whole(&table, stage, kind, GradientOptions::default()).bytes();
            let page_bytes = 4096;
            let expected = [
                ("gradients", bytes.gradients),
                ("optimizer", bytes.optimizer.next_multiple_of(page_bytes)),
                ("policy_weights", bytes.weights),
                ("reference_weights", reference_bytes(&table, kind)),
            ];
            assert_eq!(
                Ledger::report(),
                expected.map(|(owner, bytes)| Account { kind: MemoryKind::Device, owner, bytes }),
                "stage {stage}"
            );
            assert_eq!(policy.optimizer_bytes(), bytes.optimizer);
            policy.drop_gradients();
            assert!(Ledger::report().iter().all(|account| account.owner != "gradients"));
        }
        assert!(Ledger::report().is_empty(), "{:?}", Ledger::report());
    });
}

/// A range of a parameter with all parts of its optimizer state.
type Piece = (Unit, ParamName, Range<usize>, Parts);
/// Bits of the values by name of the part, such as a moment.
type Parts = BTreeMap<String, Vec<u64>>;

/// This rank's slice of the optimizer state.
pub fn state(policy: &Policy) -> Vec<Piece> {
    let bits = |tensor: Tensor| {
        let values: Vec<f64> = Vec::try_from(tensor.to_kind(Kind::Double)).unwrap();
        values.into_iter().map(f64::to_bits).collect()
    };
    let piece = |shard: Result<ParamShard>| {
        let ParamShard { unit, name, elements, state: ParamState { form, tensors } } = shard.unwrap();
        let parts = form.parts().iter().zip(tensors).map(|(part, tensor)| (part.name().to_owned(), bits(tensor)));
        (unit, name, elements, parts.collect())
    };
    policy.export_state().map(piece).collect()
}

/// The optimizer state saved by all ranks of a shard group, assembled. Asserts that every parameter is covered exactly once.
pub fn saved_state(policy: &Policy, mesh: &Mesh) -> BTreeMap<(Unit, ParamName), Parts> {
    let own = serde_json::to_vec(&state(policy)).unwrap();
    let mut saved: BTreeMap<_, Parts> = BTreeMap::new();
    for pieces in all_gather_bytes(&*mesh.shard, &own).unwrap() {
        let pieces: Vec<Piece> = serde_json::from_slice(&pieces).unwrap();
        for (unit, name, elements, parts) in pieces {
            let whole = saved.entry((unit, name)).or_default();
            let so_far = whole.get("master").map_or(0, Vec::len);
            assert_eq!(elements.start, so_far, "{unit} {name:?}: ranks' slices come in order");
            assert_eq!(parts["master"].len(), elements.len());
            parts.into_iter().for_each(|(part, bits)| whole.entry(part).or_default().extend(bits));
        }
    }
    let params = policy.table().units.iter().flat_map(|layout| layout.params.iter().map(move |param| (layout, param)));
    for (layout, param) in params {
        assert_eq!(
            saved[&(layout.unit, param.name)]["master"].len(),
            param.numel(),
            "{} {:?}",
            layout.unit,
            param.name
        );
    }
    saved
}

pub fn read(
    saved: &BTreeMap<(Unit, ParamName), Parts>,
    unit: Unit,
    name: ParamName,
    elements: Range<usize>,
) -> Result<ParamState> {
    let parts = &saved[&(unit, name)];
    let form = StateForm::ALL
        .into_iter()
        .find(|form| form.parts().iter().map(|part| part.name()).all(|name| parts.contains_key(name)));
    let form = form.expect("the parts of one optimizer");
    let values = |part: &StatePart| {
        let first = elements.start / part.elements_per_value();
        let bits = &parts[part.name()][first..first + part.num_values(elements.len())];
        Tensor::from_slice(&bits.iter().map(|&bits| f64::from_bits(bits)).collect::<Vec<f64>>())
    };
    Ok(ParamState { form, tensors: form.parts().iter().map(values).collect() })
}
