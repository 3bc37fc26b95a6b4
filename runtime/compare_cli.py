"""`eagle-compare`: the same prompts over several draft vocabularies, as table, files and a recommendation."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from eagle_slim.vocab_tools.base_cli import (
    EagleCommand,
    emit_json,
    force_option,
    json_option,
    note,
    run_cli,
    version_option,
)
from eagle_slim.vocab_tools.errors import UsageError

from .model_options_cli import load_model, model_options, show_warnings_as_lines

if TYPE_CHECKING:
    from eagle_slim.convert.conversion.vocab_choice import Ranking

    from .comparison.compare import CompareReport, CoverageCurve, Size
    from .comparison.recommend import Recommendation
    from .model import SpeculativeModel

_DEFAULT_SIZES = (32768, 16384, 8192, 4096, 2048)


def _sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int | str, ...] | None:
    if value is None:
        return None
    sizes: list[int | str] = []
    for item in value.split(","):
        text = item.strip()
        if text == "full":
            sizes.append(text)
        elif text.isdecimal() and int(text) > 0:
            sizes.append(int(text))
        else:
            raise click.BadParameter(f"{text!r} is neither a number nor `full`", ctx, param)
    return tuple(sizes)


@click.command(
    cls=EagleCommand,
    epilog="""\b
Examples:
  eagle-compare --prompts examples/prompts.jsonl --sizes full,16384,8192,4096 --out out/compare
  eagle-compare yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --token-map freq_32000.pt --prompts question.jsonl --out cmp
  eagle-compare out/llama-slim --prompts prompts.txt --modes greedy --repeats 3 --json""",
)
@model_options
@click.option("--prompts", "prompt_file", required=True, metavar="FILE",
              help="JSON lines with `turns` (MT-bench, Spec-Bench), or text with a prompt per line.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Take the first N prompts only.")
@click.option("--sizes", callback=_sizes, metavar="N,N,...",
              help="Draft vocabularies; `full` is all the head has. Default: full, powers of two.")  # fmt: skip
@click.option("--counts", multiple=True, metavar="FILE", help="Rank by these counts of `eagle-vocab count`.")
@click.option("--token-map", metavar="FILE", help="Rank as this token map does (freq_N.pt, JSON ...).")
@click.option("--modes", default="greedy,sampled", show_default=True, metavar="M,M", help="greedy, sampled, or both.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="Of the sampled mode.")
@click.option("--top-p", type=float, metavar="P", help="Of the sampled mode.")
@click.option("--top-k", type=int, metavar="K", help="Of the sampled mode.")
@click.option("--seed", default=0, show_default=True, help="Of the sampled mode.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Times to measure it all.")
@click.option("--raw", is_flag=True, help="Continue the prompts as they are, without the chat template.")
@click.option("--out", "-o", metavar="DIR", help="Write compare.json, .csv, .png and .html here.")
@click.option("--progress/--no-progress", default=None, help="Progress bar on stderr; default: on a terminal.")
@force_option
@json_option
@version_option()
def compare(**options: Any) -> None:
    """Measure accepted length and speed of one head over several draft vocabularies.

    HEAD is a folder or a repository of the Hugging Face Hub: converted (its manifest holds the ranking), or not (then
    give --counts or --token-map); without it, the built-in head of SmolLM2-135M-Instruct with its own counts. Every
    answer is compared with plain decoding. The last lines recommend a size for this pair on this device.
    """
    show_warnings_as_lines()
    from eagle_slim.convert.atomic import check_output

    out, force, as_json = options.pop("out"), options.pop("force"), options.pop("as_json")
    modes = _modes(options)
    if out is not None:
        check_output(out, force, "compare.json")
    from .comparison.prompt_file import load_prompts

    prompts = load_prompts(options.pop("prompt_file"), options.pop("limit"))
    is_embedded = options["head"] is None
    wanted, counts, token_map = options.pop("sizes"), options.pop("counts"), options.pop("token_map")
    offline = options["offline"]
    model = load_model(options)
    ranking = _ranking(model, is_embedded, counts, token_map, offline, wanted)
    sizes = _cut(model, ranking, wanted)

    from tqdm import tqdm

    from .comparison.compare import compare as run_compare
    from .comparison.compare import num_answers
    from .comparison.recommend import recommend

    repeats, show = options.pop("repeats"), options.pop("progress")
    total = num_answers(sizes, prompts, modes, repeats)
    hide = not (sys.stderr.isatty() if show is None else show)
    with tqdm(total=total, desc="answers", unit="answer", disable=hide, file=sys.stderr) as bar:
        report = run_compare(
            model,
            sizes,
            prompts,
            modes,
            options.pop("max_new_tokens"),
            repeats,
            use_chat_template=not options.pop("raw"),
            rank_order=None if ranking is None else ranking.cut(None).target_ids,
            advance=bar.update,
        )
    report = _with_held_out(report, model, ranking)
    advice = recommend(report)
    if out is not None:
        write_files(report, advice, out, force)
        note(f"wrote {out}/compare.json, .csv, .png and .html")
    _print(report, advice, as_json)


def _modes(options: dict[str, Any]) -> list[Any]:
    from .comparison.compare import Mode

    sampling = {key: options.pop(key) for key in ("temperature", "top_p", "top_k", "seed")}
    known = {
        "greedy": Mode("greedy"),
        "sampled": Mode("sampled", {key: value for key, value in sampling.items() if value is not None}),
    }
    names = [name.strip() for name in options.pop("modes").split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"--modes: {name!r} is neither greedy nor sampled.", option="--modes", found=name)
    if "sampled" in names:
        from .generation.arguments import sampling_config

        # Refused before the model is loaded.
        if sampling_config(**sampling).is_greedy:
            raise UsageError(
                "--temperature 0 is greedy. Give --modes greedy, or a temperature above 0 to sample with.",
                option="--temperature", found=sampling["temperature"],
            )  # fmt: skip
    return [known[name] for name in dict.fromkeys(names)]


def _ranking(
    model: SpeculativeModel,
    is_embedded: bool,
    counts: tuple[str, ...],
    token_map: str | None,
    offline: bool,
    wanted: tuple[int | str, ...] | None,
) -> Ranking | None:
    """Make the ranking that sizes are cut from; None where only `full` is asked for and nothing ranks it."""
    from eagle_slim.convert.conversion.vocab_choice import VocabRequest, make_ranking
    from eagle_slim.convert.sources.builtin import embedded_target_folder
    from eagle_slim.vocab_tools.tokenizer.load import load_tokenizer
    from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab

    assert model.opened is not None
    opened = model.opened
    if not (counts or token_map or is_embedded or opened.rank_order is not None):
        if wanted == ("full",):
            return None
        raise UsageError(
            f"Head {opened.head.location} has no ranking of its own. Give --counts or --token-map, or convert it "
            "first; --sizes full needs no ranking.",
            option="--sizes", missing="ranking",
        )  # fmt: skip
    tokenizer = None
    request = VocabRequest(counts=counts, token_map=token_map)
    if not request.is_default or is_embedded:
        source = embedded_target_folder() if is_embedded else model.tokenizer_source
        if source is None and request.needs_tokenizer:
            raise UsageError(
                "--counts needs the target's tokenizer, and the target has none. Give --token-map.",
                option="--counts", missing="tokenizer",
            )  # fmt: skip
        tokenizer = None if source is None else load_tokenizer(source, offline=offline)
    elif opened.rank_order is not None:
        own = DraftVocab(opened.rank_order, opened.num_forced, opened.head.target_vocab)
        request = VocabRequest(token_map=own, force_ids=tuple(opened.rank_order[: opened.num_forced].tolist()))

    def never_count(*_args: Any) -> Any:
        raise AssertionError("a ranking is given")

    return make_ranking(
        opened.head, request, tokenizer, embedded=is_embedded, offline=True, count=never_count, say=note
    )


def _cut(model: SpeculativeModel, ranking: Ranking | None, wanted: tuple[int | str, ...] | None) -> list[Size]:
    from .comparison.compare import Size

    assert model.opened is not None
    everything = model.draft_vocab
    if ranking is None:
        return [Size("full", None)]
    smallest = ranking.cut(None).num_forced
    if wanted is None:
        wanted = ("full", *(size for size in _DEFAULT_SIZES if smallest <= size < everything))
    return [
        Size("full", None) if size in ("full", everything) else Size(str(size), ranking.cut(int(size)))
        for size in wanted
    ]


def _with_held_out(report: CompareReport, model: SpeculativeModel, ranking: Ranking | None) -> CompareReport:
    """Add the coverage of held-out text: measured by the ranking, or else recorded in the head's manifest."""
    from dataclasses import replace

    assert model.opened is not None
    measured = None if ranking is None else ranking.coverage(ranking.cut(None))
    recorded = model.opened.coverage if measured is None else measured[0].to_json()
    return report if recorded is None else replace(report, curves=(*report.curves, held_out_curve(recorded)))


def held_out_curve(coverage: Mapping[str, Any]) -> CoverageCurve:
    """Take the last source's curve (the mean, where there are several) from the JSON form of a `CoverageReport`."""
    from .comparison.compare import CoverageCurve

    source = coverage["sources"][-1]
    return CoverageCurve(f"{source['name']} ({source['part']})", tuple(coverage["sizes"]), tuple(source["coverage"]))


def write_files(report: CompareReport, advice: Recommendation, out: str | Path, force: bool) -> None:
    """Write the four files of a comparison into a folder, all or none."""
    import json

    from eagle_slim.convert.atomic import atomic_directory

    from .comparison.output import csv_text, html_page, png_bytes, report_to_json

    with atomic_directory(out, force=force, marker="compare.json") as folder:
        (folder / "compare.json").write_text(
            json.dumps(report_to_json(report, advice), indent=1) + "\n", encoding="utf-8"
        )
        (folder / "compare.csv").write_text(csv_text(report), encoding="utf-8")
        (folder / "compare.html").write_text(html_page(report, advice), encoding="utf-8")
        (folder / "compare.png").write_bytes(png_bytes(report, advice))


def _print(report: CompareReport, advice: Recommendation, as_json: bool) -> None:
    from .comparison.output import report_to_json, text_table

    if as_json:
        emit_json(report_to_json(report, advice))
        return
    click.echo(text_table(report))
    click.echo("")
    click.echo(advice.headline)
    for reason in advice.reasons:
        click.echo(f"  {reason}")


def main(args: list[str] | None = None) -> NoReturn:
    """Run `eagle-compare`."""
    run_cli(compare, args, "eagle-compare")


if __name__ == "__main__":
    main()
