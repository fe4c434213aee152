#!/usr/bin/env python3
"""Replays runs of colo-grpo through TRL's own trainer: the same completions and rewards, and then loss, gradient norm and weights after
every batch of completions, which is passed over twice. Needs torch, transformers, datasets and trl (made with 2.11, 5.23 and 1.16).

  replay_trl.py PROGRAM FOLDER [--only CASE ..]     PROGRAM makes each run of CASES below on a CPU in float32, with its checkpoints and
                                                    metrics in FOLDER/CASE; then trl.GRPOTrainer makes the same updates in float64
                                                    and in float32, its generation replaced by what was recorded. Prints three lines a
                                                    case: ours against TRL in float64, TRL's own float32 against its float64, and
                                                    ours against TRL in float32. Ends with 1 if ours is off TRL in float64 by more
                                                    than 4e-5 in a loss or a gradient norm, or 4e-6 in a weight.

A loss is compared relative to itself or to 0.01, if that is more: without a KL term it is zero but for rounding while the policy is the one
that sampled. Weights are compared tensor by tensor, by the norm of the difference over the norm. The correction for the sampler is off on
both sides: TRL has it for vLLM alone. What TRL's trainer does not have is put into it: RLOO's advantages are GRPO's of rewards that are
larger by n / (n - 1), and the KL estimators k1 and k2 are added to its loss and differentiated by autograd.
"""
import argparse
import contextlib
import copy
import json
import os
import pathlib
import subprocess
import sys

BOUND = 4e-5  # of float32: TRL's own is up to 3.2e-5 off its float64
MODEL = "configs/arithmetic/model"
STEPS, PROMPTS, GROUP, LENGTH = 4, 4, 8, 12
# An epsilon above the rounding of gradients: below it AdamW steps by the sign of noise.
COMMON = dict(learning_rate=2e-4, adam_epsilon=1e-4, max_grad_norm=1.0, num_iterations=2, temperature=0.9, epsilon=0.05)
CASES = {
    "one_pass": dict(num_iterations=1),
    "dapo": {},
    "grpo": dict(loss_type="grpo"),
    "bnpo": dict(loss_type="bnpo"),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "cispo": dict(loss_type="cispo", epsilon_high=1.02),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.005),
    "sapo": dict(loss_type="sapo"),
    "luspo": dict(loss_type="luspo", importance_sampling_level="sequence"),
    "vespo": dict(loss_type="vespo"),
    "kl": dict(beta=0.1),
    "delta": dict(delta=1.06),
    "entropy": dict(entropy_coef=0.05),
    "top_entropy": dict(top_entropy_quantile=0.5),
    "batch_scale": dict(scale_rewards="batch"),
    "rloo": dict(advantage_estimator="rloo", scale_rewards="none"),
    "k1": dict(beta=0.1, kl_estimator="k1"),
    "k2": dict(beta=0.1, kl_estimator="k2", use_bias_correction_kl=False),
}
# What TRL's trainer is given for keys that it does not have.
OF_TRL = {
    "rloo": dict(scale_rewards="none"),
    "k1": dict(beta=0.0),
    "k2": dict(beta=0.0),
}


def record(prompts, completion_ids, trainer_state, record_to, **_):
    """Our run's reward."""
    return recorded_rewards(record_to[0], completion_ids, step=trainer_state.global_step, prompt=prompts[0])


def recorded_rewards(path, completion_ids, **asked):
    """Any number that differs within groups, written down with its completion and what was asked."""
    rewards = [sum(ids) % 7 / 7 + len(ids) / 100 for ids in completion_ids]
    with open(path, "a") as file:
        file.write(json.dumps({**asked, "completion_ids": completion_ids, "rewards": rewards}) + "\n")
    return rewards


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    words = "zero one two three four five six seven eight nine".split()
    prompts = [f"what is {a} plus {b} ?" for a in words for b in words]
    print(f"{'case':12} {'loss':>9} {'grad_norm':>9} {'weights':>9} {'change':>9}   relative differences, the largest of all batches")
    import torch
    failed = False
    for name in arguments.only:
        options = {**COMMON, **CASES[name]}
        folder = arguments.folder / name
        ours = run_ours(arguments.program, folder, prompts, options)
        exact, narrow = (run_trl(name, folder, prompts, options, dtype) for dtype in (torch.float64, torch.float32))
        worst = compare(ours, exact, folder)
        rounding = compare(as_ours(narrow, len(ours)), exact, folder)
        lines = {"float64": worst, "own rounding": rounding, "float32": compare(ours, narrow, folder)}
        failed |= max(worst[0], worst[1], 10 * worst[2]) > BOUND
        for what, numbers in lines.items():
            print(f"{name:12} " + " ".join(f"{value:9.1e}" for value in numbers) + f"   {what}", flush=True)
    sys.exit(failed)


def run_ours(program, folder, prompts, options):
    """Metrics of every batch."""
    rows, recorded = folder.with_suffix(".rows.jsonl"), folder.with_suffix(".jsonl")
    row = lambda prompt: {"prompt": prompt, "record_to": str(recorded.resolve())}
    rows.write_text("".join(json.dumps(row(prompt)) + "\n" for prompt in prompts))
    recorded.unlink(missing_ok=True)
    keys = dict(
        model_name_or_path=MODEL, train_file=rows, output_dir=folder, device="cpu", dtype="float32", shuffle_dataset=False,
        max_steps=STEPS, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP, max_completion_length=LENGTH,
        lr_scheduler_type="constant", save_steps=1, prompt_format="text", importance_sampling_correction=False, reward_funcs=["replay"],
        **{"rewards.replay.function": f"{pathlib.Path(__file__).resolve()}:record", "rewards.replay.batch": "group",
           "reward.python": sys.executable}, **options)
    written = [f"{key}={json.dumps(value) if isinstance(value, (bool, list)) else value}" for key, value in keys.items()]
    done = subprocess.run([program, *written], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{folder.name}: {done.stderr}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def with_estimator(trainer_class, estimator, beta):
    """A trainer with a KL term by another estimator than TRL's, averaged over tokens as dapo's loss is."""

    class WithEstimator(trainer_class):
        def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
            scored = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            if scored[0].requires_grad:
                import torch

                with torch.no_grad():
                    others = super()._get_per_token_logps_and_entropies(self.initial, *args, **kwargs)[0]
                self.of_loss = scored[0], others
            return scored

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            logps, others = self.of_loss
            old = inputs.get("old_per_token_logps")
            difference = logps - others
            ratio = (logps - (logps.detach() if old is None else old)).exp()
            kl = difference * ratio if estimator == "k1" else difference**2 / 2
            return loss + beta * (kl * inputs["completion_mask"]).sum() / inputs["num_items_in_batch"]

    return WithEstimator


def as_ours(theirs, num_batches):
    """TRL's run in the form of ours: means of losses and norms over the updates of a batch, and the weights after it."""
    _, steps = theirs
    passes = STEPS // num_batches
    mean = lambda updates, name: sum(update[name] for update in updates) / passes
    batches = [steps[at:at + passes] for at in range(0, STEPS, passes)]
    return [{"loss": mean(batch, "loss"), "grad_norm": mean(batch, "grad_norm"), "weights": batch[-1]["weights"]} for batch in batches]


def trl_config(folder, **options):
    """TRL's configuration of a replayed run."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=STEPS, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
        lr_scheduler_type="constant", optim="adamw_torch", shuffle_dataset=False, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, **{"max_completion_length": LENGTH, **options})


def train(trainer):
    """The weights before, and loss, gradient norm and weights of every update."""
    from transformers import TrainerCallback

    steps = []
    weights = lambda model: {name: weight.detach().clone() for name, weight in model.named_parameters()}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            steps.append({"weights": weights(model)})

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs:
                steps[-1].update(loss=logs["loss"], grad_norm=logs["grad_norm"])

    trainer.add_callback(Keep())
    before = weights(trainer.model)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train()
    return before, steps


def run_trl(case, folder, prompts, options, dtype):
    """Loss, gradient norm and weights of every update."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOTrainer

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    recorded = {}
    for line in map(json.loads, folder.with_suffix(".jsonl").read_text().splitlines()):
        recorded[line["prompt"]] = list(zip(line["completion_ids"], line["rewards"], strict=True))
    ours, options = options, {key: value for key, value in options.items() if case not in OF_TRL or key not in CASES[case]}
    options.update(OF_TRL.get(case, {}))
    factor = GROUP / (GROUP - 1) if case == "rloo" else 1.0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)

    def rollout(asked, trainer):
        taken = [recorded[prompt][index % GROUP] for index, prompt in enumerate(asked)]
        ids = [ids for ids, _ in taken]
        return {"prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in asked], "completion_ids": ids, "logprobs": None}

    def reward(prompts, completion_ids, **_):
        rewards = [dict((tuple(ids), reward) for ids, reward in recorded[prompt]) for prompt in prompts]
        return [factor * of_prompt[tuple(ids)] for of_prompt, ids in zip(rewards, completion_ids, strict=True)]

    config = trl_config(folder, **options)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
    trainer_class = GRPOTrainer
    if "kl_estimator" in ours:
        trainer_class = with_estimator(GRPOTrainer, ours["kl_estimator"], ours["beta"])
    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    trainer = trainer_class(model, reward, args=config, train_dataset=rows, processing_class=tokenizer, rollout_func=rollout)
    trainer.initial = copy.deepcopy(trainer.model)
    return train(trainer)


def compare(ours, theirs, folder):
    """The largest relative differences of losses, gradient norms, weights, and of what an update changed in all weights."""
    import torch
    from safetensors.torch import load_file

    before, steps = theirs
    passes = STEPS // len(ours)
    if len(steps) != STEPS or passes * len(ours) != STEPS:
        sys.exit(f"{folder.name}: {len(ours)} batches of ours, {len(steps)} updates of TRL's, expected {STEPS}")
    worst = [0.0] * 4
    for index, own in enumerate(ours):
        last = (index + 1) * passes
        updates = steps[last - passes:last]
        their = {name: sum(update[name] for update in updates) / passes for name in ("loss", "grad_norm")}
        their["weights"] = updates[-1]["weights"]
        weights = own["weights"] if "weights" in own else load_file(folder / f"checkpoint-{last}" / "model.safetensors")
        missing = set(their["weights"]) ^ set(weights)
        if missing:
            sys.exit(f"{folder.name}: weights of one side alone: {sorted(missing)}")
        weights = {name: value.double() for name, value in weights.items()}
        norm = lambda tensors: torch.stack([tensor.double().norm() for tensor in tensors]).norm()
        off = [
            abs(own["loss"] - their["loss"]) / max(abs(their["loss"]), 0.01),
            abs(own["grad_norm"] / their["grad_norm"] - 1),
            max(float((weights[name] - value).norm() / value.norm()) for name, value in their["weights"].items()),
            float(norm(weights[name] - value for name, value in their["weights"].items())
                  / norm(value - before[name] for name, value in their["weights"].items())),
        ]
        worst = [max(pair) for pair in zip(worst, off)]
    return worst


if __name__ == "__main__":
    main()
