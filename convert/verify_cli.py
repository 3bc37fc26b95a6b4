"""eagle-verify: parse the options, call `verify_artifact`, print every check."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
from eagle_slim.vocab_tools.common_cli import EagleCommand, emit_json, json_option, run_cli, version_option
from eagle_slim.vocab_tools.errors import printable


@click.command(
    cls=EagleCommand,
    epilog="""\b
Examples:
  eagle-verify smollm2-135m-instruct-eagle3-v32000
  eagle-verify ./slim-head --target meta-llama/Llama-3.1-8B-Instruct --json
  eagle-verify ./slim-head --engine vllm --engine-version 0.32.0""",
)
@click.argument("folder", metavar="DIR")
@click.option("--head", metavar="H", help="Original head: Hub id or folder. Default: the recorded one, if cached.")
@click.option("--target", metavar="T", help="Target model: Hub id or folder. Default: the recorded one, if cached.")
@click.option("--tokenizer", metavar="T", help="Tokenizer: Hub id, folder or tokenizer.json. Default: the target's.")
@click.option(
    "--engine", "--for", "engines", multiple=True, metavar="E", help="Engine to serve it: vllm, sglang …; repeatable."
)
@click.option("--engine-version", metavar="V", help="Version that will serve it. Default: the one installed here.")
@click.option("--offline", is_flag=True, help="Use only local files and the Hub cache.")
@json_option
@version_option
def verify(folder: str, as_json: bool, **options: Any) -> int:
    """Check a converted head against its manifest, its source, its target and its tokenizer.

    Lists every check as ok, warning, failed or skipped, with what was found. The exit code is 1 if any check failed.
    """
    from .verify.verify import verify_artifact

    result = verify_artifact(folder, **options)
    if as_json:
        emit_json(result.to_json())
    else:
        width = max(len(check.name) for check in result.checks)
        colours = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "bright_black"}
        for check in result.checks:
            status = click.style(f"{check.status:<7}", fg=colours[check.status])
            # A name with a line end in it must not look like a check of its own.
            detail = ("\n" + " " * (width + 11)).join(map(printable, check.detail.split("\n")))
            click.echo(f"{status}  {check.name:<{width}}  {detail}")
        counted = {status: sum(check.status == status for check in result.checks) for status in colours}
        click.echo(f"{folder}: " + ", ".join(f"{number} {status}" for status, number in counted.items()))
    return 0 if result.ok else 1


main = partial(run_cli, verify, prog_name="eagle-verify")


if __name__ == "__main__":
    main()
