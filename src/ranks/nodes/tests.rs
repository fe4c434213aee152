//! Compares worlds of two and three nodes with worlds of one node.

mod meeting;

use std::time::Duration;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, ExitCode, Result};
use crate::ranks::{Collective, ReduceOp, World, all_gather_bytes, testing};

const PATIENCE: Duration = Duration::from_secs(20);

/// Values of one rank whose sums are inexact, so that the order of addition shows.
fn values(rank: usize, len: i64, kind: Kind) -> Tensor {
    let index = Tensor::arange(len, (Kind::Double, Device::Cpu));
    ((index * 0.37 + rank as f64 * 1.7).sin() * 1000.0).to_kind(kind)
}

/// Results of every collective operation on a group, for tensors of several dtypes and lengths.
fn results(group: &dyn Collective, rank: usize) -> Vec<Tensor> {
    let (size, place) = (group.size() as i64, group.rank() as i64);
    let mut results = Vec::new();
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Int64] {
        for len in [0, 1, 513] {
            let own = values(rank, size * len, kind);
            for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
                let mut reduced = own.copy();
                group.all_reduce(&mut reduced, op).unwrap();
                results.push(reduced);
            }
            let mut whole = own.copy();
            let mut part = whole.narrow(0, place * len, len);
            group.reduce_scatter(&own, &mut part).unwrap(); // into a slice of the next gather's output
            group.all_gather(&part, &mut whole).unwrap();
            let mut exchanged = own.zeros_like();
            group.all_to_all(&own, &mut exchanged).unwrap();
            results.extend([part, whole, exchanged]);
            for root in 0..group.size() {
                let mut shared = own.copy();
                group.broadcast(&mut shared, root).unwrap();
                results.push(shared);
            }
        }
    }
    let bytes = all_gather_bytes(group, &vec![rank as u8; rank * 3]).unwrap();
    group.barrier().unwrap();
    results.push(Tensor::from_slice(&bytes.concat()));
    results
}

/// The results of the group of all ranks, and of groups within and across nodes of two ranks.
fn results_of_groups(world: &World) -> Vec<Tensor> {
    let rank = world.rank();
    let pair = rank / 2 * 2;
    let within = world.subgroup("within", &[pair, pair + 1]).unwrap();
    let across = world.subgroup("across", &(rank % 2..world.size()).step_by(2).collect::<Vec<_>>()).unwrap();
    let uneven = match rank {
        3 => vec![3],
        _ => (0..world.size()).filter(|&rank| rank != 3).collect(),
    };
    let uneven = world.subgroup("uneven", &uneven).unwrap();
    let host = world.host_group("host", &(0..world.size()).collect::<Vec<_>>()).unwrap();
    assert_eq!(host.all_gather_json("numbers", rank).unwrap(), (0..world.size()).collect::<Vec<_>>());
    let mut bytes = [rank as u8; 3];
    world.broadcast_bytes(&mut bytes, 2).unwrap();
    assert_eq!(bytes, [2; 3]);
    [world.group(), within, across, uneven].iter().flat_map(|group| results(&**group, rank)).collect()
}

#[test]
fn collectives_over_nodes_equal_one_node_bit_for_bit() {
    for num_nodes in [2, 3] {
        let one = testing::worlds(2 * num_nodes, |world| results_of_groups(&world));
        let several = testing::worlds_on_nodes(num_nodes, 2, PATIENCE, |world| {
            assert_eq!((world.num_nodes(), world.local_size(), world.attempt()), (num_nodes, 2, 2));
            results_of_groups(&world)
        });
        for (rank, (expected, found)) in one.iter().zip(&several).enumerate() {
            assert_eq!(expected.len(), found.len());
            for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
                assert_eq!(expected, found, "{num_nodes} nodes, rank {rank}, result {index}");
            }
        }
    }
}

#[test]
fn the_first_failure_reaches_all_nodes_and_agreement_clears_it() {
    testing::worlds_on_nodes(2, 2, PATIENCE, |world| {
        let pair = world.subgroup("pair", &[world.rank() % 2, world.rank() % 2 + 2]);
        let pair = world.agree(pair).unwrap(); // all ranks have the group before one fails
        let sum = |group: &dyn Collective| -> Result<f64> {
            let mut tensor = Tensor::from_slice(&[group.ranks()[group.rank()] as f64]);
            group.all_reduce(&mut tensor, ReduceOp::Sum)?;
            Ok(tensor.double_value(&[0]))
        };
        for round in 0..12 {
            let failing = round % 4;
            let result = match world.rank() {
                rank if rank == failing => Err(Error::NonFinite { message: format!("round {round}") }),
                rank if rank % 2 == failing % 2 => sum(pair.as_ref()),
                _ => sum(world.group().as_ref()),
            };
            match world.agree(result).unwrap_err() {
                Error::NonFinite { .. } => assert_eq!(world.rank(), failing),
                Error::PeerFailed { rank, message, code } => {
                    let expected = format!("on node {0} (host{0}): round {round}", failing / 2);
                    assert_eq!((rank, message, code), (failing, expected, ExitCode::Numerics));
                }
                other => panic!("{other}"),
            }
            assert_eq!(world.agree(sum(world.group().as_ref())).unwrap(), 6.0);
            assert_eq!(world.agree(sum(pair.as_ref())).unwrap(), (world.rank() % 2 * 2 + 2) as f64);
        }
    });
}

#[test]
fn missing_ranks_are_named_with_their_node() {
    let all_waited = std::sync::Barrier::new(4);
    let errors = testing::worlds_on_nodes(2, 2, Duration::from_secs(2), |world| {
        let pair = world.subgroup("pair", &[world.rank() % 2, world.rank() % 2 + 2]).unwrap();
        let mut tensor = Tensor::from_slice(&[1.0]);
        let error = match world.rank() {
            0 => world.group().barrier().unwrap_err().to_string(),
            1 => pair.all_reduce(&mut tensor, ReduceOp::Sum).unwrap_err().to_string(),
            _ => String::new(),
        };
        all_waited.wait();
        error
    });
    assert!(errors[0].ends_with("missing ranks [1, 2, 3] of node 0 (host0), node 1 (host1)"), "{}", errors[0]);
    assert!(errors[1].ends_with("missing ranks [3] of node 1 (host1)"), "{}", errors[1]);
}

/// A killed process sends no goodbye; waits and agreements of others must still end before their time limits.
#[test]
fn a_closed_connection_ends_all_waiting_ranks_at_once() {
    let (gone, seen) = std::sync::mpsc::channel();
    let seen = std::sync::Mutex::new(seen);
    let errors = testing::worlds_on_nodes(2, 2, Duration::from_secs(600), |world| {
        if world.rank() == 3 {
            world.break_off();
            // Stay alive until the others have noticed, so that this rank's own memory cannot be what ends their waits.
            (0..3).for_each(|_| seen.lock().unwrap().recv().unwrap());
            return Vec::new();
        }
        let waited = match world.rank() {
            2 => world.subgroup("pair", &[2, 3]).map(drop), // in shared memory
            _ => world.group().barrier(),
        };
        let errors = vec![waited.unwrap_err(), world.agree(Ok(())).unwrap_err()];
        gone.send(()).unwrap();
        errors
    });
    for error in errors.iter().flatten() {
        assert_eq!(error.exit_code(), ExitCode::RankDied);
        let message = error.to_string();
        assert!(message.contains("rank 3 failed: on node 1 (host1): its connection closed"), "{message}");
    }
    assert_eq!(errors.iter().flatten().count(), 6);
}
