"""`eagle-vocab count`, and what other commands share with it: sources, and the options of a tokenizer."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import click

from .common_cli import Decorated, EagleCommand, choice_option, emit_json, force_option, json_option, note
from .errors import UsageError, printable
from .messages import json_value

if TYPE_CHECKING:
    from .tokenizer import LoadedTokenizer

_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_KWARGS_HELP = "Variable of the chat template, as in `enable_thinking=true`; repeatable, or one JSON object."
_HELD_OUT_HELP = "Share of the documents held out of the counts, by a hash of their text, to measure coverage on."
_ON_ERROR_HELP = (
    "On a bad record: stop, or skip it and count it as skipped; a broken line of a .csv or .tsv always stops."
)
SOURCE_HELP = """\b
A source is a dataset of the Hub, or a local file, folder or glob (.jsonl, .json, .txt, .csv, .tsv, each also .gz, .zst
or .bz2, and .parquet):
  [NAME=]LOCATION[,KEY=VALUE...]
KEY is one of these. Amounts may have a unit (10M). Quote globs.
  weight         its share beside the other sources
  column         the column with the text or the chat; default: detected
  roles          of chats: assistant, the assistant's turns with their end-of-turn token (default), or all
  max-tokens, max-documents   stop with the document that reaches this many
  sample         share of the documents to take, drawn by the seed
  config, split, revision     of a dataset of the Hub; default split: the only one, or train"""


def tokenizer_options(function: Decorated, required: bool = True) -> Decorated:
    """Add the options that name the target's tokenizer."""
    offline = click.option("--offline", is_flag=True, help="Load the tokenizer from the local Hub cache only.")
    revision = click.option("--tokenizer-revision", metavar="REV", help="Branch, tag or commit of the tokenizer.")
    whose = "The target's tokenizer: Hub id, folder, tokenizer.json."
    tokenizer = click.option("--tokenizer", required=required, metavar="T", help=whose)
    return tokenizer(revision(offline(function)))


def named_tokenizer(tokenizer: str, tokenizer_revision: str | None, offline: bool) -> LoadedTokenizer:
    """Load the tokenizer that these options name; raises UsageError for the revision of a local one."""
    from .files import expand_home
    from .tokenizer import load_tokenizer

    if tokenizer_revision is not None and expand_home(tokenizer).exists():
        raise UsageError(f"{tokenizer}: a local tokenizer has no revisions. Leave out --tokenizer-revision.")
    return load_tokenizer(tokenizer, tokenizer_revision, offline)


@click.command(
    cls=EagleCommand,
    epilog="""\b
Example:
  eagle-vocab count chat=HuggingFaceH4/ultrachat_200k,split=train_sft,max-tokens=10M,weight=3 \\
    'code=src/**/*.jsonl,column=content' --tokenizer Qwen/Qwen3-8B --out mix.counts.safetensors""",
)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@tokenizer_options
@click.option("--chat-template", metavar="FILE", help="Jinja file to use instead of the tokenizer's own template.")
@click.option("--chat-template-kwargs", multiple=True, metavar="KEY=VALUE", help=_KWARGS_HELP)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of sampling and holding out.")
@click.option("--held-out", type=float, default=0.01, show_default=True, metavar="F", help=_HELD_OUT_HELP)
@choice_option("--on-error", ["stop", "skip"], _ON_ERROR_HELP)
@choice_option(
    "--tokenizer-library",
    ["auto", "tokenizers", "fastokens"],
    "Tokenizer library; auto uses fastokens if it is installed and correct on a probe of the corpus.",
)
@click.option("--workers", type=click.IntRange(0), metavar="N", help="Further processes; default: one per core.")
@choice_option(
    "--run-on", ["local", "ray"], "Count on this machine, or on the Ray cluster of RAY_ADDRESS (needs `ray`)."
)
@click.option("--out", "-o", required=True, metavar="FILE", help="Counts file to write (.safetensors).")
@click.option("--progress/--no-progress", default=None, help="Progress bar on stderr; default: on a terminal.")
@force_option
@json_option
def count(sources: tuple[str, ...], out: str, force: bool, as_json: bool, **options: Any) -> None:
    """Count how often each token occurs in a corpus."""
    from .counting import count_tokens
    from .files import read_text, refuse_existing
    from .sources import parse_source

    path, corpus = refuse_existing(out, force), [parse_source(source) for source in sources]
    named = {name: options.pop(name) for name in ("tokenizer", "tokenizer_revision", "offline")}
    loaded = named_tokenizer(**named)
    given, kwargs = options.pop("chat_template"), options.pop("chat_template_kwargs")
    if given is not None or kwargs:
        template = None if given is None else read_text(given, UsageError)
        loaded = loaded.with_chat_template(template, _template_kwargs(kwargs))
    counts = count_tokens(corpus, loaded, notify=note, **options)
    counts.save(path)
    if as_json:
        emit_json({"out": str(path), "tokens": counts.num_tokens, "sources": counts.account()})
        return
    for source in counts.sources:
        account, held_out = source.provenance, source.provenance["held_out"]
        counted = f"{source.num_tokens:,} tokens of {account['documents']:,} documents"
        kept = f"held out {held_out['tokens']:,} tokens of {held_out['documents']:,} documents"
        left = {"documents without a token": account["empty_documents"], "records skipped": account["skipped_records"]}
        others = "".join(f"; {what}: {number:,}" for what, number in left.items() if number)
        click.echo(f"{printable(source.name)}: {counted}; {kept}{others}")
    click.echo(f"wrote {path}")


def _template_kwargs(values: tuple[str, ...]) -> dict[str, Any]:
    """Read variables of a template: JSON values, words such as True, or text; raises UsageError."""
    kwargs: dict[str, Any] = {}
    for value in values:
        key, equals, text = value.partition("=")
        parsed = {key: json_value(_WORDS.get(text.lower(), text), text)} if equals else None
        if value.lstrip().startswith("{"):
            parsed = json_value(value)
        if not parsed or not all(parsed) or parsed.keys() & kwargs.keys():
            expected = 'expected KEY=VALUE, each key once, or a JSON object as in {"enable_thinking": true}'
            raise UsageError(f"--chat-template-kwargs {value!r}: {expected}.")
        kwargs |= parsed
    return kwargs


count.help = f"{inspect.cleandoc(count.help or '')}\n\n{SOURCE_HELP}"
