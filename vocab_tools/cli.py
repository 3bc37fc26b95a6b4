"""eagle-vocab: count, merge, rank, coverage, show, import, export. Parses, calls one library function, prints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from . import common_cli as common
from .count_cli import count, named_tokenizer, tokenizer_options
from .errors import printable
from .files import refuse_existing
from .token_maps import LOADERS
from .vocabulary import MAX_ROWS

if TYPE_CHECKING:
    from .counts import TokenCounts
    from .token_maps import D2TForm, Loader
    from .vocabulary import DraftVocab

_FOR_HELP = "Who will read the file; head: d2t and t2d, for heads and trainers."
_counts_argument = click.argument("counts", nargs=-1, required=True, metavar="COUNTS...")
_vocabulary_argument = click.argument("vocabulary", metavar="VOCAB")
_out_option = click.option("--out", "-o", required=True, metavar="FILE", help="File to write.")
_target_vocab_option = click.option(
    "--target-vocab", type=click.IntRange(1, MAX_ROWS), metavar="V", help="Rows of the target's LM head (vocab_size)."
)


@click.group(
    cls=common.EagleGroup,
    epilog=common.example(
        "eagle-vocab count chats.jsonl.gz --tokenizer Qwen/Qwen3-8B --out chat.counts.safetensors",
        "eagle-vocab rank chat.counts.safetensors --tokenizer Qwen/Qwen3-8B --size 32000 --out vocab.json",
        "eagle-vocab export vocab.json freq_32000.pt --for sglang",
    ),
)
@common.version_option
def vocab() -> None:
    """Count tokens on real text, rank the vocabulary, measure what a smaller one covers."""


vocab.add_command(count)


def _command(example: str, name: str | None = None) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of the group, whose help ends in an example."""
    return vocab.command(name, epilog=common.example(f"eagle-vocab {example}"))


@_command("merge chat.counts.safetensors code.counts.safetensors -w chat=3 --out mix.counts.safetensors")
@_counts_argument
@common.weight_option
@_out_option
@common.force_option
@common.json_option
def merge(counts: tuple[str, ...], weights: dict[str, float] | None, out: str, force: bool, as_json: bool) -> None:
    """Merge counts files; parts of one source are added, and weights are recorded."""
    merged = _load_counts(counts, weights)
    path = refuse_existing(out, force)
    merged.save(path)
    if as_json:
        common.emit_json({"out": str(path), "tokens": merged.num_tokens, "sources": merged.account()})
        return
    for source in merged.sources:
        click.echo(f"{printable(source.name)}: {source.num_tokens:,} tokens, weight {source.weight:g}")
    click.echo(f"wrote {path}")


@_command("rank chat.counts.safetensors --tokenizer Qwen/Qwen3-8B --coverage 0.99 --out vocab.json")
@_counts_argument
@tokenizer_options
@click.option("--size", "-n", type=click.IntRange(1), metavar="N", help="Exact number of ids; default: all ranked ids.")
@click.option("--coverage", type=float, metavar="C", help="Find the size that covers this share of held-out tokens.")
@common.force_added_option
@click.option("--force-id", type=click.IntRange(0), multiple=True, metavar="ID", help="Another id to include.")
@_target_vocab_option
@click.option("--candidates", metavar="MAP", help="Token map of the ids a head was trained on; only these are chosen.")
@common.weight_option
@common.floor_option
@_out_option
@common.force_option
@common.json_option
def rank(counts: tuple[str, ...], out: str, force: bool, as_json: bool, **options: Any) -> None:
    """Rank the vocabulary: forced ids first, then by weighted count. Any smaller size is a prefix of the result."""
    from .forced import forced_ids
    from .ranking import rank_vocabulary

    path = refuse_existing(out, force)
    tokenizer = named_tokenizer(options["tokenizer"], options["tokenizer_revision"], options["offline"])
    target_vocab, candidates = options["target_vocab"], options["candidates"]
    loaded, size, coverage = _load_counts(counts), options["size"], options["coverage"]
    forced = forced_ids(tokenizer, options["force_added"], options["force_id"])
    trained = None if candidates is None else _import(candidates, target_vocab)
    weights, floors = options["weights"], options["floors"]
    ranked = rank_vocabulary(loaded, size, coverage, tokenizer, forced, target_vocab, trained, weights, floors)
    ranked.save(path)
    common.warn(ranked.warnings)
    provenance = dict[str, Any](ranked.provenance)
    account = {key: provenance[key] for key in ("size_from_coverage", "floors") if key in provenance}
    if as_json:
        common.emit_json({"out": str(path), **_summary(ranked), "warnings": list(ranked.warnings), **account})
        return
    if (sized := account.get("size_from_coverage")) is not None:
        smallest = f"{sized['smallest']} ids cover {sized['asked']:g} of the {sized['measured_on']} tokens"
        click.echo(f"{smallest}; {ranked.size} cover {sized['reached']:.6f}")
    for floor in account["floors"]["held"] if "floors" in account else ():
        covered = f"{floor['reached']:.2%} of the {floor['measured_on']} tokens covered"
        click.echo(f"{printable(floor['source'])}: {covered}, floor {floor['asked']:.2%}")
    uncounted = "" if ranked.num_uncounted is None else f", {ranked.num_uncounted} never counted"
    click.echo(f"{ranked.size} of {ranked.target_vocab} ids, {ranked.num_forced} forced{uncounted}; wrote {path}")


@_command("coverage vocab.json chat.counts.safetensors --sizes 8192,16384")
@_vocabulary_argument
@_counts_argument
@click.option("--sizes", callback=common.whole_numbers, metavar="N,N,...", help="Draft-vocabulary sizes to measure.")
@common.weight_option
@common.floor_option
@common.json_option
def coverage(vocabulary: str, counts: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Measure the share of held-out text that VOCAB covers, the least covered source first.

    VOCAB may be any tool's list. Beside it stand as many of the first ids in id order, and as many ranked here by the
    counted text of COUNTS.
    """
    from .coverage import measure_coverage
    from .ranking import rank_vocabulary

    read, loaded = _import(vocabulary, None), _load_counts(counts)
    # As a list would be ranked here: with the forced ids of the list, over the same rows.
    target_vocab = max(read.target_vocab, loaded.vocab_size)
    forced = read.target_ids[: read.num_forced if read.ranked else 0].tolist()
    beside = rank_vocabulary(loaded, forced=forced, target_vocab=target_vocab, weights=options["weights"])
    report = measure_coverage(read, loaded, beside=beside, **options)
    common.warn(report.warnings)
    if as_json:
        common.emit_json(report.to_json())
        return
    uncounted = f"{report.uncounted} of the {report.draft_vocab} ids, forced ones aside"
    click.echo(f"{report.table()}\n{uncounted}, never occur in the counted text")


@_command("show vocab.json --tokenizer Qwen/Qwen3-8B --counts chat.counts.safetensors")
@_vocabulary_argument
@tokenizer_options
@click.option("--counts", multiple=True, metavar="COUNTS", help="Counts to show, and to sort the left-out ids by.")
@click.option("--limit", type=click.IntRange(0), default=20, show_default=True, help="Rows per list.")
@common.json_option
def show(vocabulary: str, counts: tuple[str, ...], limit: int, as_json: bool, **options: Any) -> None:
    """Show what VOCAB holds and what it leaves out, decoded."""
    from .show import show_vocabulary

    loaded = named_tokenizer(**options)
    counted = _load_counts(counts) if counts else None
    listing = show_vocabulary(_import(vocabulary, None), loaded, counted, limit)
    if as_json:
        common.emit_json(vars(listing))
    else:
        click.echo(listing.text())


@_command("import freq_32768.pt --tokenizer Qwen/Qwen3-8B --out vocab.json", name="import")
@click.argument("file", metavar="MAP")
@partial(tokenizer_options, required=False)
@_target_vocab_option
@click.option("--d2t-form", type=click.Choice(["offset", "absolute"]), help="Form of a d2t, if it is ambiguous.")
@_out_option
@common.force_option
@common.json_option
def import_command(
    file: str, target_vocab: int | None, d2t_form: D2TForm | None, out: str, force: bool, as_json: bool, **options: Any
) -> None:
    """Import a list of ids or a token map from another tool, and tell what is missing or odd about it.

    With --tokenizer, ids that belong to no token, and chat markers and single bytes that are left out.
    """
    from .token_maps import import_token_map

    path = refuse_existing(out, force)
    tokenizer = None if options["tokenizer"] is None else named_tokenizer(**options)
    read = import_token_map(file, target_vocab, d2t_form, tokenizer)
    read.save(path)
    common.warn(read.warnings)
    if target_vocab is None and read.is_size_inferred:
        common.warn([f"the file does not tell the size of the target's vocabulary; {read.target_vocab} was taken"])
    if as_json:
        account = {"form": read.provenance.get("form"), "warnings": list(read.warnings)}
        common.emit_json({"out": str(path), **_summary(read), **account})
    else:
        click.echo(f"{read.size} of {read.target_vocab} ids ({read.provenance.get('form', 'own form')}); wrote {path}")


@_command("export vocab.json qwen.pt --for sglang --size 32768 --target Qwen/Qwen3.5-27B")
@_vocabulary_argument
@click.argument("out", metavar="OUT")
@click.option("--for", "loader", type=click.Choice(LOADERS), required=True, help=_FOR_HELP)
@click.option("--size", "-n", type=click.IntRange(1), metavar="N", help="Take the first N ids of the ranking.")
@click.option("--target", metavar="T", help="Hub id or folder of the target, to check its LM head and its end of text.")
@click.option("--offline", is_flag=True, help="Read the target from the local Hub cache only.")
@_target_vocab_option
@common.force_option
@common.json_option
def export(vocabulary: str, out: str, loader: Loader, force: bool, as_json: bool, **options: Any) -> None:
    """Write VOCAB as an engine's loader reads it, and print limits that the loader does not report."""
    from .target import read_target
    from .token_maps import export_token_map
    from .vocabulary import doubts_of_rank, lost_floors, uncounted_warning

    path = refuse_existing(out, force)
    facts = None if options["target"] is None else read_target(options["target"], options["offline"])
    exported = _import(vocabulary, options["target_vocab"] or (None if facts is None else facts.vocab_size))
    if (size := options["size"]) is not None:
        if exported.is_token_map:
            common.warn(doubts_of_rank(exported.target_ids, size))
        common.warn(lost_floors(exported, size))
        exported = exported.prefix(size)
        common.warn(uncounted_warning(exported))
    limits = export_token_map(exported, path, loader, facts)
    if exported.is_size_inferred and loader == "head":
        doubt = "but the target's LM head may have more (padding rows); give its vocab_size with --target-vocab"
        limits.append(f"t2d has {exported.target_vocab} entries, {doubt}")
    for line in limits:
        common.note(f"{loader}: {line}")
    if as_json:
        common.emit_json({"out": str(path), "for": loader, "told": limits, **_summary(exported)})
    else:
        click.echo(f"{exported.size} ids for {loader}; wrote {path}")


main = partial(common.run_cli, vocab, prog_name="eagle-vocab")


def _load_counts(files: tuple[str, ...], weights: dict[str, float] | None = None) -> TokenCounts:
    from .counts import TokenCounts, merge_counts

    return merge_counts([TokenCounts.load(file) for file in files], weights)


def _import(path: str, target_vocab: int | None) -> DraftVocab:
    from .token_maps import import_token_map

    read = import_token_map(path, target_vocab)
    if read.is_token_map:
        common.warn(read.warnings)
    return read


def _summary(vocabulary: DraftVocab) -> dict[str, Any]:
    facts = ("num_forced", "num_uncounted", "target_vocab", "ranked")
    return {"draft_vocab": vocabulary.size, **{name: getattr(vocabulary, name) for name in facts}}


if __name__ == "__main__":
    main()
