//! Allocates host memory close to a GPU, on machines with several NUMA nodes.
#![allow(unsafe_code)]

use std::path::Path;

/// The NUMA node that a PCI device is attached to; `None` if the machine has one node or does not report it.
pub(super) fn node_of_pci_device(address: &str) -> Option<usize> {
    node_in(&Path::new("/sys/bus/pci/devices").join(address))
}

/// Runs `allocate` while this thread's new pages preferably come from NUMA node `node`.
pub(super) fn on_node<T>(node: Option<usize>, allocate: impl FnOnce() -> T) -> T {
    let Some(node) = node else { return allocate() };
    let is_set = set_policy(MPOL_PREFERRED, node);
    let allocated = allocate();
    if is_set {
        set_policy(MPOL_DEFAULT, node);
    }
    allocated
}

const MPOL_DEFAULT: libc::c_long = 0;
const MPOL_PREFERRED: libc::c_long = 1;
/// Number of nodes in a mask: the kernel's own limit.
const MAX_NODES: usize = 1024;

/// Sets this thread's memory policy. Returns false if the kernel refuses; memory then comes from any node.
fn set_policy(policy: libc::c_long, node: usize) -> bool {
    let mut mask = [0u64; MAX_NODES / 64];
    if policy != MPOL_DEFAULT && node < MAX_NODES {
        mask[node / 64] = 1 << (node % 64);
    }
    // SAFETY: the mask outlives the call, which reads at most the bits named; the policy is this thread's alone.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, policy, mask.as_ptr(), MAX_NODES) == 0 }
}

fn node_in(device: &Path) -> Option<usize> {
    std::fs::read_to_string(device.join("numa_node")).ok()?.trim().parse().ok() // -1: unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numa_node_of_a_device_is_parsed() {
        let device = tempfile::tempdir().unwrap();
        assert_eq!(node_in(device.path()), None);
        for (text, node) in [("-1\n", None), ("0\n", Some(0)), ("3\n", Some(3))] {
            std::fs::write(device.path().join("numa_node"), text).unwrap();
            assert_eq!(node_in(device.path()), node);
        }
    }

    #[test]
    fn memory_is_allocated_on_a_numa_node_and_the_policy_is_restored() {
        let touched = on_node(Some(0), || vec![1u8; 1 << 20]);
        assert_eq!(touched.iter().map(|&byte| usize::from(byte)).sum::<usize>(), 1 << 20);
        assert_eq!(on_node(None, || 7), 7);
        let mut policy: libc::c_int = -1;
        // SAFETY: the policy outlives the call; no mask is asked for.
        let asked = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut policy, 0, 0, 0, 0) };
        assert!(asked != 0 || policy == MPOL_DEFAULT as libc::c_int, "{policy}");
    }
}
