//! Helpers for tests of GPU kernels: random tensors, copies to the GPU, error bounds and times.

use std::time::Instant;

use colo_grpo::internal::torch;
use tch::{Device, Kind, Tensor};

pub const GPU: Device = Device::Cuda(0);

/// Whether only small cases are run, because compute-sanitizer is used.
pub fn is_small() -> bool {
    std::env::var_os("COLO_GRPO_TEST_SMALL").is_some()
}

/// A tensor of standard normal numbers on the CPU.
pub fn rand(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_kind(kind)
}

pub fn random_ints(low: i64, high: i64, count: i64) -> Vec<i64> {
    torch::i64_vec(&Tensor::randint_low(low, high, [count], (Kind::Int64, Device::Cpu))).unwrap()
}

pub fn random_permutation(count: i64) -> Vec<i64> {
    torch::i64_vec(&Tensor::randperm(count, (Kind::Int64, Device::Cpu))).unwrap()
}

pub fn gpu(tensor: &Tensor) -> Tensor {
    tensor.to_device(GPU)
}

/// A tensor [n] i32 on the GPU.
pub fn ints(values: &[i64]) -> Tensor {
    Tensor::from_slice(values).to_kind(Kind::Int).to_device(GPU)
}

/// A tensor of NaN, so that elements which a kernel does not write are noticed.
pub fn poison(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::full(shape, f64::NAN, (kind, GPU))
}

/// A copy in float64 on the CPU.
pub fn double(tensor: &Tensor) -> Tensor {
    tensor.to_device(Device::Cpu).to_kind(Kind::Double)
}

/// Norm of the difference divided by the norm of `expected`, in float64 on the CPU. NaN if either tensor contains NaN.
pub fn relative_error(got: &Tensor, expected: &Tensor) -> f64 {
    let (got, expected) = (double(got), double(expected));
    assert_eq!(got.size(), expected.size());
    (got - &expected).norm().double_value(&[]) / expected.norm().double_value(&[]).max(1e-30)
}

/// Seconds of one run: the median of five batches of eight runs after a warm-up.
pub fn seconds(run: &mut dyn FnMut()) -> f64 {
    const BATCH: u32 = 8;
    run();
    let mut seconds: Vec<f64> = (0..5)
        .map(|_| {
            tch::Cuda::synchronize(0);
            let start = Instant::now();
            (0..BATCH).for_each(|_| run());
            tch::Cuda::synchronize(0);
            start.elapsed().as_secs_f64() / f64::from(BATCH)
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[2]
}
