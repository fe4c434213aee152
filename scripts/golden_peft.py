#!/usr/bin/env python3
"""Golden numbers of LoRA adapters, from PEFT on the folders of golden.py, and of NF4 weights, from bitsandbytes. Needs
torch, transformers, peft and bitsandbytes (made with 2.11, 5.24, 0.21 and 0.50).

  golden_peft.py make tests/golden [NAME ..]  writes for each of CASES an adapter folder as PEFT saves it, for each of EXPERTS one that PEFT loads,
                                  and nf4.json; or those of these names alone
  golden_peft.py check tests/golden [NAME ..]  exports each folder with colo-grpo, as adapters and merged: PEFT must read the adapters and transformers
                                  the merged model, no tensor missing or left over, with the recorded logits

golden.json of a folder: `base`, the model's folder; `input_ids`, one list a prompt; `last_logits`, [V] at each prompt's last
position; `nll`, the summed negative log-likelihood of all next tokens; `gradients`, by tensor name, the sum of g * cos(index) over
the gradient's elements; `merged`, the same sum over each tensor of the base that PEFT's merge changes, rounded to the base's type; `merged_logits`,
[V] at the last position of the last prompt, if that type is not float32. Adapters of experts are written expert by expert, as PEFT does with transformers 4; with transformers 5 PEFT stacks them when it loads them, and their
gradients here are its own, taken apart again.

nf4.json: both code books, and of one matrix codes, scales' codes, some values.
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

CASES = {
    "lora_all": ("qwen2_tied", dict(r=4, lora_alpha=12, target_modules="all-linear")),
    "lora_fused": ("phi3", dict(r=4, lora_alpha=6, target_modules="all-linear")),
    "lora_gemma3": ("gemma3", dict(r=1, lora_alpha=2, target_modules="all-linear")),
    # The text of a model with images, whose vision tower has modules of the same names.
    "lora_gemma3_vision": ("gemma3_vision", dict(r=2, lora_alpha=3, target_modules=r".*language_model.*\.(q|v|gate|down)_proj")),
    "lora_glm4_moe": ("glm4_moe", dict(r=2, lora_alpha=5, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])),
    "lora_gpt_oss": ("gpt_oss", dict(r=3, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])),
    "lora_hybrid": ("qwen3_5", dict(r=4, lora_alpha=12, target_modules="all-linear")),
    "lora_ministral": ("ministral", dict(r=2, lora_alpha=3, target_modules="all-linear")),
    "lora_mistral": ("mistral", dict(r=3, lora_alpha=2, target_modules=["q_proj", "k_proj", "o_proj", "up_proj"])),
    "lora_mistral3_vision": ("mistral3_vision", dict(r=2, lora_alpha=3, target_modules=r".*language_model.*\.(k|o|up)_proj")),
    "lora_pairs": ("glm4", dict(r=2, lora_alpha=3, target_modules=["q_proj", "k_proj", "o_proj", "down_proj"])),
    "lora_some": ("qwen3", dict(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj", "up_proj"])),
}
EXPERTS = {"lora_experts": ("qwen3_moe", dict(r=2, lora_alpha=5.0, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"]))}
PROMPT_LENGTHS = [5, 13, 21]
PREFIX = "base_model.model."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["make", "check"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", "target"))
    parser.add_argument("--program", type=pathlib.Path, default=target / "release/colo-grpo")
    args = parser.parse_args()
    folder, wanted = args.folder, lambda name: not args.names or name in args.names
    torch.set_num_threads(1)
    if args.command == "check":
        for name in filter(wanted, CASES | EXPERTS):
            check(folder / name, args.program)
        return
    for name, (base, options) in CASES.items():
        if wanted(name):
            make(folder / name, folder / base, options)
    for name, (base, options) in EXPERTS.items():
        if wanted(name):
            make_experts(folder / name, folder / base, options)
    if wanted("nf4"):
        (folder / "nf4.json").write_text(json.dumps(nf4()) + "\n")


@torch.no_grad()
def check(folder, program):
    """What colo-grpo exports is the recorded model for PEFT and transformers."""
    golden = json.loads((folder / "golden.json").read_text())
    base = folder.parent / golden["base"]
    worst = {}
    with tempfile.TemporaryDirectory() as place:
        copied = shutil.copytree(base, pathlib.Path(place) / "base")
        # Without a tokenizer no folder is exported.
        (copied / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"w": 0}, "unk_token": "w"}}')
        for kind, options in (("adapters", []), ("merged", ["--merge"])):
            output = pathlib.Path(place) / kind
            subprocess.run([program, "export", "--model", folder, "--base_model", copied, "--output", output, *options], check=True, capture_output=True)
            if kind == "adapters":
                with warnings.catch_warnings():
                    warnings.simplefilter("error", UserWarning)  # PEFT warns of missing keys
                    model = PeftModel.from_pretrained(load(base), output)
                assert sorted(load_file(output / "adapter_model.safetensors")) == sorted(golden["gradients"]), f"{folder.name}: other tensors"
            else:
                model, info = load(output, output_loading_info=True)
                assert not any(info.values()), f"{folder.name}: {info}"
            rows = torch.stack([model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in golden["input_ids"]])
            expected = torch.tensor(golden["last_logits"])
            if kind == "merged" and "merged_logits" in golden:
                rows, expected = rows[-1], torch.tensor(golden["merged_logits"])
            worst[kind] = (rows - expected).abs().max().item()
    print(f"{folder.name}: logits differ by at most {worst['adapters']:.1e}, merged by {worst['merged']:.1e}")
    # A sum between two values of bfloat16 may be rounded to either.
    limits = {"adapters": 1e-4, "merged": 0.02 if "merged_logits" in golden else 1e-4}
    assert all(worst[kind] <= limit for kind, limit in limits.items()), limits


def nf4(rows=67, columns=256):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    at = torch.arange(rows * columns, dtype=torch.float64)
    values = torch.sin(at * 12.9898) * torch.sin(torch.floor(at / 64) * 0.37) * 0.05
    values[:64] = 0
    codes, state = quantize_4bit(values.float().view(rows, columns), blocksize=64, compress_statistics=True,
                                 quant_type="nf4")
    return {
        "levels": state.code.tolist(),
        "scale_levels": state.state2.code.tolist(),
        "shape": [rows, columns],
        "codes": bytes(codes.flatten().tolist()).hex(),
        "scales": state.absmax.tolist(),
        "every_17th_value": dequantize_4bit(codes, state).flatten()[::17].tolist(),
    }


def load(folder, **options):
    has_images = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    return (AutoModelForImageTextToText if has_images else AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32, **options)


def make(folder, base, options):
    torch.manual_seed(7)
    model = load(base)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **options))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in parameters.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    golden = golden_numbers(model, base)
    golden["gradients"] = {name.replace(".default", ""): weighed(p.grad) for name, p in parameters.items()}
    model.save_pretrained(folder)
    golden |= merged_numbers(model, base, golden["input_ids"][-1])
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"../{base.name}"
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")


def make_experts(folder, base, options):
    torch.manual_seed(7)
    model, r = load(base), options["r"]
    experts = model.config.num_experts
    tensors = {}
    for name, weight in model.named_parameters():
        path = PREFIX + name
        if name.endswith(".gate_up_proj"):
            width, columns = weight.shape[1] // 2, weight.shape[2]
            places = [(path.replace("gate_up_proj", f"{expert}.{half}"), width, columns)
                      for expert in range(experts) for half in ("gate_proj", "up_proj")]
        elif name.endswith(".down_proj"):
            places = [(path.replace("down_proj", f"{expert}.down_proj"), *weight.shape[1:]) for expert in range(experts)]
        elif any(f".{module}." in name for module in options["target_modules"]):
            places = [(path.removesuffix(".weight"), *weight.shape)]
        else:
            continue
        for place, rows, columns in places:
            tensors[f"{place}.lora_A.weight"] = 0.2 * torch.randn(r, columns)
            tensors[f"{place}.lora_B.weight"] = 0.1 * torch.randn(rows, r)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = dict(options, base_model_name_or_path=f"../{base.name}", bias="none", lora_dropout=0.0, peft_type="LORA",
                  task_type="CAUSAL_LM")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    model = PeftModel.from_pretrained(model, folder, is_trainable=True)
    golden = golden_numbers(model, base)
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradients |= by_expert(name.replace(".default", ""), parameter.grad, experts, r)
    assert gradients.keys() == tensors.keys()
    golden["gradients"] = {name: weighed(gradient) for name, gradient in gradients.items()}
    golden |= merged_numbers(model, base, golden["input_ids"][-1])
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")


def by_expert(name, gradient, experts, r):
    """The gradients of adapters as files have them, from that of a stack of all experts'."""
    if ".experts." not in name:
        return {name: gradient}
    is_a, fused = "lora_A" in name, ".base_layer." in name
    path, part = name.replace(".base_layer", "").split(".lora_")
    parts = {}
    for expert in range(experts):
        own = (gradient.view(experts, -1, gradient.shape[1])[expert] if is_a
               else gradient.view(gradient.shape[0], -1, experts)[..., expert])
        halves = {"gate_proj": 0, "up_proj": 1} if fused else {"down_proj": 0}
        for module, half in halves.items():
            rank = slice(half * r, (half + 1) * r)
            rows = own.shape[0] // len(halves)
            block = own[rank] if is_a else own[half * rows:(half + 1) * rows, rank]
            parts[f"{path}.{expert}.{module}.lora_{part}"] = block
    return parts


def golden_numbers(model, base):
    """Scores of random prompts; gradients are left on the parameters."""
    prompts = [torch.randint(3, model.config.get_text_config().vocab_size, (length,)) for length in PROMPT_LENGTHS]
    logits = [model(input_ids=ids[None]).logits[0] for ids in prompts]
    nll = sum(torch.nn.functional.cross_entropy(rows[:-1], ids[1:], reduction="sum")
              for rows, ids in zip(logits, prompts))
    nll.backward()
    return {
        "base": base.name,
        "input_ids": [ids.tolist() for ids in prompts],
        "last_logits": [rows[-1].tolist() for rows in logits],
        "nll": nll.item(),
    }


@torch.no_grad()
def merged_numbers(model, base, ids):
    """By name in files, `weighed` of the tensors that a merge changes; and the merged model's logits, if the base's type rounds it."""
    model, dtype = model.merge_and_unload(), dtype_of(base)
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        before, after = tensors_of(base), tensors_of(pathlib.Path(place))
    assert before.keys() == after.keys()
    changed = [name for name, tensor in sorted(after.items()) if not torch.equal(tensor, before[name].float())]
    numbers = {"merged": {name: weighed(after[name]) for name in changed}}
    if dtype != torch.float32:
        numbers["merged_logits"] = model(input_ids=torch.tensor([ids])).logits[0, -1].tolist()
    return numbers


def tensors_of(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def dtype_of(folder):
    return next(iter(tensors_of(folder).values())).dtype


def weighed(gradient):
    return (gradient.double().flatten() * torch.arange(gradient.numel()).double().cos()).sum().item()


if __name__ == "__main__":
    main()
