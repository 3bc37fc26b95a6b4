"""`convert_head`: a draft head and a vocabulary in, slim artifacts out. The library function behind `eagle-convert`.

Three steps: open the inputs once (`inputs.py`), rank the vocabulary once (`vocab_choice.py`), write an artifact for
each size (`write.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, get_args

from eagle_slim.vocab_tools.errors import UsageError
from eagle_slim.vocab_tools.files import expand_home
from eagle_slim.vocab_tools.ranking.rank import check_coverage
from eagle_slim.vocab_tools.ranking.size_from_cost import StepCost

from ..artifact.artifact import Artifact
from ..atomic import check_output, free_bytes, require_space
from ..head.kept_rows import KEPT_ROWS_NAME
from ..head.vocab_map import D2tForm
from ..manifest import MANIFEST_NAME, Flavour, Manifest
from ..sources.builtin import EMBEDDED_HEAD_NAME
from ..sources.source import open_head_source
from ..weights.paths import clean_subfolder
from .inputs import Inputs, Named, Reading, check_sizes, num_rankable, open_inputs
from .kept_choice import KeepRows, check_keep_rows, choose_kept_ids, needs_kept_rows
from .vocab_choice import Ranking, Say, VocabRequest, make_ranking
from .write import bytes_per_draft_step, kept_bytes, write_slim

if TYPE_CHECKING:
    from eagle_slim.vocab_tools.corpus.source import CorpusSource
    from eagle_slim.vocab_tools.counting.counts import TokenCounts
    from eagle_slim.vocab_tools.ranking.report import CoverageReport
    from eagle_slim.vocab_tools.tokenizer.tokenizer import LoadedTokenizer
    from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab

DraftVocabSize = int | Literal["full"]
AUTO = "auto"


@dataclass(frozen=True)
class Conversion:
    """One artifact that was written.

    Attributes:
        folder: where it is.
        manifest: as written.
        coverage: on held-out text, or None where there was none.
        rows_before: rows of the LM head that the draft model had.
        bytes_before, bytes_after: weights that one draft step reads, LM head included.
    """

    folder: Path
    manifest: Manifest
    coverage: CoverageReport | None
    rows_before: int
    bytes_before: int
    bytes_after: int

    @property
    def draft_vocab(self) -> int:
        """Rows of the LM head now."""
        return self.manifest.draft_vocab

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know."""
        return self.manifest.warnings

    @property
    def num_kept(self) -> int:
        """Rows that are kept beyond the draft vocabulary."""
        return 0 if self.manifest.kept_rows is None else len(self.manifest.kept_rows)

    @property
    def kept_bytes(self) -> int:
        """What they add to the artifact: bytes of their file, 0 without one."""
        return int(self.manifest.files.get(KEPT_ROWS_NAME, {}).get("size_bytes", 0))

    def load(self) -> Artifact:
        """Open what was written."""
        return Artifact.load(self.folder)

    def to_json(self) -> dict[str, Any]:
        """The result as `eagle-convert --json` prints it."""
        return {
            "folder": str(self.folder),
            "kind": self.manifest.kind,
            "draft_vocab": self.draft_vocab,
            "target_vocab": self.manifest.target_vocab,
            "rows": {"before": self.rows_before, "after": self.draft_vocab},
            "bytes_per_draft_step": {"before": self.bytes_before, "after": self.bytes_after},
            "kept_rows": {"rows": self.num_kept, "size_bytes": self.kept_bytes},
            "never_counted": self.manifest.num_uncounted,
            "coverage": None if self.manifest.coverage is None else coverage_summary(self.manifest),
            "warnings": list(self.warnings),
        }


def coverage_summary(manifest: Manifest) -> list[dict[str, Any]]:
    """Coverage at the artifact's own size, one entry per source: name, part, covered, interval, first ids instead."""
    report = manifest.coverage
    if report is None:
        return []
    at = report["sizes"].index(report["draft_vocab"])
    return [
        {
            "source": source["name"],
            "part": source["part"],
            "tokens": source["tokens"],
            "covered": source["coverage"][at],
            "interval": None if source["low"] is None else [source["low"][at], source["high"][at]],
            "first_ids_instead": source["baseline_first_ids"][at],
        }
        for source in report["sources"]
    ]


def convert_head(
    head: str | Path | None = None,
    *,
    draft_vocab: DraftVocabSize | Literal["auto"] | Sequence[DraftVocabSize] | None = None,
    coverage: float | None = None,
    cost: str | Path | None = None,
    keep_rows: KeepRows | None = None,
    vocabulary: VocabRequest | None = None,
    target: str | Path | None = None,
    tokenizer: str | Path | None = None,
    weights_file: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    target_revision: str | None = None,
    tokenizer_revision: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
    flavour: Flavour = "default",
    d2t_form: D2tForm = "auto",
    tap_layers: Sequence[int] | None = None,
    offline: bool = False,
    count: Callable[[Sequence[CorpusSource], LoadedTokenizer], TokenCounts] | None = None,
    say: Say = lambda message: None,
) -> tuple[Conversion, ...]:
    """Convert a draft head to slim artifacts, one for each size of draft vocabulary.

    Args:
        head: folder or Hub repository; None is the built-in head for SmolLM2-135M-Instruct.
        draft_vocab: rows to keep, or several sizes; "full" normalises the head without cutting it; "auto" takes the
            size that is fastest by ``cost`` and the coverage of the ranking.
        coverage: instead of a size, the share of the counted text that must be covered.
        cost: for "auto", the compare.json of a comparison on the device that will serve the head.
        keep_rows: rows to have at hand in all, those of the draft vocabulary among them, or "full" for all: the ones
            beyond it are kept in a file of their own that engines do not read, so that they may join the draft
            vocabulary while a text is followed, or a larger one be made without the original head. None keeps none.
        vocabulary: where the ranking comes from; None is the default: the built-in counts for the built-in head, else
            `vocab_choice.DEFAULT_DATASET_NOTE`.
        target: folder or Hub repository of the target model. Default: what the head's files name, else the table of
            public heads.
        tokenizer: folder, tokenizer.json or Hub repository; default the target's.
        weights_file: name of the file with the head's weights, where its folder holds several.
        revision, target_revision, tokenizer_revision: branch, tag or commit on the Hub.
        subfolder: where in the folder or repository the head is, such as "eagle3".
        out: folder to write (for several sizes, the folder to write them in); default a name made of head and size.
        force: replace an artifact that is there.
        flavour: "lmdeploy" (EAGLE-3) or "sglang" (EAGLE-1/2) writes the architecture name that this engine alone reads.
        d2t_form: form of the head's own map, where it cannot be told.
        tap_layers: layers of the target whose inputs the head reads, where its files do not say it right.
        offline: use only local files and the Hub cache.
        count: counts a corpus; default `count_tokens` with one worker per core.
        say: told, in words, which defaults are used and what is being done.

    Returns:
        One conversion per size, in the order given.

    Raises:
        UsageError, OutputExistsError: contradictory arguments, or existing output; nothing was read.
        SourceError, CheckpointError, UnsupportedHeadError, MismatchError: the inputs (see convert/errors.py).
        CorpusError, TokenizerError, VocabularyError: the vocabulary (see vocab_tools/errors.py).
        OutputError: the result cannot be written.
    """
    prepared = prepare_conversion(
        head,
        draft_vocab=draft_vocab,
        coverage=coverage,
        cost=cost,
        keep_rows=keep_rows,
        vocabulary=vocabulary,
        target=target,
        tokenizer=tokenizer,
        weights_file=weights_file,
        revision=revision,
        subfolder=subfolder,
        target_revision=target_revision,
        tokenizer_revision=tokenizer_revision,
        out=out,
        force=force,
        flavour=flavour,
        d2t_form=d2t_form,
        tap_layers=tap_layers,
        offline=offline,
        say=say,
    )
    return prepared.convert(count)


@dataclass(frozen=True)
class Planned:
    """One artifact as far as it is known before anything is counted or written.

    Attributes:
        folder: where it will be.
        draft_vocab: rows it will have; None where a coverage finds the size.
        num_forced: ids that are in whatever their rank; None where only the ranking tells.
        rows_before: rows of the LM head that the draft model has.
        bytes_before, bytes_after: weights that one draft step reads, LM head included; the latter is about the disk
            space that is needed, too, and None where the size is not known.
        num_kept: rows that are kept beyond them; None where only the ranking tells.
        kept_bytes: bytes of these, which take disk space and no time of a draft step; None as `num_kept`.
        free_bytes: free on the disk of `folder`.
    """

    folder: Path
    draft_vocab: int | None
    num_forced: int | None
    rows_before: int
    bytes_before: int
    bytes_after: int | None
    num_kept: int | None
    kept_bytes: int | None
    free_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The plan as `eagle-convert --dry-run --json` prints it."""
        return {**asdict(self), "folder": str(self.folder)}


@dataclass(frozen=True)
class PreparedConversion:
    """A conversion of which everything but the counting and the writing is done and checked.

    Attributes:
        inputs: opened, compared with each other, and at hand.
        request: where the ranking comes from.
        sizes: rows of each artifact.
        coverage: instead of a size.
        cost: instead of a size.
        keep_rows: rows at hand in all, as `convert_head` takes them.
        titles, folders: of each artifact.
        num_forced: as `check_sizes` found them.
        force: replace artifacts that are there.
        say: told what is being done.
    """

    inputs: Inputs
    request: VocabRequest
    sizes: Sequence[DraftVocabSize | None]
    coverage: float | None
    cost: StepCost | None
    keep_rows: KeepRows | None
    titles: Sequence[str]
    folders: Sequence[Path]
    num_forced: Mapping[DraftVocabSize | None, int | None]
    force: bool
    say: Say

    @property
    def plans(self) -> tuple[Planned, ...]:
        """What will be written."""
        head = self.inputs.head
        found = []
        for size, folder in zip(self.sizes, self.folders, strict=True):
            rows = head.target_vocab if size == "full" else size
            kept = self._num_kept(rows)
            found.append(
                Planned(
                    folder,
                    rows,
                    self.num_forced[size],
                    self.inputs.rows_before,
                    bytes_per_draft_step(head, self.inputs.rows_before),
                    None if rows is None else bytes_per_draft_step(head, rows),
                    kept,
                    None if kept is None else kept_bytes(head, kept),
                    free_bytes(folder),
                )
            )
        return tuple(found)

    def _num_kept(self, rows: int | None) -> int | None:
        """Rows that are kept beside a draft vocabulary of a size; None where only the ranking tells."""
        if self.keep_rows is None:
            return 0
        return None if self.keep_rows == "full" or rows is None else self.keep_rows - rows

    @property
    def access(self) -> dict[str, str]:
        """What the conversion reads from, in words, by what it is."""
        inputs = self.inputs
        found = {"head": inputs.source.label if inputs.source.repo_id else inputs.head.location}
        if inputs.lm_head is not None and inputs.target is not None:
            found["LM head"] = f"{inputs.lm_head.name} of target {inputs.target.name}, at hand"
        elif inputs.head.has_lm_head:
            found["LM head"] = "the head's own"
        found["tokenizer"] = "none" if inputs.tokenizer is None else f"at hand, {inputs.tokenizer.vocab_size:,} ids"
        found["vocabulary"] = self.request.summary
        return found

    def convert(
        self, count: Callable[[Sequence[CorpusSource], LoadedTokenizer], TokenCounts] | None = None
    ) -> tuple[Conversion, ...]:
        """Rank the vocabulary and write the artifacts; arguments and errors as `convert_head`."""
        ranking = None
        if any(size != "full" for size in self.sizes):
            ranking = make_ranking(
                self.inputs.head,
                self.request,
                self.inputs.tokenizer,
                embedded=self.inputs.is_builtin,
                offline=self.inputs.reading.offline,
                count=count or _count,
                say=self.say,
                target=None if self.inputs.target is None else self.inputs.target.name,
            )
        elif not self.request.is_default or self.request.force_ids:
            self.say(
                "--draft-vocab full keeps every row in its place: counts, maps, text and forced ids change nothing"
            )
        # All of them before the first is written: a size that does not fit leaves nothing behind.
        vocabs = [None if size == "full" or ranking is None else self._cut(ranking, size) for size in self.sizes]
        kept = [
            None if vocab is None or ranking is None or self.keep_rows is None
            else choose_kept_ids(self.keep_rows, ranking, vocab)
            for vocab in vocabs
        ]  # fmt: skip
        done = []
        for vocab, kept_ids, title, folder in zip(vocabs, kept, self.titles, self.folders, strict=True):
            self.say(f"writing {folder}")
            done.append(Conversion(*write_slim(self.inputs, ranking, vocab, kept_ids, folder, title, self.force)))
        return tuple(done)

    def _cut(self, ranking: Ranking, size: int | None) -> DraftVocab:
        if self.cost is None:
            return ranking.cut(size, self.coverage)
        vocab = ranking.cut_by_cost(self.cost)
        self.say(f"the measured cost and the coverage of the ranking are fastest at {len(vocab):,} rows")
        return vocab


def prepare_conversion(
    head: str | Path | None = None,
    *,
    draft_vocab: DraftVocabSize | Literal["auto"] | Sequence[DraftVocabSize] | None = None,
    coverage: float | None = None,
    cost: str | Path | None = None,
    keep_rows: KeepRows | None = None,
    vocabulary: VocabRequest | None = None,
    target: str | Path | None = None,
    tokenizer: str | Path | None = None,
    weights_file: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    target_revision: str | None = None,
    tokenizer_revision: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
    flavour: Flavour = "default",
    d2t_form: D2tForm = "auto",
    tap_layers: Sequence[int] | None = None,
    offline: bool = False,
    say: Say = lambda message: None,
) -> PreparedConversion:
    """Do everything of `convert_head` that comes before counting and writing; arguments and errors are the same.

    Whatever can end a conversion is looked at here: the output, the head, the target's LM head, the tokenizer, the
    sizes, and the space on the disk.
    """
    if flavour not in get_args(Flavour):
        raise UsageError(
            f"flavour: expected one of {', '.join(get_args(Flavour))}, found {flavour!r}.",
            option="--for",
            found=flavour,
        )
    request = vocabulary or VocabRequest()
    step_cost = _step_cost(draft_vocab, coverage, cost)
    sizes = [None] if step_cost is not None else _sizes(draft_vocab, coverage)
    head_name = None if head is None else str(head)
    inside = clean_subfolder(subfolder)
    titles = [default_name(head_name, size, coverage, flavour, inside) for size in sizes]
    folders = [_output(out, title, several=len(sizes) > 1) for title in titles]
    for folder in folders:
        check_output(folder, force, MANIFEST_NAME)
    reading = Reading(flavour, d2t_form, None if tap_layers is None else tuple(tap_layers), offline)
    inputs = open_inputs(
        open_head_source(head_name, revision=revision, offline=offline, subfolder=inside, weights_file=weights_file),
        reading,
        request,
        Named(target, target_revision),
        Named(tokenizer, tokenizer_revision),
        is_builtin=head is None,
        needs_kept=lambda head: needs_kept_rows(head, request, sizes, keep_rows),
        say=say,
    )
    if keep_rows is not None:
        check_keep_rows(keep_rows, inputs, sizes, num_rankable(inputs, request))
    elif (own := inputs.head.manifest) is not None and own.kept_rows is not None:
        say(f"the {len(own.kept_rows):,} rows that {inputs.head.location} keeps are not kept again without --keep-rows")
    num_forced = check_sizes(inputs, request, sizes)
    prepared = PreparedConversion(
        inputs, request, sizes, coverage, step_cost, keep_rows, titles, folders, num_forced, force, say
    )
    require_space(folders[0], sum((plan.bytes_after or 0) + (plan.kept_bytes or 0) for plan in prepared.plans))
    return prepared


def _step_cost(draft_vocab: Any, coverage: float | None, cost: str | Path | None) -> StepCost | None:
    """Read the cost that finds the size; None where a size or a coverage is given."""
    named = [draft_vocab] if isinstance(draft_vocab, str) else draft_vocab
    if not isinstance(named, list | tuple) or list(named) != [AUTO]:
        if cost is not None:
            raise UsageError("--cost finds the size of --draft-vocab auto. Give both.", option="--cost")
        return None
    if coverage is not None:
        raise UsageError(
            "--draft-vocab and --coverage exclude each other: give a size, or let it be found.",
            options=["--draft-vocab", "--coverage"],
        )
    if cost is None:
        raise UsageError(
            "--draft-vocab auto needs the cost of a step on the device that will serve the head: run eagle-compare "
            "there with --out DIR, and give --cost DIR/compare.json.",
            option="--cost",
        )
    return StepCost.load(cost)


def _sizes(
    draft_vocab: DraftVocabSize | Literal["auto"] | Sequence[DraftVocabSize] | None, coverage: float | None
) -> list[DraftVocabSize | None]:
    if coverage is not None:
        if draft_vocab is not None:
            raise UsageError(
                "--draft-vocab and --coverage exclude each other: give a size, or let it be found.",
                options=["--draft-vocab", "--coverage"],
            )
        check_coverage(coverage)
        return [None]
    if draft_vocab is None:
        raise UsageError(
            "Give the size of the draft vocabulary with --draft-vocab, or a --coverage to find one.",
            option="--draft-vocab",
        )
    several = isinstance(draft_vocab, Iterable) and not isinstance(draft_vocab, str)
    sizes: list[Any] = list(draft_vocab) if several else [draft_vocab]  # type: ignore[arg-type]  # not a size
    if not sizes:
        raise UsageError("--draft-vocab: no size given.", option="--draft-vocab")
    return list(dict.fromkeys("full" if size == "full" else _number_of_ids(size) for size in sizes))


def _number_of_ids(size: Any) -> int:
    try:
        number = operator.index(size)
    except TypeError:
        number = 0
    if number < 1 or isinstance(size, bool):
        raise UsageError(
            f"--draft-vocab: expected a number of ids or 'full', found {size!r}.", option="--draft-vocab", found=size
        )
    return number


def default_name(
    head: str | None,
    size: DraftVocabSize | None,
    coverage: float | None = None,
    flavour: Flavour = "default",
    subfolder: str = "",
) -> str:
    """Name of the output folder: `smollm2-135m-instruct-eagle3-v32000` for the built-in head at 32000 ids."""
    base = EMBEDDED_HEAD_NAME if head is None else expand_home(head).resolve().name
    base = "-".join([base, *PurePosixPath(subfolder).parts])
    found = AUTO if coverage is None else f"coverage{coverage}"
    endings: dict[DraftVocabSize | None, str] = {None: found, "full": "full"}
    ending = endings.get(size, f"v{size}")
    return f"{base}-{ending}" + ("" if flavour == "default" else f"-{flavour}")


def _output(out: str | Path | None, name: str, *, several: bool) -> Path:
    if out is None:
        return Path(name)
    if out == "":
        raise UsageError(
            "--out: the name is empty.\nName the folder to write, or leave the option out.", option="--out", found=out
        )
    return Path(out) / name if several else Path(out)


def _count(sources: Sequence[CorpusSource], tokenizer: LoadedTokenizer) -> TokenCounts:
    from eagle_slim.vocab_tools.counting.count import count_tokens

    return count_tokens(sources, tokenizer)
