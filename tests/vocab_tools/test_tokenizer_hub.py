"""Tokenizers from a Hub, through the real huggingface_hub against a server on loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from eagle_slim.vocab_tools import forced_ids, load_tokenizer
from support.hub_server import HubServer, connected
from support.small_tokenizers import byte_level_bpe, write_folder

REPO = "org/chat-model"


def files(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_folder(tmp_path / "t", byte_level_bpe(300), generation_config={"eos_token_id": [2, 0]})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("<|im_start|>{{ tools }}")
    return folder


@pytest.fixture
def hub(folder: Path) -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_model(REPO, {**files(folder), "model.safetensors": b"never fetched"})
        yield hub


def test_small_files_only_and_afterwards_offline(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    local = load_tokenizer(folder)
    with connected(hub, tmp_path / "home"):
        remote = load_tokenizer(REPO)
        assert remote.tokenizer_hash == local.tokenizer_hash
        assert remote.chat_template_hash == local.chat_template_hash
        assert forced_ids(remote).reasons == forced_ids(local).reasons
        assert remote.revision == hub.repo(REPO).branches["main"]
        assert hub.bytes_sent("model.safetensors") == 0
        hub.reset_counts()
        assert load_tokenizer(REPO, offline=True).tokenizer_hash == local.tokenizer_hash
        assert hub.requests == []
    with connected(hub, tmp_path / "home", offline=True):
        assert load_tokenizer(REPO).chat_template_hash == local.chat_template_hash
    assert hub.requests == []
