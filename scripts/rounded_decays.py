#!/usr/bin/env python3
"""What it costs to keep A_log and dt_bias of gated delta nets in bfloat16: the KL divergence, in nats a token, of a model of random weights
from itself with some weights rounded. Needs torch and transformers (made with 2.11 and 5.23).

  rounded_decays.py [SEED ..]     prints a line for each seed, 0 to 2 by default: all weights rounded, all but these, these alone
"""
import copy
import sys

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

CONFIG = dict(vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
              head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
              rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25))
TOKENS = 1024


@torch.no_grad()
def random_model():
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**CONFIG)).float().eval()
    for name, weight in model.named_parameters():
        if "A_log" in name:
            weight.uniform_(0.01, 16).log_()
        elif "dt_bias" in name:
            weight.normal_(-3, 1.5)
        elif weight.dim() > 1:
            weight.normal_(0, 0.08)
    return model


@torch.no_grad()
def divergence(model, ids, is_rounded):
    rounded = copy.deepcopy(model)
    for name, weight in rounded.named_parameters():
        if is_rounded("A_log" in name or "dt_bias" in name):
            weight.copy_(weight.bfloat16().float())
    exact, other = (each(ids).logits[0].log_softmax(-1) for each in (model, rounded))
    return (exact.exp() * (exact - other)).sum(-1).mean().item()


def main():
    torch.set_num_threads(1)
    for seed in [int(word) for word in sys.argv[1:]] or range(3):
        torch.manual_seed(seed)
        model, ids = random_model(), torch.randint(CONFIG["vocab_size"], (1, TOKENS))
        every, others, own = (divergence(model, ids, rule) for rule in (lambda own: True, lambda own: not own, lambda own: own))
        print(f"seed {seed}: all {every:.2e}, all but A_log and dt_bias {others:.2e}, these alone {own:.2e}")


if __name__ == "__main__":
    main()
