#!/usr/bin/env python3
"""Replays a run with a tool through TRL's own trainer: TRL's loop over tool calls runs the tool itself and makes the context, the mask,
the loss, the gradient norm and the weights; the turns that the model sampled are those of our run. Needs what replay_trl.py needs.

  replay_tools.py PROGRAM FOLDER      PROGRAM makes the run on a CPU in float32, with its checkpoints and metrics in FOLDER/tools. Prints
                                      how many trajectories have which turns, and the largest relative differences; ends with 1 if one is
                                      above 2e-5, or a trajectory's tokens are others than ours.

TRL finds tool calls by templates of known models, so the parser of the tiny model's calls, [add(a=1, b=2)], is given to it.
"""
import argparse
import collections
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

from replay_trl import COMMON, GROUP, PROMPTS, STEPS, compare, recorded_rewards, train, trl_config

BOUND = 2e-5
MODEL, TOOLS = "configs/calculator/model", "configs/calculator/tools.py"
LENGTH = 26  # so that the answers to some calls, or the turns behind them, do not fit
ITERATIONS = 1  # a second call of a completion is not answered


def record(completion_ids, question, record_to, **_):
    """Our run's reward."""
    return recorded_rewards(record_to[0], completion_ids, question=question[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = arguments.folder / "tools"
    words = "twenty thirty forty fifty sixty seventy eighty ninety".split()
    questions = [f"what is {a} seven plus {b} two ?" for a in words for b in words][: PROMPTS * STEPS]
    ours = run_ours(arguments.program, folder, questions)
    worst = compare(ours, run_trl(folder, questions), folder)
    print("relative differences: loss {:.1e}, grad_norm {:.1e}, weights {:.1e}, change {:.1e}".format(*worst))
    sys.exit(max(worst[:3]) > BOUND)


def prompt_of(question):
    return [{"role": "user", "content": question}]


def run_ours(program, folder, questions):
    """Metrics of every batch."""
    rows, recorded = folder.with_suffix(".rows.jsonl"), folder.with_suffix(".jsonl")
    row = lambda text: {"prompt": prompt_of(text), "question": text, "record_to": str(recorded.resolve())}
    rows.write_text("".join(json.dumps(row(text)) + "\n" for text in questions))
    recorded.unlink(missing_ok=True)
    keys = dict(
        model_name_or_path=MODEL, train_file=rows, output_dir=folder, device="cpu", dtype="float32", shuffle_dataset=False,
        max_steps=STEPS, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP, max_completion_length=LENGTH,
        lr_scheduler_type="constant", save_steps=1, importance_sampling_correction=False, reward_funcs=["replay"],
        tools=[f"{TOOLS}:add"], tool_call_parser="pythonic", max_tool_calling_iterations=ITERATIONS,
        **{"rewards.replay.function": f"{pathlib.Path(__file__).resolve()}:record", "rewards.replay.batch": "group",
           "reward.python": sys.executable}, **{**COMMON, "num_iterations": 1})
    written = [f"{key}={json.dumps(value) if isinstance(value, (bool, list)) else value}" for key, value in keys.items()]
    done = subprocess.run([program, *written], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{folder.name}: {done.stderr}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def parsed(tokenizer, ids, **_):
    """A message as TRL's parse_response gives it."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    call = re.fullmatch(r"\s*\[add\(a=([0-9]+), b=([0-9]+)\)\]", text)
    message = {"role": "assistant", "content": text}
    if call:
        given = {"a": int(call[1]), "b": int(call[2])}
        message["tool_calls"] = [{"type": "function", "function": {"name": "add", "arguments": given}}]
    return message


def run_trl(folder, questions):
    """Loss, gradient norm and weights of every update."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOTrainer
    from trl.trainer import grpo_trainer

    torch.set_num_threads(1)
    recorded = {}
    for line in map(json.loads, folder.with_suffix(".jsonl").read_text().splitlines()):
        recorded[line["question"]] = list(zip(line["completion_ids"], line["rewards"], strict=True))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    grpo_trainer.supports_tool_calling = lambda _: True
    grpo_trainer.add_response_schema = lambda tokenizer: tokenizer
    grpo_trainer.parse_response = parsed
    tokenizer.response_schema = {}  # so that TRL parses at all
    spec = importlib.util.spec_from_file_location("tools", TOOLS)
    tools = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tools)
    kinds = collections.Counter()

    class Replayed(GRPOTrainer):
        """Its turns are the recorded ones."""

        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, **_):
            if num_generations != 1:
                self.left = collections.defaultdict(list)
                for index, question in enumerate(questions_of(prompt_ids)):
                    self.left[question].append(recorded[question][index % GROUP][0])
            turns = []
            for ids in prompt_ids:
                (question,) = questions_of([ids])
                start = prompt_lens[question]
                so_far = ids[start:]
                taken = next(whole for whole in self.left[question] if whole[: len(so_far)] == so_far)
                self.left[question].remove(taken)
                rest = taken[len(so_far):]
                end = rest.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in rest else len(rest)
                turns.append(rest[:end])
                if end < len(rest):
                    self.left[question].append(taken)  # another turn follows
            return turns, None

    prompts = {text: tokenizer.apply_chat_template(prompt_of(text), add_generation_prompt=True)["input_ids"] for text in questions}
    prompt_lens = {text: len(ids) for text, ids in prompts.items()}

    def questions_of(all_ids):
        return [next(text for text, prompt in prompts.items() if ids[: len(prompt)] == prompt) for ids in all_ids]

    def reward(prompts, completions, completion_ids, question, **_):
        rewards = []
        for text, messages, ids in zip(question, completions, completion_ids, strict=True):
            known = {tuple(ids): reward for ids, reward in recorded[text]}
            if tuple(ids) not in known:
                sys.exit(f"TRL has other tokens for '{text}': {ids}")
            kinds[" ".join(message["role"] for message in messages)] += 1
            rewards.append(known[tuple(ids)])
        return rewards

    config = trl_config(folder, max_completion_length=LENGTH, max_tool_calling_iterations=ITERATIONS, **{**COMMON, "num_iterations": 1})
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    rows = datasets.Dataset.from_list([{"prompt": prompt_of(text), "question": text} for text in questions])
    trainer = Replayed(model, reward, args=config, train_dataset=rows, processing_class=tokenizer, tools=[tools.add])
    before, steps = train(trainer)
    print("trajectories by their messages:", dict(kinds))
    return before, steps


if __name__ == "__main__":
    main()
