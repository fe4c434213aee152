#!/usr/bin/env python3
"""Asks a running `colo-grpo serve` through the official `openai` client (pip install openai), as a user's program does.

    colo-grpo serve --model MODEL --port 8000 &
    scripts/serve_openai.py http://127.0.0.1:8000/v1 [--api-key KEY] [--no-structures]

With `serve --adapter NAME=FOLDER` it also asks every adapter; with `--tool_call_parser hermes` it finds a call. A model whose tokens are
words and not bytes has no structured output: --no-structures. Prints one line a check and ends with 1 if one fails.
"""

import argparse
import json
import re
import sys

import openai
import pydantic


class Sum(pydantic.BaseModel):
    a: int
    even: bool


def structured(client, asked: dict, check) -> None:
    """Structures that a text follows whatever the weights, whole and as a stream."""
    try:
        parsed = client.chat.completions.parse(**asked, response_format=Sum).choices[0].message.parsed
        check("an answer follows a pydantic model", isinstance(parsed, Sum))
    except openai.LengthFinishReasonError:  # white space is free: noise may go on with it to the last token
        check("an answer follows a pydantic model, as far as it came", True)
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"],
              "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    compact = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    for name, more in (("its schema", {"response_format": form}), ("a schema without spaces", {"extra_body": compact})):
        choice = client.chat.completions.create(**asked, **more).choices[0]
        ended = choice.finish_reason == "stop"
        # White space is free in the first: noise may go on with it to the last token.
        check(f"an answer follows {name}", 0 <= json.loads(choice.message.content)["n"] <= 9 if ended else name == "its schema")
    pattern = "[a-c]{2,4}-[0-9]{3}"
    pieces, reason = "", None
    for chunk in client.chat.completions.create(**asked, stream=True, extra_body={"structured_outputs": {"regex": pattern}}):
        pieces += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    check(f"a stream follows a regular expression: {pieces}", reason == "stop" and re.fullmatch(pattern, pieces) is not None)
    choice = client.completions.create(model=asked["model"], prompt="is it so ?", max_tokens=8,
                                       extra_body={"structured_outputs": {"choice": ["yes", "no"]}}).choices[0]
    check(f"a completion is one of the choices: {choice.text}", choice.text in ("yes", "no"))

    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "a + b", "parameters": parameters}}]
    call = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [1-9], "b": [1-9]\}\}\n</tool_call>'
    with_tools = dict(asked, tools=tools, extra_body={"structured_outputs": {"regex": call}})
    choice = client.chat.completions.create(**with_tools).choices[0]
    calls = choice.message.tool_calls or []
    check("a call is found in the answer", choice.finish_reason == "tool_calls" and len(calls) == 1
          and calls[0].function.name == "add" and set(json.loads(calls[0].function.arguments)) == {"a", "b"})
    streamed = [call for chunk in client.chat.completions.create(**with_tools, stream=True) for call in chunk.choices[0].delta.tool_calls or []]
    check("a stream has the call, too", [call.function.arguments for call in streamed] == [call.function.arguments for call in calls])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base_url")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--prompt", default="what is two plus three ?")
    parser.add_argument("--no-structures", action="store_true")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0)
    failed = []

    def check(name: str, holds: bool) -> None:
        print(f"{'ok    ' if holds else 'FAILED'} {name}")
        if not holds:
            failed.append(name)

    models = [model.id for model in client.models.list()]
    check("models are listed", len(models) >= 1)
    model, *adapters = models
    messages = [{"role": "user", "content": args.prompt}]

    asked = dict(model=model, prompt=args.prompt, max_tokens=16, n=2, seed=3, logprobs=0)
    whole = client.completions.create(**asked, extra_body={"return_token_ids": True})
    texts = [choice.text for choice in whole.choices]
    check("completions have a text for each choice", len(texts) == 2)
    check("log-probabilities are one a token",
          all(len(c.logprobs.token_logprobs) == len(c.token_ids) for c in whole.choices))
    pieces = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    check("a stream of completions is the whole", pieces == texts)

    asked = dict(model=model, messages=messages, max_tokens=16, temperature=0)
    whole = client.chat.completions.create(**asked, logprobs=True)
    text = whole.choices[0].message.content
    check("a chat has an answer", isinstance(text, str) and whole.choices[0].finish_reason in ("stop", "length"))
    check("a chat has log-probabilities", len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens)
    pieces, usage = "", None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        pieces += "".join(choice.delta.content or "" for choice in chunk.choices)
    check("a stream of a chat is the whole", pieces == text)
    check("a stream ends with its usage", usage is not None and usage == whole.usage)

    top = client.chat.completions.create(**asked, logprobs=True, top_logprobs=5).choices[0].logprobs.content
    check("the most probable tokens come with each",
          all(len(token.top_logprobs) == 5 and token.top_logprobs[0].token == token.token for token in top))

    logprobs = lambda name: client.completions.create(
        model=name, prompt=args.prompt, max_tokens=8, seed=3, logprobs=0).choices[0].logprobs.token_logprobs
    for name in adapters:
        answer = client.chat.completions.create(**{**asked, "model": name})
        check(f"the adapter {name} answers under its name", answer.model == name)
        check(f"the adapter {name} has log-probabilities of its own", logprobs(name) != logprobs(model))

    if not args.no_structures:
        structured(client, {**asked, "max_tokens": 200, "temperature": 1, "seed": 5}, check)

    stream = client.chat.completions.create(**{**asked, "temperature": 2, "n": 8}, stream=True)
    next(iter(stream))
    stream.close()
    check("a stream may be closed before its end", client.models.list().data[0].id == model)

    for name, error, wrong in [
        ("a wrong value", openai.BadRequestError, {"temperature": -1}),
        ("an unknown model", openai.NotFoundError, {"model": "another"}),
        ("a schema that is none", openai.BadRequestError, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "x"}}}}),
        ("a field that is not served", openai.BadRequestError, {"presence_penalty": 1}),
    ]:
        try:
            client.chat.completions.create(**{**asked, **wrong})
            check(f"{name} is refused", False)
        except error as refusal:
            check(f"{name} is refused: {refusal.body['message'][:60]}", True)
    try:
        client.chat.completions.create(**{**asked, "max_tokens": 10**6})
        check("what does not fit the context is refused", False)
    except openai.BadRequestError as refusal:
        check("what does not fit the context has OpenAI's code", refusal.code == "context_length_exceeded")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
