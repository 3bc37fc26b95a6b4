"""A client of `benchmarks.serve`, in a process of its own, which imports nothing but Python's own modules."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from typing import Any


def run_client(port: int, queue: int) -> None:
    """Make those of the calls on stdin whose numbers come from a pipe, one after another; prints times and tokens.

    ``queue``: its end to read from; a number has four letters. Says that it is ready before the first.
    """
    calls, done = [(json.dumps(body), bool(body.get("stream"))) for body in json.load(sys.stdin)], {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.connect()
    print("ready", flush=True)
    while number := os.read(queue, 4):
        done[int(number)] = _ask(connection, *calls[int(number)])
    print(json.dumps(done))


def _ask(connection: http.client.HTTPConnection, data: str, is_streamed: bool) -> dict[str, Any]:
    times, tokens = list[float](), list[Any]()
    sent = time.time()
    connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
    response = connection.getresponse()
    if not is_streamed:
        answer = json.load(response)
        return {"sent": sent, "times": [time.time()], "tokens": answer["choices"][0]["token_ids"]}
    for line in response:
        if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
            # SGLang tells no ids: a piece of text, which is mostly a token.
            text = [choices[0]["text"]] if choices[0].get("text") else []
            if new := choices[0].get("token_ids", text):
                times.append(time.time())
                tokens += new
    return {"sent": sent, "times": times, "tokens": tokens}


if __name__ == "__main__":
    run_client(int(sys.argv[1]), int(sys.argv[2]))
