#!/usr/bin/env python3
"""Greedy completions of the model of scripts/real_model.py, by transformers in float32. Needs torch and transformers (made with 2.11, 5.24).

    golden_real.py FOLDER tests/golden/smollm2.json    FOLDER is what real_model.py wrote

Each case: `prompt` (a user's message), `prompt_ids` with the chat template, `completion` (24 tokens at most), and `least_gap`, the least
difference between the two highest logits on the way: where it is small, another order of sums may take another token.
"""
import json, sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [
    "What is the capital of France?", "Name three primary colors.", "How many days are in a leap year?", "Who wrote Romeo and Juliet?",
    "What is 12 + 30?", "Translate 'good morning' to Spanish.", "What is the boiling point of water in Celsius?",
    "Write one sentence about the sea.", "What is the largest planet in the solar system?", "What does a carpenter do?",
    "Tom has 3 apples and buys 4 more. How many apples does he have?", "Give me a synonym for happy.", "What is photosynthesis?",
    "In which continent is Egypt?", "How do you make tea?", "What is the opposite of cold?", "Why is the sky blue?",
    "What is the chemical symbol for gold?", "List two animals that can fly.", "Complete the sentence: The early bird catches the",
]
folder, target = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
assert model.dtype == torch.float32, model.dtype
cases = []
with torch.inference_mode():
    for prompt in PROMPTS:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        made = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, output_logits=True, return_dict_in_generate=True)
        gaps = [float(-torch.diff(step[0].topk(2).values)) for step in made.logits]
        completion = tokenizer.decode(made.sequences[0, len(ids):], skip_special_tokens=True)
        cases.append({"prompt": prompt, "prompt_ids": ids, "completion": completion, "least_gap": round(min(gaps), 5)})
with open(target, "w", encoding="utf-8") as file:
    file.write("[\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "\n]\n")
