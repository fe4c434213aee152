#!/usr/bin/env python3
"""Trains one task of scripts/learning.py with TRL's GRPOTrainer, one seed after the other, and appends an event for each step.

    learning_trl.py TASK.json EVENTS.jsonl [--deadline SECONDS]

TASK.json is what learning.py writes: model, rows of each seed, reward, sizes, rate. Where vLLM is installed and a GPU is there, TRL samples with
it in the same process (`vllm_mode="colocate"`), one engine for all seeds; else with transformers. Weights are float32, forward and backward
autocast to bfloat16 on a GPU. Made with trl 1.16, transformers 5.17, torch 2.11, vllm 0.26.
"""
import argparse, gc, importlib.util, json, os, pathlib, socket, sys, time

BEGUN = time.time()
os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1",
                   "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_DISABLED": "true"})


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=pathlib.Path)
    parser.add_argument("events", type=pathlib.Path)
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds from now after which no step begins")
    options = parser.parse_args()
    task = json.loads(options.task.read_text())
    os.environ["MASTER_PORT"] = str(free_port())  # of its own where another run has another GPU
    import datasets, torch, transformers, trl
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    cuda = torch.cuda.is_available()
    vllm = cuda and importlib.util.find_spec("vllm") is not None
    if vllm:
        from trl.generation import vllm_generation
        make, engines = vllm_generation.LLM, []

        def once(**keys):  # one engine for all seeds: the trainer sends it the weights before each rollout
            if not engines:
                engines.append(make(**keys))
            return engines[0]

        vllm_generation.LLM = once
    path, function = task["reward"].split(":")
    spec = importlib.util.spec_from_file_location("reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    versions = {name: __import__(name).__version__ for name in ("torch", "transformers", "trl", *["vllm"] * vllm)}
    card = torch.cuda.get_device_name(0) if cuda else "CPU"

    def say(number, event, **values):
        with options.events.open("a") as file:
            file.write(json.dumps({"run": f"{task['run']}-{number}", "event": event, **values}) + "\n")

    for seed in task["seeds"]:
        asked = time.time()
        model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(task["model"])  # follows tokenizer.json; AutoTokenizer has rules of its own for some types
        rows = datasets.Dataset.from_list([json.loads(row) for row in pathlib.Path(task["rows"][str(seed)]).read_text().splitlines()])
        batch = task["prompts"] * task["group"]
        micro = min(task["trl_micro_batch"], batch)
        config = trl.GRPOConfig(
            output_dir=f"{task['output']}/{seed}", max_steps=task["steps"], seed=seed, shuffle_dataset=False,
            per_device_train_batch_size=micro, gradient_accumulation_steps=batch // micro, num_generations=task["group"],
            max_completion_length=task["max_completion_length"], learning_rate=task["learning_rate"], lr_scheduler_type="constant",
            warmup_steps=task["warmup_steps"], optim="adamw_torch_fused" if cuda else "adamw_torch", bf16=cuda, use_cpu=not cuda,
            gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            **(dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, vllm_max_model_length=task["context"]) if vllm else {}))
        state = {"begun": None, "late": False}

        class Watch(TrainerCallback):
            def on_train_begin(self, *_, **__):
                state["begun"] = time.time()
                say(seed, "start", task=task["task"], who="TRL" + (" with vLLM" if vllm else ""), variant="", seed=seed, card=card, versions=versions, command=task["command"],
                    start_s=round(state["begun"] - (BEGUN if seed == task["seeds"][0] else asked), 2), steps=task["steps"])

            def on_log(self, args, trainer, control, logs=None, **_):
                if "reward" in logs:
                    say(seed, "step", step=trainer.global_step, seconds=round(time.time() - state["begun"], 3), reward=round(logs["reward"], 5),
                        length=logs.get("completions/mean_length"), learning_rate=logs.get("learning_rate"), num_tokens=logs.get("num_tokens"))
                if time.time() - BEGUN > options.deadline:
                    state["late"] = control.should_training_stop = True
                return control

        trainer = trl.GRPOTrainer(model, getattr(module, function), args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[Watch()])
        first = tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True, tokenize=False)
        trainer.train()
        trainer.save_model(config.output_dir)
        say(seed, "end", late=state["late"], model=config.output_dir, first_prompt=tokenizer(first, add_special_tokens=False)["input_ids"])
        if state["late"]:
            break
        del trainer, model
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would be waited for


if __name__ == "__main__":
    main()
