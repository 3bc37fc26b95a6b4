"""`eagle-generate` and `eagle-compare`: wiring, output, exit codes."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_slim.convert import Manifest
from eagle_slim.convert.conversion.convert import convert_head
from eagle_slim.convert.conversion.vocab_choice import VocabRequest
from eagle_slim.runtime import MissLog, SpeculativeModel, compare_cli, generate_cli
from eagle_slim.runtime.comparison.answers import Answer, AnswerLog
from eagle_slim.runtime.generation.streaming import StopTextStreamer
from eagle_slim.runtime.model_options_cli import load_other_head
from eagle_slim.vocab_tools import TokenCounts, load_tokenizer
from support.tiny_models import write_head, write_pair

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
TREE = ["--depth", "2", "--draft-top-k", "4", "--total-tokens", "20"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """(target, unconverted head, converted head of 340 rows)."""
    folder = tmp_path_factory.mktemp("pair")
    target, head = write_pair(folder)
    convert_head(head, draft_vocab=340, target=target, out=folder / "slim", vocabulary=VocabRequest(order="ids"))
    return str(target), str(head), str(folder / "slim")


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(main: Callable[[list[str]], object], *args: str, stdin: str | None = None) -> tuple[int, str, str]:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as stop:
            main([*args])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


def test_one_answer_with_check(run: Run, pair: tuple[str, str, str]) -> None:
    target, _, slim = pair
    code, out, err = run(
        generate_cli.main, slim, "--target", target, *TREE, "--prompt", "hello", "--max-new-tokens", "12", "--check"
    )
    assert code == 0, err
    assert out.strip()
    assert "12 tokens in" in err or "ended by eos" in err
    assert "tokens per target pass" in err
    assert "draft" in err
    assert "verify" in err
    assert "equal plain greedy decoding" in err


def test_json_from_stdin_and_a_smaller_vocabulary(run: Run, pair: tuple[str, str, str]) -> None:
    target, _, slim = pair
    args = (slim, "--target", target, *TREE, "--max-new-tokens", "6", "--json", "--draft-vocab", "300", "--ignore-eos")
    code, out, err = run(generate_cli.main, *args, "--temperature", "0.9", "--seed", "3", "--check", stdin="hello\n")
    assert code == 0, err
    value = json.loads(out)
    assert value["draft_vocab"] == 300
    assert len(value["token_ids"]) == 6
    assert value["finish_reason"] == "length"
    assert value["stats"]["num_new_tokens"] == 6
    assert "sampling with the same seed" in err
    again = json.loads(run(generate_cli.main, *args, "--temperature", "0.9", "--seed", "3", stdin="hello\n")[1])
    assert again["token_ids"] == value["token_ids"]


def test_a_vocabulary_that_follows_the_text(run: Run, pair: tuple[str, str, str]) -> None:
    target, _, slim = pair
    args = (slim, "--target", target, *TREE, "--prompt", "hello you", "--max-new-tokens", "8", "--ignore-eos", "--json")
    small = ("--draft-vocab", "270", "--follow", "text", "--follow-rows", "30")
    code, out, err = run(generate_cli.main, *args, *small, "--check")
    assert code == 0, err
    assert "follows the text: up to 30 of 90 ids join 270" in err
    fixed = json.loads(run(generate_cli.main, *args, "--draft-vocab", "270")[1])
    followed = json.loads(out)
    assert followed["token_ids"] == fixed["token_ids"]
    assert followed["draft_vocab"] == 270
    assert followed["stats"]["num_missed"] <= fixed["stats"]["num_missed"]


def test_what_is_generated_is_counted_into_a_log(run: Run, pair: tuple[str, str, str], tmp_path: Path) -> None:
    target, _, slim = pair
    log = tmp_path / "use.safetensors"
    args = (slim, "--target", target, *TREE, "--draft-vocab", "300", "--ignore-eos", "--max-new-tokens", "6",
            "--miss-log", str(log))  # fmt: skip
    found = []
    for prompt in ("hello", "good day"):
        code, out, err = run(generate_cli.main, *args, "--prompt", prompt, "--json")
        assert code == 0, err
        found.append(json.loads(out))
    counts = TokenCounts.load(log)
    generated = [token for each in found for token in each["token_ids"]]
    assert counts.sources[0].counts.tolist() == np.bincount(generated, minlength=counts.vocab_size).tolist()
    missed = sum(each["stats"]["num_missed"] for each in found)
    assert missed == sum(token not in ids_of(slim, 300) for token in generated)
    assert counts.sources[0].provenance["missed"] == {"300": {"tokens": 12, "missed": missed}}
    assert load_tokenizer(target).tokenizer_hash == counts.tokenizer_hash
    assert load_tokenizer(target).vocab_size == counts.vocab_size
    log.write_bytes(b"{}")
    code, out, err = run(generate_cli.main, *args, "--prompt", "x")
    assert (code, out) == (1, "")
    assert "this is JSON" in err


def ids_of(artifact: str, size: int) -> set[int]:
    return set(Manifest.load(Path(artifact)).ranks.prefix(size).target_ids.tolist())  # type: ignore[union-attr]


def test_a_head_in_a_sub_folder(run: Run, pair: tuple[str, str, str]) -> None:
    target, head, slim = pair
    for path in (head, slim):
        folder, name = os.path.split(path)
        code, out, err = run(
            generate_cli.main, folder, "--head-subfolder", name, "--target", target, *TREE, "--prompt", "hello",
            "--max-new-tokens", "4", "--json",
        )  # fmt: skip
        assert code == 0, err
        assert json.loads(out)["stats"]["num_new_tokens"] > 0


def test_a_converted_eagle_1_head_is_slimmed_at_load(run: Run, tmp_path: Path) -> None:
    target, _ = write_pair(tmp_path)
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    head = write_head(tmp_path / "eagle", kind="eagle", vocab=vocab)
    convert_head(head, draft_vocab=340, target=target, out=tmp_path / "slim", vocabulary=VocabRequest(order="ids"))
    args = [str(tmp_path / "slim"), "--target", str(target), *TREE, "--prompt", "hello", "--max-new-tokens", "8"]
    for size, options in ((340, []), (300, ["--draft-vocab", "300"])):
        code, out, err = run(generate_cli.main, *args, *options, "--json", "--check")
        assert code == 0, err
        assert json.loads(out)["draft_vocab"] == size
        assert "equal plain greedy decoding" in err


def test_raw_text_is_continued_without_the_template(run: Run, pair: tuple[str, str, str]) -> None:
    target, head, _ = pair
    code, out, _ = run(
        generate_cli.main,
        head,
        "--target",
        target,
        *TREE,
        "--prompt",
        "hello",
        "--raw",
        "--json",
        "--max-new-tokens",
        "4",
    )
    assert code == 0
    chat = run(
        generate_cli.main, head, "--target", target, *TREE, "--prompt", "hello", "--json", "--max-new-tokens", "4"
    )
    assert json.loads(out)["stats"]["num_prompt_tokens"] < json.loads(chat[1])["stats"]["num_prompt_tokens"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--prompt", "x", "--top-p", "0.5"], 2, "temperature"),
        (["--prompt", "x", "--draft-vocab", "9999"], 2, "9999"),
        (["--prompt", "x", "--draft-vocab", "some"], 2, "neither a number nor `full`"),
        (["--prompt", "x", "--total-tokens", "900"], 2, "candidates"),
        (["--prompt", "x", "--max-model-len", "2"], 1, "no room"),
        (["--prompt", "x", "--dtype", "float8"], 2, "float8"),
        (["--prompt", "x", "--drafter", "triton", "--device", "cpu"], 1, "GPU"),
        (["--prompt", "x", "--draft-weights", "fp8", "--device", "cpu"], 1, "sm_89"),
        (["--prompt", "x", "--draft-weights", "bf16", "--dtype", "float32"], 2, "float32"),
        (["--prompt", "x", "--follow", "page"], 2, "page"),
        (["--prompt", "x", "--follow-rows", "9"], 2, "Give --follow"),
        (["--prompt", "x", "--follow", "text", "--follow-rows", "9000"], 2, "8,192"),
        (["--prompt", "x", "--device", "gpu"], 2, "expected cpu, cuda"),
        (["--prompt", "x", "--device", "cuda:64"], 2, "is not there"),
        (["--prompt", "x", "--device", "meta"], 2, "cannot be computed on"),
        (["--prompt", "x", "--tap-layers", "1,b,3"], 2, "layer numbers"),
        (["--prompt", "x", "--raw", "--system", "y"], 2, "Give one of them"),
    ],
)
def test_mistakes(run: Run, pair: tuple[str, str, str], args: list[str], code: int, message: str) -> None:
    target, _, slim = pair
    got, out, err = run(generate_cli.main, slim, "--target", target, *args)
    assert got == code
    assert message in err
    assert out == ""
    assert "Traceback" not in err


def test_an_empty_stdin_and_a_missing_head(run: Run, pair: tuple[str, str, str]) -> None:
    assert run(generate_cli.main, pair[2], stdin="")[0] == 2
    code, _, err = run(generate_cli.main, "./no-such-head", "--prompt", "x", "--offline")
    assert code == 1
    assert "no-such-head" in err


def test_text_that_is_no_utf8(run: Run, pair: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(generate_cli.main, pair[2], "--prompt", "a\udcff")
    assert (code, out) == (2, "")
    assert "prompt is not UTF-8 text (at character 1)" in err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    code, out, err = run(generate_cli.main, pair[2])
    assert (code, out) == (2, "")
    assert "stdin is not UTF-8 text" in err


def test_the_streamed_answer_ends_where_the_text_does(run: Run, pair: tuple[str, str, str]) -> None:
    target, _, slim = pair
    args = (slim, "--target", target, *TREE, "--prompt", "hello", "--max-new-tokens", "30", "--ignore-eos")
    whole = json.loads(run(generate_cli.main, *args, "--json")[1])["text"]
    stop = next(letter for letter in whole[5:] if letter.isascii() and letter.isalpha())
    text = json.loads(run(generate_cli.main, *args, "--stop", stop, "--json")[1])["text"]
    assert text == whole[: whole.index(stop)]
    assert run(generate_cli.main, *args, "--stop", stop)[1] == text + "\n"


def test_a_chat_without_a_template_outlives_a_message_that_does_not_fit(
    run: Run, pair: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _, slim = pair
    ours, theirs = pty.openpty()
    os.write(ours, b"x" * 90 + b"\nhello\n/exit\n")
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        code, _, err = run(
            generate_cli.main,
            slim,
            "--target",
            target,
            *TREE,
            "--raw",
            "--max-new-tokens",
            "5",
            "--max-model-len",
            "60",
        )
    os.close(ours)
    assert code == 0, err
    assert "leaves no room" in err
    assert "5 tokens in" in err


def test_a_chat_in_a_terminal(pair: tuple[str, str, str]) -> None:
    target, _, slim = pair
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "eagle_slim.runtime.generate_cli", slim, "--target", target, *TREE]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "5", "--max-model-len", "60"], stdin=theirs, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, b"hello\n\n/reset\nhello\n" + b"x" * 90 + b"\nhello\n/exit\n")
    out, err = process.communicate(timeout=1800)
    os.close(ours)
    assert process.returncode == 0, err
    figures = [line for line in err.splitlines() if "tokens per target pass" in line]
    assert len(figures) >= 2
    assert "leaves no room" in err
    # After /reset the same message gets the same answer.
    answers = [line.lstrip("> ") for line in out.split("\n") if line.lstrip("> ")]
    assert answers[0] == answers[1]


def test_ctrl_c_ends_an_answer_and_not_the_chat(
    run: Run, pair: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _, slim = pair
    command = [slim, "--target", target, *TREE, "--max-new-tokens", "5"]
    put, interrupted = StopTextStreamer.put, []

    def interrupt_once(self: StopTextStreamer, value: torch.Tensor) -> None:
        if not interrupted:
            interrupted.append(value)
            raise KeyboardInterrupt
        put(self, value)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(StopTextStreamer, "put", interrupt_once)
    monkeypatch.setattr(sys, "stdin", Terminal("hello\nhello\n/exit\n"))
    code, out, err = run(generate_cli.main, *command)
    assert code == 0, err
    assert err.count("tokens per target pass") == 1
    assert "interrupted; the conversation goes on without this message" in err
    # As if the first message had never been.
    monkeypatch.setattr(sys, "stdin", Terminal("hello\n/exit\n"))
    assert run(generate_cli.main, *command)[1] == out.replace("> > ", "> ", 1)


def test_commands_of_the_chat(run: Run, pair: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    target, _, slim = pair

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = ["/help", "hello", "hello", "/stats", "/reset", "hello", "/system Be brief.", "hello", "/nonsense", "/quit"]
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(lines) + "\n"))
    sent: list[list[dict[str, str]]] = []
    encode = SpeculativeModel.encode_chat
    monkeypatch.setattr(
        SpeculativeModel, "encode_chat", lambda self, messages: sent.append(list(messages)) or encode(self, messages)
    )
    code, _, err = run(generate_cli.main, slim, "--target", target, *TREE, "--max-new-tokens", "5", "--ignore-eos")
    assert code == 0, err
    assert [len(messages) for messages in sent] == [1, 3, 1, 2]
    assert sent[3][0] == {"role": "system", "content": "Be brief."}
    assert "/system TEXT" in err
    assert "10 tokens in" in err  # of the whole chat
    assert "/nonsense is no command" in err


def test_ctrl_c_between_answers_ends_with_130(
    run: Run, pair: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _, slim = pair

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def interrupt(_prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Terminal(""))
    monkeypatch.setattr("builtins.input", interrupt)
    code, _, err = run(generate_cli.main, slim, "--target", target, *TREE)
    assert code == 130, err
    assert "Traceback" not in err


def test_a_seed_is_drawn_and_printed(run: Run, pair: tuple[str, str, str]) -> None:
    target, _, slim = pair
    args = [
        slim,
        "--target",
        target,
        *TREE,
        "--prompt",
        "hello",
        "--max-new-tokens",
        "6",
        "--temperature",
        "1",
        "--json",
    ]
    first, second = (json.loads(run(generate_cli.main, *args, "--draft-vocab", "full")[1]) for _ in range(2))
    assert first["seed"] != second["seed"]
    again = json.loads(run(generate_cli.main, *args, "--seed", str(first["seed"]), "--check")[1])
    assert again["token_ids"] == first["token_ids"]
    assert first["draft_vocab"] == 340


def test_compare_writes_all_and_refuses_to_overwrite(run: Run, pair: tuple[str, str, str], tmp_path: Path) -> None:
    target, _, slim = pair
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"category": "a", "turns": ["one"]}\n{"category": "b", "turns": ["two", "three"]}\n')
    out_dir = tmp_path / "out"
    args = [slim, "--target", target, *TREE, "--prompts", str(prompts), "--max-new-tokens", "6", "--sizes", "full,300"]
    code, out, err = run(compare_cli.main, *args, "--out", str(out_dir), "--progress")
    assert code == 0, err
    assert sorted(path.name for path in out_dir.iterdir()) == [
        "answers.jsonl", "compare.csv", "compare.html", "compare.json", "compare.md", "compare.png",
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "prompts.jsonl"]
    data = json.loads((out_dir / "compare.json").read_text())
    assert [row["size"] for row in data["rows"][:3]] == ["plain", "all 340 of 360", "300"]
    assert {row["category"] for row in data["rows"]} == {"all", "a", "b"}
    assert {row["mode"] for row in data["rows"]} == {"greedy", "sampled"}
    assert all(row["num_identical"] == row["num_answers"] for row in data["rows"])
    assert data["rows"][1]["draft_vocab"] == 340
    assert data["coverage"][0]["sizes"][-1] == 340
    assert [advice["mode"] for advice in data["recommendations"]] == ["greedy", "sampled"]
    assert not any(advice["is_decided"] for advice in data["recommendations"])  # two prompts are too few
    assert out.splitlines()[0].startswith("size")
    assert "recommended draft vocabulary" in out
    assert "answers: 100%" in err

    code, _, err = run(compare_cli.main, *args, "--out", str(out_dir))
    assert code == 2
    assert "--force" in err
    log = tmp_path / "use.safetensors"
    code, out, err = run(
        compare_cli.main, *args, "--modes", "greedy", "--limit", "1", "--json", "--miss-log", str(log)
    )  # fmt: skip
    assert code == 0
    rows = json.loads(out)["rows"]
    assert {row["category"] for row in rows} == {"all"}  # the only category is all there is
    (counted,) = TokenCounts.load(log).sources
    assert (counted.name, counted.num_tokens) == ("a", rows[0]["num_new_tokens"])
    assert counted.provenance["missed"] == {
        str(row["draft_vocab"]): {"tokens": row["num_new_tokens"], "missed": row["num_missed"]} for row in rows[1:]
    }
    assert [row["missed_rate"] for row in rows] == [
        0.0, *(round(row["num_missed"] / row["num_new_tokens"], 6) for row in rows[1:])
    ]  # fmt: skip
    assert f"counted {counted.num_tokens} generated tokens into {log}" in err


def test_a_log_that_cannot_be_added_to_costs_no_comparison(
    run: Run, pair: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _, slim = pair
    (tmp_path / "p.txt").write_text("one\n")
    log, out_dir = tmp_path / "log", tmp_path / "out"
    args = [slim, "--target", target, *TREE, "--prompts", str(tmp_path / "p.txt"), "--max-new-tokens", "2", "--sizes",
            "full", "--modes", "greedy", "--out", str(out_dir), "--miss-log", str(log)]  # fmt: skip
    other = MissLog(8, "another", "a/target")
    other.add_tokens([[1]])
    other.save(log)
    with monkeypatch.context() as patch:
        patch.setattr(SpeculativeModel, "generate", lambda *_, **__: pytest.fail("answered"))
        code, _, err = run(compare_cli.main, *args)
    assert code == 1
    assert "a log of another tokenizer" in err
    log.unlink()

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    # What goes wrong only at the end leaves the report.
    monkeypatch.setattr(MissLog, "save", refuse)
    code, out, err = run(compare_cli.main, *args)
    assert code != 0
    assert "no space left" in err
    assert out.startswith("size")
    assert json.loads((out_dir / "compare.json").read_text())["is_complete"] is True


def test_another_head_runs_over_the_same_forward(pair: tuple[str, str, str]) -> None:
    target, head, slim = pair
    model = SpeculativeModel.from_pretrained(target, slim, depth=2, top_k=4, target_backend="fused")
    other = load_other_head(model, head, True, None, None, None, "auto")
    assert other.target.backend.name == model.target.backend.name == "fused"


def test_ctrl_c_writes_what_there_is_and_resume_takes_it_up(
    run: Run, pair: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _, slim = pair
    (tmp_path / "p.txt").write_text("one\ntwo\nthree\n")
    out_dir, calls = tmp_path / "out", [0]
    log = tmp_path / "log"
    args = [slim, "--target", target, *TREE, "--prompts", str(tmp_path / "p.txt"), "--max-new-tokens", "6", "--sizes",
            "full,340,300", "--modes", "greedy", "--miss-log", str(log), "--out", str(out_dir)]  # fmt: skip
    append = AnswerLog.append

    def interrupt_once(self: AnswerLog, answer: Answer) -> None:
        append(self, answer)
        calls[0] += 1
        if calls[0] == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(AnswerLog, "append", interrupt_once)
    code, out, err = run(compare_cli.main, *args)
    assert code == 130, err
    assert out.startswith("size")
    assert "--resume" in err
    assert json.loads((out_dir / "compare.json").read_text())["is_complete"] is False
    assert not log.exists()  # or resuming would count these answers twice
    code, _, err = run(compare_cli.main, *args)
    assert code == 2
    assert "--resume" in err
    code, _, err = run(compare_cli.main, *args, "--resume")
    assert code == 0, err
    assert calls[0] == 9  # three prompts, plainly and with two sizes: full and 340 are one
    assert json.loads((out_dir / "compare.json").read_text())["is_complete"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "out", "p.txt"]
    code, _, err = run(compare_cli.main, *args[:-2], "--resume")
    assert code == 2


def test_heads_trees_and_batches_in_one_comparison(run: Run, pair: tuple[str, str, str], tmp_path: Path) -> None:
    target, head, slim = pair
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    code, out, err = run(
        compare_cli.main, slim, "--head", head, "--target", target, "--prompts", str(tmp_path / "p.txt"), "--sizes",
        "full", "--max-new-tokens", "4", "--modes", "greedy", "--tree", "2,4,20", "--tree", "1,1,3", "--batch", "1,2",
        "--json",
    )  # fmt: skip
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert {row["follow"] for row in rows} == {None}
    assert [(row["head"], row["depth"], row["draft_vocab"]) for row in rows if row["batch"] == 2] == [
        ("", 0, 0), ("slim", 2, 340), ("slim", 1, 340), ("head", 2, 360), ("head", 1, 360),
    ]  # fmt: skip
    assert len({row["candidate"] for row in rows}) == 5


def test_progress_is_told_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, *(20.0 * step for step in range(1, 7))])
    monkeypatch.setattr(compare_cli.time, "monotonic", lambda: next(clock))
    with compare_cli._progress(6, None) as advance:
        for _ in range(6):
            advance()
    assert capsys.readouterr().err.splitlines() == [
        "2 of 6 answers, about 80 s left", "4 of 6 answers, about 40 s left", "6 of 6 answers, about 0 s left",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--modes", "greedy,wild"], "wild"),
        (["--sizes", "full,x"], "neither a number"),
        (["--sizes", "5000"], "5000"),
        (["--temperature", "0"], "--modes greedy"),
        (["--top-p", "2"], "top_p"),
        (["--tree", "5,10"], "DEPTH,TOP_K,NODES"),
        (["--batch", "1,x"], "1,4,16"),
        (["--follow", "prompt,page"], "page"),
        (["--follow-rows", "9"], "Give --follow"),
        (["--resume"], "Give --out"),
    ],
)
def test_compare_mistakes(run: Run, pair: tuple[str, str, str], tmp_path: Path, args: list[str], message: str) -> None:
    target, _, slim = pair
    (tmp_path / "p.txt").write_text("hello\n")
    code, out, err = run(compare_cli.main, slim, "--target", target, "--prompts", str(tmp_path / "p.txt"), *args)
    assert (code, out) == (2, "")
    assert message in err


def test_an_unconverted_head_needs_a_ranking(run: Run, pair: tuple[str, str, str], tmp_path: Path) -> None:
    target, head, slim = pair
    (tmp_path / "p.txt").write_text("hello\n")
    args = [
        head,
        "--target",
        target,
        *TREE,
        "--prompts",
        str(tmp_path / "p.txt"),
        "--max-new-tokens",
        "4",
        "--modes",
        "greedy",
    ]
    code, _, err = run(compare_cli.main, *args)
    assert code == 2
    assert "--token-map" in err
    token_map = next(Path(slim).glob("freq_*.pt"))
    code, out, err = run(compare_cli.main, *args, "--token-map", str(token_map), "--sizes", "full,320,300")
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[1:5]] == ["plain", "full", "320", "300"]


@pytest.mark.parametrize("main", [generate_cli.main, compare_cli.main])
def test_help_and_version(run: Run, main: Callable[[list[str]], object]) -> None:
    code, out, _ = run(main, "--help")
    assert code == 0
    assert "Examples:" in out
    assert run(main, "--version")[0] == 0
