"""List the candidates of a comparison: every head over every draft vocabulary with every tree, and plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from eagle_slim.convert.sources.builtin import embedded_target_folder
from eagle_slim.convert.vocabulary_choice import Ranking, VocabRequest, make_ranking
from eagle_slim.vocab_tools.tokenizer import load_tokenizer
from numpy.typing import NDArray

from ..errors import NothingToFollowError, UsageError
from ..loading import OpenedHead
from ..model import SpeculativeModel
from .options import CompareOptions

PLAIN = "plain"
_DEFAULT_SIZES = (32768, 16384, 8192, 4096, 2048)

Say = Callable[[str], object]


@dataclass(frozen=True)
class Candidate:
    """A head over a draft vocabulary with a tree; the defaults are plain decoding."""

    label: str
    """Unique name."""
    size: str
    """The draft vocabulary in words, such as "4,096" or "full (49,152)"."""
    model: SpeculativeModel = field(repr=False, compare=False)
    draft_vocab: int = 0
    draft_bytes: int = 0
    """See `Drafter.draft_bytes`."""
    follow: str | None = None
    """"prompt" where ids of the prompt join the draft vocabulary."""
    follow_rows: int = 0
    """Most ids that join."""
    head: str = ""
    tree: tuple[int, int, int] = (0, 0, 1)
    """Depth, top_k and total_tokens."""

    @classmethod
    def of(cls, model: SpeculativeModel, size: str, head: str) -> Candidate:
        """Describe a model whose draft vocabulary is called ``size``."""
        weights, tree = model.drafter.weights, model.drafter.tree
        return cls(
            size, size, model, model.draft_vocab, model.drafter.draft_bytes,
            None if weights.follow is None else "prompt", weights.num_joining, head,
            (0, 0, 0) if model.is_tree_sized else (tree.depth, tree.top_k, tree.total_tokens),
        )  # fmt: skip

    @property
    def is_plain(self) -> bool:
        """Whether it is plain decoding."""
        return not self.draft_vocab

    @property
    def tree_words(self) -> str:
        """The tree as depth/top_k/nodes, or "auto"."""
        return "{}/{}/{}".format(*self.tree) if self.tree[2] else "auto"

    def to_json(self) -> dict[str, Any]:
        """Return what identifies it as plain values."""
        names = ("size", "draft_vocab", "draft_bytes", "follow", "follow_rows", "head")
        tree = dict(zip(("depth", "top_k", "total_tokens"), self.tree, strict=True))
        return {"candidate": self.label, **{name: getattr(self, name) for name in names}, **tree}


@dataclass(frozen=True)
class CoverageCurve:
    """Share of tokens inside a draft vocabulary, against its size: both sequences of one length."""

    name: str
    sizes: tuple[int, ...]
    covered: tuple[float, ...]

    @classmethod
    def of_answers(cls, rank_order: NDArray[np.int64], token_ids: Sequence[int]) -> CoverageCurve:
        """Measure the share of tokens that is among the first N ids of a ranking, for N from 64 to all of them."""
        rank = np.full(max(int(rank_order.max()), max(token_ids, default=0)) + 1, len(rank_order), dtype=np.int64)
        rank[rank_order] = np.arange(len(rank_order))
        ranks = np.sort(rank[np.asarray(token_ids, dtype=np.int64)])
        sizes = np.unique(np.geomspace(min(64, len(rank_order)), len(rank_order), 48).round().astype(np.int64))
        covered = np.searchsorted(ranks, sizes, side="left") / max(len(ranks), 1)
        return cls("these answers", tuple(sizes.tolist()), tuple(np.round(covered, 6).tolist()))

    @classmethod
    def of_held_out(cls, coverage: Mapping[str, Any]) -> CoverageCurve:
        """Take the last source's curve (the mean, where there are several) from the JSON of a `CoverageReport`."""
        source = coverage["sources"][-1]
        return cls(f"{source['name']} ({source['part']})", tuple(coverage["sizes"]), tuple(source["coverage"]))


@dataclass(frozen=True)
class RankedHead:
    """A head of a comparison, and the ranking that its sizes are cut from; None where it is compared whole."""

    name: str
    model: SpeculativeModel
    opened: OpenedHead
    ranking: Ranking | None

    @classmethod
    def of(cls, name: str, model: SpeculativeModel, options: CompareOptions, say: Say) -> RankedHead:
        """Rank a head's rows as the options ask, or by its own ranking.

        Raises `UsageError` where the sizes need a ranking and there is none.
        """
        opened = model.opened
        assert opened is not None
        head, embedded = opened.head, opened.is_embedded
        request = VocabRequest(counts=tuple(options.counts), token_map=options.token_map)
        if request.is_default and not embedded and opened.rank_order is None:
            if tuple(options.sizes or ()) == ("full",):
                return cls(name, model, opened, None)
            raise UsageError(
                f"Head {head.location} has no ranking of its own. Give --counts or --token-map, or convert it first; "
                "--sizes full needs no ranking."
            )
        # A head's own ranking begins with the ids that its tokenizer forced.
        is_own = request.is_default and not embedded
        source = None if is_own else embedded_target_folder() if embedded else model.tokenizer_source
        if source is None and request.counts:
            raise UsageError(
                "--counts needs the files of the target's tokenizer, and there are none. Give --token-map."
            )
        tokenizer = None if source is None else load_tokenizer(source, offline=opened.offline)
        ranking = make_ranking(head, request, tokenizer, embedded=embedded, offline=True, count=_never, say=say)
        return cls(name, model, opened, ranking)

    def sizes(self, wanted: Sequence[Any] | None) -> list[Candidate]:
        """Return a candidate for each size; sizes that are the same are one. Raises `UsageError` for one too large."""
        if self.ranking is None:
            return [self._named(self.model.with_draft_vocab(None))]
        everything = self.model.draft_vocab
        if wanted is None:
            smallest = self.ranking.cut(None).num_forced
            wanted = ("full", *(size for size in _DEFAULT_SIZES if smallest <= size < everything))
        cuts = (None if size in ("full", everything) else self.ranking.cut(int(size)) for size in wanted)
        models = {model.draft_vocab: model for model in map(self.model.with_draft_vocab, cuts)}
        return [self._named(model) for model in models.values()]

    def follow(self, cuts: Sequence[Candidate], options: CompareOptions, say: Say) -> list[Candidate]:
        """Return each size alone and following the prompt, as asked; a size that nothing can join stays alone.

        Raises `UsageError` where nothing can join any of them.
        """
        order = None if self.ranking is None else self.ranking.cut(None).target_ids
        found, refusal = [], None
        for cut in cuts:
            own = [cut] if None in options.follow else []
            if "prompt" in options.follow:
                try:
                    model = cut.model.with_follow("prompt", options.follow_rows, order)
                    own.append(Candidate.of(model, f"{cut.size} + prompt", self.name))
                except NothingToFollowError as error:
                    refusal, own = error, [cut]
                    say(f"{cut.size}: no id is left that could join it; it is compared as it is")
            found += own
        if refusal is not None and not any(each.follow for each in found):
            raise refusal
        return found

    def curves(self, token_ids: Sequence[int]) -> list[CoverageCurve]:
        """Return the coverage of tokens, and of held-out text: measured, or else as the manifest records it."""
        measured, curves = None, []
        if self.ranking is not None:
            ranked = self.ranking.cut(None)
            curves.append(CoverageCurve.of_answers(ranked.target_ids, token_ids))
            measured = self.ranking.coverage(ranked)
        recorded = self.opened.coverage if measured is None else measured[0].to_json()
        return curves if recorded is None else [*curves, CoverageCurve.of_held_out(recorded)]

    def _named(self, model: SpeculativeModel) -> Candidate:
        target_vocab, size = int(model.target.text_config.vocab_size), f"{model.draft_vocab:,}"
        if model.draft_vocab == target_vocab:
            size = f"full ({size})"
        elif model.draft_vocab == self.model.draft_vocab:
            size = f"all {size} of {target_vocab:,}"
        return Candidate.of(model, size, self.name)


def rank_heads(models: Sequence[SpeculativeModel], options: CompareOptions, say: Say) -> list[RankedHead]:
    """Name and rank the heads of a comparison.

    Raises `UsageError` for models that `SpeculativeModel.from_pretrained` did not build, for models of several targets,
    and for a head given twice.
    """
    if not models or any(each.opened is None or each.target.model is not models[0].target.model for each in models):
        raise UsageError(
            "models: a comparison takes one or more, built by from_pretrained over the same loaded target."
        )
    locations = [model.opened.head.location for model in models if model.opened is not None]
    if len(set(locations)) < len(locations):
        raise UsageError(f"models: each head is compared once; got {', '.join(locations)}.")
    names = [Path(location).name for location in locations]
    if len(set(names)) < len(names):
        names = locations
    return [RankedHead.of(name, model, options, say) for name, model in zip(names, models, strict=True)]


def find_candidates(heads: Sequence[RankedHead], options: CompareOptions, say: Say) -> list[Candidate]:
    """List the sizes of each head, alone and following the prompt, with each tree; equal sizes are listed once."""
    found = []
    for head in heads:
        for cut in head.follow(head.sizes(options.sizes), options, say):
            for tree in options.trees or [head.model.drafter.tree]:
                shaped = Candidate.of(cut.model.with_tree(tree), cut.size, head.name)
                shape = f", tree {shaped.tree_words}" if len(options.trees or ()) > 1 else ""
                prefix = f"{head.name}: " if len(heads) > 1 else ""
                found.append(replace(shaped, label=f"{prefix}{cut.size}{shape}"))
    return found


def _never(*_: Any) -> Any:
    raise AssertionError("a ranking is given")
