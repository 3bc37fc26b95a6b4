"""Options that load a head with its target, shared by `eagle-generate` and `eagle-compare`."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from eagle_slim.vocab_tools.base_cli import network_options, note
from eagle_slim.vocab_tools.errors import UsageError

from .settings import PartialVerification, TreeConfig

if TYPE_CHECKING:
    from .model import SpeculativeModel

_LINE_EVERY_S = 30.0

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


def _layers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    try:
        return None if value is None else tuple(int(layer) for layer in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of layer numbers such as 2,15,27", ctx, param) from None


# Parameters bear the names of the arguments of `SpeculativeModel.from_pretrained`.
_OPTIONS = (
    click.argument("head", required=False, metavar="[HEAD]"),
    click.option("--target", metavar="T", help="Target model: Hub id or folder. Default: the one the head names."),
    click.option("--revision", metavar="REV", help="Branch, tag or commit of the target."),
    click.option("--head-revision", metavar="REV", help="Branch, tag or commit of the head."),
    click.option("--head-subfolder", metavar="NAME", help="Folder within HEAD that holds the head, such as eagle3."),
    click.option("--depth", default=5, show_default=True, help="Levels of the draft tree."),
    click.option("--draft-top-k", default=10, show_default=True, help="Children per node; 1 drafts a chain."),
    click.option(
        "--total-tokens", type=int,
        help="Nodes of the tree, root included. Default: the fastest by measured steps; 60 in a comparison.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help="Type of target and drafter; auto: the files' own, or float32 on a CPU without instructions for it.",
    ),
    click.option("--device", metavar="D", help="Device, such as cuda:1 or cpu. Default: the first GPU, else the CPU."),
    click.option(
        "--drafter", type=click.Choice(["auto", "reference", "triton"]), default="auto", show_default=True,
        help="The persistent kernel (triton) or plain PyTorch; auto uses the kernel if GPU and head allow it.",
    ),
    click.option(
        "--draft-weights", type=click.Choice(["auto", "bf16", "fp8"]), default="auto", show_default=True,
        help="Type of the drafter's weights: the model's own (auto), or FP8, half the bytes, on GPUs from sm_89 on.",
    ),
    click.option(
        "--target-backend", type=click.Choice(["auto", "fused", "transformers"]), default="auto", show_default=True,
        help="Our own forward over the target's weights, or transformers'; auto uses ours on a GPU if it can.",
    ),
    click.option("--max-model-len", type=click.IntRange(min=1), metavar="N",
                 help="Maximum tokens of prompt and answer together."),
    click.option("--tap-layers", callback=_layers, metavar="L,L,...",
                 help="Target layers whose inputs an unconverted head reads."),
    click.option(
        "--d2t-form", type=click.Choice(["auto", "offset", "absolute"]), default="auto", show_default=True,
        help="Form of an unconverted head's own map, if its files do not show it.",
    ),
    click.option("--offline", is_flag=True, help="Use only what is on this machine."),
)  # fmt: skip
_LOADING = (
    "revision", "head_revision", "head_subfolder", "depth", "total_tokens", "dtype", "device", "drafter",
    "draft_weights", "target_backend", "max_model_len", "tap_layers", "d2t_form", "offline",
)  # fmt: skip


def model_options(function: _Decorated) -> _Decorated:
    """Add HEAD, the options that `load_heads` takes, and those of the network."""
    for option in reversed((*_OPTIONS, network_options)):
        function = option(function)
    return function


def miss_log_option(function: _Decorated) -> _Decorated:
    """Add ``--miss-log``."""
    return click.option(
        "--miss-log", metavar="FILE",
        help="Add the generated tokens to the counts in FILE, for `eagle-vocab merge` and `rank`.",
    )(function)  # fmt: skip


_PARTIAL = (
    click.option(
        "--partial-verification", type=click.Choice(["exact", "lossy"]),
        help="For very long prompts: run ahead on a part of the KV cache. `exact` keeps what full passes confirm; "
        "`lossy` may change the text.",
    ),
    click.option(
        "--partial-blocks", type=click.IntRange(min=1), metavar="N",
        help="Blocks of 64 keys in that part, besides the recent ones. Default: 256.",
    ),
    click.option(
        "--partial-steps", type=click.IntRange(min=1), metavar="N",
        help="Passes over that part between two full passes. Default: 8.",
    ),
    click.option(
        "--partial-from", type=click.IntRange(min=0), metavar="TOKENS",
        help="Minimum prompt length. Default: 65,536.",
    ),
)  # fmt: skip


def partial_options(function: _Decorated) -> _Decorated:
    """Add what `partial_verification` takes."""
    for option in reversed(_PARTIAL):
        function = option(function)
    return function


def partial_verification(options: dict[str, Any]) -> PartialVerification | None:
    """Take it out of a command's options. Raises `UsageError` for the others without it."""
    mode = options.pop("partial_verification")
    names = {"partial_blocks": "num_blocks", "partial_steps": "num_steps", "partial_from": "min_length"}
    given = {field: options.pop(name) for name, field in names.items()}
    given = {field: value for field, value in given.items() if value is not None}
    if mode is None and given:
        raise UsageError(
            "--partial-blocks, --partial-steps and --partial-from say how --partial-verification works. Give it as "
            "well.", missing="--partial-verification",
        )  # fmt: skip
    return None if mode is None else PartialVerification(mode, **given)


def check_names(options: Mapping[str, Any], sizes: Collection[int]) -> None:
    """Look at heads, tree and target among a command's options before torch is loaded, which takes seconds.

    Raises `UsageError` for a tree that there cannot be, a target that is not there, and draft vocabularies, ``sizes``,
    larger than a head; others as `open_head_source` and `target_files`, and with ``sizes`` as `open_head`.
    """
    from eagle_slim.convert.head.open import open_head
    from eagle_slim.convert.sources.builtin import EMBEDDED_TARGET_REPO
    from eagle_slim.convert.sources.source import open_head_source, target_files

    from .target.location import given_target

    TreeConfig.of(options["depth"], options["draft_top_k"], options["total_tokens"])
    for name in (options["head"], *options.get("heads", ())):
        source = open_head_source(name, options["head_revision"], options["offline"], options["head_subfolder"])
        if not sizes:
            continue
        forms = {key: options[key] for key in ("d2t_form", "tap_layers")} if source.manifest is None else {}
        head = open_head(source, **forms)
        most = head.draft_vocab
        if max(sizes) > most:
            raise UsageError(
                f"A draft vocabulary of {max(sizes)} is larger than {head.location}, which has {most} rows. Ask "
                "for fewer, or for `full`, which is all of them.",
                head=head.location, expected=most, found=max(sizes),
            )  # fmt: skip
    # Whose built-in copy may stand in.
    if options["target"] not in (None, EMBEDDED_TARGET_REPO):
        target = given_target(options["target"], options["offline"], options["revision"])
        if not isinstance(target, Path):
            target_files(target, options["revision"], options["offline"])


def load_heads(options: dict[str, Any], **more: Any) -> list[SpeculativeModel]:
    """Take the options of `model_options` out of a command's options and load the head with its target.

    ``heads`` among them names other heads for the same target, which are loaded with the same drafter and forward.
    ``more``: further arguments of `SpeculativeModel.from_pretrained`.
    """
    note(f"loading {options['head'] or 'the built-in head'} with its target")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    from .model import SpeculativeModel

    head, heads = options.pop("head"), options.pop("heads", ())
    given = {name: options.pop(name) for name in _LOADING} | {"top_k": options.pop("draft_top_k"), **more}
    model = SpeculativeModel.from_pretrained(options.pop("target"), head, **given)
    note(f"target: {model.target.backend}; {model.drafting} ({model.drafter_reason})")
    follow = model.drafter.weights.follow
    if follow is not None:
        most = min(follow.most, len(follow.ids))
        note(f"follows the prompt: up to {most:,} of {len(follow.ids):,} ids join {model.draft_vocab:,}")
    loaded = {
        "revision": None, "dtype": "auto", "device": None, "target_backend": model.target.backend.name,
        "drafter": model.drafter.backend, "tokenizer": model.tokenizer,
    }  # fmt: skip
    models = [model]
    for other in heads:
        note(f"loading {other}")
        models.append(SpeculativeModel.from_pretrained(model.target.model, other, **{**given, **loaded}))
        models[-1].tokenizer_source = model.tokenizer_source
    for each in models:
        assert each.opened is not None
        for warning in each.opened.head.warnings:
            note(f"warning: {warning}")
    return models


def show_warnings_as_lines() -> None:
    """Print Python warnings as one line on stderr, as the commands print their own."""
    from .errors import AcceptanceWarning

    told: set[type[Warning]] = set()

    def show(message: Warning | str, category: type[Warning], *_args: Any, **_kwargs: Any) -> None:
        # Of a head that does not fit, every answer would warn anew, each with other figures.
        if category is not AcceptanceWarning or category not in told:
            note(f"warning: {message}")
        told.add(category)

    warnings.showwarning = show


@contextmanager
def progress_line(show: bool | None, unit: str) -> Iterator[Callable[[int, int], object]]:
    """Give a function to call with what is done and the total: it moves a bar on a terminal, else writes lines.

    ``show``: False for neither, True for a bar anywhere; ``unit`` in the singular.
    """
    if show or (show is None and sys.stderr.isatty()):
        from tqdm import tqdm

        with tqdm(desc=f"{unit}s", unit=unit, file=sys.stderr) as bar:

            def move(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield move
        return
    started = said = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if show is None and now - said >= _LINE_EVERY_S:
            said = now
            note(f"{done:,} of {total:,} {unit}s, about {_duration((now - started) / done * (total - done))} left")

    yield line


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
