#!/usr/bin/env python3
"""Carries out the kernels of gated delta nets on a CPU and holds them to the recurrence in float64. Needs g++ (or what CXX names), no GPU.

    scripts/emulate_delta.py [decode] [training]

Translates src/kernels/delta_{mix,rule,gradients}.cu to C++, once with the products of Hopper's warpgroups and once with those of a warp, and runs
scripts/emulate/delta.cpp with each: outputs, last states and all gradients, with copies to shared memory that arrive as early and as late as they may,
and a count of accesses to tiles in shared memory that no barrier orders. Of decode steps it runs scripts/emulate/decode.cpp: delta_decode.cu has the
bits of delta_step.cu, and nothing reads or writes a state while a bulk copy moves it. Ends with 1 where something is too far off. It says nothing
about speed, and shared variables that are no tiles are not looked at for races.
"""
import os, pathlib, re, subprocess, sys, tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = ROOT / "src/kernels"
# Functions of the headers that scripts/emulate/device.h has in their place.
REPLACED = set("""copy_16 copy_16_once read_once commit_copies wait_copies load_matrices prefetch shared_address cluster_rank cluster_size sync_cluster
arrive_cluster wait_cluster load_one peer_address load_shared store_shared pack transpose silu_mul load_transposed transposed read_shared write_shared read_shared_16 wait_for_inputs widen
narrow warp_max warp_sum block_max block_sum load store low high join copy_in copy_out""".split())
PRODUCTS = """
using ::add_product;
inline unsigned long long descriptor(unsigned at) { return (at & 0x3ffffull) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62; }
inline void begin_products() {}
inline void publish_copies() {}
template <int PENDING, int COUNT> inline void finish_products(float (&)[COUNT]) { ::wait_products(PENDING); }
template <int BY_ROWS, int COUNT> inline void multiply_from(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b) {
    add_product(d, COUNT, a, b, BY_ROWS);
}
"""


def inlined(name, seen):
    lines = []
    for line in (KERNELS / name).read_text().splitlines():
        header = re.match(r'#include "(.*)"', line)
        if header is None:
            lines.append(line)
        elif header[1] not in seen:
            seen.add(header[1])
            lines += inlined(header[1], seen)
    return [line for line in lines if line != "#pragma once"]


def without_replaced(lines):
    """Leaves out what device.h has, and the template line before it."""
    kept, skipping = [], False
    for line in lines:
        declared = re.match(r"(?:struct (?:alignas\(.*\) )?(bf16|Pack) \{|__device__ __forceinline__ (?:[\w:<>, ]+?[ &*]+)(\w+)\()", line)
        if declared and is_replaced(declared, line):
            while kept and kept[-1].startswith("template"):
                kept.pop()
            skipping = not line.endswith("}")
        elif skipping:
            skipping = not line.startswith("}")
        elif not line.startswith(("static_assert", "#define INFINITY", "#define NAN", "#define INT_MAX")):
            kept.append(line)
    return kept


def is_replaced(declared, line):
    if declared[1]:
        return True
    if declared[2] == "multiply":
        return "(&sum)[4]" in line
    return declared[2] in REPLACED and "Raw" not in line and "Quad" not in line


def translated(name, by_warpgroups):
    text = "\n".join(without_replaced(inlined(name, set())))
    text = text.replace('extern "C" ', "").replace("extern __shared__ __align__(16) unsigned char memory[];", "unsigned char* memory = shared_memory;")
    begin = text.find("#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n\n// Before products")
    if by_warpgroups and begin >= 0:
        middle, end = text.index("#else", begin), text.index("#endif", begin)
        own = text[begin:middle]
        text = text[:begin] + PRODUCTS + own[own.index("// sums [16, 2 COUNT] += a b^T"):] + text[end + len("#endif"):]
    elsewhere = "using ::widen; using ::load; using ::store; using ::narrow; using ::multiply;\n"
    return elsewhere + "inline float low(unsigned both) { return ::element(both, 0); }\ninline float high(unsigned both) { return ::element(both, 1); }\n" + text


def translated_decode(name):
    """Kernels of decode steps: device.h has all of their headers, and what they do by instructions of their own."""
    text = "\n".join(without_replaced(inlined(name, {"async.cuh", "scalar.cuh", "hopper.cuh"})))
    text = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?(\w[\w ]*?) dynamic\[\];", r"\1* dynamic = reinterpret_cast<\1*>(shared_memory);", text)
    text = re.sub(r"(load_quad\(const (\w+)\* from\) \{)", r"\1 ::touch(from, 4 * sizeof(\2), false);", text)
    text = re.sub(r"(store_quad\((\w+)\* to, const float4& row\) \{)", r"\1 ::touch(to, 4 * sizeof(\2), true);", text)
    for instruction, instead in (("cp.async.ca.shared", "copy_8(to, from)"), ("fence.proxy.async", "publish()"),
                                 ("barrier.cta.arrive", "arrive_named(COMPUTED, THREADS)"), ("", "")):
        text = re.sub(rf'asm volatile\("{instruction}[^;]*;"[^;]*;', instead + ";", text)
    return "using ::widen; using ::narrow;\n" + text.replace('extern "C" ', "")


def fails(program, texts, *flags):
    """Whether a program of scripts/emulate ends with an error, with these translations of kernels."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            (pathlib.Path(folder) / f"{name}.inc").write_text(text)
        binary = f"{folder}/{program}"
        # Below 4 GiB, so that an address in shared memory fits 32 bits.
        command = [os.environ.get("CXX", "g++"), "-O2", "-std=c++17", "-w", "-no-pie", "-static", "-I", folder, "-o", binary]
        subprocess.run([*command, *flags, str(ROOT / f"scripts/emulate/{program}.cpp")], check=True)
        return subprocess.run([binary]).returncode != 0


def main():
    parts, failures = ["decode", "training"], []
    wanted = sys.argv[1:] or parts
    if not set(wanted) <= set(parts):
        sys.exit(f"{' '.join(wanted)}: expected {' or '.join(parts)}, or nothing for both")
    if "decode" in wanted:
        texts = {name: translated_decode(f"{name}.cu") for name in ("delta_step", "delta_decode")}
        failures.append(fails("decode", texts, "-D__CUDA_ARCH_FEAT_SM90_ALL"))
    for by_warpgroups in (True, False) if "training" in wanted else ():
        print("products by", "warpgroups" if by_warpgroups else "warps", flush=True)
        texts = {name: translated(f"{name}.cu", by_warpgroups) for name in ("delta_mix", "delta_rule", "delta_gradients")}
        failures.append(fails("delta", texts))
    sys.exit(1 if any(failures) else 0)


main()
