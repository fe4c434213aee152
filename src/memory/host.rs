//! How much host memory this process may still use, and how much it has used.

use std::fs;
use std::path::PathBuf;

use crate::error::{Error, Result};

/// Free host memory in bytes: what the kernel says can be had without swapping, and no more than the control group leaves.
///
/// # Errors
/// [`Error::Environment`] where /proc/meminfo cannot be read.
pub fn available_host_bytes() -> Result<usize> {
    let text = fs::read_to_string("/proc/meminfo")
        .map_err(|error| Error::Environment { message: format!("/proc/meminfo: {error}") })?;
    let available = parse_kib(&text, "MemAvailable:")
        .ok_or_else(|| Error::Environment { message: "/proc/meminfo has no MemAvailable".to_owned() })?;
    Ok(cgroup_bytes().map_or(available, |limit| limit.min(available)))
}

/// The most bytes of physical memory that this process has held at once, shared ones included.
///
/// # Errors
/// [`Error::Environment`] where /proc/self/status cannot be read.
pub fn peak_resident_bytes() -> Result<usize> {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let unreadable = || Error::Environment { message: "/proc/self/status has no VmHWM".to_owned() };
    parse_kib(&text, "VmHWM:").ok_or_else(unreadable)
}

/// Bytes on the line of `/proc` text that starts with `name`.
fn parse_kib(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? * 1024)
}

/// What the tightest limit above this process (cgroup v2) leaves; `None` without limits.
fn cgroup_bytes() -> Option<usize> {
    let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = membership.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = PathBuf::from("/sys/fs/cgroup");
    let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<usize>().ok();
    let left = |folder: &std::path::Path| {
        let limit = number(folder.join("memory.max"))?;
        Some(limit.saturating_sub(number(folder.join("memory.current"))?))
    };
    let folder = root.join(own);
    folder.ancestors().take_while(|folder| folder.starts_with(&root)).filter_map(left).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_s_number_is_read_in_bytes() {
        let meminfo = "MemTotal: 9 kB\nMemAvailable:   1024 kB\nBuffers: 1 kB\n";
        assert_eq!(parse_kib(meminfo, "MemAvailable:"), Some(1 << 20));
        assert_eq!(parse_kib("MemTotal: 9 kB\n", "MemAvailable:"), None);
        let available = available_host_bytes().unwrap();
        assert!(available > 1 << 20, "{available}");
        let held = vec![1u8; 32 << 20];
        assert!(peak_resident_bytes().unwrap() > held.iter().map(|&byte| usize::from(byte)).sum());
    }
}
