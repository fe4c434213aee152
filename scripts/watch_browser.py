#!/usr/bin/env python3
"""Opens `colo-grpo watch` in headless Chromium and uses the page as a person does: charts, two runs beside one another, a filter, the
keyboard, completions message by message, a run that goes on, a window of 420 pixels. Python's standard library and an installed Chromium (Debian: chromium).

    scripts/watch_browser.py PROGRAM DIR [PICTURES]

DIR has two runs of at least two steps with completions, `a` and `b`, and one whose completions call tools, `turns`, which is older than
these; a line is added to the metrics of `a`. Pictures go to the folder
PICTURES. Prints one line a check and ends with 1 if one fails, with 4 where no Chromium is installed.
"""

import base64
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
WAIT_MS = 60_000  # until a page that does not come is a failure


class Browser:
    """Chromium behind its DevTools protocol, spoken over a pair of pipes."""

    def __init__(self, program: str, home: str) -> None:
        commands, self.out = os.pipe()
        self.answers, answers = os.pipe()
        options = f"--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --user-data-dir={home} --remote-debugging-pipe"
        line = f'exec "$0" {options} about:blank 3<&{commands} 4>&{answers}'
        self.process = subprocess.Popen(["bash", "-c", line, program], pass_fds=(commands, answers), stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(answers)
        self.rest, self.number, self.session, self.faults = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.faults.append(answer["params"]["exceptionDetails"].get("text", "an exception"))
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.faults.append(answer["params"]["entry"]["text"])

    def read(self) -> dict:
        while b"\0" not in self.rest:
            new = os.read(self.answers, 1 << 20)
            if not new:
                raise RuntimeError("the browser has ended")
            self.rest += new
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def run(self, script: str):
        """The value of an expression in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, condition: str) -> bool:
        """Waits for changes of the page until a condition holds."""
        return self.run(f"""new Promise((done) => {{
            const look = () => {{ if ({condition}) {{ watcher.disconnect(); done(true); }} }};
            const watcher = new MutationObserver(look);
            watcher.observe(document, {{subtree: true, childList: true, characterData: true, attributes: true}});
            setTimeout(() => {{ watcher.disconnect(); done(false); }}, {WAIT_MS});
            look();
        }})""")

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


def look(browser: Browser, address: str, folder: pathlib.Path, pictures: pathlib.Path | None, check) -> None:
    def picture(name: str, blank: bytes) -> None:
        taken = browser.picture()
        check(f"the picture {name} is not blank", len(taken) > 3 * len(blank))
        if pictures:
            (pictures / f"{name}.png").write_bytes(taken)

    blanks = {}
    for width, height in ((1200, 1500), (420, 1500)):
        browser.size(width, height)
        blanks[width] = browser.picture()
    browser.size(1200, 1500)
    browser.call("Page.navigate", url=f"{address}/")
    check("charts are drawn", browser.until("document.querySelectorAll('#charts svg').length > 3"))
    check("completions are shown", browser.until("/completions, of/.test(document.getElementById('completions').textContent)"))
    check("four runs are listed", browser.run("document.querySelectorAll('#runs label').length") == 4)
    check("a run's name stays text", browser.run("document.images.length") == 0 and browser.run("window.hostile") is None)
    picture("wide", blanks[1200])

    lines = "document.querySelector('#charts svg').querySelectorAll('polyline, path').length"
    before = browser.run(lines)
    name = "label.querySelector('b').textContent"
    other = f"[...document.querySelectorAll('#runs label')].find((label) => 'ab'.includes({name}) && !label.firstChild.checked)"
    browser.run(f"{other}.firstChild.click()")
    check("a second run has lines of its own", browser.until(f"{lines} > {before}"))
    check("the address keeps the choice", "," in browser.run("location.hash"))
    picture("compared", blanks[1200])

    browser.run("document.querySelector('#charts svg').focus()")
    seen = browser.run("document.querySelector('#charts .plot').textContent")
    for kind in ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="ArrowLeft", code="ArrowLeft", windowsVirtualKeyCode=37)
    check("a chart answers to the arrow keys", browser.until(f"document.querySelector('#charts .plot').textContent !== {json.dumps(seen)}"))

    browser.run("(() => { const field = document.querySelector('[name=text]'); field.value = 'no such text'; "
                "field.dispatchEvent(new Event('input', {bubbles: true})); })()")
    check("a filter is applied", browser.until("/^\\s*0 of|[^0-9]0 of/.test(document.getElementById('completions').textContent)"))

    turns(browser, check)
    picture("turns", blanks[1200])

    metrics = folder / "a" / "metrics.jsonl"
    last = json.loads(metrics.read_text().splitlines()[-1])
    with metrics.open("a") as file:
        file.write(json.dumps({"step": last["step"] + 7, "time": last.get("time", 0) + 1, "reward": 0.125}) + "\n")
    check("a run that goes on is followed", browser.until(f"/step {last['step'] + 7}/.test(document.getElementById('runs').textContent)"))

    browser.size(420, 1500)
    browser.call("Page.reload")
    check("a narrow window has charts, too", browser.until("document.querySelectorAll('#charts svg').length > 3"))
    check("a narrow window has completions, too", browser.until("/completions, of/.test(document.getElementById('completions').textContent)"))
    widest = browser.run("document.documentElement.scrollWidth")
    check(f"nothing is wider than a window of 420 pixels: {widest}", widest <= 420)
    picture("narrow", blanks[420])
    check(f"the browser has no complaint: {browser.faults[:2]}", not browser.faults)


def turns(browser: Browser, check) -> None:
    """Chooses the run with tools: its completions are shown message by message, in the order in which they came."""
    browser.run("""(() => {
        const {run, text} = document.getElementById('form').elements;
        run.value = [...run.options].find((option) => option.text === 'turns').value;
        text.value = '';
        run.dispatchEvent(new Event('input', {bubbles: true}));
    })()""")
    check("completions of several turns have their messages", browser.until("document.querySelector('#completions .turns .call')"))
    messages = browser.run("""[...document.querySelector('#completions .call').closest('ol').children].map((item) =>
        [item.className, item.querySelector('h5').textContent, [...item.querySelectorAll('pre')].map((text) => text.textContent)])""")
    kinds = [kind for kind, *_ in messages]
    check(f"the policy and its tools take turns: {kinds}", kinds[:2] == ["policy", "other"] and set(kinds) == {"policy", "other"})
    (_, said, texts), (_, tool, answers) = messages[:2]
    check(f"a turn has its tokens and its call: {said}, {texts}", "tokens sampled" in said and any(text.startswith("calls add(") for text in texts))
    check(f"an answer has the name of its tool: {tool}, {answers}", tool.startswith("tool add") and len(answers) == 1 and bool(answers[0]))
    browser.run("document.querySelector('#completions .turns details summary').click()")
    opened = "document.querySelector('#completions .turns details[open] pre')"
    check("a turn can be read as it was sampled", browser.until(opened) and browser.run(f"{opened}.offsetHeight > 0"))
    widths = browser.run("[document.documentElement.scrollWidth, innerWidth]")
    check(f"messages fit the window: {widths}", widths[0] <= widths[1])


def main() -> int:
    if len(sys.argv) not in (3, 4):
        print("\n".join(__doc__.splitlines()[3:6]), file=sys.stderr)
        return 2
    found = [path for path in map(shutil.which, BROWSERS) if path]
    if not found:
        print("watch_browser: no Chromium is installed: the page is not tried in a browser", file=sys.stderr)
        return 4
    program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    pictures = pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else None
    if pictures:
        pictures.mkdir(parents=True, exist_ok=True)
    hostile = folder / "<img src=x onerror=hostile=1>"
    hostile.mkdir(exist_ok=True)
    (hostile / "metrics.jsonl").write_text('{"step":1,"time":1,"reward":0.5}\n')
    os.utime(hostile / "metrics.jsonl", (1, 1))  # older than the others
    failed = []

    def check(name: str, holds: bool) -> None:
        print(f"{'ok    ' if holds else 'FAILED'} {name}")
        if not holds:
            failed.append(name)

    watcher = subprocess.Popen([program, "watch", str(folder), "--port", "0"], stderr=subprocess.PIPE, text=True)
    home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    browser = None
    try:
        line = watcher.stderr.readline()
        address = next(word for word in line.split() if word.startswith("http://")).rstrip("/")
        browser = Browser(found[0], home.name)
        look(browser, address, folder, pictures, check)
    finally:
        if browser:
            browser.process.kill()
            browser.process.wait()
        watcher.terminate()
        watcher.wait()
        home.cleanup()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
