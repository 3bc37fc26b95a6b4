"""Make the committed results and the tables of docs/engines.md from the lines of run.py and chains.py.

    python results.py engines.jsonl [...] --chains chains.jsonl --out results/h200.json   # prints the tables too

Of the texts only what they show is kept: how many answers equal plain decoding in the same engine (for the oracle: its
known continuation), and where the others part from it.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from engines import oracle
from starts import TEXT_TOKENS

Json = dict[str, Any]
NUM_PROMPTS = 16
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: )?(\w+(?:\.\w+)*(?:Error|Exception)\b.*)", re.MULTILINE)


def differences(tokens: list[list[int]], plain: list[list[int]]) -> list[int]:
    """Position of the first other token in every answer that differs."""
    return [
        next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        for mine, theirs in zip(tokens, plain, strict=True)
        if mine != theirs
    ]


def condense(rows: list[Json], chains: list[Json]) -> list[Json]:
    """One entry per start, texts judged; a start that was run again replaces the earlier line of its name."""
    latest = {row["name"]: row for row in rows}
    plain = {
        (row["engine"], "smollm2"): row["result"]["text"]["tokens"]
        for row in latest.values()
        if row["job"]["head"] is None and "error" not in row
    }
    known = [oracle.continuation(oracle.prompt(cycle), TEXT_TOKENS) for cycle in range(NUM_PROMPTS)]
    plain |= {(row["engine"], "oracle"): known for row in latest.values()}
    expected = {(chain["rows"], chain["k"]): chain["accepted_length"] for chain in chains}
    entries = []
    for row in latest.values():
        job = row["job"]
        model = Path(job["target"]).parent.name
        head = None if job["head"] is None else Path(job["head"]).name
        dropped = ("engine", "target", "head", "prompts", "token_map", "broken", "port")
        entry = {
            "name": row["name"],
            "engine": row["engine"],
            "model": model,
            "head": head,
            "options": {name: value for name, value in job.items() if name not in dropped},
            "facts": row["facts"],
        }
        if "error" in row:
            raised = _EXCEPTION.findall(row["log"])
            entries.append({**entry, "error": row["error"], "exception": raised[-1] if raised else None})
            continue
        if job["dummy"] and "drafter_rows" not in row["facts"]:
            # Before vllm_start.py saw to it, a head without a file was given the target's LM head, whatever its rows.
            entries.append({**entry, "error": "void: the drafter had the target's rows, not its own"})
            continue
        result = row["result"]
        entry["speeds"] = result["speeds"]
        if "served" in result:
            entry["served"] = result["served"]
            folder = f"{Path(job['target']).parents[1]}/"
            entry["facts"]["command"] = [word.replace(folder, "") for word in row["facts"]["command"]]
        for name, text in {"text": result["text"], **result.get("broken", {})}.items():
            if text is None:
                continue
            shown = {"accepted_length": text["accepted_length"], "answers": len(text["tokens"])}
            if (row["engine"], model) in plain:
                shown["differ_from_plain_at"] = differences(text["tokens"], plain[row["engine"], model])
            if name == "text":
                k = job.get("k", job.get("steps", 3))
                if model == "smollm2" and job.get("topk", 1) == 1:
                    shown["reference_chain"] = expected.get((head, k))
                entry["text"] = shown
            else:
                entry.setdefault("broken", {})[name] = shown
        entries.append(entry)
    return entries


def tables(entries: list[Json]) -> str:
    """Markdown: real models, then dummy ones."""
    lines = [
        "| start | accepted length | reference | equal to plain | tokens/s at batch 1, 4, 16 | ms a step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for entry in entries:
        if "error" in entry:
            lines.append(f"| {entry['name']} | {entry.get('exception') or entry['error']} | | | | |")
            continue
        text = entry.get("text", {})
        same = ""
        if "differ_from_plain_at" in text:
            same = f"{text['answers'] - len(text['differ_from_plain_at'])} of {text['answers']}"
        length = text.get("accepted_length") or ""
        if entry["options"]["dummy"]:
            length = entry["speeds"][0]["accepted_length"]
        speeds = ", ".join(f"{speed['tokens_per_s']:.0f}" for speed in entry["speeds"])
        steps = ", ".join(f"{speed['ms_per_step']:.2f}" for speed in entry["speeds"])
        lines.append(
            f"| {entry['name']} | {length} | {text.get('reference_chain') or ''} | {same} | {speeds} | {steps} |"
        )
        for concurrency, served in entry.get("served", {}).items():
            lines.append(
                f"| … by engine_speed.py, {concurrency} at a time | {served['accepted_length']:.3f} | | | "
                f"{served['tokens_per_s']:.0f} | |"
            )
        for how, shown in entry.get("broken", {}).items():
            same = f"{shown['answers'] - len(shown['differ_from_plain_at'])} of {shown['answers']}"
            lines.append(f"| … its map {how} | {shown['accepted_length']} | | {same} | | |")
    return "\n".join(lines)


def main() -> None:
    """Write the results and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", nargs="+", type=Path)
    parser.add_argument("--chains", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [json.loads(line) for path in arguments.lines for line in path.read_text().splitlines()]
    chains = [json.loads(line) for line in arguments.chains.read_text().splitlines()]
    entries = condense(rows, chains)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(entries, indent=1) + "\n")
    print(tables(entries))


if __name__ == "__main__":
    main()
