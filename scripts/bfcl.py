#!/usr/bin/env python3
"""Questions of the Berkeley Function Calling Leaderboard as an evaluation: how often a model calls the right functions with the right arguments.

    scripts/bfcl.py bfcl.jsonl [CATEGORY..]       # rows of simple_python, multiple, parallel and irrelevance unless some are named
    colo-grpo eval --model DIR --config configs/environments/bfcl.toml

Questions, possible answers and the checker are the package's, bfcl-eval, which pip fetches once by its hash (scripts/measures.txt) without what it needs
to run models. Each question is asked once, with its functions as tools, over the evaluation's own server: this file is also the agent that asks.
An answer counts as with the leaderboard: the checker takes its calls, and none where no function fits.
"""
import json, os, pathlib, shutil, subprocess, sys, types, urllib.request, zipfile

ROOT = pathlib.Path(__file__).resolve().parent
CATEGORIES = ("simple_python", "multiple", "parallel", "irrelevance")
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}  # of the leaderboard's schemas, by JSON schema's names


def package(name, wheel):
    """The folder with a package's files, which pip fetches once."""
    base = os.environ.get("COLO_GRPO_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "colo-grpo")
    folder = pathlib.Path(base) / "measures" / wheel
    if not folder.is_dir():
        wheels = folder.parent
        wheels.mkdir(parents=True, exist_ok=True)
        wanted = [line for line in (ROOT / "measures.txt").read_text().splitlines() if line.startswith(name)]
        requirement = wheels / f"{name}.txt"
        requirement.write_text(wanted[0] + "\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "--dest", wheels]
        if subprocess.run([*command, "--requirement", requirement]).returncode:
            print(f"{name} cannot be fetched: this machine needs PyPI or a mirror of it", file=sys.stderr)
            sys.exit(4)
        with zipfile.ZipFile(wheels / f"{wheel}.whl") as archive:
            archive.extractall(f"{folder}.part{os.getpid()}")
        try:
            os.rename(f"{folder}.part{os.getpid()}", folder)
        except OSError:  # another process was faster
            shutil.rmtree(f"{folder}.part{os.getpid()}")
            if not folder.is_dir():
                raise
    return folder


def checker():
    """The package's checker of calls in Python, without the clients of models that it imports beside."""
    sys.path.insert(0, str(package("bfcl-eval", "bfcl_eval-2026.3.23-py3-none-any")))
    stand_in = types.ModuleType("bfcl_eval.constants.model_config")
    stand_in.MODEL_CONFIG_MAPPING = {"policy": types.SimpleNamespace(underscore_to_dot=True)}
    sys.modules[stand_in.__name__] = stand_in
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    return lambda functions, calls, answers, category: ast_checker(functions, calls, answers, Language.PYTHON, category, "policy")["valid"]


def plain(schema):
    """A schema by JSON schema's names of types."""
    if isinstance(schema, list):
        return [plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    named = {"type": TYPES.get(schema["type"], schema["type"])} if isinstance(schema.get("type"), str) else {}
    return {**{name: plain(value) for name, value in schema.items()}, **named}


def tools(functions):
    return [{"type": "function", "function": {"name": each["name"].replace(".", "_"), "description": each["description"],
                                              "parameters": plain(each["parameters"])}} for each in functions]


CHECK = None


def play(row, base_url):
    """Asks a question; the reward is 1 where the leaderboard takes the calls."""
    global CHECK
    CHECK = CHECK or checker()
    functions, category = json.loads(row["functions"]), row["category"]
    body = {"model": "policy", "messages": row["prompt"], "tools": tools(functions)}
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        message = json.load(answer)["choices"][0]["message"]
    try:
        calls = [{call["function"]["name"]: json.loads(call["function"]["arguments"])} for call in message.get("tool_calls") or []]
    except ValueError:
        return 0.0
    if category == "irrelevance":
        return float(not calls)
    # The checker looks names up as they were sent to the model.
    return float(bool(calls) and CHECK(functions, calls, json.loads(row["answers"]), category))


def main():
    output, *categories = sys.argv[1:]
    data = package("bfcl-eval", "bfcl_eval-2026.3.23-py3-none-any") / "bfcl_eval/data"
    with open(output, "w") as file:
        for category in categories or CATEGORIES:
            answers = {}
            if category != "irrelevance":
                lines = (data / "possible_answer" / f"BFCL_v4_{category}.json").read_text().splitlines()
                answers = {row["id"]: row["ground_truth"] for row in map(json.loads, lines)}
            for row in map(json.loads, (data / f"BFCL_v4_{category}.json").read_text().splitlines()):
                print(json.dumps({"prompt": row["question"][0], "id": row["id"], "category": category, "functions": json.dumps(row["function"]),
                                  "answers": json.dumps(answers.get(row["id"]))}), file=file)


if __name__ == "__main__":
    main()
