"""A screen in front of the LM head: a cheap score of every row says which few rows are scored exactly.

With C the second moment of the states h that a head hands to its LM head W, damped, the best form of rank r of
``W C^(1/2)`` is ``U S V^T`` (singular value decomposition). Then ::

    A = U S = W P    [rows, r]          P = C^(1/2) V     [hidden, r]
    W h ~ A (B h)                       B = V^T C^(-1/2)  [r, hidden]

so that A, at r / hidden of the LM head's bytes, ranks all rows for a state. SpecVocab (arXiv:2602.13836) chooses
candidates by a down-projection that it trains; this one is computed.

Candidates are the best ``per_group`` rows of each of ``groups`` groups, row i in group ``i % groups``. Example: 5 rows
in 2 groups, one of each: rows 0, 2, 4 and rows 1, 3; scores 1, 5, 3, 2, 3 choose rows 2 (it ties with 4) and 1.
Log-probabilities are over the candidates alone, and over the rows that joined a sequence (`follow`), which are all
scored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from eagle_slim.convert.head.open import DraftHead
from eagle_slim.convert.head.screen_file import DOWN, PROJECT, ROWS, has_screen, open_screen_file
from safetensors.torch import load_file
from torch import Tensor

from ..errors import UsageError, check_choice, misfit
from ..tree import ranked_topk

GROUPS, PER_GROUP = 128, 2
"""Of a screen that does not say otherwise."""


@dataclass(frozen=True, eq=False)
class Screen:
    """A screen of LM-head rows, on one device. Raises `UsageError` for tensors that do not fit each other."""

    rows: Tensor
    """A, [rows, rank], of the LM head's type."""
    down: Tensor
    """B, float32 [rank, hidden]."""
    project: Tensor
    """P, float32 [hidden, rank]: of a row W_i of the LM head, ``A_i = W_i P``."""
    groups: int = GROUPS
    per_group: int = PER_GROUP

    def __post_init__(self) -> None:
        rank = self.rows.shape[-1]
        for name, tensor, shape in (
            ("rows", self.rows, (len(self.rows), rank)), ("down", self.down, (rank, self.down.shape[-1])),
            ("project", self.project, (self.down.shape[-1], rank)),
        ):  # fmt: skip
            if tensor.shape != shape:
                raise misfit(f"screen.{name}", list(shape), list(tensor.shape), "tensor")
        if self.groups < 1 or self.per_group < 1:
            raise misfit("screen.groups and per_group", "at least 1", (self.groups, self.per_group), "field")

    @property
    def rank(self) -> int:
        """Columns of A."""
        return self.rows.shape[1]

    @property
    def num_candidates(self) -> int:
        """Rows that are scored exactly: `per_group` of each group, or all that it has."""
        whole, rest = divmod(len(self.rows), self.groups)
        small, large = min(whole, self.per_group), min(whole + 1, self.per_group)
        return small * (self.groups - rest) + large * rest

    def scores(self, hidden: Tensor) -> Tensor:
        """Screen all rows for states [..., hidden] of the LM head's type: float32 [..., rows]."""
        return F.linear(F.linear(hidden, self.down.to(hidden.dtype)), self.rows).float()

    def candidates(self, hidden: Tensor) -> Tensor:
        """Choose rows for states [..., hidden]: int64 [..., groups * per_group], as `best_of_groups`."""
        return best_of_groups(self.scores(hidden), self.groups, self.per_group)

    def over(self, own_ids: np.ndarray, ids: Tensor, lm_head: Tensor) -> Screen:
        """The screen of other rows, on their device and of their type.

        ``own_ids`` int64 [rows]: target id of each row of this one; ``ids`` int64 [draft_vocab] and ``lm_head``
        [draft_vocab, hidden]: of the others. Ids that this one lacks get ``W_i P``.
        """
        place = np.full(1 + max(int(own_ids.max()), int(ids.max())), -1, dtype=np.int64)
        place[own_ids] = np.arange(len(own_ids))
        known = torch.from_numpy(place[ids.cpu().numpy()]).to(ids.device)
        own, down, project = (tensor.to(ids.device) for tensor in (self.rows, self.down, self.project))
        rows = own[known.clamp(min=0)].to(lm_head.dtype)
        unknown = known < 0
        rows[unknown] = (lm_head[unknown].float() @ project).to(lm_head.dtype)
        return replace(self, rows=rows, down=down, project=project)


def best_of_groups(scores: Tensor, groups: int, per_group: int) -> Tensor:
    """The best ``per_group`` rows of each group by (score descending, row ascending), row i in group ``i % groups``.

    ``scores``: float [..., rows] without NaN. Returns int64 [..., groups * per_group], group by group, best first; -1
    where a group has no more rows.
    """
    num_rows = scores.shape[-1]
    depth = max(-(-num_rows // groups), per_group)
    padded = F.pad(scores.float(), (0, depth * groups - num_rows), value=float("-inf"))
    # Padding follows a group's real rows, so that of equal scores those come first.
    _, place = ranked_topk(padded.unflatten(-1, (depth, groups)).transpose(-1, -2), per_group)
    rows = place * groups + torch.arange(groups, device=scores.device)[:, None]
    return torch.where(rows < num_rows, rows, -1).flatten(-2)


def check_screen(screen: bool, head: DraftHead, drafter: object, draft_weights: str = "auto") -> None:
    """Raise `UsageError` unless ``screen`` is True or False, and for True what cannot be.

    That is a head without a screen, the persistent kernel as the ``drafter``, and ``draft_weights`` "fp8", which are
    the kernel's.
    """
    check_choice("screen", screen, (True, False))
    if not screen:
        return
    if not has_screen(head):
        raise UsageError(
            f"screen = True, and {head.location} has no screen. Make one with eagle-screen, or leave screen out.",
            option="screen", missing="screen", found=head.location,
        )  # fmt: skip
    for option, value, of_kernel in (("drafter", drafter, "triton"), ("draft_weights", draft_weights, "fp8")):
        if value == of_kernel:
            raise screened_kernel(option, of_kernel)


def screened_kernel(option: str, found: str) -> UsageError:
    """The error for an ``option`` whose value ``found`` is the persistent kernel's, together with a screen."""
    return UsageError(
        f"{option} = {found!r} is for the persistent kernel, which drafts without a screen (docs/screen.md). Take "
        "drafter = 'reference' and the model's own type of weights, or leave screen out.",
        option=option, found=found, expected="reference" if option == "drafter" else "auto",
    )  # fmt: skip


def load_screen(folder: Path, head: DraftHead, offline: bool = False) -> Screen:
    """Load the screen beside a head's weights, rows in the order of the head's, on the CPU.

    That of an artifact on the Hub is fetched now, unless ``offline``.
    Raises as `open_screen_file`: `MismatchError` for one of another head or size, `ArtifactError` for another format,
    `CheckpointError` for a missing or damaged file.
    """
    file = open_screen_file(folder, head, offline)
    tensors, found = load_file(file.path), file.header.metadata
    return Screen(tensors[ROWS], tensors[DOWN], tensors[PROJECT], int(found["groups"]), int(found["per_group"]))
