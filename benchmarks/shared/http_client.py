"""A client of `benchmarks.serve`, in a process of its own, which imports nothing but Python's own modules."""

from __future__ import annotations

import http.client
import json
import sys
import time


def run_client(port: int) -> None:
    """Make the calls that stdin holds, one after another; prints their times and tokens."""
    done = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    for body in json.load(sys.stdin):
        sent = time.time()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if not body.get("stream"):
            answer = json.load(response)
            done.append({"sent": sent, "times": [time.time()], "tokens": answer["choices"][0]["token_ids"]})
            continue
        times, tokens = list[float](), list[int]()
        for line in response:
            if (
                line.startswith(b"data: {")
                and (choices := json.loads(line[6:])["choices"])
                and choices[0].get("token_ids")
            ):
                times.append(time.time())
                tokens += choices[0]["token_ids"]
        done.append({"sent": sent, "times": times, "tokens": tokens})
    print(json.dumps(done))


if __name__ == "__main__":
    run_client(int(sys.argv[1]))
