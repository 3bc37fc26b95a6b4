"""Draw README's picture from a committed result of `benchmarks.shapes`; needs no GPU.

    python -m benchmarks.picture benchmarks/results/2026-11-29-shapes.json --out docs/images/speed.svg

By kind of text tokens a second of SmolLM2 with its own head, one sequence at a time: plain decoding (the mean beside
either), drafting over all rows, and over `SLIM` of them. All bars are of one run: of the file's that which has most
kinds, of equal ones the last.
The colours are the reader's: light, or dark where the browser says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.shared.command import Command

SLIM = 4096
KINDS = {"chat": "chat", "math": "mathematics", "code": "code", "summaries": "summaries", "german": "German"}
NAMES = ("plain decoding", "drafted over all 49,152 rows", f"drafted over {SLIM:,} rows")
WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 640, 150, 72, 23, 14, 128
STYLE = """<style>
text { font: 19px system-ui, sans-serif; fill: #1f2328 } .ground { fill: #ffffff } .b0 { fill: #afb8c1 }
.b1 { fill: #54aeff } .b2 { fill: #bc4c00 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .ground { fill: #0d1117 } .b0 { fill: #6e7681 } .b1 { fill: #388bfd } .b2 { fill: #f0883e }
}
</style>"""
Speeds = tuple[float, float, float]


def bars_of(run: Mapping[str, Any]) -> dict[str, Speeds]:
    """Return tokens/s of the three bars for each kind of text that a run has measured with all rows and with few."""
    rows = {row["row"]: row["tokens_per_s"] for row in run["rows"] if "tokens_per_s" in row}
    pairs = {kind: (f"text/full/{kind}", f"text/{SLIM}/{kind}") for kind in KINDS}
    return {
        kind: ((rows[full]["plain"] + rows[slim]["plain"]) / 2, rows[full]["chosen"], rows[slim]["chosen"])
        for kind, (full, slim) in pairs.items()
        if full in rows and slim in rows
    }


def draw(bars: Mapping[str, Speeds], device: str) -> str:
    """Return the picture as SVG, legible down to a width of 360 pixels."""
    scale = (WIDTH - LEFT - RIGHT) / max(map(max, bars.values()))
    height = TOP + len(bars) * (3 * BAR + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    ]
    lines += [STYLE, f'<rect class="ground" width="{WIDTH}" height="{height}" rx="6"/>']
    lines.append(f'<text x="{LEFT}" y="27">Tokens a second, SmolLM2-135M, {escape(device)}</text>')
    for place, name in enumerate(NAMES):
        y = 42 + 27 * place
        lines.append(f'<rect class="b{place}" x="{LEFT}" y="{y}" width="17" height="17" rx="2"/>')
        lines.append(f'<text x="{LEFT + 26}" y="{y + 15}">{name}</text>')
    for row, (kind, speeds) in enumerate(bars.items()):
        top = TOP + row * (3 * BAR + GAP)
        lines.append(f'<text x="{LEFT - 12}" y="{top + 40}" text-anchor="end">{KINDS[kind]}</text>')
        for place, speed in enumerate(speeds):
            y, width = top + place * BAR, speed * scale
            lines.append(f'<rect class="b{place}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" rx="2"/>')
            lines.append(f'<text x="{LEFT + width + 8:.1f}" y="{y + 17}">{speed:,.0f}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main(argv: list[str] | None = None) -> None:
    """Draw the picture; `--help` lists the options."""
    command = Command("picture", __doc__)
    command.add_argument("result", type=Path, help="JSON of benchmarks.shapes, of one run or with several in `runs`")
    args = command.parse_args(argv)
    try:
        result = json.loads(args.result.read_text("utf-8"))
    except (OSError, ValueError) as error:
        command.error(f"{args.result}: {error}")
    runs = result.get("runs", [result])
    _, last = max((len(bars_of(run)), place) for place, run in enumerate(runs))
    if args.out is None or not bars_of(runs[last]):
        command.error(f"--out, and a run that has text/full/KIND and text/{SLIM}/KIND, are needed")
    args.out.write_text(draw(bars_of(runs[last]), runs[last]["machine"]["device"].split()[1]), "utf-8")


if __name__ == "__main__":
    main()
