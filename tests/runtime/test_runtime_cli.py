import gc
import io
import json
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import pytest
import torch
from eagle_slim.runtime import SpeculativeModel, TargetError, generate_cli
from eagle_slim.runtime.compare import cli as compare_cli
from eagle_slim.runtime.options_cli import load_heads
from eagle_slim.vocab_tools.common_cli import emit_json
from huggingface_hub.utils import are_progress_bars_disabled
from packaging.version import Version
from support.conversion import BY_ID, convert
from support.hub_server import HubServer, connected
from support.tiny_models import write_pair
from transformers import TextStreamer

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
TREE = ("--depth", "2", "--draft-top-k", "4", "--total-tokens", "20")


class Pair(NamedTuple):
    """Folders of a target, of an unconverted head, and of a converted one of 340 rows."""

    target: str
    head: str
    slim: str


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target, head = write_pair(folder)
    convert(head, draft_vocab=340, target=target, out=folder / "slim", vocabulary=BY_ID)
    return Pair(str(target), str(head), str(folder / "slim"))


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(main: Callable[[list[str]], object], *args: str, stdin: str | None = None) -> Ended:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as stop:
            main([*args])
        captured = capsys.readouterr()
        return Ended(int(stop.value.code or 0), captured.out, captured.err)

    return call


def with_defaults(args: tuple[str, ...], *defaults: str) -> list[str]:
    """Add the defaults, a name before each value, whose names are not given: no command takes one twice."""
    pairs = zip(defaults[::2], defaults[1::2], strict=True)
    return [*args, *(word for pair in pairs if pair[0] not in args for word in pair)]


@pytest.fixture
def generate(run: Run, pair: Pair) -> Run:
    """Run `eagle-generate` with a head, the converted one unless another is given."""

    def call(*args: str, head: str = pair.slim, stdin: str | None = None) -> Ended:
        return run(generate_cli.main, head, *with_defaults(args, "--target", pair.target, *TREE), stdin=stdin)

    return call


@pytest.fixture
def compare(run: Run, pair: Pair, tmp_path: Path) -> Run:
    """Run `eagle-compare` greedily over prompts, one a line, with the converted head unless another is given."""

    def call(*args: str, head: str = pair.slim, prompts: str = "hello\n") -> Ended:
        (tmp_path / "p.txt").write_text(prompts)
        given = ("--prompts", str(tmp_path / "p.txt"), "--modes", "greedy", "--tree", "2,4,20")
        return run(compare_cli.main, head, *with_defaults(args, "--target", pair.target, *given))

    return call


def answer(ended: Ended) -> dict[str, Any]:
    assert ended.code == 0, ended.err
    value: dict[str, Any] = json.loads(ended.out)
    return value


def test_one_answer_with_check(generate: Run) -> None:
    code, out, err = generate("--prompt", "hello", "--max-new-tokens", "12", "--check")
    assert (code, bool(out.strip())) == (0, True), err
    assert "tokens per target pass" in err
    assert err.index("check: decoding the same plainly") < err.index("equal plain greedy decoding")


def test_a_line_says_once_that_kernels_compile(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle_slim.runtime.step.graphs import Graphs

    run = Graphs.run

    def practise(self: Graphs, *parts: Any) -> None:
        self.practise([])
        run(self, *parts)

    monkeypatch.setattr(Graphs, "run", practise)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert generate("--prompt", "hello", "--max-new-tokens", "4").err.count("compiling kernels") == 1


def test_downloads_show_their_progress(generate: Run) -> None:
    """They may take minutes."""
    assert generate("--prompt", "hello", "--max-new-tokens", "2").code == 0
    assert not are_progress_bars_disabled()


def test_garbage_is_looked_for_after_an_import_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "eagle_slim.runtime.opening.targets", None)
    with pytest.raises(ModuleNotFoundError):
        load_heads({"head": None})
    assert gc.isenabled()


def test_a_check_drafts_the_trees_of_any_call_on_a_cpu(run: Run, pair: Pair) -> None:
    command = (pair.slim, "--target", pair.target, "--prompt", "hello", "--max-new-tokens", "6", "--check")
    assert "trees of 4 nodes (by sizes alone: the model is on cpu)" in run(generate_cli.main, *command).err


def test_a_check_that_finds_another_token_fails(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SpeculativeModel.generate

    def spoil(proof: str | None, is_exact: bool) -> None:
        def generate(self: SpeculativeModel, *args: Any, **options: Any) -> Any:
            output = made(self, *args, ignore_eos=True, **options)
            if options.get("speculative", True):
                output.results[0].token_ids[4] = 7
            return replace(output, stats=replace(output.stats, exactness=proof, is_exact=is_exact))

        monkeypatch.setattr(SpeculativeModel, "generate", generate)

    for proof, is_exact, told in (
        ("rows are exact", True, "token 4: 7 instead of"),
        ("ties in float32", False, "token 4 differs from plain greedy decoding; ties in float32"),
        (None, False, "--dtype float32"),
    ):
        spoil(proof, is_exact)
        ended = generate("--prompt", "hello", "--max-new-tokens", "6", "--check")
        assert ended.code == 1
        assert told in ended.err


def test_json_from_stdin_and_a_smaller_vocabulary(generate: Run) -> None:
    args = ("--max-new-tokens", "6", "--json", "--draft-vocab", "270")
    fixed = answer(generate(*args, stdin="hello you\n"))
    assert fixed["draft_vocab"] == 270
    assert len(fixed["token_ids"]) == fixed["stats"]["num_new_tokens"] <= 6
    assert fixed["finish_reason"] in ("length", "eos")
    checked = answer(generate(*args, "--check", stdin="hello you\n"))
    assert checked["token_ids"] == fixed["token_ids"]


@pytest.mark.parametrize("arguments", [("--prompt", "hello", "--follow", "prompt"), ("--follow=prompt",)])
def test_following_the_prompt_was_removed(generate: Run, compare: Run, arguments: tuple[str, ...]) -> None:
    for ended in (generate(*arguments), compare(*arguments[-2:])):
        assert ended.code == 2
        assert "--follow was removed. Draft over 16,000 rows instead" in ended.err
    assert "--follow" not in generate("--help").out + compare("--help").out


def test_a_stop_string_is_not_printed(generate: Run) -> None:
    args = ("--prompt", "hello", "--max-new-tokens", "8")
    text = answer(generate(*args, "--json"))["text"]
    assert generate(*args, "--stop", text[2:4]).out == text[: text.index(text[2:4])] + "\n"


def test_raw_text_is_continued_without_the_template(generate: Run, pair: Pair) -> None:
    args = ("--prompt", "hello", "--json", "--max-new-tokens", "4")
    raw, chat = (answer(generate(*args, *more, head=pair.head)) for more in (("--raw",), ()))
    assert raw["token_ids"] != chat["token_ids"]


def test_an_empty_system_message_is_one(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read, seen = SpeculativeModel.encode_chat, list[Any]()
    monkeypatch.setattr(SpeculativeModel, "encode_chat", lambda self, said: seen.extend(said) or read(self, said))
    # Templates have defaults in the place of none.
    assert generate("--prompt", "hello", "--max-new-tokens", "1", "--system", "").code == 0
    assert seen[0] == {"role": "system", "content": ""}


def test_artifact_and_target_by_repository(run: Run, pair: Pair, tmp_path: Path) -> None:
    command = ("someone/slim", "--target", "someone/target", *TREE, "--draft-vocab", "300")
    command += ("--prompt", "hello", "--max-new-tokens", "4", "--json")
    with HubServer() as hub, connected(hub, tmp_path / "home"):
        for name in ("target", "slim"):
            files = (path for path in Path(getattr(pair, name)).iterdir() if path.is_file())
            hub.add_model(f"someone/{name}", {path.name: path.read_bytes() for path in files})
        online = answer(run(generate_cli.main, *command))
    assert online["draft_vocab"] == 300
    # The server is gone: what was fetched is enough.
    with connected(hub, tmp_path / "home", offline=True):
        assert answer(run(generate_cli.main, *command, "--offline"))["token_ids"] == online["token_ids"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--draft-vocab", "some"], 2, "8192 or full"),
        (["--draft-window", "-1"], 2, "--draft-window"),
        (["--drafter", "triton", "--device", "cpu"], 1, "GPU"),
        (["--device", "gpu"], 2, "cannot be computed on"),
        (["--device", "cuda:64"], 2, "cannot be computed on"),
        (["--device", "meta"], 2, "cannot be computed on"),
        (["--raw", "--system", "y"], 2, "Give one of them"),
        (["--prompt", ""], 2, "There is no prompt"),
        (["--prompt", "x", "--prompt=y"], 2, "--prompt takes one value and is given 2 times"),
        (["--draft-vocab", "341"], 2, "draft_vocab = 341"),
        (["--total-tokens", "999"], 2, "top_k = 4 give only"),
    ],
)
def test_mistakes(generate: Run, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, message: str) -> None:
    monkeypatch.setattr("eagle_slim.runtime.drafter.drafter.is_interpreted", lambda: False)
    got, out, err = generate(*with_defaults(tuple(args), "--prompt", "x"))
    assert (got, out) == (code, "")
    assert message in err
    assert "Traceback" not in err
    assert code == 1 or "target: transformers" not in err  # a misspelled call is refused before the target is loaded


@pytest.mark.skipif(
    Version(huggingface_hub.__version__) < Version("1.28"), reason="its retries then fail, as its client is closed"
)
def test_a_target_that_cannot_be_looked_up_is_told(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer() as hub:
        pass
    # transformers and huggingface_hub wait before they ask again.
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with (
        connected(hub, tmp_path / "home"),
        pytest.raises(TargetError, match=r"no such folder here, and .* cannot be reached.*\nCheck the connection"),
    ):
        SpeculativeModel.from_pretrained("nope", pair.slim)


def test_an_empty_stdin_and_a_missing_head(generate: Run, run: Run) -> None:
    assert generate(stdin="").code == 2
    for name in ("./no-such-head", "no-such-head"):
        for args in ((name,), ("--target", name)):
            code, _, err = run(generate_cli.main, *args, "--prompt", "x", "--offline")
            assert code != 0
            assert name in err


def test_a_terminal_that_lacks_a_letter_gets_the_answer(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr("transformers.TextStreamer.put", lambda *_: print("é"))
    monkeypatch.setattr("transformers.TextStreamer.end", lambda *_: None)
    assert generate("--prompt", "hello", "--max-new-tokens", "1").code == 0
    terminal.seek(0)
    assert "\\xe9" in terminal.read()


def test_json_is_json_where_letters_are_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", terminal)
    emit_json("é😀")
    terminal.seek(0)
    assert json.load(terminal) == "é😀"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_text_that_is_no_utf8(generate: Run, monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8", errors=errors))
    code, out, err = generate()
    assert (code, out) == (2, "")
    assert "stdin is not UTF-8 text" in err


@pytest.fixture
def chat(generate: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def call(*lines: str, options: tuple[str, ...] = ()) -> Ended:
        monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))
        return generate("--max-new-tokens", "5", *options)

    return call


def test_ctrl_c_ends_an_answer_and_not_the_chat(chat: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    put, interrupted = TextStreamer.put, []

    def interrupt_once(self: TextStreamer, value: torch.Tensor) -> None:
        if not interrupted:
            interrupted.append(value)
            raise KeyboardInterrupt
        put(self, value)

    with monkeypatch.context() as patch:
        patch.setattr(TextStreamer, "put", interrupt_once)
        code, out, err = chat("hello", "hello", "/quit")
    assert code == 0, err
    assert err.count("tokens per target pass") == 1
    assert "interrupted; the conversation goes on as it was before" in err
    # As if the first message had never been.
    assert chat("hello", "/quit").out == out.replace("> \n> ", "> ", 1)


def test_a_chat_that_remembers_nothing_says_so(chat: Run) -> None:
    assert "every line is continued by itself" in chat("/quit", options=("--raw",)).err
    assert "by itself" not in chat("/quit").err


def test_sigterm_ends_a_chat_in_the_middle_of_an_answer(chat: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextStreamer, "put", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert chat("hello", "/quit").code == 130


def test_commands_of_the_chat(chat: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[str]] = []
    encode = SpeculativeModel.encode_chat

    def note(model: SpeculativeModel, messages: Any) -> Any:
        sent.append([message["content"] for message in messages if message["role"] != "assistant"])
        return encode(model, messages)

    monkeypatch.setattr(SpeculativeModel, "encode_chat", note)
    lines = ("one", "two", "/reset", "three", "/nonsense", "x" * 1000, "/etc/hosts", "/quit", "four")
    code, _, err = chat(*lines)
    assert code == 0, err
    # A message that does not fit is told, and forgotten.
    assert sent == [["one"], ["one", "two"], ["three"], ["three", lines[5]], ["three", "/etc/hosts"]]
    assert "leaves no room" in err
    assert "unknown command /nonsense; /reset starts over" in err


def test_a_line_of_the_chat_that_is_no_utf8_is_told(chat: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter([b"\xff", b"/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines).decode())
    code, _, err = chat()
    assert code == 0
    assert "not UTF-8 text" in err


def test_streams_that_are_closed_or_that_nobody_reads_any_more(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    args = ("--prompt", "hello", "--max-new-tokens", "2")
    monkeypatch.setattr(sys, "stderr", Gone())
    assert generate(*args).code == 0
    monkeypatch.setattr(sys, "stdout", None)
    assert generate(*args).code == 0


def test_a_seed_is_drawn_and_printed(generate: Run) -> None:
    args = ("--prompt", "hello", "--max-new-tokens", "6", "--temperature", "1", "--json")
    first, second = (answer(generate(*args, "--draft-vocab", "full")) for _ in range(2))
    assert first["seed"] != second["seed"]
    again = generate(*args, "--seed", str(first["seed"]), "--check")
    assert answer(again)["token_ids"] == first["token_ids"]
    assert "sampling with the same seed" in again.err
    assert first["draft_vocab"] == 340


def test_compare_writes_all_and_refuses_to_overwrite(compare: Run, tmp_path: Path) -> None:
    prompts = '{"category": "a", "turns": ["one"]}\n{"category": "b", "turns": ["two", "three"]}\n'
    args = ("--max-new-tokens", "6", "--sizes", "full,300", "--out", str(tmp_path / "out"))
    code, out, err = compare(*args, "--modes", "greedy,sampled", prompts=prompts)
    assert code == 0, err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "p.txt"]
    rows = json.loads((tmp_path / "out" / "compare.json").read_text())["rows"]
    assert [row["size"] for row in rows[:3]] == ["plain", "all 340 of 360", "300"]
    assert len({(row["category"], row["mode"]) for row in rows}) == 3 * 2
    assert out.startswith("size")
    code, _, err = compare(*args, prompts=prompts)
    assert code == 2
    assert "--force" in err


def test_what_cannot_be_written_is_printed(compare: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("eagle_slim.runtime.compare.report.Comparison.write", write)
    code, out, err = compare("--max-new-tokens", "2", "--sizes", "full", "--out", str(tmp_path / "out"), prompts="one")
    assert code == 1
    assert out.startswith("size")
    assert "No space left" in err


def test_ctrl_c_writes_what_there_is(compare: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls = SpeculativeModel.generate, [0]

    def interrupt(*args: Any, **options: Any) -> Any:
        calls[0] += options.get("max_new_tokens") == 6
        if calls[0] == 5:
            raise KeyboardInterrupt
        return made(*args, **options)

    monkeypatch.setattr(SpeculativeModel, "generate", interrupt)
    args = ("--max-new-tokens", "6", "--sizes", "full,300", "--out", str(tmp_path / "out"))
    code, out, err = compare(*args, prompts="one\ntwo\n")
    assert (code, out.startswith("size")) == (130, True), err
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert (written["is_complete"], written["setup"]["target"]) == (False, "target")  # as --target calls it
    assert {row["num_answers"] for row in written["rows"]} == {1}


def test_a_failing_candidate_costs_no_other(compare: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SpeculativeModel.generate

    def fail(self: SpeculativeModel, *args: Any, **options: Any) -> Any:
        if self.draft_vocab == 300 and options["max_new_tokens"] == 6:
            raise RuntimeError("CUDA error")
        return made(self, *args, **options)

    monkeypatch.setattr(SpeculativeModel, "generate", fail)
    args = ("--max-new-tokens", "6", "--sizes", "full,300", "--out", str(tmp_path / "out"))
    code, out, err = compare(*args, prompts="one\ntwo\n")
    assert (code, out.startswith("size")) == (1, True), err
    assert "300, batch 1, prompt 0 (2 times): turn 1 left out: RuntimeError: CUDA error" in err
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [row["num_answers"] for row in written["rows"]] == [2, 2, 0]
    assert [each["num_times"] for each in written["omissions"]] == [2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--sizes", "full,x"], "the form full,16384,4096"),
        (["--tree", "5,10"], "DEPTH,TOP_K,NODES"),
        (["--draft-window", "0,some"], "auto,0,2048"),
        (["--batch", "1,x"], "1,4,16"),
    ],
)
def test_compare_mistakes(compare: Run, args: list[str], message: str) -> None:
    code, out, err = compare(*args)
    assert (code, out) == (2, "")
    assert message in err


def test_an_unconverted_head_needs_a_ranking(compare: Run, pair: Pair) -> None:
    code, _, err = compare("--max-new-tokens", "4", "--sizes", "full,320", head=pair.head)
    assert code == 2
    assert "needs a ranking" in err
    code, out, err = compare("--max-new-tokens", "4", "--head", pair.slim, "--offline", head=pair.head)
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["plain", "head:", "slim:"]


@pytest.mark.parametrize(("main", "max_options"), [(generate_cli.main, 27), (compare_cli.main, 25)])
def test_help_and_version(run: Run, main: Callable[[list[str]], object], max_options: int) -> None:
    code, out, _ = run(main, "--help")
    assert code == 0
    assert "Examples:" in out
    options = [line for line in out.split("Options:")[1].splitlines() if line.startswith("  -")]
    assert len(options) - 1 <= max_options  # without --help
    assert run(main, "--version").code == 0


# It is imported already where the tests run.
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", ["compare.cli", "generate_cli", "tune"])
def test_commands_as_modules(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(f"eagle_slim.runtime.{name}", run_name="__main__")
    assert stopped.value.code == 0
    assert "Example" in capsys.readouterr().out
