#!/usr/bin/env python3
"""Golden numbers for `src/grpo`, made by TRL's own code.

    python scripts/golden_trl.py        # needs torch 2.11 and trl 1.16; writes grpo.json, reference_sync.json and distillation.json in tests/golden

`GRPOTrainer._generate_and_score_completions` (`RLOOTrainer`'s for its advantages) and `GRPOTrainer._compute_loss` run unbound, in
float64, on a stand-in for the trainer: generation and rewards return prepared lists, and the forward pass returns prepared
log-probabilities, which for the policy are a leaf whose gradient is kept. Everything between (advantages, denominators, sampler
correction, masks, KL, losses, metrics) is TRL's.
"""

import itertools
import json
import math
import pathlib
import types
from collections import defaultdict

import accelerate
import torch
import trl
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.sdpo.sdpo_trainer import SDPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback

EOS, PAD, WORD = 2, 0, 7
LENGTHS = [5, 3, 1, 6, 2, 4, 7, 3]  # completion tokens of each sequence
TRUNCATED = 3  # the sequence without an end-of-sequence token
NUM_GENERATIONS = 4
MAX_COMPLETION_LENGTH = 9
OF_LOSS_TYPES = dict(
    sapo_temperature_neg=1.05,
    sapo_temperature_pos=1.0,
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
)
CONFIG_DEFAULTS = dict(
    loss_type="dapo",
    importance_sampling_level="token",
    epsilon=0.2,
    epsilon_high=0.28,
    delta=None,
    beta=0.0,
    use_bias_correction_kl=True,
    importance_sampling_correction=False,
    importance_sampling_mode="sequence_mask",
    importance_sampling_clip_max=1.25,
    importance_sampling_clip_min=None,
    off_policy_mask_threshold=None,
    top_entropy_quantile=1.0,
    entropy_coef=0.0,
    max_completion_length=MAX_COMPLETION_LENGTH,
)
ADAPTIVE = dict(entropy_target=0.5, entropy_coef_min=0.01, entropy_coef_max=0.04, entropy_coef_delta=0.015)


def trainer(config, batch, rewards, reward_weights, scale_rewards, num_generations, mask_truncated, use_old, aggregation, of):
    """Stands in for `self`: every attribute that the two methods read for text-only training without tools."""
    model = types.SimpleNamespace(training=True, is_gradient_checkpointing=False)
    reference = types.SimpleNamespace()
    rows = [[WORD] * (n - 1) + [WORD if i == TRUNCATED else EOS] for i, n in enumerate(batch["lengths"])]
    current = pad_rows(batch["logprobs"], batch["lengths"]).requires_grad_(True)
    has_bonus = config["entropy_coef"] != 0.0 or config.get("use_adaptive_entropy", False)
    entropy = pad_rows(batch["entropy"], batch["lengths"]).requires_grad_(has_bonus)
    scored = {
        "old": pad_rows(batch["old_logprobs"] if use_old else batch["logprobs"], batch["lengths"]),
        "reference": pad_rows(batch["ref_logprobs"], batch["lengths"]),
    }

    def forward(which, *_, compute_entropy=False, **__):
        if compute_entropy:  # `_compute_loss`
            return current, entropy, None
        return scored["reference" if which is reference else "old"], None, None

    def generate(prompts):
        if of is RLOOTrainer:
            return [[WORD]] * len(rows), rows, [""] * len(rows)
        logprobs = split_rows(batch["rollout_logprobs"], batch["lengths"])
        return [[WORD]] * len(rows), rows, None, [""] * len(rows), logprobs, {}, None, []

    correction = config["importance_sampling_correction"]
    fake = types.SimpleNamespace(
        model=model,
        ref_model=reference,
        accelerator=types.SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=1,
            process_index=0,
            is_main_process=True,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, **_: x,
            sync_gradients=True,
        ),
        state=types.SimpleNamespace(global_step=0),
        args=types.SimpleNamespace(
            report_to=[],
            per_device_train_batch_size=len(rows),
            steps_per_generation=1,
            gradient_accumulation_steps=1 if not use_old else 3,
            gradient_checkpointing_kwargs=None,
            delta=config["delta"],
            use_bias_correction_kl=config["use_bias_correction_kl"],
            **{key: config.get(key, default) for key, default in OF_LOSS_TYPES.items()},
            **{key: config.get(key) for key in ADAPTIVE},
        ),
        num_iterations=1 if not use_old else 2,
        current_gradient_accumulation_steps=1,
        environment_factories=None,
        environments=None,
        tools=None,
        rollout_func=None,
        _is_vlm=False,
        _tokenizer=types.SimpleNamespace(pad_token_id=PAD),
        eos_token_ids=[EOS],
        pad_to_multiple_of=None,
        _generate=generate,
        _calculate_rewards=lambda *_: rewards.clone(),
        _get_per_token_logps_and_entropies=forward,
        reward_func_names=[f"reward_{i}" for i in range(rewards.size(1))],
        reward_funcs=[None] * rewards.size(1),
        reward_weights=reward_weights,
        multi_objective_aggregation=aggregation,
        scale_rewards=scale_rewards,
        num_generations=num_generations,
        mask_truncated_completions=mask_truncated,
        use_vllm=correction,
        vllm_importance_sampling_correction=correction,
        vllm_importance_sampling_mode=config["importance_sampling_mode"],
        vllm_importance_sampling_clip_min=config["importance_sampling_clip_min"],
        vllm_importance_sampling_clip_max=config["importance_sampling_clip_max"],
        loss_type=config["loss_type"],
        importance_sampling_level=config["importance_sampling_level"],
        epsilon_low=config["epsilon"],
        epsilon_high=config["epsilon_high"],
        beta=config["beta"],
        max_completion_length=config["max_completion_length"],
        top_entropy_quantile=config["top_entropy_quantile"],
        entropy_coef=config["entropy_coef"],
        use_adaptive_entropy=config.get("use_adaptive_entropy", False),
        _last_world_entropy=float("inf"),
        _entropy_window_stats=None,
        off_policy_mask_threshold=config["off_policy_mask_threshold"],
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        normalize_advantages=scale_rewards == "batch",  # RLOO's
        reward_clip_range=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=has_bonus,
        log_multimodal=False,
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    fake.get_high_entropy_mask = types.MethodType(GRPOTrainer.get_high_entropy_mask, fake)
    return fake, model, current, entropy


def pad_rows(flat, lengths):
    """Ragged values as `[sequences, longest]`; padding holds a value that would show if it were counted."""
    rows = split_rows(flat, lengths)
    return torch.tensor([row + [-5.0] * (max(lengths) - len(row)) for row in rows], dtype=torch.float64)


def split_rows(flat, lengths):
    values = iter(flat)
    return [list(itertools.islice(values, n)) for n in lengths]


def unpad(rows, lengths):
    return [value for row, n in zip(rows.tolist(), lengths) for value in row[:n]]


def run(config, batch, rewards, reward_weights=(1.0,), scale_rewards="group", mask_truncated=False, use_old=True,
        num_generations=NUM_GENERATIONS, with_loss=True, of=GRPOTrainer, aggregation="sum_then_normalize"):
    weights = torch.tensor(reward_weights, dtype=torch.float64)
    rewards = torch.tensor(rewards, dtype=torch.float64).view(len(batch["lengths"]), -1)
    fake, model, current, entropy = trainer(
        config, batch, rewards, weights, scale_rewards, num_generations, mask_truncated, use_old, aggregation, of
    )
    inputs = [{"prompt": ""} for _ in batch["lengths"]]
    scored = of._generate_and_score_completions(fake, inputs)
    result = {"advantages": scored["advantages"].tolist()}
    if with_loss:
        loss = GRPOTrainer._compute_loss(fake, model, scored)
        if "distillation_weight" in config:
            weight, divergence = config["distillation_weight"], distillation(config, batch, current, use_old, fake)
            loss = (1 - weight) * loss + weight * divergence
        loss.backward()
        result["loss"] = loss.item()
        result["dlogprobs"] = unpad(current.grad, batch["lengths"])
        if entropy.grad is not None:
            result["dentropy"] = unpad(entropy.grad, batch["lengths"])
            result["policy_loss"] = fake._metrics["train"].pop("policy_loss")[0]
            del fake._metrics["train"]["entropy_coef"]
    wanted = ("kl", "distillation", "entropy", "clip_ratio", "cispo", "vespo", "sampling/") if with_loss else ("reward", "frac_reward", "kl")
    metrics = fake._metrics["train"]
    result["metrics"] = {name: none_for_nan(metrics[name][0]) for name in metrics if name.startswith(wanted)}
    return result


def distillation(config, batch, current, use_old, fake):
    """`SDPOTrainer`'s loss with `distillation_mode = "sampled_token"` of a vocabulary of two tokens, of which the first is sampled."""
    logits = lambda logprobs: torch.stack([logprobs, torch.log1p(-logprobs.exp())], dim=-1)
    ids = torch.zeros(current.shape, dtype=torch.long)
    teacher = pad_rows(batch["teacher_logprobs"], batch["lengths"])
    args = types.SimpleNamespace(distillation_mode="sampled_token", distillation_alpha=1.0,
                                 distillation_is_clip=config["distillation_is_clip"])
    metrics = {}
    stand_in = types.SimpleNamespace(args=args, accelerator=fake.accelerator,
                                     _log_self_distillation_metric=lambda mode, value: metrics.update(loss=value))
    mask = torch.tensor([[1.0] * n + [0.0] * (max(LENGTHS) - n) for n in LENGTHS])
    scored = types.SimpleNamespace(student_logits=logits(current), teacher_logits=logits(teacher), completion_ids=ids, loss_mask=mask)
    inputs = {"old_per_token_logps": pad_rows(batch["old_logprobs"], batch["lengths"])} if use_old else {}
    difference = ((current.detach() - teacher) * mask).sum() / mask.sum()
    fake._metrics["train"]["distillation/kl"].append(difference.item())
    return SDPOTrainer._compute_self_distillation_loss(stand_in, types.SimpleNamespace(training=True), inputs, scored)


def top_k_distillation():
    """`SDPOTrainer`'s loss with `distillation_mode = "topk_logits"` of a server's scores, which are the teacher's most probable tokens:
    each case's loss and metric, and its gradient by all logits of the student."""
    lengths, vocabulary, num_top = [4, 1, 3], 9, 3
    generator = torch.Generator().manual_seed(2)
    draw = lambda: torch.randn(len(lengths), max(lengths), vocabulary, generator=generator, dtype=torch.float64) * 1.5
    student, teacher = draw(), draw()
    teacher[0, 1] = torch.tensor([18.0, 17.0, 16.5, -12.0, -12.0, -13.0, -14.0, -14.0, -15.0])  # next to nothing is left for others
    ids = torch.randint(vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = torch.tensor([[1.0] * n + [0.0] * (max(lengths) - n) for n in lengths])
    old = torch.log_softmax(student, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    old = old + 0.8 * torch.randn(old.shape, generator=generator, dtype=torch.float64)
    scored = torch.log_softmax(teacher, -1)
    top, top_ids = scored.topk(num_top, dim=-1)
    answer = {"actual_logprobs": scored.gather(-1, ids.unsqueeze(-1)).squeeze(-1), "topk_logprobs": top, "topk_token_ids": top_ids}
    rows = lambda tensor: [tensor[row, :n].reshape(-1).tolist() for row, n in enumerate(lengths)]
    result = {"made_by": f"scripts/golden_trl.py, trl {trl.__version__}, torch {torch.__version__}", "lengths": lengths,
              "vocabulary": vocabulary, "num_top": num_top, "ids": rows(ids), "logits": rows(student), "old_logprobs": rows(old),
              "teacher_logprobs": rows(answer["actual_logprobs"]), "top_ids": rows(top_ids), "top_logprobs": rows(top), "cases": []}
    for alpha, add_tail, is_clip in itertools.product((1.0, 0.0, 0.5, 0.2), (False, True), (None, 1.3)):
        leaf, metrics = student.clone().requires_grad_(True), {}
        args = types.SimpleNamespace(distillation_mode="topk_logits", distillation_topk=num_top, distillation_alpha=alpha,
                                     distillation_add_tail=add_tail, distillation_is_clip=is_clip)
        stand_in = types.SimpleNamespace(
            args=args, state=types.SimpleNamespace(global_step=0), _last_loaded_step=0, _metrics={"train": defaultdict(list)},
            accelerator=types.SimpleNamespace(gather=lambda tensor: tensor), _forward_logits=lambda **_: leaf,
            _get_teacher_token_logprobs_from_server=lambda inputs, keep: answer,
            _log_self_distillation_metric=lambda mode, value: metrics.update(loss=value))
        inputs = {"prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask,
                  "old_per_token_logps": old}
        loss = SDPOTrainer._compute_server_distillation_loss(stand_in, types.SimpleNamespace(training=True), inputs)
        loss.backward()
        result["cases"].append({"alpha": alpha, "add_tail": add_tail, "is_clip": is_clip, "loss": loss.item(),
                                "metric": metrics["loss"], "dlogits": rows(leaf.grad)})
    return result


def none_for_nan(value):
    return None if isinstance(value, float) and math.isnan(value) else value


def make_batch(generator):
    """Ratios on both sides of every bound; sampler log-probabilities float32, as TRL makes them, with one missing."""
    total = sum(LENGTHS)
    normal = lambda scale: torch.randn(total, generator=generator, dtype=torch.float64) * scale
    logprobs = -torch.rand(total, generator=generator, dtype=torch.float64) * 2 - 0.1
    old = logprobs + normal(0.3)
    rollout = (old + normal(0.15)).float().double()
    rollout[10] = float("nan")
    return {
        "lengths": LENGTHS,
        "logprobs": rounded(logprobs),
        "old_logprobs": rounded(old),
        "ref_logprobs": rounded(logprobs + normal(0.4)),
        "rollout_logprobs": rollout.tolist(),
        "entropy": rounded(torch.rand(total, generator=generator, dtype=torch.float64)),
        "teacher_logprobs": rounded(logprobs.clamp(max=-0.2) + torch.rand(total, generator=generator, dtype=torch.float64) * 0.3 - 0.2),
    }


def rounded(tensor):
    return [round(value, 6) for value in tensor.tolist()]


def loss_cases(batch, rewards):
    variants = {
        "plain": {},
        "delta": dict(delta=1.4),
        "delta_below_high": dict(delta=1.1),
        "kl": dict(beta=0.1, use_bias_correction_kl=False),
        "kl_corrected": dict(beta=0.1),
        **{
            mode: dict(importance_sampling_correction=True, importance_sampling_mode=mode)
            for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        },
        "everything": dict(delta=1.4, beta=0.1, importance_sampling_correction=True),
        "everything_on_policy": dict(beta=0.1, importance_sampling_correction=True),
    }
    for loss_type, level in itertools.product(
        ("grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo", "luspo", "vespo"), ("token", "sequence")
    ):
        for name, changes in {**variants, **new_variants(loss_type)}.items():
            if loss_type in ("cispo", "sapo", "vespo") and name.startswith("delta"):
                continue
            config = {**CONFIG_DEFAULTS, "loss_type": loss_type, "importance_sampling_level": level, **changes}
            if loss_type == "cispo":
                config["epsilon_high"] = 1.2  # for cispo the bound of the ratio itself
            if loss_type == "vespo":
                if name.startswith("sequence"):
                    continue  # TRL refuses a correction by sequences
                config["importance_sampling_mode"] = config["importance_sampling_mode"].replace("sequence", "token")
            masked, use_old = name.startswith("everything"), name != "everything_on_policy"
            result = run(config, batch, rewards, mask_truncated=masked, use_old=use_old)
            yield {"name": f"{loss_type} {level} {name}", "config": config, "mask_truncated": masked, "use_old": use_old,
                   **result}


def new_variants(loss_type):
    variants = {
        **{
            f"{mode}_from_below": dict(importance_sampling_correction=True, importance_sampling_mode=mode,
                                       importance_sampling_clip_min=0.9)
            for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        },
        "off_policy_mask": dict(off_policy_mask_threshold=0.02),
        "everything_and_mask": dict(beta=0.1, importance_sampling_correction=True, importance_sampling_clip_min=0.8,
                                    off_policy_mask_threshold=0.05),
    }
    variants |= {
        "top_entropy": dict(top_entropy_quantile=0.3),
        "entropy_bonus": dict(entropy_coef=0.05),
        "everything_of_entropy": dict(beta=0.1, importance_sampling_correction=True, off_policy_mask_threshold=0.05,
                                      top_entropy_quantile=0.45, entropy_coef=-0.02),
    }
    variants |= {
        "teacher": dict(distillation_weight=1.0, distillation_is_clip=2.0),
        "teacher_clipped": dict(distillation_weight=0.25, distillation_is_clip=1.1, beta=0.1),
        "teacher_without_ratio": dict(distillation_weight=0.5, distillation_is_clip=None),
    }
    if loss_type == "sapo":
        variants["temperatures"] = dict(sapo_temperature_neg=2.5, sapo_temperature_pos=0.5)
    if loss_type == "vespo":
        variants["weights"] = dict(vespo_k_pos=1.5, vespo_lambda_pos=0.7, vespo_k_neg=0.5, vespo_lambda_neg=0.0)
    return variants


def adaptive_entropy(batch, rewards):
    """Weights that TRL applies and reaches over updates of some entropies; the loss says what was applied."""
    config = {**CONFIG_DEFAULTS, "entropy_coef": 0.02, "use_adaptive_entropy": True, **ADAPTIVE}
    weights = torch.ones(1, dtype=torch.float64)
    table = torch.tensor(rewards, dtype=torch.float64).view(-1, 1)
    fake, model, _, entropies = trainer(config, batch, table, weights, "group", NUM_GENERATIONS, False, True,
                                        "sum_then_normalize", GRPOTrainer)
    scored = GRPOTrainer._generate_and_score_completions(fake, [{"prompt": ""} for _ in batch["lengths"]])
    updates, base = [], entropies.detach().clone()
    for scale in (0.5, 0.4, 2.0, 2.0, 2.0, 0.3, 0.3, 0.3, 0.3, 1.0):
        entropies.data = base * scale
        loss = GRPOTrainer._compute_loss(fake, model, scored)
        entropy = fake._last_world_entropy
        applied = (fake._metrics["train"]["policy_loss"][-1] - loss.item()) / entropy
        updates.append({"entropy": entropy, "applied": round(applied, 12), "coef": fake.entropy_coef})
    return {"entropy_coef": 0.02, **ADAPTIVE, "updates": updates}


def advantage_cases(batch):
    nan = float("nan")
    tables = {
        "plain": [[0.0], [1.0], [0.5], [2.0], [1.0], [1.0], [1.0], [1.0]],
        "two rewards, some missing": [[0, 1], [1, nan], [nan, nan], [0.5, 2], [nan, 1], [1, 0], [2, 2], [0, nan]],
        "one left in a group": [[0.25], [nan], [nan], [nan], [1.0], [0.0], [nan], [3.0]],
        "none left in a group": [[nan], [nan], [nan], [nan], [1.0], [0.0], [0.0], [1.0]],
    }
    tables["two rewards"] = [[0, 1], [1, 3], [0, 0], [0.5, 2], [1, 1], [1, 0], [1, 2], [1, 0]]
    summed, decoupled = "sum_then_normalize", "normalize_then_sum"
    kinds = [("grpo", "group", summed), ("grpo", "batch", summed), ("grpo", "none", summed),
             ("rloo", "none", summed), ("rloo", "batch", summed), ("grpo", "group", decoupled)]
    in_reward = [(*kind, 0.1) for kind in kinds if kind[0] == "rloo"]  # RLOOTrainer's beta weighs the KL divergence in the reward
    kinds = [(*kind, 0.0) for kind in kinds] + in_reward
    for (name, table), (estimator, scale, aggregation, beta) in itertools.product(tables.items(), kinds):
        weights = [1.0, 0.5][: len(table[0])]
        result = run({**CONFIG_DEFAULTS, "beta": beta}, batch, table, weights, scale, with_loss=False, aggregation=aggregation,
                     of=RLOOTrainer if estimator == "rloo" else GRPOTrainer)
        yield {"name": f"{name}, {estimator}, {scale}, {aggregation}, {beta}", "advantage_estimator": estimator,
               "scale_rewards": scale, "multi_objective_aggregation": aggregation, "reward_weights": weights, "beta": beta,
               "num_generations": NUM_GENERATIONS, "rewards": [[none_for_nan(r) for r in row] for row in table],
               **result}


def reference_sync():
    """A reference model that `sync_ref_model` mixes a moving policy into, three times."""
    generator, alpha = torch.Generator().manual_seed(1), 0.6
    result = {"made_by": f"scripts/golden_trl.py, trl {trl.__version__}, torch {torch.__version__}", "alpha": alpha}
    for dtype in (torch.float32, torch.bfloat16):
        draw = lambda: torch.randn(64, generator=generator, dtype=torch.float64).to(dtype)
        reference = torch.nn.ParameterList([torch.nn.Parameter(draw())])
        case = {"initial": [reference[0].tolist()], "policies": [], "mixed": []}
        for _ in range(3):
            policy = torch.nn.ParameterList([torch.nn.Parameter(draw())])
            SyncRefModelCallback._sync_target_model(policy, reference, alpha)
            case["policies"].append(policy[0].tolist())
            case["mixed"].append(reference[0].tolist())
        result[str(dtype).removeprefix("torch.")] = case
    return result


def main():
    accelerate.PartialState(cpu=True)
    torch.set_default_dtype(torch.float64)  # of tensors that TRL makes of two Python numbers
    batch = make_batch(torch.Generator().manual_seed(0))
    rewards = [0.0, 1.0, 0.5, 2.0, 1.0, 0.0, 0.0, 0.3]
    golden = {
        "made_by": f"scripts/golden_trl.py, trl {trl.__version__}, torch {torch.__version__}",
        "truncated": TRUNCATED,
        "batch": {**batch, "rollout_logprobs": [none_for_nan(value) for value in batch["rollout_logprobs"]]},
        "losses": list(loss_cases(batch, rewards)),
        "adaptive_entropy": adaptive_entropy(batch, rewards),
        "advantages": list(advantage_cases(batch)),
    }
    path = pathlib.Path(__file__).parent.parent / "tests/golden/grpo.json"
    lines = lambda rows: "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
    body = ",\n".join(
        f"{json.dumps(key)}: {lines(value) if key in ('losses', 'advantages') else json.dumps(value)}"
        for key, value in golden.items()
    )
    path.write_text("{\n" + body + "\n}\n")
    path.with_name("reference_sync.json").write_text(json.dumps(reference_sync()) + "\n")
    path.with_name("distillation.json").write_text(json.dumps(top_k_distillation()) + "\n")
    print(f"{len(golden['losses'])} losses, {len(golden['advantages'])} advantages, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
