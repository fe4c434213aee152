"""Passes the lines of a run's metrics.jsonl on to W&B and trackio.

Arguments: the output folder, the run's name, the last step that an earlier process has passed on (or -1), and the services. The run
holds the other end of standard input and writes nothing: when that end closes, the run is over, and so is this process once it has
passed on what is left.
"""

import sys

sys.path[:] = [path for path in sys.path if path]  # not the current folder, which anybody may have filled

import json
import os
import select

folder, name, last_step, *services = sys.argv[1:]
last_step = int(last_step)


def opened(service):
    """The module of a service, with a run begun or continued."""
    module = __import__(service)
    ids = os.path.join(folder, "report_to.json")
    known = json.load(open(ids)) if last_step >= 0 and os.path.exists(ids) else {}
    config = json.load(open(os.path.join(folder, "run_config.json")))
    project = os.environ.get("WANDB_PROJECT", "colo-grpo")
    if service == "wandb":
        run = module.init(project=project, name=name, config=config, id=known.get(service), resume="allow", dir=folder)
        with open(ids, "w") as file:
            json.dump({**known, service: run.id}, file)
    else:
        module.init(project=os.environ.get("TRACKIO_PROJECT", project), name=name, config=config, resume="allow")
    return module


def named(values):
    """Names as transformers' integrations write them: eval/reward, train/loss."""
    for key, value in values.items():
        if isinstance(value, (int, float)) and key not in ("step", "time"):
            yield ("eval/" + key[5:] if key.startswith("eval_") else "train/" + key), value


def completions(step, module):
    """The completions of a step as a table, where the run keeps them and pandas can read them."""
    path = os.path.join(folder, "completions", f"completions_{step:05}.parquet")
    if hasattr(module, "Table") and os.path.exists(path):
        try:
            import pandas

            module.log({"completions": module.Table(dataframe=pandas.read_parquet(path))}, step=step)
        except Exception as error:
            print(f"no table of completions: {error}", file=sys.stderr)


def pass_on(line, modules):
    line = json.loads(line)
    step = line["step"]
    if step <= last_step:
        return
    for module in modules:
        module.log({**dict(named(line)), "train/global_step": step}, step=step)
        completions(step, module)


def main():
    modules = []
    for service in services:
        try:
            modules.append(opened(service))
        except ModuleNotFoundError as error:  # of report_to = all one may be missing
            if service == services[-1] and not modules:
                raise
            print(f"{service} is left out: {error}", file=sys.stderr)
    rest = b""
    with open(os.path.join(folder, "metrics.jsonl"), "rb") as lines:
        is_over = False
        while True:
            *whole, rest = (rest + lines.read()).split(b"\n")
            for line in whole:
                pass_on(line, modules)
            if is_over:
                break
            readable, _, _ = select.select([sys.stdin], [], [], 1.0)
            is_over = bool(readable) and not os.read(0, 1)
    for module in modules:
        module.finish()


main()
