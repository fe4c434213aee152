#!/usr/bin/env python3
"""Lets many clients stream from a `colo-grpo serve` of its own, round after round, a third of whom vanish (standard library only).

    scripts/serve_soak.py --program target/debug/colo-grpo --model configs/arithmetic/model

After each round it prints the server's memory and waits until nothing is under way. Ends with 1 if an answer is not that of the first
round, if KV blocks are lost, or if memory grows over the second half by more than the given share.
"""

import argparse
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time


def body(client: int) -> bytes:
    return json.dumps({"prompt": [[1 + client % 7, 2, 3]], "max_tokens": 24, "temperature": 1.3, "seed": client, "n": 2,
                       "logprobs": 3, "stream": True, "return_token_ids": True}).encode()


class Server:
    def __init__(self, program: str, model: str) -> None:
        self.process = subprocess.Popen([program, "serve", "--model", model, "--port", "0"], stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"listening on http://([^/]+)/", line):
                self.address = found[1]
                break
        else:
            sys.exit("the server did not start")
        threading.Thread(target=lambda: [None for _ in self.process.stderr], daemon=True).start()

    def stream(self, client: int, vanishes: bool) -> "dict[int, list[int]] | None":
        """Token ids of each choice; none of a client that vanishes after the first bytes."""
        connection = http.client.HTTPConnection(self.address, timeout=600)
        connection.request("POST", "/v1/completions", body(client), {"Content-Type": "application/json"})
        if vanishes and client % 2:
            connection.close()
            return None
        response = connection.getresponse()
        if vanishes:
            response.read(16)
            connection.close()
            return None
        choices: "dict[int, list[int]]" = {}
        for line in response.read().decode().splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    choices.setdefault(choice["index"], []).extend(choice["token_ids"])
        return choices

    def metrics(self) -> "dict[str, float]":
        connection = http.client.HTTPConnection(self.address, timeout=600)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def wait_until_idle(self) -> None:
        while True:
            now = self.metrics()
            busy = now["colo_grpo_num_requests_running"] + now["colo_grpo_num_requests_waiting"]
            if not busy and now["colo_grpo_kv_blocks_free"] == now["colo_grpo_kv_blocks"]:
                return
            time.sleep(0.05)

    def resident_mib(self) -> float:
        with open(f"/proc/{self.process.pid}/status") as status:
            return int(re.search(r"VmRSS:\s+(\d+)", status.read())[1]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default="target/release/colo-grpo")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--growth", type=float, default=0.02, help="share of memory that the second half may add")
    args = parser.parse_args()
    server = Server(args.program, args.model)
    first: "dict[int, dict[int, list[int]]]" = {}
    memory, lost = [], 0
    for number in range(args.rounds):
        answers: "dict[int, dict[int, list[int]] | None]" = {}

        def ask(client: int) -> None:
            try:
                answers[client] = server.stream(client, vanishes=client % 3 == 0)
            except OSError as error:
                print(f"client {client}: {error}")

        start = time.monotonic()
        threads = [threading.Thread(target=ask, args=(client,)) for client in range(args.streams)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        server.wait_until_idle()
        told = {client: answer for client, answer in answers.items() if answer is not None}
        first = first or told
        whole = sum(answer == first.get(client) and len(answer) == 2 for client, answer in told.items())
        expected = sum(client % 3 != 0 for client in range(args.streams))
        lost += expected - whole
        memory.append(server.resident_mib())
        print(f"round {number + 1}: {whole} of {expected} answers whole, {args.streams - expected} clients vanished, "
              f"{memory[-1]:.1f} MiB, {time.monotonic() - start:.1f} s", flush=True)
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait()
    middle = memory[len(memory) // 2]
    growth = memory[-1] / middle - 1
    print(f"{lost} answers lost, memory {growth:+.2%} over the second half, the server ended with {code}")
    return int(lost > 0 or growth > args.growth or code != 0)


if __name__ == "__main__":
    sys.exit(main())
