"""Serves one Python reward function to colo-grpo: requests and replies are JSON behind their length, 4 bytes, big-endian.

The function is called as TRL does, reward(prompts, completions, trainer_state, **columns) -> [float], or, if it takes a
solution_str, as verl does: compute_score(data_source, solution_str, ground_truth, extra_info) -> float or {"score": float}. A function
without ** gets the arguments that it names. What it prints goes to standard error. Requests to an async function run together.
"""

import sys

# The interpreter looks into the current folder first: until the function is loaded, only the standard library is searched.
PATH = list(sys.path)
sys.path[:] = [folder for folder in PATH if folder]

import os

LIBRARY = [os.path.dirname(os.__file__)] + [folder for folder in PATH if os.path.basename(folder) == "lib-dynload"]
sys.path[:] = LIBRARY

import importlib
import importlib.util
import inspect
import json
import linecache
import math
import struct
import threading
import tokenize
import traceback
import types

sys.path[:] = PATH


def from_library(name):
    """A module of the standard library, whatever the function's folder holds."""
    path, sys.path[:] = list(sys.path), LIBRARY
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = path


def load(spec):
    place, _, name = spec.rpartition(":" if ":" in spec else ".")
    if "\n" in place:  # the text of a module that colo-grpo brings along: the current folder has no part in it
        sys.path[:] = [folder for folder in sys.path if folder]
        module = types.ModuleType("built_in")
        exec(place, module.__dict__)
    elif place.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        source = importlib.util.spec_from_file_location(os.path.basename(place)[:-3], place)
        module = importlib.util.module_from_spec(source)
        sys.modules[source.name] = module
        source.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{name} is no function but a value of type {type(function).__name__}")
    inspect.signature(function)  # which some functions written in C lack
    return function


def call(function, arguments):
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    return function(**arguments)


def environment(end):
    """An environment of another process; None if it was lost."""
    if end is None:
        return None
    if end["folder"] and end["folder"] not in sys.path:
        sys.path.insert(0, end["folder"])
    return from_library("pickle").loads(from_library("base64").b64decode(end["state"]))


def as_trl(request):
    columns, completions = request["columns"], request["completions"]
    names = [request["prompt_column"]] if "prompt_column" in request else ["prompt", "problem", "question"]
    prompts = (columns.get(name) for name in names)
    prompt = next((prompt for prompt in prompts if prompt is not None), request["prompt"])
    if request.get("messages"):  # the model may call tools
        completions = request["messages"]
    elif isinstance(prompt, list):  # a conversation
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    size = len(completions)
    arguments = {name: [value] * size for name, value in columns.items() if name not in ("prompt", "completion")}
    arguments.update(prompts=[prompt] * size, completions=completions, completion_ids=request["completion_ids"])
    if "environments" in request:  # as they were at the end
        arguments["environments"] = [environment(end) for end in request["environments"]]
    arguments["trainer_state"] = types.SimpleNamespace(**request["trainer_state"])
    return arguments


def as_verl(request, answer_column):
    columns = request["columns"]
    common = {
        "data_source": columns.get("data_source"),
        "ground_truth": columns.get(answer_column),
        "extra_info": columns.get("extra_info"),
    }
    return [{"solution_str": text, **common} for text in request.get("texts", request["completions"])]


def entry(score):
    if score is None:  # the reward does not apply
        return None
    try:
        score = float(score)
    except (TypeError, ValueError):
        raise TypeError(f"the function returned {score!r:.200} for a completion: expected a number or None") from None
    return score if math.isfinite(score) else repr(score)


class Reward:
    """The function with its signature: TRL's takes all completions of a request in one call, verl's one in a call."""

    def __init__(self, spec, answer_column):
        self.function = load(spec)
        self.answer_column = answer_column
        self.is_verl = "solution_str" in inspect.signature(self.function).parameters
        has_coroutines = inspect.iscoroutinefunction
        self.is_async = has_coroutines(self.function) or has_coroutines(getattr(self.function, "__call__", None))

    def needed_columns(self):
        """Arguments that a call in TRL's way cannot do without and only a column can give."""
        given = ("prompts", "completions", "completion_ids", "trainer_state", "environments")
        parameters = inspect.signature(self.function).parameters.values()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        needed = [parameter.name for parameter in parameters if parameter.kind in by_name and parameter.default is parameter.empty]
        return [] if self.is_verl else [name for name in needed if name not in given]

    def calls(self, request):
        return as_verl(request, self.answer_column) if self.is_verl else [as_trl(request)]

    def scores(self, results):
        if self.is_verl:
            results = [[result["score"] if isinstance(result, dict) else result for result in results]]
        (scores,) = results
        if not hasattr(scores, "__iter__"):
            raise TypeError(f"the function returned {scores!r:.200}: expected a list with a number or None for each completion")
        return [entry(score) for score in scores]

    def answer(self, request):
        results = [call(self.function, arguments) for arguments in self.calls(request)]
        if any(map(inspect.isawaitable, results)):

            async def awaited():
                return [await result if inspect.isawaitable(result) else result for result in results]

            results = from_library("asyncio").run(awaited())
        return self.scores(results)

    async def answer_together(self, request):
        calls = [call(self.function, arguments) for arguments in self.calls(request)]
        return self.scores(await from_library("asyncio").gather(*calls))


def describe(error):
    """The error with the innermost line of a file: neither this program's nor the importer's."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f" ({frame.filename}:{frame.lineno})" for frame in reversed(frames) if frame.filename[:1] not in ("", "<")), "")
    return f"{type(error).__name__}: {error}"[:1000] + place


class Pipes:
    """Standard input and output, which the function does not get to see."""

    def __init__(self):
        self.requests, self.replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)

    def __iter__(self):
        while len(head := self.requests.read(4)) == 4:
            yield json.loads(self.requests.read(struct.unpack(">I", head)[0]))

    def reply(self, request, **what):
        text = json.dumps({"id": request["id"], **what}, ensure_ascii=False).encode(errors="replace")  # half of a character is no JSON
        self.replies.write(struct.pack(">I", len(text)) + text)
        self.replies.flush()


def serve(reward, pipes, requests):
    for request in requests:
        try:
            scores = reward.answer(request)
        except Exception as error:
            pipes.reply(request, error=describe(error))
        else:
            pipes.reply(request, rewards=scores)


async def serve_together(asyncio, reward, pipes, requests, timeout_s):
    loop, ended, running = asyncio.get_running_loop(), asyncio.Event(), set()

    async def answer(request):
        task = asyncio.ensure_future(reward.answer_together(request))
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])  # one that does not end is ended with this process
            pipes.reply(request, error="it was cancelled")
        elif task.cancelled():
            pipes.reply(request, error="it cancelled itself")
        elif task.exception():
            pipes.reply(request, error=describe(task.exception()))
        else:
            pipes.reply(request, rewards=task.result())

    def begin(request):
        task = loop.create_task(answer(request))
        running.add(task)  # the loop alone would forget it
        task.add_done_callback(running.discard)

    def read():
        for request in requests:
            loop.call_soon_threadsafe(begin, request)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()


def main(spec, answer_column, timeout_s):
    pipes = Pipes()
    requests = iter(pipes)
    first = next(requests)  # which asks whether this worker is ready
    try:
        reward = Reward(spec, answer_column)
    except BaseException as error:  # a module may call exit
        return pipes.reply(first, error=describe(error))
    pipes.reply(first, rewards=[], is_async=reward.is_async, needed_columns=reward.needed_columns())
    if reward.is_async:
        asyncio = from_library("asyncio")
        asyncio.run(serve_together(asyncio, reward, pipes, requests, float(timeout_s)))
    else:
        serve(reward, pipes, requests)


main(*sys.argv[1:])
