"""Bad networks: a Hub that is silent, busy, breaks off, drips, or is somebody else altogether."""

import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from eagle_slim.convert.errors import SourceError
from eagle_slim.convert.hub.push import check_push, upload_files
from eagle_slim.convert.hub.range_reads import read_remote_header
from eagle_slim.convert.hub.remote_file import HubFile
from eagle_slim.convert.sources.source import open_head_source, target_files
from eagle_slim.vocab_tools import hub_session
from huggingface_hub import constants
from safetensors.torch import save
from support.hub_server import Fault, HubServer, connected
from support.lm_heads import open_lm_head, values
from support.raising import raises

API = "/api/models/org/head"
WEIGHTS = {"lm_head.weight": torch.arange(12.0).reshape(3, 4).bfloat16()}
FILES: dict[str, bytes | str] = {"config.json": "{}", "model.safetensors": save(WEIGHTS)}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_model("org/head", FILES)
        yield hub


@pytest.fixture
def home(hub: HubServer, tmp_path: Path) -> Iterator[Path]:
    with connected(hub, tmp_path / "home"):
        yield tmp_path / "home"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that are made, in seconds; none of them is waited for."""
    made: list[float] = []
    monkeypatch.setattr(hub_session.time, "sleep", made.append)
    return made


def test_a_silent_hub_is_given_up_and_the_cache_is_used(
    hub: HubServer, home: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    hub.inject(API, Fault(silent=True))
    with raises(SourceError, repo_id="org/head", cause="ReadTimeout") as caught:
        open_head_source("org/head")
    assert (len(hub.requests), pauses) == (1, [])
    assert "does not answer" in str(caught.value)
    hub.clear_faults()
    commit = open_head_source("org/head").commit
    hub.inject(API, Fault(silent=True))
    assert open_head_source("org/head").commit == commit
    assert "does not answer (ReadTimeout); using the copy in the cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fault",
    [*(Fault(times=2, any_status=status) for status in (429, 500, 502, 503)), Fault(times=2, unanswered=True)],
    ids=["429", "500", "502", "503", "dropped"],
)
@pytest.mark.parametrize("path", [API, "/model.safetensors"], ids=["API", "HEAD"])
def test_a_hub_in_short_trouble_is_asked_again(
    hub: HubServer, home: Path, pauses: list[float], path: str, fault: Fault
) -> None:
    hub.inject(path, Fault(times=2, any_status=fault.any_status, unanswered=fault.unanswered))
    found = open_head_source("org/head")
    assert (found.folder / "model.safetensors").is_file()
    # The metadata of a file that is read by ranges, too.
    hub.inject(path, Fault(times=2, any_status=fault.any_status, unanswered=fault.unanswered))
    assert torch.equal(values(open_lm_head("org/head")), WEIGHTS["lm_head.weight"])


def test_the_hub_says_how_long_to_wait(
    hub: HubServer, home: Path, pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    hub.inject(API, Fault(times=1, any_status=429, retry_after_s=7))
    open_head_source("org/head")
    assert pauses[0] == 7
    assert "is reached (status 429); trying again in 7 s (try 2 of 5)" in capsys.readouterr().err


def test_a_session_of_requests_gets_a_time_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Response(SimpleNamespace):
        @property
        def content(self) -> bytes:
            return b"".join(self.iter_content(9))

    class Session:
        def send(self, request: Any, stream: bool, timeout: float | None = None) -> Response:
            limits.append(timeout)
            return Response(status_code=200, headers={}, request=request, close=list, iter_content=lambda size: [b"a"])

    session, limits = Session(), list[float | None]()
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    for method, path in (("GET", "api"), ("GET", "api/models/a/b/commit/main"), ("PUT", "upload")):
        request = SimpleNamespace(method=method, url=f"http://hub/{path}", headers={}, body=None)
        for given in (None, 100.0, 3.0):
            hub_session.be_patient()
            assert session.send(request, stream=False, timeout=given).content == b"a"
    assert limits == [10, 10, 3, 60, 60, 3, 60, 60, 3]


def test_a_rate_limit_is_called_so(hub: HubServer, tmp_path: Path, pauses: list[float]) -> None:
    hub.inject(API, Fault(any_status=429, retry_after_s=250))
    with connected(hub, tmp_path), raises(SourceError, status=429) as caught:
        open_head_source("org/head")
    assert "rate limit" in str(caught.value)
    assert "in 250 seconds" in str(caught.value)
    # Longer than anybody waits before a screen.
    assert pauses == []


@pytest.mark.parametrize("path", ["config.json", "model.safetensors"])
def test_nobody_waits_for_an_hour(
    hub: HubServer, home: Path, pauses: list[float], capsys: pytest.CaptureFixture[str], path: str
) -> None:
    """429 on a HEAD, on a file and on a range of one: the library and its loops would wait for 3,601 s."""
    for fault in (Fault(any_status=429, retry_after_s=3600), Fault(status=429, retry_after_s=3600)):
        hub.clear_faults()
        hub.inject(path, fault)
        for asked in (open_head_source, open_lm_head):
            with raises(SourceError, status=429) as caught:
                asked("org/head")
            assert "in 3600 seconds" in str(caught.value)
    assert pauses == []
    assert capsys.readouterr().err == ""


def test_who_asks_for_it_waits_longer(
    hub: HubServer, home: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_session.LIMITS, "patience_s", 4000.0)
    hub.inject("/config.json", Fault(times=1, any_status=429, retry_after_s=3600))
    open_head_source("org/head")
    assert pauses == [3600]


def test_a_date_says_how_long_to_wait(hub: HubServer, home: Path, pauses: list[float]) -> None:
    in_half_a_minute = formatdate(time.time() + 30, usegmt=True)
    hub.inject(API, Fault(times=1, any_status=503, retry_after_s=in_half_a_minute))
    open_head_source("org/head")
    assert 0 < pauses[0] <= 30
    hub.inject(API, Fault(times=1, any_status=503, retry_after_s="at noon"))
    open_head_source("org/head")
    assert pauses[1:] == [1]


@pytest.mark.parametrize(
    "fault", [Fault(silent=True), Fault(status=503), Fault(break_after=0)], ids=["silent", "busy", "broken"]
)
def test_every_wait_for_a_range_is_told(
    hub: HubServer, home: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], fault: Fault,
) -> None:  # fmt: skip
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    target_files("org/head")
    file = HubFile.open("org/head", hub.repo("org/head").branches["main"], "model.safetensors", "weights")
    hub.inject("model.safetensors", replace(fault))
    with raises(SourceError, repo_id="org/head"):
        read_remote_header(file)
    assert pauses == [1, 2, 4, 8]
    told = re.findall(r"^org/head: .*; trying again in (\d) s \(try (\d) of 5\)$", capsys.readouterr().err, re.M)
    assert told == [("1", "2"), ("2", "3"), ("4", "4"), ("8", "5")]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_drip_ends(hub: HubServer, home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(hub_session, "_WINDOW_S", 0.3)
    noise = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    files = {"config.json": json.dumps({"x": "y" * 20_000}), "model.safetensors": save({"lm_head.weight": noise})}
    hub.add_model("org/head", files)
    hub.inject(name, Fault(bytes_per_s=1000))
    monkeypatch.setattr(hub_session.LIMITS, "min_bytes_per_s", 100_000.0)
    for asked in (open_head_source, open_lm_head):
        with raises(SourceError, repo_id="org/head") as caught:
            asked("org/head")
        assert "below the floor of 100,000" in str(caught.value)
        assert "--min-speed" in str(caught.value)
    # Whoever has such a network says so.
    monkeypatch.setattr(hub_session.LIMITS, "min_bytes_per_s", 10.0)
    hub.clear_faults()
    hub.inject(name, Fault(bytes_per_s=40_000))
    assert torch.equal(values(open_lm_head("org/head")), noise)


def test_a_file_that_breaks_off_goes_on_where_it_broke(
    hub: HubServer, home: Path, pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    weights = save({"lm_head.weight": torch.arange(5000.0)})
    hub.add_model("org/head", {"config.json": "{}", "model.safetensors": weights})
    hub.inject("model.safetensors", Fault(times=3, break_after=2048))
    assert (open_head_source("org/head").folder / "model.safetensors").read_bytes() == weights
    assert pauses == [1, 2, 4]
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["org/head"] * 3
    assert [r.range for r in hub.requests if r.file == "model.safetensors" and r.method == "GET"] == [
        None, "bytes=2048-", "bytes=4096-", "bytes=6144-",
    ]  # fmt: skip


@pytest.mark.parametrize("where", [API, "/config.json"])
@pytest.mark.skipif(
    huggingface_hub.__version__.startswith("0."), reason="before 1.0 it follows a circle for ever itself"
)
def test_a_circle_of_redirections_is_named(hub: HubServer, home: Path, where: str) -> None:
    hub.inject(where, Fault(circle=True))
    with raises(SourceError, repo_id="org/head", cause="TooManyRedirects") as caught:
        open_head_source("org/head")
    assert "redirects in a circle" in str(caught.value)


def test_a_hub_in_long_trouble(hub: HubServer, home: Path, pauses: list[float]) -> None:
    hub.inject(API, Fault(any_status=503))
    with raises(SourceError, status=503):
        open_head_source("org/head")
    assert pauses == [1, 2, 4, 8]


@pytest.mark.parametrize("where", [API, "", "/resolve/main/config.json"])
def test_a_login_page_of_the_network_is_named(hub: HubServer, home: Path, where: str) -> None:
    hub.inject(where, Fault(portal=True))
    with raises(SourceError, repo_id="org/head") as caught:
        open_head_source("org/head")
    assert "wants a login" in str(caught.value)
    hub.clear_faults()
    commit = open_head_source("org/head").commit
    hub.inject(where, Fault(portal=True))
    assert open_head_source("org/head").commit == commit


def test_a_refusal_is_one_line(hub: HubServer, home: Path) -> None:
    hub.inject(API, Fault(any_status=403))
    with raises(SourceError, status=403) as caught:
        open_head_source("org/head")
    headline, advice = str(caught.value).split("\n")
    assert "\\n" not in headline
    assert advice.startswith("See ")


def test_advice_is_true(hub: HubServer, home: Path) -> None:
    with raises(SourceError) as caught:
        check_push("tester/slim")
    assert "set HF_TOKEN" in str(caught.value)
    assert "again" not in str(caught.value)
    # Twice in one command; the next one succeeds though the library, before 1.0, keeps what came.
    hub.inject("model.safetensors", Fault(times=2, extra_bytes=7))
    with raises(SourceError, repo_id="org/head") as caught:
        open_head_source("org/head")
    assert "force_download" not in str(caught.value)
    assert "run the same command again" in str(caught.value)
    folder = open_head_source("org/head").folder
    assert (folder / "model.safetensors").read_bytes() == bytes(FILES["model.safetensors"])


def test_a_file_of_another_size_is_fetched_anew(hub: HubServer, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.inject("model.safetensors", Fault(times=1, extra_bytes=7))
    folder = open_head_source("org/head").folder
    assert (folder / "model.safetensors").read_bytes() == bytes(FILES["model.safetensors"])
    assert "org/head: model.safetensors did not come as it is on the Hub; fetching it anew" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_an_upload_is_tried_again(hub: HubServer, tmp_path: Path, pauses: list[float]) -> None:
    (tmp_path / "slim").mkdir()
    (tmp_path / "slim" / "config.json").write_text("{}")
    weights = bytes(FILES["model.safetensors"])
    (tmp_path / "slim" / "model.safetensors").write_bytes(weights)
    hub.inject("/api/repos/create", Fault(times=1, any_status=503))
    hub.inject("/api/models/tester/slim/preupload/main", Fault(times=1, any_status=429))
    hub.inject(f"/upload/{hashlib.sha256(weights).hexdigest()}", Fault(times=2, any_status=503))
    hub.inject("/commit/main", Fault(times=1, unanswered=True))
    with connected(hub, tmp_path / "home", token="hf_good"):
        upload_files(tmp_path / "slim", ["config.json", "model.safetensors"], "tester/slim")
    assert hub.repo("tester/slim").files == {"config.json": b"{}", "model.safetensors": weights}
    assert sorted(pauses) == [1, 1, 1, 1, 2]
