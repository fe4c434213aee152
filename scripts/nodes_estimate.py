#!/usr/bin/env python3
"""How long a step on several nodes would take, from the phases of one node and a network's bandwidth: full fine-tuning of Qwen2.5-7B with the
default sharding (within nodes), where gradients alone cross.

  nodes_estimate.py [NODES ..]    prints a row for each number of nodes, 2 and 4 by default, at 50 and 400 GB/s out of each

Each GPU does what it did in the measured step (docs/benchmarks.md, "TRL's batch"): 8 groups of 8 completions, 512 in, 1,024 out, so twice the nodes are twice
the batch. Gradients leave unit by unit as the last micro-batch's backward ends them, one after the other, with one unit's under way
while the next is computed (src/train/gradients.rs). Latency is not in it, nor what rollouts of more GPUs wait for their longest completion.
"""
import sys

STEP_S, FORWARD_BACKWARD_S = 9.848, 5.429  # measured: four H200, tensor_parallel_size=4, zero.stage=2, nothing recomputed
TOKENS, MICRO_BATCH = 8 * 512 + 64 * 1024, 16_384  # of one GPU; a prompt is computed once for its group
BLOCK, TABLE, BLOCKS = 233_057_792, 152_064 * 3_584, 28  # parameters
UNITS = [TABLE] + [BLOCK] * BLOCKS + [TABLE]  # in the order of backward; the embedding, last, takes next to no time


def exposed(nodes, gigabytes_per_second):
    """Seconds that backward and the optimizer wait for the network."""
    micro_batches = -(-TOKENS // MICRO_BATCH)
    backward = FORWARD_BACKWARD_S / micro_batches * 2 / 3
    computed = sum(UNITS[:-1])
    compute = network = 0.0  # when each is through with the units so far
    before = 0.0  # when the network is through with the unit before the last one
    total = 0.0
    for index, parameters in enumerate(UNITS):
        seconds = backward * parameters / computed if index + 1 < len(UNITS) else 0.0
        total += seconds
        compute = max(compute + seconds, before)
        before = network = max(network, compute) + 2 * (nodes - 1) / nodes * 4 * parameters / gigabytes_per_second / 1e9
    return network - total


def main():
    nodes = [int(number) for number in sys.argv[1:]] or [2, 4]
    print("| nodes of 8 | GB/s | out of each node | on the network | of it exposed | step | of one node's rate, a GPU |")
    print("|---|---|---|---|---|---|---|")
    for number in nodes:
        gigabytes = 2 * (number - 1) / number * 4 * sum(UNITS) / 1e9
        for rate in (50, 400):
            waits = exposed(number, rate)
            print(f"| {number} | {rate} | {gigabytes:.1f} GB | {gigabytes / rate:.3f} s | {waits:.3f} s | {STEP_S + waits:.2f} s | "
                  f"{100 * STEP_S / (STEP_S + waits):.1f} % |")


main()
