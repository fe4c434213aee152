#!/usr/bin/env python3
"""What rounding a model's products or its cache to eight bits costs: the distance of log-probabilities from float32's, by how it is rounded.

    scripts/rounding.py MODEL --rows rows.jsonl     # needs PyTorch and transformers; on a CPU, SmolLM2-135M takes about ten minutes
    scripts/rounding.py MODEL --only "int8, rotated" "e4m3 cache"

The model samples --tokens tokens behind each of 16 prompts in float32, and scores them again with every way of rounding: products of the
blocks' matrices (each row of weights and of activations by its own scale), or keys and values (each token and head by its own). "rotated" means
that both factors are multiplied by a Hadamard matrix of 64 channels first, which leaves the product as it is and spreads large channels.
"""
import argparse, json, math

PROMPTS = [
    "Write a story about a fisherman and the sea.", "Explain how a bicycle works, part by part.", "Write a Python class for a binary tree.",
    "List twenty animals with one sentence about each.", "Write a letter to a friend about a journey to Norway.",
    "Explain how bread is made, step by step.", "Write a dialogue about fractions.", "Describe the seasons of the year in a town by a lake.",
]
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", help="JSON Lines with prompts as texts; eight questions unless it is given")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="ways that contain one of these texts")
    options = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    torch.manual_seed(options.seed)
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    prompts = [json.loads(line)["prompt"] for line in open(options.rows)][:16] if options.rows else PROMPTS * 2

    # How eight bits are filled: the largest value of a row is the format's largest.
    def e4m3(x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    def int8(x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return (x / scale).round().clamp(-127, 127) * scale

    def bfloat16(x):
        return x.bfloat16().float()

    def same(x):
        return x

    def blocks(rounded, size):
        return lambda x: rounded(x.unflatten(-1, (-1, size))).flatten(-2)

    def two_terms(rounded):
        def of(x):
            first = rounded(x)
            return first + rounded(x - first)
        return of

    def hadamard(size):
        matrix = torch.ones(1, 1)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return matrix / math.sqrt(size)

    of_64, of_32 = hadamard(64), hadamard(32)

    def rotated(x, matrix=of_64):
        return (x.unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)

    def turned(most):  # by the largest matrix of at most so many channels that divides the row
        return lambda x: rotated(x, hadamard(min(x.shape[-1] & -x.shape[-1], most)))

    def back(rounded, matrix=of_64):  # rounds what is rotated, and turns it back: Hadamard's matrix is its own inverse
        return lambda x: rotated(rounded(rotated(x, matrix)), matrix)

    layers = model.model.layers
    modules = {(i, name): getattr(layer.self_attn, name, None) or getattr(layer.mlp, name)
               for i, layer in enumerate(layers) for name in MATRICES}
    weights = {key: module.weight.data.clone() for key, module in modules.items()}
    heads = model.config.num_key_value_heads
    cache = {"keys": same, "values": same}

    def attention(module, query, key, value, *rest, **words):
        return sdpa_attention_forward(module, query, cache["keys"](key), cache["values"](value), *rest, **words)

    AttentionInterface.register("rounded_cache", attention)
    model.set_attn_implementation("rounded_cache")
    texts = []
    for prompt in prompts:
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        texts.append((ids.shape[1], model.generate(ids, max_new_tokens=options.tokens, min_new_tokens=options.tokens, do_sample=True,
                                                   temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)))

    def logprobs():
        found = []
        for prompt, ids in texts:
            rows = model(ids).logits.log_softmax(-1)
            found.append(rows[:, prompt - 1:-1].gather(-1, ids[:, prompt:, None]).flatten())
        return torch.cat(found)

    def products(activations, rows, rotates=same, but=lambda layer: False):
        def set_up():
            hooks = []
            for (layer, name), module in modules.items():
                if not but(layer):
                    module.weight.data = rows(rotates(weights[layer, name]))
                    hooks.append(module.register_forward_pre_hook(lambda _, x: (activations(rotates(x[0])),)))
            return hooks
        return set_up

    def without_norms(activations, rows, rotates):  # the weight of the norm before a matrix is multiplied with the matrix instead
        def set_up():
            hooks = []
            for (layer, name), module in modules.items():
                norm = layers[layer].input_layernorm if name in MATRICES[:3] else layers[layer].post_attention_layernorm
                factors = norm.weight.data.clone() if name not in ("o_proj", "down_proj") else torch.ones(module.in_features)
                factors[factors == 0] = 1
                module.weight.data = rows(rotates(weights[layer, name] * factors))
                hooks.append(module.register_forward_pre_hook(lambda _, x, by=factors: (activations(rotates(x[0] / by)),)))
            return hooks
        return set_up

    def keys_and_values(keys, values):
        def set_up():
            cache.update(keys=keys, values=values)
            return []
        return set_up

    def keys_before_rotation(rounded):
        def by_head(_, __, keys):
            return rounded(keys.unflatten(-1, (heads, -1))).flatten(-2)
        def set_up():
            cache.update(values=rounded)
            return [module.register_forward_hook(by_head) for (_, name), module in modules.items() if name == "k_proj"]
        return set_up

    last = len(layers) - 1
    ways = {
        "bfloat16 activations": products(bfloat16, same),
        "e4m3": products(e4m3, e4m3),
        "e4m3, rotated": products(e4m3, e4m3, rotated),
        "e4m3, blocks of 64 channels": products(blocks(e4m3, 64), blocks(e4m3, 64)),
        "e4m3, first two and last two layers not": products(e4m3, e4m3, but=lambda layer: layer < 2 or layer > last - 2),
        "e4m3, every second layer not": products(e4m3, e4m3, but=lambda layer: layer % 2 == 0),
        "e4m3, two terms of activations": products(two_terms(e4m3), e4m3),
        "e4m3, two terms of weights": products(e4m3, two_terms(e4m3)),
        "e4m3, weights alone": products(bfloat16, e4m3),
        "e4m3, activations alone": products(e4m3, same),
        "int8": products(int8, int8),
        "int8, blocks of 64 channels": products(blocks(int8, 64), blocks(int8, 64)),
        "int8, rotated": products(int8, int8, rotated),
        "int8, rotated by up to 16": products(int8, int8, turned(16)),
        "int8, rotated by up to 32": products(int8, int8, turned(32)),
        "int8, rotated by up to 256": products(int8, int8, turned(256)),
        "int8, rotated by up to 512": products(int8, int8, turned(512)),
        "int8, rotated without the norms' weights": without_norms(int8, int8, turned(256)),
        "int8, rotated, weights alone": products(bfloat16, int8, rotated),
        "int8 weights, e4m3 activations": products(e4m3, int8),
        "e4m3 cache": keys_and_values(e4m3, e4m3),
        "e4m3 cache, keys before their rotation by position": keys_before_rotation(e4m3),
        "e4m3 cache, keys alone": keys_and_values(e4m3, same),
        "int8 cache": keys_and_values(int8, int8),
        "int8 cache, rotated": keys_and_values(back(int8), back(int8)),
        "int8 cache, keys rotated by 32": keys_and_values(back(int8, of_32), int8),
        "int8 cache, keys before their rotation by position": keys_before_rotation(int8),
    }
    exact = logprobs()
    print(f"{len(exact)} tokens\n| how | mean, nats | 99th percentile | largest |\n|---|---|---|---|", flush=True)
    for name, set_up in ways.items():
        if options.only and not any(text in name for text in options.only):
            continue
        hooks = set_up()
        off = (logprobs() - exact).abs()
        print(f"| {name} | {off.mean():.3f} | {off.quantile(0.99):.2f} | {off.max():.1f} |", flush=True)
        for hook in hooks:
            hook.remove()
        for key, module in modules.items():
            module.weight.data = weights[key].clone()
        cache.update(keys=same, values=same)


if __name__ == "__main__":
    main()
