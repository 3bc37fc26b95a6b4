"""`convert_head`: a draft head and a vocabulary in, slim artifacts out. The library function behind `eagle-convert`.

Head, target and tokenizer are opened once and the vocabulary is ranked once; then each artifact is planned: tensors,
small files and manifest. A conversion writes its plans, a dry run checks them (`Conversion.check`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from os.path import normpath
from pathlib import Path
from typing import Any

from eagle_slim.vocab_tools.counting import count_tokens
from eagle_slim.vocab_tools.errors import UsageError
from eagle_slim.vocab_tools.files import expand_home
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer
from eagle_slim.vocab_tools.vocabulary import DraftVocab

from . import names
from .artifact.checksums import row_checksums, sha256_of
from .artifact.files import CARD_NAME, CONFIG_NAME, FILE_NAMES, MANIFEST_NAME, WEIGHTS_NAME, freq_bytes, freq_name
from .artifact.manifest import Manifest
from .atomic import atomic_directory, check_output, check_room
from .engines import HeadFacts, conversion_findings, in_words
from .errors import MismatchError
from .heads.draft_head import DraftHead
from .heads.open import open_head
from .options import ConvertOptions
from .rows.files import SafetensorsFile, item_size
from .rows.writer import TensorPlan, write_safetensors
from .slim.card import model_card
from .slim.tensors import config_of, plan_tensors
from .sources.builtin import EMBEDDED_HEAD_NAME, EMBEDDED_LICENCE
from .sources.source import ResolvedSource, open_head_source
from .targets import model as targets
from .targets.lm_head import LmHead, all_ids, fitting, own_lm_head
from .targets.matrix import open_target_lm_head, settle_embedding, tied_warnings
from .vocabulary_choice import Count, Ranking, Say, make_ranking, ranked_manifest

NOT_COMPARED = "the target was not at hand: the head was not compared with it"


@dataclass(frozen=True)
class Inputs:
    """Opened inputs of a conversion; None for what is not known or not needed, as the LM head of EAGLE-1/2."""

    head: DraftHead
    source: ResolvedSource
    choice: targets.TargetChoice | None
    target: targets.HeadTarget | None
    lm_head: LmHead | None
    tokenizer: LoadedTokenizer | None
    is_builtin: bool

    @property
    def target_layers(self) -> int | None:
        """Decoder layers of the target."""
        return None if self.target is None else self.target.num_layers

    @property
    def unpadded_head(self) -> DraftHead:
        """The head for no more ids than the target has: it can neither take nor produce the others."""
        rows = None if self.target is None else self.target.config.get("vocab_size")
        return self.head.without_padding(min(self.head.target_vocab, rows)) if isinstance(rows, int) else self.head


@dataclass(frozen=True)
class Conversion:
    """One artifact, planned or written.

    `files` are the small ones but for the manifest, which is without checksums and files until they are written.
    `bytes_before`, `bytes_after`: weights that one draft step of the head and of the slim head reads.
    """

    folder: Path
    head: DraftHead
    lm_head: LmHead | None
    tensors: Sequence[TensorPlan]
    files: Mapping[str, bytes]
    manifest: Manifest
    bytes_before: int
    bytes_after: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(plan.size_bytes for plan in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Describe the artifact as `eagle-convert --json` prints it."""
        manifest = self.manifest
        return {
            "folder": str(self.folder),
            **{key: getattr(manifest, key) for key in ("kind", "draft_vocab", "target_vocab", "num_forced")},
            "rows": {"before": self.head.draft_vocab, "after": manifest.draft_vocab},
            "bytes_per_draft_step": {"before": self.bytes_before, "after": self.bytes_after},
            "size_bytes": self.size_bytes,
            "never_counted": manifest.num_uncounted,
            "coverage": manifest.coverage_summary or None,
            "warnings": list(manifest.warnings),
        }

    def check(self) -> None:
        """Read every tensor and refuse what `write` does: values not finite or too large, and a disk that is full."""
        check_room(self.folder, self.size_bytes)
        for plan in self.tensors:
            deque(plan.pieces(), maxlen=0)

    def write(self, force: bool = False) -> Conversion:
        """Write the artifact, whole or not at all, and return it complete; raises as `check` and `atomic_directory`."""
        check_room(self.folder, self.size_bytes)
        with atomic_directory(self.folder, force, MANIFEST_NAME, FILE_NAMES) as folder:
            written = write_safetensors(folder / WEIGHTS_NAME, self.tensors)
            files = {WEIGHTS_NAME: written}
            for name, data in self.files.items():
                (folder / name).write_bytes(data)
                files[name] = {"size_bytes": len(data), "sha256": sha256_of(data)}
            manifest = replace(self.manifest, files=dict(sorted(files.items())))
            if self.lm_head is not None:
                rows = SafetensorsFile(folder / WEIGHTS_NAME).array(names.LM_HEAD)
                manifest = replace(manifest, row_checksums=row_checksums(rows))
            (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
        return replace(self, manifest=manifest)


def convert_head(
    head: str | Path | None, options: ConvertOptions, *, count: Count = count_tokens, say: Say = lambda message: None
) -> tuple[Conversion, ...]:
    """Convert a draft head to slim artifacts: one conversion for each size of draft vocabulary, in the order given.

    Args:
        head: folder or Hub repository; None is the built-in head for SmolLM2-135M-Instruct.
        say: called, with a sentence, for each default that is used and each thing that is done.

    Raises UsageError and OutputExistsError before anything is read; for the inputs and the output the others of
    convert/errors.py, for the vocabulary those of vocab_tools/errors.py.
    """
    done = []
    for plan in plan_conversion(head, options, count=count, say=say):
        say(f"writing {plan.folder}")
        done.append(plan.write(options.force))
    return tuple(done)


def plan_conversion(
    head: str | Path | None, options: ConvertOptions, *, count: Count = count_tokens, say: Say = lambda message: None
) -> tuple[Conversion, ...]:
    """Do everything of `convert_head` but writing; text is counted after all other checks, as it takes longest."""
    name = None if head is None else str(head)
    folders = [options.folder_of(options.name_of(name, size)) for size in options.sizes]
    for folder in folders:
        check_output(folder, options.force, MANIFEST_NAME, FILE_NAMES)
    inputs = _open_inputs(name, options, say)
    request, ranking = options.vocabulary, None
    if options.sizes != ("full",):
        cut = [size for size in options.sizes if isinstance(size, int)]
        ranking = make_ranking(
            inputs.unpadded_head,
            request,
            inputs.tokenizer,
            embedded=inputs.is_builtin,
            offline=options.offline,
            count=count,
            say=say,
            sizes=cut,
        )
    elif not request.is_default or request.force_ids:
        say("--draft-vocab full keeps every row: counts, maps, text and forced ids change nothing")
    plans = []
    for size, folder in zip(options.sizes, folders, strict=True):
        vocab = None if ranking is None or size == "full" else ranking.cut(size, options.coverage)
        plans.append(_plan(inputs, options, ranking, vocab, folder, options.name_of(name, size)))
    return tuple(plans)


def _open_inputs(name: str | None, options: ConvertOptions, say: Say) -> Inputs:
    source = open_head_source(name, options.revision, options.offline, options.subfolder)
    is_builtin = name is None
    if is_builtin:
        say(f"head: built-in {EMBEDDED_HEAD_NAME}")
    head = open_head(source, d2t_form=options.d2t_form, tap_layers=options.tap_layers)
    _check_options(head, options)
    choice = targets.choose_target(head, is_builtin)
    if options.target is not None:
        given = str(options.target)
        is_other = choice is not None and choice.name is not None and choice.name.lower() != given.lower()
        if choice is not None and is_other and not expand_home(given).is_dir():
            doubt = f"the head's target is {choice.name} ({choice.reason}), and {given} was given"
            head = replace(head, warnings=(*head.warnings, doubt))
        choice = targets.TargetChoice(given, "given")
    elif choice is not None:
        say(f"target: {choice.name or 'SmolLM2-135M-Instruct'} ({choice.reason})")
    needs_rows = head.kind != "eagle" and not head.has_lm_head
    if choice is None and needs_rows:
        problem = "has no LM head of its own, so its rows come from the target, and its files do not say which that is"
        raise UsageError.at(head.location, f"{problem}.\nName it with --target.")
    opened = None
    if choice is not None and (needs_rows or _is_wanted(choice, head, options)):
        opened = targets.open_target(choice.name, None, options.offline)
        targets.check_head_fits(head, opened)
    head = settle_embedding(head, None if opened is None else opened.source)
    tokenizer = targets.open_tokenizer(options.tokenizer, opened, head.target_vocab, options.offline)
    targets.check_own_tokenizer(head, tokenizer)
    lm_head = own_lm_head(head) if head.has_lm_head and head.kind != "eagle" else None
    if needs_rows:
        assert opened is not None
        lm_head = fitting(open_target_lm_head(opened.source, offline=options.offline), head, opened.name)
        head = replace(head, warnings=(*head.warnings, *tied_warnings(lm_head, opened.source)))
    return Inputs(head, source, choice, opened, lm_head, tokenizer, is_builtin)


def _check_options(head: DraftHead, options: ConvertOptions) -> None:
    stored, problem = {name.rpartition(".")[2] for name in head.tensors.source.names}, None
    if (head.kind, options.flavour) == ("eagle", "lmdeploy"):
        problem = "LMDeploy's EAGLE-1/2 loader refuses fc.bias, which SGLang needs.\nLeave --for out."
    elif (head.kind, options.flavour) == ("eagle3", "sglang"):
        problem = "SGLang reads an EAGLE-3 head as every artifact is written.\nLeave --for out."
    elif options.d2t_form != "auto" and "d2t" not in stored:
        problem = "has no map.\nLeave --d2t-form out."
    elif head.kind == "dflash" and (options.flavour != "default" or "full" in options.sizes):
        problem = "a DFlash draft has no class name of one engine, and borrows the target's whole LM head as it is.\n"
        problem += "Leave --for out, and give a number of rows with --draft-vocab."
    if problem is not None:
        raise UsageError.at(head.location, problem)
    if head.kind != "eagle" and "full" in options.sizes:
        all_ids(head)


def _is_wanted(choice: targets.TargetChoice, head: DraftHead, options: ConvertOptions) -> bool:
    """Tell whether a target is opened though no row comes from it: it was named, is at hand, or has the tokenizer."""
    if choice.name is None or choice.reason == "given":
        return True
    request = options.vocabulary
    # The ranks of an artifact hold the forced ids of chats already.
    ranked = ranked_manifest(head) if request.is_default else None
    is_ranked = ranked is not None and ranked.tokenizer is not None and request.force_added == "chat"
    return request.token_map is None and options.tokenizer is None and not is_ranked


def _plan(
    inputs: Inputs, options: ConvertOptions, ranking: Ranking | None, vocab: DraftVocab | None, folder: Path, title: str
) -> Conversion:
    head, lm_head = inputs.head, inputs.lm_head
    rows, ids = (head.target_vocab, None) if vocab is None else (len(vocab), vocab.ascending_ids)
    tensors = plan_tensors(head, lm_head, ids)
    config = config_of(head, rows, options.flavour)
    of_target = {} if inputs.target is None else inputs.target.facts
    facts = HeadFacts.of(head, config=config, draft_vocab=rows, **of_target)
    findings = conversion_findings(facts)
    notes = in_words([found for found in findings if options.flavour in ("default", found.engine)])
    manifest = _manifest(inputs, options, ranking, vocab, notes)
    bytes_before, bytes_after = (bytes_per_draft_step(head, number) for number in (head.draft_vocab, rows))
    licence = EMBEDDED_LICENCE if inputs.is_builtin else inputs.source.on_card("license")
    refused = {found.engine for found in findings if found.severity == "error"}
    card = model_card(manifest, title, head.draft_vocab, (bytes_before, bytes_after), licence, refused)
    files = {CONFIG_NAME: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}
    if vocab is not None:
        files[freq_name(rows)] = freq_bytes(vocab.target_ids)
    files[CARD_NAME] = card.encode(errors="backslashreplace")
    return Conversion(folder, head, lm_head, tensors, files, manifest, bytes_before, bytes_after)


def _manifest(
    inputs: Inputs, options: ConvertOptions, ranking: Ranking | None, vocab: DraftVocab | None, notes: Sequence[str]
) -> Manifest:
    head, coverage, warnings = inputs.head, None, [*inputs.head.warnings]
    tokenizer, loaded, ranked = None, inputs.tokenizer, ranked_manifest(head)
    if loaded is not None:
        hashes = {"hash": loaded.tokenizer_hash, "chat_template_hash": loaded.chat_template_hash}
        tokenizer = {**hashes, "vocab_size": loaded.vocab_size, "tokens": len(loaded.real_ids)}
    elif ranked is not None and ranking is not None and options.vocabulary.is_default:
        tokenizer = ranked.tokenizer
    if inputs.target is not None:
        warnings += inputs.target.doubts_of(head)
    if vocab is not None:
        warnings += vocab.warnings
        if tokenizer is None:
            warnings.append("no tokenizer was at hand: end-of-turn and other needed tokens were not looked for")
        measured = None if ranking is None else ranking.coverage(vocab)
        if measured is not None:
            report, note = measured
            warnings += report.warnings
            coverage = {**report.to_json(), "note": note}
    # An artifact was compared with its target when it was made, unless its own warnings say otherwise.
    if inputs.target is None and (ranked is None or NOT_COMPARED in ranked.warnings):
        warnings.append(NOT_COMPARED)
    return Manifest(
        kind=head.kind,
        flavour=options.flavour,
        tool={"name": "eagle-slim", "version": version("eagle-slim")},
        draft_vocab=head.target_vocab if vocab is None else len(vocab),
        target_vocab=head.target_vocab,
        num_forced=0 if vocab is None else vocab.num_forced,
        rank_order_ids=None if vocab is None else vocab.target_ids,
        row_checksums=None,
        head=_describe_head(inputs, options),
        target=_describe_target(inputs),
        lm_head=None if inputs.lm_head is None else inputs.lm_head.describe(head),
        tokenizer=tokenizer,
        vocabulary=None if vocab is None else _describe_vocabulary(vocab),
        tap_layers=head.taps(inputs.target_layers),
        coverage=coverage,
        dropped=dict(sorted(head.dropped.items())),
        warnings=_without_paths([*warnings, *notes], inputs),
    )


def _describe_head(inputs: Inputs, options: ConvertOptions) -> dict[str, Any]:
    source, form = inputs.source, options.d2t_form
    name = source.repo_id or (EMBEDDED_HEAD_NAME if inputs.is_builtin else source.root.resolve().name)
    more = {"built_in": inputs.is_builtin, "subfolder": source.subfolder, "d2t_form": form != "auto" and form}
    account = {"name": name, "repo_id": source.repo_id, "revision": source.commit}
    return account | {key: value for key, value in more.items() if value}


def _describe_vocabulary(vocab: DraftVocab) -> dict[str, Any]:
    """Describe how a vocabulary was ranked; its warnings have a list of their own in the manifest."""
    account = {key: value for key, value in vocab.provenance.items() if key != "warnings"}
    if "sources" in account:
        # Counts from memory and from a file differ in the order of their keys alone.
        try:
            account["sources"] = json.loads(json.dumps(account["sources"], sort_keys=True, allow_nan=False))
        except ValueError as error:
            problem = "the counts' account of their sources holds NaN or Infinity, which are no JSON"
            raise MismatchError(f"{problem}.\nCount again with `eagle-vocab count`.") from error
    return account


def _describe_target(inputs: Inputs) -> dict[str, Any]:
    if inputs.target is not None:
        config = inputs.target.config
        named = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
        return {**inputs.target.provenance, **{key: config[key] for key in named if key in config}}
    if inputs.choice is not None and inputs.choice.reason == targets.RECORDED:
        assert inputs.source.manifest is not None
        return inputs.source.manifest.target
    name = None if inputs.choice is None else inputs.choice.name
    if name is not None and expand_home(name).is_dir():
        return {"repo_id": None, "revision": None, "name": expand_home(name).resolve().name}
    return {"repo_id": name, "revision": None}


def _without_paths(warnings: Sequence[str], inputs: Inputs) -> tuple[str, ...]:
    """Replace paths of this machine in warnings by folder names, as an upload publishes the manifest."""
    opened = (inputs.target and inputs.target.name, inputs.tokenizer and inputs.tokenizer.source, inputs.head.location)
    # A name without folders, such as a dot, tells nothing, and may stand for something else in a sentence.
    local = {place for place in opened if place and "/" in normpath(place) and expand_home(place).exists()}
    for place in sorted(local, key=len, reverse=True):
        warnings = [warning.replace(place, expand_home(place).resolve().name) for warning in warnings]
    return tuple(warnings)


def bytes_per_draft_step(head: DraftHead, rows: int) -> int:
    """Count the bytes of weights that one draft step reads with an LM head of `rows` rows, without the embedding's."""
    # Only a few rows are read of an embedding, and of DSpark's matrix for the token before.
    apart = (names.LM_HEAD, names.EMBEDDING, names.MARKOV_IN, *head.row_tensors)
    total = sum(head.tensors.info(name).size_bytes for name in head.tensors if name not in apart)
    total += rows * sum(head.tensors.info(name).row_bytes for name in head.row_tensors)
    dtype = head.tensors.info(names.LM_HEAD).dtype if head.has_lm_head else head.dtype_name
    return total + rows * head.hidden_size * item_size(dtype)
