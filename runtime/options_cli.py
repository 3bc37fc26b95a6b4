"""Options that load a head with its target, shared by the commands that generate."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import click
from eagle_slim.vocab_tools.common_cli import Decorated, choice_option, note, read_by
from eagle_slim.vocab_tools.hub import show_downloads

from .settings import TreeConfig

if TYPE_CHECKING:
    from .model import SpeculativeModel

# Parameters bear the names of the arguments of `SpeculativeModel.from_pretrained`.
_OPTIONS = (
    click.argument("head", required=False, metavar="[HEAD]"),
    click.option("--target", metavar="T", help="Target model: Hub id or folder. Default: the one the head names."),
    click.option("--revision", metavar="REV", help="Branch, tag or commit of the target."),
    choice_option(
        "--dtype",
        ("auto", "float32", "bfloat16", "float16"),
        "Type of target and drafter; auto: the files' own, or float32 on a CPU without instructions for it.",
    ),
    click.option("--device", metavar="D", help="Device, such as cuda:1 or cpu. Default: the first GPU, else the CPU."),
    choice_option(
        "--drafter",
        ("auto", "reference", "triton"),
        "The persistent kernel (triton) or plain PyTorch; auto uses the kernel if GPU and head allow it.",
    ),
    choice_option(
        "--draft-weights",
        ("auto", "bf16", "fp8"),
        "Type of the drafter's weights: the model's own (auto), or FP8, half the bytes, on GPUs from sm_89 on.",
    ),
    choice_option(
        "--target-weights",
        ("auto", "fp8"),
        "Weights of the target: as its files have them (auto), or quantised to FP8, on GPUs from sm_89 on.",
    ),
    click.option("--offline", is_flag=True, help="Use only what is on this machine."),
)
_LOADING = ("revision", "dtype", "device", "drafter", "draft_weights", "target_weights", "offline")


_OF_DRAFTS = (
    click.option("--depth", type=click.IntRange(min=0), default=5, show_default=True, help="Levels of the draft tree."),
    click.option("--draft-top-k", type=click.IntRange(1), default=10, show_default=True, help="Children per node."),
    click.option(
        "--total-tokens", type=click.IntRange(2), help="Nodes of a tree. Default: by step on a GPU, 4 on a CPU."
    ),
    click.option(
        "--draft-vocab",
        metavar="N",
        callback=read_by(lambda n: None if n == "full" else int(n), "8192 or full"),
        help="Draft over the best N ids only; `full`, the default, is all of the head's.",
    ),
    click.option(
        "--draft-window",
        type=click.IntRange(0),
        metavar="N",
        help="Draft from the last N tokens only; 0: from all. Default: what the head was trained on, by config.json.",
    ),
)
partial_verification_option = click.option(
    "--partial-verification",
    type=click.Choice(["exact", "lossy"]),
    help="For very long prompts: run ahead on a part of the KV cache; `lossy` may change the text.",
)


def _adding(options: Sequence[Callable[[Any], Any]]) -> Callable[[Decorated], Decorated]:
    return lambda function: reduce(lambda inner, option: option(inner), reversed(options), function)


model_options = _adding(_OPTIONS)
"""Adds HEAD, and the options that `load_heads` takes."""
draft_options = _adding(_OF_DRAFTS)
"""Adds the options of drafts that `load_model` takes."""


def _refuse(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(f"{param.opts[0]} was removed. Draft over 16,000 rows instead; it gains as much.", ctx)


no_follow_option = click.option("--follow", hidden=True, expose_value=False, callback=_refuse, help="Removed.")


def load_heads(options: dict[str, Any], **more: Any) -> list[SpeculativeModel]:
    """Take the options of `model_options` out of a command's, and load the head and other ``heads`` with the target."""
    note(f"loading {options['head'] or 'the built-in head'} with its target")
    # Looking for garbage among a million new objects of modules takes a sixth of their imports.
    gc.disable()
    try:
        from transformers.utils import logging

        from .model import SpeculativeModel
        from .opening.targets import open_target
    finally:
        # The oldest generation from now on: at the end Triton tells of what is still frozen as leaks.
        gc.freeze()
        gc.unfreeze()
        gc.enable()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    show_downloads()
    _show_progress()
    head, heads = options.pop("head"), options.pop("heads", ())
    given = {name: options.pop(name) for name in _LOADING} | more
    model = SpeculativeModel.from_pretrained(options.pop("target"), head, **given)
    note(f"target: {model.target.backend}; {model.drafting}; this drafter: {model.drafter.reason}")
    for name in ("revision", "dtype", "device", "target_weights"):
        del given[name]
    given |= {"drafter": model.drafter.backend, "tokenizer": model.tokenizer}
    shared = open_target(model.target.model, target_backend=model.target.backend.name, offline=given["offline"])
    models = [model]
    for other in heads:
        note(f"loading {other}")
        models.append(SpeculativeModel.from_pretrained(shared, other, **given))
    return models


def load_model(options: dict[str, Any], **more: Any) -> SpeculativeModel:
    """Take the options of `model_options` and `draft_options` out of a command's, and load the head with its target.

    Steps choose their trees where ``--total-tokens`` is not given.
    """
    depth, top_k, total_tokens = (options.pop(name) for name in ("depth", "draft_top_k", "total_tokens"))
    more |= {name: options.pop(name) for name in ("draft_vocab", "draft_window")}
    (model,) = load_heads(options, tree=TreeConfig.of(depth, top_k, total_tokens), **more)
    return model if total_tokens is not None else model.with_tree(None)


def _show_progress() -> None:
    """Say once on stderr that kernels are compiled, when they are."""
    import logging

    class Once(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(record.getMessage())
            logger.removeHandler(self)

    logger = logging.getLogger("eagle_slim.runtime.step.graphs")
    logger.setLevel(logging.INFO)
    logger.handlers = [Once()]


def show_warnings_as_lines() -> None:
    """Print Python warnings as one line on stderr, as the commands print their own."""
    warnings.showwarning = lambda message, *_args, **_kwargs: note(f"warning: {message}")
