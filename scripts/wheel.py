"""Starts colo-grpo with the libraries of the PyTorch that is installed with it (wheel.py of the sources, the wheel's only module)."""

import importlib.metadata
import importlib.util
import os
import pathlib
import sys

WANTED = "2.11."
ENVIRONMENT = 4  # the program's exit code for an environment that it cannot run in


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(ENVIRONMENT)


def environment(program):
    """The variables that the program needs beside those that are set: none where PyTorch lies beside it."""
    spec = importlib.util.find_spec("torch")  # found, not imported
    if spec is None or not spec.submodule_search_locations:
        fail("PyTorch is not installed in this Python: pip install 'torch==2.11.*'")
    version = importlib.metadata.version("torch")
    if not version.startswith(WANTED):
        fail(f"PyTorch {version} is installed, expected {WANTED}*: pip install 'torch==2.11.*'")
    torch = pathlib.Path(spec.submodule_search_locations[0])
    site = torch.parent
    if not (torch / "lib/libtorch_cpu.so").exists():
        fail(f"{torch}/lib has no libtorch_cpu.so: install PyTorch's own wheel for Linux x86_64")
    if site.resolve() == program.parent.parent.resolve():
        return {}
    folders = [torch / "lib", *sorted(site.glob("nvidia/*/lib"))]
    before = os.environ.get("LD_LIBRARY_PATH")
    variables = {"LD_LIBRARY_PATH": os.pathsep.join([*map(str, folders), *([before] if before else [])])}
    if (torch / "lib/libtorch_cuda.so").exists():
        variables["COLO_GRPO_TORCH_CUDA"] = os.environ.get("COLO_GRPO_TORCH_CUDA", str(torch / "lib"))
    return variables


def main():
    program = pathlib.Path(__file__).absolute().parent / "colo-grpo"
    os.execve(program, ["colo-grpo", *sys.argv[1:]], {**os.environ, **environment(program)})
