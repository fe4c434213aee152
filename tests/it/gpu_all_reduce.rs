//! Tensor-parallel sums through GPU memory that ranks map from each other: real processes, one GPU each. Ignored without GPUs.
#![allow(unsafe_code)]

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use colo_grpo::Error;
use colo_grpo::internal::cuda::kernels::{self, AllReduceMethod, NormOptions, NormedRows, RowSums, ScaledRows};
use colo_grpo::internal::cuda::{Capability, Context, CudaEvent, Graph, PeerMemory, TorchStream};
use colo_grpo::internal::ranks::{Collective, World};
use tch::{Device, Kind, Tensor};

use crate::ranks;

const EPS: f64 = 1e-6;
const WAYS: [AllReduceMethod; 2] = [AllReduceMethod::Read, AllReduceMethod::Share];

#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_sum_rows_in_rank_order() {
    ranks::run_on_gpus(2, "gpu_all_reduce::gpu_two_ranks_sum_rows_in_rank_order", |world| sums_in_rank_order(&world));
}

#[test]
#[ignore = "needs four GPUs"]
fn gpu_four_ranks_sum_rows_in_rank_order() {
    ranks::run_on_gpus(4, "gpu_all_reduce::gpu_four_ranks_sum_rows_in_rank_order", |world| sums_in_rank_order(&world));
}

#[test]
#[ignore = "needs eight GPUs"]
fn gpu_eight_ranks_sum_rows_in_rank_order() {
    ranks::run_on_gpus(8, "gpu_all_reduce::gpu_eight_ranks_sum_rows_in_rank_order", |world| sums_in_rank_order(&world));
}

#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_replay_all_reduce_graphs_at_different_speeds() {
    ranks::run_on_gpus(2, "gpu_all_reduce::gpu_two_ranks_replay_all_reduce_graphs_at_different_speeds", |world| {
        replays_at_any_pace(&world)
    });
}

#[test]
#[ignore = "needs four GPUs"]
fn gpu_four_ranks_replay_all_reduce_graphs_at_different_speeds() {
    ranks::run_on_gpus(4, "gpu_all_reduce::gpu_four_ranks_replay_all_reduce_graphs_at_different_speeds", |world| {
        replays_at_any_pace(&world)
    });
}

#[test]
#[ignore = "needs eight GPUs"]
fn gpu_eight_ranks_replay_all_reduce_graphs_at_different_speeds() {
    ranks::run_on_gpus(8, "gpu_all_reduce::gpu_eight_ranks_replay_all_reduce_graphs_at_different_speeds", |world| {
        replays_at_any_pace(&world)
    });
}

/// Eight ranks are threads of one process on one GPU, each with its own stream: the kernels for eight GPUs use the right parts and rows.
#[test]
#[ignore = "needs a GPU"]
fn gpu_one_process_sums_rows_as_eight_ranks() {
    const NUM_RANKS: usize = 8;
    let context = Context::retain(0).unwrap();
    // Blocks of all ranks wait for one another, so all must be on the GPU at once.
    for (rows, dim) in [(1, 1536), (3, 3584), (16, 128), (17, 2048), (12, 8192)] {
        for kind in [Kind::BFloat16, Kind::Float] {
            let mut cases: Vec<Case> = PeerMemory::of_one_gpu(&context, NUM_RANKS, RowSums::bytes(rows, dim))
                .unwrap()
                .into_iter()
                .enumerate()
                .map(|(rank, memory)| Case::over(Arc::new(memory), (rank, NUM_RANKS), (rows, dim), kind))
                .collect();
            let streams: Vec<TorchStream> = cases.iter().map(|_| TorchStream::new(&context).unwrap()).collect();
            for (way, turn) in WAYS.into_iter().flat_map(|way| [(way, 0), (way, 1)]) {
                cases.iter().for_each(|case| drop(case.sums.normed().unwrap().fill_(f64::NAN)));
                let expected = cases[0].expected();
                context.synchronize().unwrap();
                let (begun, ended) = (Barrier::new(NUM_RANKS), Barrier::new(NUM_RANKS));
                let rank = |case: Case, stream: &TorchStream| {
                    let mut x = case.x.copy();
                    let _current = stream.make_current().unwrap();
                    begun.wait();
                    case.sum(way, turn, &mut x);
                    stream.synchronize().unwrap();
                    ended.wait(); // later streams wait for one that ends being current
                    (case, x)
                };
                let rank = &rank;
                let summed: Vec<(Case, Tensor)> = std::thread::scope(|scope| {
                    let ranks = cases.drain(..).zip(&streams);
                    let ranks: Vec<_> = ranks.map(|(case, stream)| scope.spawn(move || rank(case, stream))).collect();
                    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
                });
                for (case, x) in summed {
                    case.check((way, turn), &x, &expected);
                    cases.push(case);
                }
            }
        }
    }
}

/// If a rank does not take part, the others' kernels end when it fails. After the ranks agree on the failure, all can sum again.
#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_end_an_all_reduce_when_one_fails() {
    ranks::run_on_gpus(2, "gpu_all_reduce::gpu_two_ranks_end_an_all_reduce_when_one_fails", |world| {
        for way in WAYS {
            let group = world.group();
            let case = Case::new(group.as_ref(), (8, 1536), Kind::BFloat16);
            let result = if world.rank() == 1 {
                std::thread::sleep(Duration::from_millis(300));
                Err(Error::Injected { phase: "generate" })
            } else {
                let start = Instant::now();
                case.sum(way, 0, &mut case.x.copy());
                let end = CudaEvent::record_libtorch(&case.context).unwrap();
                while group.epoch().is_ok() {
                    assert!(!end.is_done().unwrap(), "{way:?} ended without its peer");
                }
                end.synchronize().unwrap();
                assert!(start.elapsed() < Duration::from_secs(2), "{way:?} ended after {:?}", start.elapsed());
                group.epoch().map(|_| ())
            };
            assert!(world.agree(result).is_err());
            Case::new(group.as_ref(), (8, 1536), Kind::Float).compare(way, 0);
        }
    });
}

fn sums_in_rank_order(world: &World) {
    let group = world.group();
    for (rows, dim) in [(1, 1536), (3, 3584), (16, 128), (17, 2048), (64, 8192), (256, 3584), (600, 5120), (1024, 8192)]
    {
        for way in WAYS {
            for (turn, kind) in [(0, Kind::BFloat16), (1, Kind::BFloat16), (0, Kind::Float), (1, Kind::Float)] {
                Case::new(group.as_ref(), (rows, dim), kind).compare(way, turn);
            }
            Case::new(group.as_ref(), (rows, dim), Kind::BFloat16).compare_rounded(way);
        }
    }
}

/// Replays one captured graph many times on new data, with random delays of every rank.
fn replays_at_any_pace(world: &World) {
    const CALLS: usize = 6;
    const REPLAYS: usize = 1000;
    let group = world.group();
    let case = Case::new(group.as_ref(), (24, 3584), Kind::BFloat16);
    let stream = TorchStream::new(&case.context).unwrap();
    let _current = stream.make_current().unwrap();
    let shift = Tensor::zeros([1], (Kind::BFloat16, world.device()));
    for way in WAYS {
        let (mut xs, source) = (case.x.repeat([CALLS as i64, 1, 1]), case.parts[case.rank].copy());
        let record = || {
            for (call, mut x) in (0..CALLS).zip(xs.split(1, 0)) {
                let mut part = case.sums.part(call % 2).unwrap().narrow(0, 0, case.rows);
                part.copy_(&source);
                case.leave(way, call % 2, &mut x, NormedRows::Plain);
            }
            Ok(())
        };
        record().unwrap();
        let mut graph = Graph::capture(&stream, record).unwrap();
        let wrong = Tensor::zeros([1], (Kind::Int64, world.device()));
        let mut pace = 1 + world.rank() as u64;
        for replay in 0..REPLAYS {
            // Numbers whose sums are exact: the reference may add in any order.
            let _ = shift.shallow_clone().fill_((replay % 7) as f64);
            let whole = |rank: usize| (&case.parts[rank] * 8.0).round() + (rank as f64 + 1.0) * &shift;
            source.shallow_clone().copy_(&whole(case.rank));
            let _ = xs.zero_();
            pace = pace.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            match pace >> 61 {
                0 => std::thread::sleep(Duration::from_micros(pace >> 40 & 1023)),
                1 => drop(case.x.matmul(&case.x.tr())),
                _ => {}
            }
            // SAFETY: recorded just now over tensors that live until the end of this round.
            unsafe { graph.replay(&stream) }.unwrap();
            let expected = (0..case.parts.len()).fold(Tensor::zeros_like(&case.x), |sum, rank| sum + whole(rank));
            let differ = case.own_rows(way, &(&xs - expected)).not_equal(0.0).sum(Kind::Int64);
            let _ = wrong.shallow_clone().g_add_(&differ);
        }
        assert_eq!(wrong.int64_value(&[0]), 0, "{way:?}");
    }
}

/// Random summands of all ranks, the same on every rank.
struct Case {
    context: Arc<Context>,
    rank: usize,
    rows: i64,
    sums: RowSums,
    parts: Vec<Tensor>, // of every rank, [T, D]
    x: Tensor,          // [T, D]
    weight: Tensor,     // [D]
}

impl Case {
    /// A case with `x` of data type `kind`.
    fn new(group: &dyn Collective, (rows, dim): (usize, usize), kind: Kind) -> Self {
        let most = RowSums::bytes(1024, 8192);
        let memory = group.peer_memory(most).unwrap().expect("GPUs that map one another's memory");
        let Device::Cuda(ordinal) = group.device() else { panic!("a GPU") };
        // Rows of another shape may still be read by peers.
        let context = Context::retain(ordinal).unwrap();
        context.synchronize().unwrap();
        group.barrier().unwrap();
        memory.clear().unwrap();
        group.barrier().unwrap();
        Self::over(memory, (group.rank(), group.size()), (rows, dim), kind)
    }

    fn over(
        memory: Arc<PeerMemory>,
        (rank, num_ranks): (usize, usize),
        (rows, dim): (usize, usize),
        kind: Kind,
    ) -> Self {
        tch::manual_seed((rows * dim) as i64);
        let sums = RowSums::new(memory, rows, dim).unwrap();
        let device = sums.normed().unwrap().device();
        let random =
            |shape: &[i64], kind| Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind).to_device(device);
        let shape = [rows as i64, dim as i64];
        let Device::Cuda(ordinal) = device else { panic!("a GPU") };
        Self {
            context: Context::retain(ordinal).unwrap(),
            rank,
            rows: shape[0],
            sums,
            parts: (0..num_ranks).map(|_| random(&shape, Kind::BFloat16)).collect(),
            x: random(&shape, kind),
            weight: random(&shape[1..], Kind::BFloat16),
        }
    }

    fn sum(&self, way: AllReduceMethod, turn: usize, x: &mut Tensor) {
        self.sums.part(turn).unwrap().copy_(&self.parts[self.rank]);
        self.leave(way, turn, x, self.leaves());
    }

    fn leave(&self, way: AllReduceMethod, turn: usize, x: &mut Tensor, leaves: NormedRows) {
        self.sums.add_rms_norm(way, turn, x, &self.weight, NormOptions::plain(EPS), leaves).unwrap();
    }

    /// Which norms a sum writes: plain and rounded ones, so that one sum checks both; e4m3 if the GPU supports it.
    fn leaves(&self) -> NormedRows {
        NormedRows::Both(self.codes()[0])
    }

    /// The types to which the GPU can round.
    fn codes(&self) -> Vec<Kind> {
        let has_fp8 = self.context.compute_capability().unwrap() >= Capability::new(8, 9);
        if has_fp8 { vec![Kind::Float8e4m3fn, Kind::Int8] } else { vec![Kind::Int8] }
    }

    /// The rows of `x` [.., T, D] that this rank has after a sum.
    fn own_rows(&self, way: AllReduceMethod, x: &Tensor) -> Tensor {
        let step = if way == AllReduceMethod::Share { self.parts.len() as i64 } else { 1 };
        let first = if way == AllReduceMethod::Share { self.rank as i64 } else { 0 };
        x.slice(-2, first.min(self.rows), None, step)
    }

    fn compare(&self, way: AllReduceMethod, turn: usize) {
        let _ = self.sums.normed().unwrap().fill_(f64::NAN);
        let mut x = self.x.copy();
        self.sum(way, turn, &mut x);
        self.check((way, turn), &x, &self.expected());
    }

    /// A sum that writes only rounded norms leaves the buffer of the plain ones unchanged.
    fn compare_rounded(&self, way: AllReduceMethod) {
        for (call, kind) in self.codes().into_iter().enumerate() {
            let _ = self.sums.normed().unwrap().fill_(7.0);
            let poisoned = self.sums.rounded(kind).unwrap();
            let _ = (poisoned.values.view_dtype(Kind::Uint8).fill_(0xff), poisoned.scales.shallow_clone().fill_(-1.0));
            self.sums.part(call).unwrap().copy_(&self.parts[self.rank]);
            let mut x = self.x.copy();
            self.leave(way, call, &mut x, NormedRows::Rounded(kind));
            self.check_rounded(&format!("{way:?}, alone"), &self.expected().1, kind);
            let untouched = self.parts[0].full_like(7.0);
            assert!(self.sums.normed().unwrap().equal(&untouched), "{way:?} wrote the plain norms, too");
        }
    }

    fn check_rounded(&self, what: &str, normed: &Tensor, kind: Kind) {
        let (got, shape) = (self.sums.rounded(kind).unwrap(), normed.size());
        let device = normed.device();
        let expected = ScaledRows {
            values: Tensor::zeros(&shape, (kind, device)),
            scales: Tensor::zeros([shape[0]], (Kind::Float, device)),
        };
        kernels::quantize_rows(normed, &expected).unwrap();
        let bytes = |rows: &ScaledRows| rows.values.view_dtype(Kind::Uint8);
        assert!(bytes(&got).equal(&bytes(&expected)), "norms of {what} in {kind:?}");
        assert!(got.scales.equal(&expected.scales), "scales of {what}");
    }

    /// `x` and the norms, computed with separate sums and the norm kernel.
    fn expected(&self) -> (Tensor, Tensor) {
        let wide = |tensor: &Tensor| tensor.to_kind(Kind::Float);
        let sum = self.parts[1..].iter().fold(wide(&self.parts[0]), |sum, part| sum + wide(part));
        let mut expected = (wide(&self.x) + sum).to_kind(self.x.kind());
        let mut normed = self.parts[0].empty_like();
        kernels::add_rms_norm(&mut expected, None, &self.weight, &mut normed, NormOptions::plain(EPS)).unwrap();
        (expected, normed)
    }

    /// Asserts that `x` and the norms after a sum have the expected bits.
    fn check(&self, (way, turn): (AllReduceMethod, usize), x: &Tensor, (expected, normed): &(Tensor, Tensor)) {
        let what = format!("{way:?} {turn} {:?} of {:?} on rank {}", x.size(), x.kind(), self.rank);
        assert!(self.own_rows(way, x).equal(&self.own_rows(way, expected)), "x of {what}");
        assert!(self.sums.normed().unwrap().equal(normed), "norms of {what}");
        self.check_rounded(&what, normed, self.codes()[0]);
    }
}
