"""The inputs of a conversion, each resolved and opened once: head, target, tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eagle_slim.vocab_tools.errors import UsageError
from eagle_slim.vocab_tools.ranking.rank import rank_by_order
from eagle_slim.vocab_tools.tokenizer.load import ForcedIds, forced_ids

from ..artifact import eagle3
from ..errors import UnsupportedHeadError
from ..head.draft_head import DraftHead
from ..head.kept_rows import with_kept_rows
from ..head.open import open_head
from ..head.vocab_map import D2tForm
from ..manifest import Flavour
from ..sources import card
from ..sources.builtin import EMBEDDED_HEAD_NAME, EMBEDDED_LICENCE
from ..sources.source import ResolvedSource
from ..sources.target_lm_head import open_target_lm_head
from . import target as targets
from .doubts import doubts_about
from .vocab_choice import Say, VocabRequest, own_forced_ids, ranked_manifest

if TYPE_CHECKING:
    from eagle_slim.vocab_tools.tokenizer.tokenizer import LoadedTokenizer

    from ..sources.lm_head import TargetLMHead


@dataclass(frozen=True)
class Reading:
    """How the head is read, and for which engine it is written.

    Attributes:
        flavour: the engine that config.json is written for.
        d2t_form, tap_layers: what the user knows better than the head's files.
        offline: use only local files and the Hub cache.
    """

    flavour: Flavour
    d2t_form: D2tForm
    tap_layers: tuple[int, ...] | None
    offline: bool


@dataclass(frozen=True)
class Named:
    """A target or a tokenizer as the user named it, if at all."""

    name: str | Path | None
    revision: str | None

    @property
    def text(self) -> str | None:
        """The name as text."""
        return None if self.name is None else str(self.name)


@dataclass(frozen=True)
class Inputs:
    """Everything that a conversion reads from.

    Attributes:
        head: the head.
        source: where it came from.
        reading: how it was read.
        choice: which target is meant, where that is known.
        target: the target, where it is needed or was named.
        lm_head: the target's LM head, where the rows come from it.
        tokenizer: of the target, where it is at hand.
        is_builtin: whether the head is the built-in one.
        rows_before: rows that the head drafted over before, kept ones left out.
        warnings: about the head's files.
    """

    head: DraftHead
    source: ResolvedSource
    reading: Reading
    choice: targets.TargetChoice | None
    target: targets.Target | None
    lm_head: TargetLMHead | None
    tokenizer: LoadedTokenizer | None
    is_builtin: bool
    rows_before: int
    warnings: tuple[str, ...] = ()

    @property
    def licence(self) -> str | None:
        """The head's licence, as the Hub spells it."""
        return EMBEDDED_LICENCE if self.is_builtin else card.licence(self.source.card)


def open_inputs(
    source: ResolvedSource,
    reading: Reading,
    request: VocabRequest,
    target: Named,
    tokenizer: Named,
    is_builtin: bool,
    needs_kept: Callable[[DraftHead], bool],
    say: Say,
) -> Inputs:
    """Open the head, and of target and tokenizer what the conversion needs.

    `needs_kept` says of the opened head whether rows beyond its draft vocabulary may be wanted, where it has kept some.

    Raises:
        UsageError: no target or tokenizer is known where one is needed, or a revision of something not named.
        SourceError, CheckpointError, UnsupportedHeadError, MismatchError: see convert/errors.py.
    """
    if is_builtin:
        say(f"head: built-in {EMBEDDED_HEAD_NAME}")
    head = open_head(source, d2t_form=reading.d2t_form, tap_layers=reading.tap_layers)
    if head.kind == "eagle" and reading.flavour == "lmdeploy":
        raise UnsupportedHeadError(
            f"{head.location}: LMDeploy's EAGLE-1/2 loader refuses fc.bias, which SGLang needs.\nLeave --for out.",
            path=head.location,
            option="--for",
        )
    rows_before = head.draft_vocab
    if needs_kept(head):
        head = with_kept_rows(head, reading.offline)
    choice = targets.choose_target(target.text, head, is_builtin)
    if choice is not None and choice.reason != "given":
        say(f"target: {choice.name or 'SmolLM2-135M-Instruct'} ({choice.reason})")
    if target.revision is not None and (choice is None or choice.name is None):
        raise UsageError(
            f"--target-revision {target.revision}: no target is named that it could be a revision of.\n"
            "Name the repository with --target.",
            option="--target-revision",
        )
    needs_rows = head.kind == "eagle3" and not head.has_lm_head
    # The ranks of an artifact hold what its tokenizer forces of the tokens of chats.
    ranked = ranked_manifest(head) if request.is_default else None
    is_ranked = ranked is not None and ranked.tokenizer is not None and request.force_added == "chat"
    needs_tokenizer = request.needs_tokenizer and tokenizer.name is None and not is_ranked
    if choice is None and needs_rows:
        raise UsageError(
            f"{head.location}: has no LM head of its own, so its rows come from the target, and neither its files nor "
            "the table of public heads says which that is.\nName it with --target.",
            path=head.location,
            option="--target",
        )
    opened = None
    is_named = choice is not None and (choice.reason == "given" or target.revision is not None)
    if choice is not None and (needs_rows or needs_tokenizer or choice.name is None or is_named):
        opened = targets.open_target(choice, target.revision, reading.offline)
        targets.check_head_fits(head, opened)
    loaded = targets.open_tokenizer(tokenizer.text, tokenizer.revision, opened, head.target_vocab, reading.offline)
    lm_head = None
    if needs_rows:
        assert opened is not None
        # Now, since ranking the vocabulary may take hours: the weights are at hand, and they fit.
        lm_head = open_target_lm_head(opened.source, offline=reading.offline)
        targets.lm_head_rows(head, lm_head, f"target {opened.name}")
    doubts = tuple(doubts_about(head, source))
    return Inputs(head, source, reading, choice, opened, lm_head, loaded, is_builtin, rows_before, doubts)


def check_sizes(
    inputs: Inputs, request: VocabRequest, sizes: Sequence[int | Literal["full"] | None]
) -> dict[int | Literal["full"] | None, int | None]:
    """Refuse a size that cannot be, before anything is counted.

    Returns:
        for each size the number of forced ids among it; None where only the ranking tells.

    Raises as `rank_by_order` and `eagle3.all_ids`.
    """
    head = inputs.head
    if "full" in sizes:
        eagle3.all_ids(head)
    trained = head.trained_ids
    numbers = [size for size in sizes if isinstance(size, int) and (trained is None or size != len(trained))]
    num_forced: dict[int | Literal["full"] | None, int | None] = {size: 0 if size == "full" else None for size in sizes}
    if not numbers:
        return num_forced
    forced = _forced(inputs, request)
    for size in numbers:
        num_forced[size] = rank_by_order(None, size, inputs.tokenizer, forced, head.target_vocab, trained).num_forced
    return num_forced


def num_rankable(inputs: Inputs, request: VocabRequest) -> int:
    """How many ids a ranking of the head can hold at most: tokens that it was trained on."""
    head = inputs.head
    return len(
        rank_by_order(None, None, inputs.tokenizer, _forced(inputs, request), head.target_vocab, head.trained_ids)
    )


def _forced(inputs: Inputs, request: VocabRequest) -> ForcedIds | tuple[int, ...]:
    """The ids that any size keeps, as far as they are known before ranking."""
    if inputs.tokenizer is not None:
        return forced_ids(inputs.tokenizer, request.force_added, request.force_ids)
    if request.is_default and (ranked := ranked_manifest(inputs.head)) is not None:
        return own_forced_ids(ranked) + request.force_ids
    return request.force_ids
