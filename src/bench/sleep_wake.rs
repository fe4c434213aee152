//! Puts an engine's memory to sleep and wakes it on all ranks at once, with other data in it in between and a CUDA graph that must stay valid. Also
//! copies optimizer state to the host pool and back.
#![allow(unsafe_code)]

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::{device_name, median, seconds, synchronize};
use crate::cuda::{Context, FreeMemory, Graph, TorchStream};
use crate::error::{Error, Result};
use crate::memory::{self, Arena, HostPool, Ledger};
use crate::ranks::{ReduceOp, World, all_reduce_f64};
use crate::torch;

/// Number of elements that the graph reads at the arena's start, and writes at its end.
const NUMEL: usize = 1 << 16;
/// Number of copies in each direction; the median is used.
const COPIES: usize = 3;

/// The benchmark of sleeping and waking.
#[derive(Debug, Clone, Copy)]
pub struct SleepWakeBench {
    /// Bytes that are unmapped and mapped on each rank.
    pub bytes: usize,
    /// Bytes that are copied to the host and back on each rank.
    pub offload_bytes: usize,
    /// Number of timed cycles.
    pub cycles: usize,
    /// How long freed memory is idle before each wake. The driver clears it during this time, or else during the wake.
    pub rest: Duration,
}

/// Runs the benchmark; collective over the world.
///
/// # Errors
/// Errors of insufficient memory; [`Error::NonFinite`] if memory, the graph or a copy has unexpected values.
pub fn bench_sleep_wake(bench: &SleepWakeBench, world: &World) -> Result<Value> {
    let device = world.device();
    let mut engine = EngineMemory::new(bench.bytes, device)?;
    engine.cycle(world, 0)?; // captures the graph
    let mut times = Vec::with_capacity(bench.cycles * Cycle::NAMES.len());
    for cycle in 1..=bench.cycles {
        thread::sleep(bench.rest);
        times.extend(engine.cycle(world, cycle)?.0);
    }
    all_reduce_f64(&*world.group(), &mut times, ReduceOp::Max)?; // the slowest rank of each
    let mut result = json!({
        "benchmark": "sleep_wake",
        "device": device_name(device),
        "world_size": world.size(),
        "gib": bench.bytes as f64 / f64::from(1 << 30),
        "cycles": bench.cycles,
        "rest_ms": bench.rest.as_millis() as u64,
        "used_asleep_gb": used_bytes(device)? as f64 / 1e9,
        "libtorch_asleep_gb": torch::device_memory(device)?.map_or(0, |memory| memory.reserved) as f64 / 1e9,
        "ledger_asleep": Ledger::report(),
        "copies": copies(bench.offload_bytes, world)?,
    });
    for (index, name) in Cycle::NAMES.iter().enumerate() {
        let of_name: Vec<f64> = times.iter().skip(index).step_by(Cycle::NAMES.len()).map(|time| 1e3 * time).collect();
        let worst = of_name.iter().copied().fold(0.0, f64::max);
        result[*name] = json!({ "median": median(of_name), "worst": worst });
    }
    Ok(result)
}

/// Seconds of one cycle, in the order of `NAMES`.
struct Cycle([f64; 4]);

impl Cycle {
    /// Times until: the engine may queue work; that work finds zeroed memory; an arena may map the memory; any process may use it.
    const NAMES: [&str; 4] = ["wake_ms", "wake_zeroed_ms", "sleep_ms", "sleep_free_ms"];
}

/// An arena, and a graph over its first and last elements.
struct EngineMemory {
    graph: Option<(Graph, TorchStream)>, // dropped before the arena
    arena: Arena,
    device: Device,
}

impl EngineMemory {
    fn new(bytes: usize, device: Device) -> Result<Self> {
        Ok(Self { graph: None, arena: Arena::reserve("kv_cache", bytes, device)?, device })
    }

    fn cycle(&mut self, world: &World, cycle: usize) -> Result<Cycle> {
        let device = self.device;
        synchronize(device)?;
        world.group().barrier()?;
        let wake = seconds(|| self.arena.map(self.arena.reserved_bytes()))?;
        let zeroed = seconds(|| synchronize(device))?;
        self.use_it(cycle)?;
        synchronize(device)?;
        world.group().barrier()?;
        let sleep = seconds(|| {
            self.arena.unmap();
            Ok(())
        })?;
        let free = seconds(|| memory::settle(device))?;
        self.let_others_have_it()?;
        Ok(Cycle([wake, wake + zeroed, sleep, sleep + free]))
    }

    /// Computes y = 2 x + 1, by the graph once captured, and checks the result.
    fn use_it(&mut self, cycle: usize) -> Result<()> {
        let end = self.arena.reserved_bytes() - NUMEL * 4;
        // SAFETY: the views end with this call, before the arena is unmapped.
        let [x, y] = [0, end].map(|at| unsafe { self.arena.tensor(at, &[NUMEL as i64], Kind::Float) });
        let (mut x, mut y) = (x?, y?);
        let zero = y.f_abs()?.f_max()?.double_value(&[]);
        check(zero == 0.0, "memory to read as zero after a wake")?;
        let values = Tensor::f_arange(NUMEL as i64, (Kind::Float, self.device))?.f_add_scalar(cycle as i64)?;
        x.f_copy_(&values)?;
        self.compute(&x, &mut y)?;
        let expected = values.f_multiply_scalar(2)?.f_add_scalar(1)?;
        check(y.f_equal(&expected)?, "the CUDA graph to compute the same values as before the first sleep")
    }

    fn compute(&mut self, x: &Tensor, y: &mut Tensor) -> Result<()> {
        let Device::Cuda(ordinal) = self.device else { return work(x, y) };
        if self.graph.is_none() {
            let stream = TorchStream::new(&Context::retain(ordinal)?)?;
            let graph = Graph::capture(&stream, || work(x, y))?;
            self.graph = Some((graph, stream));
        }
        let (graph, stream) = self.graph.as_mut().expect("captured above");
        let _current = stream.make_current()?;
        // SAFETY: the arena is mapped, at the addresses of the capture, and stays so until the GPU is done.
        unsafe { graph.replay(stream) }
    }

    /// Fills most of the free memory with other data.
    fn let_others_have_it(&self) -> Result<()> {
        let numel = (self.arena.reserved_bytes() / 4 / 10 * 9) as i64;
        drop(Tensor::f_full([numel], f64::NAN, (Kind::Float, self.device))?);
        torch::release_memory(self.device)
    }
}

/// The captured computation, which allocates nothing.
fn work(x: &Tensor, y: &mut Tensor) -> Result<()> {
    y.f_copy_(x)?;
    let _ = y.f_multiply_scalar_(2)?.f_add_scalar_(1)?;
    Ok(())
}

/// Measures copies on all ranks at once, and checks them bit for bit.
fn copies(bytes: usize, world: &World) -> Result<Value> {
    let device = world.device();
    let mut pool = None;
    let pin_s = seconds(|| {
        pool = Some(HostPool::new("optimizer_host", bytes, device, &mut |_, _| ())?);
        Ok(())
    })?;
    let mut pool = pool.expect("made above");
    let numel = (bytes / 8) as i64;
    let state = Tensor::f_randint_low(i64::MIN, i64::MAX, [numel], (Kind::Int64, device))?;
    let mut back = state.f_zeros_like()?;
    let mut times = Vec::new();
    for _ in 0..COPIES {
        synchronize(device)?;
        world.group().barrier()?;
        times.push(seconds(|| pool.copy_from(0, &state))?);
        world.group().barrier()?;
        times.push(seconds(|| pool.copy_to(0, &mut back))?);
        check(back.f_equal(&state)?, "the bits that were copied to the host")?;
        let _ = back.f_zero_()?;
    }
    all_reduce_f64(&*world.group(), &mut times, ReduceOp::Max)?;
    let rate = |first| bytes as f64 / 1e9 / median(times.iter().skip(first).step_by(2).copied().collect());
    let gib = bytes as f64 / f64::from(1 << 30);
    Ok(json!({ "gib": gib, "pin_s": pin_s, "out_gb_s": rate(0), "in_gb_s": rate(1) }))
}

/// Used bytes of the whole GPU, by all processes; 0 on a CPU.
fn used_bytes(device: Device) -> Result<usize> {
    let Device::Cuda(ordinal) = device else { return Ok(0) };
    let FreeMemory { free_bytes: free, total_bytes: total } = Context::retain(ordinal)?.memory()?;
    Ok(total - free)
}

fn check(holds: bool, expected: &str) -> Result<()> {
    let message = || format!("bench sleep_wake: expected {expected}, but the values differ");
    if holds { Ok(()) } else { Err(Error::NonFinite { message: message() }) }
}
