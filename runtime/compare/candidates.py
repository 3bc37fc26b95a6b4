"""List the candidates of a comparison: heads over draft vocabularies with trees and windows, and plain decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..model import SpeculativeModel
from .comparison_options import CompareOptions

PLAIN = "plain"
_DEFAULT_SIZES = (32768, 16384, 8192, 4096, 2048)


@dataclass(frozen=True)
class Candidate:
    """A head over a draft vocabulary with a tree; the defaults are plain decoding."""

    label: str
    size: str
    """The draft vocabulary in words, such as "4,096" or "full (49,152)"."""
    model: SpeculativeModel = field(repr=False, compare=False)
    draft_vocab: int = 0
    draft_bytes: int = 0
    head: str = ""
    tree: tuple[int, int, int] = (0, 0, 1)
    """Depth, top_k and total_tokens; zeros where each step chooses its tree."""
    draft_window: int | None = None
    """Tokens that drafts look back on; None for all."""

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
        names = ("size", "draft_vocab", "draft_bytes", "head", "draft_window")
        tree = dict(zip(("depth", "top_k", "total_tokens"), self.tree, strict=True))
        return {"candidate": self.label, **{name: getattr(self, name) for name in names}, **tree}


def find_candidates(models: Sequence[SpeculativeModel], options: CompareOptions) -> list[Candidate]:
    """List the sizes of each head, equal ones once, with each tree. Raises `UsageError` for what cannot be compared."""
    if not models or any(each.opened is None or each.target.model is not models[0].target.model for each in models):
        raise UsageError("models: a comparison takes those that from_pretrained built over the same loaded target.")
    locations = [model.opened.head.location for model in models if model.opened is not None]
    # "." and "./slim" are folders of a name, too.
    places = [Path(each).resolve() if Path(each).is_dir() else Path(each) for each in locations]
    if len(set(places)) < len(places):
        raise UsageError(f"models: each head is compared once; got {', '.join(locations)}.")
    names = [place.name for place in places]
    if len(set(names)) < len(names):
        names = locations
    candidates = []
    for name, model in zip(names, models, strict=True):
        prefix = f"{name}: " if len(models) > 1 else ""
        # Large trees, which tell sizes apart, make a CPU slower than plain decoding.
        is_chosen = model.is_tree_sized and model.target.device.type == "cpu"
        trees, seen = options.trees or [None if is_chosen else model.drafter.tree], [model.draft_window]
        if options.windows is not None:
            seen = [model.with_draft_window(window).draft_window for window in options.windows]
        windows = dict.fromkeys(seen)
        for cut, tree, window in product(_cut(model, options), trees, windows):
            shaped, size = cut.with_tree(tree).with_draft_window(window or 0), _words(cut.draft_vocab, model)
            shape = (0, 0, 0) if tree is None else astuple(tree)
            each = Candidate("", size, shaped, cut.draft_vocab, shaped.drafter.draft_bytes, name, shape, window)
            suffix = f", tree {each.tree_words}" if len(trees) > 1 else ""
            suffix += f", window {'all' if window is None else f'{window:,}'}" if len(windows) > 1 else ""
            candidates.append(replace(each, label=f"{prefix}{size}{suffix}"))
    return candidates


def _cut(model: SpeculativeModel, options: CompareOptions) -> Iterable[SpeculativeModel]:
    assert model.opened is not None
    sizes, ranking = options.sizes, model.opened.ranking
    if sizes is None:
        smallest = model.draft_vocab if ranking is None else ranking.num_forced
        sizes = ("full", *(size for size in _DEFAULT_SIZES if smallest <= size < model.draft_vocab))
    cuts = [model.with_draft_vocab(None if isinstance(size, str) else size) for size in sizes]
    return {each.draft_vocab: each for each in cuts}.values()


def _words(draft_vocab: int, model: SpeculativeModel) -> str:
    target_vocab = int(model.target.text_config.vocab_size)
    if draft_vocab == target_vocab:
        return f"full ({draft_vocab:,})"
    return f"all {draft_vocab:,} of {target_vocab:,}" if draft_vocab == model.draft_vocab else f"{draft_vocab:,}"
