#!/usr/bin/env python3
"""Golden updates of a policy that is its own teacher, made by TRL's own trainers.

    python scripts/golden_self_distillation.py    # needs torch, transformers, datasets and trl (made with 2.11, 5.24 and 1.16); writes
                                                  # tests/golden/self_distillation.json

`SDFTTrainer` and `SDPOTrainer` train configs/arithmetic/model in float64 on completions that are drawn here, for one update. Each case keeps
what TRL made of the batch (the ids of prompts, of the teacher's prompts, completions, rewards, which of them have a teacher), the loss, the norm
of the gradient, and of the change of each layer's weights, and of all others', sum and norm. With an epsilon as large as the learning rate AdamW's
first change is the gradient itself, up to its sign and one part in a million. The teacher has the policy's weights (`teacher_model_kind = "live"`). With `topk_logits` all tokens are the most probable ones, for both of them.
"""
import json
import os
import pathlib
import random
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = str(ROOT / "configs/arithmetic/model")
EOS, GROUP, LENGTH, VOCABULARY = 1, 4, 10, 64
NUMBERS = ["two", "seven", "twelve", "thirty five"]
COMMON = dict(learning_rate=1e6, adam_epsilon=1e6, max_grad_norm=1e9, temperature=0.9, teacher_model_kind="live")
FULL = dict(distillation_mode="topk_logits", distillation_topk=VOCABULARY)
SAMPLED = dict(distillation_mode="sampled_token", distillation_topk=None, distillation_alpha=1.0)
CASES = {
    "sdft": {
        "sampled": SAMPLED,
        "sampled, some skipped": {**SAMPLED, "num_loss_tokens_to_skip": 2},
        "all tokens": {**FULL, "distillation_alpha": 0.5},
        "all tokens, forward, some skipped": {**FULL, "distillation_alpha": 0.0, "num_loss_tokens_to_skip": 1},
        "another template": {**SAMPLED, "teacher_prompt_template": "{privileged_context} {prompt}"},
    },
    "sdpo": {
        "sampled": SAMPLED,
        "all tokens": {**FULL, "distillation_alpha": 0.3},
        "policy gradient, too": {**SAMPLED, "distillation_weight": 0.4, "loss_type": "dapo"},
        "policy gradient, too, grpo": {**SAMPLED, "distillation_weight": 0.7, "loss_type": "grpo"},
        "feedback": {**SAMPLED, "include_environment_feedback": True},
        "feedback without a solution": {**SAMPLED, "include_environment_feedback": True, "environment_feedback_only_without_solution": True},
        "shown to itself": {**SAMPLED, "dont_reprompt_on_self_success": False},
        "feedback alone": {**SAMPLED, "include_environment_feedback": True, "use_successful_as_teacher": False},
        "a short prompt": {**SAMPLED, "max_reprompt_len": 9},
    },
}


def rows():
    """Prompts, and completions of each: of the first some are right, of the second one, of the others none."""
    draw = random.Random(3)
    prompts = [[{"role": "user", "content": f"what is {number} plus seven ?"}] for number in NUMBERS]
    known = ["the answer is 9", "the answer is 1 4", "  ", "the answer"]
    words = list(range(5, 64))
    def completion():
        ids = [draw.choice(words) for _ in range(draw.randint(1, LENGTH - 1))]
        return ids + [EOS] if len(ids) < LENGTH - 1 else ids + [draw.choice(words)]
    return prompts, known, [[completion() for _ in range(GROUP)] for _ in prompts]


REWARDS = [0.0, 1.0, 0.5, 1.0, 0.0, 0.0, 0.2, 1.5, 0.0, 0.3, 0.0, 0.9, 0.0, 0.0, 0.0, 0.0]


def run(kind, name):
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl.experimental.sdft import SDFTConfig, SDFTTrainer
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    prompts, known, completions = rows()
    flat = [ids for group in completions for ids in group]
    keys = CASES[kind][name]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    before = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    data = datasets.Dataset.from_list([{"prompt": prompt, "privileged_context": text} for prompt, text in zip(prompts, known)])
    seen = {}

    def reward(prompts, completions, **_):
        return REWARDS

    with tempfile.TemporaryDirectory() as folder:
        common = dict(output_dir=folder, max_steps=1, per_device_train_batch_size=len(flat), num_generations=GROUP, max_completion_length=LENGTH,
                      lr_scheduler_type="constant", optim="adamw_torch", shuffle_dataset=False, logging_steps=1, save_strategy="no",
                      report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, **COMMON, **keys)
        if kind == "sdft":
            trainer = SDFTTrainer(model, args=SDFTConfig(**common), train_dataset=data, processing_class=tokenizer)
        else:
            trainer = SDPOTrainer(model, reward_funcs=reward, args=SDPOConfig(**common), train_dataset=data, processing_class=tokenizer)
        trainer._generate = lambda prompt_ids: (prompt_ids, flat)
        inner_loss = trainer.compute_loss

        def compute_loss(model, inputs, *args, **kwargs):
            loss = inner_loss(model, inputs, *args, **kwargs)
            own = lambda key, mask: [row[kept.bool()].tolist() for row, kept in zip(inputs[key], inputs[mask])]
            teacher = own("teacher_input_ids", "teacher_attention_mask")
            completion_ids = own("completion_ids", "completion_mask")
            seen.update(
                loss=loss.item(), prompts=own("prompt_ids", "prompt_mask"), completions=completion_ids,
                teachers=[ids[: len(ids) - len(completion)] for ids, completion in zip(teacher, completion_ids)],
                advantages=inputs["advantages"].tolist() if "advantages" in inputs else [0.0] * len(flat),
                has_teacher=[bool(kept) for kept in inputs.get("self_distillation_mask", torch.ones(len(flat)))])
            return loss

        trainer.compute_loss = compute_loss
        norms = []
        trainer.create_optimizer()
        inner_step = trainer.optimizer.step
        def optimizer_step(*args, **kwargs):
            norms.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm().item())
            return inner_step(*args, **kwargs)
        trainer.optimizer.step = optimizer_step
        trainer.train()
    changes = {}
    for key, weight in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        layer = key.split(".")[2] if ".layers." in key else "rest"
        changes.setdefault(layer, []).append((weight.detach() - before[key]).flatten())
    changes = {layer: [float(torch.cat(parts).sum()), float(torch.cat(parts).norm())] for layer, parts in changes.items()}
    assert seen["completions"] == flat, "TRL trained on other completions"
    return {"kind": kind, "name": name, "config": {**COMMON, **keys}, "loss": seen["loss"], "grad_norm": norms[0], "changes": changes,
            "sequences": [list(row) for row in zip(seen["prompts"], seen["completions"], seen["teachers"], seen["has_teacher"], seen["advantages"])]}


def main():
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch
    import trl

    torch.set_num_threads(1)
    prompts, known, completions = rows()
    cases = [run(kind, name) for kind in CASES for name in CASES[kind]]
    made_by = f"scripts/golden_self_distillation.py, trl {trl.__version__}, torch {torch.__version__}"
    head = {"made_by": made_by, "max_completion_length": LENGTH, "prompts": prompts, "privileged_contexts": known, "rewards": REWARDS}
    lines = ",\n".join(json.dumps(case) for case in cases)
    body = json.dumps(head)[:-1] + f', "cases": [\n{lines}\n]}}\n'
    (ROOT / "tests/golden/self_distillation.json").write_text(body)
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
