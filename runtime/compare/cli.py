"""`eagle-compare`: the same prompts to draft vocabularies, heads and trees, as table, files and advice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import click
from eagle_slim.convert.atomic import check_output
from eagle_slim.vocab_tools import common_cli as common
from eagle_slim.vocab_tools.errors import INTERRUPTED
from tqdm import tqdm

from ..options_cli import (
    load_heads,
    model_options,
    no_follow_option,
    partial_verification_option,
    show_warnings_as_lines,
)
from ..settings import SamplingConfig, TreeConfig
from .comparison_options import MARKER, CompareOptions
from .prompts import load_prompts


def _list_of(read: Callable[[str], Any], example: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Make the callback for values that commas separate; each is taken once."""
    return common.read_by(lambda text: tuple(dict.fromkeys(read(item.strip()) for item in text.split(","))), example)


def _tree(text: str) -> TreeConfig | None:
    if text == "auto":
        return None
    depth, top_k, nodes = map(int, text.split(","))
    return TreeConfig(depth, top_k, nodes)


@click.command(
    cls=common.EagleCommand,
    epilog="""\b
Examples:
  eagle-compare --prompts prompts.jsonl --sizes full,16384,4096 --out out/compare
  eagle-compare slim --head other --tree 5,10,60 --tree 3,1,4 --batch 1,4,16 --prompts prompts.txt --json
  OMP_NUM_THREADS=1 eagle-compare --device cpu --dtype bfloat16 --prompts prompts.txt --sizes 4096 --tree 4,4,16""",
)
@model_options
@partial_verification_option
@click.option(
    "--head", "heads", multiple=True, metavar="HEAD", help="Another head of the same target to compare; repeatable."
)
@click.option(
    "--tree",
    "trees",
    multiple=True,
    metavar="D,K,N",
    callback=common.read_by(lambda texts: tuple(dict.fromkeys(map(_tree, texts))) or None, "DEPTH,TOP_K,NODES or auto"),
    help="Levels, children per node, nodes; or auto, by step; repeatable. Default: 5,10,60, on a CPU auto.",
)
@click.option(
    "--draft-window",
    "windows",
    metavar="W,W,...",
    callback=_list_of(lambda text: None if text == "auto" else int(text), "auto,0,2048"),
    help="Tokens that drafts look back on: 0 all, auto what the head was trained on. Default: auto.",
)
@click.option(
    "--prompts",
    "prompt_file",
    required=True,
    metavar="FILE",
    help="JSON lines with `turns`, `prompt` or `question`; or one prompt per line.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Use only the first N prompts.")
@click.option(
    "--sizes",
    metavar="N,N,...",
    callback=_list_of(lambda text: text if text == "full" else int(text), "full,16384,4096"),
    help="Draft-vocabulary sizes; `full` is the head's own. Default: full and powers of two.",
)
@no_follow_option
@click.option(
    "--modes",
    default="greedy,sampled",
    show_default=True,
    callback=_list_of(str, "greedy,sampled"),
    metavar="M,M",
    help="greedy, sampled, or both.",
)
@click.option("--temperature", type=float, default=1.0, show_default=True, help="Temperature of the sampled mode.")
@click.option("--seed", default=0, show_default=True, help="Seed of the sampled mode.")
@click.option(
    "--batch",
    "batches",
    default="1",
    show_default=True,
    callback=_list_of(int, "1,4,16"),
    metavar="B,B,...",
    help="Prompts answered at a time; the speed is for all of them together.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Most tokens of an answer."
)
@click.option("--out", "-o", metavar="DIR", help="Write compare.json and compare.html here.")
@common.force_option
@common.json_option
@common.version_option
def compare(prompt_file: str, limit: int | None, out: str | None, force: bool, as_json: bool, **options: Any) -> int:
    """Measure accepted length and speed over several draft vocabularies, and recommend one.

    HEAD is a folder or a Hugging Face Hub repository: converted, so that its manifest ranks its rows, or unconverted
    and compared whole; by default, the built-in head of SmolLM2-135M-Instruct with its own counts. Every answer is
    compared with plain decoding. The last lines recommend a size for this device, if the prompts are enough to tell
    the sizes apart. Ctrl-C ends the comparison and writes what there is.
    """
    show_warnings_as_lines()
    sampling = SamplingConfig(options.pop("temperature"), seed=options.pop("seed"))
    given = {field.name: options.pop(field.name) for field in fields(CompareOptions) if field.name in options}
    asked = CompareOptions(**given, sampling=sampling)
    # Check what needs no model before one is loaded.
    prompts = load_prompts(prompt_file, limit)
    if out is not None:
        check_output(out, force, MARKER)
    # Loads torch.
    from .run import compare as run_comparison

    models = load_heads(options)
    every_s = 0.1 if sys.stderr.isatty() else 30.0
    with tqdm(desc="answers", unit="answer", file=sys.stderr, mininterval=every_s) as bar:

        def move(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        result = run_comparison(models, prompts, asked, progress=move)
    common.warn(map(str, result.omissions))
    try:
        if out is not None:
            result.write(out, force)
            common.note(f"wrote {out}/compare.json and {out}/compare.html")
    finally:
        # What took hours is shown even where it cannot be written.
        if as_json:
            common.emit_json(result.to_json())
        else:
            click.echo(result.to_text())
    if not result.is_complete:
        common.note("interrupted: these are the answers so far")
        return INTERRUPTED
    return int(any(each.is_fault for each in result.omissions))


main = partial(common.run_cli, compare, prog_name="eagle-compare")


if __name__ == "__main__":
    main()
