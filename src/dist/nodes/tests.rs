//! Worlds of two and three nodes, held to worlds of one.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use tch::{Device, Kind, Tensor};

use super::auth::Token;
use super::client::{Client, FIRST_EPOCH};
use super::connection::Connection;
use super::hub::{Hub, ProofStream};
use super::layout::{Greeting, Refusal};
use super::switch::Switch;
use super::testing::{TOKEN, TestHub, greeting};
use crate::dist::control::{Deadline, RankGroup, Stopped};
use crate::dist::shm::{Member, Segment};
use crate::dist::{Collective, ReduceOp, World, all_gather_bytes, testing};
use crate::error::{Error, ExitCode, Result};

const PATIENCE: Duration = Duration::from_secs(20);

/// Values of one rank that do not add exactly, so that the order of sums shows.
fn values(rank: usize, len: i64, kind: Kind) -> Tensor {
    let index = Tensor::arange(len, (Kind::Double, Device::Cpu));
    ((index * 0.37 + rank as f64 * 1.7).sin() * 1000.0).to_kind(kind)
}

/// Results of every collective operation on a group, for tensors of several kinds and lengths.
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
            group.reduce_scatter(&own, &mut part).unwrap(); // into a slice of what is gathered next
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

/// The results of all ranks and of groups within and across nodes of two ranks.
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
fn every_operation_has_the_bits_of_one_node() {
    for num_nodes in [2, 3] {
        let one = testing::worlds(2 * num_nodes, |world| results_of_groups(&world));
        let several = testing::worlds_on_nodes((num_nodes, 2), PATIENCE, |world| {
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
fn the_first_failure_reaches_the_ranks_of_all_nodes_and_they_go_on_after_agreeing() {
    testing::worlds_on_nodes((2, 2), PATIENCE, |world| {
        let pair = world.subgroup("pair", &[world.rank() % 2, world.rank() % 2 + 2]).unwrap();
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
fn ranks_that_stay_away_are_named_with_their_node() {
    let all_waited = std::sync::Barrier::new(4);
    let errors = testing::worlds_on_nodes((2, 2), Duration::from_secs(2), |world| {
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

/// A process that is killed says nothing, and neither waiting nor agreeing lasts until a time limit.
#[test]
fn a_rank_whose_connection_closes_ends_all_waiting_at_once() {
    let (gone, seen) = std::sync::mpsc::channel();
    let seen = std::sync::Mutex::new(seen);
    let errors = testing::worlds_on_nodes((2, 2), Duration::from_secs(600), |world| {
        if world.rank() == 3 {
            world.break_off();
            // It lives until the others have heard: its own memory must not be what ends their waits.
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

/// The hub of two nodes of one rank each, and the ranks' ends, all of whom have met.
fn two_that_met() -> (Option<Hub>, Client, Client) {
    let hub = TestHub::new();
    let (first, second) = (greeting((0, 2, 1)), greeting((1, 2, 1)));
    let served = hub.start(&first);
    let (own, other) = (hub.join(&first, PATIENCE), hub.join(&second, PATIENCE));
    for client in [&own, &other] {
        client.await_welcome(Deadline::after(PATIENCE)).unwrap();
    }
    (served, own, other)
}

/// The memory of rank 0, which is alone on its node.
fn own_memory() -> Arc<Member> {
    Arc::new(Member::new(Arc::new(Segment::in_process(1, 64 << 10).unwrap()), 0, 0, PATIENCE))
}

/// A rank may die while another one still joins.
#[test]
fn a_rank_that_is_lost_before_another_attaches_its_memory_is_heard_of() {
    let (served, own, other) = two_that_met();
    other.break_off();
    while own.lost().is_none() {
        std::thread::yield_now();
    }
    let member = own_memory();
    own.attach(member.clone());
    assert_eq!(member.failure().unwrap().rank, 1);
    drop((own, other, served));
}

/// A node may be through the meeting, and fail, while another one still joins.
#[test]
fn a_failure_that_comes_before_this_rank_attaches_its_memory_is_not_forgotten() {
    let (served, own, other) = two_that_met();
    other.post_failure(FIRST_EPOCH, &Error::NonFinite { message: "early".to_owned() });
    let gather = |client: &Client, rank| {
        client.gather(&RankGroup::new(0, "world", &[0, 1], rank), &[], Deadline::after(PATIENCE), || None).unwrap();
    };
    std::thread::scope(|scope| {
        scope.spawn(|| gather(&other, 1));
        gather(&own, 0); // whose end comes behind the failure
    });
    let member = own_memory();
    assert!(member.failure().is_none());
    own.attach(member.clone());
    let failure = member.failure().unwrap();
    assert_eq!((failure.rank, failure.code, failure.message.contains("early")), (1, ExitCode::Numerics, true));
    drop((own, other, served));
}

/// A host that is cut off sends nothing and closes nothing.
#[test]
fn a_node_that_falls_silent_is_named() {
    let mut hub = TestHub::new();
    hub.longest_silence = Duration::from_secs(3);
    let (first, second) = (greeting((0, 2, 1)), greeting((1, 2, 1)));
    let served = hub.start(&first);
    let mut silent = TcpStream::connect(("127.0.0.1", hub.port)).unwrap();
    let own = std::thread::scope(|scope| {
        let own = scope.spawn(|| hub.join(&first, PATIENCE));
        Token::new(TOKEN).unwrap().greet(&mut silent, &serde_json::to_vec(&second).unwrap()).unwrap();
        own.join().unwrap()
    });
    own.await_welcome(Deadline::after(PATIENCE)).unwrap();
    while own.lost().is_none() {
        std::thread::yield_now();
    }
    let lost = own.lost().unwrap();
    assert_eq!((lost.rank, lost.code), (1, ExitCode::RankDied));
    assert!(lost.message.starts_with("on node 1 (host1): nothing heard of it for 3 s"), "{}", lost.message);
    drop((own, served, silent));
}

/// A rank whose greeting took too long may come again while its first connection is admitted after all.
#[test]
fn a_rank_that_comes_once_all_are_there_is_not_admitted() {
    let (first, second) = (greeting((0, 2, 1)), greeting((1, 2, 1)));
    let mut switch = Switch::new(first.clone());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut join = |greeting: &Greeting| {
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let place = switch.join(greeting, Connection::new(&listener.accept().unwrap().0).unwrap());
        (place, switch.is_complete(), client)
    };
    let joined = [join(&second), join(&second), join(&first), join(&second)];
    let outcomes = joined.iter().map(|(place, is_complete, _)| (*place, *is_complete)).collect::<Vec<_>>();
    assert_eq!(outcomes, [(Some(1), false), (Some(2), false), (Some(3), true), (None, true)]);
}

/// Rank 1 counts itself twice: neither gets more or fewer parts than it asked for.
#[test]
fn ranks_that_gather_from_different_ranks_are_ended() {
    let (served, own, other) = two_that_met();
    let gather = |client: &Client, ranks: &[usize], rank| {
        client.gather(&RankGroup::new(0, "world", ranks, rank), &[], Deadline::after(PATIENCE), || None)
    };
    let ended = std::thread::scope(|scope| {
        let ended = scope.spawn(|| gather(&other, &[0, 1, 1], 1));
        [gather(&own, &[0, 1], 0), ended.join().unwrap()]
    });
    for ended in ended {
        let Err(Stopped::Failed(failure)) = ended else { panic!("{ended:?}") };
        assert!(failure.message.contains("it gathers from other ranks than its peers do"), "{}", failure.message);
    }
    drop((own, other, served));
}

/// However often somebody unknown sends a byte, all of the proof has one limit.
#[test]
fn a_proof_has_a_limit_as_a_whole() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let stream = listener.accept().unwrap().0;
    stranger.write_all(&[7; 9]).unwrap();
    let mut byte = [0];
    ProofStream::new(&stream, PATIENCE).read_exact(&mut byte).unwrap();
    assert_eq!(byte, [7]);
    let late = ProofStream::new(&stream, Duration::ZERO).read(&mut byte).unwrap_err();
    assert_eq!(late.kind(), std::io::ErrorKind::TimedOut, "though bytes are there");
}

/// Fault 41, between nodes: who has no token learns nothing but random numbers, and all goes on as if nobody had come.
#[test]
fn a_stranger_at_the_hub_learns_and_changes_nothing() {
    let hub = TestHub::new();
    let (first, second) = (greeting((0, 2, 1)), greeting((1, 2, 1)));
    let served = hub.start(&first);
    let connect = || TcpStream::connect(("127.0.0.1", hub.port)).unwrap();
    let mut heard = Vec::new();
    for garbage in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[0xff; 200], &[0; 68]] {
        let mut stranger = connect();
        stranger.write_all(garbage).unwrap();
        let _ = stranger.shutdown(std::net::Shutdown::Write);
        let mut all = Vec::new();
        let _ = stranger.read_to_end(&mut all);
        assert!(all.len() == 48 || (all.len() == 48 + 33 && all[48..].iter().all(|&byte| byte == 0)), "{all:?}");
        heard.push(all[16..48].to_vec());
    }
    heard.sort();
    heard.dedup();
    assert_eq!(heard.len(), 4, "a challenge is never used twice");
    let wrong = Token::new("another token of a test").unwrap();
    let greeted = wrong.greet(&mut connect(), &serde_json::to_vec(&second).unwrap());
    assert!(greeted.is_err(), "rank 1's place is not given to somebody without the token");

    let (own, other) = (hub.join(&first, PATIENCE), hub.join(&second, PATIENCE));
    let layouts = [&own, &other].map(|client| client.await_welcome(Deadline::after(PATIENCE)).unwrap());
    assert_eq!(layouts[0].hosts, ["host0", "host1"]);
    drop((own, other, served));
}

#[test]
fn nodes_that_do_not_fit_are_refused_on_all_of_them() {
    let hub = TestHub::new();
    let first = greeting((0, 4, 2));
    let served = hub.start(&first);
    let own = hub.join(&first, PATIENCE);
    let other = hub.join(&greeting((3, 6, 3)), PATIENCE);
    for client in [&own, &other] {
        let error = client.await_welcome(Deadline::after(PATIENCE)).unwrap_err();
        assert_eq!(error.exit_code(), ExitCode::Environment);
        let message = error.to_string();
        assert!(message.contains("node 0 (host0) has 2 of 4 ranks, node 1 (host1) (its rank 3) 3 of 6"), "{message}");
    }
    assert_eq!(Error::from(Refusal::Nodes("x".to_owned())).to_string(), "x");
    drop((own, other, served));
}
