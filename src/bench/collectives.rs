//! What the ranks' collectives move, by operation and size; all-reduce also inside a CUDA graph, as decoding uses it.
#![allow(unsafe_code)]

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::{median, seconds, synchronize};
use crate::cuda::{Context, Graph, TorchStream};
use crate::dist::{Collective, ReduceOp, World, all_reduce_f64};
use crate::error::Result;

/// Tensor sizes of a decode step of a 7B model at batch 9 to 512, then those of training.
const SIZES: [usize; 8] = [64 << 10, 256 << 10, 1792 << 10, 3584 << 10, 16 << 20, 64 << 20, 256 << 20, 1 << 30];
/// Largest size that is reduced inside a graph.
const MAX_GRAPH_BYTES: usize = 3584 << 10;
/// Calls of one graph.
const GRAPH_CALLS: usize = 57;
/// Bytes that calls in a row move together at least: small ones alone are over too soon to be timed.
const BYTES_IN_A_ROW: usize = 64 << 20;
/// Timed repetitions.
const REPEATS: usize = 5;

/// What is run.
#[derive(Debug, Clone, Copy)]
pub struct CollectivesBench {
    /// Largest tensor in bytes: reduced, gathered or scattered.
    pub max_bytes: usize,
}

/// Runs it on bfloat16; collective over the world. Bus bandwidth is what a ring must send over each link, by the time.
///
/// # Errors
/// Those of the collectives.
pub fn bench_collectives(bench: &CollectivesBench, world: &World) -> Result<Value> {
    let mut rows = Vec::new();
    for bytes in SIZES.into_iter().filter(|&bytes| bytes <= bench.max_bytes) {
        for op in Op::ALL {
            let mut buffers = Buffers::new(bytes, world)?;
            let calls = BYTES_IN_A_ROW.div_ceil(bytes);
            let time = timed(world, || (0..calls).try_for_each(|_| op.call(&*world.group(), &mut buffers)))?;
            rows.push(op.row(bytes, world.size(), time / calls as f64, false));
        }
        if let (Device::Cuda(ordinal), true) = (world.device(), bytes <= MAX_GRAPH_BYTES) {
            let time = in_graph(bytes, world, ordinal)?;
            rows.push(Op::AllReduce.row(bytes, world.size(), time, true));
        }
    }
    Ok(json!({
        "benchmark": "collectives",
        "device": if world.device().is_cuda() { "cuda" } else { "cpu" },
        "dtype": "bfloat16",
        "world_size": world.size(),
        "results": rows,
    }))
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Op {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    AllToAll,
}

impl Op {
    const ALL: [Self; 5] = [Self::AllReduce, Self::AllGather, Self::ReduceScatter, Self::Broadcast, Self::AllToAll];

    fn call(self, group: &dyn Collective, Buffers { whole, other, part }: &mut Buffers) -> Result<()> {
        match self {
            Op::AllReduce => group.all_reduce(whole, ReduceOp::Sum),
            Op::AllGather => group.all_gather(part, whole),
            Op::ReduceScatter => group.reduce_scatter(whole, part),
            Op::Broadcast => group.broadcast(whole, 0),
            Op::AllToAll => group.all_to_all(whole, other),
        }
    }

    fn row(self, bytes: usize, ranks: usize, seconds: f64, is_in_graph: bool) -> Value {
        let others = (ranks - 1) as f64 / ranks as f64;
        let (name, share) = match self {
            Op::AllReduce => ("all_reduce", 2.0 * others),
            Op::AllGather => ("all_gather", others),
            Op::ReduceScatter => ("reduce_scatter", others),
            Op::Broadcast => ("broadcast", 1.0),
            Op::AllToAll => ("all_to_all", others),
        };
        let rate = share * bytes as f64 / seconds / 1e9;
        json!({ "op": name, "bytes": bytes, "in_graph": is_in_graph, "us": 1e6 * seconds, "bus_gb_s": rate })
    }
}

/// Zeros, which sums leave zeros.
struct Buffers {
    whole: Tensor, // [n]
    other: Tensor, // [n]
    part: Tensor,  // [n / ranks]
}

impl Buffers {
    fn new(bytes: usize, world: &World) -> Result<Self> {
        let ranks = world.size() as i64;
        let part = (bytes / Kind::BFloat16.elt_size_in_bytes()) as i64 / ranks;
        let zeros = |numel| Tensor::f_zeros([numel], (Kind::BFloat16, world.device()));
        Ok(Self { whole: zeros(ranks * part)?, other: zeros(ranks * part)?, part: zeros(part)? })
    }
}

/// Seconds of one of many all-reduces that one graph holds.
fn in_graph(bytes: usize, world: &World, ordinal: usize) -> Result<f64> {
    let stream = TorchStream::new(&Context::retain(ordinal)?)?;
    let group = world.group();
    let mut buffers = Buffers::new(bytes, world)?;
    let mut calls = |count| (0..count).try_for_each(|_| Op::AllReduce.call(&*group, &mut buffers));
    {
        let _current = stream.make_current()?;
        calls(1)?; // the communicator meets the stream
        synchronize(world.device())?;
    }
    let mut graph = Graph::capture(&stream, || calls(GRAPH_CALLS))?;
    // SAFETY: the buffers live until the end of this call, where the GPU is done.
    let time = timed(world, || unsafe { graph.replay(&stream) })?;
    synchronize(world.device())?;
    Ok(time / GRAPH_CALLS as f64)
}

/// Median seconds of the slowest rank until the work that `run` queues is done.
fn timed(world: &World, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::with_capacity(REPEATS + 1);
    for _ in 0..=REPEATS {
        synchronize(world.device())?;
        world.group().barrier()?;
        times.push(seconds(|| run().and_then(|()| synchronize(world.device())))?);
    }
    all_reduce_f64(&*world.group(), &mut times, ReduceOp::Max)?;
    Ok(median(times.split_off(1))) // the first warms up
}
