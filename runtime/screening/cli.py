"""`eagle-screen`: parses, calls `make_screen`, prints what it wrote."""

from __future__ import annotations

from typing import Any, NoReturn

import click
from eagle_slim.vocab_tools.base_cli import (
    EagleCommand,
    emit_json,
    force_option,
    json_option,
    network_options,
    note,
    run_cli,
    version_option,
)
from eagle_slim.vocab_tools.errors import INTERRUPTED

from ..options_cli import progress_line, show_warnings_as_lines


def _rank(ctx: click.Context, param: click.Parameter, value: str) -> int | str:
    if value == "auto":
        return value
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise click.BadParameter(f"expected a number of at least 1, or `auto`, found {value!r}", ctx, param)
    return int(value)


@click.command(
    cls=EagleCommand,
    epilog="""\b
Examples:
  eagle-screen smollm2-135m-instruct-eagle3-full
  eagle-screen slim --rank 128 --states 200000 --dataset chat=chats.jsonl --dataset 'code=src/*.jsonl,weight=2'""",
)
@click.argument("folder", metavar="ARTIFACT")
@click.option("--rank", default="auto", show_default=True, callback=_rank, metavar="R",
              help="Its rank; auto: the smallest that keeps 99.5% of the exact top 10's probability.")  # fmt: skip
@click.option("--states", type=click.IntRange(min=1), metavar="N",
              help="Number of states to fit it to. Default: 16 per dimension of the head.")  # fmt: skip
@click.option("--dataset", "-d", "datasets", multiple=True, metavar="SOURCE",
              help="A text source, as for eagle-convert; repeatable. Default: as for a vocabulary.")  # fmt: skip
@click.option("--target", metavar="T", help="Target model: Hub id or folder. Default: the one the artifact names.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of the target.")
@click.option("--depth", type=click.IntRange(min=0), default=5, show_default=True, help="Levels of the draft trees.")
@click.option("--draft-top-k", type=click.IntRange(min=1), default=10, show_default=True, help="Children per node.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto",
              show_default=True, help="Type of target and head.")  # fmt: skip
@click.option("--device", metavar="D", help="Device, such as cuda:1 or cpu. Default: the first GPU, else the CPU.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@network_options
@click.option("--restart", is_flag=True, help="Start over, even if a saved state is there.")
@click.option("--progress/--no-progress", default=None,
              help="Progress on stderr. Default: a bar on a terminal, else an occasional line.")  # fmt: skip
@force_option
@json_option
@version_option()
def screen(folder: str, **options: Any) -> int:
    """Make the screen of a converted head: a cheap score of every LM-head row that picks the few to score exactly.

    Runs the target and the head over text once, fits the screen to the states that the head hands to its LM head, and
    measures on other texts what each rank keeps. The file is written beside the weights; no engine reads it. After
    Ctrl-C the same command continues.
    """
    show_warnings_as_lines()
    from eagle_slim.vocab_tools.corpus.source import parse_source, with_unique_names
    from transformers.utils import logging

    from .make import ScreenOptions, make_screen

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sources = with_unique_names([parse_source(spec) for spec in options.pop("datasets")])
    asked = ScreenOptions(
        options.pop("rank"), options.pop("states"), tuple(sources), depth=options.pop("depth"),
        top_k=options.pop("draft_top_k"),
    )  # fmt: skip
    as_json, show = options.pop("as_json"), options.pop("progress")
    with progress_line(show, "state") as progress:
        try:
            made = make_screen(folder, asked, **options, progress=progress, say=note)
        except KeyboardInterrupt:
            note("interrupted: the same command goes on from here")
            return INTERRUPTED
    if as_json:
        emit_json(made.to_json())
    else:
        click.echo(made.to_text())
    return 0


def main(args: list[str] | None = None) -> NoReturn:
    """Run `eagle-screen`."""
    run_cli(screen, args, "eagle-screen")


if __name__ == "__main__":
    main()
