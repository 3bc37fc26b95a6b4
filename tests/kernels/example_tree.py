"""The worked example of `eagle_slim.runtime.tree`: ten candidates A to J, as tensors for each stage."""

from __future__ import annotations

import torch

TOP_K = 2
LETTERS = "ABCDEFGHIJ"
SCORES = torch.tensor([-0.5, -1.5, -1.5, -2.0, -1.75, -5.5, -2.0, -4.5, -2.75, -3.75])
LEVELS = (SCORES[:2], SCORES[2:6], SCORES[6:])
"""Candidates of the extend pass (A, B), of level 1 (C to F) and of level 2 (G to J)."""
FRONTIERS = ("AB", "CE", "GI")
"""The nodes of levels 1 and 2, and of a level 3, if there were one."""
CHAINS = {"A": [], "B": [], "C": [0], "E": [1], "G": [0, 2], "I": [1, 3]}
"""Tree slots of each node's ancestors: A lies in slot 0, B in slot 1, C in slot 2, E in slot 3."""
