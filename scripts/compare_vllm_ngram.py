#!/usr/bin/env python3
"""Whole rollouts of a model's own text by vLLM, with n-gram drafts and without, beside `colo-grpo bench speculation`.

    compare_vllm_ngram.py MODEL ROWS.jsonl --method none|ngram [--sequences 1,8,64,256] [--group 8] [--max_completion_length 768]
                          [--num_speculative_tokens 7] [--repeats 3] [--same_rows]

Prints one JSON object with seconds and tokens a second of each number of completions. The rows of a rollout are those that the benchmark takes;
one process measures one method, as an engine is started for it. vLLM rejects drafts by chance, so that its tokens are others with drafts.
"""
import argparse, json, os, statistics, time

os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false",
                   "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("--method", choices=["none", "ngram"], required=True)
    parser.add_argument("--sequences", default="1,8,64,256")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max_completion_length", type=int, default=768)
    parser.add_argument("--num_speculative_tokens", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--same_rows", action="store_true")
    options = parser.parse_args()
    from transformers import PreTrainedTokenizerFast
    from vllm import LLM, SamplingParams

    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    rows = [json.loads(line)["prompt"] for line in open(options.rows)]
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": options.num_speculative_tokens, "prompt_lookup_min": 2,
                                     "prompt_lookup_max": 8}} if options.method == "ngram" else {}
    engine = LLM(options.model, dtype="bfloat16", skip_tokenizer_init=True, gpu_memory_utilization=0.5, max_num_seqs=256, seed=0, **drafts)
    end = json.load(open(os.path.join(options.model, "config.json"))).get("eos_token_id")
    ends = [end] if isinstance(end, int) else list(end or [])

    def ids(row):
        if isinstance(row, str):
            return tokenizer(row)["input_ids"]
        return tokenizer(tokenizer.apply_chat_template(row, tokenize=False, add_generation_prompt=True), add_special_tokens=False)["input_ids"]

    sizes = []
    for sequences in map(int, options.sequences.split(",")):
        group = min(options.group, sequences)
        count = sequences // group
        seconds, tokens, longest = [], 0, 0
        for repeat in range(options.repeats + 1):
            first = 0 if options.same_rows else repeat * count
            prompts = [{"prompt_token_ids": ids(row)} for row in rows[first:first + count]]
            params = SamplingParams(n=group, temperature=1.0, max_tokens=options.max_completion_length, stop_token_ids=ends, logprobs=0, detokenize=False,
                                    seed=None)
            begun = time.perf_counter()
            outputs = engine.generate(prompts, params, use_tqdm=False)
            if repeat > 0:
                seconds.append(time.perf_counter() - begun)
                lengths = [len(output.token_ids) for request in outputs for output in request.outputs]
                tokens, longest = tokens + sum(lengths), max(longest, *lengths)
        sizes.append({"sequences": sequences, "seconds": statistics.median(seconds), "tokens_per_second": tokens / sum(seconds), "tokens": tokens,
                      "longest_completion": longest})
    import vllm
    print("RESULT " + json.dumps({"vllm": vllm.__version__, "speculation": options.method, "same_rows": options.same_rows, "repeats": options.repeats,
                                  "sizes": sizes}), flush=True)


if __name__ == "__main__":
    main()
