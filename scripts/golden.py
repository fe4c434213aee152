#!/usr/bin/env python3
"""Golden numbers of the network, from transformers. Needs torch and transformers (made with 2.11 and 5.23).

  golden.py make tests/golden [NAME ..]  writes one Hugging Face folder a family, each with its golden.json, and rope.json;
                                  or those of these names alone
  golden.py check-export FOLDER   loads a folder that colo-grpo wrote (the `final` of a run, a checkpoint) and compares
                                  its greedy answers and their log-probabilities with those of colo-grpo itself

golden.json: `input_ids`, one list a prompt; `last_logits`, [V] at each prompt's last position; `all_logits`, [T, V] of
prompt `all_logits_of`; `greedy`, 24 ids a prompt for the first three; `long_greedy`, 200 ids for the first prompt, but of SHORT; `min_gap`, the least
difference between the two highest logits on the way; of a model with experts `aux_loss`, one number a prompt. Numbers are float32, computed in
float32.

rope.json: for each case, keys of a config.json with heads of 128; `inv_freq` and `attention_factor` as transformers' rotary
embedding has them; `context`, the longest that it is for.
"""
import argparse
import copy
import json
import os
import pathlib
import shutil
import subprocess

import torch
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3Config, Gemma3TextConfig, Glm4Config, Glm4MoeConfig, GlmConfig, GptOssConfig, GraniteConfig, LlamaConfig, MinistralConfig, Mistral3Config, MistralConfig, Mxfp4Config,
                          Olmo2Config, Phi3Config, PreTrainedTokenizerFast, Qwen2Config, Qwen2MoeConfig, Qwen3_5Config,
                          Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig, SmolLM3Config)
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

VOCAB = 96
PROMPT_LENGTHS = [5, 13, 21, 40]  # the window of mistral is 8
ALL_LOGITS_OF = 1
NEW_TOKENS = 24
LONG_NEW_TOKENS = 200
SHORT = ["qwen2_untied", "qwen2_yarn", "llama3"]  # without `long_greedy`: their seeds have a near tie in 200 tokens
LEAST_GAP = 1e-3
COMMON = dict(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2)
ROPE = dict(rope_type="default", rope_theta=10000.0)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64)
YARN_ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
# Keys of config.json, as files of transformers 4 and 5 have them.
ROPES = [
    dict(rope_theta=1e6, max_position_embeddings=32768),
    dict(rope_theta=1e4, max_position_embeddings=8192, rope_scaling=dict(type="linear", factor=4.0)),
    dict(max_position_embeddings=8192, rope_parameters=dict(rope_type="linear", rope_theta=5e5, factor=2.5)),
    # What the model card of Qwen2.5 says to add.
    dict(rope_theta=1e6, max_position_embeddings=32768,
         rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=32768)),
    dict(max_position_embeddings=131072, rope_parameters=dict(
        rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768, attention_factor=1.25)),
    dict(max_position_embeddings=40960, rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=10.0,
                                                             original_max_position_embeddings=4096, mscale=0.707)),
    dict(max_position_embeddings=163840, rope_parameters=dict(
        rope_type="yarn", rope_theta=1e4, factor=40.0, original_max_position_embeddings=4096, mscale=1.0,
        mscale_all_dim=0.5, beta_fast=24, beta_slow=2)),
    dict(max_position_embeddings=65536, rope_parameters=dict(rope_type="yarn", rope_theta=5e5, factor=8.0, truncate=False,
                                                             original_max_position_embeddings=8192)),
    dict(max_position_embeddings=4096, rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=2.0)),
]
HYBRID = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
              layer_types=["linear_attention", "full_attention", "linear_attention"],
              linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=8, linear_value_head_dim=16,
              **dict(COMMON, num_hidden_layers=3))
PARTIAL_ROPE = dict(ROPE, partial_rotary_factor=0.25)
VISION = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, out_hidden_size=32, num_position_embeddings=16)
GEMMA3 = dict(hidden_size=40, intermediate_size=56, num_attention_heads=4, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=24,
              sliding_window=8, **dict(COMMON, num_hidden_layers=7))
GPT_OSS = dict(hidden_size=40, intermediate_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_local_experts=5,
               num_experts_per_tok=3, sliding_window=8, pad_token_id=0, output_router_logits=False,
               rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128, truncate=False),
               **dict(COMMON, num_hidden_layers=3))
# name: configuration, type on disk, largest shard
FAMILIES = {
    "qwen2_yarn": (Qwen2Config(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
                               rope_parameters=YARN_ROPE, tie_word_embeddings=True, **COMMON), torch.float32, "5GB"),
    "qwen2_tied": (Qwen2Config(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
                               rope_parameters=ROPE, tie_word_embeddings=True, **COMMON), torch.float32, "5GB"),
    "qwen2_untied": (Qwen2Config(hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=3,
                                 rope_parameters=dict(ROPE, rope_theta=1e6), tie_word_embeddings=False, **COMMON),
                     torch.bfloat16, "5GB"),
    "qwen3": (Qwen3Config(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
                          head_dim=16, rope_parameters=ROPE, tie_word_embeddings=True, **COMMON),
              torch.float32, "5GB"),
    "qwen2_moe": (Qwen2MoeConfig(hidden_size=32, intermediate_size=48, moe_intermediate_size=16, shared_expert_intermediate_size=24,
                                 num_experts=5, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
                                 rope_parameters=ROPE, tie_word_embeddings=False, **COMMON), torch.float32, "5GB"),
    "qwen2_moe_mixed": (Qwen2MoeConfig(hidden_size=32, intermediate_size=48, moe_intermediate_size=16, shared_expert_intermediate_size=40,
                                       num_experts=4, num_experts_per_tok=3, norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[3],
                                       num_attention_heads=4, num_key_value_heads=4, rope_parameters=ROPE, tie_word_embeddings=True,
                                       **dict(COMMON, num_hidden_layers=4)), torch.bfloat16, "40KB"),
    "qwen3_moe": (Qwen3MoeConfig(hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_experts=5, num_experts_per_tok=2,
                                 norm_topk_prob=True, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                 rope_parameters=ROPE, tie_word_embeddings=True, **COMMON), torch.float32, "5GB"),
    "qwen3_moe_mixed": (Qwen3MoeConfig(hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=3,
                                       norm_topk_prob=False, mlp_only_layers=[0], router_aux_loss_coef=0.25, num_attention_heads=4,
                                       num_key_value_heads=2, head_dim=16, rope_parameters=ROPE, tie_word_embeddings=False, **COMMON),
                        torch.bfloat16, "40KB"),
    "qwen3_5": (Qwen3_5TextConfig(intermediate_size=48, rope_parameters=PARTIAL_ROPE, tie_word_embeddings=False, **HYBRID),
                torch.float32, "5GB"),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig(moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=5, num_experts_per_tok=2,
                                         rope_parameters=PARTIAL_ROPE, tie_word_embeddings=False, **HYBRID), torch.float32, "5GB"),
    # With a vision tower, whose positions have three axes; of text they are alike.
    "qwen3_5_vision": (Qwen3_5Config(
        text_config=dict(HYBRID, intermediate_size=48, tie_word_embeddings=True, rope_parameters=dict(PARTIAL_ROPE, mrope_interleaved=True, mrope_section=[1, 1, 0])),
        vision_config=VISION, tie_word_embeddings=True), torch.bfloat16, "40KB"),
    "qwen3_next": (Qwen3NextConfig(intermediate_size=48, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=5,
                                   num_experts_per_tok=2, mlp_only_layers=[1], rope_parameters=PARTIAL_ROPE, tie_word_embeddings=False, **HYBRID),
                   torch.bfloat16, "40KB"),
    "llama3": (LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=1,
                           head_dim=16, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False, **COMMON),
               torch.float32, "50KB"),
    "mistral": (MistralConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
                              rope_parameters=ROPE, sliding_window=8, tie_word_embeddings=False, **COMMON),
                torch.float32, "5GB"),
    "qwen2_window": (Qwen2Config(hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, rope_parameters=ROPE,
                                 use_sliding_window=True, sliding_window=8, max_window_layers=1, tie_word_embeddings=True,
                                 **dict(COMMON, num_hidden_layers=3)), torch.bfloat16, "5GB"),
    "ministral": (MinistralConfig(hidden_size=40, intermediate_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
                                  rope_parameters=ROPE, sliding_window=8, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                                  **dict(COMMON, num_hidden_layers=3)), torch.bfloat16, "5GB"),
    "mistral3_vision": (Mistral3Config(
        text_config=dict(model_type="mistral", hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                         sliding_window=None, tie_word_embeddings=False, rope_parameters=ROPE, **COMMON),
        vision_config=dict(model_type="pixtral", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8,
                           patch_size=4), tie_word_embeddings=False), torch.bfloat16, "40KB"),
    "smollm3": (SmolLM3Config(hidden_size=24, intermediate_size=40, num_attention_heads=6, num_key_value_heads=2, no_rope_layer_interval=3,
                              pad_token_id=0, rope_parameters=dict(ROPE, rope_theta=5e6), **dict(COMMON, num_hidden_layers=4)), torch.bfloat16, "40KB"),
    # Rope and windows layer by layer.
    "smollm3_window": (SmolLM3Config(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, no_rope_layers=[0, 1, 1, 0],
                                     use_sliding_window=True, sliding_window=8, pad_token_id=0, rope_parameters=ROPE, tie_word_embeddings=False,
                                     **dict(COMMON, num_hidden_layers=4)), torch.float32, "5GB"),
    "granite": (GraniteConfig(hidden_size=24, intermediate_size=40, num_attention_heads=6, num_key_value_heads=2, rope_parameters=ROPE,
                              embedding_multiplier=1.5, attention_multiplier=0.4, residual_multiplier=0.7, logits_scaling=3.0,
                              tie_word_embeddings=False, **COMMON), torch.float32, "5GB"),
    # The window and the rotation of five layers in six; the factors of scores and the embedding are rounded to no power of two.
    "gemma3": (Gemma3TextConfig(**GEMMA3, rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
        sliding_attention=dict(rope_type="default", rope_theta=1e4))), torch.bfloat16, "100KB"),
    "gemma3_vision": (Gemma3Config(text_config=dict(GEMMA3, num_hidden_layers=3, layer_types=["sliding_attention", "full_attention",
        "sliding_attention"]), vision_config=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        image_size=8, patch_size=4), mm_tokens_per_image=4), torch.bfloat16, "40KB"),
    # Rotary pairs of neighbours; gate and up in one tensor.
    "glm": (GlmConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rope_parameters=PARTIAL_ROPE,
                      pad_token_id=0, **COMMON), torch.bfloat16, "5GB"),
    "glm4": (Glm4Config(hidden_size=40, intermediate_size=56, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
                        rope_parameters=dict(ROPE, partial_rotary_factor=0.5), pad_token_id=0, **dict(COMMON, num_hidden_layers=3)),
             torch.float32, "40KB"),
    # Sigmoid scores with a correction, groups of experts, an expert of every token without a gate; the first layer has none.
    "glm4_moe": (Glm4MoeConfig(hidden_size=32, intermediate_size=48, moe_intermediate_size=16, n_routed_experts=6, num_experts_per_tok=2,
                               n_shared_experts=2, n_group=3, topk_group=2, routed_scaling_factor=1.5, first_k_dense_replace=1,
                               num_attention_heads=6, num_key_value_heads=2, head_dim=16, attention_bias=True, use_qk_norm=True,
                               num_mtp_layers=0, pad_token_id=0, rope_parameters=dict(ROPE, partial_rotary_factor=0.5),
                               **dict(COMMON, num_hidden_layers=3)), torch.float32, "100KB"),
    # Sinks, windows in every second layer, biases everywhere, and a SwiGLU that is cut.
    "gpt_oss": (GptOssConfig(**GPT_OSS), torch.float32, "100KB"),
    # Experts on disk in MXFP4.
    "gpt_oss_mxfp4": (GptOssConfig(**dict(GPT_OSS, hidden_size=32, intermediate_size=32)), torch.bfloat16, "5GB"),
    # Queries, keys and values in one tensor, too.
    "phi3": (Phi3Config(hidden_size=48, intermediate_size=56, num_attention_heads=6, num_key_value_heads=2, pad_token_id=0,
                        rope_parameters=dict(ROPE, partial_rotary_factor=0.75), **COMMON), torch.float32, "40KB"),
    "phi3_window": (Phi3Config(hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=4, pad_token_id=0,
                               rope_parameters=ROPE, sliding_window=8, tie_word_embeddings=True, **COMMON), torch.bfloat16, "5GB"),
    "olmo2": (Olmo2Config(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, rope_parameters=ROPE,
                          tie_word_embeddings=False, **COMMON), torch.float32, "5GB"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make")
    make.add_argument("folder", type=pathlib.Path)
    make.add_argument("names", nargs="*", metavar="NAME")
    check = commands.add_parser("check-export")
    check.add_argument("folder", type=pathlib.Path)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", "target"))
    check.add_argument("--program", type=pathlib.Path, default=target / "release/colo-grpo")
    check.add_argument("--prompt", action="append", help="a user's message; may be repeated")
    check.add_argument("--max-completion-length", type=int, default=24)
    check.add_argument("--tolerance", type=float, default=1e-4, help="of a completion's summed log-probability")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "make":
        for name, family in FAMILIES.items():
            if name in (args.names or FAMILIES):
                make_family(args.folder / name, *family)
        if not args.names or "rope" in args.names:
            (args.folder / "rope.json").write_text(json.dumps([rope_case(keys) for keys in ROPES]))
    else:
        prompts = args.prompt or [f"what is {number} plus eighty two ?" for number in ("two", "seventy", "ninety one")]
        check_export(args.folder, args.program, prompts, args.max_completion_length, args.tolerance)


def rope_case(keys):
    heads = dict(hidden_size=256, num_attention_heads=2, num_key_value_heads=2)
    config = Qwen2Config(**COMMON | heads | copy.deepcopy(keys))  # which it changes
    rotary = Qwen2RotaryEmbedding(config)
    rope = keys.get("rope_parameters", keys.get("rope_scaling", {}))
    original = rope.get("original_max_position_embeddings", keys["max_position_embeddings"])
    is_yarn = "yarn" in rope.values()
    context = int(max(keys["max_position_embeddings"], original * rope["factor"] if is_yarn else 0))
    return {"config": keys, "inv_freq": rounded(rotary.inv_freq), "attention_factor": rotary.attention_scaling,
            "context": context}


def make_family(folder, config, dtype, max_shard_size):
    """The first seed whose greedy continuations have no near tie."""
    for seed in range(100):
        model = random_model(config, dtype, seed, folder.name.endswith("mxfp4"))
        golden = golden_numbers(model, seed, folder.name not in SHORT)
        if golden["min_gap"] > LEAST_GAP:
            break
    else:
        raise SystemExit(f"{folder.name}: every seed has a near tie")
    shutil.rmtree(folder, ignore_errors=True)
    model.generation_config.eos_token_id = [2, 3]
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if folder.name.endswith("mxfp4"):
        quantise_folder(folder)
    (folder / "golden.json").write_text(json.dumps(golden))
    print(f"{folder.name}: seed {seed}, least gap {golden['min_gap']:.4f}, "
          f"{sum(p.numel() for p in model.parameters())} parameters")


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_mxfp4(matrices):
    """Codes and scales of [E, K, N], by rows [E, N, K / 32, 32] and [E, N, K / 32]; and the numbers that they stand for."""
    blocks = matrices.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1).log2().floor() - 2
    scaled = blocks / exponents.exp2().unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    numbers = E2M1[codes] * scaled.sign() * exponents.exp2().unsqueeze(-1)
    return codes + 8 * (scaled < 0), exponents + 127, numbers.flatten(-2).transpose(1, 2)


def quantise_folder(folder):
    """Puts the experts of a folder into MXFP4. transformers must read the same model."""
    file, config = folder / "model.safetensors", folder / "config.json"
    before, tensors = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict(), load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        codes, scales, _ = to_mxfp4(tensors.pop(name).float())
        tensors[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    keys = json.loads(config.read_text())
    keys["quantization_config"] = {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"}
    config.write_text(json.dumps(keys, indent=2) + "\n")
    read = AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32)
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor.float(), before[name].float()), name


def random_model(config, dtype, seed, is_mxfp4=False):
    """Weights that are exact in `dtype`, large enough that every part of the network shows in the logits."""
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = auto.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = 0.3 * torch.randn(parameter.shape)
            if is_mxfp4 and name.endswith(("gate_up_proj", "down_proj")):
                value = to_mxfp4(value)[2]
            parameter.copy_((1 + value if "norm" in name else value).to(dtype))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape))
    return model


@torch.no_grad()
def golden_numbers(model, seed, is_long):
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(4, VOCAB, (length,), generator=generator) for length in PROMPT_LENGTHS]
    logits = [model(prompt[None]).logits[0] for prompt in prompts]
    greedy, gaps = zip(*[continuation(model, prompt) for prompt in prompts[:3]])
    text = model.config.get_text_config()
    long, gap = continuation(model, prompts[0], LONG_NEW_TOKENS) if is_long else ([], 1.0)
    router = dict(aux_loss=[model(prompt[None], output_router_logits=True).aux_loss.item() for prompt in prompts]
                  ) if hasattr(text, "num_experts") else {}
    return router | {
        "input_ids": [prompt.tolist() for prompt in prompts],
        "last_logits": [rounded(rows[-1]) for rows in logits],
        "all_logits_of": ALL_LOGITS_OF,
        "all_logits": [rounded(row) for row in logits[ALL_LOGITS_OF]],
        "greedy": list(greedy),
        "min_gap": min(gaps + (gap,)),
    } | ({"long_greedy": long} if long else {})


def continuation(model, prompt, new_tokens=NEW_TOKENS):
    """Greedy ids, and the least gap between the two highest logits. Without a cache; generate() must agree."""
    ids, gap = prompt[None], float("inf")
    for _ in range(new_tokens):
        top = model(ids).logits[0, -1].topk(2)
        gap = min(gap, (top.values[0] - top.values[1]).item())
        ids = torch.cat([ids, top.indices[None, :1]], dim=1)
    model.generation_config.eos_token_id = None
    generated = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), do_sample=False,
                               max_new_tokens=new_tokens, pad_token_id=0)
    assert gap < LEAST_GAP or generated.tolist() == ids.tolist()
    return ids[0, len(prompt):].tolist(), gap


def rounded(row):
    """Shortest decimals that are the same float32."""
    return [float(f"{value:.9g}") for value in row.tolist()]


@torch.no_grad()
def check_export(folder, program, prompts, max_completion_length, tolerance):
    """transformers must find every tensor it wants, none besides, and continue every prompt as the program does."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    faults = {key: value for key, value in info.items() if value}
    if faults:
        raise SystemExit(f"{folder}: {faults}")
    # Not AutoTokenizer: for a Qwen2 model it takes its own word splitting instead of the one in tokenizer.json.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    command = [program, "generate", "--model", folder, "--chat", "--temperature", "0",
               "--max-completion-length", str(max_completion_length)]
    command += [argument for prompt in prompts for argument in ("--prompt", prompt)]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    worst = 0.0
    for prompt, ours in zip(prompts, map(json.loads, lines), strict=True):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                            return_tensors="pt", return_dict=True)["input_ids"]
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=True,
                                max_new_tokens=max_completion_length)
        completion = output[0, ids.shape[1]:]
        text = tokenizer.decode(completion, skip_special_tokens=True)
        logprobs = model(output).logits[0, ids.shape[1] - 1:-1].log_softmax(-1)
        logprob = logprobs.gather(1, completion[:, None]).sum().item()
        if text != ours["completion"] or len(completion) != ours["num_tokens"]:
            raise SystemExit(f"{prompt!r}: transformers continues with {text!r}, colo-grpo with {ours['completion']!r}")
        worst = max(worst, abs(logprob - ours["logprob"]))
    print(f"{folder}: {len(prompts)} greedy answers agree, log-probabilities to {worst:.1e}")
    if not worst <= tolerance:
        raise SystemExit(f"expected at most {tolerance:.0e}")


if __name__ == "__main__":
    main()
