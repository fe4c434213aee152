#!/usr/bin/env python3
"""Golden numbers of the optimizers: AdamW with 8-bit moments from bitsandbytes, Muon from torch. Needs torch and bitsandbytes (made
with 2.11 and 0.50).

  golden_optim.py tests/golden     writes optim.json. `adamw_8bit`: both code books and, after each step of bitsandbytes' AdamW8bit,
                                   codes, scales and some weights. `muon`: weights after each step of torch.optim.Muon, by matrix.
                                   Weights and gradients follow from `wave`, which the tests of src/ops have, too.
"""
import argparse
import ctypes
import json
import pathlib

import torch

# bitsandbytes' PyTorch code and its CUDA kernels take the nearest code. Its library for CPUs looks codes up in a coarse table, where a
# moment of 0 becomes 2e-5 of the block's largest: without the library the PyTorch code serves.
load_library = ctypes.cdll.LoadLibrary


def load(path):
    if "bitsandbytes" in str(path):
        raise OSError("left out")
    return load_library(path)


ctypes.cdll.LoadLibrary = load
from bitsandbytes.functional import create_dynamic_map  # noqa: E402
from bitsandbytes.optim import AdamW8bit  # noqa: E402

ADAMW = dict(lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
MUON = dict(lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True)
STEPS = 3


def wave(count, phase):
    """Numbers of both signs, between 1e-8 and 1 in size, by blocks of 256; the third block is zero."""
    at = torch.arange(count, dtype=torch.float64)
    block = torch.floor(at / 256)
    values = torch.sin(at * 12.9898 + phase) * 10 ** (-4 * (1 + torch.sin(at * 0.731 + phase))) * torch.cos(block * 0.37)
    return torch.where(block == 2, 0.0, values).float()


def adamw_8bit(count=4096):
    weights = torch.nn.Parameter(wave(count, 0.5).double().mul(0.3).float())
    optimizer = AdamW8bit([weights], **ADAMW)
    steps = []
    for step in range(STEPS):
        weights.grad = wave(count, 1.0 + step)
        optimizer.step()
        state = optimizer.state[weights]
        steps.append({
            "m_codes": bytes(state["state1"].tolist()).hex(),
            "v_codes": bytes(state["state2"].tolist()).hex(),
            "m_absmax": state["absmax1"].tolist(),
            "v_absmax": state["absmax2"].tolist(),
            "every_7th_weight": weights.detach()[::7].tolist(),
        })
    maps = {"m_levels": create_dynamic_map(signed=True).tolist(), "v_levels": create_dynamic_map(signed=False).tolist()}
    return {**maps, "steps": steps}


def muon(rows, columns, adjust_lr_fn, nesterov):
    weights = torch.nn.Parameter(wave(rows * columns, 0.5).double().mul(0.3).float().view(rows, columns))
    optimizer = torch.optim.Muon([weights], adjust_lr_fn=adjust_lr_fn, **{**MUON, "nesterov": nesterov})
    steps = []
    for step in range(STEPS):
        weights.grad = wave(rows * columns, 1.0 + step).view(rows, columns)
        optimizer.step()
        steps.append(weights.detach().flatten().tolist())
    return {"rows": rows, "columns": columns, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov, "steps": steps}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    matrices = [muon(24, 16, "original", True), muon(16, 40, "match_rms_adamw", True), muon(20, 20, "original", False)]
    golden = {"adamw_8bit": adamw_8bit(), "muon": matrices}
    (folder / "optim.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
