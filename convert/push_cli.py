"""eagle-push: parse the options, audit an artifact, upload its own files."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import click
from eagle_slim.vocab_tools.common_cli import EagleCommand, emit_json, json_option, note, run_cli, version_option, warn


@click.command(
    cls=EagleCommand,
    epilog="""\b
Examples:
  eagle-push smollm2-135m-instruct-eagle3-v32000 me/smollm2-slim --dry-run
  eagle-push ./slim-head my-org/slim-head --private""",
)
@click.argument("folder", metavar="DIR")
@click.argument("repo_id", metavar="NAME/REPOSITORY")
@click.option("--private/--public", default=None, help="Visibility of a new repository; default: your account's.")
@click.option("--dry-run", is_flag=True, help="Audit, print the files, and stop; the Hub is not asked.")
@json_option
@version_option
def push(folder: str, repo_id: str, private: bool | None, dry_run: bool, as_json: bool) -> None:
    """Upload a converted head to a model repository of the Hugging Face Hub, made if it does not exist.

    The artifact is audited first, as by `eagle-verify --offline`. Only the files that its manifest names, the manifest
    and the model card travel; what else lies in the folder stays. A token is needed: `hf auth login`, or HF_TOKEN.
    """
    from .push import files_to_upload, upload_files

    names, artifact = files_to_upload(folder, repo_id), Path(folder)
    left = sorted({path.name for path in artifact.iterdir()} - set(names))
    warn(f"{name} is not uploaded: the manifest of {folder} does not name it" for name in left)
    pushed = None
    if not dry_run:
        note(f"uploading {folder} to {repo_id}")
        pushed = upload_files(artifact, names, repo_id, private)
    if as_json:
        emit_json({"uploads": names, "left": left, "pushed_to": pushed})
        return
    for name in names:
        click.echo(f"  {name:<22}{(artifact / name).stat().st_size:>15,} bytes")
    click.echo(f"would upload {folder} to {repo_id}" if pushed is None else f"uploaded to {pushed}")


def main(args: list[str] | None = None) -> NoReturn:
    """Run eagle-push and leave the process."""
    run_cli(push, args, "eagle-push")
