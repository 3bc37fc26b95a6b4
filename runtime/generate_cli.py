"""`eagle-generate`: one answer, or a chat, from a converted head with its target."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click
from eagle_slim.vocab_tools.common_cli import EagleCommand, emit_json, json_option, note, run_cli, version_option
from eagle_slim.vocab_tools.errors import EagleSlimError, UsageError

from .options_cli import check_names, load_heads, model_options, options_as_typed, show_warnings_as_lines
from .settings import TreeConfig

if TYPE_CHECKING:
    from .api.output import GenerationOutput
    from .api.stats import GenerationStats
    from .model import SpeculativeModel

_HELP = """\
/system TEXT  set the system message and start over; without a text, remove it
/reset        start over
/retry        answer the last message again
/undo         take the last message and its answer back
/help         this list
/quit         end the chat (also Ctrl-D, or Ctrl-C between answers)"""
_TYPED = ("depth=--depth", "top_k=--draft-top-k", "total_tokens=--total-tokens", "draft_vocab=--draft-vocab")


def _draft_vocab(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None or value == "full":
        return None
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a number nor `full`", ctx, param)
    return int(value)


def _stop_texts(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    if "" in value:
        raise click.BadParameter("expected a text of at least one letter, found an empty one", ctx, param)
    return value


@click.command(
    cls=EagleCommand,
    epilog="""\b
Examples:
  eagle-generate --prompt "Why is the sky blue?"
  eagle-generate out/llama-slim --draft-vocab 8192 --temperature 0.7 --top-p 0.9
  eagle-generate --draft-vocab 2048 --follow prompt < a-long-prompt.txt
  eagle-generate --prompt "What is 12 * 7?" --dtype float32 --check""",
)
@model_options
@click.option("--depth", type=click.IntRange(min=0), default=5, show_default=True, help="Levels of the draft tree.")
@click.option("--draft-top-k", type=click.IntRange(min=1), default=10, show_default=True,
              help="Children per node; 1 drafts a chain.")  # fmt: skip
@click.option("--total-tokens", type=click.IntRange(min=2),
              help="Nodes of the tree, root included. Default: the fastest by measured steps.")  # fmt: skip
@click.option("--draft-vocab", callback=_draft_vocab, metavar="N",
              help="Draft over the best N ids only; `full`, the default, is all of the head's.")  # fmt: skip
@click.option("--follow", type=click.Choice(["prompt"]), help="Let ids of the prompt join the draft vocabulary.")
@click.option(
    "--prompt", metavar="TEXT", help="Answer this prompt and exit. Default: the text on stdin, or a chat in a terminal."
)
@click.option("--system", metavar="TEXT", help="System message of the conversation.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), metavar="T", help="Sample, if above 0. Default: greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), metavar="P",
              help="Sample from the smallest set of this probability.")  # fmt: skip
@click.option("--top-k", type=click.IntRange(min=0), metavar="K", help="Sample from the K most probable tokens.")
@click.option("--seed", type=click.IntRange(min=0),
              help="Random seed. Default: a new one each time, printed with the figures.")  # fmt: skip
@click.option("--stop", multiple=True, callback=_stop_texts, metavar="TEXT",
              help="End the answer at this text; repeat for more than one.")  # fmt: skip
@click.option("--check", is_flag=True, help="Also decode plainly and compare the tokens; exit 1 if they differ.")
@json_option
@version_option()
def generate(**options: Any) -> None:
    """Generate with a draft head; the text is the target's own.

    HEAD is a converted or unconverted head, in a folder or a Hugging Face Hub repository; by default, the built-in
    EAGLE-3 head of SmolLM2-135M-Instruct. Text goes to stdout as it is accepted, figures to stderr. In a chat, /help
    lists the commands; Ctrl-C ends an answer or, between answers, the chat (exit code 130).
    """
    show_warnings_as_lines()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An answer with a letter that the terminal lacks is printed all the same.
        sys.stdout.reconfigure(errors="backslashreplace")
    prompt, as_json, system, raw, check = (
        options.pop(name) for name in ("prompt", "as_json", "system", "raw", "check")
    )
    if prompt is None and (sys.stdin is None or not sys.stdin.isatty()):
        prompt = _read_stdin()
    if prompt == "":
        raise UsageError("There is no prompt. Give a text with --prompt, or on stdin.")
    for name, text in (("prompt", prompt), ("--system", system)):
        _check_text(name, text)
    if raw and system is not None:
        raise UsageError("--system is part of the chat template, which --raw leaves out. Give one of them.")
    if prompt is None and (as_json or check):
        raise UsageError("--json and --check answer one prompt. Give --prompt.")
    shape = (options.pop("depth"), options.pop("draft_top_k"), options.pop("total_tokens"))
    loading = {"draft_vocab": options.pop("draft_vocab"), "follow": options.pop("follow")}
    with options_as_typed(*_TYPED):
        tree = TreeConfig.of(*shape)
        check_names(options, () if loading["draft_vocab"] is None else (loading["draft_vocab"],))
        from .api.options import sampling_config

        draws = {name: options[name] for name in ("temperature", "top_p", "top_k")}
        if sampling_config(**draws, seed=options["seed"] or 0).is_greedy:
            # What greedy decoding ignores was said just now.
            options |= dict.fromkeys(draws)
        # A check is of drafting: no measured size may turn it off.
        total_tokens = tree.total_tokens if check else shape[2]
        (model,) = load_heads(options, depth=tree.depth, top_k=tree.top_k, total_tokens=total_tokens, **loading)
    given = {k: v for k, v in options.items() if v not in (None, ())}
    session = _Session(model, system, raw, check, given)
    if prompt is None:
        session.chat()
    else:
        session.answer(prompt, as_json)


def _read_stdin() -> str:
    try:
        return "" if sys.stdin is None else sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 text ({error}).") from error


def _check_text(name: str, text: str | None) -> None:
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"The {name} is not UTF-8 text (at character {error.start}).") from error


class _Session:
    """A loaded model, how to generate, and the conversation so far."""

    def __init__(
        self, model: SpeculativeModel, system: str | None, raw: bool, check: bool, options: dict[str, Any]
    ) -> None:
        self.model, self.raw, self.check, self.options = model, raw, check, options
        self.opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)
        self.interrupted: str | None = None
        """The message whose answer Ctrl-C ended, until another is answered."""
        self._told = {f"target {model.target.backend}", model.drafting}
        """Parts of `GenerationStats.path` that were printed last."""

    def answer(self, prompt: str, as_json: bool = False, reuse_prefix: bool = False) -> None:
        """Stream one answer and print its figures, or print both as JSON; what ran is told when it changes."""
        from .api.streaming import StopTextStreamer

        self.messages.append({"role": "user", "content": prompt})
        ids = prompt if self.raw else self.model.encode_chat(self.messages)
        streamer = None
        if not as_json:
            streamer = StopTextStreamer(self.model.tokenizer, self.options.get("stop", ()), skip_special_tokens=True)
        output = self.model.generate(ids, streamer=streamer, reuse_prefix=reuse_prefix, **self.options)
        result = output.results[0]
        self.messages.append({"role": "assistant", "content": result.text or ""})
        self.interrupted = None
        if as_json:
            emit_json(
                {
                    "text": result.text,
                    "token_ids": result.token_ids,
                    "finish_reason": result.finish_reason,
                    "draft_vocab": self.model.draft_vocab,
                    "seed": output.seed,
                    "stats": output.stats.to_json(),
                }
            )
        else:
            parts = output.stats.path.split("; ")
            if news := [part for part in parts if part not in self._told]:
                note("; ".join(news))
            self._told = set(parts)
            seed = "" if output.seed is None else f"; seed {output.seed}"
            note(f"{figures(output.stats)}; ended by {result.finish_reason}{seed}")
        if self.check:
            _check(self.model, prompt, ids, output, self.options)

    def chat(self) -> None:
        """Talk until /quit or the end of input; Ctrl-C ends an answer, and between two of them the session."""
        note(f"draft vocabulary {self.model.draft_vocab:,}; /help lists the commands, Ctrl-C ends an answer")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                note("")
                return
            except UnicodeDecodeError as error:
                note(f"error: this is not UTF-8 text ({error})")
                continue
            if line == "/quit":
                return
            before = list(self.messages)
            try:
                _check_text("message", line)
                prompt = self._run_command(line) if _is_command(line) else line
                if prompt:
                    self.answer(prompt, reuse_prefix=True)
            except EagleSlimError as error:
                # A conversation that has outgrown the context must not end the session.
                note(f"error: {error}")
                self.messages = before
            except KeyboardInterrupt:
                note("interrupted; the conversation goes on as it was before, and /retry answers the message")
                self.messages = before
                if not _is_command(line):
                    self.interrupted = line

    def _run_command(self, line: str) -> str:
        """Do what a command says; returns a message that is to be answered, or ""."""
        command, _, text = line.partition(" ")
        if command == "/help":
            note(_HELP)
        elif command == "/retry" and self.interrupted is not None:
            return self.interrupted
        elif command in ("/retry", "/undo"):
            if self.messages == self.opening:
                raise UsageError("there is no message yet")
            *self.messages, message, _ = self.messages
            return message["content"] if command == "/retry" else ""
        elif command in ("/reset", "/system"):
            if command == "/system" and self.raw:
                raise UsageError("a system message is part of the chat template, which --raw leaves out")
            if command == "/system":
                self.opening = [{"role": "system", "content": text.strip()}] if text.strip() else []
            self.messages, self.interrupted = list(self.opening), None
        else:
            raise UsageError(f"unknown command {command}; see /help")
        return ""


def _is_command(line: str) -> bool:
    """Whether a line is a command, rather than a text that begins with a path such as /etc/hosts."""
    return line.startswith("/") and line[1:].partition(" ")[0].isalpha()


def figures(stats: GenerationStats) -> str:
    """Return the cost of a generation in one line."""
    reused = f", {stats.num_reused_tokens} prompt tokens kept from before"
    missed = f"; {stats.missed_rate:.1%} of them outside the draft vocabulary" if stats.num_missed else ""
    ahead = (
        f"; {stats.num_partial_passes} passes over a part of the cache ran ahead, of whose tokens "
        f"{stats.num_rolled_back_tokens} were not confirmed"
    )
    return (
        f"{stats.num_new_tokens} tokens in {stats.total_s:.2f} s: {stats.tokens_per_s:.1f} tokens/s, "
        f"{stats.mean_accepted_length:.2f} tokens per target pass ({stats.num_passes} passes){missed}"
        f"{reused if stats.num_reused_tokens else ''}"
        f"{ahead if stats.num_partial_passes else ''}"
        + ("; the drafter's launch parameters are not tuned here" if stats.tuned_misses else "")
    )


def _check(
    model: SpeculativeModel, prompt: str, ids: Sequence[int] | str, output: GenerationOutput, options: dict[str, Any]
) -> None:
    """Decode plainly and compare. Raises `EagleSlimError` at the first token that differs."""
    from .api.output import difference, first_difference

    options = {**options, "seed": output.seed or 0}
    plain = model.generate(ids, speculative=False, **options)
    ours, own = output.token_ids[0], plain.token_ids[0]
    kind = "sampling with the same seed" if options.get("temperature") else "greedy decoding"
    place, proof = first_difference(ours, own), output.stats.exactness
    if place is None:
        because = "" if proof is None else f"; {proof}"
        note(f"check: all {len(own)} tokens equal plain {kind} ({plain.stats.tokens_per_s:.1f} tokens/s){because}")
        return
    if proof is not None:
        raise difference(f"check: the answer to {prompt[:60]!r}", ours, own, place, proof)
    message = f"check: token {place} differs from plain {kind}"
    if options.get("partial_verification") == "lossy":
        message += ", as it may with --partial-verification lossy"
    elif str(model.target.dtype) != "torch.float32":
        message += ". Below float32 a forward over a tree and one over a token round differently: try --dtype float32"
    raise EagleSlimError(message + ".")


def main(args: list[str] | None = None) -> NoReturn:
    """Run `eagle-generate`."""
    run_cli(generate, args, "eagle-generate")


if __name__ == "__main__":
    main()
