"""`eagle-compare`: the same prompts over several draft vocabularies, heads and trees, as table, files and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, NoReturn

import click
from click.core import ParameterSource
from eagle_slim.vocab_tools.base_cli import (
    EagleCommand,
    emit_json,
    force_option,
    json_option,
    note,
    run_cli,
    version_option,
)
from eagle_slim.vocab_tools.errors import INTERRUPTED, UsageError

from ..options_cli import (
    check_names,
    load_heads,
    miss_log_option,
    model_options,
    partial_options,
    partial_verification,
    progress_line,
    show_warnings_as_lines,
)
from ..settings import SamplingConfig, TreeConfig
from .options import CompareOptions

_FOLLOW = {"prompt": "prompt", "none": None}
_Callback = Callable[[click.Context, click.Parameter, Any], Any]


def _form(read: Callable[[Any], Any], example: str) -> _Callback:
    """A callback for an option's value: ``read`` parses it, and raises `ValueError` or `KeyError` for a wrong one."""

    def parse(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else read(value)
        except (ValueError, KeyError):
            raise click.BadParameter(f"{value!r} does not have the form {example}.", ctx, param) from None

    return parse


def _list_of(read: Callable[[str], Any], example: str) -> _Callback:
    """A callback for values that commas separate; each is taken once."""
    return _form(lambda text: tuple(dict.fromkeys(read(item.strip()) for item in text.split(","))), example)


def _size(text: str) -> int | str:
    return text if text == "full" else int(text)


def _trees(texts: Iterable[str]) -> tuple[TreeConfig, ...] | None:
    shapes = [tuple(map(int, text.split(","))) for text in texts]
    return tuple(dict.fromkeys(TreeConfig(depth, top_k, nodes) for depth, top_k, nodes in shapes)) or None


@click.command(
    cls=EagleCommand,
    epilog="""\b
Examples:
  eagle-compare --prompts examples/prompts.jsonl --sizes full,16384,8192,4096 --out out/compare
  eagle-compare --prompts examples/prompts.jsonl --sizes full,16384,8192,4096 --out out/compare --resume
  eagle-compare yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --token-map freq_32000.pt --prompts question.jsonl --out cmp
  eagle-compare --prompts prompts.jsonl --sizes 4096,2048 --follow prompt,none
  eagle-compare slim --head other --tree 5,10,60 --tree 3,1,4 --batch 1,4,16 --prompts prompts.txt --json
  OMP_NUM_THREADS=1 eagle-compare --device cpu --dtype bfloat16 --prompts prompts.txt --sizes 4096 --tree 4,4,16""",
)
@model_options
@click.option("--head", "heads", multiple=True, metavar="HEAD",
              help="Another head of the same target to compare; repeatable.")  # fmt: skip
@click.option("--tree", "trees", multiple=True, metavar="D,K,N", callback=_form(_trees, "DEPTH,TOP_K,NODES"),
              help="Depth, children per node and nodes of a tree; repeat to compare several.")  # fmt: skip
@click.option("--prompts", "prompt_file", required=True, metavar="FILE",
              help="JSON lines with `turns`, `messages`, `prompt` or `question`; or one prompt per line.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Use only the first N prompts.")
@click.option("--sizes", metavar="N,N,...", callback=_list_of(_size, "full,16384,4096"),
              help="Draft-vocabulary sizes; `full` is the head's own. Default: full and powers of two.")  # fmt: skip
@click.option("--follow", default="none", metavar="F,F", callback=_list_of(_FOLLOW.__getitem__, "prompt,none"),
              help="prompt: ids of the prompt join each size; none: each size as it is (default).")  # fmt: skip
@click.option("--follow-rows", type=click.IntRange(min=1), metavar="N", help="Maximum ids that join. Default: 512.")
@click.option("--counts", multiple=True, metavar="FILE", help="Rank by these counts from `eagle-vocab count`.")
@click.option("--token-map", metavar="FILE", help="Rank by this token map (freq_N.pt, JSON ...).")
@click.option("--modes", default="greedy,sampled", show_default=True, callback=_list_of(str, "greedy,sampled"),
              metavar="M,M", help="greedy, sampled, or both.")  # fmt: skip
@click.option("--temperature", type=float, default=1.0, show_default=True, help="Temperature of the sampled mode.")
@click.option("--top-p", type=float, default=1.0, metavar="P", help="Top-p of the sampled mode.")
@click.option("--top-k", type=int, default=0, metavar="K", help="Top-k of the sampled mode.")
@click.option("--seed", default=0, show_default=True, help="Seed of the sampled mode.")
@click.option("--batch", "batches", default="1", show_default=True, callback=_list_of(int, "1,4,16"), metavar="B,B,...",
              help="Prompts answered at a time; the speed is for all of them together.")  # fmt: skip
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Number of rounds.")
@click.option("--raw", is_flag=True, help="Continue the prompts as they are, without the chat template.")
@partial_options
@miss_log_option
@click.option("--out", "-o", metavar="DIR", help="Write compare.json and compare.html here.")
@click.option("--resume", is_flag=True, help="Continue the comparison of --out, or print its report again.")
@click.option("--progress/--no-progress", default=None,
              help="Progress on stderr. Default: a bar on a terminal, else an occasional line.")  # fmt: skip
@force_option
@json_option
@version_option()
def compare(**options: Any) -> int:
    """Measure accepted length and speed over several draft vocabularies, and recommend one.

    HEAD is a folder or a Hugging Face Hub repository: converted (its manifest holds the ranking), or unconverted (then
    give --counts or --token-map); by default, the built-in head of SmolLM2-135M-Instruct with its own counts. Every
    answer is compared with plain decoding. The last lines recommend a size for this device, if the prompts are enough
    to decide. Ctrl-C ends the comparison and writes what there is.
    """
    show_warnings_as_lines()
    out, force, resume, as_json = (options.pop(name) for name in ("out", "force", "resume", "as_json"))
    log_file, show = options.pop("miss_log"), options.pop("progress")
    if resume and out is None:
        raise UsageError("--resume continues the comparison of an --out. Give --out.", option="--resume")
    given = click.get_current_context().get_parameter_source
    beside = [name for name in ("depth", "draft_top_k", "total_tokens") if given(name) is not ParameterSource.DEFAULT]
    if options["trees"] and beside:
        named = ", ".join("--" + name.replace("_", "-") for name in beside)
        raise UsageError(f"--tree gives depth, top-k and nodes of every tree. Leave {named} out.", option="--tree")
    options["partial_verification"] = partial_verification(options)
    sampling = SamplingConfig(**{name: options.pop(name) for name in ("temperature", "top_k", "top_p", "seed")})
    asked = CompareOptions(
        **{field.name: options.pop(field.name) for field in fields(CompareOptions) if field.name in options},
        sampling=sampling,
        use_chat_template=not options.pop("raw"),
    )
    from .prompt_file import load_prompts

    # What would be refused in the end is refused before anything is loaded, and before everything is answered.
    prompts = load_prompts(options.pop("prompt_file"), options.pop("limit"))
    check_names(options, [size for size in asked.sizes or () if size != "full"])
    # These load torch.
    from ..miss_log import MissLog, check_log
    from .result import prepare_folder, saved_answers
    from .run import compare as run_comparison

    if log_file is not None:
        check_log(log_file)
    answers_file = saved_answers(out) if resume else None
    is_finished = answers_file is not None
    if out is not None and not is_finished:
        answers_file = prepare_folder(out, force, resume)
    models = load_heads(options)
    if log_file is not None:
        check_log(log_file, MissLog.of(models[0]))
    with progress_line(show, "answer") as progress:
        result = run_comparison(models, prompts, asked, answers_file=answers_file, progress=progress, say=note)
    if is_finished:
        note(f"finished already: {out}/compare.json and {out}/compare.html stay as they are")
    elif out is not None:
        result.write(out, force or resume)
        note(f"wrote {out}/compare.json and {out}/compare.html")
    if as_json:
        emit_json(result.to_json())
    else:
        click.echo(result.to_text())
    # The answers of a comparison that is to be resumed, or that is finished, would be counted twice.
    if log_file is not None and (result.is_complete or out is None) and not is_finished:
        note(f"counted {result.miss_log.save(log_file):,} generated tokens into {log_file}")
    if result.is_complete:
        return 0
    note("interrupted: these are the answers so far" + ("; --resume continues the comparison" if out else ""))
    return INTERRUPTED


def main(args: list[str] | None = None) -> NoReturn:
    """Run `eagle-compare`."""
    run_cli(compare, args, "eagle-compare")


if __name__ == "__main__":
    main()
