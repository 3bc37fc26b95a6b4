"""Options that load a head with its target, shared by `eagle-generate` and `eagle-compare`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from eagle_slim.vocab_tools.base_cli import note

if TYPE_CHECKING:
    from .model import SpeculativeModel

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

_OPTIONS = (
    click.argument("head", required=False, metavar="[HEAD]"),
    click.option("--target", metavar="T", help="Target model: Hub id or folder. Default: what the head names."),
    click.option("--revision", metavar="REV", help="Branch, tag or commit of the target."),
    click.option("--head-revision", metavar="REV", help="Branch, tag or commit of the head."),
    click.option("--head-subfolder", metavar="NAME", help="Folder within HEAD that holds the head, such as eagle3."),
    click.option("--depth", default=5, show_default=True, help="Levels of the draft tree."),
    click.option("--draft-top-k", default=10, show_default=True, help="Children per node; 1 drafts a chain."),
    click.option(
        "--total-tokens", type=int,
        help="Nodes of the tree, root included. Default: what is fastest by measured steps, in a comparison 60.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help="Type of target and drafter; greedy output is exact in float32.",
    ),
    click.option("--device", metavar="D", help="Such as cuda:1 or cpu. Default: the first GPU, else the CPU."),
    click.option(
        "--drafter", type=click.Choice(["auto", "reference", "triton"]), default="auto", show_default=True,
        help="The persistent kernel (triton) or plain PyTorch; auto takes the kernel where GPU and head allow it.",
    ),
    click.option(
        "--draft-weights", type=click.Choice(["auto", "bf16", "fp8"]), default="auto", show_default=True,
        help="Type of the drafter's weights: the model's own (auto), or half the bytes in FP8 on GPUs from sm_89 on.",
    ),
    click.option(
        "--target-backend", type=click.Choice(["auto", "fused", "transformers"]), default="auto", show_default=True,
        help="Our own forward over the target's weights, or transformers'; auto takes ours on a GPU where it can.",
    ),
    click.option("--max-model-len", type=int, metavar="N", help="Most tokens of prompt and answer together."),
    click.option("--tap-layers", metavar="L,L,...", help="Target layers whose inputs an unconverted head reads."),
    click.option(
        "--d2t-form", type=click.Choice(["auto", "offset", "absolute"]), default="auto", show_default=True,
        help="Form of an unconverted head's own map, where the files leave it open.",
    ),
    click.option("--offline", is_flag=True, help="Use only what is on this machine."),
)  # fmt: skip


def model_options(function: _Decorated) -> _Decorated:
    """Add HEAD and the options that `load_model` takes."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def miss_log_option(function: _Decorated) -> _Decorated:
    """Add ``--miss-log``."""
    return click.option(
        "--miss-log", metavar="FILE",
        help="Count what is generated into FILE, as `eagle-vocab merge` and `rank` read it; a log there is added to.",
    )(function)  # fmt: skip


def load_model(options: dict[str, Any]) -> SpeculativeModel:
    """Take the options of `model_options` (and ``draft_vocab``) out of a command's options and load the model."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    from .drafter.follow import DEFAULT_FOLLOW_ROWS
    from .model import SpeculativeModel

    taps = options.pop("tap_layers")
    head = options.pop("head")
    note(f"loading {head or 'the built-in head'} with its target")
    model = SpeculativeModel.from_pretrained(
        options.pop("target"),
        head,
        draft_vocab=options.pop("draft_vocab", None),
        follow=options.pop("follow", None),
        follow_rows=options.pop("follow_rows", None) or DEFAULT_FOLLOW_ROWS,
        depth=options.pop("depth"),
        top_k=options.pop("draft_top_k"),
        total_tokens=options.pop("total_tokens"),
        dtype=torch_dtype(options.pop("dtype")),
        device=options.pop("device"),
        drafter=options.pop("drafter"),
        draft_weights=options.pop("draft_weights"),
        target_backend=options.pop("target_backend"),
        max_model_len=options.pop("max_model_len"),
        revision=options.pop("revision"),
        head_revision=options.pop("head_revision"),
        head_subfolder=options.pop("head_subfolder"),
        tap_layers=None if taps is None else _layers(taps),
        d2t_form=options.pop("d2t_form"),
        offline=options.pop("offline"),
    )
    note(f"target: {model.target.backend}; {model.drafting} ({model.drafter_reason})")
    follow = model.drafter.weights.follow
    if follow is not None:
        most = min(follow.most, len(follow.ids))
        note(f"follows the {follow.source}: up to {most:,} of {len(follow.ids):,} ids join {model.draft_vocab:,}")
    assert model.opened is not None
    for warning in model.opened.head.warnings:
        click.echo(f"warning: {warning}", err=True)
    return model


def load_other_head(
    model: SpeculativeModel,
    head: str,
    offline: bool,
    head_revision: str | None,
    head_subfolder: str | None,
    tap_layers: str | None,
    d2t_form: str,
) -> SpeculativeModel:
    """Load another head for the target of a loaded model, with its tree, drafter and forward."""
    note(f"loading {head}")
    tree = model.drafter.tree
    other = type(model).from_pretrained(
        model.target.model,
        head,
        depth=tree.depth,
        top_k=tree.top_k,
        total_tokens=tree.total_tokens,
        drafter=model.drafter_kind,
        draft_weights="fp8" if model.draft_weights == "fp8" else "auto",
        target_backend=model.target.backend.name,
        tokenizer=model.tokenizer,
        max_model_len=model.max_model_len,
        head_revision=head_revision,
        head_subfolder=head_subfolder,
        tap_layers=None if tap_layers is None else _layers(tap_layers),
        d2t_form=d2t_form,  # type: ignore[arg-type]
        offline=offline,
    )
    other.tokenizer_source = model.tokenizer_source
    return other


def torch_dtype(name: str) -> Any:
    """Turn a name of ``--dtype`` into what transformers takes."""
    import torch

    return name if name == "auto" else getattr(torch, name)


def show_warnings_as_lines() -> None:
    """Print Python warnings as one line on stderr, as the commands print their own."""

    def show(message: Warning | str, *_args: Any, **_kwargs: Any) -> None:
        click.echo(f"warning: {message}", err=True)

    warnings.showwarning = show


def _layers(value: str) -> tuple[int, ...]:
    try:
        return tuple(int(layer) for layer in value.split(","))
    except ValueError:
        message = f"{value!r} is not a list of layer numbers such as 2,15,27"
        raise click.BadParameter(message, param_hint="--tap-layers") from None
