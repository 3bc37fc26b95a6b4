"""The scripts that carry engines to a GPU machine and measure them there, without any engine."""

import json
import os
import random
import struct
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

SCRIPTS = Path(__file__).parent / "gpu"
NAMES = (
    "fatbin",
    "measure",
    "pack",
    "recipes",
    "results",
    "run",
    "serve_start",
    "starts",
    "unpack",
    "sglang_start",
    "vllm_start",
)

FAKE_START = """\
import json, time
from measure import Generated, run_start

def start(job):
    if "16384" in (job["head"] or ""):
        raise RuntimeError("no such head")
    print("the engine says something")
    def generate(prompts, max_tokens):
        time.sleep(2e-5 * max_tokens)
        drafts = len(prompts) * max_tokens // 2 if job["head"] else 0
        return Generated([[7] * max_tokens for _ in prompts], drafts, drafts // 2)
    return generate, {"version": "1"}

run_start(start, lambda job, generate: {"broken": {how: {"accepted_length": 1.0} for how in job.get("broken", {})}})
"""


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The scripts import each other by bare names, as they do on the machine; they leave nothing behind here."""
    sys.path.insert(0, str(SCRIPTS))
    with patch.dict(os.environ):
        try:
            yield {name: import_module(name) for name in NAMES}
        finally:
            sys.path.remove(str(SCRIPTS))
            for name in NAMES:
                del sys.modules[name]


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """One fat binary of (kind, architecture, payload)."""
    body = b""
    for kind, arch, payload in entries:
        header = bytearray(64)
        struct.pack_into("<HHIQ", header, 0, kind, 0x101, len(header), len(payload))
        struct.pack_into("<I", header, 28, arch)
        body += bytes(header) + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


PTX, CUBIN = 1, 2


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        ([(CUBIN, 80), (CUBIN, 90), (CUBIN, 100), (PTX, 90)], [(CUBIN, 90)]),
        ([(CUBIN, 75), (CUBIN, 80), (PTX, 75), (PTX, 80), (PTX, 100)], [(PTX, 80)]),
        ([(CUBIN, 90), (CUBIN, 90), (CUBIN, 120)], [(CUBIN, 90), (CUBIN, 90)]),
        ([(CUBIN, 80), (CUBIN, 120)], []),
    ],
    ids=["machine code of its own", "newest PTX that it can compile", "both 90 and 90a", "nothing that it runs"],
)
def test_other_gpus_code_is_blanked(
    scripts: dict[str, ModuleType], tmp_path: Path, entries: list[tuple[int, int]], kept: list[tuple[int, int]]
) -> None:
    payloads = [bytes([index + 1]) * (8 * index + 8) for index in range(len(entries))]
    coded = fat_binary(*((kind, arch, data) for (kind, arch), data in zip(entries, payloads, strict=True)))
    stray = struct.pack("<I", 0xBA55ED50) + b"not a fat binary"
    library = tmp_path / "lib.so"
    library.write_bytes(b"ELF" + coded + stray + coded + b"end")

    blanked = scripts["fatbin"].blank_other_architectures(library, 90)

    found = library.read_bytes()
    lost = [data for entry, data in zip(entries, payloads, strict=True) if entry not in kept]
    assert blanked == 2 * sum(map(len, lost))
    assert len(found) == 3 + 2 * len(coded) + len(stray) + 3
    for entry, data in zip(entries, payloads, strict=True):
        assert found.count(data) >= 2 if entry in kept else data not in found
    assert found.endswith(b"end")
    assert stray in found


def test_a_damaged_fat_binary_is_refused(scripts: dict[str, ModuleType]) -> None:
    coded = bytearray(fat_binary((CUBIN, 90, b"12345678")))
    struct.pack_into("<Q", coded, 16 + 8, 1 << 20)
    with pytest.raises(ValueError, match="where its header says"):
        list(scripts["fatbin"].fat_binaries(bytes(coded)))


def test_what_is_packed_comes_out_of_the_pieces(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, unpack = scripts["pack"], scripts["unpack"]
    site, pieces = tmp_path / "site", tmp_path / "pieces"
    noise = random.Random(1)
    files = {f"package/part{i % 3}/file{i}": noise.randbytes(300 * i) for i in range(12)}
    for name, data in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(data)
    pieces.mkdir()
    monkeypatch.setattr(pack, "PART_BYTES", 2000)
    written = []
    for number, share in enumerate(pack.shares(site)):
        archive = pack.compress(site, share, pieces / f"engine-{number}.tar.xz", 0)
        written += list(pack.cut(archive))
    assert sorted(written) == sorted(pieces.iterdir())
    assert max(piece.stat().st_size for piece in written) <= 2000 < sum(piece.stat().st_size for piece in written)

    unpack.main(pieces, tmp_path / "out")
    out = tmp_path / "out" / "engine"
    assert {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("file*")} == files


def test_the_locks_hold_the_engines_and_nothing_that_the_machine_has(scripts: dict[str, ModuleType]) -> None:
    pack, recipes = scripts["pack"], scripts["recipes"].RECIPES
    machine = pack.machine_packages()
    assert "torch" in machine
    for name, recipe in recipes.items():
        lines = (SCRIPTS / f"{name}.lock").read_text(encoding="utf-8").split()
        assert recipe.requirement in lines
        carried = {pack.canonical(line.partition("==")[0]) for line in lines}
        assert carried & set(machine) <= set(recipe.replaces)


def test_every_start_has_a_name_a_job_and_a_script(scripts: dict[str, ModuleType]) -> None:
    starts = [start for wave in scripts["starts"].WAVES.values() for start in wave]
    assert len({start.name for start in starts}) == len(starts)
    for start in starts:
        job = json.loads(json.dumps(start.job(Path("models"))))
        assert job["dummy"] == ("8b" in start.model)
        assert (SCRIPTS / f"{start.engine}_start.py").exists()
        assert set(start.packs or (start.engine,)) <= set(scripts["recipes"].RECIPES)


def test_a_server_is_started_with_what_its_job_says(scripts: dict[str, ModuleType]) -> None:
    serve, waves = scripts["serve_start"], scripts["starts"].WAVES
    for start in [*waves["sglang-server"], *waves["vllm-server"]]:
        line = serve.command_line(json.loads(json.dumps(start.job(Path("models")))) | {"port": 1234})
        assert line[line.index("--port") + 1] == "1234"
        assert any(Path(word) == Path("models/smollm2/target") for word in line)
        assert "models/smollm2/16384" in " ".join(line)
        assert not {"None", "True", "False", "--disable-custom-all-reduce"} & set(line)
    vllm = line
    assert json.loads(vllm[vllm.index("--speculative-config") + 1])["num_speculative_tokens"] == 3
    assert "--no-enable-prefix-caching" in vllm


def test_starts_go_to_the_gpus_that_there_are(
    scripts: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    run, waves = scripts["run"], scripts["starts"].WAVES
    starts = [*waves["vllm-8b"], *waves["vllm-two-ranks"], *waves["sglang-two-ranks"], *waves["older-vllm"]]
    assert run.waves_for(starts, 2) == [[(start, start.gpus) for start in starts]]
    assert run.waves_for(waves["vllm"], 1) == [[(start, (0,)) for start in waves["vllm"]]]
    one = run.waves_for(starts, 1)
    assert one == [[(start, (0,)) for start in waves["older-vllm"]], [(start, (0,)) for start in waves["vllm-8b"]]]
    assert capsys.readouterr().out.count("left out") == 2


def test_every_start_leaves_a_line_and_a_failed_one_does_not_stop_the_others(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm_start.py").write_text(FAKE_START)
    (tmp_path / "measure.py").write_text((SCRIPTS / "measure.py").read_text(encoding="utf-8"))
    prompts = tmp_path / "models" / "smollm2" / "prompts.json"
    prompts.parent.mkdir(parents=True)
    prompts.write_text("[[1, 2], [3]]")
    run, out = scripts["run"], tmp_path / "out.jsonl"
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setitem(run.WAVES, "three", run.WAVES["vllm"][1:4])
    folders = ["--site", tmp_path, "--models", tmp_path / "models", "--out", out, "--logs", tmp_path / "logs"]
    monkeypatch.setattr(sys, "argv", ["run.py", "three", *map(str, folders)])
    run.main()

    rows = {row["name"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(rows) == 3
    failed = rows["vllm 16384, 3 drafts"]
    assert failed["error"] == "start: ended with 1"
    assert "no such head" in failed["log"]
    good = rows["vllm 4096, 3 drafts, then its broken maps"]
    assert good["result"]["text"]["accepted_length"] == 1.5
    assert [one["batch"] for one in good["result"]["speeds"]] == [1, 4, 16]
    assert good["result"]["speeds"][0]["tokens_per_s"] > 0
    assert list(good["result"]["broken"]) == ["missing", "reordered", "shifted"]
    assert "accepted 1.5" in capsys.readouterr().out


def line(name: str, head: str | None, tokens: list[list[int]], **more: object) -> dict[str, object]:
    """What run.py writes of a start with SmolLM2."""
    text = {"tokens": tokens, "accepted_length": None if head is None else 1.75}
    speeds = [{"batch": 1, "tokens_per_s": 100.0, "ms_per_step": 10.0, "accepted_length": None}]
    job = {"target": "m/smollm2/target", "head": head and f"m/smollm2/{head}", "prompts": "p", "dummy": False}
    result = {"text": text, "speeds": speeds, **more}
    return {"name": name, "engine": "vllm", "job": job, "facts": {"version": "1"}, "result": result}


def test_results_say_how_texts_differ_and_what_is_void(scripts: dict[str, ModuleType]) -> None:
    other = {"missing": {"tokens": [[1, 2, 3], [9, 5, 6]], "accepted_length": 1.0}}
    void = line("dummy", "full", [])
    void["job"] = {**dict(void["job"]), "dummy": True, "target": "m/llama-8b/target"}  # type: ignore[call-overload]
    failed = {
        **line("failed", "full", []),
        "error": "start: ended with 1",
        "log": "a\n" * 99 + "RuntimeError: no\n\nIt was killed.",
    }
    rows = [
        line("plain", None, [[1, 2, 3], [4, 5, 6]]),
        line("slim", "16384", [[9, 9, 9], [9, 9, 9]]),
        line("slim", "16384", [[1, 2, 3], [4, 5, 7]], broken=other),
        void,
        failed,
    ]
    chains = [{"rows": "16384", "k": 3, "accepted_length": 1.8}, {"rows": "16384", "k": 5, "accepted_length": 2.0}]
    entries = {entry["name"]: entry for entry in scripts["results"].condense(rows, chains)}
    assert list(entries) == ["plain", "slim", "dummy", "failed"]
    slim = entries["slim"]
    assert slim["text"] == {
        "accepted_length": 1.75, "answers": 2, "differ_from_plain_at": [2], "reference_chain": 1.8,
    }  # fmt: skip
    assert slim["broken"]["missing"]["differ_from_plain_at"] == [0]
    assert entries["dummy"]["error"].startswith("void")
    assert entries["failed"]["exception"] == "RuntimeError: no"
    assert "speeds" not in entries["dummy"]
    table = scripts["results"].tables(list(entries.values()))
    assert "| slim | 1.75 | 1.8 | 1 of 2 | 100 | 10.00 |" in table
    assert "| … its map missing | 1.0 | | 1 of 2 | | |" in table


def test_results_of_a_server_name_no_folder_of_the_machine(scripts: dict[str, ModuleType]) -> None:
    row = line("server", "16384", [], served={"1": {"tokens_per_s": 250.4, "accepted_length": 1.75}})
    row["job"] = {**dict(row["job"]), "target": "/made/up/smollm2/target", "port": 1}  # type: ignore[call-overload]
    row["facts"] = {"command": ["python", "serve", "/made/up/smollm2/target", '{"model": "/made/up/smollm2/16384"}']}
    row["result"] = {**dict(row["result"]), "text": None, "speeds": []}  # type: ignore[call-overload]
    (entry,) = scripts["results"].condense([row], [])
    assert entry["facts"]["command"] == ["python", "serve", "smollm2/target", '{"model": "smollm2/16384"}']
    assert "/made/up" not in json.dumps(entry)
    assert "| … by engine_speed.py, 1 at a time | 1.750 | | | 250 | |" in scripts["results"].tables([entry])
