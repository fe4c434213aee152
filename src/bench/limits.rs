//! Limits of the present GPU, as a reference for utilisation and theoretical minima.

use std::time::Instant;

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::{median, synchronize};
use crate::cuda::{Chip, Context, Rates, chip};
use crate::error::Result;
use crate::torch;

/// Side of the square GEMM that is measured.
const PRODUCT_SIDE: i64 = 8192;
/// Bytes of the copy that is measured.
const COPY_BYTES: i64 = 1 << 30;
/// Number of measurements; the median is used.
const REPEATS: usize = 9;

/// Limits of a GPU.
#[derive(Debug, Clone)]
pub(super) struct GpuLimits {
    /// The driver's name of the GPU.
    name: String,
    /// The GPU's data sheet, if known.
    chip: Option<&'static Chip>,
    /// Rates that GEMMs and copies reach.
    pub rates: Rates,
    /// Where `rates` come from.
    source: &'static str,
}

impl GpuLimits {
    /// The limits of a GPU: as measured for docs/benchmarks.md or, for other GPUs, by short measurements, after which libtorch's cache is released.
    /// `None` for a CPU.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda); errors of insufficient memory.
    pub(super) fn of(device: Device) -> Result<Option<Self>> {
        let Device::Cuda(ordinal) = device else { return Ok(None) };
        let name = Context::retain(ordinal)?.name()?;
        let chip = chip(&name);
        let limits = match chip.and_then(|chip| chip.measured) {
            Some(rates) => Self { name, chip, rates, source: "docs/benchmarks.md" },
            None => Self { name, chip, rates: measure(device)?, source: "measured at the start of this benchmark" },
        };
        Ok(Some(limits))
    }

    /// This rate as a share of the data sheet's dense bfloat16 rate or, without a data sheet, of the measured GEMM rate.
    pub(super) fn utilisation(&self, flop_per_s: f64) -> f64 {
        flop_per_s / self.chip.map_or(self.rates.product_flop_per_s, |chip| chip.bf16_flop_per_s)
    }

    /// The minimum time for these bytes and FLOPs, in seconds.
    pub(super) fn floor_s(&self, bytes: f64, flop: f64) -> f64 {
        (bytes / self.rates.memory_bytes_per_s).max(flop / self.rates.product_flop_per_s)
    }

    /// Describes the GPU for results, including which rate utilisation refers to.
    pub(super) fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "data_sheet_bf16_tflops": self.chip.map(|chip| chip.bf16_flop_per_s / 1e12),
            "data_sheet_memory_tb_per_s": self.chip.map(|chip| chip.memory_bytes_per_s / 1e12),
            "product_tflops": self.rates.product_flop_per_s / 1e12,
            "memory_tb_per_s": self.rates.memory_bytes_per_s / 1e12,
            "rates_from": self.source,
            "mfu_of": if self.chip.is_some() { "data sheet" } else { "measured products" },
        })
    }
}

/// Measures the rates of a large GEMM and a large copy.
fn measure(device: Device) -> Result<Rates> {
    let [a, b, out] = {
        let square = || Tensor::f_randn([PRODUCT_SIDE; 2], (Kind::BFloat16, device));
        [square()?, square()?, square()?]
    };
    let product_s = seconds(device, || Ok(a.f_mm_out(&out, &b).map(drop)?))?;
    drop([a, b, out]);
    let from = Tensor::f_zeros([COPY_BYTES], (Kind::Uint8, device))?;
    let mut to = from.f_empty_like()?;
    let copy_s = seconds(device, || Ok(to.f_copy_(&from)?))?;
    drop([from, to]);
    torch::release_memory(device)?;
    Ok(Rates {
        product_flop_per_s: 2.0 * (PRODUCT_SIDE as f64).powi(3) / product_s,
        memory_bytes_per_s: 2.0 * COPY_BYTES as f64 / copy_s,
    })
}

/// The median time of `work` on a device, after a first run.
fn seconds(device: Device, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::with_capacity(REPEATS + 1);
    for _ in 0..=REPEATS {
        synchronize(device)?;
        let start = Instant::now();
        work()?;
        synchronize(device)?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(median(times.split_off(1)))
}

/// The limits of an H200.
#[cfg(test)]
pub(super) fn of_h200() -> GpuLimits {
    let chip = chip("NVIDIA H200");
    let rates = chip.and_then(|chip| chip.measured).unwrap();
    GpuLimits { name: "NVIDIA H200".to_owned(), chip, rates, source: "docs/benchmarks.md" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utilisation_uses_the_limits_of_the_benchmarked_gpu() {
        let rates = Rates { product_flop_per_s: 250e12, memory_bytes_per_s: 1.8e12 };
        let of = |name: &str| GpuLimits { name: name.to_owned(), chip: chip(name), rates, source: "a test" };
        let (a100, unknown) = (of("NVIDIA A100-SXM4-80GB"), of("NVIDIA X1"));
        assert_eq!((a100.utilisation(156e12), unknown.utilisation(125e12)), (0.5, 0.5));
        assert_eq!(
            (a100.to_json()["mfu_of"].clone(), unknown.to_json()["mfu_of"].clone()),
            ("data sheet".into(), "measured products".into())
        );
        assert_eq!(unknown.to_json()["data_sheet_bf16_tflops"], Value::Null);
        assert_eq!((a100.floor_s(3.6e12, 250e12), a100.floor_s(1.8e12, 500e12)), (2.0, 2.0));
        assert_eq!(of_h200().utilisation(989e12), 1.0);
        assert!(GpuLimits::of(Device::Cpu).unwrap().is_none());
    }

    #[test]
    fn measuring_skips_the_first_run_and_takes_the_median() {
        let mut runs = 0;
        let seconds = seconds(Device::Cpu, || {
            runs += 1;
            Ok(())
        });
        assert!(seconds.unwrap() >= 0.0 && runs == REPEATS + 1);
    }
}
