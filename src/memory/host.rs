//! Reads how much host memory this process uses, and how much it can still use.
//!
//! Memory that the CUDA driver pins does not count against RLIMIT_MEMLOCK, so that limit is not checked. Instead, the free bytes of the control group
//! and of the kernel are read before each GiB, because some hosts only grant memory when it is touched.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Free host memory in bytes: the kernel's estimate of what is available without swapping, limited by the control group and by this process's data
/// limit (`ulimit -d`).
///
/// # Errors
/// [`Error::Environment`] if /proc/meminfo cannot be read.
pub fn available_host_bytes() -> Result<usize> {
    let text = fs::read_to_string("/proc/meminfo")
        .map_err(|error| Error::Environment { message: format!("cannot read /proc/meminfo: {error}") })?;
    let available = parse_kib(&text, "MemAvailable:")
        .ok_or_else(|| Error::Environment { message: "/proc/meminfo has no MemAvailable".to_owned() })?;
    Ok([cgroup_bytes(), data_bytes()].into_iter().flatten().fold(available, usize::min))
}

/// Peak physical memory of this process in bytes, including shared memory.
///
/// # Errors
/// [`Error::Environment`] if /proc/self/status cannot be read.
pub fn peak_resident_bytes() -> Result<usize> {
    of_process("VmHWM:")
}

/// Physical memory of this process in bytes, including shared memory.
///
/// # Errors
/// [`Error::Environment`] if /proc/self/status cannot be read.
pub fn resident_bytes() -> Result<usize> {
    of_process("VmRSS:")
}

fn of_process(name: &str) -> Result<usize> {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let unreadable = || Error::Environment { message: format!("/proc/self/status has no {name}") };
    parse_kib(&text, name).ok_or_else(unreadable)
}

/// Parses the line of a `/proc` file that starts with `name`, in bytes.
fn parse_kib(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? * 1024)
}

/// Bytes left under the tightest memory limit of the process's control groups (cgroup v2); `None` without limits.
fn cgroup_bytes() -> Option<usize> {
    let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = membership.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = PathBuf::from("/sys/fs/cgroup");
    let folder = root.join(own);
    folder.ancestors().take_while(|folder| folder.starts_with(&root)).filter_map(limit_leaves).min()
}

/// Bytes left under this process's limit for writable memory; `None` without a limit.
fn data_bytes() -> Option<usize> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let soft = limits.lines().find_map(|line| line.strip_prefix("Max data size"))?.split_whitespace().next()?;
    let held = parse_kib(&fs::read_to_string("/proc/self/status").ok()?, "VmData:")?;
    Some(soft.parse::<usize>().ok()?.saturating_sub(held))
}

/// Bytes left under one control group's limit. Cached file pages, such as weights that were read, count as used there, but the kernel drops them on
/// demand.
fn limit_leaves(folder: &Path) -> Option<usize> {
    let text = |name| fs::read_to_string(folder.join(name)).ok();
    let number = |name| text(name)?.trim().parse::<usize>().ok();
    let limit = number("memory.max")?;
    let stat = text("memory.stat").unwrap_or_default();
    let bytes = |line: &str| line.split_once("active_file ")?.1.parse::<usize>().ok(); // active and inactive ones
    let cached: usize = stat.lines().filter_map(bytes).sum();
    Some(limit.saturating_sub(number("memory.current")?.saturating_sub(cached)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_values_are_parsed_in_bytes() {
        let meminfo = "MemTotal: 9 kB\nMemAvailable:   1024 kB\nBuffers: 1 kB\n";
        assert_eq!(parse_kib(meminfo, "MemAvailable:"), Some(1 << 20));
        assert_eq!(parse_kib("MemTotal: 9 kB\n", "MemAvailable:"), None);
        let available = available_host_bytes().unwrap();
        assert!(available > 1 << 20, "{available}");
        let held = vec![1u8; 32 << 20];
        assert!(peak_resident_bytes().unwrap() > held.iter().map(|&byte| usize::from(byte)).sum());
    }

    #[test]
    fn page_cache_does_not_count_against_a_cgroup_limit() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        assert_eq!(limit_leaves(folder.path()), None);
        write("memory.max", "1000\n");
        write("memory.current", "900\n");
        assert_eq!(limit_leaves(folder.path()), Some(100));
        write("memory.stat", "anon 200\nfile 700\ninactive_anon 9\nactive_file 50\ninactive_file 600\n");
        assert_eq!(limit_leaves(folder.path()), Some(750));
        write("memory.max", "max\n");
        assert_eq!(limit_leaves(folder.path()), None);
    }
}
