"""The commands from the outside: files in, files out, streams, exit codes. Values are tested where they are made."""

import errno
import json
import signal
import subprocess
import sys
from dataclasses import replace
from typing import NamedTuple

import click
import pytest
import torch
from eagle_slim.vocab_tools import DraftVocab, TokenCounts, VocabularyError, common_cli
from eagle_slim.vocab_tools.cli import vocab
from eagle_slim.vocab_tools.common_cli import EagleCommand, run_cli
from safetensors.numpy import load_file
from support.raising import exit_code
from support.small_tokenizers import TEXT, byte_level_bpe, write_folder


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def run(capsys):
    def call(*arguments, command=vocab):
        code = exit_code(run_cli, command, [str(argument) for argument in arguments], "eagle-vocab")
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_folder(folder / "tok", byte_level_bpe(360), eos_token="<|im_end|>")
    (folder / "latin1.jinja").write_bytes(b"\xf6")
    for name, shift in (("chat", 0), ("code", 1)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(40):
                text = f"{TEXT[(number + shift) % 3]} {number}"
                file.write(json.dumps({"messages": [{"role": "assistant", "content": text}]}) + "\n")
        arguments = ["count", f"{name}={folder / f'{name}.jsonl'}", "--tokenizer", str(folder / "tok")]
        arguments += f"--held-out 0.3 --workers 0 --no-progress --out {folder / name}.counts".split()
        assert exit_code(run_cli, vocab, arguments, "eagle-vocab") == 0
    return folder


def test_from_counts_to_token_map(run, files, tmp_path):
    options = ("-w", "chat=3", "-o", tmp_path / "mix", "--json")
    merged = run("merge", files / "chat.counts", files / "code.counts", *options)
    assert merged.code == 0
    assert [(row["name"], row["weight"]) for row in merged.json["sources"]] == [("chat", 3.0), ("code", 1.0)]
    arguments = ("--tokenizer", files / "tok", "--target-vocab", 384, "--size", 320, "-o", tmp_path / "v.json")
    ranked = run("rank", tmp_path / "mix", *arguments, "--json")
    assert ranked.code == 0
    assert ranked.json["draft_vocab"] == 320
    held = DraftVocab.load(tmp_path / "v.json")
    assert (held.size, held.target_vocab) == (320, 384)
    weighted = TokenCounts.load(tmp_path / "mix").weighted()
    others = held.target_ids[held.num_forced :].tolist()
    assert others == sorted(others, key=lambda i: (-weighted[i], i))
    shown = run("show", tmp_path / "v.json", "--tokenizer", files / "tok", "--counts", tmp_path / "mix")
    assert "256 of them single bytes" in shown.out
    assert run("show", tmp_path / "v.json", "--tokenizer", files / "tok", "--json").json["size"] == 320
    assert run("export", tmp_path / "v.json", tmp_path / "freq_300.pt", "--for", "fr-spec", "-n", 300).code == 0
    assert torch.load(tmp_path / "freq_300.pt", weights_only=True) == held.target_ids[:300].tolist()
    assert run("export", tmp_path / "v.json", tmp_path / "m.safetensors", "--for", "head").code == 0
    assert load_file(tmp_path / "m.safetensors")["t2d"].sum() == 320
    assert run("export", tmp_path / "v.json", tmp_path / "m.txt").code == 2
    exported = run("export", tmp_path / "v.json", tmp_path / "m.txt", "--for", "vllm-mtp", "--json")
    assert exported.json["for"] == "vllm-mtp"
    assert [f"vllm-mtp: {line}" for line in exported.json["told"]] == exported.err.splitlines()
    odd = run("import", tmp_path / "m.txt", "--tokenizer", files / "tok", "-o", tmp_path / "odd.json", "--json")
    assert odd.json["warnings"] == []
    again = run("import", tmp_path / "m.safetensors", "-o", tmp_path / "back.json", "--json")
    assert (again.json["draft_vocab"], again.json["ranked"]) == (320, False)
    assert DraftVocab.load(tmp_path / "back.json").target_ids.tolist() == held.ascending_ids.tolist()


def test_count_writes_a_file_of_counts_and_nothing_else(run, files, tmp_path):
    out = tmp_path / "counts.safetensors"
    arguments = ("count", files / "chat.jsonl", "--tokenizer", files / "tok", "--out")
    counted = run(*arguments, out, "--json", "--progress")
    assert counted.code == 0
    assert (counted.json["tokens"], "100%" in counted.err) == (TokenCounts.load(out).num_tokens, True)
    again = run(*arguments, out, "--force", "--no-progress")
    assert (again.out.splitlines()[-1], "100%" in again.err) == (f"wrote {out}", False)
    assert [path.name for path in tmp_path.iterdir()] == ["counts.safetensors"]
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": ""}\n')
    counted = run("count", tmp_path / "a.jsonl", "--tokenizer", files / "tok", "-o", tmp_path / "a.counts")
    assert counted.out.splitlines()[0].endswith("; documents without a token: 1")


def test_variables_of_the_template_are_values_of_json(run, files, tmp_path):
    template = "{% for m in messages %}{{ 'yes' if x is true and y == 'Z' }}{{ m.content }}{% endfor %}"
    (tmp_path / "a.jinja").write_text(template)
    arguments = ("count", files / "chat.jsonl", "--tokenizer", files / "tok", "--chat-template", tmp_path / "a.jinja")
    arguments = (*arguments, "--no-progress", "--workers", 0, "--force", "-o", tmp_path / "counts", "--json")
    option, plain = "--chat-template-kwargs", run(*arguments).json
    assert "chat_template_kwargs" not in plain["sources"][0]["provenance"]
    for given in ([option, "x=True", option, "y=Z"], [option, '{"x": true, "y": "Z"}']):
        source = run(*arguments, *given).json["sources"][0]
        assert source["provenance"]["chat_template_kwargs"] == {"x": True, "y": "Z"}
    for wrong in ("x", "=1", "{", "[]", '{"x"}', "{}", "messages=[]", "y=1"):
        refused = run(*arguments, option, "y=0", option, wrong)
        assert refused.code == 2
        assert option in refused.err


def test_length_of_t2d_is_the_targets_vocabulary(run, files, tmp_path):
    run("rank", files / "chat.counts", "--tokenizer", files / "tok", "-n", 320, "-o", tmp_path / "v.json")
    export = ("export", tmp_path / "v.json", "--for", "head")
    assert "padding rows" in run(*export, tmp_path / "guessed.safetensors").err
    told = run(*export, tmp_path / "told.safetensors", "--target-vocab", 384)
    assert "padding rows" not in told.err
    assert load_file(tmp_path / "told.safetensors")["t2d"].shape == (384,)


def test_coverage_prints_a_table_or_json(run, files, tmp_path):
    assert run("rank", files / "chat.counts", "--tokenizer", files / "tok", "-o", tmp_path / "v.json").code == 0
    arguments = ("coverage", tmp_path / "v.json", files / "chat.counts", files / "code.counts")
    measured = run(*arguments, "--sizes", "300,340")
    assert (measured.code, measured.out.split()[0]) == (0, "source")
    found = run(*arguments, "--floor", "chat=0.5,code=1.0", "--json").json["sources"]
    assert sorted(source["coverage"][-1] for source in found[:2]) == [source["coverage"][-1] for source in found[:2]]
    assert {source["name"]: source.get("floor") for source in found} == {"chat": 0.5, "code": 1.0, "all sources": None}
    assert all(len(source["beside"]) == len(source["coverage"]) for source in found)


def test_rank_with_floors(run, files, tmp_path):
    arguments = ("rank", files / "chat.counts", files / "code.counts", "--tokenizer", files / "tok", "-n", 320)
    held = run(*arguments, "--floor", "chat=0.9", "--floor", "code=0.9", "--json", "-o", tmp_path / "v.json")
    assert [entry["source"] for entry in held.json["floors"]["held"]] == ["chat", "code"]
    assert all(entry["reached"] >= 0.9 for entry in held.json["floors"]["held"])
    told = run(*arguments, "--floor", "chat=0.9", "-o", tmp_path / "v.json", "--force")
    assert told.out.startswith("chat: ")
    exported = run("export", tmp_path / "v.json", tmp_path / "f.pt", "--for", "sglang", "-n", 300)
    assert "rank with --size 300" in exported.err


def test_rank_by_coverage_and_among_candidates(run, files, tmp_path):
    common = ("--tokenizer", files / "tok", "--json")
    found = run("rank", files / "chat.counts", "--coverage", 0.95, *common, "-o", tmp_path / "a").json
    assert found["size_from_coverage"]["measured_on"] == "held-out"
    assert found["draft_vocab"] % 64 == 0
    odd = run("rank", files / "chat.counts", "-n", 280, "--force-id", 359, *common, "-o", tmp_path / "b").json
    assert odd["draft_vocab"] == 280
    assert DraftVocab.load(tmp_path / "b").provenance["forced"]["359"] == "by request"
    assert "not a multiple of 64" in odd["warnings"][0]
    trained = run("rank", files / "chat.counts", "--candidates", tmp_path / "b", *common, "-o", tmp_path / "d").json
    assert trained["draft_vocab"] == 280


def test_errors_are_one_line_and_leave_nothing(run, files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    write_folder(tmp_path / "other", byte_level_bpe(300))
    monkeypatch.chdir(files)
    places = {"CHAT": "chat.counts", "TOK": "tok", "OTHER": tmp_path / "other"}
    out, on_ray = tmp_path / "out.safetensors", ["--tokenizer-library", "tokenizers", "--run-on", "ray"]
    for arguments, message in (
        (["rank", "CHAT", "--tokenizer", "TOK", "-n", "100"], "at least 259"),
        (["rank", "CHAT", "-n", "300"], "Missing option '--tokenizer'"),
        (["rank", "CHAT", "--tokenizer", "TOK", "-w", "chat"], "expected NAME=SHARE"),
        (["rank", "CHAT", "--tokenizer", "TOK", "--floor", "zh"], "--floor 'zh'"),
        (["rank", "CHAT", "--tokenizer", "TOK", "--floor", "zh=0.9", "-n", "300"], "--floor zh"),
        (["rank", "CHAT", "--tokenizer", "OTHER"], "another tokenizer"),
        (["rank", "CHAT", "--tokenizer", "TOK", "--tokenizer-revision", "main"], "has no revisions"),
        (["merge", "CHAT", "-w", "a=1", "-w", "a=2"], "each name once"),
        (["count", "chat.jsonl,colum=x", "--tokenizer", "TOK"], "unknown key 'colum'"),
        (["count", "chat.jsonl", "--tokenizer", "TOK", "--chat-template", "latin1.jinja"], "latin1.jinja: not"),
        (["count", "chat.jsonl", "--tokenizer", "TOK", *on_ray], "needs Ray"),
    ):
        done = run(*(places.get(argument, argument) for argument in arguments), "-o", out)
        assert done.code == (1 if "another tokenizer" in message else 2)
        assert done.err.startswith("error: ")
        assert message in done.err
        assert len(done.err.strip().splitlines()) == 1
        assert done.out == ""
        assert not out.exists()


def test_existing_output_is_refused_before_any_work(run, files, tmp_path):
    out = tmp_path / "v.json"
    out.write_text("mine")
    # The counts file does not exist: it would be the first thing to fail.
    arguments = ("rank", tmp_path / "none", "--tokenizer", files / "tok", "-o", out)
    refused, forced = run(*arguments), run(*arguments, "--force")
    assert (refused.code, "exists already" in refused.err) == (2, True)
    assert (forced.code, "no such counts file" in forced.err) == (1, True)
    assert out.read_text() == "mine"
    assert run("rank", files / "chat.counts", "--tokenizer", files / "tok", "-o", out, "--force").code == 0
    assert DraftVocab.load(out).size == 360
    missing = run("import", out, "-o", tmp_path / "no" / "folder.json")
    assert (missing.code, "does not exist" in missing.err) == (2, True)


def failing(error):
    @click.command(cls=EagleCommand)
    def fail():
        raise error

    return fail


def test_names_and_messages_are_harmless_on_a_terminal(run, files, tmp_path):
    counts = TokenCounts.load(files / "chat.counts")
    named = replace(counts.sources[0], name="chat\n\x1b[31mred")
    TokenCounts((named,), counts.tokenizer_hash).save(tmp_path / "named.counts")
    merged = run("merge", tmp_path / "named.counts", "-o", tmp_path / "m.counts")
    assert merged.out.startswith("chat\\n\\x1b[31mred: ")
    assert run(command=failing(VocabularyError("a: \x1b[31mred"))).err == "error: a: \\x1b[31mred\n"


def test_exit_codes(run):
    for error, code, message in (
        (VocabularyError("bad map"), 1, "error: bad map\n"),
        (KeyboardInterrupt(), 130, "interrupted; nothing half-written is left behind\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 1, "error: /x: No space left on device.\n"),
        (RuntimeError("oops"), 1, "error: Unexpected RuntimeError: oops. This is a defect"),
    ):
        done = run(command=failing(error))
        assert done.code == code
        assert done.err.lstrip("\n").startswith(message)
        assert "Traceback" not in done.err
    assert "Traceback" in run("--debug", command=failing(VocabularyError("bad map"))).err
    with pytest.raises(RuntimeError, match="oops"):
        common_cli._run(failing(RuntimeError("oops")), ["--debug"], None)


def start(program, *arguments):
    command = [sys.executable, "-c", program, *(str(argument) for argument in arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_reader_that_goes_away_is_no_error(files, tmp_path, run):
    run("rank", files / "chat.counts", "--tokenizer", files / "tok", "-n", 320, "-o", tmp_path / "v.json")
    program = "from eagle_slim.vocab_tools.cli import main; main()"
    with start(program, "show", tmp_path / "v.json", "--tokenizer", files / "tok", "--limit", 300) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(1800) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_in_the_middle_of_writing_leaves_nothing_behind(tmp_path, number):
    (tmp_path / "m.json").write_text("[1, 2]")
    program = (
        "import signal, sys, time\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "from eagle_slim.vocab_tools import cli, files\n"
        "def fsync(descriptor):\n    print('writing', file=sys.stderr, flush=True)\n    time.sleep(600)\n"
        "files.os.fsync = fsync\ncli.main()"
    )
    with start(program, "import", tmp_path / "m.json", "-o", tmp_path / "v.json") as process:
        assert process.stderr.readline() == "writing\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=1800)
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "interrupted; nothing half-written is left behind"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.json"]
