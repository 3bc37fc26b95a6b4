"""`eagle-compare`: the same prompts over several draft vocabularies, heads and trees, as table, files and advice."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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

from .model_options_cli import (
    load_model,
    load_other_head,
    miss_log_option,
    model_options,
    show_warnings_as_lines,
)

if TYPE_CHECKING:
    import numpy as np
    from eagle_slim.convert.conversion.vocab_choice import Ranking
    from numpy.typing import NDArray

    from .comparison.answers import AnswerLog
    from .comparison.compare import Candidate, CoverageCurve, Plan
    from .comparison.recommend import Advice
    from .comparison.report import CompareReport
    from .config import TreeConfig
    from .model import SpeculativeModel

_DEFAULT_SIZES = (32768, 16384, 8192, 4096, 2048)
_MARKER = "compare.json"
_LINE_EVERY_S = 30.0
_INTERRUPTED = 130


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


def _counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(item) for item in value.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,4,16", ctx, param)
    return tuple(dict.fromkeys(counts))


def _follows(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str | None, ...]:
    names = ["none"] if value is None else [name.strip() for name in value.split(",")]
    for name in names:
        if name not in ("prompt", "text", "none"):
            raise click.BadParameter(f"{name!r} is none of prompt, text and none", ctx, param)
    return tuple(dict.fromkeys(None if name == "none" else name for name in names))


def _trees(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    trees = []
    for text in value:
        try:
            depth, top_k, total_tokens = map(int, text.split(","))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not DEPTH,TOP_K,NODES such as 5,10,60", ctx, param) from None
        trees.append((depth, top_k, total_tokens))
    return tuple(dict.fromkeys(trees))


@click.command(
    cls=EagleCommand,
    epilog="""\b
Examples:
  eagle-compare --prompts examples/prompts.jsonl --sizes full,16384,8192,4096 --out out/compare
  eagle-compare --prompts examples/prompts.jsonl --sizes full,16384,8192,4096 --out out/compare --resume
  eagle-compare yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --token-map freq_32000.pt --prompts question.jsonl --out cmp
  eagle-compare --prompts prompts.jsonl --sizes 4096,2048 --follow prompt,text,none
  eagle-compare slim --head other --tree 5,10,60 --tree 3,1,4 --batch 1,4,16 --prompts prompts.txt --json""",
)
@model_options
@click.option("--head", "heads", multiple=True, metavar="HEAD",
              help="Another head for the same target, compared as well; repeat for more.")  # fmt: skip
@click.option("--tree", "trees", multiple=True, callback=_trees, metavar="D,K,N",
              help="Depth, children per node and nodes of a tree; repeat to compare several.")  # fmt: skip
@click.option("--prompts", "prompt_file", required=True, metavar="FILE",
              help="JSON lines with `turns`, `messages`, `prompt` or `question`; or a prompt per line.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Take the first N prompts only.")
@click.option("--sizes", callback=_sizes, metavar="N,N,...",
              help="Draft vocabularies; `full` is all the head has. Default: full, powers of two.")  # fmt: skip
@click.option("--follow", "follows", callback=_follows, metavar="F,F,...",
              help="prompt, text, none: which ids join a size for their text. Default: none.")  # fmt: skip
@click.option("--follow-rows", type=click.IntRange(min=1), metavar="N", help="Most ids that join. Default: 512.")
@click.option("--counts", multiple=True, metavar="FILE", help="Rank by these counts of `eagle-vocab count`.")
@click.option("--token-map", metavar="FILE", help="Rank as this token map does (freq_N.pt, JSON ...).")
@click.option("--modes", default="greedy,sampled", show_default=True, metavar="M,M", help="greedy, sampled, or both.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="Of the sampled mode.")
@click.option("--top-p", type=float, metavar="P", help="Of the sampled mode.")
@click.option("--top-k", type=int, metavar="K", help="Of the sampled mode.")
@click.option("--seed", default=0, show_default=True, help="Of the sampled mode.")
@click.option("--batch", "batches", default="1", show_default=True, callback=_counts, metavar="B,B,...",
              help="Prompts answered at a time; the speed is that of all of them together.")  # fmt: skip
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Times to measure it all.")
@click.option("--raw", is_flag=True, help="Continue the prompts as they are, without the chat template.")
@miss_log_option
@click.option("--out", "-o", metavar="DIR", help="Write compare.json, .csv, .md, .png and .html here.")
@click.option("--resume", is_flag=True, help="Take up a comparison for --out that was interrupted.")
@click.option("--progress/--no-progress", default=None,
              help="Progress on stderr. Default: a bar on a terminal, else a line now and then.")  # fmt: skip
@force_option
@json_option
@version_option()
def compare(**options: Any) -> int:
    """Measure accepted length and speed over several draft vocabularies, and advise.

    HEAD is a folder or a repository of the Hugging Face Hub: converted (its manifest holds the ranking), or not (then
    give --counts or --token-map); without it, the built-in head of SmolLM2-135M-Instruct with its own counts. Every
    answer is compared with plain decoding. The last lines say which size to use on this device, as far as the prompts
    decide it. Ctrl-C ends the comparison and writes what there is.
    """
    show_warnings_as_lines()
    modes = _modes(options)
    out, force, resume, as_json = (options.pop(name) for name in ("out", "force", "resume", "as_json"))
    log_file = options.pop("miss_log")
    if log_file is not None:
        from .miss_log import check_log

        check_log(log_file)
    answers_file = _prepare_output(out, force, resume)
    from .comparison.prompt_file import load_prompts

    prompts = load_prompts(options.pop("prompt_file"), options.pop("limit"))
    rank_by = {name: options.pop(name) for name in ("counts", "token_map")}
    wanted, heads, trees = options.pop("sizes"), options.pop("heads"), options.pop("trees")
    follows, follow_rows = options.pop("follows"), options.pop("follow_rows")
    if follow_rows is not None and follows == (None,):
        raise UsageError(
            "--follow-rows says how many ids join with --follow. Give --follow prompt,none or the like.",
            option="--follow-rows", missing="--follow",
        )  # fmt: skip
    from .comparison.compare import Interrupted, Plan
    from .comparison.compare import compare as run_compare
    from .comparison.recommend import recommend
    from .comparison.report import build_report
    from .config import TreeConfig
    from .drafter.follow import DEFAULT_FOLLOW_ROWS

    shapes = [TreeConfig(*tree) for tree in trees]
    first_head, offline = options["head"], options["offline"]
    head_options = {name: options[name] for name in ("head_revision", "head_subfolder", "tap_layers", "d2t_form")}
    model = load_model(options)
    if log_file is not None:
        from .miss_log import MissLog

        # Refused before everything is answered.
        check_log(log_file, MissLog.of(model))
    models = {_head_name(first_head): (model, first_head is None)}
    for head in heads:
        models[_head_name(head)] = (load_other_head(model, head, offline, **head_options), False)
    rankings = {
        name: _ranking(each, is_embedded, **rank_by, offline=offline, wanted=wanted)
        for name, (each, is_embedded) in models.items()
    }
    candidates = [
        candidate
        for name, (each, _) in models.items()
        for candidate in _candidates(
            each, rankings[name], wanted, shapes, name, len(models) > 1, follows, follow_rows or DEFAULT_FOLLOW_ROWS
        )
    ]
    plan = Plan(
        prompts, modes, options.pop("max_new_tokens"), options.pop("repeats"), options.pop("batches"),
        not options.pop("raw"),
    )  # fmt: skip
    with ExitStack() as stack:
        log = None if answers_file is None else stack.enter_context(_open_log(answers_file, candidates, plan))
        advance = stack.enter_context(_progress(plan.num_calls(len(candidates)), options.pop("progress")))
        try:
            answers = run_compare(candidates, plan, log, advance)
        except Interrupted as stop:
            answers = stop.answers
    if not answers:
        note("interrupted before the first answer")
        return _INTERRUPTED
    ranking = rankings[_head_name(first_head)]
    report = build_report(candidates, plan, answers, _curves(model, ranking, answers))
    advice = recommend(report)
    if out is not None:
        write_files(report, advice, out, force or resume, answers_file)
        note(f"wrote {out}/compare.json, .csv, .md, .png and .html")
    _print(report, advice, as_json)
    # What a comparison that is to be resumed has answered so far would be counted twice.
    if log_file is not None and (report.is_complete or out is None):
        from .comparison.token_log import log_of_answers

        added = log_of_answers(model, plan, answers, candidates).save(log_file)
        note(f"counted {added:,} generated tokens into {log_file}")
    if report.is_complete:
        return 0
    note("interrupted: these are the answers so far" + ("; --resume takes the comparison up again" if out else ""))
    return _INTERRUPTED


def _prepare_output(out: str | None, force: bool, resume: bool) -> Path | None:
    """Return the file of answers beside ``out``; refuse what would be lost, before anything is loaded."""
    from eagle_slim.convert.atomic import check_output

    if out is None:
        if resume:
            raise UsageError("--resume takes up the comparison of an --out. Give --out.", option="--resume")
        return None
    answers = Path(out).expanduser()
    answers = answers.with_name(answers.name + ".answers.jsonl")
    if answers.exists() and force and not resume:
        answers.unlink()
    if answers.exists() and not resume:
        raise UsageError(
            f"{answers}: the answers of an interrupted comparison. Give --resume to take it up, or --force to start "
            "over.",
            option="--resume", path=str(answers),
        )  # fmt: skip
    check_output(out, force or (resume and answers.exists()), _MARKER)
    answers.parent.mkdir(parents=True, exist_ok=True)
    return answers


def _head_name(head: str | None) -> str:
    return "built-in head" if head is None else Path(head).name


def _open_log(path: Path, candidates: list[Candidate], plan: Plan) -> AnswerLog:
    from .comparison.answers import AnswerLog
    from .comparison.report import describe

    prompts = json.dumps([[prompt.turns, prompt.opening, prompt.category] for prompt in plan.prompts])
    of_prompts = {"prompts": hashlib.sha256(prompts.encode()).hexdigest(), "chat": plan.use_chat_template}
    return AnswerLog(path, describe(candidates[0].model, candidates, plan) | of_prompts)


@contextmanager
def _progress(total: int, show: bool | None) -> Iterator[Callable[[], object]]:
    """Give a function to call after each answer: it moves a bar on a terminal, else writes a line now and then."""
    if show or (show is None and sys.stderr.isatty()):
        from tqdm import tqdm

        with tqdm(total=total, desc="answers", unit="answer", file=sys.stderr) as bar:
            yield bar.update
        return
    started = said = time.monotonic()
    done = 0

    def line() -> None:
        nonlocal done, said
        done += 1
        now = time.monotonic()
        if show is None and now - said >= _LINE_EVERY_S:
            said = now
            left = (now - started) / done * (total - done)
            note(f"{done} of {total} answers, about {_duration(left)} left")

    yield line


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


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
    """Make the ranking that sizes are cut from; None where only `full` is asked for and the head has no ranking.

    Rows that an artifact keeps beyond its draft vocabulary are ranked too where a size, or another ranking, wants them.
    """
    from eagle_slim.convert.conversion.vocab_choice import VocabRequest, make_ranking
    from eagle_slim.convert.head.kept_rows import with_kept_rows
    from eagle_slim.convert.sources.builtin import embedded_target_folder
    from eagle_slim.vocab_tools.tokenizer.load import load_tokenizer
    from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab

    from .drafter.weights import rank_with_kept

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
    tokenizer, head = None, opened.head
    request = VocabRequest(counts=counts, token_map=token_map)
    if not request.is_default or any(isinstance(size, int) and size > head.draft_vocab for size in wanted or ()):
        head = with_kept_rows(head, offline)
    if not request.is_default or is_embedded:
        source = embedded_target_folder() if is_embedded else model.tokenizer_source
        if source is None and request.needs_tokenizer:
            raise UsageError(
                "--counts needs the target's tokenizer, and the target has none. Give --token-map.",
                option="--counts", missing="tokenizer",
            )  # fmt: skip
        tokenizer = None if source is None else load_tokenizer(source, offline=offline)
    elif opened.rank_order is not None:
        order = opened.rank_order if head is opened.head else rank_with_kept(head, opened.rank_order)
        own = DraftVocab(order, opened.num_forced, head.target_vocab)
        request = VocabRequest(token_map=own, force_ids=tuple(opened.rank_order[: opened.num_forced].tolist()))

    def never_count(*_args: Any) -> Any:
        raise AssertionError("a ranking is given")

    return make_ranking(head, request, tokenizer, embedded=is_embedded, offline=True, count=never_count, say=note)


def _candidates(
    model: SpeculativeModel,
    ranking: Ranking | None,
    wanted: tuple[int | str, ...] | None,
    trees: list[TreeConfig],
    head: str,
    name_head: bool,
    follows: tuple[str | None, ...],
    follow_rows: int,
) -> list[Candidate]:
    """Return every size of a head with every tree and every way to follow; sizes that are the same are one."""
    from .comparison.compare import Candidate, cut_sizes

    everything = model.draft_vocab
    if ranking is None:
        sizes: list[Any] = [None]
    else:
        smallest = ranking.cut(None).num_forced
        if wanted is None:
            wanted = ("full", *(size for size in _DEFAULT_SIZES if smallest <= size < everything))
        # With kept rows, another ranking may take other ids than the artifact's own, as many as it drafts over.
        whole = ("full", everything) if ranking.head.draft_vocab == everything else ("full",)
        sizes = [None if size in whole else ranking.cut(int(size)) for size in wanted]
    found = []
    cuts = cut_sizes(model, sizes, head)
    if follows != (None,):
        cuts = _follow_all(cuts, follows, follow_rows, None if ranking is None else _follow_order(model, ranking))
    for cut in cuts:
        for tree in trees or [model.drafter.tree]:
            shape = f", tree {tree.depth}/{tree.top_k}/{tree.total_tokens}" if len(trees) > 1 else ""
            label = (f"{head}: " if name_head else "") + cut.size + shape
            found.append(Candidate(label, cut.model.with_tree(tree), cut.size, head))
    return found


def _follow_all(
    cuts: list[Candidate], follows: tuple[str | None, ...], rows: int, order: NDArray[np.int64] | None
) -> list[Candidate]:
    """Return every size with every way to follow; where nothing can join any of them, what is wrong is raised."""
    from .comparison.compare import follow_each

    found = [(cut, follow_each(cut, follows, rows, order)) for cut in cuts]
    alone = [cut for cut, each in found if not any(one.follow for one in each)]
    if len(alone) == len(cuts):
        cuts[0].model.with_follow(next(filter(None, follows)), rows, order)
    for cut in alone:
        note(f"{cut.size}: no id is left that could join it; it is compared as it is")
    return [one for _, each in found for one in each]


def _follow_order(model: SpeculativeModel, ranking: Ranking) -> NDArray[np.int64]:
    """Return a ranking's ids best first, and after them those of the head's own ranking that it cannot rank."""
    import numpy as np

    from .drafter.weights import rank_with_kept

    assert model.opened is not None
    order, own = ranking.cut(None).target_ids, model.opened.rank_order
    if own is None:
        return order
    own = rank_with_kept(model.opened.head, own)
    return np.concatenate([order, own[~np.isin(own, order)]])


def _curves(model: SpeculativeModel, ranking: Ranking | None, answers: list[Any]) -> list[CoverageCurve]:
    """Return the coverage of the answers, and of held-out text: measured, or else as the head's manifest records it."""
    from .comparison.compare import PLAIN, answer_coverage

    assert model.opened is not None
    curves = []
    if ranking is not None:
        tokens = [token for a in answers if a.key.candidate == PLAIN for row in a.token_ids for token in row]
        curves.append(answer_coverage(ranking.cut(None).target_ids, tokens))
    measured = None if ranking is None else ranking.coverage(ranking.cut(None))
    recorded = model.opened.coverage if measured is None else measured[0].to_json()
    return curves if recorded is None else [*curves, held_out_curve(recorded)]


def held_out_curve(coverage: Mapping[str, Any]) -> CoverageCurve:
    """Take the last source's curve (the mean, where there are several) from the JSON form of a `CoverageReport`."""
    from .comparison.compare import CoverageCurve

    source = coverage["sources"][-1]
    return CoverageCurve(f"{source['name']} ({source['part']})", tuple(coverage["sizes"]), tuple(source["coverage"]))


def write_files(
    report: CompareReport, advice: list[Advice], out: str | Path, force: bool, answers: Path | None = None
) -> None:
    """Write the files of a comparison into a folder, all or none; once it is complete, ``answers`` moves in as well."""
    from eagle_slim.convert.atomic import atomic_directory

    from .comparison.charts import png_bytes
    from .comparison.output import csv_text, html_page, markdown, report_to_json

    with atomic_directory(out, force=force, marker=_MARKER) as folder:
        (folder / _MARKER).write_text(json.dumps(report_to_json(report, advice), indent=1) + "\n", encoding="utf-8")
        (folder / "compare.csv").write_text(csv_text(report), encoding="utf-8")
        (folder / "compare.md").write_text(markdown(report, advice), encoding="utf-8")
        (folder / "compare.html").write_text(html_page(report, advice), encoding="utf-8")
        (folder / "compare.png").write_bytes(png_bytes(report, advice))
        if answers is not None:
            (folder / "answers.jsonl").write_bytes(answers.read_bytes())
    if answers is not None and report.is_complete:
        answers.unlink()


def _print(report: CompareReport, advice: list[Advice], as_json: bool) -> None:
    from .comparison.output import report_to_json, text_table

    if as_json:
        emit_json(report_to_json(report, advice))
        return
    click.echo(text_table(report))
    for each in advice:
        click.echo("")
        click.echo(each.headline)
        for reason in each.reasons:
            click.echo(f"  {reason}")
    if report.remarks:
        click.echo("")
    for remark in report.remarks:
        click.echo(f"disturbed: {remark}")


def main(args: list[str] | None = None) -> NoReturn:
    """Run `eagle-compare`."""
    run_cli(compare, args, "eagle-compare")


if __name__ == "__main__":
    main()
