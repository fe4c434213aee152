//! Arena and host memory pool on a GPU. Ignored without a GPU; measurements are printed as one JSON line each.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use colo_grpo::Error;
use colo_grpo::internal::cuda::{Context, FreeMemory, Graph, TorchStream};
use colo_grpo::internal::memory::{self, Account, Arena, HostPool, Ledger, MemoryKind};
use colo_grpo::internal::torch;
use serde_json::json;
use tch::{Device, Kind, Tensor};

const GPU: Device = Device::Cuda(0);
const GIB: usize = 1 << 30;
/// Longest time that the driver needs to clear memory that was returned to it.
const CLEARING_MS_PER_GIB: f64 = 2.5;

#[test]
#[ignore = "needs a GPU"]
fn gpu_arena_maps_and_unmaps_within_a_tenth_of_a_second() {
    const REST: Duration = Duration::from_millis(500);
    let context = Context::retain(0).unwrap();
    // libtorch's own first allocations and kernels come before the free bytes are read.
    let mut warm = Tensor::ones([1024], (Kind::Float, GPU));
    assert_eq!(warm.fill_(-1.0).abs().sum(Kind::Float).double_value(&[]), 1024.0);
    let mut arena = Arena::reserve("gpu_arena_test", 64 * GIB, GPU).unwrap();
    let (address, free) = (arena.as_ptr(), context.memory().unwrap().free_bytes);
    let (mut slowest, mut uncleared_ms) = ((0.0f64, 0.0f64), 0.0f64);
    for cycle in 0..10 {
        // What the driver has just got back it clears before it gives it again: that is its time, not the arena's.
        let is_rested = cycle % 2 == 0;
        std::thread::sleep(if is_rested { REST } else { Duration::ZERO });
        let start = Instant::now();
        arena.map(64 * GIB).unwrap();
        let map_ms = start.elapsed().as_secs_f64() * 1e3;
        let left = context.memory().unwrap().free_bytes;
        assert!(free - left >= 64 * GIB, "{} bytes less free", free - left);
        // SAFETY: dropped before the arena is unmapped.
        let mut last = unsafe { arena.tensor(64 * GIB - 4096, &[1024], Kind::Float) }.unwrap();
        assert_eq!(last.abs().sum(Kind::Float).double_value(&[]), 0.0, "cycle {cycle}");
        let _ = last.fill_(1.0);
        drop(last);
        let start = Instant::now();
        arena.unmap();
        let unmap_ms = start.elapsed().as_secs_f64() * 1e3;
        memory::settle(GPU).unwrap();
        let free_ms = start.elapsed().as_secs_f64() * 1e3;
        let back = context.memory().unwrap().free_bytes;
        assert!(back + 64 * (1 << 20) >= free, "{} bytes kept", free - back);
        assert_eq!((arena.as_ptr(), arena.mapped_bytes()), (address, 0));
        let of_kind = if is_rested { &mut slowest.0 } else { &mut uncleared_ms };
        *of_kind = of_kind.max(map_ms);
        slowest.1 = slowest.1.max(free_ms);
        println!(
            "{}",
            json!({"test": "arena", "gib": 64, "cycle": cycle, "is_rested": is_rested, "map_ms": map_ms,
                "unmap_ms": unmap_ms, "free_ms": free_ms})
        );
    }
    assert!(slowest.0 < 100.0 && slowest.1 < 100.0, "{slowest:?} ms");
    assert!(uncleared_ms < 100.0 + 64.0 * CLEARING_MS_PER_GIB, "{uncleared_ms} ms");
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_arena_views_work_in_libtorch_and_growth_keeps_them() {
    const SIDE: i64 = 1024;
    let bytes = (SIDE * SIDE * 4) as usize;
    let mut arena = Arena::reserve("gpu_view_test", GIB, GPU).unwrap();
    arena.map(bytes).unwrap();
    // SAFETY: all views are dropped before the arena is.
    let view = |arena: &Arena, at: usize| unsafe { arena.tensor(at, &[SIDE, SIDE], Kind::Float) }.unwrap();
    let values = Tensor::randn([SIDE, SIDE], (Kind::Float, Device::Cpu));
    let mut first = view(&arena, 0);
    first.copy_(&values);
    arena.map(GIB).unwrap();
    let mut last = view(&arena, GIB - bytes);
    assert_eq!(last.device(), GPU);
    assert_eq!(last.abs().sum(Kind::Float).double_value(&[]), 0.0, "new memory reads as zero");
    last.copy_(&(&first * 2.0));
    assert!(first.to_device(Device::Cpu).equal(&values), "growth keeps what was written");
    assert!(last.to_device(Device::Cpu).equal(&(&values * 2.0)));
    let exact = values.to_kind(Kind::Double).mm(&(&values * 2.0).to_kind(Kind::Double));
    let product = first.mm(&last).to_device(Device::Cpu).to_kind(Kind::Double);
    let error = (product - &exact).norm().double_value(&[]) / exact.norm().double_value(&[]);
    assert!(error < 2e-3, "{error}");
    assert!(Ledger::report().contains(&Account { kind: MemoryKind::Device, owner: "gpu_view_test", bytes: GIB }));
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_arena_that_does_not_fit_maps_nothing_and_names_the_owners() {
    let context = Context::retain(0).unwrap();
    let FreeMemory { free_bytes: free, total_bytes: total } = context.memory().unwrap();
    let mut arena = Arena::reserve("gpu_huge_test", 2 * total, GPU).unwrap();
    let error = arena.map(2 * total).unwrap_err();
    assert_eq!(error.exit_code() as i32, 11, "{error}");
    assert!(error.to_string().contains("gpu_huge_test") && error.to_string().contains("MiB free"), "{error}");
    assert_eq!(arena.mapped_bytes(), 0);
    let left = context.memory().unwrap().free_bytes;
    assert!(left + 64 * (1 << 20) >= free, "{} bytes kept", free - left);
    arena.map(GIB).unwrap();
    assert!(arena.mapped_bytes() > 0);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_host_pool_copies_at_pcie_speed_bit_for_bit() {
    const CHECKED: i64 = 1 << 28; // elements: 1 GiB of float32
    let bytes = 4 * GIB + (1 << 20);
    let start = Instant::now();
    let mut steps = Vec::new();
    let mut pool = HostPool::new("gpu_pool_test", bytes, GPU, &mut |done, _| steps.push(done)).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    println!("{}", json!({"test": "pin", "gib": bytes as f64 / GIB as f64, "seconds": seconds}));
    assert!(steps.len() > 1 && steps.is_sorted() && steps.last() == Some(&bytes), "{steps:?}");

    let random = Tensor::randint_low(i64::from(i32::MIN), i64::from(i32::MAX), [CHECKED], (Kind::Int, GPU));
    // Across a border of two chunks; every bit pattern of a float comes back.
    let at = GIB / 2 + 4;
    pool.copy_from(at, &random.view_dtype(Kind::Float)).unwrap();
    let mut back = Tensor::zeros([CHECKED], (Kind::Float, GPU));
    pool.copy_to(at, &mut back).unwrap();
    assert!(back.view_dtype(Kind::Int).equal(&random));

    let source = Tensor::randn([(4 * GIB / 4) as i64], (Kind::Float, GPU));
    let mut target = source.zeros_like();
    for run in 0..3 {
        let out = timed(|| pool.copy_from(0, &source).unwrap());
        let back = timed(|| pool.copy_to(0, &mut target).unwrap());
        println!(
            "{}",
            json!({"test": "pool", "run": run, "gib": 4, "out_gb_s": 4.0 * 1.073_741_824 / out,
                "in_gb_s": 4.0 * 1.073_741_824 / back})
        );
    }
    assert!(target.equal(&source));
}

/// Token ids and positions of a batch are copied to the GPU while an optimizer state is still being copied back.
#[test]
#[ignore = "needs a GPU"]
fn gpu_short_copies_do_not_wait_for_a_long_one() {
    let mut pool = HostPool::new("gpu_paced_test", 8 * GIB, GPU, &mut |_, _| ()).unwrap();
    let source = Tensor::randn([(8 * GIB / 4) as i64], (Kind::Float, GPU));
    pool.copy_from(0, &source).unwrap();
    let mut target = source.zeros_like();
    let ids = Tensor::arange(16_384, (Kind::Int64, Device::Cpu));
    let started = Instant::now();
    let long = pool.copy_to_paced(0, &mut target).unwrap();
    let mut passed = Vec::new();
    while !long.is_queued() {
        assert!(ids.to_device(GPU).to_device(Device::Cpu).equal(&ids));
        passed.push(started.elapsed().as_micros());
    }
    println!(
        "{}",
        json!({"test": "paced", "gib": 8, "short_copies_ended_after_us": passed, "all_us": started.elapsed().as_micros()})
    );
    assert!(passed.len() > 8, "a short copy waited for the long one: {passed:?}");
    long.queued().unwrap().copy.hold_libtorch().unwrap();
    assert!(target.equal(&source));
}

/// Memory of tensors that are offloaded one by one is reused by the next arena. Only the rest is returned to the driver, and not earlier.
#[test]
#[ignore = "needs a GPU"]
fn gpu_offloaded_pieces_free_memory_for_the_next_arena() {
    let context = Context::retain(0).unwrap();
    let [mut leaving, mut next] =
        ["gpu_leaving_test", "gpu_next_test"].map(|name| Arena::reserve(name, 8 * GIB, GPU).unwrap());
    leaving.map(8 * GIB).unwrap();
    memory::settle(GPU).unwrap();
    let free = || context.memory().unwrap().free_bytes;
    let before = free();
    for piece in (0..8).rev() {
        leaving.shrink(piece * GIB);
        assert_eq!(leaving.mapped_bytes(), piece * GIB);
    }
    assert_eq!(free(), before, "nothing is the driver's yet");
    next.map(3 * GIB).unwrap();
    assert_eq!(free(), before, "and nothing new was taken");
    memory::release_idle(GPU).unwrap();
    memory::settle(GPU).unwrap();
    assert_eq!(free(), before + 5 * GIB);
}

/// Allocates like micro-batches of growing sizes: tensors accumulate, others are allocated and freed in between, and all are freed at the end.
fn pile_up(rows: i64) {
    let piled: Vec<Tensor> = (0..28)
        .map(|_| {
            let kept = Tensor::empty([rows, 4096], (Kind::BFloat16, GPU));
            drop(Tensor::empty([rows, 16_384], (Kind::BFloat16, GPU)));
            kept
        })
        .collect();
    assert_eq!(piled.len(), 28);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_tensors_of_all_sizes_are_cut_from_one_block() {
    const LARGEST: i64 = 16_000;
    let _context = Context::retain(0).unwrap();
    let reserved = || torch::device_memory(GPU).unwrap().unwrap().reserved;
    drop(Tensor::zeros([1], (Kind::Float, GPU)));
    torch::release_memory(GPU).unwrap();
    let before = reserved();
    let sizes = [9_000, 15_500, 11_111, 16_000, 3_000, 15_999, 12_345, 14_000, LARGEST];
    sizes.into_iter().for_each(pile_up);
    let without = reserved() - before;
    let block = (LARGEST as usize) * 2 * (28 * 4096 + 16_384) / 100 * 103;
    assert!(torch::lacks_block(GPU, block));
    let most = || torch::device_memory(GPU).unwrap().unwrap().peak_allocated;
    let most_before = most();
    torch::keep_block(GPU, block).unwrap();
    assert_eq!(most(), most_before, "the block was counted as a tensor");
    sizes.into_iter().for_each(pile_up);
    let with = reserved() - before;
    println!("{}", json!({"test": "block", "bytes": block, "reserved_without": without, "reserved_with": with}));
    assert!(with < block + (4 << 20) && !torch::lacks_block(GPU, block));
    torch::release_memory(GPU).unwrap();
    assert!(reserved() - before < 4 << 20 && torch::lacks_block(GPU, block));
}

/// Memory released by one arena is available to another at once, and reads as zero there.
#[test]
#[ignore = "needs a GPU"]
fn gpu_arenas_pass_physical_memory_on() {
    let mut arenas = ["gpu_first_test", "gpu_second_test"].map(|name| Arena::reserve(name, 8 * GIB, GPU).unwrap());
    let numel = (8 * GIB / 4) as i64;
    for turn in 0..6 {
        let arena = &mut arenas[turn % 2];
        arena.map(8 * GIB).unwrap();
        // SAFETY: dropped before the arena is unmapped.
        let mut all = unsafe { arena.tensor(0, &[numel], Kind::Float) }.unwrap();
        assert_eq!(all.count_nonzero_dim_intlist(&[0i64][..]).int64_value(&[]), 0, "turn {turn}");
        let _ = all.fill_(f64::NAN);
        drop(all);
        arena.unmap();
    }
}

/// A captured graph over an arena gives the same results after the memory was used by others.
#[test]
#[ignore = "needs a GPU"]
fn gpu_graph_outlives_the_sleep_of_its_memory() {
    let context = Context::retain(0).unwrap();
    let stream = TorchStream::new(&context).unwrap();
    let mut arena = Arena::reserve("gpu_graph_test", 2 * GIB, GPU).unwrap();
    let mut graph: Option<Graph> = None;
    for cycle in 0..20 {
        arena.map(2 * GIB).unwrap();
        // SAFETY: all views are dropped before the arena is unmapped.
        let view = |at: usize| unsafe { arena.tensor(at, &[256, 256], Kind::Float) }.unwrap();
        let (mut x, mut y, mut z) = (view(0), view(GIB), view(2 * GIB - 256 * 256 * 4));
        let values = Tensor::randn([256, 256], (Kind::Float, GPU)) + f64::from(cycle);
        x.copy_(&values);
        y.copy_(&(&values * 0.5));
        let mut work = || {
            z.f_copy_(&x)?;
            let _ = z.f_multiply_(&y)?.f_add_scalar_(1.0)?;
            Ok(())
        };
        let graph = graph.get_or_insert_with(|| Graph::capture(&stream, &mut work).unwrap());
        {
            let _current = stream.make_current().unwrap();
            // SAFETY: the arena is mapped until the comparison below has waited.
            unsafe { graph.replay(&stream) }.unwrap();
        }
        assert!(z.equal(&(&values * (&values * 0.5) + 1.0)), "cycle {cycle}");
        drop((x, y, z));
        arena.unmap();
        let other = Tensor::full([(3 * GIB / 4) as i64], f64::NAN, (Kind::Float, GPU));
        drop(other);
        torch::release_memory(GPU).unwrap();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_a_failed_graph_capture_leaves_the_stream_usable() {
    let stream = TorchStream::new(&Context::retain(0).unwrap()).unwrap();
    let mut tensor = Tensor::zeros([16], (Kind::Float, GPU));
    let read = Graph::capture(&stream, || {
        let _ = tensor.f_add_scalar_(1.0)?;
        tensor.f_to_device(Device::Cpu).map(drop).map_err(Error::from)
    });
    assert!(read.is_err());
    let _current = stream.make_current().unwrap();
    assert_eq!((&tensor + 1.0).sum(Kind::Float).double_value(&[]), 16.0);
}

/// An overlapped copy as in `train::residence`: the host continues, and libtorch's stream waits for the copy.
#[test]
#[ignore = "needs a GPU"]
fn gpu_asynchronous_copies_finish_before_their_use() {
    let mut pool = HostPool::new("gpu_async_test", GIB, GPU, &mut |_, _| ()).unwrap();
    let mut arena = Arena::reserve("gpu_async_state", GIB, GPU).unwrap();
    let busy = Tensor::randn([8192, 8192], (Kind::BFloat16, GPU));
    let values = Tensor::randn([(GIB / 4) as i64], (Kind::Float, GPU));
    for _ in 0..3 {
        arena.map(GIB).unwrap();
        // SAFETY: dropped before the arena is unmapped.
        let mut state = unsafe { arena.tensor(0, &[(GIB / 4) as i64], Kind::Float) }.unwrap();
        for _ in 0..20 {
            let _ = busy.mm(&busy);
        }
        state.copy_(&values); // queued behind the products
        let mut out = pool.copy_from_async(0, &state).unwrap();
        assert!(!out.is_done().unwrap(), "the copy waits for what writes its tensor");
        out.wait().unwrap();
        drop(state);
        arena.unmap();
        arena.map(GIB).unwrap();
        // SAFETY: as above.
        let mut state = unsafe { arena.tensor(0, &[(GIB / 4) as i64], Kind::Float) }.unwrap();
        let back = pool.copy_to_async(0, &mut state).unwrap();
        let _ = busy.mm(&busy);
        back.hold_libtorch().unwrap();
        assert!(state.equal(&values), "libtorch read before the copy was done");
        drop(state);
        arena.unmap();
    }
}

/// Seconds that `work` takes on the host and on the GPU.
fn timed(work: impl FnOnce()) -> f64 {
    tch::Cuda::synchronize(0);
    let start = Instant::now();
    work();
    tch::Cuda::synchronize(0);
    start.elapsed().as_secs_f64()
}
