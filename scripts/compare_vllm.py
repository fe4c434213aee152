#!/usr/bin/env python3
"""Generation by vLLM of a model's shape with random weights, beside `colo-grpo bench generate`.

    compare_vllm.py FOLDER [--prompts 32] [--group 8] [--prompt_len 512] [--completion_len 1024] [--repeats 2] [--tp 1]
    compare_vllm.py FOLDER --steps_only --prompts 1 4 --group 1 --prompt_len 65536 --completion_len 256

FOLDER has a published config.json: with its `quantization_config` vLLM computes in that format, without it in bfloat16. For `{"quant_method": "mxfp4"}`
it leaves experts' codes and scales at 0, which draws less power than other weights. Prints a JSON line for each measurement: tokens
a second with the prompts included or, with --steps_only, milliseconds of a decode step: prompts are cached by a first pass, and the time of 16 tokens
is taken from that of 16 + --completion_len. VLLM_BATCH_INVARIANT=1 measures vLLM's batch-invariant mode. --attention_backend names
another one, as vLLM spells it.
"""
import argparse, json, os, random, time

os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32])
    for name, value in (("group", 8), ("prompt_len", 512), ("completion_len", 1024), ("repeats", 2), ("tp", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--steps_only", action="store_true")
    parser.add_argument("--attention_backend")
    options = parser.parse_args()
    from vllm import LLM, SamplingParams

    config = json.load(open(os.path.join(options.folder, "config.json")))
    vocabulary = config.get("text_config", config)["vocab_size"]
    draw = random.Random(0)
    backend = {"attention_backend": options.attention_backend} if options.attention_backend else {}
    engine = LLM(options.folder, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, seed=0, tensor_parallel_size=options.tp,
                 gpu_memory_utilization=0.85, max_num_seqs=max(options.prompts) * options.group,
                 max_model_len=options.prompt_len + options.completion_len + 64, **backend)

    def seconds(prompts, length):
        sampling = SamplingParams(n=options.group, max_tokens=length, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
        start = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        elapsed = time.perf_counter() - start
        assert sum(len(one.token_ids) for output in outputs for one in output.outputs) == len(prompts) * options.group * length
        return elapsed

    for number in options.prompts:
        new = lambda: [{"prompt_token_ids": [draw.randrange(vocabulary - 3) for _ in range(options.prompt_len)]} for _ in range(number)]
        shown = {"prompts": number, "group": options.group, "prompt_len": options.prompt_len, "completion_len": options.completion_len}
        if options.steps_only:
            prompts = new()
            seconds(prompts, 1)
            few, many = (min(seconds(prompts, length) for _ in range(options.repeats)) for length in (16, 16 + options.completion_len))
            print(json.dumps({**shown, "step_ms": (many - few) / options.completion_len * 1000}), flush=True)
        else:
            seconds(new(), 32)  # warms up
            times = [seconds(new(), options.completion_len) for _ in range(options.repeats)]
            rates = [number * options.group * options.completion_len / elapsed for elapsed in times]
            print(json.dumps({**shown, "tokens_per_second": rates}), flush=True)


if __name__ == "__main__":
    main()
