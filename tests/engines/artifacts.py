"""Artifacts for the engine tests: oracle heads converted as a user would, and copies of them that are broken."""

import contextlib
import io
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import torch
from eagle_slim.convert.cli import main as convert_command
from engines import oracle
from safetensors.torch import load_file, save_file
from support.heads import write_freq

TAPS = (1, 3, 6)
"""Tap layers of the head that does not use the default ones."""


class OracleFiles:
    """The oracle's target, heads and artifacts in one folder, each made when first asked for.

    Attributes:
        folder: holds everything.
        target: the target model.
        token_map: all ids by rank, as FR-Spec and SGLang store them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = oracle.build_target(folder / "target")
        self.token_map = write_freq(folder / "ranks.pt", oracle.ranked_ids())
        self.head = cache(self._head)
        self.artifact = cache(self._artifact)

    def _head(self, name: str) -> Path:
        """An unconverted head: its trained ids are the first 640 by rank where it has a map."""
        trained = oracle.ranked_ids()[:640]
        folder = self.folder / f"head-{name}"
        if name.startswith("dflash"):
            return oracle.build_dflash(folder, 640 if name == "dflash_mapped" else None)
        if name.startswith("eagle1"):
            return oracle.build_eagle1_head(folder, is_biased=name == "eagle1_biased")
        options: dict[str, dict[str, Any]] = {"full": {}, "mapped": {"ids": trained}, "other_taps": {"taps": TAPS}}
        options |= {"biased": {"is_biased": True}, "trained_embedding": {"has_trained_embedding": True}}
        options |= {"target_rows": {"own_lm_head": False}, "head_norms": {"ids": trained, "norms": "of heads"}}
        last = (1, 3, oracle.LAYERS)
        options |= {"tap_norms": {"norms": "fc_norm"}, "norm": {"norms": "norm_before_fc", "taps": last}}
        return oracle.build_eagle3_head(folder, **options[name])

    def _artifact(self, head: str, draft_vocab: int | str, *options: str) -> Path:
        """`eagle-convert` on one of the heads with the oracle's target and ranking; returns the artifact.

        In this process: there are many, and starting takes longer than converting.
        """
        folder = self.folder / "-".join(["artifact", head, str(draft_vocab), *options]).replace(" ", "")
        ranking = () if draft_vocab == "full" else ("--token-map", str(self.token_map))
        arguments = [str(self.head(head)), "--draft-vocab", str(draft_vocab), *ranking, "--target", str(self.target)]
        arguments += ["--out", str(folder), "--offline", *options]
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                convert_command(arguments)
            except SystemExit as stop:
                code = stop.code
        assert not code, f"eagle-convert {' '.join(arguments)}: exit {code}\n{said.getvalue()}"
        return folder


def command(name: str, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run one of our commands as installed beside this Python; fails unless it exits with ``expect``."""
    done = subprocess.run([str(Path(sys.executable).parent / name), *arguments], capture_output=True, text=True)
    assert done.returncode == expect, f"{done.args}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_for(*urls: str, timeout_s: float = 1800) -> None:
    deadline = time.monotonic() + timeout_s
    for url in urls:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=timeout_s):
                break
            assert time.monotonic() < deadline, url
            time.sleep(0.3)


def target_ids(artifact: Path) -> list[int]:
    """Target id of every LM-head row, read from d2t as engines do."""
    d2t = load_file(artifact / "model.safetensors")["d2t"]
    return (d2t + torch.arange(len(d2t))).tolist()


def expected_ids(draft_vocab: int, trained: int | None = None) -> list[int]:
    """Ascending ids that the oracle's ranking gives: bos and eos first, unless the head was never trained on them."""
    ranked = oracle.ranked_ids()
    if trained is not None:
        return sorted(ranked[:draft_vocab])
    forced = [oracle.BOS, oracle.EOS]
    return sorted([*forced, *[token for token in ranked if token not in forced][: draft_vocab - 2]])


def break_map(artifact: Path, out: Path, how: str) -> Path:
    """Copy an artifact and damage its map: "missing", "absolute" or "order" (rows not in the order of their ids)."""
    shutil.copytree(artifact, out)
    tensors = load_file(artifact / "model.safetensors")
    if how == "missing":
        del tensors["d2t"], tensors["t2d"]
    elif how == "absolute":
        tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    elif how == "order":
        tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, dims=0)
    else:
        raise ValueError(how)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def chat_prompts(number: int) -> list[str]:
    """The first questions of `examples/prompts.jsonl`, as SmolLM2's chat template renders them."""
    lines = (Path(__file__).parents[2] / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return [
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{json.loads(line)['turns'][0]}<|im_end|>\n"
        "<|im_start|>assistant\n"
        for line in lines[:number]
    ]
