"""`eagle-vocab count`, and the corpus options that other commands share with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .base_cli import EagleCommand, emit_json, force_option, json_option, network_options, note

if TYPE_CHECKING:
    from .corpus.source import CorpusSource
    from .counting.counts import TokenCounts

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

SOURCE_HELP = """\b
A source is a dataset of the Hub, or a local file, folder or glob (.jsonl, .json, .txt, each also .gz, .zst, .bz2 or
.xz, and .parquet):
  [NAME=]LOCATION[,KEY=VALUE...]
KEY is weight, config, split, revision, column, roles, max-tokens, max-documents, sample or shuffle; it overrides
the option of the same name, which applies to all sources. Amounts may have a unit (10M). Quote globs."""


# Settings of a source, by the options that give them for all sources.
SOURCE_OPTIONS = {
    name: name.removeprefix("dataset_")
    for name in ("config", "split", "dataset_revision", "column", "roles", "max_tokens", "max_documents", "sample",
                 "shuffle")
}  # fmt: skip
_OTHER_FORMATS = (".json", ".jsonl", ".txt", ".csv", ".npy", ".npz", ".pt", ".pth", ".bin", ".parquet")


class Amount(click.ParamType):  # type: ignore[type-arg] # not generic in click 8.2
    """A whole number, or one with a unit: 500k, 10M, 1.5B."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse it."""
        if isinstance(value, int):
            return value
        from .corpus.source import amount

        try:
            return amount(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


_CORPUS_OPTIONS = (
    click.option("--dataset", "-d", "datasets", multiple=True, metavar="SOURCE", help="A source; repeatable."),
    click.option("--config", metavar="C", help="Configuration (subset) of Hub datasets."),
    click.option("--split", metavar="S", help="Split of Hub datasets; default: the only one, or train."),
    click.option("--dataset-revision", metavar="REV", help="Branch, tag or commit of Hub datasets."),
    click.option("--column", metavar="COL", help="Column with the text or the chat; default: detected."),
    click.option(
        "--roles",
        type=click.Choice(["assistant", "all"]),
        default="assistant",
        show_default=True,
        help="In chats, count the assistant's turns with their end-of-turn token, or the whole rendered text.",
    ),
    click.option("--chat-template", metavar="FILE", help="Jinja file to use instead of the tokenizer's own template."),
    click.option("--max-tokens", type=Amount(), metavar="N", help="Stop each source at this many tokens (10M)."),
    click.option("--max-documents", type=Amount(), metavar="N", help="Stop each source at this many documents."),
    click.option("--sample", type=float, metavar="F", help="Sample this share of the documents, by the seed."),
    click.option("--shuffle", is_flag=True, help="Read files and shards in a random order, by the seed."),
    click.option(
        "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of sampling and held-out set."
    ),
    click.option(
        "--held-out",
        type=float,
        default=0.05,
        show_default=True,
        metavar="F",
        help="Share of the documents held out of the counts, to measure coverage on; at most 1M tokens per source.",
    ),
    click.option(
        "--on-error",
        type=click.Choice(["stop", "skip"]),
        default="stop",
        show_default=True,
        help="On an unreadable record: stop, or skip it and count it as skipped.",
    ),
    click.option(
        "--tokenizer-library",
        type=click.Choice(["auto", "tokenizers", "fastokens"]),
        default="auto",
        show_default=True,
        help="Tokenizer library; auto uses fastokens if it is installed and correct on a probe of the corpus.",
    ),
    click.option("--workers", type=click.IntRange(0), metavar="N", help="Processes; default: one per core."),
    click.option(
        "--run-on",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="Where to count: on this machine, or on the Ray cluster of RAY_ADDRESS (extra `ray`).",
    ),
)


def tokenizer_options(function: _Decorated) -> _Decorated:
    """Add the options that name the target's tokenizer."""
    for option in (
        click.option("--offline", is_flag=True, help="Load the tokenizer from the local Hub cache only."),
        click.option("--tokenizer-revision", metavar="REV", help="Branch, tag or commit of the tokenizer."),
        click.option(
            "--tokenizer", required=True, metavar="T", help="The target's tokenizer: Hub id, folder, tokenizer.json."
        ),
    ):
        function = option(function)
    return network_options(function)


def corpus_options(function: _Decorated) -> _Decorated:
    """Add the options that describe a corpus and how it is counted; `corpus_arguments` reads them."""
    for option in reversed(_CORPUS_OPTIONS):
        function = option(function)
    return function


def counts_to_write(out: str, force: bool) -> Path:
    """The path of a file of counts to write; UsageError where it exists, or its name promises another format."""
    from .errors import UsageError
    from .files import refuse_existing

    path = refuse_existing(out, force)
    if path.suffix.lower() in _OTHER_FORMATS:
        raise UsageError(f"{path}: counts are a safetensors file. End the name in .safetensors.", found=path.suffix)
    return path


def corpus_arguments(options: Mapping[str, Any]) -> tuple[list[CorpusSource], dict[str, Any]]:
    """Turn the parsed options, others among them, into sources and keyword arguments of `count_tokens`.

    Raises:
        UsageError: a source cannot be parsed, the template file cannot be read, or Ray is not installed.
    """
    from .corpus.source import parse_source, with_unique_names
    from .counting.held_out import HeldOutRule
    from .errors import UsageError
    from .files import regular_file

    if options["run_on"] == "ray":
        from .counting.ray_workers import require_ray

        require_ray()
    defaults = {setting: options[option] for option, setting in SOURCE_OPTIONS.items()}
    sources = with_unique_names([parse_source(spec, defaults) for spec in options["datasets"]])
    for setting, option in (("config", "config"), ("split", "split"), ("revision", "dataset-revision")):
        if sources and defaults[setting] is not None and all(getattr(source, setting) is None for source in sources):
            raise UsageError(f"--{option} is for Hub datasets, and all sources are local files.", option=f"--{option}")
    template = None
    if options["chat_template"] is not None:
        try:
            template = regular_file(options["chat_template"], UsageError, "chat template").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{options['chat_template']}: the chat template cannot be read: {error}.") from error
    same = ("seed", "on_error", "tokenizer_library", "workers", "run_on")
    counting = {name: options[name] for name in same}
    return sources, {**counting, "chat_template": template, "held_out": HeldOutRule(options["held_out"])}


@click.command(
    cls=EagleCommand,
    epilog="""\b
Example:
  eagle-vocab count chat=HuggingFaceH4/ultrachat_200k,split=train_sft,weight=3 'code=src/**/*.jsonl,column=content' \\
    --tokenizer Qwen/Qwen3-8B --max-tokens 10M --out mix.counts.safetensors""",
)
@click.argument("sources", nargs=-1, metavar="[SOURCE]...")
@tokenizer_options
@corpus_options
@click.option("--out", "-o", required=True, metavar="FILE", help="Counts file to write (.safetensors).")
@click.option("--restart", is_flag=True, help="Start over, even if a saved state is there.")
@click.option("--progress/--no-progress", default=None, help="Progress bar on stderr; default: on a terminal.")
@force_option
@json_option
def count(
    sources: tuple[str, ...],
    tokenizer: str,
    tokenizer_revision: str | None,
    offline: bool,
    out: str,
    restart: bool,
    progress: bool | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Count how often each token occurs in a corpus.

    The state of the count is saved beside the output: after Ctrl-C or a crash the same command continues from there,
    with the same result, byte for byte.
    """
    from .counting.count import count_tokens
    from .counting.resume import resume_file_beside
    from .tokenizer.load import load_tokenizer

    path = counts_to_write(out, force)
    corpus, arguments = corpus_arguments({**options, "datasets": (*sources, *options["datasets"])})
    counts = count_tokens(
        corpus,
        load_tokenizer(tokenizer, tokenizer_revision, offline),
        resume_file=resume_file_beside(path),
        restart=restart,
        progress=progress,
        notify=note,
        save_to=path,
        **arguments,
    )
    _report(counts, path, as_json)


count.help = f"{inspect.cleandoc(count.help or '')}\n\n{SOURCE_HELP}"


def _report(counts: TokenCounts, path: Path, as_json: bool) -> None:
    copied = ("documents", "skipped_records", "tokenizer_library", "held_out")
    rows = [
        {
            "name": source.name,
            "weight": source.weight,
            "tokens": source.num_tokens,
            "distinct_ids": int((source.counts > 0).sum()),
            **{key: source.provenance[key] for key in copied},
        }
        for source in counts.sources
    ]
    if as_json:
        whole = {name: getattr(counts, name) for name in ("vocab_size", "tokenizer_hash")}
        emit_json({"out": str(path), "tokens": counts.num_tokens, **whole, "sources": rows})
        return
    for row in rows:
        held_out = row["held_out"]
        skipped = f"; records skipped: {row['skipped_records']:,}" if row["skipped_records"] else ""
        click.echo(
            f"{row['name']}: {row['tokens']:,} tokens of {row['documents']:,} documents, {row['distinct_ids']:,} "
            f"distinct ids; held out {held_out['tokens']:,} tokens of {held_out['documents']:,} documents{skipped}"
        )
    click.echo(f"wrote {path}")
