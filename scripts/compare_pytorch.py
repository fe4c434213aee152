#!/usr/bin/env python3
"""Compares the CPU trainer with PyTorch eager on the same model and machine, in one run. Needs torch and transformers.

    scripts/compare_pytorch.py --threads 1

Both do the same work in turn, A B A B: forward, log-probabilities of the second half of every sequence, backward, global
norm clipping and AdamW, on packed random sequences of one length in float32. Prints one JSON line with tokens per second of
both and the median of the pairwise ratios (above 1: colo-grpo is faster).
"""
import argparse, json, os, pathlib, platform, statistics, subprocess, time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default=os.environ.get("CARGO_TARGET_DIR", "target") + "/release/colo-grpo")
    parser.add_argument("--config", type=pathlib.Path, default="configs/arithmetic/config.json")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--sequence-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=5)
    return parser.parse_args()


def ours(args):
    command = [args.binary, "bench", "train", "--config-json", str(args.config), "--sequences", str(args.sequences),
               "--sequence-len", str(args.sequence_len), "--steps", str(args.steps),
               "--max-tokens-per-micro-batch", str(args.sequences * args.sequence_len)]
    environment = dict(os.environ, OMP_NUM_THREADS=str(args.threads))
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return json.loads(printed.strip().splitlines()[-1])["tokens_per_second"]


class Eager:
    def __init__(self, args):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        torch.set_num_threads(args.threads)
        config = AutoConfig.for_model(**json.loads(args.config.read_text()))
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(config.vocab_size, (args.sequences, args.sequence_len))
        self.torch, self.steps = torch, args.steps

    def step(self):
        half = self.ids.shape[1] // 2
        hidden = self.model.model(self.ids, use_cache=False).last_hidden_state[:, half - 1:-1]
        logits = self.model.lm_head(hidden).flatten(0, 1)
        self.torch.nn.functional.cross_entropy(logits, self.ids[:, half:].flatten()).backward()
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tokens_per_second(self):
        self.step()
        times = []
        for _ in range(self.steps):
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        return self.ids.numel() / statistics.median(times)


def main():
    args = arguments()
    eager = Eager(args)
    pairs = [(ours(args), eager.tokens_per_second()) for _ in range(args.pairs)]
    print(json.dumps({
        "benchmark": "compare_pytorch", "threads": args.threads, "sequences": args.sequences,
        "sequence_len": args.sequence_len, "torch": eager.torch.__version__, "machine": platform.processor() or platform.machine(),
        "colo_grpo_tokens_per_second": round(statistics.median(pair[0] for pair in pairs)),
        "pytorch_tokens_per_second": round(statistics.median(pair[1] for pair in pairs)),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
    }))


if __name__ == "__main__":
    main()
