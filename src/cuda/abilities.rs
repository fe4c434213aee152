//! Which GPU features this program's kernels can use, by compute capability.

use std::sync::OnceLock;

use tch::Device;

use super::capability::Capability;
use super::devices::{NamedGpu, capabilities};
use super::library::environment;
use crate::error::Result;

/// The oldest supported capability: the first with bfloat16 tensor cores and asynchronous copies to shared memory.
const LEAST: Capability = Capability::new(8, 0);

/// Whether GPUs of this capability support thread block clusters and programmatic dependent launch.
pub(super) fn has_clusters(capability: Capability) -> bool {
    capability >= Capability::HOPPER
}

/// Whether the program runs FP8 GEMMs on GPUs of this capability. Only on Hopper does cuBLASLt support one scale per row and column.
pub(super) fn has_fp8_products(capability: Capability) -> bool {
    capability == Capability::HOPPER
}

/// Whether a thread block can use 227 KiB of shared memory. True for Hopper and data-centre Blackwell; others have 163 or 99 KiB.
fn has_wide_shared_memory(capability: Capability) -> bool {
    matches!(capability.major, 9 | 10)
}

/// Whether a visible GPU supports thread block clusters; false if the driver does not answer.
pub(super) fn gpu_has_clusters(ordinal: usize) -> bool {
    gpu_capability(ordinal).is_some_and(has_clusters)
}

/// Whether thread blocks of a visible GPU can use 227 KiB of shared memory; false if the driver does not answer.
pub(super) fn gpu_has_wide_shared_memory(ordinal: usize) -> bool {
    gpu_capability(ordinal).is_some_and(has_wide_shared_memory)
}

/// The largest head width for which cuDNN's attention has forward and backward on a device.
pub fn cudnn_most_head_dim(device: Device) -> usize {
    match device {
        Device::Cuda(ordinal) if gpu_capability(ordinal) == Some(Capability::HOPPER) => 256,
        _ => 128,
    }
}

fn gpu_capability(ordinal: usize) -> Option<Capability> {
    static KNOWN: OnceLock<Vec<Capability>> = OnceLock::new();
    let of_gpus = || capabilities().unwrap_or_default().into_iter().map(|gpu| gpu.capability).collect();
    KNOWN.get_or_init(of_gpus).get(ordinal).copied()
}

/// Messages to show at start, one line per kind of visible GPU: for which operations libraries replace this program's kernels there.
///
/// # Errors
/// [`Error::Environment`](crate::Error::Environment) for a GPU that no kernel supports.
pub(super) fn shortfalls() -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for NamedGpu { name, capability } in capabilities()? {
        let line = shortfall(&name, capability)?;
        lines.extend(line.filter(|line| !lines.contains(line)));
    }
    Ok(lines)
}

fn shortfall(name: &str, capability: Capability) -> Result<Option<String>> {
    let Capability { major, minor } = capability;
    if capability < LEAST {
        return Err(environment(&format!(
            "{name} has compute capability {capability}, expected at least {LEAST} (A100, RTX 30): \
             choose other GPUs with CUDA_VISIBLE_DEVICES, or set device = cpu"
        )));
    }
    let mut missing = Vec::new();
    if capability != Capability::HOPPER {
        missing.push("GEMMs with few rows and the fused gate-up GEMM (sm_90 only)");
    }
    if !has_clusters(capability) {
        missing.push("LoRA kernels and overlapping kernel launches (sm_90 and later)");
    }
    let missing = missing.join("; ");
    let line = format!("{name} (sm_{major}{minor}): cuBLASLt replaces kernels that this GPU cannot run: {missing}");
    Ok((!missing.is_empty()).then_some(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_gpu_features_are_reported_and_old_gpus_refused() {
        let told = |major, minor| shortfall("GPU", Capability::new(major, minor)).unwrap();
        assert_eq!(told(9, 0), None);
        let later = told(12, 0).unwrap();
        assert!(later.starts_with("GPU (sm_120): ") && later.contains("fused gate-up GEMM") && !later.contains("LoRA"));
        assert!([0, 9].iter().all(|minor| told(8, *minor).unwrap().contains("LoRA kernels")));
        let refused = shortfall("Tesla V100", Capability::new(7, 0)).unwrap_err().to_string();
        assert!(refused.contains("Tesla V100 has compute capability 7.0, expected at least 8.0"), "{refused}");
        let of = |[major, minor]: [i32; 2]| Capability::new(major, minor);
        assert_eq!([[8, 9], [9, 0], [10, 0], [12, 0]].map(of).map(has_clusters), [false, true, true, true]);
        assert_eq!([[8, 0], [9, 0], [10, 0], [12, 0]].map(of).map(has_wide_shared_memory), [false, true, true, false]);
    }
}
