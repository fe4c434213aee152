//! Throughput of known GPUs: from data sheets, and measured where this program was benchmarked.

use tch::{Device, Kind};

use super::context::Context;
use crate::error::Result;

/// Data-sheet figures of a GPU that is recognized by name.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Chip {
    /// Name of the GPU as the driver reports it.
    pub name: &'static str,
    /// Dense bfloat16 GEMM throughput with float32 accumulation, in floating-point operations per second, from the data sheet.
    pub bf16_flop_per_s: f64,
    /// Memory bandwidth in bytes per second, from the data sheet.
    pub memory_bytes_per_s: f64,
    /// Measured throughput, if this GPU was benchmarked (docs/benchmarks.md).
    pub measured: Option<Rates>,
}

/// Throughput that a GPU reaches in practice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Throughput of large bfloat16 GEMMs, in floating-point operations per second.
    pub product_flop_per_s: f64,
    /// Bandwidth of a large copy within its memory, in bytes read and written per second.
    pub memory_bytes_per_s: f64,
}

/// Looks up a GPU by the driver's full name. MIG slices and variants have other names and are not found.
pub fn chip(name: &str) -> Option<&'static Chip> {
    CHIPS.iter().find(|chip| chip.name == name)
}

/// Peak throughput of dense GEMMs of `kind` on a device, in floating-point operations per second. `None` on a CPU, for unknown GPUs, and for types
/// other than bfloat16.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn chip_flop_per_s(device: Device, kind: Kind) -> Result<Option<f64>> {
    let (Device::Cuda(ordinal), Kind::BFloat16) = (device, kind) else { return Ok(None) };
    Ok(chip(&Context::retain(ordinal)?.name()?).map(|chip| chip.bf16_flop_per_s))
}

/// NVIDIA's data sheets, without sparsity: H200 and H100 (SXM, PCIe, NVL), GH200, GB200 and HGX B200, A100, A30, A10, A40, L40, L40S, L4. Where
/// sheets differ (B200: 7.7 or 8 TB/s), this is the larger figure, so that lower bounds on time hold.
const CHIPS: &[Chip] = &[
    Chip {
        measured: Some(Rates { product_flop_per_s: 798e12, memory_bytes_per_s: 4.25e12 }),
        ..of_data_sheet("NVIDIA H200", 989.0, 4800.0)
    },
    of_data_sheet("NVIDIA H200 NVL", 835.0, 4800.0),
    of_data_sheet("NVIDIA H100 80GB HBM3", 989.0, 3350.0),
    of_data_sheet("NVIDIA H100 NVL", 835.0, 3900.0),
    of_data_sheet("NVIDIA H100 PCIe", 756.0, 2000.0),
    of_data_sheet("NVIDIA GH200 480GB", 990.0, 4000.0),
    of_data_sheet("NVIDIA GH200 144G HBM3e", 990.0, 4900.0),
    of_data_sheet("NVIDIA B200", 2250.0, 8000.0),
    of_data_sheet("NVIDIA GB200", 2500.0, 8000.0),
    of_data_sheet("NVIDIA A100-SXM4-80GB", 312.0, 2039.0),
    of_data_sheet("NVIDIA A100-SXM4-40GB", 312.0, 1555.0),
    of_data_sheet("NVIDIA A100 80GB PCIe", 312.0, 1935.0),
    of_data_sheet("NVIDIA A100-PCIE-40GB", 312.0, 1555.0),
    of_data_sheet("NVIDIA A30", 165.0, 933.0),
    of_data_sheet("NVIDIA A40", 149.7, 696.0),
    of_data_sheet("NVIDIA L40", 181.0, 864.0),
    of_data_sheet("NVIDIA L40S", 362.0, 864.0),
    of_data_sheet("NVIDIA L4", 121.0, 300.0),
    of_data_sheet("NVIDIA A10", 125.0, 600.0),
];

const fn of_data_sheet(name: &'static str, bf16_tflops: f64, memory_gb_per_s: f64) -> Chip {
    Chip { name, bf16_flop_per_s: bf16_tflops * 1e12, memory_bytes_per_s: memory_gb_per_s * 1e9, measured: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_rates_exist_only_for_known_gpus_and_dtypes() {
        for (device, kind) in [(Device::Cpu, Kind::BFloat16), (Device::Cuda(0), Kind::Float)] {
            assert_eq!(chip_flop_per_s(device, kind).unwrap(), None);
        }
    }

    #[test]
    fn gpus_are_matched_by_their_full_name() {
        let h200 = chip("NVIDIA H200").unwrap();
        assert_eq!(h200.bf16_flop_per_s, 989e12);
        let a100 = chip("NVIDIA A100-SXM4-80GB").unwrap();
        assert_eq!((a100.bf16_flop_per_s, a100.memory_bytes_per_s, a100.measured), (312e12, 2039e9, None));
        assert_eq!((chip("NVIDIA H200 MIG 1g.18gb"), chip("NVIDIA GeForce RTX 4090"), chip("")), (None, None, None));
    }

    #[test]
    fn gpu_names_are_unique_and_measured_rates_below_data_sheets() {
        for (index, one) in CHIPS.iter().enumerate() {
            assert!(CHIPS[..index].iter().all(|other| other.name != one.name), "{}", one.name);
            let Some(rates) = one.measured else { continue };
            assert!(rates.product_flop_per_s < one.bf16_flop_per_s, "{}", one.name);
            assert!(rates.memory_bytes_per_s < one.memory_bytes_per_s, "{}", one.name);
        }
    }
}
