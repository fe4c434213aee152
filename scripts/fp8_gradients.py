#!/usr/bin/env python3
"""How far gradients are from float32's where a decoder's products are in FP8, by how factors are rounded. Needs PyTorch and transformers.

    scripts/fp8_gradients.py [hidden [layers]]     # 256 and 6

A Qwen2 of random weights, plain and with channels 100 times as large as the others, on 16 sequences of 64 tokens with random advantages.
Prints the norm of what all matrices' gradients are off by over theirs, that of the matrix that is off by most, and the mean distance of
log-probabilities in nats. What is called `mixed_precision = "fp8"` rounds both factors of a product and of its input's gradient by rows.
"""
import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def rounded(x, kind=torch.float8_e4m3fn, whole=False):
    """x as FP8 has it, with a scale for each row or one for all."""
    most = torch.finfo(kind).max
    peak = x.abs().amax() if whole else x.abs().amax(-1, keepdim=True)
    factor = torch.where(peak > 0, most / peak, 0.0)
    return (x * factor).clamp(-most, most).to(kind).float() * (peak / most)


def by_blocks(x, width=128):
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % width)).reshape(-1, width)
    return rounded(padded).reshape(rows, -1)[:, :columns]


def same(x):
    return x


def narrow(x):
    return x.to(torch.bfloat16).float()


def steep(x):
    return rounded(x, torch.float8_e5m2)


def tensorwise(x):
    return rounded(x, whole=True)


# What rounds activations and weights, gradients of outputs, and both factors of weights' gradients (that of outputs, of inputs).
RECIPES = {
    "bfloat16": (narrow, narrow, (narrow, narrow)),
    "fp8: rows; weights' gradients in bfloat16": (rounded, rounded, (narrow, narrow)),
    "rows, all three products (torchao's rowwise)": (rounded, rounded, (rounded, rounded)),
    "rows, gradients in e5m2": (rounded, steep, (steep, rounded)),
    "one scale a tensor, gradients in e5m2 (Transformer Engine's current scaling)":
        (tensorwise, lambda x: rounded(x, torch.float8_e5m2, True), (lambda x: rounded(x, torch.float8_e5m2, True), tensorwise)),
    "blocks of 128, all three products": (by_blocks, by_blocks, (by_blocks, by_blocks)),
    "rows, forward alone": (rounded, same, (same, same)),
}
EXACT = (same, same, (same, same))


class Product(torch.autograd.Function):
    recipe = EXACT

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        factor = Product.recipe[0]
        return factor(x) @ factor(w).T

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        factor, gradient, (of_output, of_input) = Product.recipe
        dx = gradient(dy) @ factor(w.T.contiguous()).T
        return dx, of_output(dy.T.contiguous()) @ of_input(x.T.contiguous()).T


def forward(linear, x):
    y = Product.apply(x.reshape(-1, x.shape[-1]), linear.weight).reshape(*x.shape[:-1], -1)
    return y if linear.bias is None else y + linear.bias


def model(hidden, layers, outliers):
    torch.manual_seed(1)
    config = Qwen2Config(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=1000, initializer_range=0.04)
    model = Qwen2ForCausalLM(config).float()
    for block in model.model.layers if outliers else ():
        attention, mlp = block.self_attn, block.mlp
        for norm, linears in ((block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                              (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj))):
            norm.weight.data[[3, 77]] *= 100
            for linear in linears:
                linear.weight.data[:, [3, 77]] *= 0.01
        mlp.up_proj.weight.data[5] *= 100
        mlp.down_proj.weight.data[:, 5] *= 0.01
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.forward = forward.__get__(module)
    return model


def gradients(model, ids, advantages):
    model.zero_grad()
    logprobs = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    (-(logprobs * advantages[:, None]).sum() / logprobs.numel()).backward()
    matrices = [weight.grad.double() for name, weight in model.named_parameters() if name.endswith("_proj.weight")]
    return [matrix.clone() for matrix in matrices], logprobs.detach()


def main():
    hidden, layers = [int(word) for word in sys.argv[1:]] + [256, 6][len(sys.argv) - 1:]
    print("| how factors are rounded | plain: all, worst matrix, nats | outlier channels |\n|---|---|---|")
    cells = {name: [] for name in RECIPES}
    for outliers in (False, True):
        decoder = model(hidden, layers, outliers)
        ids, advantages = torch.randint(0, 1000, (16, 64)), torch.randn(16)
        Product.recipe = EXACT
        exact, exact_logprobs = gradients(decoder, ids, advantages)
        for name, Product.recipe in RECIPES.items():
            own, logprobs = gradients(decoder, ids, advantages)
            off = [((a - b).norm() / b.norm()).item() for a, b in zip(own, exact)]
            size = sum(b.norm() ** 2 for b in exact)
            whole = (sum((a - b).norm() ** 2 for a, b in zip(own, exact)) / size).sqrt().item()
            distance = (logprobs - exact_logprobs).abs().mean().item()
            cells[name].append(f"{whole:.3f}, {max(off):.3f}, {distance:.3f}")
    for name, row in cells.items():
        print(f"| {name} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
