//! Rates of GPUs by their data sheets, and measured ones where this program was measured.

use tch::{Device, Kind};

use super::context::Context;
use crate::error::Result;

/// A GPU that is known by its name.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Chip {
    /// Name of the chip as the driver gives it.
    pub name: &'static str,
    /// Dense bfloat16 products with float32 sums, in floating-point operations a second, by the data sheet.
    pub bf16_flop_per_s: f64,
    /// Bandwidth of its memory in bytes a second, by the data sheet.
    pub memory_bytes_per_s: f64,
    /// Rates that were measured on one (docs/benchmarks.md).
    pub measured: Option<Rates>,
}

/// Rates that a GPU reaches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Large bfloat16 products, in floating-point operations a second.
    pub product_flop_per_s: f64,
    /// A large copy within its memory, bytes read and written, a second.
    pub memory_bytes_per_s: f64,
}

/// By the driver's name, whole: a part of a GPU (MIG), or another variant, is another chip.
pub fn chip(name: &str) -> Option<&'static Chip> {
    CHIPS.iter().find(|chip| chip.name == name)
}

/// The rate of a GPU's dense products of `kind`, in floating-point operations a second; none of a CPU, of a chip that is not known by
/// its name, and of other kinds than bfloat16, whose rates are not listed.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn chip_flop_per_s(device: Device, kind: Kind) -> Result<Option<f64>> {
    let (Device::Cuda(ordinal), Kind::BFloat16) = (device, kind) else { return Ok(None) };
    Ok(chip(&Context::retain(ordinal)?.name()?).map(|chip| chip.bf16_flop_per_s))
}

/// NVIDIA's data sheets, without sparsity: H200 and H100 (SXM, PCIe, NVL), GH200, GB200 and HGX B200, A100, A30, A10, A40, L40, L40S, L4.
/// Where sheets differ (B200: 7.7 or 8 TB/s) the greater figure stands, so that a floor is one.
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
