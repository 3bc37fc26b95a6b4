"""The inputs of a conversion, each resolved and opened once: head, target, tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle_slim.vocab_tools.errors import UsageError
from eagle_slim.vocab_tools.tokenizer.tokenizer import LoadedTokenizer

from ..errors import UnsupportedHeadError
from ..head.draft_head import DraftHead
from ..head.open import open_head
from ..rows.lm_head import LmHead, fitting
from ..rows.target import open_target_lm_head
from ..sources import card
from ..sources.builtin import EMBEDDED_HEAD_NAME, EMBEDDED_LICENCE
from ..sources.source import ResolvedSource, open_head_source
from . import target as targets
from .options import ConvertOptions
from .vocab_choice import Say, ranked_manifest

if TYPE_CHECKING:
    from ..artifact.gguf import GgufChoice


@dataclass(frozen=True)
class Inputs:
    """Everything that a conversion reads from.

    Attributes:
        source: where the head came from.
        choice: which target is meant, where that is known.
        target: the target, where it is needed or was named.
        lm_head: the target's LM head, where the rows come from it.
        tokenizer: of the target, where it is at hand.
        gguf: the GGUF files to write; None for none.
    """

    head: DraftHead
    source: ResolvedSource
    options: ConvertOptions
    choice: targets.TargetChoice | None
    target: targets.Target | None
    lm_head: LmHead | None
    tokenizer: LoadedTokenizer | None
    is_builtin: bool
    gguf: GgufChoice | None = None

    @property
    def licence(self) -> str | None:
        """The head's licence, as the Hub spells it."""
        return EMBEDDED_LICENCE if self.is_builtin else card.licence(self.source.card)


def open_inputs(name: str | None, options: ConvertOptions, say: Say) -> Inputs:
    """Open the head of this name, and of target and tokenizer what the conversion needs.

    Raises:
        UsageError: no target or tokenizer is known where one is needed, or a revision of something not named.
        SourceError, CheckpointError, UnsupportedHeadError, MismatchError: see convert/errors.py.
    """
    source = open_head_source(
        name, options.revision, options.offline, subfolder=options.subfolder, weights_file=options.weights_file
    )
    is_builtin, request, revision = name is None, options.vocabulary, options.target_revision
    if is_builtin:
        say(f"head: built-in {EMBEDDED_HEAD_NAME}")
    head = open_head(source, d2t_form=options.d2t_form, tap_layers=options.tap_layers)
    if head.kind == "eagle" and options.flavour == "lmdeploy":
        raise UnsupportedHeadError.at(
            head.location,
            "LMDeploy's EAGLE-1/2 loader refuses fc.bias, which SGLang needs.\nLeave --for out.",
            option="--for",
        )
    if head.kind == "dflash" and (options.flavour != "default" or "full" in options.sizes):
        raise UsageError(
            f"{head.location}: a DFlash draft has no class name of one engine, and borrows the target's whole LM head "
            "as it is.\nLeave --for out, and give a number of rows with --draft-vocab.",
            option="--for" if options.flavour != "default" else "--draft-vocab",
        )
    if head.kind == "eagle3" and options.flavour == "sglang":
        say("--for sglang changes nothing of an EAGLE-3 head: SGLang reads it as every artifact is written")
    _refuse_to_grow(head, options)
    choice = targets.choose_target(None if options.target is None else str(options.target), head, is_builtin)
    if choice is not None and choice.reason != "given":
        say(f"target: {choice.name or 'SmolLM2-135M-Instruct'} ({choice.reason})")
    if revision is not None and (choice is None or choice.name is None):
        raise UsageError(
            f"--target-revision {revision}: no target is named that it could be a revision of.\n"
            "Name the repository with --target.",
            option="--target-revision",
        )
    needs_rows = head.kind != "eagle" and not head.has_lm_head
    # The ranks of an artifact hold what its tokenizer forces of the tokens of chats.
    ranked = ranked_manifest(head) if request.is_default else None
    is_ranked = ranked is not None and ranked.tokenizer is not None and request.force_added == "chat"
    needs_tokenizer = request.token_map is None and options.tokenizer is None and not is_ranked
    if choice is None and needs_rows:
        raise UsageError.at(
            head.location,
            "has no LM head of its own, so its rows come from the target, and neither its files nor "
            "the table of public heads says which that is.\nName it with --target.",
            option="--target",
        )
    opened = None
    is_named = choice is not None and (choice.reason == "given" or revision is not None)
    if choice is not None and (needs_rows or needs_tokenizer or choice.name is None or is_named or options.gguf):
        opened = targets.open_target(choice, revision, options.offline)
        targets.check_head_fits(head, opened)
    loaded = targets.open_tokenizer(
        options.tokenizer, options.tokenizer_revision, opened, head.target_vocab, options.offline
    )
    targets.check_own_tokenizer(head, loaded)
    # Before anything large is fetched or counted.
    gguf = None
    if options.gguf:
        from ..artifact.gguf import choose_gguf

        gguf = choose_gguf(head, options.gguf, None if opened is None else opened.num_layers, loaded)
    lm_head = None
    if needs_rows:
        assert opened is not None
        # Checked now, since ranking the vocabulary may take hours: the weights are at hand, and they fit.
        lm_head = fitting(open_target_lm_head(opened.source, offline=options.offline), head, opened.name)
    return Inputs(head, source, options, choice, opened, lm_head, loaded, is_builtin, gguf)


def _refuse_to_grow(head: DraftHead, options: ConvertOptions) -> None:
    """Refuse more rows than an artifact holds; UsageError."""
    manifest = head.manifest
    if (
        manifest is None
        or head.trained_ids is None
        or head.draft_vocab == (manifest.vocabulary or {}).get("trained_ids")
    ):
        return
    sizes = [head.target_vocab if size == "full" else size for size in options.sizes]
    wanted = [size for size in sizes if isinstance(size, int)]
    if wanted and max(wanted) > head.draft_vocab:
        original = manifest.head.get("repo_id") or manifest.head.get("name")
        raise UsageError.at(
            head.location,
            f"an artifact with {head.draft_vocab} rows, of which no larger one can be made: "
            f"{max(wanted)} were asked for.\nConvert {original}, which it was made from.",
            size=max(wanted),
            rows=head.draft_vocab,
        )
