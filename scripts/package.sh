#!/usr/bin/env bash
# Makes packages of the release build: an archive that runs from any folder with the libtorch inside it, and a Python wheel whose
# program takes the PyTorch 2.11 that pip installs beside it. Nothing is to be exported for either.
#   scripts/package.sh [FOLDER [KINDS]]    FOLDER: target/package; KINDS: some of "wheel tree archive", default "wheel archive"
# `tree` is the archive's folder alone. PROGRAM names the program, target/release/colo-grpo unless it is set. SITE, a site-packages folder with
# PyTorch 2.11 for CUDA 13, puts the CUDA libraries into the archive, too; without it the archive's libtorch is for CPUs. CHIPS, "8.0 9.0"
# unless it is set, are the compute capabilities whose kernels come compiled (a minute each, once); others compile them at their first start.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(realpath -m "${1:-$root/target/package}")
kinds=${2:-wheel archive}
python=${PYTHON:-python3}
program=${PROGRAM:-${CARGO_TARGET_DIR:-$root/target}/release/colo-grpo}
[ -n "${PROGRAM:-}" ] || (cd "$root" && cargo build --release)
[ -x "$program" ] || { echo "package: $program: no program; cargo build --release makes it" >&2; exit 4; }
mkdir -p "$folder"
kernels=$(mktemp -d)
trap 'rm -rf "$kernels"' EXIT
read -ra chips <<<"${CHIPS-8.0 9.0}"
[ ${#chips[@]} = 0 ] || "$program" package-kernels --output "$kernels" "${chips[@]}" >&2

"$python" - "$root" "$program" "$folder" "$kinds" "${SITE:-}" "$kernels" <<'PY'
import base64, hashlib, os, pathlib, re, shutil, subprocess, sys, tarfile, zipfile

root, program, folder = map(pathlib.Path, sys.argv[1:4])
kinds, site = sys.argv[4].split(), sys.argv[5]
kernels = sorted(pathlib.Path(sys.argv[6]).iterdir())
manifest = (root / "Cargo.toml").read_text()
field = lambda name: re.search(rf'^{name} = "(.*)"$', manifest, re.M)[1]
version, summary = field("version"), field("description")


def portable(data):
    """The program without the build's own folder in its run path, which begins with a path relative to the program."""
    relative = b"$ORIGIN/../torch/lib"
    places = [found.start() for found in re.finditer(re.escape(relative) + b":[^\0]*\0", data)]
    if len(places) != 1:
        sys.exit(f"package: {program}: expected one run path that begins with {relative.decode()}, found {len(places)}")
    start = places[0] + len(relative)
    end = data.index(b"\0", start)
    return data[:start] + bytes(end - start) + data[end:]


def glibc(path):
    """The oldest glibc that has all that the program asks for."""
    said = subprocess.run(["objdump", "-T", path], capture_output=True, text=True, check=True).stdout
    return max((tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_(\d+\.\d+)", said)), default=(2, 28))


def license_files():
    return [root / name for name in ("LICENSE-APACHE", "LICENSE-MIT")]


data = portable(program.read_bytes())


def wheel():
    info = f"colo_grpo-{version}.dist-info"
    tag = "py3-none-manylinux_{}_{}_x86_64".format(*glibc(program))
    path = folder / f"colo_grpo-{version}-{tag}.whl"
    metadata = (
        f"Metadata-Version: 2.1\nName: colo-grpo\nVersion: {version}\nSummary: {summary}\nLicense: MIT OR Apache-2.0\n"
        "Requires-Python: >=3.10\nRequires-Dist: torch==2.11.*\nDescription-Content-Type: text/markdown\n\n"
    )
    files = {
        "colo_grpo/__init__.py": (root / "scripts/wheel.py").read_bytes(),
        "colo_grpo/__main__.py": b"from colo_grpo import main\n\nmain()\n",
        "colo_grpo/colo-grpo": data,
        **{f"colo_grpo/kernels/{kernel.name}": kernel.read_bytes() for kernel in kernels},
        f"{info}/METADATA": (metadata + (root / "README.md").read_text()).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: colo-grpo\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        f"{info}/entry_points.txt": b"[console_scripts]\ncolo-grpo = colo_grpo:main\n",
        **{f"{info}/licenses/{file.name}": file.read_bytes() for file in license_files()},
    }
    digest = lambda text: base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
    record = "".join(f"{name},sha256={digest(text)},{len(text)}\n" for name, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    level = int(os.environ.get("PACKAGE_LEVEL", "6"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)  # its time is fixed: the same program gives the same wheel
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name.endswith("/colo-grpo") else 0o100644) << 16
            archive.writestr(entry, text)
    print(path)


def place(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def tree():
    name = f"colo-grpo-{version}-linux-x86_64" + ("-cuda13" if site else "")
    top = folder / name
    shutil.rmtree(top, ignore_errors=True)
    (top / "bin").mkdir(parents=True)
    (top / "bin/colo-grpo").write_bytes(data)
    (top / "bin/colo-grpo").chmod(0o755)
    torch = (root / ".libtorch/lib/libtorch_cpu.so").resolve().parent
    home = pathlib.Path(site) if site else torch.parent.parent
    libraries = sorted((home / "torch/lib").glob("*.so*")) + sorted((home / "nvidia").glob("*/lib/*.so*"))
    for library in libraries:
        if library.name != "libnccl.so":  # a link that the program makes for itself
            place(library.resolve(), top / library.relative_to(home))
    for file in [root / "README.md", *license_files()]:
        shutil.copyfile(file, top / file.name)
    for kernel in kernels:
        place(kernel, top / "kernels" / kernel.name)
    shutil.copytree(root / "configs", top / "configs")
    return top


if unknown := set(kinds) - {"wheel", "tree", "archive"}:
    sys.exit(f"package: {', '.join(sorted(unknown))}: expected some of wheel, tree, archive")
if "wheel" in kinds:
    wheel()
if {"tree", "archive"} & set(kinds):
    top = tree()
    if "archive" in kinds:
        path = folder / f"{top.name}.tar.gz"
        with tarfile.open(path, "w:gz", compresslevel=6, dereference=True) as archive:
            archive.add(top, top.name)
        shutil.rmtree(top)
        print(path)
    else:
        print(top)
PY
