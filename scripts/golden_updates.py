#!/usr/bin/env python3
"""Golden updates of a real model under accumulation and on several ranks, made by TRL's own trainer.

    python scripts/golden_updates.py    # needs torch, transformers, datasets and trl (made with 2.11, 5.24 and 1.16); writes
                                        # tests/golden/updates.json

`trl.GRPOTrainer` trains configs/arithmetic/model in float64 on completions that are drawn here, by one process and by two that
torch.distributed joins (gloo). Each case makes the updates of one generation batch, twice over, and keeps what TRL made of the batch
(prompts, completions, advantages), the means over updates of loss and gradient norm, and of the change of
each layer's weights, and of all others', sum and norm. TRL shuffles the completions of a rank before it splits them into updates and micro-batches: here it takes
them in the order in which colo-grpo does, completion i of a rank in update i % updates.
"""
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = str(ROOT / "configs/arithmetic/model")
EOS, GROUP, BATCH, LENGTH = 1, 4, 4, 10  # BATCH completions are a micro-batch
COMMON = dict(learning_rate=5e-5, adam_epsilon=1e-4, max_grad_norm=1.0, num_iterations=2, temperature=0.9, epsilon=0.05)
LOSSES = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "cispo": dict(epsilon_high=1.02),
    "sapo": {},
    "luspo": dict(importance_sampling_level="sequence"),
    "vespo": {},
}
OTHERS = {
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.005),
    "kl": dict(loss_type="dapo", beta=0.1),
    "bnpo_masked": dict(loss_type="bnpo", mask_truncated_completions=True),
    "dapo_masked": dict(loss_type="dapo", mask_truncated_completions=True),
}
CASES = {name: dict(loss_type=name, **keys) for name, keys in LOSSES.items()} | OTHERS
LAYOUTS = [(1, 1, 1), (1, 3, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2)]  # ranks, micro-batches of a rank in an update, updates of a pass


def rows(ranks, accumulation, updates):
    """Prompts, and as many completions of each as are sampled."""
    draw = random.Random(7)
    words = list(range(4, 40))
    prompts = [[draw.choice(words) for _ in range(draw.randint(2, 6))] for _ in range(ranks * accumulation * updates * BATCH // GROUP)]
    def completion():
        ids = [draw.choice(words) for _ in range(draw.randint(1, LENGTH - 1))]
        return ids + [EOS] if len(ids) < LENGTH - 1 else ids + [draw.choice(words)]
    return prompts, [[completion() for _ in range(GROUP)] for _ in prompts]


def run(layout, name):
    """One case; every rank calls it, and returns the sequences of all."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    ranks, accumulation, updates = layout
    prompts, completions = rows(*layout)
    texts = [f"prompt {index}" for index in range(len(prompts))]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    seen = {}

    def rollout(asked, trainer):
        taken = {text: 0 for text in asked}
        ids = []
        for text in asked:
            ids.append(completions[texts.index(text)][taken[text] % GROUP])
            taken[text] += 1
        return {"prompt_ids": [prompts[texts.index(text)] for text in asked], "completion_ids": ids, "logprobs": None}

    def reward(prompts, completion_ids, **_):
        return [sum(ids) % 7 / 7 + len(ids) / 50 for ids in completion_ids]

    def in_order(batch):
        size = len(batch["completion_ids"])
        order = torch.tensor(sorted(range(size), key=lambda at: (at % updates, at)))
        own = lambda key, mask: [row[kept.bool()].tolist() for row, kept in zip(batch[key], batch[mask])]
        prompt_ids = own("prompt_ids", "prompt_mask")
        seen["rows"] = list(zip(prompt_ids, batch["completion_ids"].tolist(), batch["completion_mask"].tolist(), batch["advantages"].tolist()))
        return {key: value[order] if torch.is_tensor(value) and value.dim() else value for key, value in batch.items()}

    grpo_trainer.shuffle_sequence_dict = in_order
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, max_steps=updates * COMMON["num_iterations"], per_device_train_batch_size=BATCH, num_generations=GROUP,
            gradient_accumulation_steps=accumulation, steps_per_generation=accumulation * updates, max_completion_length=LENGTH,
            lr_scheduler_type="constant", optim="adamw_torch", shuffle_dataset=False, logging_steps=1, save_strategy="no", report_to=[],
            use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, **{**COMMON, **CASES[name]})
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
        before = {key: weight.detach().clone() for key, weight in model.named_parameters()}
        rows_of = datasets.Dataset.from_list([{"prompt": text} for text in texts])
        logs = []

        class Keep(TrainerCallback):
            def on_log(self, args, state, control, logs=None, **_):
                if "loss" in logs:
                    kept.append((logs["loss"], float(logs["grad_norm"])))

        kept = logs
        trainer = GRPOTrainer(model, reward, args=config, train_dataset=rows_of, processing_class=tokenizer, rollout_func=rollout,
                              callbacks=[Keep()])
        # The log rounds losses: what every micro-batch gave is kept whole.
        exact, inner = [], trainer.compute_loss
        def compute_loss(*args, **kwargs):
            loss = inner(*args, **kwargs)
            exact.append(loss.detach().clone())
            return loss
        trainer.compute_loss = compute_loss
        sys.stdout = open(os.devnull, "w")
        trainer.train()
        sys.stdout = sys.__stdout__
    total = sum(exact)
    own = {"rows": seen["rows"], "loss": float(total)}
    everyone = [own]
    if ranks > 1:
        everyone = [None] * ranks
        torch.distributed.all_gather_object(everyone, own)
    num_updates = updates * COMMON["num_iterations"]
    assert len(logs) == num_updates, logs
    sequences = []
    for prompt, ids, mask, advantage in (row for part in everyone for row in part["rows"]):
        sequences.append([prompt, None if not any(mask) else ids[: sum(mask)], advantage])
    # A masked completion has no mask left: its length is that of what was drawn.
    drawn = [ids for group in completions for ids in group]
    sequences = [[prompt, found, ids is None, advantage] for (prompt, ids, advantage), found in zip(sequences, drawn, strict=True)]
    changes = {}
    for key, weight in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        layer = key.split(".")[2] if ".layers." in key else "rest"
        changes.setdefault(layer, []).append((weight.detach() - before[key]).flatten())
    changes = {layer: [float(torch.cat(parts).sum()), float(torch.cat(parts).norm())] for layer, parts in changes.items()}
    return {
        "name": name, "config": {**COMMON, **CASES[name]}, "layout": layout, "sequences": sequences,
        "loss": sum(part["loss"] for part in everyone) / ranks / num_updates,
        "grad_norm": sum(norm for _, norm in logs) / num_updates, "changes": changes,
    }


def main():
    if "CASES_TO" in os.environ:  # one of the processes below
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        import torch

        torch.set_num_threads(1)
        ranks = int(os.environ["WORLD_SIZE"])
        made = [run(layout, name) for layout in LAYOUTS if layout[0] == ranks for name in CASES]
        if os.environ["RANK"] == "0":
            pathlib.Path(os.environ["CASES_TO"]).write_text(json.dumps(made))
        return
    import torch
    import trl

    cases = []
    for ranks in (1, 2):
        with tempfile.NamedTemporaryFile() as file:
            launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", __file__]
            subprocess.run(launcher, check=True, env={**os.environ, "CASES_TO": file.name, "CUDA_VISIBLE_DEVICES": ""})
            cases += json.loads(pathlib.Path(file.name).read_text())
    made_by = f"scripts/golden_updates.py, trl {trl.__version__}, torch {torch.__version__}"
    lines = ",\n".join(json.dumps(case) for case in cases)
    (ROOT / "tests/golden/updates.json").write_text(f'{{"made_by": "{made_by}", "batch": {BATCH}, "max_completion_length": {LENGTH}, "cases": [\n{lines}\n]}}\n')
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
