//! Loads libtorch's CUDA libraries, and makes sure that only one NCCL is loaded.
//!
//! The program links only libtorch_cpu and libc10, so it starts on any machine. If there is a GPU, libc10_cuda.so and libtorch_cuda.so are opened
//! before the first tensor is created; they register themselves with the libraries already loaded.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::cuda::devices;
use crate::error::{Error, Result};

/// Environment variable with the folder of libtorch_cuda.so in a PyTorch 2.11.0 installation. By default the folder of libtorch_cpu.so is searched.
pub(super) const FOLDER_VARIABLE: &str = "COLO_GRPO_TORCH_CUDA";

/// Loads libtorch's CUDA libraries, once.
///
/// # Errors
/// [`Error::Environment`] that states what is missing: a GPU, the library, or a unique NCCL.
pub fn require() -> Result<()> {
    static OUTCOME: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    OUTCOME
        .get_or_init(|| load().map_err(|error| error.to_string()))
        .clone()
        .map_err(|message| Error::Environment { message })
}

fn load() -> Result<()> {
    if devices()?.is_empty() {
        return Err(environment("no GPU is visible: device=cuda needs an NVIDIA driver and a GPU"));
    }
    let folder = match std::env::var_os(FOLDER_VARIABLE) {
        Some(folder) => PathBuf::from(folder),
        None => mapped_files("libtorch_cpu.so")?
            .first()
            .and_then(|library| library.parent().map(Path::to_owned))
            .ok_or_else(|| environment("cannot find the file of libtorch_cpu.so among the loaded libraries"))?,
    };
    for name in ["libc10_cuda.so", "libtorch_cuda.so"] {
        open(&folder.join(name))?;
    }
    share_nccl(&folder)?;
    if !tch::Cuda::is_available() {
        return Err(environment("libtorch_cuda.so was loaded, but libtorch finds no usable GPU"));
    }
    Ok(())
}

/// Opens a library permanently, with its symbols visible to all others.
pub(super) fn open(path: &Path) -> Result<()> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| environment("a path with a NUL byte"))?;
    // SAFETY: loads a library of the installation that the user named; it is never closed.
    if unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) }.is_null() {
        // SAFETY: after a failed dlopen, dlerror gives a NUL-terminated string of this thread.
        let reason = unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy();
        return Err(environment(&format!(
            "{reason}; {FOLDER_VARIABLE} names the torch/lib folder of a PyTorch 2.11.0 installation for CUDA 13"
        )));
    }
    Ok(())
}

/// Makes cudarc use the NCCL that libtorch has loaded. cudarc opens `libnccl.so`, a name that PyTorch's wheels do not contain. So this creates a link
/// of that name beside libtorch_cpu.so, on this program's run path, to the loaded file. If two different NCCLs were loaded, every communicator would
/// fail.
fn share_nccl(torch: &Path) -> Result<()> {
    let Some(nccl) = mapped_files("libnccl.so")?.into_iter().next() else {
        return Err(environment(&format!(
            "libtorch_cuda.so in {} did not load NCCL: use a PyTorch build with NCCL",
            torch.display()
        )));
    };
    let beside = mapped_files("libtorch_cpu.so")?.first().and_then(|library| library.parent().map(Path::to_owned));
    let link = beside.unwrap_or_else(|| torch.to_owned()).join("libnccl.so");
    if std::fs::read_link(&link).ok().as_deref() != Some(nccl.as_path()) {
        // Ranks may do this at the same time: the last rename wins, and all links are equal.
        let draft = link.with_extension(std::process::id().to_string());
        let made = std::os::unix::fs::symlink(&nccl, &draft).and_then(|()| std::fs::rename(&draft, &link));
        made.map_err(|error| {
            let (link, nccl) = (link.display(), nccl.display());
            environment(&format!(
                "cannot create the symbolic link {link} to {nccl}: {error}; create it once as a user who may write there"
            ))
        })?;
    }
    // SAFETY: opens what the link above leads to, already loaded.
    unsafe { cudarc::nccl::sys::culib() };
    let loaded = mapped_files("libnccl.so")?;
    if loaded.len() > 1 {
        return Err(environment(&format!(
            "two NCCL libraries are loaded, {loaded:?}: remove the folder of the second from LD_LIBRARY_PATH"
        )));
    }
    Ok(())
}

/// Files mapped into this process whose names start with `prefix`.
pub(super) fn mapped_files(prefix: &str) -> Result<BTreeSet<PathBuf>> {
    let maps = std::fs::read_to_string("/proc/self/maps").map_err(Error::io("/proc/self/maps"))?;
    let files = maps.lines().filter_map(|line| line.find('/').map(|start| Path::new(&line[start..])));
    let matches = |file: &&Path| file.file_name().is_some_and(|name| name.as_bytes().starts_with(prefix.as_bytes()));
    Ok(files.filter(matches).map(Path::to_owned).collect())
}

pub(super) fn environment(message: &str) -> Error {
    Error::Environment { message: message.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtorch_cpu_is_found_in_the_folder_it_was_loaded_from() {
        tch::set_num_threads(1);
        let files = mapped_files("libtorch_cpu.so").unwrap();
        assert_eq!(files.len(), 1);
        assert!(files.first().unwrap().is_file());
    }

    #[test]
    fn a_missing_cuda_library_is_named() {
        let error = open(Path::new("/nowhere/libtorch_cuda.so")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/libtorch_cuda.so") && error.contains(FOLDER_VARIABLE), "{error}");
    }

    #[test]
    fn without_a_gpu_cuda_is_unavailable_with_a_reason() {
        if devices().unwrap().is_empty() {
            assert!(require().is_err());
            assert!(require().unwrap_err().to_string().contains("no GPU is visible"));
        }
    }
}
