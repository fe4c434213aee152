#!/usr/bin/env python3
"""Golden conversations for `src/data/chat`: the chat templates that TRL's wheel carries, rendered by transformers.

    pip install transformers==5.24.0 trl==1.16.0
    python scripts/golden_templates.py      # writes tests/golden/templates.json.gz

Each template is rendered with each conversation below by transformers' own `render_jinja_template`. A template that refuses a conversation has
null. The test `data::chat::published` renders the same.
"""

import datetime
import gzip
import json
import pathlib

import trl
from transformers.utils import chat_template_utils

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
CALL = {"id": "call_1", "type": "function", "function": {"name": "multiply", "arguments": {"a": 3, "b": None, "c": [1, "x"]}}}
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
        [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "name": "multiply", "tool_call_id": "call_1", "content": "12"}],
        {"add_generation_prompt": True, "tools": [TOOL]},
    ),
    "two calls": (
        [
            SYSTEM,
            USER,
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
            {"role": "tool", "name": "multiply", "tool_call_id": "call_1", "content": "12"},
            {"role": "tool", "name": "multiply", "tool_call_id": "call_2", "content": "{\"a\": 1}"},
            ANSWER,
        ],
        {"tools": [TOOL]},
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


def main():
    chat_template_utils.datetime = Frozen
    folder = pathlib.Path(trl.__file__).parent / "chat_templates"
    templates = {}
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text()
        if source not in (template["source"] for template in templates.values()):
            texts = {name: render(source, *conversation) for name, conversation in CONVERSATIONS.items()}
            templates[path.stem] = {"source": source, "texts": texts}
    golden = {"now": NOW, "tokens": TOKENS, "conversations": CONVERSATIONS, "templates": templates}
    path = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "templates.json.gz"
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n"
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    rendered = sum(text is not None for template in templates.values() for text in template["texts"].values())
    print(f"{path}: {len(templates)} templates, {len(CONVERSATIONS)} conversations, {rendered} rendered")


if __name__ == "__main__":
    main()
