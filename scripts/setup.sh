#!/usr/bin/env bash
# Fetches libtorch 2.11.0 once into the user's cache and links it as ./.libtorch.
# No CUDA install is needed: libtorch_cpu.so wants only libcudart and libcupti beside it. On a GPU machine the
# CUDA half is opened at run time from a PyTorch 2.11.0 installation.
#   scripts/setup.sh            (COLO_GRPO_CACHE names another cache, PYTHON another interpreter)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cache=${COLO_GRPO_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/colo-grpo}
home=$cache/libtorch-2.11.0
python=${PYTHON:-python3}

need() { command -v "$1" >/dev/null || { echo "setup: '$1' is missing: $2" >&2; exit 4; }; }
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "setup: this is $(uname -sm): libtorch is fetched for Linux x86_64" >&2; exit 4; }
need "$python" "install Python 3.9 or later with pip"
need cargo "install Rust 1.88 or later"
need c++ "install a C++17 compiler, such as g++"

if [ ! -f "$home/.complete" ]; then
    echo "setup: fetching libtorch 2.11.0 into $home (about 540 MB, once)"
    rm -rf "$home"
    mkdir -p "$home" "$cache/wheels"
    platforms=()
    for tag in manylinux_2_{28,27,26,25,24,17,12,5}_x86_64 manylinux2014_x86_64 manylinux2010_x86_64 manylinux1_x86_64; do
        platforms+=(--platform "$tag")
    done
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version 3.12 --implementation cp "${platforms[@]}" --dest "$cache/wheels" \
        --require-hashes --requirement "$root/scripts/libtorch.txt"
    "$python" - "$cache/wheels" "$home" <<'PY'
import pathlib, sys, zipfile
wheels, home = map(pathlib.Path, sys.argv[1:])
def unpack(pattern, wanted):
    (wheel,) = wheels.glob(pattern)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if wanted(name):
                archive.extract(name, home)
libraries = {"libtorch_cpu.so", "libc10.so", "libtorch.so", "libtorch_global_deps.so", "libshm.so"}
unpack("torch-2.11.0-*.whl", lambda n: n.startswith("torch/include/")
       or n.startswith("torch/lib/libgomp") or n.rsplit("/", 1)[-1] in libraries)
unpack("nvidia_cuda_runtime-13.0.96-*.whl", lambda n: ".so" in n)
unpack("nvidia_cuda_cupti-13.0.85-*.whl", lambda n: "libcupti.so" in n)
unpack("nvidia_cuda_nvrtc-13.0.88-*.whl", lambda n: ".so" in n)
PY
    # The folder shown to torch-sys has the CPU half alone, so that the binary starts without CUDA.
    mkdir -p "$home/sdk/lib"
    for name in libtorch_cpu.so libc10.so; do ln -s "../../torch/lib/$name" "$home/sdk/lib/$name"; done
    ln -s ../../torch/lib/libtorch_cpu.so "$home/sdk/lib/libtorch.so"
    ln -s ../torch/include "$home/sdk/include"
    echo 2.11.0 >"$home/sdk/build-version"
    touch "$home/.complete"
fi
ln -sfn "$home/sdk" "$root/.libtorch"
