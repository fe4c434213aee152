//! Tests of collectives between real processes.

use std::net::UdpSocket;
use std::time::Duration;

use colo_grpo::Error;
use colo_grpo::internal::ranks::{Collective, ReduceOp, Trade, World, all_gather_bytes, all_reduce_f64};
use tch::{Device, Kind, Tensor};

use crate::ranks;

/// Elements per rank: the whole is longer than half a slot of the default size, so that operations are split.
const LEN: i64 = 70_001;

/// One rank's values, whose sums depend on the order of addition.
fn values(rank: usize, len: i64, kind: Kind) -> Tensor {
    let index = Tensor::arange(len, (Kind::Double, Device::Cpu));
    ((index * 0.61 + rank as f64 * 2.3).sin() * 4096.0).to_kind(kind)
}

/// The result that one process computes from all ranks' values, in rank order.
fn reference(num_ranks: usize, len: i64, kind: Kind, op: ReduceOp) -> Tensor {
    let wide = if kind == Kind::BFloat16 { Kind::Float } else { kind };
    let own = |rank| values(rank, len, kind).to_kind(wide);
    let combined = (1..num_ranks).fold(own(0), |so_far, rank| match op {
        ReduceOp::Sum => so_far + own(rank),
        ReduceOp::Max => so_far.maximum(&own(rank)),
        ReduceOp::Min => so_far.minimum(&own(rank)),
    });
    combined.to_kind(kind)
}

fn every_operation(world: &World) {
    let group = world.group();
    let (rank, size) = (group.rank(), group.size());
    let device = group.device();
    let values = |rank, len, kind| values(rank, len, kind).to_device(device);
    let reference = |len, kind, op| reference(size, len, kind, op).to_device(device);
    let own_slice = |whole: &Tensor| whole.narrow(0, rank as i64 * LEN, LEN);
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Int64] {
        let whole_len = size as i64 * LEN;
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
            let mut tensor = values(rank, whole_len, kind);
            group.all_reduce(&mut tensor, op).unwrap();
            assert_eq!(tensor, reference(whole_len, kind, op), "{op:?} {kind:?}");
        }
        let total = reference(whole_len, kind, ReduceOp::Sum);
        let mut scattered = Tensor::zeros([LEN], (kind, device));
        group.reduce_scatter(&values(rank, whole_len, kind), &mut scattered).unwrap();
        assert_eq!(scattered, own_slice(&total), "reduce_scatter {kind:?}");

        let mut gathered = Tensor::zeros([whole_len], (kind, device));
        group.all_gather(&scattered, &mut gathered).unwrap();
        assert_eq!(gathered, total, "all_gather {kind:?}");

        let mut exchanged = Tensor::zeros([whole_len], (kind, device));
        group.all_to_all(&values(rank, whole_len, kind), &mut exchanged).unwrap();
        let parts: Vec<_> = (0..size).map(|peer| own_slice(&values(peer, whole_len, kind))).collect();
        assert_eq!(exchanged, Tensor::cat(&parts, 0), "all_to_all {kind:?}");

        // Two tensors with every other rank. The second has another length in each direction, and may be empty.
        let first = |from: usize, to: usize| values(from * size + to, LEN, kind);
        let second = |from: usize, to: usize| values(to * size + from, 3 * from as i64, kind);
        let zeros = |len: i64| Tensor::zeros([len], (kind, device));
        let others = || (0..size).filter(|&peer| peer != rank);
        let trades = others().flat_map(|peer| {
            let trade = |sent, received| Trade { rank: peer, sent, received };
            [trade(first(rank, peer), zeros(LEN)), trade(second(rank, peer), zeros(3 * peer as i64))]
        });
        let trades: Vec<Trade> = trades.collect();
        group.trade(&trades).unwrap();
        for (peer, trades) in others().zip(trades.chunks(2)) {
            assert_eq!(trades[0].received, first(peer, rank), "trade {kind:?}");
            assert_eq!(trades[1].received, second(peer, rank), "trade {kind:?}");
        }

        for root in 0..size {
            let mut tensor = values(rank, LEN, kind);
            group.broadcast(&mut tensor, root).unwrap();
            assert_eq!(tensor, values(root, LEN, kind), "broadcast {kind:?}");
        }
    }
    let ragged = all_gather_bytes(group.as_ref(), "x".repeat(rank * 1000).as_bytes()).unwrap();
    assert_eq!(ragged.iter().map(Vec::len).collect::<Vec<_>>(), (0..size).map(|rank| rank * 1000).collect::<Vec<_>>());
    let mut numbers = [rank as f64, 0.5];
    all_reduce_f64(group.as_ref(), &mut numbers, ReduceOp::Sum).unwrap();
    assert_eq!(numbers, [(size * (size - 1) / 2) as f64, size as f64 * 0.5]);
    group.barrier().unwrap();
}

#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_agree_with_the_sequential_reference() {
    ranks::run_on_gpus(2, "collectives::gpu_two_ranks_agree_with_the_sequential_reference", |world| {
        every_operation(&world)
    });
}

#[test]
fn two_ranks_agree_with_the_sequential_reference() {
    ranks::run(2, "collectives::two_ranks_agree_with_the_sequential_reference", |world| every_operation(&world));
}

#[test]
fn four_ranks_agree_with_the_sequential_reference() {
    ranks::run(4, "collectives::four_ranks_agree_with_the_sequential_reference", |world| every_operation(&world));
}

#[test]
fn groups_of_a_mesh_do_not_disturb_one_another() {
    ranks::run(4, "collectives::groups_of_a_mesh_do_not_disturb_one_another", |world| {
        let mesh = world.mesh(2, 2).unwrap();
        let sum = |group: &dyn Collective| {
            let mut numbers = [world.rank() as f64];
            all_reduce_f64(group, &mut numbers, ReduceOp::Sum).unwrap();
            numbers[0]
        };
        for _ in 0..500 {
            let pair = world.rank() / 2 * 2;
            assert_eq!(sum(mesh.tp.as_ref()), (2 * pair + 1) as f64);
            assert_eq!(sum(mesh.dp.as_ref()), (2 * (world.rank() % 2) + 2) as f64);
            assert_eq!(sum(mesh.replicate.as_ref()), (2 * (world.rank() % 2) + 2) as f64);
            assert_eq!(sum(mesh.world.as_ref()), 6.0);
        }
    });
}

#[test]
fn different_calls_are_an_error_on_every_rank() {
    ranks::run(2, "collectives::different_calls_are_an_error_on_every_rank", |world| {
        let group = world.group();
        let mut tensor = Tensor::zeros([4 + world.rank() as i64], (Kind::Float, Device::Cpu));
        let error = group.all_reduce(&mut tensor, ReduceOp::Sum).unwrap_err().to_string();
        assert!(error.contains("16 bytes of Float") && error.contains("20 bytes of Float"), "{error}");
    });
}

#[test]
fn a_timeout_names_the_missing_ranks() {
    let timeout = Duration::from_secs(4);
    ranks::run_with(4, "collectives::a_timeout_names_the_missing_ranks", timeout, |world| {
        let ear = UdpSocket::bind("127.0.0.1:0").unwrap();
        let ears = all_gather_bytes(&*world.group(), ear.local_addr().unwrap().to_string().as_bytes()).unwrap();
        let pair = world.subgroup("pair", &[world.rank() / 2 * 2, world.rank() / 2 * 2 + 1]).unwrap();
        match world.rank() {
            2 => {
                let error = pair.barrier().unwrap_err();
                assert!(matches!(&error, Error::CollectiveTimeout { op: "barrier", missing, .. } if missing == &[3]));
                assert!(error.to_string().contains("in group 'pair' timed out on rank 2"), "{error}");
                ear.send_to(b"!", std::str::from_utf8(&ears[3]).unwrap()).unwrap();
            }
            3 => assert_eq!(ear.recv(&mut [0]).unwrap(), 1), // until rank 2 has given up
            _ => pair.barrier().unwrap(),
        }
    });
}

#[test]
fn a_posted_failure_wakes_peers_and_agreement_restores_the_groups() {
    ranks::run(4, "collectives::a_posted_failure_wakes_peers_and_agreement_restores_the_groups", |world| {
        let group = world.group();
        let ear = UdpSocket::bind("127.0.0.1:0").unwrap();
        let ears = all_gather_bytes(&*group, ear.local_addr().unwrap().to_string().as_bytes()).unwrap();
        let result = if world.rank() == 3 {
            (0..3).for_each(|_| assert_eq!(ear.recv(&mut [0]).unwrap(), 1)); // the peers are about to block
            let error = Error::OutOfMemory { owner: "kv cache".into(), requested_bytes: 7 };
            world.post_failure(&error);
            (0..3).for_each(|_| assert_eq!(ear.recv(&mut [0]).unwrap(), 1)); // before this rank agrees
            Err(error)
        } else {
            let tell = || ear.send_to(b"!", std::str::from_utf8(&ears[3]).unwrap()).unwrap();
            tell();
            let result = group.barrier();
            tell();
            result
        };
        match world.agree(result).unwrap_err() {
            Error::OutOfMemory { .. } => assert_eq!(world.rank(), 3),
            error => assert_eq!(error.to_string(), "rank 3 failed: out of memory: kv cache needs 7 bytes"),
        }
        every_operation(&world);
    });
}

/// CPU time that this process has used, in milliseconds.
fn processor_ms() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields = stat.rsplit(") ").next().unwrap().split(' ').skip(11).take(2);
    fields.map(|ticks| ticks.parse::<f64>().unwrap() * 10.0).sum()
}

#[test]
fn small_collectives_stay_fast_with_more_ranks_than_cpus() {
    ranks::run(4, "collectives::small_collectives_stay_fast_with_more_ranks_than_cpus", |world| {
        let group = world.group();
        let mut tensor = values(world.rank(), 64, Kind::Float);
        group.barrier().unwrap();
        let before = processor_ms();
        for _ in 0..2000 {
            group.all_reduce(&mut tensor, ReduceOp::Max).unwrap();
        }
        // Processor time, which other programs do not add to: ranks that spun while their peers had no processor took whole
        // time slices, several milliseconds an operation.
        let each = (processor_ms() - before) / 2000.0;
        println!("all_reduce of 256 bytes over 4 ranks: {each} ms of a processor each");
        assert!(each < 1.0, "{each} ms each");
    });
}
