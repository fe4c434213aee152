"""Serves one Python reward function to colo-grpo: requests and replies are JSON behind their length, 4 bytes, big-endian.

The function is called as TRL does, reward(prompts, completions, trainer_state, **columns) -> [float], or, if it takes a
solution_str, as verl does: compute_score(data_source, solution_str, ground_truth, extra_info) -> float or {"score": float}. A function
without ** gets the arguments that it names. What it prints goes to standard error.
"""

import importlib
import importlib.util
import inspect
import json
import math
import os
import struct
import sys
import traceback
import types


def load(spec):
    place, _, name = spec.rpartition(":" if ":" in spec else ".")
    if place.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        source = importlib.util.spec_from_file_location(os.path.basename(place)[:-3], place)
        module = importlib.util.module_from_spec(source)
        sys.modules[source.name] = module
        source.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return getattr(module, name)


def call(function, arguments):
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    result = function(**arguments)
    if inspect.iscoroutine(result):
        import asyncio

        result = asyncio.run(result)
    return result


def as_trl(function, request):
    columns, completions = request["columns"], request["completions"]
    prompts = (columns.get(name) for name in ("prompt", "problem", "question"))
    prompt = next((prompt for prompt in prompts if prompt is not None), request["prompt"])
    if isinstance(prompt, list):  # a conversation
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    size = len(completions)
    arguments = {name: [value] * size for name, value in columns.items() if name not in ("prompt", "completion")}
    arguments.update(prompts=[prompt] * size, completions=completions, completion_ids=request["completion_ids"])
    arguments["trainer_state"] = types.SimpleNamespace(**request["trainer_state"])
    return call(function, arguments)


def as_verl(function, request, answer_column):
    columns = request["columns"]
    common = {
        "data_source": columns.get("data_source"),
        "ground_truth": columns.get(answer_column),
        "extra_info": columns.get("extra_info"),
    }
    scores = [call(function, {"solution_str": text, **common}) for text in request["completions"]]
    return [score["score"] if isinstance(score, dict) else score for score in scores]


def entry(score):
    if score is None:  # the reward does not apply
        return None
    try:
        score = float(score)
    except (TypeError, ValueError):
        raise TypeError(f"the function gave {score!r:.200} for a completion: expected a number or None") from None
    return score if math.isfinite(score) else repr(score)


def answer(function, request, answer_column):
    if not request["completions"]:
        return {"rewards": []}
    is_verl = "solution_str" in inspect.signature(function).parameters
    scores = as_verl(function, request, answer_column) if is_verl else as_trl(function, request)
    if not hasattr(scores, "__iter__"):
        raise TypeError(f"the function gave {scores!r:.200}: expected a list with a number or None for each completion")
    return {"rewards": [entry(score) for score in scores]}


def describe(error):
    """The error with the innermost line of a file: neither this program's nor the importer's."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f" ({frame.filename}:{frame.lineno})" for frame in reversed(frames) if frame.filename[0] != "<"), "")
    return f"{type(error).__name__}: {error}"[:1000] + place


def main(spec, answer_column):
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    function = wrong = None
    try:
        function = load(spec)
    except BaseException as error:  # a module may call exit
        wrong = describe(error)
    while len(head := requests.read(4)) == 4:
        request = json.loads(requests.read(struct.unpack(">I", head)[0]))
        try:
            reply = {"error": wrong} if wrong else answer(function, request, answer_column)
        except Exception as error:
            reply = {"error": describe(error)}
        text = json.dumps(reply).encode()
        replies.write(struct.pack(">I", len(text)) + text)
        replies.flush()


main(*sys.argv[1:])
