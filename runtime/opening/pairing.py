"""Whether a head, a draft vocabulary and a tokenizer belong to a target, by their files alone."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from eagle_slim.convert.heads.draft_head import DraftHead, has_padding_of
from eagle_slim.convert.heads.taps import default_taps
from eagle_slim.vocab_tools.errors import TokenizerError
from eagle_slim.vocab_tools.tokenizer import load_tokenizer

from ..errors import PairingError
from .heads import OpenedHead


def resolve_tap_layers(head: DraftHead, num_layers: int) -> tuple[int, ...] | None:
    """Return the decoder layers whose inputs the head reads; None for the last hidden state. Raises as `taps`."""
    taps = head.taps(num_layers)
    if head.kind == "eagle" or taps == ():
        return None
    return default_taps(num_layers) if taps is None else taps


def check_pairing(head: DraftHead, text_config: Any, target_name: str) -> None:
    """Raise `PairingError`, naming both sides' values, for a head that does not fit a target's (text) configuration."""
    hidden, vocab = int(text_config.hidden_size), int(text_config.vocab_size)
    problem = None
    highest = -1 if head.draft_ids_to_target is None else int(head.draft_ids_to_target.max())
    taps = resolve_tap_layers(head, int(text_config.num_hidden_layers))
    fc_columns = head.tensors.shape("fc.weight")[1] if "fc.weight" in head.tensors else None
    if head.target_hidden_size != hidden:
        problem = f"the head was trained for a hidden size of {head.target_hidden_size}, the target has {hidden}"
    elif not has_padding_of(head.target_vocab, vocab):
        problem = f"the head's vocab_size is {head.target_vocab}, the target's {vocab}"
    elif highest >= vocab:
        form = "d2t may have the other form (d2t_form of open_head)"
        problem = f"the head drafts id {highest}, the target has {vocab} tokens; {form}"
    elif taps is not None and fc_columns not in (None, len(taps) * hidden):
        problem = f"fc.weight takes {fc_columns} features, and {len(taps)} tap layers of width {hidden} give other ones"
    if problem is not None:
        where = f"Head {head.location} and target {target_name} do not belong together"
        raise PairingError(f"{where}: {problem}. Give the target that the head was trained for.")


def check_tokenizer(made_with: str | None, target_hash: str | None, what: str, target_name: str) -> None:
    """Raise `PairingError` when both tokenizer hashes are known and differ; ``what`` was made with the first."""
    if made_with is not None and target_hash is not None and made_with != target_hash:
        raise PairingError(
            f"{what} was made with another tokenizer than that of target {target_name}: expected {target_hash[:23]}…, "
            f"found {made_with[:23]}…. Its ids are other tokens there. Convert or rank for this target."
        )


def check_tokenizers(head: OpenedHead, target_name: str, target_hash: str | None, given: Any | None) -> str | None:
    """Check the target's and the ``given`` tokenizer against the head's; return the hash of the one that counts."""
    given_hash, source = None, getattr(given, "name_or_path", None)
    # Its files may not be on this machine.
    with suppress(TokenizerError):
        given_hash = load_tokenizer(source, offline=True).tokenizer_hash if source else None
    for found in (target_hash, given_hash):
        check_tokenizer(head.tokenizer_hash, found, head.head.location, target_name)
    return given_hash or target_hash or head.tokenizer_hash


def check_vocabulary(vocab: object, target_hash: str | None, target_name: str) -> None:
    """Raise `PairingError` when a `DraftVocab` says that it was made with another tokenizer than the target's."""
    made_with = getattr(vocab, "provenance", {}).get("tokenizer_hash")
    check_tokenizer(made_with, target_hash, "The draft vocabulary", target_name)
