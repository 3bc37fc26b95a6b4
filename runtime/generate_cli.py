"""`eagle-generate`: one answer, or a chat, from a converted head with its target."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from eagle_slim.vocab_tools.base_cli import EagleCommand, emit_json, json_option, note, run_cli, version_option
from eagle_slim.vocab_tools.errors import EagleSlimError, UsageError
from eagle_slim.vocab_tools.files import expand_home, write_file

from .options_cli import (
    check_names,
    load_heads,
    miss_log_option,
    model_options,
    partial_options,
    partial_verification,
    show_warnings_as_lines,
)

if TYPE_CHECKING:
    from .model import SpeculativeModel
    from .requests.output import GenerationOutput
    from .requests.stats import GenerationStats

_HELP = """\
/system TEXT  set the system message and start over; without a text, remove it
/reset        start over
/retry        answer the last message again
/undo         take the last message and its answer back
/save FILE    write the conversation as a line of JSON, as eagle-vocab counts it
/stats        figures of the whole chat
/help         this list
/quit         end the chat (also /exit, Ctrl-D, or Ctrl-C between answers)"""


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
@click.option("--draft-vocab", callback=_draft_vocab, metavar="N",
              help="Draft over the best N ids only; `full`, the default, is all of the head's.")  # fmt: skip
@click.option("--follow", type=click.Choice(["prompt"]), help="Let ids of the prompt join the draft vocabulary.")
@click.option("--follow-rows", type=click.IntRange(min=1), metavar="N", help="Maximum ids that join. Default: 512.")
@click.option(
    "--prompt", metavar="TEXT", help="Answer this prompt and exit. Default: the text on stdin, or a chat in a terminal."
)
@click.option("--system", metavar="TEXT", help="System message of the conversation.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--temperature", type=float, metavar="T", help="Sample, if above 0. Default: greedy.")
@click.option("--top-p", type=float, metavar="P", help="Sample from the smallest set of this probability.")
@click.option("--top-k", type=int, metavar="K", help="Sample from the K most probable tokens.")
@click.option("--seed", type=int, help="Random seed. Default: a new one each time, printed with the figures.")
@click.option("--stop", multiple=True, callback=_stop_texts, metavar="TEXT",
              help="End the answer at this text; repeat for more than one.")  # fmt: skip
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the end-of-sequence token.")
@partial_options
@miss_log_option
@click.option("--stats", is_flag=True, help="Print more: steps, concurrent sequences, launches, finish reasons.")
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
    prompt, as_json = options.pop("prompt"), options.pop("as_json")
    if prompt is None and not sys.stdin.isatty():
        try:
            prompt = sys.stdin.read().rstrip("\n")
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin is not UTF-8 text ({error}).", path="stdin") from error
    if prompt == "":
        raise UsageError("There is no prompt. Give a text with --prompt, or on stdin.", missing="prompt")
    for name, text in (("prompt", prompt), ("--system", options["system"])):
        _check_text(name, text)
    follow, follow_rows = options.pop("follow"), options.pop("follow_rows")
    if follow_rows is not None and follow is None:
        raise UsageError(
            "--follow-rows is how many ids join with --follow. Give --follow prompt as well.",
            option="--follow-rows", missing="--follow",
        )  # fmt: skip
    options["partial_verification"] = partial_verification(options)
    system, raw, check = options.pop("system"), options.pop("raw"), options.pop("check")
    more_figures = options.pop("stats")
    if raw and system is not None:
        raise UsageError(
            "--system is part of the chat template, which --raw leaves out. Give one of them.", option="--system"
        )
    if prompt is None and (as_json or check):
        raise UsageError(
            "--json and --check answer one prompt. Give --prompt.", option="--json" if as_json else "--check"
        )
    draft_vocab = options.pop("draft_vocab")
    check_names(options, () if draft_vocab is None else (draft_vocab,))
    from .drafter.follow import DEFAULT_FOLLOW_ROWS
    from .miss_log import check_log
    from .requests.arguments import sampling_config

    # Refused before the model is loaded.
    log_file = options.pop("miss_log")
    if log_file is not None:
        check_log(log_file)
    draws = {name: options[name] for name in ("temperature", "top_p", "top_k")}
    if sampling_config(**draws, seed=options["seed"] or 0).is_greedy:
        # What greedy decoding ignores was said just now.
        options |= dict.fromkeys(draws)
    (model,) = load_heads(
        options, draft_vocab=draft_vocab, follow=follow, follow_rows=follow_rows or DEFAULT_FOLLOW_ROWS
    )
    given = {k: v for k, v in options.items() if v not in (None, ())}
    session = _Session(model, system, raw, check, given, log_file, more_figures)
    if prompt is None:
        session.chat()
    else:
        session.answer(prompt, as_json)


def _check_text(name: str, text: str | None) -> None:
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"The {name} is not UTF-8 text (at character {error.start}).", option=name) from error


class _Session:
    """A loaded model, how to generate, and the conversation so far."""

    def __init__(
        self,
        model: SpeculativeModel,
        system: str | None,
        raw: bool,
        check: bool,
        options: dict[str, Any],
        log_file: str | None,
        more_figures: bool = False,
    ) -> None:
        from .miss_log import MissLog, check_log, vocabulary_name

        self.model, self.raw, self.check, self.options = model, raw, check, options
        self.more_figures = more_figures
        self.opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)
        self.answered: list[GenerationStats] = []
        self.saved: set[Path] = set()
        self.log_file, self.log = log_file, None if log_file is None else MissLog.of(model)
        self.log_name = vocabulary_name(model.draft_vocab, model.drafter.weights.follow is not None)
        if log_file is not None:
            check_log(log_file, self.log)
        self._told = {f"target {model.target.backend}", model.drafting}
        """Parts of `GenerationStats.path` that were printed last."""

    def answer(self, prompt: str, as_json: bool = False, reuse_prefix: bool = False) -> None:
        """Stream one answer and print its figures, or print both as JSON; what ran is told when it changes."""
        from .requests.streaming import StopTextStreamer

        ids, streamer = self._encode(prompt), None
        if not as_json:
            streamer = StopTextStreamer(self.model.tokenizer, self.options.get("stop", ()), skip_special_tokens=True)
        output = self.model.generate(ids, streamer=streamer, reuse_prefix=reuse_prefix, **self.options)
        result = output.results[0]
        self.messages.append({"role": "assistant", "content": result.text or ""})
        self.answered.append(output.stats)
        if self.log_file is not None and self.log is not None:
            self.log.add(output, self.log_name)
            self.log.save(self.log_file)
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
            if self.more_figures:
                note(step_figures(output.stats))
        if self.check:
            _check(self.model, prompt, ids, output, self.options)

    def chat(self) -> None:
        """Talk until /quit or the end of input; Ctrl-C ends an answer, and between two of them the session."""
        note(f"draft vocabulary {self.model.draft_vocab:,}; /help lists the commands, Ctrl-C ends an answer")
        while True:
            try:
                prompt = input("> ").strip()
            except EOFError:
                note("")
                return
            except UnicodeDecodeError as error:
                note(f"error: this is not UTF-8 text ({error})")
                continue
            if prompt in ("/quit", "/exit"):
                return
            before = list(self.messages)
            try:
                _check_text("message", prompt)
                if _is_command(prompt):
                    prompt = self._run_command(prompt)
                if prompt:
                    self.answer(prompt, reuse_prefix=True)
            except EagleSlimError as error:
                # A conversation that has outgrown the context must not end the session.
                note(f"error: {error}")
                self.messages = before
            except KeyboardInterrupt:
                note("\ninterrupted; the conversation goes on as it was before")
                self.messages = before

    def _run_command(self, line: str) -> str:
        """Do what a command says; returns a message that is to be answered, or ""."""
        command, _, text = line.partition(" ")
        if command == "/help":
            note(_HELP)
        elif command == "/stats":
            from .requests.stats import GenerationStats

            stats = GenerationStats.sum(self.answered)
            note(figures(stats))
            note(step_figures(stats))
        elif command in ("/retry", "/undo", "/save") and self.messages == self.opening:
            raise UsageError("there is no message yet")
        elif command in ("/retry", "/undo"):
            *self.messages, message, _ = self.messages
            return message["content"] if command == "/retry" else ""
        elif command == "/save":
            self._save(text.strip())
        elif command in ("/reset", "/system"):
            if command == "/system" and self.raw:
                raise UsageError("a system message is part of the chat template, which --raw leaves out")
            if command == "/system":
                self.opening = [{"role": "system", "content": text.strip()}] if text.strip() else []
            self.messages = list(self.opening)
        else:
            raise UsageError(f"{command} is no command; /help lists them")
        return ""

    def _save(self, name: str) -> None:
        if not name:
            raise UsageError("/save needs the name of a file")
        path = expand_home(name)
        if path.exists() and path not in self.saved:
            raise UsageError(f"{path}: exists already. Choose another name.", path=path, found="file")
        try:
            write_file(path, json.dumps({"messages": self.messages}, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})", path=path) from error
        self.saved.add(path)
        note(f"saved {len(self.messages)} messages to {path}")

    def _encode(self, prompt: str) -> Sequence[int] | str:
        self.messages.append({"role": "user", "content": prompt})
        return prompt if self.raw else self.model.encode_chat(self.messages)


def _is_command(line: str) -> bool:
    """Whether a line is a command, rather than a text that begins with a path such as /etc/hosts."""
    return line.startswith("/") and line[1:].partition(" ")[0].isalpha()


def figures(stats: GenerationStats) -> str:
    """Return the cost of a generation in one line."""
    reused = f", {stats.num_reused_tokens} of {stats.num_prompt_tokens} prompt tokens kept from before"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in stats.shares.items() if share or name == "host")
    missed = f"; {stats.missed_rate:.1%} of them outside the draft vocabulary" if stats.num_missed else ""
    ahead = (
        f"; {stats.num_partial_passes} passes over a part of the cache ran ahead, of whose tokens "
        f"{stats.num_rolled_back_tokens} were not confirmed"
    )
    return (
        f"{stats.num_new_tokens} tokens in {stats.total_s:.2f} s: {stats.tokens_per_s:.1f} tokens/s, "
        f"{stats.mean_accepted_length:.2f} tokens per target pass ({stats.num_passes} passes){missed}"
        f"{reused if stats.num_reused_tokens else ''}; time: {shares}"
        f"{ahead if stats.num_partial_passes else ''}"
        + ("; the drafter's launch parameters are not tuned here" if "drafter" in stats.tuned_misses else "")
    )


def step_figures(stats: GenerationStats) -> str:
    """Return who ran in the steps of a generation, and why they ended, a line each."""
    ends = ", ".join(f"{reason} {count}" for reason, count in stats.finish_reasons.items())
    hits, misses = stats.tuned_hits, stats.tuned_misses
    launches = ", ".join(
        f"{kind} {hits.get(kind, 0)} of {hits.get(kind, 0) + misses.get(kind, 0)}" for kind in sorted({*hits, *misses})
    )
    return (
        f"steps: {stats.num_steps}, {stats.tokens_per_step:.2f} tokens each; {stats.num_empty_steps} more were "
        f"empty\nsequences side by side: mean {stats.mean_active:.2f}, least {stats.least_active}, most "
        f"{stats.most_active}\nanswers ended by: {ends or 'none'}"
        + (f"\nlaunches with tuned parameters: {launches}" if launches else "")
    )


def _check(
    model: SpeculativeModel, prompt: str, ids: Sequence[int] | str, output: GenerationOutput, options: dict[str, Any]
) -> None:
    """Decode plainly and compare. Raises `EagleSlimError` at the first token that differs."""
    from .requests.exactness import difference, exactness, first_difference

    options = {**options, "seed": output.seed or 0}
    plain = model.generate(ids, speculative=False, **options)
    ours, own = output.token_ids[0], plain.token_ids[0]
    kind = "sampling with the same seed" if options.get("temperature") else "greedy decoding"
    place, proof = first_difference(ours, own), exactness(output.stats)
    if place is None:
        because = "" if proof is None else f"; {proof}"
        note(f"check: all {len(own)} tokens equal plain {kind} ({plain.stats.tokens_per_s:.1f} tokens/s){because}")
        return
    if proof is not None:
        raise difference(f"check: the answer to {prompt[:60]!r}", ours, own, place, proof)
    message = f"check: token {place} differs from plain {kind}"
    ahead = options.get("partial_verification")
    if ahead is not None and ahead.mode == "lossy":
        message += ", as it may with --partial-verification lossy"
    elif str(model.target.dtype) != "torch.float32":
        message += ". Below float32 a forward over a tree and one over a token round differently: try --dtype float32"
    raise EagleSlimError(message + ".", token=place)


def main(args: list[str] | None = None) -> NoReturn:
    """Run `eagle-generate`."""
    run_cli(generate, args, "eagle-generate")


if __name__ == "__main__":
    main()
