#!/usr/bin/env python3
"""How long a step on several nodes would take, from the phases of one node and a network's bandwidth: full fine-tuning with the default sharding
(within nodes), where gradients alone cross.

  nodes_estimate.py [NODES ..]    Qwen2.5-7B: prints a row for each number of nodes, 2 and 4 by default, at 50 and 400 GB/s out of each
  nodes_estimate.py --check ONE.json TWO.json RATE
                                  compares the estimate with a measurement: what `bench step` printed on one node and on two nodes that share the
                                  same number of GPUs, and what the network takes out of each node, in 10^9 bytes a second

Each GPU does what it did in the measured step: for 7B that of docs/benchmarks/whole-steps.md ("7B, TRL's batch"), 8 groups of 8 completions, 512 in, 1,024 out, so
twice the nodes are twice the batch. Gradients leave unit by unit as the last micro-batch's backward ends them, one after the other, with one unit's
under way while the next is computed (src/train/gradients.rs). A head that is the embedding, too, leaves when backward is at its end. Latency is not
in it, nor what rollouts of more GPUs wait for their longest completion.
"""
import json, sys

# Parameters of a block, of the embedding, the number of blocks, and whether the head is the embedding.
MODELS = {"qwen2.5-7b": (233_057_792, 152_064 * 3_584, 28, False), "qwen2.5-1.5b": (46_797_824, 151_936 * 1_536, 28, True)}
# Measured: four H200, tensor_parallel_size=4, zero.stage=2, nothing recomputed. Tokens of one GPU; a prompt is computed once for its group.
STEP_S, FORWARD_BACKWARD_S, TOKENS, MICRO_BATCH = 9.848, 5.429, 8 * 512 + 64 * 1024, 16_384


def units(model):
    """(parameters, share of backward's time) in the order of backward; the embedding's own backward takes next to no time."""
    block, table, blocks, tied = MODELS[model]
    computed = block * blocks + table
    head = (0 if tied else table, table / computed)
    return [head] + [(block, block / computed)] * blocks + [(table, 0.0)]


def exposed(model, nodes, gigabytes_per_second, backward):
    """Seconds that backward and the optimizer wait for the network; `backward` is the last micro-batch's, in seconds."""
    compute = network = 0.0  # when each is through with the units so far; a unit is not sent before the one ahead of it has arrived
    for parameters, share in units(model):
        compute = max(compute + backward * share, network)
        network = compute + crossing(nodes, parameters) / gigabytes_per_second / 1e9
    return network - backward


def crossing(nodes, parameters):
    """Bytes out of each node: a ring's share of float32 gradients."""
    return 2 * (nodes - 1) / nodes * 4 * parameters


def all_parameters(model):
    return sum(parameters for parameters, _ in units(model))


def table(numbers):
    backward = FORWARD_BACKWARD_S / -(-TOKENS // MICRO_BATCH) * 2 / 3
    print("| nodes of 8 | GB/s | out of each node | on the network | of it exposed | step | of one node's rate, a GPU |")
    print("|---|---|---|---|---|---|---|")
    for nodes in numbers:
        gigabytes = crossing(nodes, all_parameters("qwen2.5-7b")) / 1e9
        for rate in (50, 400):
            waits = exposed("qwen2.5-7b", nodes, rate, backward)
            print(f"| {nodes} | {rate} | {gigabytes:.1f} GB | {gigabytes / rate:.3f} s | {waits:.3f} s | {STEP_S + waits:.2f} s | "
                  f"{100 * STEP_S / (STEP_S + waits):.1f} % |")


def check(one, two, rate):
    one, two = (json.loads(open(path).read().splitlines()[-1]) for path in (one, two))
    if one["model"] not in MODELS or any(one[key] != two[key] for key in ("model", "world_size", "tokens_computed_in_training")):
        sys.exit("nodes_estimate: two results of the same step of " + " or ".join(MODELS) + " with as many GPUs are compared")
    per_gpu = one["tokens_computed_in_training"] / one["num_trainers"]
    micro_batches = -(-per_gpu // one["max_tokens_per_micro_batch"])
    estimated = exposed(one["model"], 2, rate, one["phases_s"]["forward_backward"] / micro_batches * 2 / 3)
    exposed_s = [result["metrics"]["timing_s/exposed_communication"] for result in (one, two)]
    print(f"out of each node {crossing(2, all_parameters(one['model'])) / 1e9:.2f} GB at {rate} GB/s")
    print("| | one node | two nodes, estimated | two nodes, measured |\n|---|---|---|---|")
    print(f"| exposed communication | {exposed_s[0]:.3f} s | {exposed_s[0] + estimated:.3f} s | {exposed_s[1]:.3f} s |")
    print(f"| step | {one['step_s']:.3f} s | {one['step_s'] + estimated:.3f} s | {two['step_s']:.3f} s |")


if sys.argv[1:2] == ["--check"] and len(sys.argv) == 5:
    check(sys.argv[2], sys.argv[3], float(sys.argv[4]))
elif all(number.isdigit() and int(number) > 0 for number in sys.argv[1:]):
    table([int(number) for number in sys.argv[1:]] or [2, 4])
else:
    sys.exit(__doc__)
