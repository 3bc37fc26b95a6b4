"""What goes wrong with the Hub, each once and at one door: named, with what to try, and with nothing half-written."""

import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from eagle_slim.convert.push import upload_files
from eagle_slim.convert.sources.source import open_head_source
from eagle_slim.vocab_tools import hub as our_hub
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory
from safetensors.torch import save
from support.hub_server import Fault, HubServer, connected
from support.raising import raises_hub_error

API = "/api/models/org/head"
FILES: dict[str, bytes | str] = {"config.json": "{}", "model.safetensors": save({"fc.weight": torch.arange(12.0)})}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_model("org/head", FILES)
        yield hub


@pytest.fixture
def home(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    # The library waits before it asks again.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with connected(hub, tmp_path / "home"):
        yield tmp_path / "home"


FAULTS = {
    "silent": (API, Fault(silent=True), "unreachable"),
    "dropped": (API, Fault(unanswered=True), "unreachable"),
    "busy": (API, Fault(status=503), "busy"),
    "quota": (API, Fault(status=402), "refused"),
    "login page": (API, Fault(answer=b"<!DOCTYPE html><html><title>Log in</title></html>"), "unreachable"),
    "no commit": (API, Fault(answer={"id": "org/head", "siblings": []}), "unreachable"),
    "a file that breaks off": ("config.json", Fault(break_after=1), "unreachable"),
    "a file of another size": ("model.safetensors", Fault(extra_bytes=7), "disk"),
}


@pytest.mark.parametrize(("path", "fault", "reason"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_hub_is_named_and_leaves_nothing(
    hub: HubServer, home: Path, path: str, fault: Fault, reason: str
) -> None:
    hub.inject(path, fault)
    with raises_hub_error(reason) as caught:
        open_head_source("org/head")
    headline, advice = str(caught.value).split("\n")
    assert advice
    if fault.status is not None and path == API:
        assert "as asked for" in headline, "the Hub's own reason"
    hub.clear_faults()
    if fault.extra_bytes and huggingface_hub.__version__.startswith("1."):
        pytest.skip("before 2.0 huggingface_hub keeps a download that came too long")
    assert (open_head_source("org/head").folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_command_gives_up_what_the_library_would_wait_for_for_ever(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(our_hub, "SILENCE_S", 0.3)
    hub.inject("/api/repos/create", Fault(silent=True))
    with connected(hub, tmp_path, token="hf_good"):
        try:
            our_hub.limit_silence()
            our_hub.keep_limit()
            with raises_hub_error("unreachable"):
                upload_files(tmp_path, ["config.json"], "tester/slim")
            hub.clear_faults()
            upload_files(tmp_path, ["config.json"], "tester/slim")
        finally:
            set_client_factory(default_client_factory)
