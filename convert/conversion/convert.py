"""`convert_head`: a draft head and a vocabulary in, slim artifacts out. The library function behind `eagle-convert`."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, get_args

from eagle_slim.vocab_tools.errors import UsageError
from eagle_slim.vocab_tools.files import expand_home
from eagle_slim.vocab_tools.ranking.rank import check_coverage, rank_by_order
from eagle_slim.vocab_tools.tokenizer.load import ForcedIds, forced_ids

from ..artifact import eagle1, eagle3
from ..artifact.artifact import PLOT_NAME, Artifact, ArtifactContents, freq_bytes, freq_name, write_artifact
from ..artifact.eagle3 import LmHeadSource
from ..artifact.engines import Finding, HeadFacts, conversion_findings
from ..artifact.manifest import MANIFEST_NAME, Flavour, Manifest
from ..artifact.model_card import model_card
from ..atomic import check_output, require_space
from ..errors import UnsupportedHeadError
from ..head.open import D2tForm, DraftHead, open_head
from ..sources import card as readme
from ..sources.builtin import EMBEDDED_HEAD_NAME, EMBEDDED_LICENCE
from ..weights import names
from ..weights.checkpoint import FileRecord
from ..weights.paths import clean_subfolder
from . import target
from .vocab_choice import Ranking, Say, VocabRequest, make_ranking, own_forced_ids, own_manifest

if TYPE_CHECKING:
    from eagle_slim.vocab_tools.corpus.source import CorpusSource
    from eagle_slim.vocab_tools.counting.counts import TokenCounts
    from eagle_slim.vocab_tools.ranking.report import CoverageReport
    from eagle_slim.vocab_tools.tokenizer.tokenizer import LoadedTokenizer
    from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab

    from ..sources.lm_head import TargetLMHead
    from .target import Target, TargetChoice

DraftVocabSize = int | Literal["full"]
_NOT_COMPARED = "the target was not at hand: the head was not compared with it"


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
    draft_vocab: DraftVocabSize | Sequence[DraftVocabSize] | None = None,
    coverage: float | None = None,
    vocabulary: VocabRequest | None = None,
    target: str | Path | None = None,
    tokenizer: str | Path | None = None,
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
        draft_vocab: rows to keep, or several sizes; "full" normalises the head without cutting it.
        coverage: instead of a size, the share of the counted text that must be covered.
        vocabulary: where the ranking comes from; None is the default: the built-in counts for the built-in head, else
            `vocab_choice.DEFAULT_DATASET_NOTE`.
        target: folder or Hub repository of the target model. Default: what the head's files name, else the table of
            public heads.
        tokenizer: folder, tokenizer.json or Hub repository; default the target's.
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
    if flavour not in get_args(Flavour):
        raise UsageError(f"flavour: expected one of {', '.join(get_args(Flavour))}, found {flavour!r}")
    request = vocabulary or VocabRequest()
    sizes = _sizes(draft_vocab, coverage)
    head_name = None if head is None else str(head)
    inside = clean_subfolder(subfolder)
    titles = [default_name(head_name, size, coverage, flavour, inside) for size in sizes]
    folders = [_output(out, title, several=len(sizes) > 1) for title in titles]
    for folder in folders:
        check_output(folder, force, MANIFEST_NAME)
    job = _Job(
        head_name, request, None if target is None else str(target), None if tokenizer is None else str(tokenizer),
        revision, inside, target_revision, tokenizer_revision, flavour, d2t_form,
        None if tap_layers is None else tuple(tap_layers), offline, say,
    )  # fmt: skip
    opened = job.open()
    job.check_sizes(opened, sizes)
    if any(size != "full" for size in sizes):
        ranking = make_ranking(
            opened.head,
            request,
            opened.tokenizer,
            embedded=head is None,
            offline=offline,
            count=count or _count_with_progress,
            say=say,
        )
    else:
        ranking = None
        if not request.is_default or request.force_ids:
            say("--draft-vocab full keeps every row in its place: counts, maps, text and forced ids change nothing")
    # All of them before the first is written: a size that does not fit leaves nothing behind.
    vocabs = [None if size == "full" or ranking is None else ranking.cut(size, coverage) for size in sizes]
    done = []
    for vocab, title, folder in zip(vocabs, titles, folders, strict=True):
        say(f"writing {folder}")
        done.append(job.write(opened, ranking, vocab, folder, title, force))
    return tuple(done)


@dataclass(frozen=True)
class _Opened:
    """The inputs of a conversion, opened once."""

    head: DraftHead
    choice: TargetChoice | None
    target: Target | None
    tokenizer: LoadedTokenizer | None
    licence: str | None


@dataclass(frozen=True)
class _Job:
    """The arguments of a conversion that are the same for every size."""

    head_name: str | None
    request: VocabRequest
    target_name: str | None
    tokenizer_name: str | None
    revision: str | None
    subfolder: str
    target_revision: str | None
    tokenizer_revision: str | None
    flavour: Flavour
    d2t_form: D2tForm
    tap_layers: tuple[int, ...] | None
    offline: bool
    say: Say

    def open(self) -> _Opened:
        if self.head_name is None:
            self.say(f"head: built-in {EMBEDDED_HEAD_NAME}")
        head = open_head(
            self.head_name,
            revision=self.revision,
            subfolder=self.subfolder,
            offline=self.offline,
            d2t_form=self.d2t_form,
            tap_layers=self.tap_layers,
        )
        if head.kind == "eagle" and self.flavour == "lmdeploy":
            raise UnsupportedHeadError(
                f"{head.location}: LMDeploy's EAGLE-1/2 loader refuses fc.bias, which SGLang needs; leave --for out"
            )
        assert head.source is not None
        card = readme.front_matter(head.source.folder) or readme.front_matter(head.source.root)
        choice = target.choose_target(self.target_name, self.head_name, head, readme.base_model(card))
        if choice is not None and choice.reason != "given":
            self.say(f"target: {choice.name or 'SmolLM2-135M-Instruct'} ({choice.reason})")
        if self.target_revision is not None and (choice is None or choice.name is None):
            raise UsageError(
                f"--target-revision {self.target_revision} is of no target; name the repository with --target"
            )
        needs_rows = head.kind == "eagle3" and not head.has_lm_head
        # The ranks of an artifact hold what its tokenizer forces of the tokens of chats.
        ranked = own_manifest(head) if self.request.is_default else None
        is_ranked = ranked is not None and ranked.tokenizer is not None and self.request.force_added == "chat"
        needs_tokenizer = self.request.needs_tokenizer and self.tokenizer_name is None and not is_ranked
        if choice is None and needs_rows:
            raise UsageError(
                f"{head.location}: has no LM head of its own, so its rows come from the target, and neither its "
                "files nor the table of public heads says which that is; name it with --target"
            )
        opened = None
        is_named = choice is not None and (choice.reason == "given" or self.target_revision is not None)
        if choice is not None and (needs_rows or needs_tokenizer or choice.name is None or is_named):
            opened = target.open_target(choice, self.target_revision, self.offline)
            target.check_head_fits(head, opened)
        loaded = target.open_tokenizer(
            self.tokenizer_name, self.tokenizer_revision, opened, head.target_vocab, self.offline
        )
        licence = EMBEDDED_LICENCE if self.head_name is None else readme.licence(card)
        return _Opened(head, choice, opened, loaded, licence)

    def check_sizes(self, opened: _Opened, sizes: Sequence[DraftVocabSize | None]) -> None:
        """Refuse a size that cannot be before anything is counted."""
        if "full" in sizes:
            eagle3.all_ids(opened.head)
        trained = opened.head.trained_ids
        numbers = [size for size in sizes if isinstance(size, int) and (trained is None or size != len(trained))]
        if not numbers:
            return
        forced: ForcedIds | tuple[int, ...] = self.request.force_ids
        if opened.tokenizer is not None:
            forced = forced_ids(opened.tokenizer, self.request.force_added, self.request.force_ids)
        elif self.request.is_default and (ranked := own_manifest(opened.head)) is not None:
            forced = own_forced_ids(ranked) + self.request.force_ids
        for size in numbers:
            rank_by_order(None, size, opened.tokenizer, forced, opened.head.target_vocab, trained)

    def write(
        self,
        opened: _Opened,
        ranking: Ranking | None,
        vocab: DraftVocab | None,
        folder: Path,
        title: str,
        force: bool,
    ) -> Conversion:
        # Opened again for each size, so that a manifest lists what was read for this one alone.
        head = open_head(
            self._source_folder(opened.head), offline=True, d2t_form=self.d2t_form, tap_layers=self.tap_layers
        )
        head = replace(head, location=opened.head.location, source=opened.head.source)
        lm_head, target_lm_head = self._lm_head(head, opened)
        measured = None if ranking is None or vocab is None else ranking.coverage(vocab)
        report = None if measured is None else measured[0]
        rows = len(vocab) if vocab is not None else head.target_vocab
        require_space(folder, bytes_per_draft_step(head, lm_head, rows))
        tokenizer = _tokenizer_provenance(opened.tokenizer)
        if tokenizer is None and ranking is not None and ranking.recorded_tokenizer is not None:
            tokenizer = dict(ranking.recorded_tokenizer)
        manifest = self._manifest(head, opened, lm_head, vocab, measured, tokenizer)
        contents = ArtifactContents(
            manifest=manifest,
            config=self._config(head, rows),
            plans=(),
            gathered=None,
            card=lambda finished: "",
            after_read=lambda: _what_was_read(manifest, head, target_lm_head),
        )
        if head.kind == "eagle3":
            assert lm_head is not None
            contents.plans, contents.gathered = eagle3.plan_tensors(
                head, lm_head, None if vocab is None else vocab.ascending_ids
            )
        else:
            contents.plans = eagle1.plan_tensors(head)
        if vocab is not None:
            contents.side_files[freq_name(len(vocab))] = freq_bytes(vocab.target_ids)
        if report is not None:
            from eagle_slim.vocab_tools.ranking.plots import render_coverage

            contents.side_files[PLOT_NAME] = render_coverage(report)
        before, after = (bytes_per_draft_step(head, lm_head, count) for count in (_rows_before(head), rows))
        refused = {found.engine for found in self._findings(head, opened, rows) if found.severity == "error"}
        contents.card = lambda finished: model_card(
            finished,
            title=title,
            bytes_before=before,
            bytes_after=after,
            rows_before=_rows_before(head),
            licence=opened.licence,
            plot=None if report is None else PLOT_NAME,
            refused=refused,
        )
        written = write_artifact(folder, contents, force=force)
        return Conversion(folder, written, report, _rows_before(head), before, after)

    def _config(self, head: DraftHead, rows: int) -> dict[str, Any]:
        if head.kind == "eagle3":
            return eagle3.slim_config(head, rows, self.flavour)
        return eagle1.repaired_config(head, self.flavour)

    def _source_folder(self, head: DraftHead) -> Path:
        assert head.source is not None
        return head.source.folder

    def _lm_head(self, head: DraftHead, opened: _Opened) -> tuple[LmHeadSource | None, TargetLMHead | None]:
        if head.kind == "eagle":
            return None, None
        if head.has_lm_head:
            stored = head.tensors.stored[names.LM_HEAD]
            return LmHeadSource(head.tensors.source, stored, "head", head.location), None
        assert opened.target is not None
        found = target.open_lm_head(opened.target, self.offline)
        return target.lm_head_rows(head, found, f"target {opened.target.name}"), found

    def _manifest(
        self,
        head: DraftHead,
        opened: _Opened,
        lm_head: LmHeadSource | None,
        vocab: DraftVocab | None,
        measured: tuple[CoverageReport, str] | None,
        tokenizer: dict[str, Any] | None,
    ) -> Manifest:
        rows = head.target_vocab if vocab is None else len(vocab)
        warnings = [*head.warnings, *(lm_head.warnings if lm_head is not None else ())]
        if vocab is not None:
            warnings += vocab.warnings
            if tokenizer is None:
                warnings.append("no tokenizer was at hand: end-of-turn and other needed tokens were not looked for")
        if measured is not None:
            warnings += measured[0].warnings
        if opened.target is None:
            # That of an artifact was at hand when the artifact was made, or this stands among its warnings.
            ranked = own_manifest(opened.head)
            if ranked is None or _NOT_COMPARED in ranked.warnings:
                warnings.append(_NOT_COMPARED)
        warnings += [str(finding) for finding in self._findings(head, opened, rows)]
        return Manifest(
            kind=head.kind,
            flavour=self.flavour,
            tool={"name": "eagle-slim", "version": version("eagle-slim")},
            draft_vocab=rows,
            target_vocab=head.target_vocab,
            num_forced=0 if vocab is None else vocab.num_forced,
            rank_order_ids=None if vocab is None else vocab.target_ids,
            row_checksums=None,
            head=self._head_provenance(head),
            target=self._target_provenance(opened),
            lm_head=None if lm_head is None else _lm_head_provenance(head, lm_head),
            tokenizer=tokenizer,
            vocabulary=None if vocab is None else _vocabulary_provenance(vocab),
            tap_layers=head.tap_layers,
            coverage=None
            if measured is None
            else {**measured[0].to_json(), "shown": list(measured[0].shown), "note": measured[1]},
            dropped=_dropped(head),
            warnings=tuple(warnings),
        )

    def _findings(self, head: DraftHead, opened: _Opened, rows: int) -> list[Finding]:
        facts = HeadFacts.of(
            head,
            config=self._config(head, rows),
            draft_vocab=rows,
            target_layers=None if opened.target is None else opened.target.num_layers,
        )
        if head.kind == "eagle":
            # Added where it is missing, see `eagle1.plan_tensors`.
            facts = replace(facts, tensor_names=facts.tensor_names | {names.FC_BIAS})
        return conversion_findings(facts)

    def _head_provenance(self, head: DraftHead) -> dict[str, Any]:
        assert head.source is not None
        name = head.source.repo_id or (
            EMBEDDED_HEAD_NAME if self.head_name is None else head.source.root.resolve().name
        )
        found = {"name": name, "repo_id": head.source.repo_id, "revision": head.source.commit}
        if head.source.subfolder:
            found["subfolder"] = head.source.subfolder
        return found if self.d2t_form == "auto" else {**found, "d2t_form": self.d2t_form}

    def _target_provenance(self, opened: _Opened) -> dict[str, Any]:
        if opened.target is not None:
            config = opened.target.config
            sizes = {key: config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size") if key in config}
            return {**opened.target.provenance, **sizes}
        if opened.choice is not None and opened.choice.reason == target.RECORDED:
            assert opened.head.source is not None
            recorded = Manifest.load(opened.head.source.folder).target
            return {key: value for key, value in recorded.items() if key != "files"}
        return {"repo_id": None if opened.choice is None else opened.choice.name, "revision": None}


def _sizes(
    draft_vocab: DraftVocabSize | Sequence[DraftVocabSize] | None, coverage: float | None
) -> list[DraftVocabSize | None]:
    if coverage is not None:
        if draft_vocab is not None:
            raise UsageError("--draft-vocab and --coverage exclude each other: give a size, or let it be found")
        check_coverage(coverage)
        return [None]
    if draft_vocab is None:
        raise UsageError("give the size of the draft vocabulary with --draft-vocab, or a --coverage to find one")
    several = isinstance(draft_vocab, Iterable) and not isinstance(draft_vocab, str)
    sizes: list[Any] = list(draft_vocab) if several else [draft_vocab]  # type: ignore[arg-type]  # not a size
    if not sizes:
        raise UsageError("--draft-vocab: no size given")
    return list(dict.fromkeys("full" if size == "full" else _number_of_ids(size) for size in sizes))


def _number_of_ids(size: Any) -> int:
    try:
        number = operator.index(size)
    except TypeError:
        number = 0
    if number < 1 or isinstance(size, bool):
        raise UsageError(f"--draft-vocab: expected a number of ids or 'full', found {size!r}")
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
    endings: dict[DraftVocabSize | None, str] = {None: f"coverage{coverage}", "full": "full"}
    ending = endings.get(size, f"v{size}")
    return f"{base}-{ending}" + ("" if flavour == "default" else f"-{flavour}")


def _output(out: str | Path | None, name: str, *, several: bool) -> Path:
    if out is None:
        return Path(name)
    if out == "":
        raise UsageError("--out: the name is empty; name the folder to write, or leave the option out")
    return Path(out) / name if several else Path(out)


def bytes_per_draft_step(head: DraftHead, lm_head: LmHeadSource | None, rows: int) -> int:
    """Bytes of weights that one draft step reads with an LM head of `rows` rows; the embedding's few rows left out."""
    total = sum(
        math.prod(head.tensors.shape(name)) * head.tensors.dtype(name).itemsize
        for name in head.tensors
        if name not in (names.LM_HEAD, names.EMBEDDING)
    )
    dtype = lm_head.source.dtype(lm_head.name) if lm_head is not None and lm_head.origin == "head" else head.dtype
    return total + rows * head.hidden_size * dtype.itemsize


def _rows_before(head: DraftHead) -> int:
    return head.draft_vocab


def _lm_head_provenance(head: DraftHead, lm_head: LmHeadSource) -> dict[str, Any]:
    found = lm_head.source.dtype(lm_head.name)
    written = head.dtype if lm_head.origin == "target" else found
    return {
        "from": lm_head.origin,
        "tensor": lm_head.name,
        "rows": lm_head.source.shape(lm_head.name)[0],
        "source_dtype": str(found).removeprefix("torch."),
        "dtype": str(written).removeprefix("torch."),
        "rounded": found != written,
    }


def _vocabulary_provenance(vocab: DraftVocab) -> dict[str, Any]:
    """The ranking's provenance; counts from memory and from a file differ in nothing but the order of their keys."""
    found = dict(vocab.provenance)
    if "sources" in found:
        found["sources"] = json.loads(json.dumps(found["sources"], sort_keys=True))
    # Warnings stand in the manifest's own list.
    return {key: value for key, value in found.items() if key != "warnings"}


def _tokenizer_provenance(tokenizer: LoadedTokenizer | None) -> dict[str, Any] | None:
    if tokenizer is None:
        return None
    return {
        "hash": tokenizer.tokenizer_hash,
        "chat_template_hash": tokenizer.chat_template_hash,
        "vocab_size": tokenizer.vocab_size,
        "tokens": len(tokenizer.real_ids),
    }


def _dropped(head: DraftHead) -> dict[str, str]:
    dropped = dict(head.dropped)
    if head.kind == "eagle3" and names.EMBEDDING in head.tensors and head.target_hidden_size == head.hidden_size:
        dropped[head.tensors.stored[names.EMBEDDING]] = "every engine shares the target's embedding"
    return dict(sorted(dropped.items()))


def _what_was_read(manifest: Manifest, head: DraftHead, lm_head: TargetLMHead | None) -> dict[str, Any]:
    found = {"head": {**manifest.head, "files": _records(head.tensors.source.files)}}
    if lm_head is not None:
        records = [{**record, "name": lm_head.file} for record in _records(lm_head.files)]
        found["target"] = {**manifest.target, "files": records}
    return found


def _records(files: Sequence[FileRecord]) -> list[dict[str, Any]]:
    """What was read of each file, JSON-ready; files of which nothing was read are left out."""
    return [
        {
            "name": file.path.name,
            "size_bytes": file.size_bytes,
            "reads": [
                {"tensor": read.tensor, "rows": read.rows, "size_bytes": read.size_bytes, "sha256": read.sha256}
                for read in file.reads
            ],
        }
        for file in files
        if file.reads
    ]


def _count_with_progress(sources: Sequence[CorpusSource], tokenizer: LoadedTokenizer) -> TokenCounts:
    from eagle_slim.vocab_tools.counting.count import count_tokens

    return count_tokens(sources, tokenizer)
