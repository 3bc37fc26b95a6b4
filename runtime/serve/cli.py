"""`eagle-serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import click
from eagle_slim.vocab_tools.common_cli import EagleCommand, note, run_cli, version_option
from eagle_slim.vocab_tools.errors import UsageError

from ..options_cli import (
    draft_vocab_option,
    draft_window_option,
    load_heads,
    model_options,
    show_warnings_as_lines,
)

if TYPE_CHECKING:
    from ..model import SpeculativeModel

_SWITCH_S = 1e-4
"""Seconds after which a thread lets another one run: the engine's must not wait for HTTP's."""


@click.command(
    cls=EagleCommand,
    epilog="""\b
Examples:
  eagle-serve
  eagle-serve out/llama-slim --port 8001 --slots 8 --max-model-len 16384 --served-model-name llama""",
)
@model_options
@click.option("--total-tokens", type=click.IntRange(2), help="Nodes of every draft tree. Default: chosen by step.")
@draft_vocab_option
@draft_window_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0 is all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port to listen at.")
@click.option("--slots", type=click.IntRange(1, 16), default=16, show_default=True, help="Most answers side by side.")
@click.option("--max-waiting", type=click.IntRange(0), default=256, show_default=True, help="Most answers that wait.")
@click.option(
    "--max-model-len", type=click.IntRange(2), default=8000, show_default=True, help="Most tokens of prompt and answer."
)
@click.option(
    "--served-model-name", "names", multiple=True, help="Name of the model; repeat for more. Default: its own."
)
@click.option(
    "--api-key", "api_keys", multiple=True, envvar="EAGLE_SLIM_API_KEY", help="Key that clients give; repeat."
)
@click.option("--allowed-origin", "origins", multiple=True, help="Web page that may call from a browser; repeat.")
@click.option("--grace", type=click.FloatRange(0), default=30, show_default=True, help="Seconds to end in on SIGTERM.")
@version_option
def serve(host: str, port: int, total_tokens: int | None, **options: Any) -> None:
    """Serve a target with its draft head by OpenAI's protocol; the text is the target's own, whatever else is served.

    HEAD is a converted or unconverted head, in a folder or a Hugging Face Hub repository; by default, the built-in
    EAGLE-3 head of SmolLM2-135M-Instruct. Ends on SIGTERM, once running answers have, with exit code 0.
    """
    try:
        import uvicorn

        from .app import ServeOptions, Service
    except ImportError as error:
        raise UsageError(f"{error}. Install what a server needs: pip install 'eagle-slim[serve]'.") from error
    from ..settings import TreeConfig

    if options.pop("partial_verification") is not None:
        raise UsageError("--partial-verification is not served. Use eagle-generate.")
    show_warnings_as_lines()
    own = {name: options.pop(name) for name in ("names", "api_keys", "max_waiting", "origins")}
    serving = ServeOptions(**own, max_slots=options.pop("slots"), grace_s=options.pop("grace"))
    loading = {name: options.pop(name) for name in ("draft_vocab", "draft_window", "max_model_len")}
    if total_tokens is not None:
        loading["tree"] = TreeConfig.of(5, 10, total_tokens)
    log = logging.getLogger("eagle_slim.serve")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stderr))

    def ready() -> None:
        model, plan = service.engine.model, service.engine.plan
        assert model is not None
        assert plan is not None
        # Port 0 is whichever is free.
        bound = server.servers[0].sockets[0].getsockname()[1]
        slots = f"{serving.max_slots} answers side by side of up to {model.max_model_len} tokens"
        note(f"serving {', '.join(service.names)} at http://{host}:{bound}/v1: {slots}\n{model.describe(plan)}")

    def ended() -> None:
        server.should_exit = True

    service = Service(partial(_load, options, loading), serving, ready, ended)
    config = uvicorn.Config(
        service.app(),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(serving.grace_s)),
    )
    server = uvicorn.Server(config)
    sys.setswitchinterval(_SWITCH_S)
    # Raised once more when the server has ended by it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run()
    if service.engine.failure is not None:
        raise service.engine.failure


def _load(options: dict[str, Any], loading: dict[str, Any]) -> SpeculativeModel:
    (model,) = load_heads(options, **loading)
    return model


def main(args: list[str] | None = None) -> NoReturn:
    """Run `eagle-serve`."""
    run_cli(serve, args, "eagle-serve")


if __name__ == "__main__":
    main()
