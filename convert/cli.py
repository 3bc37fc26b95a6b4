"""eagle-convert: parses, calls `convert_head`, prints what it wrote."""

from __future__ import annotations

import inspect
import shlex
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource
from eagle_slim.vocab_tools.base_cli import (
    EagleCommand,
    emit_json,
    force_option,
    json_option,
    network_options,
    note,
    parse_weights,
    run_cli,
    version_option,
    warn,
    whole_numbers,
)
from eagle_slim.vocab_tools.count_cli import SOURCE_HELP, parse_sources
from eagle_slim.vocab_tools.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from .conversion.convert import PreparedConversion
    from .conversion.result import Conversion
    from .manifest import Manifest
    from .push import Upload

# What --push takes beside it.
_WITH_PUSH = ("push", "push_to_hub", "private", "dry_run", "progress", "as_json")
_GGUF_TYPES = ("bf16", "f16", "q8_0", "f32")

_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def _sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int | str, ...] | None:
    """Read `32000`, `8192,16384,32000`, or `full`."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part == "full" or (part.isascii() and part.isdigit() and int(part) > 0) for part in parts):
        raise click.BadParameter(
            f"expected sizes such as 32000 or 8192,16384,32000, or `full`, found {value!r}", ctx, param
        )
    return tuple("full" if part == "full" else int(part) for part in parts)


def _gguf(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Read `bf16`, or several such as `bf16,q8_0`."""
    kinds = tuple(part.strip() for part in value.split(",")) if value else ()
    if not set(kinds) <= {"auto", *_GGUF_TYPES}:
        raise click.BadParameter(
            f"expected types such as bf16 or bf16,q8_0 of {', '.join(_GGUF_TYPES)}, found {value!r}; without a type "
            "it comes last",
            ctx,
            param,
        )
    return kinds


@click.command(
    cls=EagleCommand,
    epilog="""\b
Examples:
  eagle-convert --draft-vocab 32000
  eagle-convert yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --draft-vocab 8192,16384 \\
    --dataset chat=HuggingFaceH4/ultrachat_200k,split=train_sft,max-tokens=10M,weight=3 --dataset 'code=src/*.jsonl'
  eagle-convert smollm2-135m-instruct-eagle3-v32000 --gguf q8_0 --out for-llama-cpp
  eagle-convert ./head --target ./target --counts mix.counts.safetensors --coverage 0.99""",
)
@click.argument("head", required=False, metavar="[HEAD]")
@click.option(
    "--draft-vocab",
    callback=_sizes,
    metavar="N",
    help="Rows to keep: one or several sizes, or `full` to only normalise.",
)
@click.option(
    "--coverage", type=float, metavar="C", help="Instead of a size: the share of the text to cover, such as 0.99."
)
@click.option("--target", metavar="T", help="Target model: Hub id or folder. Default: the one the head names.")
@click.option("--tokenizer", metavar="T", help="Tokenizer: Hub id, folder or tokenizer.json. Default: the target's.")
@click.option("--weights-file", metavar="NAME", help="Weights file of HEAD, if there are several.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of the head.")
@click.option("--subfolder", metavar="NAME", help="Folder within HEAD that holds the head, such as eagle3.")
@click.option("--target-revision", metavar="REV", help="Branch, tag or commit of the target.")
@click.option("--tokenizer-revision", metavar="REV", help="Branch, tag or commit of the tokenizer.")
@click.option("--counts", multiple=True, metavar="FILE", help="Token counts from `eagle-vocab count`; repeatable.")
@click.option("--weights", multiple=True, metavar="NAME=SHARE", help="Weights of the counts' sources: `chat=3,code=2`.")
@click.option("--token-map", metavar="FILE", help="Ids in rank order: freq_N.pt, a vLLM map, d2t, JSON or text.")
@click.option(
    "--order", type=click.Choice(["ids"]), help="Rank by id, which is BPE's merge order: a baseline without a corpus."
)
@click.option("--dataset", "-d", "datasets", multiple=True, metavar="SOURCE", help="Text to count; repeatable.")
@click.option("--force-added", type=click.Choice(["chat", "all"]), default="chat", show_default=True,
              help="Added tokens that are always kept: those that can occur in a chat, or all.")  # fmt: skip
@click.option("--force-id", "force_ids", multiple=True, type=click.IntRange(min=0), help="Always keep this id.")
@click.option("--for", "flavour", type=click.Choice(["sglang", "lmdeploy"]),
              help="Write the class name for this engine alone (sglang: EAGLE-1/2, lmdeploy: EAGLE-3).")  # fmt: skip
@click.option("--d2t-form", type=click.Choice(["auto", "offset", "absolute"]), default="auto", show_default=True,
              help="Form of the head's own map, if its files do not show it.")  # fmt: skip
@click.option(
    "--tap-layers",
    callback=whole_numbers,
    metavar="L,L,...",
    help="Target layers whose inputs the head reads, if its files are wrong.",
)
@click.option("--gguf", callback=_gguf, is_flag=False, flag_value="auto", metavar="[TYPE,...]",
              help="Also write GGUF files for llama.cpp: bf16, f16, q8_0 or f32; default: the head's own. An "
              "artifact as HEAD may keep its size.")  # fmt: skip
@click.option("--out", "-o", metavar="DIR", help="Folder to write; for several sizes, the folder to write them in.")
@force_option
@click.option("--offline", is_flag=True, help="Use only local files and the Hub cache.")
@network_options
@click.option("--dry-run", is_flag=True, help="Check everything, print what would be written, and stop.")
@click.option("--push-to-hub", metavar="REPO", help="Upload the result to this repository.")
@click.option("--push", metavar="DIR", help="Upload this artifact to --push-to-hub, and do nothing else.")
@click.option("--private/--public", default=None, help="Visibility of a new repository; default: your account's.")
@click.option("--progress/--no-progress", default=None, help="Progress bar on stderr; default: on a terminal.")
@json_option
@version_option()
def convert(head: str | None, **options: Any) -> None:
    """Cut the draft vocabulary of an EAGLE head, or of a DFlash draft, to the tokens that matter.

    HEAD is a folder or a Hugging Face Hub repository; by default, the built-in EAGLE-3 head of SmolLM2-135M-Instruct.
    The result is a folder that vLLM and SGLang serve as it is. It has the names and shapes that TensorRT-LLM and
    SafeAILab's EAGLE ask for, but was not run in these.

    The tokens come from --counts, --token-map, --dataset or --order. Default: the head's own ranks (a
    head that eagle-convert wrote), the built-in counts (the built-in head) or a public chat dataset.
    """
    if options["offline"] and options["push_to_hub"]:
        raise UsageError("--push-to-hub needs the Hub: leave --offline out.")
    if options["push"]:
        _push_existing(options)
        return
    if options["gguf"] and head is not None and options["draft_vocab"] is None and options["coverage"] is None:
        size = _own_size(head, options)
        options["draft_vocab"] = None if size is None else (size,)
    from eagle_slim.vocab_tools.counting import count_tokens, open_for_counting

    from .conversion.convert import prepare_conversion
    from .conversion.options import ConvertOptions
    from .conversion.vocab_choice import VocabRequest

    if options["push_to_hub"] and len(options["draft_vocab"] or ()) > 1:
        raise UsageError("--push-to-hub takes one size: give each size a repository of its own.")
    request = VocabRequest(
        counts=options["counts"],
        token_map=options["token_map"],
        corpus=tuple(parse_sources(options["datasets"])),
        order=options["order"],
        weights=parse_weights(options["weights"]) or None,
        force_added=options["force_added"],
        force_ids=options["force_ids"],
    )
    options["flavour"] = options["flavour"] or "default"
    named = {name: options[name] for name in inspect.signature(ConvertOptions).parameters if name in options}
    prepared = prepare_conversion(head, ConvertOptions(**named, vocabulary=request), say=note)
    if options["push_to_hub"]:
        from .hub.push import check_push

        check_push(options["push_to_hub"])
    if options["dry_run"]:
        prepared.check_values()
        if prepared.text is not None:
            open_for_counting(*prepared.text, notify=note)
        _print_plans(prepared, options)
        return
    done = prepared.convert(partial(count_tokens, notify=note, progress=options["progress"]))
    pushed = None
    if options["push_to_hub"]:
        from .push import plan_upload

        pushed = _push(plan_upload(done[0].folder), options)
    _warn(conversion.manifest for conversion in done)
    if options["as_json"]:
        results = [conversion.to_json() for conversion in done]
        if pushed is not None:
            results[0]["pushed_to"] = pushed
        emit_json(results if len(results) > 1 else results[0])
        return
    for conversion in done:
        _print(conversion)
    if pushed is not None:
        click.echo(f"uploaded to {pushed}")


convert.help = f"{inspect.cleandoc(convert.help or '')}\n\n{SOURCE_HELP}"


def _push(upload: Upload, options: dict[str, Any]) -> str:
    from .errors import SourceError

    folder, repo_id = upload.folder, options["push_to_hub"]
    warn(f"{name} is not uploaded: the manifest of {folder} does not name it" for name in upload.left)
    note(f"uploading {folder} to {repo_id}")
    try:
        return upload.to(repo_id, options["private"])
    except SourceError as error:
        command = f"eagle-convert --push {shlex.quote(str(folder))} --push-to-hub {repo_id}"
        advice = f"{folder} is complete. Upload it later with: {command}"
        raise SourceError(f"{error}\n{advice}", **error.facts) from error


def _refuse_beside(allowed: Collection[str], why: str) -> None:
    """Refuse what was given beside the options that a task takes; a UsageError of `why` and the option."""
    ctx = click.get_current_context()
    for param in ctx.command.params:
        name = str(param.name)
        if name in ctx.params and name not in allowed and ctx.get_parameter_source(name) != ParameterSource.DEFAULT:
            option = param.opts[0] if isinstance(param, click.Option) else "HEAD"
            raise UsageError(f"{why}: leave out {option}.", option=option)


def _push_existing(options: dict[str, Any]) -> None:
    _refuse_beside(_WITH_PUSH, "--push uploads an artifact that exists, and does nothing else")
    if not options["push_to_hub"]:
        raise UsageError("--push: name the repository with --push-to-hub.")
    from .hub.push import check_push
    from .push import plan_upload

    upload = plan_upload(options["push"])
    check_push(options["push_to_hub"])
    pushed = None if options["dry_run"] else _push(upload, options)
    if options["as_json"]:
        emit_json({"uploads": upload.names, "left": upload.left, "pushed_to": pushed})
    elif pushed is not None:
        click.echo(f"uploaded to {pushed}")
    else:
        click.echo(f"would upload {upload.folder} to {options['push_to_hub']}")
        for name in upload.names:
            click.echo(f"  {name:<22}{_bytes((upload.folder / name).stat().st_size)}")
        for name in upload.left:
            click.echo(f"  {name:<22}left: the manifest does not name it")


def _warn(manifests: Iterable[Manifest]) -> None:
    # Several sizes of one head have most of their warnings in common.
    warn(dict.fromkeys(warning for manifest in manifests for warning in manifest.warnings))


def _own_size(head: str, options: dict[str, Any]) -> int | str | None:
    """Rows of an artifact, of which --gguf alone makes a copy with GGUF files; None of another head."""
    from .head.open import open_head

    named = {name: options[name] for name in ("revision", "subfolder", "offline")}
    found = open_head(head, **named)
    if found.manifest is None:
        return None
    return "full" if found.draft_vocab == found.target_vocab else found.draft_vocab


def _print_plans(prepared: PreparedConversion, options: dict[str, Any]) -> None:
    _warn(plan.manifest for plan in prepared.plans)
    if prepared.text is not None:
        note(
            "text is still to be counted: what only its counts tell, such as ids that it never holds, is not told here"
        )
    if options["as_json"]:
        plans = [plan.to_json() for plan in prepared.plans]
        emit_json(plans if len(plans) > 1 else plans[0])
        return
    for plan in prepared.plans:
        rows = "as many as --coverage asks for" if plan.draft_vocab is None else f"{plan.draft_vocab:,}"
        click.echo(f"would write {plan.folder}")
        click.echo(f"  rows of the LM head   {prepared.inputs.head.draft_vocab:,} → {rows}")
        click.echo(f"  forced ids            {plan.manifest.num_forced:,}")
        click.echo(f"  bytes per draft step  {_bytes(plan.bytes_before)} → {_bytes_if_known(plan.bytes_after)}")
        _print_coverage(plan.manifest)
    needed = [plan.disk_bytes for plan in prepared.plans]
    in_all = None if None in needed else sum(size or 0 for size in needed)
    has_plot = any(plan.coverage is not None or plan.is_guess for plan in prepared.plans)
    plots = " beside the plot of the coverage" if has_plot else ""
    free = prepared.plans[0].to_json()["free_bytes"]
    click.echo(f"  {'disk, in all':<22}{_bytes_if_known(in_all)} needed{plots}, {_bytes(free)} free")
    for name, what in prepared.access.items():
        click.echo(f"  {name:<22}{what}")
    if options["push_to_hub"]:
        click.echo(f"  {'upload':<22}may write to {options['push_to_hub']}")


def _print(conversion: Conversion) -> None:
    click.echo(f"wrote {conversion.folder}")
    click.echo(f"  rows of the LM head   {conversion.rows_before:,} → {conversion.draft_vocab:,}")
    ratio = conversion.bytes_after / conversion.bytes_before
    click.echo(
        f"  bytes per draft step  {_bytes(conversion.bytes_before)} → {_bytes(conversion.bytes_after)} ({ratio:.0%})"
    )
    for name, entry in conversion.manifest.files.items():
        if name.endswith(".gguf"):
            click.echo(f"  for llama.cpp         {name}, {_bytes(entry['size_bytes'])}")
    if conversion.manifest.num_uncounted is not None:
        click.echo(f"  never counted         {conversion.manifest.num_uncounted:,} of the ids, forced ones apart")
    _print_coverage(conversion.manifest)


def _print_coverage(manifest: Manifest) -> None:
    from .conversion.result import coverage_summary

    for entry in coverage_summary(manifest):
        interval = ""
        if entry["interval"] is not None:
            low, high = entry["interval"]
            interval = f", 95% interval {low:.2%} to {high:.2%}"
        click.echo(
            f"  coverage of {entry['source']}  {entry['covered']:.2%} of {entry['tokens']:,} {entry['part']} "
            f"tokens{interval}; the first ids would cover {entry['first_ids_instead']:.2%}"
        )


def _bytes_if_known(size_bytes: int | None) -> str:
    return "not known before text is counted" if size_bytes is None else _bytes(size_bytes)


def _bytes(size_bytes: int) -> str:
    unit, divisor = next(((name, size) for name, size in _UNITS if size_bytes >= size), _UNITS[-1])
    return f"{size_bytes / divisor:,.1f} {unit}"


def main(args: list[str] | None = None) -> NoReturn:
    """Run eagle-convert and leave the process."""
    run_cli(convert, args, "eagle-convert")


if __name__ == "__main__":
    main()
