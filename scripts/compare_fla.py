#!/usr/bin/env python3
"""Compares a gated delta net in training with flash-linear-attention's operations on one GPU. Needs torch, triton, fla-core and einops.

    scripts/compare_fla.py                          # the shape of Qwen3.5-9B, four sequences of 4,096 tokens
    scripts/compare_fla.py --sequences 16 --sequence-len 1024 --theirs rule

Theirs, packed sequences in bfloat16, each operation by itself: the convolution with SiLU, the gated delta rule with unit lengths and
gates in its kernels, and the gated norm; Triton tunes and compiles each first, which takes a minute or two. Ours is what `bench train
--profile` prints for gated delta nets, all of that in one, twice: with a backward that computes the forward again (`recomputed`), and with
chunks that the forward keeps for it (`kept`, --gradient_checkpointing keep_chunks). Prints one JSON line with microseconds of a layer:
`fla_us`, and of each of ours `forward_us`, `backward_us` and their ratio; and how many times as fast the forward that keeps nothing is.
fla-core refuses its backward on Hopper below Triton 3.7.1, so that it has none.
"""
import argparse, json, os, statistics, subprocess

BLOCK_LAYERS = 4  # three gated delta nets, one attention


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default=os.environ.get("CARGO_TARGET_DIR", "target") + "/release/colo-grpo")
    parser.add_argument("--preset", default="qwen3.5-9b")
    parser.add_argument("--key-heads", type=int, default=16, help="the preset's")
    parser.add_argument("--value-heads", type=int, default=32, help="the preset's")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--sequence-len", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--theirs", choices=["all", "rule"], default="all", help="rule: the gated delta rule alone")
    return parser.parse_args()


def ours(args, gradient_checkpointing):
    """Microseconds of a layer's forward and backward, the latter with what it computes again of the forward."""
    tokens = args.sequences * args.sequence_len
    command = [args.binary, "bench", "train", "--device", "cuda", "--preset", args.preset, "--layers", str(BLOCK_LAYERS),
               "--sequences", str(args.sequences), "--sequence-len", str(args.sequence_len),
               "--max-tokens-per-micro-batch", str(tokens), "--gradient-checkpointing", gradient_checkpointing, "--steps", "1", "--profile"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    profile = json.loads(printed.strip().splitlines()[-1])["profile_ms_and_floor"]
    times = [profile[name] for name in ("gated delta net", "gated delta net, backward")]
    forward, backward = (1e3 * milliseconds / count for count, milliseconds, _ in times)
    return {"forward_us": forward, "backward_us": backward, "backward_of_forward": backward / forward}


def timed(torch, repeats, work):
    times = []
    with torch.no_grad():
        work()
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def theirs(args, torch):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    tokens, dim = args.sequences * args.sequence_len, 128
    keys, values = args.key_heads, args.value_heads
    rows = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    bounds = torch.arange(0, tokens + 1, args.sequence_len, device="cuda")
    q, k, v, a, b = rows(1, tokens, keys, dim), rows(1, tokens, keys, dim), rows(1, tokens, values, dim), rows(1, tokens, values), rows(1, tokens, values)
    of_heads = {name: torch.randn(values, device="cuda") for name in ("A_log", "dt_bias")}
    rule = lambda: chunk_gated_delta_rule(q, k, v, a, b, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                                          use_beta_sigmoid_in_kernel=True, **of_heads)
    times = {"rule": timed(torch, args.repeats, rule)}
    if args.theirs == "all":
        from fla.modules.causal_conv1d.ops import causal_conv1d
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        channels = (2 * keys + values) * dim
        x, weight = rows(1, tokens, channels), rows(channels, 4)
        times["convolution"] = timed(torch, args.repeats, lambda: causal_conv1d(x, weight, activation="silu", cu_seqlens=bounds))
        o, z, norm = rows(tokens * values, dim), rows(tokens * values, dim), rows(dim)
        times["norm"] = timed(torch, args.repeats, lambda: rms_norm_gated(o, z, norm, None))
    return times


def main():
    args = arguments()
    import torch
    from importlib.metadata import version
    recomputed, kept = ours(args, "selective"), ours(args, "keep_chunks")
    times = theirs(args, torch)
    print(json.dumps({
        "benchmark": "compare_fla", "preset": args.preset, "sequences": args.sequences, "sequence_len": args.sequence_len,
        "gpu": torch.cuda.get_device_name(), "versions": {name: version(name) for name in ("torch", "triton", "fla-core")},
        "fla_us": times, "recomputed": recomputed, "kept": kept, "speedup": sum(times.values()) / recomputed["forward_us"],
    }))


main()
