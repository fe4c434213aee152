"""Runs tools and environments for colo-grpo: requests and replies are JSON behind their length, 4 bytes, big-endian.

This process loads the files of tools and environments once and forks. Each request has a forked process to itself while it runs, and a
trajectory with an environment has one for as long as it lives. So a call that hangs, crashes or floods costs nobody else anything: its
process is killed at the deadline. Nothing that a model wrote is run here but the arguments of its calls.
"""

import sys

# The interpreter looks into the current folder first: until the tools are loaded, only the standard library is searched.
PATH = list(sys.path)
sys.path[:] = [folder for folder in PATH if folder]

import asyncio
import base64
import copy
import gc
import importlib
import importlib.util
import inspect
import json
import linecache
import math
import os
import pickle
import re
import selectors
import signal
import socket
import struct
import time
import tokenize
import traceback
import types
import typing
from collections import deque
from enum import Enum

sys.path[:] = PATH

# Bytes of a pipe that are read at once.
PART = 1 << 16


def load(spec):
    """The object that `file.py:name`, `module:name` or `module.name` names."""
    place, _, name = spec.rpartition(":" if ":" in spec else ".")
    if place.endswith(".py"):
        place = os.path.abspath(place)
        sys.path.insert(0, os.path.dirname(place))
        module_name = os.path.basename(place)[:-3]
        module = sys.modules.get(module_name)
        if module is not None and os.path.realpath(getattr(module, "__file__", None) or "") != os.path.realpath(place):
            raise ImportError(f"a module named {module_name} is already loaded; rename {place}")
        if module is None:
            source = importlib.util.spec_from_file_location(module_name, place)
            module = importlib.util.module_from_spec(source)
            sys.modules[module_name] = module
            source.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    loaded = getattr(module, name)
    if not callable(loaded):
        raise TypeError(f"{name} is no function but a value of type {type(loaded).__name__}")
    return loaded


def describe(error):
    """The error with the innermost line of a file that is not this program's."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f" ({frame.filename}:{frame.lineno})" for frame in reversed(frames) if frame.filename[:1] != "<"), "")
    return f"{type(error).__name__}: {error}"[:1000] + place


# JSON schemas of functions, as `transformers.utils.get_json_schema` gives them.

NAMED = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
CONTAINERS = {list: "array", tuple: "array", dict: "object"}


def of_values(values):
    kinds = list(dict.fromkeys(NAMED[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def of_hint(hint):
    """The schema of a type hint."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return {}
    if origin is None and isinstance(hint, type) and issubclass(hint, Enum):
        values = [member.value for member in hint]
        if values and all(type(value) in NAMED for value in values):
            return of_values(values)
    elif origin is None and (hint in NAMED or hint in CONTAINERS):
        return {"type": NAMED.get(hint) or CONTAINERS[hint]}
    elif origin in (typing.Union, getattr(types, "UnionType", None)):
        kinds = [of_hint(part) for part in parts if part is not type(None)]
        if len(kinds) == 1:
            schema = kinds[0]
        elif all(kind.keys() == {"type"} and isinstance(kind["type"], str) for kind in kinds):
            names = sorted({kind["type"] for kind in kinds})
            schema = {"type": names[0] if len(names) == 1 else names}
        else:
            schema = {"anyOf": kinds}
        return {**schema, "nullable": True} if type(None) in parts else schema
    elif origin is typing.Literal and all(type(part) in NAMED for part in parts):
        return of_values(list(parts))
    elif origin is list:
        return {"type": "array", "items": of_hint(parts[0])} if parts else {"type": "array"}
    elif origin is tuple and len(parts) > 1 and ... not in parts:
        return {"type": "array", "prefixItems": [of_hint(part) for part in parts]}
    elif origin is dict:
        return {"type": "object", "additionalProperties": of_hint(parts[1])} if parts else {"type": "object"}
    known = "int, float, str, bool, list, dict, tuple, Literal, Enum and unions of them"
    raise TypeError(f"the type hint {hint!r} has no JSON schema; expected {known}")


def sections(text):
    """Description, arguments and returned value of a Google-style docstring."""
    parts, name = {"": []}, ""
    for line in text.splitlines():
        heading = re.fullmatch(r"\s*(Args|Returns|Raises):", line.rstrip())
        if heading:
            name = heading[1]
            parts[name] = []
        elif not line.strip().startswith(("Args:", "Returns:", "Raises:")):
            parts[name].append(line)
    returns = "\n".join(parts["Returns"]).strip() if "Returns" in parts else None
    return "\n".join(parts[""]).strip(), arguments(parts.get("Args", [])), returns


def arguments(lines):
    """Each argument's description; its further lines are indented deeper than its name."""
    found, name, depth = {}, None, 0
    for line in filter(str.strip, lines):
        indent = len(line) - len(line.lstrip())
        begins = re.match(r"\s*(\w+):\s*(.*)", line)
        if begins and (name is None or indent <= depth):
            name, depth = begins[1], indent
            found[name] = [begins[2].strip()]
        elif name is not None:
            found[name].append(line.strip())
    return {name: " ".join(filter(None, lines)) for name, lines in found.items()}


def schema(function):
    """The schema of a function that a model may call."""
    name = getattr(function, "__name__", "operation")
    text = (inspect.getdoc(function) or "").strip()
    if not text:
        raise TypeError(f"{name} has no docstring, which tells the model what the tool does")
    description, described, returned = sections(text)
    parameters = {
        parameter.name: parameter
        for parameter in inspect.signature(function).parameters.values()
        if not (parameter.name in ("self", "cls") and parameter.annotation is parameter.empty)
    }
    hints = typing.get_type_hints(function)
    properties = {}
    nameless = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**", "POSITIONAL_ONLY": ""}
    for parameter in parameters:
        kind = parameters[parameter].kind.name
        if kind in nameless:
            of = f"{name} takes {nameless[kind]}{parameter}" + (", by its place alone" if kind == "POSITIONAL_ONLY" else "")
            raise TypeError(f"{of}: a model names every argument; give each of them a parameter with a name, a type hint and a description")
        if parameter not in hints:
            raise TypeError(f"argument {parameter} of {name} has no type hint")
        if parameter not in described:
            raise TypeError(f"the docstring of {name} has no description of the argument {parameter}")
        kind, said = of_hint(hints[parameter]), described[parameter]
        choices = re.search(r"\(choices:\s*(.*?)\)\s*$", said, flags=re.IGNORECASE)
        if choices:
            kind["enum"] = [choice.strip() if isinstance(choice, str) else choice for choice in json.loads(choices[1])]
            said = said[: choices.start()].strip()
        properties[parameter] = {**kind, "description": said}
    wanted = {"type": "object", "properties": properties}
    required = [parameter.name for parameter in parameters.values() if parameter.default is parameter.empty]
    if required:
        wanted["required"] = required
    whole = {"name": name, "description": description, "parameters": wanted}
    try:
        result = of_hint(hints["return"])
        whole["return"] = {**result, "description": returned} if returned is not None else result
    except (KeyError, TypeError):
        pass  # the model never writes it
    return {"type": "function", "function": whole}


class Factory:
    """An environment: its class or function, and the names of what the model may call."""

    def __init__(self, spec, tools):
        self.make = load(spec)
        self.probe = self.make()
        kind = type(self.probe)
        # Of the class: to list an instance's members would run its properties.
        members = [name for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)]
        if "reset" not in members:
            raise TypeError(f"{kind.__name__} has no method reset")
        self.has_reward = "get_reward" in members
        self.methods = [name for name in members if name not in ("reset", "get_reward") and not name.startswith("_")]
        self.name = kind.__name__
        self.schemas = [schema(tool) for tool in tools] + [schema(getattr(self.probe, name)) for name in self.methods]

    def bound(self, environment):
        """What the model may call of an environment, by name."""
        return {method: getattr(environment, method) for method in self.methods}


def load_environment(settings):
    """The environment of a hub, by the module that colo-grpo brings along."""
    module = types.ModuleType("colo_grpo_environments")
    exec(compile(settings["source"], "<environments>", "exec"), module.__dict__)
    return module.open_environment(settings)


class Tools:
    """All that requests may name."""

    def __init__(self, settings):
        self.max_chars = settings["max_chars"]
        self.functions = [load(spec) for spec in settings["tools"]]
        self.schemas = [schema(function) for function in self.functions]
        self.agent = load(settings["agent"]) if settings["agent"] else None
        self.factories = {name: Factory(spec, self.functions) for name, spec in settings["environments"].items()}
        if settings["hub"]:
            environment = load_environment(settings["hub"])
            if hasattr(environment, "play"):
                self.agent = environment.play
            else:
                environment.connect()
                environment.schemas[:0] = self.schemas
                self.factories[""] = environment
        for names in [self.schemas] + [factory.schemas for factory in self.factories.values()]:
            names = [each["function"]["name"] for each in names]
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise TypeError(f"more than one tool is named {', '.join(sorted(twice))}")

    def ready(self):
        kinds = {
            name: {"tools": factory.schemas, "has_reward": factory.has_reward, "class": factory.name}
            for name, factory in self.factories.items()
        }
        return {"tools": self.schemas, "environments": kinds}


class Served:
    """What one forked process holds: the tools and, in a trajectory with one, its environment."""

    def __init__(self, tools):
        self.tools, self.instances, self.environment = tools, {}, None
        self.loop = None
        self.callable = {function.__name__: function for function in tools.functions}

    def awaited(self, work):
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(work)

    def finished(self, value):
        return self.awaited(value) if inspect.isawaitable(value) else value

    def open(self, request):
        """A fresh episode; an environment is made once for each process, and reset after that, as in TRL."""
        name, row = request["environment"], request["row"]
        factory = self.tools.factories[name]
        if name not in self.instances:
            self.instances[name] = factory.make()
        self.environment = environment = self.instances[name]
        self.callable = {**{function.__name__: function for function in self.tools.functions}, **factory.bound(environment)}
        parameters = inspect.signature(environment.reset).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            row = {name: value for name, value in row.items() if name in parameters}
        observation = self.finished(environment.reset(**row))
        if observation is not None and not isinstance(observation, str):
            raise TypeError(f"reset returned {observation!r:.200}: expected text or None")
        return {"observation": observation}

    def calls(self, request):
        calls = request["calls"]
        results, under_way = [None] * len(calls), {}
        for place, call in enumerate(calls):
            try:
                name, given = call["name"], call["arguments"]
                if name not in self.callable:
                    raise ValueError(f"Tool {name} not found.")
                if not isinstance(given, dict):
                    raise TypeError(f"the arguments of {name} are no object but {given!r:.200}")
                result = self.callable[name](**given)
                if inspect.isawaitable(result):
                    under_way[place] = result
                else:
                    results[place] = self.content(result)
            except Exception as error:
                results[place] = self.failure(error)
        if under_way:
            outcomes = self.awaited(self.together(list(under_way.values())))
            for place, outcome in zip(under_way, outcomes):
                is_error = isinstance(outcome, BaseException)
                try:
                    results[place] = self.failure(outcome) if is_error else self.content(outcome)
                except Exception as error:  # of its text
                    results[place] = self.failure(error)
        return {"results": results}

    @staticmethod
    async def together(awaitables):
        return await asyncio.gather(*awaitables, return_exceptions=True)

    def content(self, result):
        text = str(result).encode(errors="replace").decode()  # JSON has no half of a character
        if len(text) > self.tools.max_chars:
            return self.failure(ValueError(f"the result has {len(text)} characters, more than {self.tools.max_chars}"))
        return {"content": text, "failed": False}

    def failure(self, error):
        said = str(error)[: self.tools.max_chars].encode(errors="replace").decode()
        return {"content": str({"error": said}), "failed": True}

    def close(self, request):
        """The environment's own reward, and its state for rewards that ask for it."""
        environment, reply = self.environment, {}
        if self.tools.factories[request["environment"]].has_reward:
            try:
                reward = float(self.finished(environment.get_reward()))
                reply["reward"] = reward if math.isfinite(reward) else repr(reward)
            except Exception as error:
                reply["failure"] = describe(error)
        if request["wants_state"]:
            reply["state"] = base64.b64encode(state_of(environment)).decode()
        return reply

    def play(self, request):
        """A whole episode: what the agent returns is its reward, or a dictionary that may have one."""
        os.environ["OPENAI_BASE_URL"] = request["base_url"]
        os.environ.setdefault("OPENAI_API_KEY", "none")  # which clients ask for, and nobody reads
        result, reply = self.finished(self.tools.agent(request["row"], request["base_url"])), {}
        reward = result.get("reward") if isinstance(result, dict) else result
        if reward is not None:
            reward = float(reward)
            reply["reward"] = reward if math.isfinite(reward) else repr(reward)
        if request["wants_state"]:
            reply["state"] = base64.b64encode(pickle.dumps(result)).decode()
        return reply

    def answer(self, request):
        if "base_url" in request:
            return self.play(request)
        if "calls" in request:
            return self.calls(request)
        return self.open(request) if "row" in request else self.close(request)


def state_of(environment):
    """The environment as it is, without attributes that cannot be copied to another process."""
    try:
        return pickle.dumps(environment)
    except Exception:
        bare = copy.copy(environment)
        slots = [getattr(kind, "__slots__", ()) for kind in type(bare).__mro__]
        slots = [name for names in slots for name in ([names] if isinstance(names, str) else names)]
        for name in [*getattr(bare, "__dict__", ()), *(name for name in slots if hasattr(bare, name))]:
            try:
                pickle.dumps(getattr(bare, name))
            except Exception:
                delattr(bare, name)
        return pickle.dumps(bare)


def frame(value):
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace")  # half of a character is no JSON
    return struct.pack(">I", len(text)) + text


def live(tools, end):
    """A forked process's life: requests one by one, until the other end of its socket is closed."""
    end.setblocking(True)
    for library in ("random", "numpy.random"):  # or all processes would draw the same numbers
        if library in sys.modules:
            sys.modules[library].seed()
    stream, served = end.makefile("rwb"), Served(tools)
    while len(head := stream.read(4)) == 4:
        request = json.loads(stream.read(struct.unpack(">I", head)[0]))
        try:
            reply = served.answer(request)
        except Exception as error:
            reply = {"error": describe(error)}
        sys.stdout.flush()
        stream.write(frame({"id": request["id"], **reply}))
        stream.flush()


class Child:
    """A forked process, as the server sees it."""

    def __init__(self, server):
        own, end = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                own.close()
                server.let_go()
                live(server.tools, end)
                status = 0
            except BaseException as error:
                print(describe(error), file=sys.stderr)
            finally:
                os._exit(status)
        try:
            os.setpgid(self.pid, self.pid)  # whichever of the two comes first
        except OSError:
            pass
        end.close()
        own.setblocking(False)
        self.socket, self.unsent, self.received = own, bytearray(), bytearray()
        self.request, self.deadline, self.trajectory = None, math.inf, None

    def is_alive(self):
        """Whether the server has not ended it."""
        return self.socket.fileno() >= 0


class Server:
    """Requests to forked processes, and what they answer, until standard input ends."""

    def __init__(self, settings, source, sink):
        self.settings, self.source, self.sink = settings, source, sink
        self.tools = None
        self.unsent, self.received = bytearray(), bytearray()
        self.idle, self.busy, self.bound = [], {}, {}  # processes; by socket; by trajectory
        self.waiting = deque()  # requests that no process is free for
        self.num_alive = 0
        self.lost = {}  # trajectories whose process is gone, with the reason
        self.selector = selectors.DefaultSelector()
        self.selector.register(source, selectors.EVENT_READ)

    def let_go(self):
        """Closes in a forked process what is the server's: files that tools have opened stay open."""
        for held in {self.source, self.sink, *(key.fileobj for key in self.selector.get_map().values())}:
            os.close(held) if isinstance(held, int) else held.close()
        self.selector.close()

    def say(self, reply):
        self.unsent += frame(reply)

    def serve(self):
        while True:
            writes = selectors.EVENT_WRITE if self.unsent else 0
            if writes and self.sink not in self.selector.get_map():
                self.selector.register(self.sink, selectors.EVENT_WRITE)
            elif not writes and self.sink in self.selector.get_map():
                self.selector.unregister(self.sink)
            next_end = min((child.deadline for child in self.busy.values()), default=math.inf)
            wait = None if next_end == math.inf else max(0.0, next_end - time.monotonic())
            for key, events in self.selector.select(wait):
                if key.fileobj == self.source:
                    if not self.hear():
                        return
                elif key.fileobj == self.sink:
                    del self.unsent[: os.write(self.sink, self.unsent[:PART])]
                elif key.data.is_alive():  # unless what was heard before it ended the process
                    self.exchange(key.data, events)
            now = time.monotonic()
            for child in [child for child in self.busy.values() if child.deadline <= now]:
                limit = self.settings["timeout_s"]
                self.lose(child, "timeout", f"no answer within {limit:g} s")

    def hear(self):
        part = os.read(self.source, PART)
        self.received += part
        for text in frames(self.received):
            self.take(json.loads(text))
        return bool(part)

    def take(self, request):
        if self.tools is None:
            self.prepare(request)
        elif "drop" in request:
            self.release(request["drop"])
        elif "give_up" in request:
            self.give_up(request["give_up"])
        elif not self.begin(request):
            self.waiting.append(request)

    def prepare(self, request):
        try:
            self.tools = Tools(self.settings)
        except BaseException as error:  # a module may call exit
            self.say({"id": request["id"], "error": describe(error)})
            self.tools = False
        else:
            gc.freeze()  # so that collecting garbage copies no page of what processes share
            self.say({"id": request["id"], **self.tools.ready()})

    def begin(self, request):
        """Gives a request to a process; false if none is free."""
        trajectory = request.get("trajectory")
        child = self.bound.get(trajectory) if trajectory is not None else None
        if trajectory in self.lost:
            self.say({"id": request["id"], "error": self.lost[trajectory], "kind": "died"})
            return True
        if child is None:
            if self.idle:
                child = self.idle.pop()
            elif self.num_alive < self.settings["workers"] or trajectory is not None:
                try:
                    child = Child(self)
                except OSError as error:
                    self.say({"id": request["id"], "error": f"cannot start a process for it: {error}", "kind": "died"})
                    return True
                self.num_alive += 1
                self.selector.register(child.socket, selectors.EVENT_READ, child)
            else:
                return False
            if trajectory is not None:
                child.trajectory = trajectory
                self.bound[trajectory] = child
        child.request, child.deadline = request, time.monotonic() + self.settings["timeout_s"]
        child.began = time.monotonic()
        self.busy[child.socket] = child
        child.unsent += frame(request)
        self.exchange(child, selectors.EVENT_WRITE)
        return True

    def exchange(self, child, events):
        try:
            if child.unsent and events & selectors.EVENT_WRITE:
                del child.unsent[: child.socket.send(child.unsent[:PART])]
            if events & selectors.EVENT_READ:
                part = child.socket.recv(PART)
                if not part:
                    return self.lose(child, "died", "its process ended")
                child.received += part
                if len(child.received) > self.settings["max_bytes"]:
                    return self.lose(child, "output", f"more than {self.settings['max_bytes']} bytes")
                for text in frames(child.received):
                    self.file(child, json.loads(text))
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            return self.lose(child, "died", "its process ended")
        if child.is_alive():
            both = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.unsent else 0)
            self.selector.modify(child.socket, both, child)

    def file(self, child, reply):
        request = child.request
        if request is None or reply.get("id") != request["id"]:
            return self.lose(child, "output", "an answer that was not asked for")
        self.say({**reply, "seconds": time.monotonic() - child.began})
        child.request, child.deadline = None, math.inf
        del self.busy[child.socket]
        if "wants_state" in request and child.trajectory is not None:
            self.release(child.trajectory)
        elif child.trajectory is None:
            self.free(child)

    def release(self, trajectory):
        """Ends a trajectory: its process may serve another one."""
        self.lost.pop(trajectory, None)
        child = self.bound.pop(trajectory, None)
        if child is None:
            return
        child.trajectory = None
        if child.request is not None:  # nobody waits for it
            self.end(child)
        else:
            self.free(child)

    def give_up(self, number):
        """Ends a request, whether it has a process or waits for one."""
        self.waiting = deque(request for request in self.waiting if request["id"] != number)
        for child in [child for child in self.busy.values() if child.request["id"] == number]:
            self.end(child)
        self.begin_next()

    def free(self, child):
        if self.num_alive > self.settings["workers"]:
            self.end(child)
        else:
            self.idle.append(child)
        self.begin_next()

    def begin_next(self):
        while self.waiting:
            request = self.waiting.popleft()  # taken off first: to begin it may lose a process, which comes here again
            if not self.begin(request):
                self.waiting.appendleft(request)
                return

    def lose(self, child, kind, reason):
        """A process that cannot be used any more, and what that means for whoever waits for it."""
        if child.request is not None:
            seconds = time.monotonic() - child.began
            self.say({"id": child.request["id"], "error": reason, "kind": kind, "seconds": seconds})
        if child.trajectory is not None:
            self.lost[child.trajectory] = reason
            self.bound.pop(child.trajectory, None)
        if child in self.idle:
            self.idle.remove(child)
        self.end(child)
        self.begin_next()

    def end(self, child):
        if not child.is_alive():
            return
        child.request = None
        self.num_alive -= 1
        self.busy.pop(child.socket, None)
        self.selector.unregister(child.socket)
        started = descendants(child.pid) if self.tools.agent else []  # a harness's programs may have sessions of their own
        for end, pid in [(os.killpg, child.pid), *((os.kill, pid) for pid in started)]:
            try:
                end(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        os.waitpid(child.pid, 0)
        child.socket.close()


def descendants(ancestor):
    """The processes that a process, or one of these, has started."""
    children = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(pid))
    found = list(children.get(ancestor, []))
    for pid in found:  # which grows
        found += children.get(pid, [])
    return found


def frames(received):
    """The whole frames in a buffer, which are taken off it."""
    found = []
    while len(received) >= 4 and len(received) >= 4 + (length := struct.unpack(">I", received[:4])[0]):
        found.append(bytes(received[4 : 4 + length]))
        del received[: 4 + length]
    return found


def main(settings):
    # Standard input and output, which tools do not get to see.
    source, sink = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    os.set_blocking(source, False)
    os.set_blocking(sink, False)
    Server(json.loads(settings), source, sink).serve()


main(*sys.argv[1:])
