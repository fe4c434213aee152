#!/usr/bin/env python3
"""A harness that plays episodes of the calculator's task through the official `openai` client (pip install openai):

    colo-grpo --config configs/calculator.toml tools=[] agent=scripts/agent_openai.py:play reward.python=PYTHON

It knows nothing of the program but a base_url. PYTHON has the client. `tiny` plays episodes of one turn, streamed, without tools.
"""

import json

import openai

ADD = {"type": "function", "function": {
    "name": "add", "description": "Adds two whole numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
}}
# Turns of an episode.
MOST = 3
# What the client loads at its first use is so loaded once, before there are processes.
openai.OpenAI(api_key="none").chat.completions


def play(row, base_url):
    """Calls the tool as often as the model asks for it. The run's rewards judge the last answer."""
    messages = list(row["prompt"])
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        for _ in range(MOST):
            message = client.chat.completions.create(model="policy", messages=messages, tools=[ADD]).choices[0].message
            messages.append(message)
            for call in message.tool_calls or []:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer(call.function)})
            if not message.tool_calls:
                return {"turns": len(messages)}
    return {"turns": len(messages)}


def answer(function):
    try:
        given = json.loads(function.arguments)
        return str(int(given["a"]) + int(given["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return str({"error": str(error)})


async def tiny(row, base_url):
    """One streamed turn; the share of its characters that are digits is the reward."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        stream = await client.chat.completions.create(model="policy", messages=row["prompt"], stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    return sum(letter.isdigit() for letter in text) / max(1, len(text))
