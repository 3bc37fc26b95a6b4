"""`eagle-generate`: one answer, or a chat, from a converted head with its target."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from eagle_slim.vocab_tools.common_cli import EagleCommand, emit_json, json_option, note, run_cli, version_option
from eagle_slim.vocab_tools.errors import EagleSlimError, UsageError

from .options_cli import (
    draft_options,
    load_model,
    model_options,
    no_follow_option,
    partial_verification_option,
    show_warnings_as_lines,
)

if TYPE_CHECKING:
    from .api.output import GenerationOutput
    from .api.stats import GenerationStats
    from .model import SpeculativeModel

_COMMANDS = "/reset starts over, /quit or Ctrl-D ends the chat, Ctrl-C an answer"


@click.command(
    cls=EagleCommand,
    epilog="""\b
Examples:
  eagle-generate --prompt "Why is the sky blue?"
  eagle-generate out/llama-slim --draft-vocab 8192 --temperature 0.7 --top-p 0.9
  eagle-generate --prompt "What is 12 * 7?" --dtype float32 --check""",
)
@model_options
@draft_options
@partial_verification_option
@no_follow_option
@click.option("--prompt", metavar="TEXT", help="Answer this and exit. Default: the text on stdin, or a chat.")
@click.option("--system", metavar="TEXT", help="System message of the conversation.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=512, show_default=True, help="Length of an answer.")
@click.option("--temperature", type=click.FloatRange(min=0), metavar="T", help="Sample, if above 0. Default: greedy.")
@click.option(
    "--top-p", type=click.FloatRange(0, 1, min_open=True), help="Sample from the top tokens, P in all.", metavar="P"
)
@click.option("--top-k", type=click.IntRange(min=0), metavar="K", help="Sample from the K most probable tokens.")
@click.option("--seed", type=click.IntRange(min=0), help="Random seed. Default: a new one, printed with the figures.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer at this text; repeat for more than one.")
@click.option("--check", is_flag=True, help="Also decode plainly and compare the tokens; exit 1 if they differ.")
@json_option
@version_option
def generate(prompt: str | None, system: str | None, raw: bool, check: bool, as_json: bool, **options: Any) -> None:
    """Generate with a draft head; the text is the target's own.

    HEAD is a converted or unconverted head, in a folder or a Hugging Face Hub repository; by default, the built-in
    EAGLE-3 head of SmolLM2-135M-Instruct. Text goes to stdout as it is accepted, figures to stderr. In a chat, /reset
    starts over and /quit ends it; Ctrl-C ends an answer or, between answers, the chat (exit code 130).
    """
    show_warnings_as_lines()
    if prompt is None and (sys.stdin is None or not sys.stdin.isatty()):
        prompt = _read_stdin()
    if prompt == "":
        raise UsageError("There is no prompt. Give a text with --prompt, or on stdin.")
    if raw and system is not None:
        raise UsageError("--system is part of the chat template, which --raw leaves out. Give one of them.")
    if prompt is None and (as_json or check):
        raise UsageError("--json and --check answer one prompt. Give --prompt.")
    model = load_model(options)
    # --check compares drafted tokens, and steps that choose their trees may decode plainly throughout.
    if check and model.target.device.type == "cuda":
        model = model.with_tree(model.drafter.tree)
    session = _Session(model, system, raw, check, {k: v for k, v in options.items() if v not in (None, ())})
    if prompt is None:
        session.chat()
    else:
        session.answer(prompt, as_json)


def _read_stdin() -> str:
    try:
        text = "" if sys.stdin is None else sys.stdin.read().rstrip("\n")
        # Some locales let other bytes pass, as halves of surrogate pairs.
        text.encode()
        return text
    except UnicodeError as error:
        raise UsageError(f"stdin is not UTF-8 text ({error}).") from error


class _Session:
    def __init__(
        self, model: SpeculativeModel, system: str | None, raw: bool, check: bool, options: dict[str, Any]
    ) -> None:
        self.model, self.raw, self.check, self.options = model, raw, check, options
        self.opening = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self.opening)
        self._printed_path = ""

    def answer(self, prompt: str, as_json: bool = False, reuse_prefix: bool = False) -> None:
        """Stream one answer and print its figures, or print both as JSON; what ran is told when it changes."""
        from transformers import TextStreamer

        from .api.prompts import has_channels

        self.messages.append({"role": "user", "content": prompt})
        ids = prompt if self.raw else self.model.encode_chat(self.messages)
        streamer = None
        # A stop string is cut off the answer, which is therefore printed when it is complete.
        if not as_json and "stop" not in self.options:
            tokenizer = self.model.tokenizer
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=not has_channels(tokenizer))
        output = self.model.generate(ids, streamer=streamer, reuse_prefix=reuse_prefix, **self.options)
        result = output.results[0]
        self.messages.append({"role": "assistant", "content": result.text or ""})
        if as_json:
            answer = {name: getattr(result, name) for name in ("text", "token_ids", "finish_reason")}
            settings = {"draft_vocab": self.model.draft_vocab, "seed": output.seed}
            emit_json({**answer, **settings, "stats": output.stats.to_json()})
        else:
            if streamer is None:
                click.echo(result.text)
            if output.stats.path != self._printed_path:
                self._printed_path = output.stats.path
                note(self._printed_path)
            seed = "" if output.seed is None else f"; seed {output.seed}"
            note(f"{figures(output.stats)}; ended by {result.finish_reason}{seed}")
        if self.check:
            _check(self.model, prompt, ids, output, self.options)

    def chat(self) -> None:
        """Talk until /quit or the end of input; Ctrl-C ends an answer, and between two of them the session."""
        note(f"draft vocabulary {self.model.draft_vocab:,}; {_COMMANDS}")
        if self.raw or not getattr(self.model.tokenizer, "chat_template", None):
            note("without a chat template every line is continued by itself: nothing said before is known")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                note("")
                return
            except UnicodeDecodeError as error:
                note(f"error: this line is not UTF-8 text ({error})")
                continue
            if line == "/quit":
                return
            before = list(self.messages)
            try:
                if line == "/reset":
                    self.messages = list(self.opening)
                elif line.startswith("/") and line[1:].isalpha():
                    note(f"error: unknown command {line}; {_COMMANDS}")
                elif line:
                    self.answer(line, reuse_prefix=True)
            except EagleSlimError as error:
                # A conversation that has outgrown the context must not end the session.
                note(f"error: {error}")
                self.messages = before
            except KeyboardInterrupt as stop:
                # SIGTERM and SIGHUP, which have a number here, end the chat.
                if stop.args:
                    raise
                note("interrupted; the conversation goes on as it was before")
                self.messages = before


def figures(stats: GenerationStats) -> str:
    """Return the cost of a generation in one line."""
    speed = f"{stats.num_new_tokens} tokens in {stats.total_s:.2f} s: {stats.tokens_per_s:.1f} tokens/s"
    counts = f"{stats.num_accepted_tokens} in {stats.num_passes}"
    parts = [f"{speed}, {stats.mean_accepted_length:.2f} tokens per target pass ({counts})"]
    if stats.num_missed:
        parts.append(f"{stats.missed_rate:.1%} of them outside the draft vocabulary")
    if stats.num_reused_tokens:
        parts.append(f"{stats.num_reused_tokens} prompt tokens kept from before")
    if stats.num_partial_passes:
        parts.append(f"{stats.num_partial_passes} partial passes, {stats.num_rolled_back_tokens} tokens rolled back")
    if stats.tuned_misses:
        parts.append("the drafter's launch parameters are not tuned here")
    return "; ".join(parts)


def _check(
    model: SpeculativeModel, prompt: str, ids: Sequence[int] | str, output: GenerationOutput, options: dict[str, Any]
) -> None:
    from .api.output import difference, first_difference

    options = {**options, "seed": output.seed or 0}
    note("check: decoding the same plainly, one token a pass")
    plain = model.generate(ids, speculative=False, **options)
    tokens, expected = output.token_ids[0], plain.token_ids[0]
    kind = "sampling with the same seed" if options.get("temperature") else "greedy decoding"
    place, proof = first_difference(tokens, expected), output.stats.exactness
    if place is None:
        because = "" if proof is None else f"; {proof}"
        note(f"check: all {len(expected)} tokens equal plain {kind} ({plain.stats.tokens_per_s:.1f} tokens/s){because}")
        return
    if output.stats.is_exact:
        raise difference(f"check: the answer to {prompt[:60]!r}", tokens, expected, place, str(proof))
    reason = proof or "below float32 a forward over a tree rounds differently than one over a token: --dtype float32"
    if options.get("partial_verification") == "lossy":
        reason = "with --partial-verification lossy tokens may differ"
    raise EagleSlimError(f"check: token {place} differs from plain {kind}; {reason}.")


main = partial(run_cli, generate, prog_name="eagle-generate")


if __name__ == "__main__":
    main()
