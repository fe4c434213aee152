#!/usr/bin/env python3
"""Golden conversations for `src/data/chat`: the chat templates that TRL's wheel carries, and those of MODELS, rendered by transformers.

    pip install transformers==5.24.0 trl==1.16.0
    python scripts/golden_templates.py      # writes tests/golden/templates.json.gz

Each template is rendered with each conversation below by transformers' own `render_jinja_template`. A template that refuses a conversation has
null. The test `data::chat::published` renders the same.

MODELS are families whose templates TRL does not carry. pip downloads the packages that do: llama-cpp-python (MIT) contains llama.cpp's
`models/templates` and the templates within `tests/test-chat-template.cpp`; bfcl-eval (Apache-2.0) quotes GLM-4's.
"""

import ast
import datetime
import gzip
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import trl
from transformers.utils import chat_template_utils

LLAMA_CPP, BFCL = "llama-cpp-python==0.3.36", "bfcl-eval==2026.3.23"
# name: a file of models/templates, or the name of a case of test-chat-template.cpp
MODELS = {
    "Mistral-7B-Instruct-v0.2": "mistralai/Mistral-7B-Instruct-v0.2 (NOTE: Old pre-v1 without a system prompt)",
    "Mistral-7B-Instruct-v0.2, v1": "mistralai/Mistral-7B-Instruct-v0.2 (mistralai 'v1' template with a system prompt)",
    "Mistral-Large-Instruct-2411": "mistralai/Mistral-Large-Instruct-2411 (mistralai 'v7' template)",
    "Mistral-Nemo-Instruct-2407": "mistralai-Mistral-Nemo-Instruct-2407.jinja",
    "Mistral-Small-3.2-24B-Instruct-2506": "Mistral-Small-3.2-24B-Instruct-2506.jinja",
    "Ministral-3-14B-Reasoning-2512": "mistralai-Ministral-3-14B-Reasoning-2512.jinja",
    "Devstral-Small-2507 by Unsloth": "unsloth-mistral-Devstral-Small-2507.jinja",
    "phi-4": "phi-4",
    "SmolLM3-3B by Unsloth": "HuggingFaceTB-SmolLM3-3B.jinja",
    "granite-3.0-8b-instruct": "ibm-granite/granite-3.0-8b-instruct",
    "granite-3.3-2b-instruct": "ibm-granite-granite-3.3-2B-Instruct.jinja",
    "GLM-4.6": "GLM-4.6.jinja",
    "gpt-oss-120b": "openai-gpt-oss-120b.jinja",
}

NOW = 1721999109  # 2024-07-26 13:05:09 UTC
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies <a> & 'b'.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "One."}, "b": {"type": ["number", "null"], "default": 1.5}},
            "required": ["a"],
        },
    },
}
# Mistral's templates refuse other ids than of nine letters and digits.
CALL = {"id": "call00001", "type": "function", "function": {"name": "multiply", "arguments": {"a": 3, "b": None, "c": [1, "x"]}}}
USER, SYSTEM = {"role": "user", "content": "What is 3 < 4 & 'é'?\n"}, {"role": "system", "content": " Be brief. "}
ANSWER = {"role": "assistant", "content": "It is."}
THOUGHT = {"role": "assistant", "content": "<think>\nso\n</think>\n\nyes"}
REASONED = [USER, {"role": "assistant", "content": "yes", "reasoning_content": "so", "thinking": "so"}, {"role": "user", "content": "Why?"}]
CONVERSATIONS = {
    "user": ([USER], {"add_generation_prompt": True}),
    "system": ([SYSTEM, USER], {"add_generation_prompt": True}),
    "turns": ([SYSTEM, USER, ANSWER, {"role": "user", "content": "And 5?"}], {"add_generation_prompt": True}),
    "whole": ([USER, ANSWER], {}),
    "thought": ([USER, THOUGHT, {"role": "user", "content": "Why?"}, THOUGHT], {}),
    "reasoning": (REASONED, {"add_generation_prompt": True}),
    "thinking off": ([USER], {"add_generation_prompt": True, "enable_thinking": False}),
    "thinking on": ([USER], {"add_generation_prompt": True, "enable_thinking": True}),
    # Qwen3.8's variables, and gpt-oss's.
    "effort": ([SYSTEM, USER], {"add_generation_prompt": True, "reasoning_effort": "low"}),
    "thoughts kept": (REASONED, {"add_generation_prompt": True, "preserve_thinking": True}),
    "thoughts left out": (REASONED, {"add_generation_prompt": True, "preserve_thinking": False}),
    "tools": ([SYSTEM, USER], {"add_generation_prompt": True, "tools": [TOOL]}),
    "tools alone": ([USER], {"add_generation_prompt": True, "tools": [TOOL, TOOL]}),
    "call": (
        [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "name": "multiply", "tool_call_id": "call00001", "content": "12"}],
        {"add_generation_prompt": True, "tools": [TOOL]},
    ),
    "two calls": (
        [
            SYSTEM,
            USER,
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, {**CALL, "id": "call00002"}]},
            {"role": "tool", "name": "multiply", "tool_call_id": "call00001", "content": "12"},
            {"role": "tool", "name": "multiply", "tool_call_id": "call00002", "content": "{\"a\": 1}"},
            ANSWER,
        ],
        {"tools": [TOOL]},
    ),
    "call before": (
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "multiply", "tool_call_id": "call00001", "content": "12"},
            ANSWER,
            {"role": "user", "content": "And 5?"},
        ],
        {"add_generation_prompt": True, "tools": [TOOL]},
    ),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}], {"add_generation_prompt": True}),
}


class Frozen(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, datetime.timezone.utc).replace(tzinfo=tz)


def render(source, messages, options):
    options = dict(options)
    tools = options.pop("tools", None)
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            [messages], tools=tools, chat_template=source, **TOKENS, **options
        )
        return texts[0]
    except Exception:
        return None


def downloaded(package, place, *options):
    """The file that pip downloads."""
    before = set(place.iterdir())
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place, *options, package], check=True)
    (file,) = set(place.iterdir()) - before
    return file


def of_trl():
    folder = pathlib.Path(trl.__file__).parent / "chat_templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def of_models(place):
    package = tarfile.open(downloaded(LLAMA_CPP, place, "--no-binary", "llama-cpp-python"))
    texts = {}
    for member in package:
        name = pathlib.PurePosixPath(member.name)
        if name.parent.name == "templates" and name.suffix == ".jinja" or name.name == "test-chat-template.cpp":
            texts[name.name] = package.extractfile(member).read().decode()
    literal = r'"(?:[^"\\\n]|\\.)*"'
    cases = re.findall(rf"\.name= \*/ ({literal}),\s*/\* \.template_str= \*/ ({literal}),", texts["test-chat-template.cpp"])
    texts |= {ast.literal_eval(name): ast.literal_eval(source) for name, source in cases}
    templates = {name: texts[file] for name, file in MODELS.items()}
    quoted = zipfile.ZipFile(downloaded(BFCL, place)).read("bfcl_eval/model_handler/local_inference/glm.py").decode()
    templates["glm-4-9b-chat"] = json.loads(re.search(r'"chat_template": (".*"),', quoted)[1])
    return templates


def main():
    chat_template_utils.datetime = Frozen
    templates = {}
    with tempfile.TemporaryDirectory() as place:
        for name, source in (of_trl() | of_models(pathlib.Path(place))).items():
            if source not in (template["source"] for template in templates.values()):
                texts = {case: render(source, *conversation) for case, conversation in CONVERSATIONS.items()}
                templates[name] = {"source": source, "texts": texts}
            else:
                print(f"{name}: the same as an earlier one")
    golden = {"now": NOW, "tokens": TOKENS, "conversations": CONVERSATIONS, "templates": templates}
    path = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "templates.json.gz"
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n"
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    rendered = sum(text is not None for template in templates.values() for text in template["texts"].values())
    print(f"{path}: {len(templates)} templates, {len(CONVERSATIONS)} conversations, {rendered} rendered")


if __name__ == "__main__":
    main()
