"""eagle-convert: parse the options, convert a head (for a dry run only plan and check), print the result."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from eagle_slim.vocab_tools import common_cli as common
from eagle_slim.vocab_tools.count_cli import SOURCE_HELP
from eagle_slim.vocab_tools.errors import printable

if TYPE_CHECKING:
    from .pipeline import Conversion

_SIZES_HELP = "Rows of the LM head to keep; several sizes, repeatable; `full` keeps all, normalised."
_FOR_HELP = "Write the class name for this engine alone (sglang: EAGLE-1/2, lmdeploy: EAGLE-3)."
_TAPS_HELP = "Target layers whose inputs the head reads, if its files are wrong."


@partial(common.read_by, example="32000, 8192,16384 or full")
def _sizes(given: tuple[str, ...]) -> tuple[int | str, ...] | None:
    """Read `32000`, `8192,16384,32000`, or `full`, once or several times."""
    parts = [part.strip() for value in given for part in value.split(",")]
    return tuple(part if part == "full" else int(part) for part in parts) or None


def _refuse_gguf(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        ways = "`convert_hf_to_gguf.py slim --target-model-dir TARGET`, of llama.cpp, makes one of the artifact"
        raise click.UsageError(f"--gguf was removed: {ways}.", ctx)


@click.command(
    cls=common.EagleCommand,
    epilog="""\b
Examples:
  eagle-convert --draft-vocab 32000
  eagle-convert ./full-head --target Qwen/Qwen3-8B --draft-vocab 16000,32000 \\
    --dataset chat=HuggingFaceH4/ultrachat_200k,split=train_sft,max-tokens=10M,weight=3 --dataset 'code=src/*.jsonl'
  eagle-convert ./head --target ./target --counts mix.counts.safetensors --coverage 0.99""",
)
@click.argument("head", required=False, metavar="[HEAD]")
@click.option("--draft-vocab", multiple=True, callback=_sizes, metavar="N,N,...", help=_SIZES_HELP)
@click.option("--coverage", type=float, metavar="C", help="Instead of a size: share of the text to cover, say 0.99.")
@click.option("--target", metavar="T", help="Target model: Hub id or folder. Default: the one the head names.")
@click.option("--tokenizer", metavar="T", help="Tokenizer: Hub id, folder or tokenizer.json. Default: the target's.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of the head.")
@click.option("--subfolder", metavar="NAME", help="Folder within HEAD that holds the head, such as eagle3.")
@click.option("--counts", multiple=True, metavar="FILE", help="Token counts from `eagle-vocab count`; repeatable.")
@common.weight_option
@common.floor_option
@click.option("--token-map", metavar="FILE", help="Ids in rank order: freq_N.pt, a vLLM map, d2t, JSON or text.")
@click.option("--order", type=click.Choice(["ids"]), help="Rank by id, which is BPE's merge order, without a corpus.")
@click.option("--dataset", "-d", "datasets", multiple=True, metavar="SOURCE", help="Text to count; repeatable.")
@common.force_added_option
@click.option("--force-id", "force_ids", multiple=True, type=click.IntRange(0, 2**31 - 1), help="Always keep this id.")
@click.option("--for", "flavour", type=click.Choice(["sglang", "lmdeploy"]), help=_FOR_HELP)
@common.choice_option(
    "--d2t-form", ["auto", "offset", "absolute"], "Form of the head's map d2t, if its files do not show it."
)
@click.option("--tap-layers", callback=common.whole_numbers, metavar="L,L,...", help=_TAPS_HELP)
@click.option(
    "--gguf", callback=_refuse_gguf, is_flag=False, flag_value="", hidden=True, expose_value=False, help="Gone."
)
@click.option("--out", "-o", metavar="DIR", help="Folder to write; for several sizes, the folder to write them in.")
@common.force_option
@click.option("--offline", is_flag=True, help="Use only local files and the Hub cache.")
@click.option("--dry-run", is_flag=True, help="Do everything but write: count, check, and print what would be written.")
@click.option("--progress/--no-progress", default=None, help="Progress bar on stderr; default: on a terminal.")
@common.json_option
@common.version_option
def convert(
    head: str | None, dry_run: bool, progress: bool | None, as_json: bool, flavour: str | None, **options: Any
) -> None:
    """Cut the draft vocabulary of an EAGLE head, or of a DFlash draft, to the tokens that matter.

    HEAD is a folder or a Hugging Face Hub repository; by default, the built-in EAGLE-3 head of SmolLM2-135M-Instruct.
    The result is a folder that vLLM, SGLang and SafeAILab's EAGLE take as it is. It has the names and shapes that
    TensorRT-LLM asks for, but was not run there.

    The tokens come from --counts, --token-map, --dataset or --order. Default: the ranks of a head that eagle-convert
    wrote, the built-in head's counts, or 10 million tokens of a public chat dataset (HuggingFaceH4/ultrachat_200k).
    """
    from eagle_slim.vocab_tools.counting import count_tokens
    from eagle_slim.vocab_tools.sources import parse_source

    from .options import ConvertOptions
    from .pipeline import convert_head, plan_conversion
    from .vocabulary_choice import VocabRequest

    alike = ("counts", "weights", "floors", "token_map", "order", "force_added", "force_ids")
    request = VocabRequest(
        corpus=tuple(map(parse_source, options.pop("datasets"))),
        **{name: options.pop(name) for name in alike},
    )
    given = ConvertOptions(vocabulary=request, flavour=flavour or "default", **options)  # type: ignore[arg-type]  # checked by click
    run = plan_conversion if dry_run else convert_head
    done = run(head, given, count=partial(count_tokens, notify=common.note, progress=progress), say=common.note)
    for plan in done if dry_run else ():
        plan.check()
    # Several sizes of one head have most of their warnings in common.
    common.warn(dict.fromkeys(warning for conversion in done for warning in conversion.manifest.warnings))
    if as_json:
        results = [conversion.to_json() for conversion in done]
        common.emit_json(results if len(results) > 1 else results[0])
        return
    for conversion in done:
        _print(conversion, "would write" if dry_run else "wrote")


convert.help = f"{inspect.cleandoc(convert.help or '')}\n\n{SOURCE_HELP}"


def _print(conversion: Conversion, verb: str) -> None:
    manifest, before, after = conversion.manifest, conversion.bytes_before, conversion.bytes_after
    click.echo(f"{verb} {conversion.folder}, {conversion.size_bytes / 1e6:,.1f} MB")
    click.echo(f"  rows of the LM head   {conversion.head.draft_vocab:,} → {manifest.draft_vocab:,}")
    click.echo(f"  forced ids            {manifest.num_forced:,}")
    click.echo(f"  bytes per draft step  {before / 1e6:,.1f} MB → {after / 1e6:,.1f} MB ({after / before:.0%})")
    if manifest.num_uncounted is not None:
        click.echo(f"  never counted         {manifest.num_uncounted:,} of the ids, forced ones apart")
    for entry in manifest.coverage_summary:
        bounds = entry["interval"]
        interval = "" if bounds is None else f", 95% interval {bounds[0]:.2%} to {bounds[1]:.2%}"
        covered = f"{entry['covered']:.2%} of {entry['tokens']:,} {entry['part']} tokens{interval}"
        instead = f"the first ids would cover {entry['first_ids_instead']:.2%}"
        click.echo(f"  coverage of {printable(entry['source'])}  {covered}; {instead}")


main = partial(common.run_cli, convert, prog_name="eagle-convert")


if __name__ == "__main__":
    main()
