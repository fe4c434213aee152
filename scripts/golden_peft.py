#!/usr/bin/env python3
"""Golden numbers of LoRA adapters, from PEFT on the folders of golden.py, and of NF4 weights, from bitsandbytes. Needs
torch, transformers, peft and bitsandbytes (made with 2.11, 5.23, 0.21 and 0.50).

  golden_peft.py tests/golden     writes lora_all and lora_some: an adapter folder as PEFT saves it, with golden.json:
                                  `base`, the model's folder; `input_ids`, one list a prompt; `last_logits`, [V] at each
                                  prompt's last position; `nll`, the summed negative log-likelihood of all next tokens;
                                  `gradients`, by tensor name, the sum of g * cos(index) over the gradient's elements;
                                  and nf4.json: both code books, and of one matrix codes, scales' codes, some values
"""
import argparse
import json
import pathlib

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

CASES = {
    "lora_all": ("qwen2_tied", dict(r=4, lora_alpha=12, target_modules="all-linear")),
    "lora_some": ("qwen3", dict(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj", "up_proj"])),
}
PROMPT_LENGTHS = [5, 13, 21]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    for name, (base, options) in CASES.items():
        make(folder / name, folder / base, options)
    (folder / "nf4.json").write_text(json.dumps(nf4()) + "\n")


def nf4(rows=67, columns=256):
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


def make(folder, base, options):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **options))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in parameters.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    prompts = [torch.randint(3, model.config.vocab_size, (length,)) for length in PROMPT_LENGTHS]
    logits = [model(input_ids=ids[None]).logits[0] for ids in prompts]
    nll = sum(torch.nn.functional.cross_entropy(rows[:-1], ids[1:], reduction="sum")
              for rows, ids in zip(logits, prompts))
    nll.backward()
    model.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"../{base.name}"
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)

    def weighed(gradient):
        return (gradient.double().flatten() * torch.arange(gradient.numel()).double().cos()).sum().item()

    golden = {
        "base": base.name,
        "input_ids": [ids.tolist() for ids in prompts],
        "last_logits": [rows[-1].tolist() for rows in logits],
        "nll": nll.item(),
        "gradients": {name.replace(".default", ""): weighed(p.grad) for name, p in parameters.items()},
    }
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
