//! Bandwidth of the ranks' collectives, by operation and size. All-reduce is also measured inside a CUDA graph, as in decoding, and so is this
//! crate's all-reduce kernel, which includes residual sum and norm.
#![allow(unsafe_code)]

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::{device_name, median, seconds, synchronize};
use crate::cuda::kernels::{NormOptions, NormedRows, RowSums};
use crate::cuda::{Context, Graph, TorchStream};
use crate::error::Result;
use crate::ranks::{Collective, ReduceOp, World, all_reduce_f64};

/// Tensor sizes of a decode step of a 7B model at batch sizes 9 to 512, then those of training.
const SIZES: [usize; 8] = [64 << 10, 256 << 10, 1792 << 10, 3584 << 10, 16 << 20, 64 << 20, 256 << 20, 1 << 30];
/// Maximum size that is reduced inside a graph.
const MAX_GRAPH_BYTES: usize = 3584 << 10;
/// Elements of a row for this crate's all-reduce kernel.
const HIDDEN: usize = 3584;
/// Number of calls in one graph: two for each block of a 7B model.
const GRAPH_CALLS: usize = 56;
/// Minimum bytes that consecutive calls move together, or the largest tensor if that is smaller. Single small calls end too soon to be timed.
const BYTES_IN_A_ROW: usize = 64 << 20;
/// Number of timed repetitions.
const REPEATS: usize = 5;

/// The benchmark of collectives.
#[derive(Debug, Clone, Copy)]
pub struct CollectivesBench {
    /// Maximum tensor size in bytes.
    pub max_bytes: usize,
}

/// Runs the benchmark on bfloat16; collective over the world. Bus bandwidth is what a ring must send over each link, divided by the time.
///
/// # Errors
/// The errors of the collectives.
pub fn bench_collectives(bench: &CollectivesBench, world: &World) -> Result<Value> {
    let mut rows = Vec::new();
    let bytes_in_a_row = BYTES_IN_A_ROW.min(bench.max_bytes);
    for bytes in SIZES.into_iter().filter(|&bytes| bytes <= bench.max_bytes) {
        for op in TimedCollective::ALL {
            let mut buffers = CollectiveBuffers::new(bytes, world)?;
            let calls = bytes_in_a_row.div_ceil(bytes);
            let time = timed(world, || (0..calls).try_for_each(|_| op.call(&*world.group(), &mut buffers)))?;
            rows.push(op.row(bytes, world.size(), time / calls as f64, false));
        }
        if let (Device::Cuda(ordinal), true) = (world.device(), bytes <= MAX_GRAPH_BYTES) {
            let mut buffers = CollectiveBuffers::new(bytes, world)?;
            let time = in_graph(world, ordinal, |_| TimedCollective::AllReduce.call(&*world.group(), &mut buffers))?;
            rows.push(TimedCollective::AllReduce.row(bytes, world.size(), time, true));
            rows.extend(own_all_reduce(bytes, world, ordinal)?);
        }
    }
    Ok(json!({
        "benchmark": "collectives",
        "device": device_name(world.device()),
        "dtype": "bfloat16",
        "world_size": world.size(),
        "results": rows,
    }))
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum TimedCollective {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    AllToAll,
}

impl TimedCollective {
    const ALL: [Self; 5] = [Self::AllReduce, Self::AllGather, Self::ReduceScatter, Self::Broadcast, Self::AllToAll];

    fn call(
        self,
        group: &dyn Collective,
        CollectiveBuffers { whole, other, part }: &mut CollectiveBuffers,
    ) -> Result<()> {
        match self {
            TimedCollective::AllReduce => group.all_reduce(whole, ReduceOp::Sum),
            TimedCollective::AllGather => group.all_gather(part, whole),
            TimedCollective::ReduceScatter => group.reduce_scatter(whole, part),
            TimedCollective::Broadcast => group.broadcast(whole, 0),
            TimedCollective::AllToAll => group.all_to_all(whole, other),
        }
    }

    fn row(self, bytes: usize, ranks: usize, seconds: f64, is_in_graph: bool) -> Value {
        let others = (ranks - 1) as f64 / ranks as f64;
        let (name, share) = match self {
            TimedCollective::AllReduce => ("all_reduce", 2.0 * others),
            TimedCollective::AllGather => ("all_gather", others),
            TimedCollective::ReduceScatter => ("reduce_scatter", others),
            TimedCollective::Broadcast => ("broadcast", 1.0),
            TimedCollective::AllToAll => ("all_to_all", others),
        };
        let rate = share * bytes as f64 / seconds / 1e9;
        json!({ "op": name, "bytes": bytes, "in_graph": is_in_graph, "us": 1e6 * seconds, "bus_gb_s": rate })
    }
}

/// Zeroed buffers, which sums leave at zero.
struct CollectiveBuffers {
    whole: Tensor, // [n]
    other: Tensor, // [n]
    part: Tensor,  // [n / ranks]
}

impl CollectiveBuffers {
    fn new(bytes: usize, world: &World) -> Result<Self> {
        let ranks = world.size() as i64;
        let part = (bytes / Kind::BFloat16.elt_size_in_bytes()) as i64 / ranks;
        let zeros = |numel| Tensor::f_zeros([numel], (Kind::BFloat16, world.device()));
        Ok(Self { whole: zeros(ranks * part)?, other: zeros(ranks * part)?, part: zeros(part)? })
    }
}

/// Measures this crate's all-reduce with residual sum and norm, on rows of `bytes` in total; `None` if GPUs cannot map each other's memory.
fn own_all_reduce(bytes: usize, world: &World, ordinal: usize) -> Result<Option<Value>> {
    let (rows, most) = (bytes / (2 * HIDDEN), MAX_GRAPH_BYTES / (2 * HIDDEN));
    if !RowSums::serve(Kind::BFloat16, HIDDEN, world.size()) {
        return Ok(None);
    }
    let Some(memory) = world.group().peer_memory(RowSums::bytes(most, HIDDEN))? else { return Ok(None) };
    let sums = RowSums::new(memory, most, HIDDEN)?;
    let zeros = |rows: usize| Tensor::f_zeros([rows as i64, HIDDEN as i64], (Kind::BFloat16, world.device()));
    let (mut x, weight, way) = (zeros(rows)?, zeros(1)?, sums.way(rows));
    let (norm, leaves) = (NormOptions::plain(1e-6), NormedRows::Plain);
    let time = in_graph(world, ordinal, |call| sums.add_rms_norm(way, call % 2, &mut x, &weight, norm, leaves))?;
    let mut row = TimedCollective::AllReduce.row(rows * 2 * HIDDEN, world.size(), time, true);
    row["op"] = json!("all_reduce_add_rms_norm");
    row["way"] = json!(format!("{way:?}").to_lowercase());
    Ok(Some(row))
}

/// Seconds per call, with many calls in one graph.
fn in_graph(world: &World, ordinal: usize, mut call: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    let stream = TorchStream::new(&Context::retain(ordinal)?)?;
    let mut calls = || (0..GRAPH_CALLS).try_for_each(&mut call);
    {
        let _current = stream.make_current()?;
        calls()?; // warms up the communicator on this stream
        synchronize(world.device())?;
    }
    let mut graph = Graph::capture(&stream, calls)?;
    // SAFETY: what the calls use lives until the end of this one, where the GPU is done.
    let time = timed(world, || unsafe { graph.replay(&stream) })?;
    synchronize(world.device())?;
    Ok(time / GRAPH_CALLS as f64)
}

/// Median seconds, on the slowest rank, until the work queued by `run` is done.
fn timed(world: &World, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::with_capacity(REPEATS + 1);
    for _ in 0..=REPEATS {
        synchronize(world.device())?;
        world.group().barrier()?;
        times.push(seconds(|| run().and_then(|()| synchronize(world.device())))?);
    }
    all_reduce_f64(&*world.group(), &mut times, ReduceOp::Max)?;
    Ok(median(times.split_off(1))) // without the first, which warms up
}
