"""Kernels of rehearsed calls are compiled by forks, as launches will look for them, and nothing is launched."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.test_compile import compile_in_a_process
from support.programs import need_processes

pytestmark = pytest.mark.compiled

REHEARSAL = """
import json
import triton
from eagle_slim.runtime.drafter.kernels.compile_target import CompileTarget
from eagle_slim.runtime.step.kernels import acceptance, prompt_chunks, slot_state
from triton.runtime.driver import driver
from benchmarks.shared.ahead import Recorder, compile_in_forks

gpu, found = CompileTarget(90), []
gpu.launcher_cls = lambda *_: None
driver.set_active(gpu)
state = slot_state.SlotState.allocate(4, prompt_chunks.MAX_EOS, "cpu")
box, recorder = prompt_chunks.PromptBox.allocate(1024, "cpu"), Recorder(90)
for _ in range(2):
    with recorder.recording():
        prompt_chunks.begin_prompt(box, state)
        acceptance.list_active(state)
        acceptance.list_active(state)
errors = [str(kernel.exception()) for kernel in compile_in_forks(recorder.compiles)]
triton.knobs.compilation.listener = lambda **heard: found.append(heard["cache_hit"])
try:
    acceptance.list_active(state)
except AttributeError as error:  # what stands for a GPU cannot load it
    errors.append(error.name)
print(json.dumps({"errors": errors, "found": found}))
"""


def test_rehearsed_kernels_are_found_by_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_processes()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    report = compile_in_a_process("-c", REHEARSAL)
    assert report == {"errors": ["None", "None", "utils"], "found": [True]}
    assert {path.stem for path in tmp_path.glob("*/*.cubin")} == {"_begin_prompt_kernel", "_list_active_kernel"}
