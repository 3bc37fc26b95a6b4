"""`eagle-vocab count`: wiring, exit codes, what is printed."""

import gzip
import json
import sys
from pathlib import Path

import pytest
from eagle_slim.convert.sources.builtin import embedded_target_folder
from eagle_slim.vocab_tools.cli import vocab
from eagle_slim.vocab_tools.common_cli import run_cli
from eagle_slim.vocab_tools.counts import TokenCounts


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(json.dumps({"text": f"text {n}"}).encode() + b"\n" for n in range(100))))
    return path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        run_cli(vocab, ["count", *arguments])
    return int(stop.value.code or 0)


def test_counts_a_file(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "counts.safetensors"
    arguments = (str(corpus), "--tokenizer", str(embedded_target_folder()), "--out", str(out))
    assert run(*arguments, "--json") == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    counts = TokenCounts.load(out)
    assert result["tokens"] == counts.num_tokens
    assert result["tokenizer_hash"] == counts.tokenizer_hash
    assert (result["sources"][0]["name"], result["sources"][0]["documents"]) == ("mine", 98)
    assert "tokenizing with fastokens" in shown.err
    first = out.read_bytes()
    # Existing output is refused before anything is read.
    assert run("missing.jsonl", *arguments[1:]) == 2
    assert "exists already" in capsys.readouterr().err
    assert run(*arguments, "--force") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].startswith("mine: ")
    assert shown.out.splitlines()[-1] == f"wrote {out}"
    assert out.read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counts.safetensors", "mine.jsonl.gz"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Missing argument 'SOURCE...'"),
        (["-"], 2, "standard input is not read"),
        (["missing.jsonl"], 1, "missing.jsonl: no such file or folder"),
        (["{corpus},colum=x"], 2, "unknown key 'colum'"),
        (["{corpus},split=train"], 2, "split is for Hub datasets"),
        (["{corpus},max-tokens=some"], 2, "'some' is not a value for max_tokens"),
        (["{corpus}", "--chat-template", "/dev/null"], 2, "/dev/null: is a pipe or a device"),
        (["{corpus}", "--held-out", "1.5"], 2, "held-out share"),
        (["{corpus}", "--chat-template", "nowhere.jinja"], 2, "nowhere.jinja: no such chat template"),
        (["{corpus}", "other={corpus}"], 2, "read by source mine and by source other"),
        (["{corpus},column=body"], 2, "no column 'body'. The records have text."),
    ],
)
def test_mistakes(
    corpus: Path, tmp_path: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.safetensors"
    given = [argument.format(corpus=corpus) for argument in arguments]
    assert run(*given, "--tokenizer", str(embedded_target_folder()), "--out", str(out)) == code
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--run-on", "ray"], "eagle-slim[ray]"), (["--out", "x.json"], "End the name in .saf")]
)
def test_what_needs_no_tokenizer_to_be_seen(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    assert run(str(corpus), "--tokenizer", str(tmp_path / "none"), "--out", "x.safetensors", *arguments) == 2
    assert message in capsys.readouterr().err
