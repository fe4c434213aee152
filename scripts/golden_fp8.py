#!/usr/bin/env python3
"""What transformers and compressed-tensors make of matrices in FP8: writes tests/golden/fp8.safetensors, which src/model/files/scaled.rs reads.

    pip install torch transformers compressed-tensors safetensors
    python3 scripts/golden_fp8.py

NAME.weight and its scales as published files have them; NAME.expected as the library dequantises them. blocks and matrix: transformers;
rows, rows_bf16, tensor and grid: compressed-tensors. exported.*: a matrix, and what transformers' quantiser makes of it.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize


def codes(rows: int, columns: int) -> torch.Tensor:
    bits = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0  # no NaN
    return bits.view(torch.float8_e4m3fn)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape) * 1e-2 + 1e-5).to(dtype)


def compressed(weight: torch.Tensor, scale: torch.Tensor, strategy: str) -> torch.Tensor:
    block = {"block_structure": [128, 128]} if strategy == "block" else {}
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True, **block)
    return dequantize(weight, scale, args=args, dtype=torch.bfloat16)


def main() -> None:
    torch.manual_seed(0)
    tensors = {}
    dequantizer = Fp8Dequantize(None)

    def add(name: str, weight: torch.Tensor, suffix: str, scale: torch.Tensor, expected: torch.Tensor) -> None:
        tensors.update({f"{name}.weight": weight, f"{name}.weight{suffix}": scale, f"{name}.expected": expected})

    for name, size, shape in [("blocks", (256, 256), (2, 2)), ("matrix", (40, 24), (1, 1))]:
        weight, scale = codes(*size), scales(*shape)
        add(name, weight, "_scale_inv", scale, dequantizer._dequantize_one(weight, scale, torch.bfloat16))
    for name, shape, dtype, strategy in [
        ("rows", (40, 1), torch.float32, "channel"),
        ("rows_bf16", (40, 1), torch.bfloat16, "channel"),
        ("tensor", (1,), torch.float32, "tensor"),
    ]:
        weight, scale = codes(40, 24), scales(*shape, dtype=dtype)
        add(name, weight, "_scale", scale, compressed(weight, scale, strategy))
    weight, scale = codes(256, 128), scales(2, 1)
    add("grid", weight, "_scale", scale, compressed(weight, scale, "block"))
    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt=None)
    matrix = torch.randn(128, 256, dtype=torch.bfloat16) * torch.exp(torch.randn(128, 1)).bfloat16()
    matrix[:, 128:] = 0
    made = Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("exported.weight", matrix)
    tensors["exported.matrix"] = matrix
    tensors.update(made)
    save_file(tensors, Path(__file__).parent.parent / "tests/golden/fp8.safetensors")


if __name__ == "__main__":
    main()
