//! Benchmarks on random weights and tokens, except the benchmark of speculation, which needs real text. Each returns one JSON object with medians of
//! several repetitions after a warm-up.

mod collectives;
mod compare;
mod decode;
mod floor;
mod generate;
mod kernels;
mod launches;
mod limits;
mod memory;
mod products;
mod routing;
mod serve;
mod sleep_wake;
mod speculation;
mod spread;
mod step;
mod train;

pub use collectives::{CollectivesBench, bench_collectives};
pub use compare::compare;
pub use generate::{GenerateBench, bench_generate};
pub use kernels::{KernelsBench, bench_kernels};
pub use routing::BenchRouting;
pub use serve::{ServeBench, bench_serve};
pub use sleep_wake::{SleepWakeBench, bench_sleep_wake};
pub use speculation::{SpeculationBench, bench_speculation};
pub use spread::LengthSpread;
pub use step::{BenchedSteps, StepBench, bench_step};
pub use train::{TrainBench, bench_train};

use std::time::Instant;

use tch::{Device, Kind};

use crate::config::TargetModule;
use crate::cuda::Context;
use crate::error::Result;
use crate::model::LoraSpec;
use crate::ops::random::RandomKey;

/// Random key of weights and tokens.
const SEED: u64 = 42;
/// Separates the tokens' random numbers from those of the weights.
const STREAM: u64 = u64::from_be_bytes(*b"\0\0\0bench");

/// The median; for an even number of values, the mean of the two in the middle.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

/// LoRA adapters of rank `r` on every linear projection.
fn adapters(r: usize) -> LoraSpec {
    LoraSpec { r, alpha: 32.0, dropout: 0.0, targets: TargetModule::ALL.to_vec() }
}

/// Measures the time of `work`.
fn seconds(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Waits for all work queued on `device`.
fn synchronize(device: Device) -> Result<()> {
    match device {
        Device::Cuda(ordinal) => Context::retain(ordinal)?.synchronize(),
        _ => Ok(()),
    }
}

/// The name of a device in results.
fn device_name(device: Device) -> &'static str {
    if device.is_cuda() { "cuda" } else { "cpu" }
}

/// The name of a dtype in results.
fn dtype_name(kind: Kind) -> &'static str {
    if kind == Kind::BFloat16 { "bfloat16" } else { "float32" }
}

/// Token `index` of a random text, equal in every run.
fn token(index: usize, vocab_size: usize) -> u32 {
    (RandomKey::new(SEED, STREAM).word(0, index as u64) % vocab_size as u64) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_token_counts_are_computed() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!((0..1000).map(|index| token(index, 7)).all(|token| token < 7));
        assert_ne!(token(1, 1 << 20), token(2, 1 << 20));
    }
}
