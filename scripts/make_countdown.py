#!/usr/bin/env python3
"""Writes the Countdown task of configs/countdown: JSONL rows and a byte-pair tokenizer. Python's standard library only.

    scripts/make_countdown.py out                     # sft.jsonl, train.jsonl, eval.jsonl, tokenizer/
    scripts/make_countdown.py out --traces 1000 --patient 0.1

A problem gives three numbers from 1 to 50 and a target from 10 to 100. The answer is an equation that uses each number once. Problems
that more than two ways solve are left out as too easy. No three numbers of eval.jsonl occur in another file, whatever the target.

A trace of sft.jsonl tries the ways in random order until one gives the target: two calculations, and a third one that says how far off
the result is. Only some searchers are patient (--patient). After every try that fails, the others stop with probability --stop: most of them give up and answer with that try,
some claim that it gives the target (--claim, of those that stop). So most traces are wrong, though nearly all their sums
are right: a model that imitates them can search, but seldom does it to the end. That is left to GRPO.
"""
import argparse, collections, functools, json, multiprocessing, pathlib, random, re

MOST, LARGEST_RESULT, TARGETS, MOST_WAYS = 50, 200, range(10, 101), 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
SHARD = 2_000  # problems that one process draws at a time, from random numbers of their own
PIECE = r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+"  # what is merged stays within a piece; every digit is its own
VOCAB_SIZE = 512



def results(a, b):
    """What a and b <= a give: an operator and a value, whole, positive and not too large."""
    found = [("+", a + b), ("-", a - b)]
    if b > 1:
        found.append(("*", a * b))
        if a % b == 0:
            found.append(("/", a // b))
    return [(operator, value) for operator, value in found if 0 < value <= LARGEST_RESULT]


class Way(collections.namedtuple("Way", "a operator b inner c outer value")):
    """Two calculations: a operator b = inner; then inner and c, the larger one first, give value by the outer operator."""

    def texts(self):
        """The two calculations, the second one without its result, and both as one expression."""
        a, operator, b, inner, c, outer, _ = self
        first = f"{a}{operator}{b}"
        second, whole = (f"{inner}{outer}{c}", f"({first}){outer}{c}")
        if inner < c:
            second, whole = (f"{c}{outer}{inner}", f"{c}{outer}({first})")
        return f"{first}={inner}", second, whole


def ways(numbers):
    """Every way to use all three numbers."""
    found = []
    for third, c in enumerate(numbers):
        b, a = sorted(numbers[:third] + numbers[third + 1:])
        for operator, inner in results(a, b):
            found += [Way(a, operator, b, inner, c, *last) for last in results(max(inner, c), min(inner, c))]
    return list(dict.fromkeys(found))  # equal numbers give equal ways


def draw_problem(rng):
    """Numbers, a target and all ways to go."""
    while True:
        numbers = [rng.randint(1, MOST) for _ in range(3)]
        choices = ways(numbers)
        counts = collections.Counter(way.value for way in choices)
        targets = [target for target, count in counts.items() if target in TARGETS and count <= MOST_WAYS]
        if targets:
            return numbers, rng.choice(targets), choices


def question(numbers, target):
    a, b, c = numbers
    text = f"Using the numbers {a}, {b} and {c}, write an equation that equals {target}. Use each number exactly once."
    return [{"role": "user", "content": text}]


def trace(rng, target, choices, options):
    """One searcher's text, and whether it found the target."""
    is_patient = rng.random() < options.patient
    lines = ["<think>"]
    for way in rng.sample(choices, len(choices)):
        first, second, answer = way.texts()
        found = way.value == target
        stops = not found and not is_patient and rng.random() < options.stop
        claims = stops and rng.random() < options.claim
        value = target if claims else way.value
        off = f"{max(value, target)}-{min(value, target)}={abs(value - target)}"
        lines.append(f"{first}, {second}={value}, {off}{' yes' if found or claims else ''}")
        if found or stops:
            break
    if stops and not claims:
        lines.append("I give up.")
    return "\n".join([*lines, "</think>", f"<answer>{answer}</answer>"]), found


def train_byte_pairs(texts, size):
    """Merges that byte-pair encoding learns from texts, most frequent pair first; of equally frequent ones the first in order."""
    counts = collections.Counter(piece for text in texts for piece in re.findall(PIECE, text))
    words = [[list(piece.replace(" ", "Ġ").replace("\n", "Ċ")), count] for piece, count in sorted(counts.items())]
    merges = []
    while len(merges) < size:
        pairs = collections.Counter()
        for symbols, count in words:
            for pair in zip(symbols, symbols[1:]):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word in words:
            word[0] = merged(word[0], best)
    return merges


def merged(symbols, pair):
    result = []
    for symbol in symbols:
        if result and (result[-1], symbol) == pair:
            result[-1] += symbol
        else:
            result.append(symbol)
    return result


def byte_symbols():
    """The character that stands for each byte in a byte-level vocabulary: its own if it can be printed, else one from 256 on."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


def write_tokenizer(folder, texts):
    folder.mkdir(parents=True, exist_ok=True)
    merges = train_byte_pairs(texts, VOCAB_SIZE - 256 - len(SPECIAL))
    tokens = SPECIAL + byte_symbols() + ["".join(pair) for pair in merges]
    split = {"type": "Split", "pattern": {"Regex": PIECE}, "behavior": "Isolated", "invert": False}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": id, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for id, token in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_only]},
        "post_processor": None,
        "decoder": bytes_only,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: id for id, token in enumerate(tokens)}, "merges": [" ".join(pair) for pair in merges]},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                "clean_up_tokenization_spaces": False, "model_max_length": 1024, "chat_template": TEMPLATE}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    print(f"{folder}: {len(tokens)} tokens")


def write_jsonl(path, rows):
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    print(f"{path}: {len(rows)} rows")


def problem(numbers, target):
    return {"prompt": question(numbers, target), "numbers": numbers, "target": target}


def shard(held_out, options, job):
    """Rows of one shard: problems whose numbers are not held out, for `train` alone, for `sft` with a trace."""
    kind, index, size = job
    rng, rows = random.Random(f"{kind} {index}"), []
    while len(rows) < size:
        numbers, target, choices = draw_problem(rng)
        if tuple(sorted(numbers)) in held_out:
            continue
        row = problem(numbers, target)
        if kind == "sft":
            row["completion"], row["correct"] = trace(rng, target, choices, options)
        rows.append(row)
    return rows


def seen_rows(kind, count, held_out, options):
    """Rows that do not depend on how many processes there are."""
    jobs = [(kind, start, min(SHARD, count - start)) for start in range(0, count, SHARD)]
    with multiprocessing.Pool() as pool:
        return sum(pool.map(functools.partial(shard, held_out, options), jobs, chunksize=1), [])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--traces", type=int, default=100_000, help="rows of sft.jsonl")
    parser.add_argument("--train", type=int, default=20_000, help="rows of train.jsonl")
    parser.add_argument("--eval", type=int, default=512, help="rows of eval.jsonl")
    parser.add_argument("--patient", type=float, default=0.15, help="share of traces that search to the end")
    parser.add_argument("--stop", type=float, default=0.5, help="chance that another one stops after a try that failed")
    parser.add_argument("--claim", type=float, default=0.25, help="share of those that stop that claim success")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rng, held_out = random.Random("eval"), {}
    while len(held_out) < options.eval:
        numbers, target, _ = draw_problem(rng)
        held_out.setdefault(tuple(sorted(numbers)), problem(numbers, target))
    train, sft = (seen_rows(kind, count, set(held_out), options)
                  for kind, count in (("train", options.train), ("sft", options.traces)))
    write_jsonl(options.folder / "eval.jsonl", held_out.values())
    write_jsonl(options.folder / "train.jsonl", train)
    write_jsonl(options.folder / "sft.jsonl", sft)
    print(f"{sum(row['correct'] for row in sft) / max(len(sft), 1):.3f} of the traces are right")
    sample = sft[:2_000]
    texts = [row["completion"] for row in sample] + [row["prompt"][0]["content"] + "user\nassistant\n" for row in sample]
    write_tokenizer(options.folder / "tokenizer", texts)


if __name__ == "__main__":
    main()
