"""Shared by all commands: errors as one line on stderr, exit codes, quiet pipes, --debug.

Exit codes: 0 done, 1 failure, 2 usage, 130 interrupted. Results go to stdout, progress and warnings to stderr.
A traceback is shown only with --debug.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, NoReturn, TypeVar

import click

from .errors import INTERRUPTED, EagleSlimError, UsageError, printable
from .hub import limit_silence

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class EagleCommand(click.Command):
    """A command with -h, wide help and --debug, which takes an option of one value once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", {"help_option_names": ["-h", "--help"], "max_content_width": 110})
        super().__init__(*args, **kwargs)
        debug = click.Option(["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error.")
        self.params: list[click.Parameter] = [*self.params, debug]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, but refuse an option whose last value alone would count."""
        given = self.make_parser(ctx).parse_args([*args])[2]
        for option in given if not ctx.resilient_parsing else ():
            if isinstance(option, click.Option) and not (option.multiple or option.is_flag) and given.count(option) > 1:
                problem = f"{option.opts[0]} takes one value and is given {given.count(option)} times. Give it once."
                raise click.UsageError(problem, ctx)
        return super().parse_args(ctx, args)


class EagleGroup(EagleCommand, click.Group):
    """A group of commands, listed in the order of work, in which they were added."""

    command_class = EagleCommand

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in order of addition."""
        return list(self.commands)


def example(*lines: str) -> str:
    """Return the epilog of a help text that shows these command lines."""
    return "\n  ".join(["\b\nExample:", *lines])


def choice_option(name: str, choices: Sequence[str], help_text: str) -> Callable[[Decorated], Decorated]:
    """Make an option that takes one of some words, by default the first."""
    return click.option(name, type=click.Choice(choices), default=choices[0], show_default=True, help=help_text)


def _shares(ctx: click.Context, param: click.Parameter, values: Iterable[str]) -> dict[str, float] | None:
    """Read the values of --weights or --floor: `chat=3`, or several in one as in `chat=3,code=2`; raises UsageError."""
    shares: dict[str, float] = {}
    for value in (part.strip() for group in values for part in group.split(",")):
        name, _, share = value.rpartition("=")
        try:
            number = float(share)
        except ValueError:
            number = math.nan
        if not name or name in shares or math.isnan(number):
            raise UsageError(f"{param.opts[0]} {value!r}: expected NAME=SHARE, such as chat=0.5, each name once.")
        shares[name] = number
    return shares or None


_shares_option = partial(click.option, multiple=True, callback=_shares, metavar="NAME=SHARE")
weight_option = _shares_option("--weights", "-w", help="Shares of sources: `chat=3,code=2`; repeatable.")
floor_option = _shares_option("--floor", "floors", help="Share of held-out tokens to cover: `zh=0.97`; repeatable.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
version_option = click.version_option(version("eagle-slim"), prog_name="eagle-slim")
force_option = click.option("--force", is_flag=True, help="Overwrite existing output.")
force_added_option = choice_option(
    "--force-added", ["chat", "all"], "Added tokens to keep: those of the chat template, or all, with reserved ones."
)


def read_by(read: Callable[[Any], Any], example: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Make an option's callback of ``read``, which raises `ValueError` or `KeyError` for a value of another form."""

    def parse(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else read(value)
        except (ValueError, KeyError):
            given = value if isinstance(value, str) else " ".join(value)
            raise click.BadParameter(f"{given!r} does not have the form {example}.", ctx, param) from None

    return parse


whole_numbers = read_by(lambda text: tuple(map(int, text.split(","))), "8192,16384")
"""The callback of an option for numbers that commas separate."""


def emit_json(value: Any) -> None:
    """Print one JSON document to stdout; where that is not UTF-8, other letters than ASCII's by JSON's escapes."""
    is_utf8 = getattr(sys.stdout, "encoding", None) in (None, "utf-8", "UTF-8")
    click.echo(json.dumps(value, indent=2, ensure_ascii=not is_utf8))


def note(message: str) -> None:
    """Tell the user something on stderr, if anyone reads it; codes that a terminal would obey are escaped."""
    with contextlib.suppress(OSError):
        click.echo("\n".join(map(printable, message.split("\n"))), err=True)


def warn(messages: Iterable[str]) -> None:
    """Print warnings to stderr."""
    for message in messages:
        note(f"warning: {message}")


def run_cli(command: click.Command, args: Sequence[str] | None = None, prog_name: str | None = None) -> NoReturn:
    """Run a command and leave the process with its exit code; the body of every console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A letter that the terminal lacks is printed all the same.
        sys.stdout.reconfigure(errors="backslashreplace")
    limit_silence()
    _end_on_signals()
    sys.exit(_run(command, list(sys.argv[1:] if args is None else args), prog_name))


def _end_on_signals() -> None:
    """Let SIGTERM and SIGHUP, unless ignored, end a command as Ctrl-C does, by its error with the signal's number."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, interrupt)


def _run(command: click.Command, arguments: list[str], prog_name: str | None) -> int:
    debug = "--debug" in arguments
    try:
        result = command.main(args=arguments, prog_name=prog_name, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        # The reader of stdout went away (`| head`); Python must not complain of it at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted; nothing half-written is left behind", INTERRUPTED, debug, kind="")
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return int(error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = "" if context is None else f" Try `{context.command_path} --help`."
        return _fail(error.format_message() + hint, error.exit_code, debug)
    except EagleSlimError as error:
        return _fail(str(error), error.exit_code, debug)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}.", 1, debug)
    except Exception as error:
        if debug:
            raise
        message = f"Unexpected {type(error).__name__}: {error}. This is a defect; --debug shows where it happened."
        return _fail(message, 1, debug)


def _fail(message: str, code: int, debug: bool, kind: str = "error: ") -> int:
    if debug:
        import traceback

        traceback.print_exc()
    note(f"{kind}{message}")
    return code
