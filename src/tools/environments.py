"""Environments of hubs for colo-grpo: their rows, their episodes and tools, and their own scores.

Three processes load this text: one makes the rows of a run and ends, the tools' process (server.py) plays episodes and runs tools, and a
reward's process (worker.py) scores. All of them open the environment from the same settings. So a row needs to hold no more than the
number of its task, and a task keeps whatever types its package gives it.
"""

import itertools
import json
import os
import re
import shutil
import struct
import sys

# Rows of an environment without an end, where the configuration names no number.
NUM_TRAIN, NUM_HELD_OUT = 1000, 100


def package(name, distribution):
    """The module of a package, or an error that says how to install it."""
    try:
        return __import__(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        distribution = distribution if missing == name else missing
        raise ImportError(f"{error}; install it with: {sys.executable} -m pip install {distribution}") from error


def told(error):
    """An error in words; for data of nltk's that could not be downloaded, in place of its page of text, what is missing and how to get it."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    found = isinstance(error, LookupError) and re.search(r"Resource (\S+) not found\..*Attempted to load ([\w-]+/[\w-]+)", text, re.S)
    if not found:
        return f"{type(error).__name__}: {error}"
    name, place = found.groups()
    return (f"nltk's data {name} is missing and cannot be downloaded, and no package on PyPI has it; where there is a network: "
            f"{sys.executable} -m nltk.downloader {name}; NLTK_DATA names the folder that then holds {place}, here or copied")


def open_environment(settings):
    """The environment that the settings name as `hub:name`."""
    hub, _, name = settings["environment"].partition(":")
    return {"reasoning_gym": ReasoningGym, "verifiers": Verifiers, "openenv": OpenEnv}[hub](name, settings)


class ReasoningGym:
    """A generator of reasoning-gym: problems of one turn, and their scorer."""

    def __init__(self, task, settings):
        gym = package("reasoning_gym", "reasoning-gym")
        self.num_held_out = settings["num_held_out"] or NUM_HELD_OUT
        size = self.num_held_out + (settings["num_train"] or NUM_TRAIN)
        if "size" in settings["args"]:
            raise ValueError("environment_args.size is max_train_samples and max_eval_samples together: set those")
        self.data = gym.create_dataset(task, **{"seed": settings["seed"], **settings["args"], "size": size})
        self.extract = gym.utils.extract_answer

    def rows(self):
        """Held-out problems first; a training problem is none of them."""
        held_out = set()
        for index in range(len(self.data)):
            problem = self.data[index]
            if index < self.num_held_out:
                held_out.add(problem["question"])
            elif problem["question"] in held_out:
                continue
            yield {"prompt": problem["question"], "answer": str(problem["answer"]), "task": index}

    def score(self, completion, index):
        """The package's score of the answer between the last answer tags, or of the whole completion where there are none."""
        answer = self.extract(completion)
        return float(self.data.score_answer(completion.strip() if answer is None else answer, self.data[index]))


class Verifiers:
    """A taskset of verifiers with its environment, which plays whole episodes against an OpenAI-compatible server."""

    def __init__(self, name, settings):
        package("verifiers", "verifiers")
        try:
            from verifiers.v1.utils import loaders
        except ModuleNotFoundError as error:
            raise ImportError(f"{error}: verifiers 0.4 or newer is needed, for {sys.executable}") from error
        config = self.configured(name, settings["args"], loaders)
        self.check(config, loaders)
        self.environment = loaders.load_environment(config)
        tasks = self.environment.taskset
        num_train, num_held_out = settings["num_train"], settings["num_held_out"]
        if tasks.bounded:
            tasks = list(tasks)
            self.num_held_out = min(NUM_HELD_OUT, len(tasks) // 10) if num_held_out is None else num_held_out
            tasks = tasks[: None if num_train is None else self.num_held_out + num_train]
        else:
            self.num_held_out = num_held_out or NUM_HELD_OUT
            tasks = list(itertools.islice(tasks, self.num_held_out + (num_train or NUM_TRAIN)))
        for task in tasks:
            if task.data.image is not None:
                self.need_container(f"task {task.data.idx} has an image and needs")
        self.tasks = tasks

    @staticmethod
    def configured(name, args, loaders):
        """The environment's configuration. A role whose author chose nothing else only talks, in a process of this machine."""
        values = {**args, "taskset": {**args.get("taskset", {}), "id": name}}
        kind = loaders.env_config_type(name, args.get("id") or "")
        tasks = loaders.taskset_config_type(name).model_validate(values["taskset"])
        has_tools = loaders.taskset_class(name).toolsets(tasks) or loaders.task_type(name).toolsets(tasks.task)
        for role in Verifiers.roles(kind):
            given, author = dict(values.get(role, {})), kind.model_fields[role].default
            if "harness" not in given and author.harness is None and loaders.default_harness_id(name) == "bash":
                given["harness"] = {"id": "null" if has_tools else talking_harness()}
            if "runtime" not in given and "runtime" not in author.model_fields_set:
                given["runtime"] = {"type": "subprocess"}
            values[role] = given
        return loaders.resolve_env_config(values)

    @staticmethod
    def roles(kind):
        from verifiers.v1.configs.agent import AgentConfig

        return [name for name, field in kind.model_fields.items() if isinstance(field.default, AgentConfig)]

    def check(self, config, loaders):
        """Refuses what one policy cannot play, what would run a model's programs on this machine, and runtimes that are not there."""
        roles = self.roles(type(config))
        if len(roles) != 1:
            raise ValueError(f"{config.env_id} has the roles {', '.join(roles)}: only environments with one role are supported")
        harness, task = config.agent_harnesses()[roles[0]], loaders.task_type(config.taskset.id)
        kind, runtime = loaders.harness_class(harness.id), getattr(config, roles[0]).runtime.type
        self.key = f"environment_args.{roles[0]}.runtime.type"
        self.is_container = runtime != "subprocess"
        if kind.EXECUTES_CODE or kind.NEEDS_CONTAINER:
            self.need_container(f"the harness {harness.id} needs")
        if task.NEEDS_CONTAINER:
            self.need_container(f"tasks of {config.taskset.id} need")
        if runtime in ("docker", "podman", "apptainer") and shutil.which(runtime) is None:
            raise ValueError(f"{self.key} = {runtime}, but {runtime} is not installed on this machine")
        if runtime == "prime":
            from verifiers.v1.utils.prime import ensure_prime_auth

            try:
                ensure_prime_auth()
            except SystemExit as error:
                raise ValueError(f"{self.key} = prime: {error}") from error

    def need_container(self, what):
        if not self.is_container:
            raise ValueError(f"{what} a container: set {self.key} = docker, podman, apptainer, prime, modal or e2b; a subprocess would run it on this machine")

    def rows(self):
        for index, task in enumerate(self.tasks):
            prompt, system = task.data.prompt, task.data.system_prompt
            messages = [{"role": "system", "content": system}] if system else []
            if prompt is None or isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt or task.data.name or f"task {index}"})
            else:
                from verifiers.v1.dialects.chat import message_to_wire

                messages += [message_to_wire(message) for message in prompt]
            yield {"prompt": messages, "task": index, "key": task.key}

    def play(self, row, base_url):
        import asyncio

        return asyncio.run(self.episode(row, base_url))

    async def episode(self, row, base_url):
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        task = self.tasks[row["task"]]
        if task.key != row["key"]:
            raise ValueError(f"task {row['task']} differs from the row that was made of it: load() of the taskset must return the same tasks every time")
        client = EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
        context = ModelContext(model="policy", client=client)
        async with self.environment.serving():
            (slot,) = self.environment.slots(task)
            episode = await self.environment.run_slot(slot, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            first = errors[0] if errors else None
            raise RuntimeError(f"the episode failed: {first.type}: {first.message}" if first else "the episode failed")
        (trace,) = episode.traces
        return {"reward": trace.reward, "rewards": {name: score and score.value for name, score in trace.rewards.items()}}


def talking_harness():
    """The name of a harness for roles that only talk. It asks the model in this process, where verifiers' own starts a program for each turn."""
    import types

    import httpx
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harness import Harness
    from verifiers.v1.runtimes import ProgramResult

    class TalkingHarness(Harness[HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or []]
            headers, body = {"authorization": f"Bearer {secret}"}, {"model": ctx.model, "messages": messages}
            async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
                reply = await client.post(f"{endpoint}/chat/completions", headers=headers, json=body)
            return ProgramResult(exit_code=int(reply.status_code != 200), stdout="", stderr=reply.text)

    module = types.ModuleType("colo_grpo_talking")
    module.TalkingHarness, module.__all__ = TalkingHarness, ["TalkingHarness"]
    sys.modules[module.__name__] = module
    return module.__name__


class OpenEnv:
    """A server of OpenEnv: its action is a tool of the model's, or its MCP tools are."""

    # The reward's name.
    name = "openenv"
    has_reward = True

    def __init__(self, url, settings):
        self.url, self.args = url.rstrip("/"), settings["args"]
        self.num_held_out = settings["num_held_out"] or NUM_HELD_OUT
        self.num_rows = self.num_held_out + (settings["num_train"] or NUM_TRAIN)

    def rows(self):
        """A row is a seed, which `reset` gets with `environment_args`; the prompt is what it shows."""
        return ({"seed": seed} for seed in range(self.num_rows))

    def connect(self):
        """Asks the server for its tools, before any process is forked."""
        import asyncio

        package("openenv", "openenv")
        self.schemas = asyncio.run(self.ask_schemas())
        self.methods = [each["function"]["name"] for each in self.schemas]

    async def ask_schemas(self):
        client = self.client()
        try:
            await client.connect()
            action = self.action_schema()
            self.is_mcp = action.get("title") in ("Action", "CallToolAction", "ListToolsAction")
            if self.is_mcp:
                listed = await client.step({"type": "list_tools"})
                tools = listed.observation["tools"]
                return [described(tool["name"], tool["description"], tool["input_schema"]) for tool in tools]
        except Exception as error:
            raise ConnectionError(f"no OpenEnv server answers at {self.url}: {type(error).__name__}: {error}") from error
        finally:
            await client.disconnect()
        properties = {name: kind for name, kind in action.get("properties", {}).items() if name != "metadata"}
        text = action.get("description") or "Takes a step in the environment."
        return [described("step", text, {**action, "properties": properties})]

    def action_schema(self):
        import urllib.request

        with urllib.request.urlopen(f"{self.url}/schema", timeout=30) as reply:
            return json.load(reply)["action"]

    def client(self):
        from openenv import GenericEnvClient

        return GenericEnvClient(base_url=self.url)

    def make(self):
        return OpenEnvEpisode(self)

    def bound(self, episode):
        """The model's tools in an episode."""
        import functools

        return {name: functools.partial(episode.act, name) for name in self.methods}


def described(name, text, schema):
    """A tool as chat templates show it; references within the schema stay as they are."""
    keys = ("type", "properties", "required", "$defs")
    parameters = {"type": "object", "properties": {}, **{key: schema[key] for key in keys if key in schema}}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


class OpenEnvEpisode:
    """An episode of a server, over a connection of its own."""

    def __init__(self, environment):
        self.environment = environment
        self.client, self.total, self.is_done = None, 0.0, False

    async def reset(self, **row):
        if self.client is not None:
            await self.client.disconnect()
        self.client, self.total, self.is_done = self.environment.client(), 0.0, False
        await self.client.connect()
        row = {name: value for name, value in row.items() if name not in ("prompt", "environment")}
        result = await self.client.reset(**{**self.environment.args, **row})
        shown = self.taken(result)
        return None if shown == "{}" else shown

    async def act(self, tool, **arguments):
        if self.is_done:
            raise ValueError("the episode is over: call no more tools")
        action = {"type": "call_tool", "tool_name": tool, "arguments": arguments} if self.environment.is_mcp else arguments
        return self.taken(await self.client.step(action))

    def taken(self, result):
        """The observation as text, without what is no observation; counts the reward."""
        self.total += float(result.reward or 0.0)
        self.is_done = bool(result.done)
        shown = {name: value for name, value in result.observation.items() if name not in ("reward", "done", "metadata") and value is not None}
        if self.environment.is_mcp and "result" in shown:
            shown = shown.get("error") or shown["result"]
            shown = shown.get("data", shown) if isinstance(shown, dict) else shown
        text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
        return f"{text}\nThe episode is over." if self.is_done else text

    async def get_reward(self):
        await self.client.disconnect()
        self.client = None
        return self.total


def score(completions, task, **_):
    """The reward of an environment that scores completions: of the text, or of the newest turn."""
    global OPENED
    if OPENED is None:
        OPENED = open_environment(SETTINGS)
    texts = [each if isinstance(each, str) else each[-1].get("content") or "" for each in completions]
    return [OPENED.score(text, index) for text, index in zip(texts, task)]


OPENED = None


def make_rows(settings, folder):
    """Writes the rows of a run, `train.jsonl` and `held_out.jsonl`."""
    environment = open_environment(settings)
    names = ("held_out.jsonl", "train.jsonl")
    with open(os.path.join(folder, names[0]), "w") as held_out, open(os.path.join(folder, names[1]), "w") as train:
        for index, row in enumerate(environment.rows()):
            print(json.dumps(row), file=held_out if index < environment.num_held_out else train)


def main(settings, folder):
    """Answers the one request, a frame as server.py has them, when the rows are written."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # packages print
    try:
        make_rows(json.loads(settings), folder)
        reply = {}
    except Exception as error:
        reply = {"error": told(error)[:4000]}
    text = json.dumps({"id": 0, **reply}).encode()
    sink.write(struct.pack(">I", len(text)) + text)
    sink.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
