#!/usr/bin/env python3
"""Writes a stand-in for Qwen2.5-1.5B-Instruct and GSM8K, so that a recipe can be tried on a CPU. Python's standard library only.

    scripts/make_stand_in.py out                      # out/model, out/gsm8k
    scripts/make_stand_in.py out --train 2000

out/model is a folder as the Hub has it: Qwen2's architecture with 0.4 M random weights, a byte-pair tokenizer that was trained on the
problems, Qwen's special tokens and chat template. out/gsm8k is laid out as GSM8K: main/train.jsonl and main/test.jsonl have `question`,
and an `answer` whose last line is `#### 18`. The model knows nothing: what it writes is noise, and its rewards are 0.
"""
import argparse, array, json, math, pathlib, random, struct, sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import make_countdown

VOCAB_SIZE = 448
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": True, "use_sliding_window": False, "initializer_range": 0.02,
    "bos_token_id": 0, "eos_token_id": 2, "torch_dtype": "float32",
}
# Qwen2.5's: its system message where a conversation has none.
TEMPLATE = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    + make_countdown.TEMPLATE
)
NAMES = ["Natalia", "Weng", "Betty", "Julie", "James", "Albert", "Ken", "Tina", "Mark", "Alexis"]
THINGS = ["clips", "apples", "books", "cards", "marbles", "pens", "stickers", "cookies", "flowers", "shells"]


def row(rng):
    """A problem of two steps, its reasoning with GSM8K's calculator marks, its answer."""
    name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 60), rng.randint(2, 9)
    first, second = a * b, rng.randint(1, 40)
    kept = [f"{name} has {a} boxes with {b} {thing} each and gets {second} more {thing}. How many {thing} does {name} have in all?",
            f"In the boxes are {a} x {b} = <<{a}*{b}={first}>>{first} {thing}.",
            f"In all {name} has {first} + {second} = <<{first}+{second}={first + second}>>{first + second} {thing}."]
    price = [f"A box of {thing} costs ${b}. {name} buys {a} boxes and pays ${second} for the way home. How many dollars does {name} spend?",
             f"The boxes cost {a} x ${b} = $<<{a}*{b}={first}>>{first}.",
             f"{name} spends ${first} + ${second} = $<<{first}+{second}={first + second}>>{first + second}."]
    question, *steps = rng.choice([kept, price])
    return {"question": question, "answer": "\n".join([*steps, f"#### {first + second}"])}


def rows(count, seed):
    rng = random.Random(seed)
    return [row(rng) for _ in range(count)]


def shapes():
    """Names and shapes of Qwen2's weights."""
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    keys = hidden // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    yield "model.embed_tokens.weight", [VOCAB_SIZE, hidden]
    for layer in range(CONFIG["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        for name, rows_ in (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys)):
            yield f"{start}.self_attn.{name}.weight", [rows_, hidden]
            yield f"{start}.self_attn.{name}.bias", [rows_]
        yield f"{start}.self_attn.o_proj.weight", [hidden, hidden]
        for name, shape in (("gate_proj", [inner, hidden]), ("up_proj", [inner, hidden]), ("down_proj", [hidden, inner])):
            yield f"{start}.mlp.{name}.weight", shape
        yield f"{start}.input_layernorm.weight", [hidden]
        yield f"{start}.post_attention_layernorm.weight", [hidden]
    yield "model.norm.weight", [hidden]


def write_weights(path):
    rng, header, data = random.Random("weights"), {}, b""
    for name, shape in shapes():
        count = math.prod(shape)
        values = [1.0] * count if "norm" in name else [rng.gauss(0, CONFIG["initializer_range"]) for _ in range(count)]
        numbers = array.array("f", values)
        if sys.byteorder == "big":
            numbers.byteswap()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * count]}
        data += numbers.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    print(f"{path}: {len(data) // 4} random weights")


def write_model(folder, texts):
    make_countdown.VOCAB_SIZE, make_countdown.TEMPLATE = VOCAB_SIZE, TEMPLATE
    make_countdown.write_tokenizer(folder, texts)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["model_max_length"] = CONFIG["max_position_embeddings"]
    generation = {"bos_token_id": 0, "eos_token_id": [2, 0], "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    for name, content in (("tokenizer_config", settings), ("config", CONFIG), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    write_weights(folder / "model.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--train", type=int, default=512, help="rows of train.jsonl")
    parser.add_argument("--test", type=int, default=64, help="rows of test.jsonl")
    options = parser.parse_args()
    train, test = rows(options.train, "train"), rows(options.test, "test")
    data = options.folder / "gsm8k" / "main"
    data.mkdir(parents=True, exist_ok=True)
    make_countdown.write_jsonl(data / "train.jsonl", train)
    make_countdown.write_jsonl(data / "test.jsonl", test)
    sample = rows(400, "tokenizer")
    recipe = "Reason step by step, and put the final number into \\boxed{}. You are a helpful assistant.\n"
    write_model(options.folder / "model", [text for row in sample for text in (*row.values(), "system\nuser\nassistant\n")] + [recipe] * 40)


if __name__ == "__main__":
    main()
