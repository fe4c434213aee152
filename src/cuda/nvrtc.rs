//! Compiles `src/kernels/*.cu` at run time, once per source, architecture and compiler version. The cubins come from the installed package, or are
//! kept in the user's cache folder.
#![allow(unsafe_code)]

mod sources;

use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

use cudarc::nvrtc::{result, sys};

pub(super) use self::sources::*;
use super::cache;
use super::capability::Capability;
use super::library::{self, FOLDER_VARIABLE, environment, mapped_files};
use crate::console::Progress;
use crate::error::{Error, Result};
use crate::types::Place;

/// Compiler options in addition to the architecture.
const OPTIONS: [&str; 2] = ["--std=c++17", "--extra-device-vectorization"];

/// Machine code of `source` for a compute capability: from the installed package, from the cache, or compiled now.
///
/// # Errors
/// [`Error::Environment`] without NVRTC, or with the compiler's log.
pub(super) fn cubin(source: &KernelSource, capability: Capability) -> Result<Vec<u8>> {
    let packaged = cache::packaged(&file_name(source, capability)?).and_then(|path| std::fs::read(path).ok());
    if let Some(image) = packaged.and_then(machine_code_of) {
        return Ok(image);
    }
    let path = cubin_path(source, capability)?;
    if let Some(image) = cache::read(&path, machine_code_of)? {
        return Ok(image);
    }
    static SAID: Once = Once::new();
    SAID.call_once(|| tracing::info!("compiling CUDA kernels, once for this GPU and compiler"));
    let image = compile(source, capability)?;
    cache::keep(&path, &image, &format!("{} has to be compiled", source.file));
    Ok(image)
}

/// Compiles the sources that the cache lacks, in parallel on this rank's share of the CPU cores; in sequence they would take most of a minute. The
/// ranks of a machine start at different sources, and find in the cache what another rank has compiled meanwhile.
///
/// # Errors
/// Returns the first error of [`cubin`].
pub(super) fn compile_all(
    sources: impl Iterator<Item = &'static KernelSource>,
    capability: Capability,
    place: Place,
) -> Result<()> {
    let mut missing = Vec::new();
    for source in sources {
        let is_packaged = cache::packaged(&file_name(source, capability)?).is_some();
        if !is_packaged && !cubin_path(source, capability)?.exists() {
            missing.push(source);
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (processors / place.size).clamp(1, missing.len());
    let first = place.share(missing.len()).start % missing.len();
    missing.rotate_left(first);
    let (next, num_done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let progress = Progress::new("kernels", "compiled");
    progress.tell(0, missing.len() as u64);
    let compile_some = || {
        while let Some(source) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
            cubin(source, capability)?;
            progress.tell(num_done.fetch_add(1, Ordering::Relaxed) + 1, missing.len() as u64);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(compile_some)).collect();
        let outcomes = workers.into_iter().map(|worker| match worker.join() {
            Ok(outcome) => outcome,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        outcomes.collect()
    })
}

fn cubin_path(source: &KernelSource, capability: Capability) -> Result<PathBuf> {
    cache::path("cubin", source.file.trim_end_matches(".cu"), &key(source, capability)?)
}

/// Name of the cubin file for `source`, in the cache and in packages.
pub(super) fn file_name(source: &KernelSource, capability: Capability) -> Result<String> {
    Ok(cache::file_name("cubin", source.file.trim_end_matches(".cu"), &key(source, capability)?))
}

/// Returns a file's bytes if they start like an ELF image.
fn machine_code_of(bytes: Vec<u8>) -> Option<Vec<u8>> {
    bytes.starts_with(b"\x7fELF").then_some(bytes)
}

/// The cache key of a cubin: everything that the machine code of `source` depends on.
///
/// # Errors
/// [`Error::Environment`] without NVRTC.
pub(super) fn key(source: &KernelSource, capability: Capability) -> Result<String> {
    Ok(key_of(source, capability, version()?))
}

fn key_of(source: &KernelSource, capability: Capability, version: (c_int, c_int)) -> String {
    let headers = HEADERS.map(|header| header.1).concat();
    format!("{} {version:?} {OPTIONS:?}\n{headers}\n{}", architecture(capability), source.text)
}

/// The compiler's name of the architecture. For Hopper it selects the instructions that no later GPU has (`sm_90a`).
fn architecture(capability @ Capability { major, minor }: Capability) -> String {
    let own = if capability == Capability::HOPPER { "a" } else { "" };
    format!("sm_{major}{minor}{own}")
}

fn compile(source: &KernelSource, capability: Capability) -> Result<Vec<u8>> {
    open_library()?;
    let c_text = |text: &str| CString::new(text).map_err(|_| environment("a kernel source with a NUL byte"));
    let (text, name) = (c_text(source.text)?, c_text(source.file)?);
    let texts: Vec<CString> = HEADERS.iter().map(|header| c_text(header.1)).collect::<Result<_>>()?;
    let headers: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
    let names = HEADERS.map(|header| header.0.as_ptr());
    let mut program = std::ptr::null_mut();
    // SAFETY: the strings outlive the program, which is destroyed below.
    let created = unsafe {
        sys::nvrtcCreateProgram(
            &raw mut program,
            text.as_ptr(),
            name.as_ptr(),
            HEADERS.len() as c_int,
            headers.as_ptr(),
            names.as_ptr(),
        )
    };
    created.result().map_err(|error| environment(&format!("nvrtcCreateProgram: {error}")))?;
    let architecture = architecture(capability);
    let options: Vec<String> =
        std::iter::once(format!("--gpu-architecture={architecture}")).chain(OPTIONS.map(str::to_owned)).collect();
    // SAFETY: the program was created above.
    let outcome = unsafe { result::compile_program(program, &options) }.map_err(|error| {
        // SAFETY: as above.
        let log = unsafe { result::get_program_log(program) }.unwrap_or_default();
        let log: Vec<u8> = log.into_iter().map(|byte| byte as u8).take_while(|&byte| byte != 0).collect();
        let message = format!("{} for {architecture}: {error}\n{}", source.file, String::from_utf8_lossy(&log));
        Error::out_of_memory(&message).unwrap_or_else(|| environment(&message))
    });
    // SAFETY: compiled above.
    let image = outcome.and_then(|()| unsafe { machine_code(program) });
    // SAFETY: created above and not used after this.
    let _ = unsafe { result::destroy_program(program) };
    image
}

/// Returns the cubin of a compiled program.
///
/// # Safety
/// `program` was compiled for a real architecture and is not destroyed.
unsafe fn machine_code(program: sys::nvrtcProgram) -> Result<Vec<u8>> {
    let failed = |error| environment(&format!("nvrtcGetCUBIN: {error}"));
    let mut bytes = 0;
    // SAFETY: the caller's promise.
    unsafe { sys::nvrtcGetCUBINSize(program, &raw mut bytes) }.result().map_err(failed)?;
    let mut image = vec![0u8; bytes];
    // SAFETY: the caller's promise; the image has the size asked for.
    unsafe { sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()) }.result().map_err(failed)?;
    Ok(image)
}

/// The version of NVRTC, as (major, minor).
fn version() -> Result<(c_int, c_int)> {
    open_library()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both numbers outlive the call.
    let asked = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    asked.result().map_err(|error| environment(&format!("nvrtcVersion: {error}")))?;
    Ok((major, minor))
}

/// Opens NVRTC, once: from the wheels that libtorch came with, or else the one that the loader finds.
fn open_library() -> Result<()> {
    static OUTCOME: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    let outcome = OUTCOME.get_or_init(|| {
        if let Some(folder) = library_folders().map_err(|error| error.to_string())? {
            // NVRTC opens its builtins library by file name, so that must be loaded first.
            for prefix in ["libnvrtc-builtins.so.", "libnvrtc.so."] {
                for file in files(&folder, prefix) {
                    library::open(&file).map_err(|error| error.to_string())?;
                }
            }
        }
        // SAFETY: opens the compiler's library, whose initialisers are its vendor's.
        match unsafe { sys::is_culib_present() } {
            true => Ok(()),
            false => Err(format!(
                "libnvrtc.so.13, which compiles the CUDA kernels, was not found: install nvidia-cuda-nvrtc 13 beside \
                 PyTorch, name PyTorch's torch/lib folder in {FOLDER_VARIABLE}, or put it on LD_LIBRARY_PATH"
            )),
        }
    });
    outcome.clone().map_err(|message| Error::Environment { message })
}

/// The first existing folder nvidia/cu13/lib beside a torch/lib folder that is in use.
fn library_folders() -> Result<Option<PathBuf>> {
    let named = std::env::var_os(FOLDER_VARIABLE).map(|folder| PathBuf::from(folder).join("libtorch_cuda.so"));
    let loaded = mapped_files("libtorch_c")?;
    let libraries = named.into_iter().chain(loaded);
    let mut folders = libraries.filter_map(|library| {
        let site = library.canonicalize().unwrap_or(library).parent()?.parent()?.parent()?.to_owned();
        Some(site.join("nvidia/cu13/lib"))
    });
    Ok(folders.find(|folder| folder.is_dir()))
}

fn files(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    files.map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::image::kernels;
    use super::super::kernels::KERNELS;
    use super::*;

    /// A GPU without the instructions that only Hopper has.
    const LATER: Capability = Capability::new(10, 0);
    /// The supported compute capabilities, ascending. Machine code comes from the user's cache if an earlier run compiled the same source with the
    /// same compiler, so only changed sources take time.
    const SERVED: [Capability; 5] =
        [Capability::new(8, 0), Capability::new(8, 9), Capability::HOPPER, LATER, Capability::new(12, 0)];

    /// The lines of a source, and of the headers that it includes, that depend on the GPU.
    fn conditions(source: &KernelSource) -> Vec<&'static str> {
        let (mut open, mut texts) = (vec![source.text], Vec::new());
        while let Some(text) = open.pop() {
            let names = text.lines().filter_map(|line| line.trim().strip_prefix("#include \"")?.split('"').next());
            let headers = names.map(|name| {
                let header = HEADERS.iter().find(|header| header.0.to_str() == Ok(name));
                header.unwrap_or_else(|| panic!("{} includes {name}", source.file)).1
            });
            open.extend(headers.filter(|header| !texts.contains(header)));
            texts.push(text);
        }
        texts.into_iter().flat_map(str::lines).map(str::trim).filter(|line| line.contains("__CUDA_ARCH")).collect()
    }

    fn holds(condition: &str, capability: Capability) -> bool {
        let architecture = 100 * capability.major + 10 * capability.minor;
        match condition.split_whitespace().collect::<Vec<_>>()[..] {
            ["#ifdef", "__CUDA_ARCH_FEAT_SM90_ALL"] => capability == Capability::HOPPER,
            ["#if", "__CUDA_ARCH__", ">=", least] => architecture >= least.parse().unwrap(),
            ["#if", "__CUDA_ARCH__", "<", above] => architecture < above.parse().unwrap(),
            _ => panic!("`{condition}`: the test must know in which GPUs this holds"),
        }
    }

    /// Whether an earlier compute capability gets the same text of a source. It then compiles for both or neither, as PTX for the earlier one is valid
    /// for the later one; PTX for Hopper alone is not.
    fn is_same_for_earlier(source: &KernelSource, capability: Capability) -> bool {
        let is_same = |earlier: &Capability| {
            let agree = |line: &&str| holds(line, *earlier) == holds(line, capability);
            *earlier != Capability::HOPPER && conditions(source).iter().all(agree)
        };
        let mut earlier = SERVED.iter().take_while(|one| **one != capability);
        capability != Capability::HOPPER && earlier.any(is_same)
    }

    /// The kernels that wrappers name for a source, and load at start on every GPU.
    fn listed(source: &KernelSource) -> BTreeSet<String> {
        let own = KERNELS.iter().find(|(own, _)| own.file == source.file);
        own.unwrap_or_else(|| panic!("{} has no kernels", source.file)).1.iter().map(|&name| name.to_owned()).collect()
    }

    fn check(sources: impl Iterator<Item = &'static KernelSource>, capability: Capability) {
        tch::set_num_threads(1); // links libtorch; NVRTC is found beside it
        let sources: Vec<_> = sources.collect();
        compile_all(sources.iter().copied(), capability, Place { rank: 1, size: 2 })
            .unwrap_or_else(|error| panic!("{capability}: {error}"));
        for source in sources {
            let image = cubin(source, capability).unwrap_or_else(|error| panic!("{capability}: {error}"));
            assert_eq!(kernels(&image), listed(source), "{} for {capability}", source.file);
            assert!(machine_code_of(image).is_some(), "{} for {capability}", source.file);
        }
    }

    fn check_texts_of(capability: Capability) {
        check(SOURCES.iter().copied().filter(|source| !is_same_for_earlier(source, capability)), capability);
    }

    #[test]
    fn every_kernel_source_is_compiled_by_these_tests() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernels");
        let mut known: Vec<_> = SOURCES.iter().map(|source| source.file.to_owned()).collect();
        let files = files(&folder, "").into_iter().filter(|file| file.extension().is_some_and(|kind| kind == "cu"));
        let mut found: Vec<_> =
            files.filter_map(|file| Some(file.file_name()?.to_string_lossy().into_owned())).collect();
        known.sort();
        found.sort();
        assert_eq!(known, found, "every file of src/kernels must be compiled here");
        assert_eq!(machine_code_of(Vec::new()), None, "a file that was torn");
        let again = |capability| SOURCES.iter().filter(|source| is_same_for_earlier(source, capability)).count();
        let num_again = SERVED.map(again);
        let all = SOURCES.len();
        assert_eq!([num_again[0], num_again[2], num_again[4]], [0, 0, all], "8.0 and Hopper have texts of their own");
        assert!((1..all).contains(&num_again[1]) && num_again[3] < all / 2, "{num_again:?} of {all}");
        assert!(!is_same_for_earlier(&FP8_COLUMNS, SERVED[1]), "8.9 has instructions for FP8");
    }

    #[test]
    fn every_kernel_compiles_for_compute_capability_8_0() {
        check_texts_of(SERVED[0]);
    }

    #[test]
    fn every_kernel_compiles_for_compute_capability_8_9() {
        check_texts_of(SERVED[1]);
    }

    #[test]
    fn every_kernel_compiles_for_hopper_and_uses_its_instructions() {
        check_texts_of(Capability::HOPPER);
        let [hopper, later] = [Capability::HOPPER, LATER].map(|capability| cubin(&PRODUCT, capability).unwrap().len());
        assert!(hopper > 2 * later, "{hopper} bytes of kernels, {later} where they are empty");
    }

    #[test]
    fn every_kernel_compiles_for_compute_capability_10_0_and_later() {
        check_texts_of(LATER);
        check_texts_of(SERVED[4]);
    }

    #[test]
    #[ignore = "compiles equal texts for later GPUs, too; scripts/scheduled.sh runs it"]
    fn every_kernel_compiles_for_every_gpu() {
        SERVED.into_iter().for_each(|capability| check(SOURCES.iter().copied(), capability));
    }

    #[test]
    fn cache_keys_depend_on_architecture_compiler_and_source() {
        let known = key_of(&PRODUCT, Capability::HOPPER, (13, 0));
        assert!(known.starts_with("sm_90a ") && known.contains(PRODUCT.text));
        for other in [
            key_of(&PRODUCT, LATER, (13, 0)),
            key_of(&PRODUCT, Capability::HOPPER, (13, 1)),
            key_of(&ADAPT, Capability::HOPPER, (13, 0)),
        ] {
            assert_ne!(known, other);
        }
    }

    #[test]
    fn compile_errors_show_the_source_line() {
        tch::set_num_threads(1);
        let broken = KernelSource { file: "broken.cu", text: "extern \"C\" __global__ void f() {\n  nonsense;\n}" };
        let message = compile(&broken, Capability::HOPPER).unwrap_err().to_string();
        assert!(message.contains("broken.cu(2)") && message.contains("nonsense"), "{message}");
    }
}
