//! Compiles the C++ shim over libtorch and points the loader at libtorch's own folder.

#![allow(clippy::print_stdout)] // how a build script speaks to cargo

use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    println!("cargo:rerun-if-changed=src/torch/shim.cpp");
    println!("cargo:rerun-if-changed=src/torch/shim.h");
    println!("cargo:rerun-if-env-changed=DOCS_RS");
    if std::env::var_os("DOCS_RS").is_some() {
        return; // docs.rs has no libtorch, and links nothing
    }
    let libtorch = PathBuf::from(std::env::var_os("LIBTORCH").unwrap_or_else(|| ".libtorch".into()));
    let library = libtorch.join("lib/libtorch_cpu.so");
    // The real folder, not the link: libtorch_cpu.so finds libcudart beside it through $ORIGIN.
    let real = library.canonicalize().unwrap_or_else(|error| {
        panic!("{}: {error}. Run scripts/setup.sh first: it fetches libtorch 2.11.0", library.display())
    });
    let folder = real.parent().unwrap_or(Path::new("/"));
    println!("cargo::metadata=LIBTORCH={}", folder.display()); // DEP_COLO_GRPO_LIBTORCH in the build scripts of dependents
    // A package (scripts/package.sh) has libtorch at the relative place and loses the other, which is this machine's.
    println!("cargo:rustc-link-arg=-Wl,-rpath,$ORIGIN/../torch/lib:{}", folder.display());
    let include = libtorch.join("include");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .warnings(false)
        .flag("-isystem")
        .flag(include.display().to_string())
        .flag("-isystem")
        .flag(include.join("torch/csrc/api/include").display().to_string())
        .file("src/torch/shim.cpp")
        .compile("colo_grpo_shim");
}
