"""What is wrong with a benchmark's arguments ends it before anything is loaded, with exit code 2."""

import importlib

import pytest
import torch
from support.raising import exit_code

MISTAKES = {
    "draft": (["--rows", "gpt2"], ["--rows", "("]),
    "engines": (["--out", "/"],),
    "exact": (["--tokens", "0"], ["--seconds", "0"], ["--out", "/"]),
    "gates": (["--out", "/"], ["--thresholds", "x"]),
    "generate": (
        *([f"--sizes={sizes}"] for sizes in ("all", "0", "full,-5", "full,8191")),
        *(["--steps", "0"], ["--rounds", "0"], ["--accepted", "7.1"], ["--accepted", "0.9"]),
    ),
    "load_fp8": (["--dims", "gpt"], ["--layers", "0"]),
    "mixture": (["--rows", "gpt"], ["--target-weights", "int4"]),
    "price": (["--dims", "gpt"], ["--places", "0"]),
    "shapes": (["--new", "1"], ["--steps", "1"]),
    "step": (["--dims", "gpt"],),
    "trace": (["--dims", "gpt"],),
    "train_mixture": ([], ["--save", "a", "--saved", "b"], ["--save", "a", "--seconds", "0"]),
}


@pytest.mark.parametrize(("name", "arguments"), [(name, each) for name, lines in MISTAKES.items() for each in lines])
def test_mistakes(name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(importlib.import_module(f"benchmarks.{name}").main, arguments) == 2
    assert "needs an NVIDIA GPU" not in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["draft", "gates"])
def test_without_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(importlib.import_module(f"benchmarks.{name}").main, []) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
