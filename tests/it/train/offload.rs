//! Offloading of blocks' kept tensors to the host between forward and backward: bits equal those of training without it.

use colo_grpo::Error;
use colo_grpo::internal::config::GradientCheckpointing;
use colo_grpo::internal::memory::HostPool;
use colo_grpo::internal::ranks::{Mesh, World};
use colo_grpo::internal::train::{MicroBatch, Policy, Scores, TokenGradients, TrainedModel};
use tch::{Device, Kind};

use super::run::{LR, MAX_GRAD_NORM, Run, TEMPERATURE, weights};
use crate::ranks;

/// Host memory in bytes for the tensors of one micro-batch, as planned.
fn planned(run: &Run, mesh: &Mesh, tokens: usize) -> usize {
    let table = run.table(mesh.shard.size());
    let model = TrainedModel {
        residual: run.residual,
        sharers: mesh.sequence.size(),
        offloads: true,
        ..TrainedModel::whole(&table, run.stage, run.kind, run.gradients)
    };
    model.offloaded_bytes(run.recompute, tokens)
}

fn longest(micro_batches: &[MicroBatch]) -> usize {
    micro_batches.iter().map(MicroBatch::num_tokens).max().unwrap()
}

/// Makes three steps, one of which follows a pass that fails. Returns the weights.
fn trained(run: &Run, mesh: &Mesh, policy: &mut Policy) -> Vec<Vec<f64>> {
    for step in 0..3 {
        if step == 1 {
            let message = || "a loss that fails".to_owned();
            let mut fails =
                |_: &Scores| -> Result<TokenGradients, Error> { Err(Error::NonFinite { message: message() }) };
            let failed = policy.forward_backward(&run.micro_batches(mesh)[0], TEMPERATURE, &mut fails);
            assert!(failed.is_err());
            policy.drop_gradients();
        }
        run.accumulate(policy, mesh);
        let _ = policy.optimizer_step(LR, MAX_GRAD_NORM).unwrap();
    }
    weights(policy)
}

#[test]
fn offloaded_activations_return_bit_for_bit() {
    let mesh = World::single().mesh(1, 1).unwrap();
    for recompute in [GradientCheckpointing::Full, GradientCheckpointing::KeepAttention] {
        for kind in [Kind::Float, Kind::BFloat16] {
            let run = Run { recompute, budget: 24, ..Run::new(0, kind) };
            for run in [
                Run { tied: true, ..run },
                Run { residual: Kind::Float, share_prompts: true, has_turns: true, ..run },
                Run { experts: true, delta_nets: true, ..run },
                Run { windows: true, draft_head: true, ..run },
            ] {
                let expected = trained(&run, &mesh, &mut run.policy(&mesh));
                let micro_batches = run.micro_batches(&mesh);
                let whole = planned(&run, &mesh, longest(&micro_batches));
                // Of a pool that is too small the plan was made for shorter micro-batches.
                for bytes in [whole, whole / 3] {
                    let pool = HostPool::new("offload_test", bytes, Device::Cpu, &mut |_, _| ()).unwrap();
                    let mut policy = run.policy(&mesh).with_activation_offload(pool);
                    assert_eq!(trained(&run, &mesh, &mut policy), expected, "{run:?}, a pool of {bytes} bytes");
                }
            }
        }
    }
}

/// Every offloaded tensor is loaded back once, and their sizes are as planned.
#[test]
fn offloaded_bytes_match_the_plan() {
    let mesh = World::single().mesh(1, 1).unwrap();
    for (recompute, of_token) in [
        (GradientCheckpointing::Full, 4 * 24),
        // Four heads of six.
        (GradientCheckpointing::KeepAttention, 4 * (24 + 24)),
    ] {
        let run = Run { recompute, budget: 1000, ..Run::new(0, Kind::Float) };
        let micro_batches = run.micro_batches(&mesh);
        let [micro_batch] = &micro_batches[..] else { panic!("one micro-batch") };
        let tokens = micro_batch.num_tokens();
        let bytes = planned(&run, &mesh, tokens);
        let pool = HostPool::new("offload_test", bytes, Device::Cpu, &mut |_, _| ()).unwrap();
        let mut policy = run.policy(&mesh).with_activation_offload(pool);
        run.accumulate(&mut policy, &mesh);
        let moved = policy.take_offloaded().unwrap();
        assert_eq!(moved.bytes, 2 * 2 * of_token * tokens, "two of three blocks, there and back");
        assert!((moved.bytes / 2..moved.bytes / 2 + 4 * 256).contains(&bytes), "{bytes}");
        assert_eq!(policy.take_offloaded().unwrap().bytes, 0);
        // Scores keep nothing.
        policy.forward_logprobs(micro_batch, TEMPERATURE).unwrap();
        assert_eq!(policy.take_offloaded().unwrap().bytes, 0);
    }
}

/// Ranks that share micro-batches and shards, some without sequences, give the same bits with and without offloading.
#[test]
fn sequence_parallel_ranks_offload_their_parts() {
    ranks::run(2, "train::offload::sequence_parallel_ranks_offload_their_parts", |world: World| {
        let own = world.mesh(1, 2).unwrap();
        for mesh in [own.clone(), own.with_sequence_groups(&world, 2, 2).unwrap()] {
            let recompute = GradientCheckpointing::KeepAttention;
            let run = Run { recompute, budget: 24, num_sharers: 1, announced: true, ..Run::new(3, Kind::Float) };
            let expected = trained_alike(&run, &mesh, &mut run.policy(&mesh));
            let bytes = planned(&run, &mesh, longest(&run.micro_batches(&mesh)).max(1)).max(1);
            let pool = HostPool::new("offload_test", bytes, Device::Cpu, &mut |_, _| ()).unwrap();
            let mut policy = run.policy(&mesh).with_activation_offload(pool);
            assert_eq!(trained_alike(&run, &mesh, &mut policy), expected, "{} ranks share", mesh.sequence.size());
        }
    });
}

fn trained_alike(run: &Run, mesh: &Mesh, policy: &mut Policy) -> Vec<Vec<f64>> {
    for _ in 0..2 {
        let _ = run.step(policy, mesh);
    }
    weights(policy)
}
