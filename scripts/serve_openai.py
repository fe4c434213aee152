#!/usr/bin/env python3
"""Asks a running `colo-grpo serve` through the official `openai` client (pip install openai), as a user's program does.

    colo-grpo serve --model MODEL --port 8000 &
    scripts/serve_openai.py http://127.0.0.1:8000/v1 [--api-key KEY]

Prints one line a check and ends with 1 if one fails.
"""

import argparse
import json
import sys

import openai


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base_url")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--prompt", default="what is two plus three ?")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0)
    failed = []

    def check(name: str, holds: bool) -> None:
        print(f"{'ok    ' if holds else 'FAILED'} {name}")
        if not holds:
            failed.append(name)

    models = [model.id for model in client.models.list()]
    check("models are listed", len(models) == 1)
    model = models[0]
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

    try:
        top = client.chat.completions.create(**asked, logprobs=True, top_logprobs=5).choices[0].logprobs.content
        check("the most probable tokens come with each",
              all(len(token.top_logprobs) == 5 and token.top_logprobs[0].token == token.token for token in top))
    except openai.BadRequestError as refusal:  # on a GPU
        check(f"the most probable tokens are refused: {refusal.body['message'][:60]}", True)
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"],
              "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    try:
        choice = client.chat.completions.create(**{**asked, "max_tokens": 64}, response_format=form).choices[0]
        check("an answer follows its schema", choice.finish_reason == "length" or 0 <= json.loads(choice.message.content)["n"] <= 9)
    except openai.BadRequestError as refusal:  # on a GPU, or where tokens are words
        check(f"a schema is refused: {refusal.body['message'][:60]}", True)

    stream = client.chat.completions.create(**{**asked, "temperature": 2, "n": 8}, stream=True)
    next(iter(stream))
    stream.close()
    check("a stream may be closed before its end", client.models.list().data[0].id == model)

    for name, error, wrong in [
        ("a wrong value", openai.BadRequestError, {"temperature": -1}),
        ("an unknown model", openai.NotFoundError, {"model": "another"}),
        ("a field that is not served", openai.BadRequestError, {"presence_penalty": 1}),
    ]:
        try:
            client.chat.completions.create(**{**asked, **wrong})
            check(f"{name} is refused", False)
        except error as refusal:
            check(f"{name} is refused: {refusal.body['message'][:60]}", True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
