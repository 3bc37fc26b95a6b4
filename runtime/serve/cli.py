"""`eagle-serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

import click
from eagle_slim.vocab_tools.common_cli import EagleCommand, note, run_cli, version_option
from eagle_slim.vocab_tools.errors import EagleSlimError, UsageError

from ..options_cli import draft_options, load_model, model_options, show_warnings_as_lines

_SWITCH_S = 1e-5
"""Seconds after which a thread lets another one run: the engine's must not wait for HTTP's."""


@click.command(
    cls=EagleCommand,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
    epilog="""\b
Examples:
  eagle-serve
  eagle-serve out/llama-slim --port 8001 --slots 8 --max-model-len 16384 --served-model-name llama""",
)
@model_options
@draft_options
@click.option("--host", default="127.0.0.1", help="Address to listen at; 0.0.0.0 is all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port; 0: a free one.")
@click.option("--slots", type=click.IntRange(1, 16), default=16, help="Most answers side by side.")
@click.option("--max-waiting", type=click.IntRange(0), default=256, help="Most answers that wait.")
@click.option("--max-model-len", type=click.IntRange(2), default=8000, help="Most tokens of prompt and answer.")
@click.option("--served-model-name", "names", multiple=True, help="Name of the model; repeat. Default: its own.")
@click.option("--api-key", "api_keys", multiple=True, envvar="EAGLE_SLIM_API_KEY", help="Key of clients; repeat.")
@click.option("--allowed-origin", "origins", multiple=True, help="Web page that may call from a browser; repeat.")
@click.option("--grace", "grace_s", type=click.FloatRange(0), default=30, help="Seconds for answers after SIGTERM.")
@version_option
def serve(host: str, port: int, max_model_len: int, **options: Any) -> None:
    """Serve a target with its draft head by OpenAI's protocol; the text is the target's own, whatever else is served.

    HEAD is a converted or unconverted head, in a folder or a Hugging Face Hub repository; by default, the built-in
    EAGLE-3 head of SmolLM2-135M-Instruct. Ends on SIGTERM, once running answers have, with exit code 0.
    """
    names = ("names", "api_keys", "max_waiting", "origins", "slots", "grace_s")
    serving = {name: options.pop(name) for name in names}
    if not all(map(str.strip, serving["api_keys"] or (os.environ.get("EAGLE_SLIM_API_KEY", "none"),))):
        raise UsageError("--api-key (or EAGLE_SLIM_API_KEY) is empty, which every call would match. Give one, or none.")

    def ready(about: str) -> None:
        note(f"serving {', '.join(service.names)} at http://{host}:{port}/v1: {about}")

    def ended() -> None:
        server.should_exit = True

    try:
        import uvicorn

        from .app import Service

        service = Service(lambda: load_model(options, max_model_len=max_model_len), ready, ended, **serving)
        app = service.app()
    except ImportError as error:
        raise UsageError(f"{error}. Install what a server needs: pip install 'eagle-slim[serve]'.") from error
    show_warnings_as_lines()
    log = logging.getLogger("eagle_slim.serve")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
    grace_s = max(1, round(serving["grace_s"]))
    config = uvicorn.Config(
        app, host, port, log_level="warning", access_log=False, proxy_headers=False, timeout_graceful_shutdown=grace_s
    )
    server = uvicorn.Server(config)
    try:
        bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        way = "Name another address (--host), or another port: --port 0 takes a free one"
        raise EagleSlimError(f"{host}, port {port}: {error.strerror or error}. {way}.") from error
    port = bound.getsockname()[1]  # while it is open
    sys.setswitchinterval(_SWITCH_S)
    # Raised once more when the server has ended by it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run([bound])
    if service.engine.failure is not None:
        raise service.engine.failure


def main(args: list[str] | None = None) -> NoReturn:
    """Run `eagle-serve`. Leave at once where a model still loads: libraries abort at the end beside their threads."""
    try:
        run_cli(serve, args, "eagle-serve")
    except SystemExit as end:
        if "closed engine" not in {thread.name for thread in threading.enumerate()}:
            raise
        os._exit(int(end.code or 0))


if __name__ == "__main__":
    main()
