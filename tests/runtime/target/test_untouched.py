"""While ours runs, and after it was interrupted at any line, the user's model and transformers are as they were."""

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import pytest
import torch
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from eagle_slim.runtime.ops import garbage_kept
from eagle_slim.runtime.target import attention, shared_copy, wrapper
from support.tiny_models import plain_greedy, random_prompts, tiny_target, write_head
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
PROMPT = random_prompts([9])[0]
FILES = {module.__file__ for module in (attention, shared_copy, wrapper)}
INTERFACES = (AttentionInterface, AttentionMaskInterface)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"))


def state(model: nn.Module) -> list[Any]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_modules")
    dicts = [dict(getattr(module, name)) for module in model.modules() for name in names]
    return [*dicts, *(sorted(vars(module)) for module in model.modules()), dict(vars(model.config))]  # type: ignore[arg-type]


def test_modules_run_another_way_meanwhile_as_ever(head: Path) -> None:
    """An inner module and the model's own generate, in this thread and in another, within a forward of ours."""
    own: Any = tiny_target("llama")
    wanted, wanted_hidden = plain_greedy(own, PROMPT, 6, eos=None), own.model(torch.tensor([PROMPT]))[0]
    before = state(own)
    model = SpeculativeModel.from_pretrained(own, head, tree=TreeConfig(2, 2, 5))
    found: list[Any] = []
    inside = threading.local()

    def look_around(*_: Any) -> None:
        if getattr(inside, "is_ours", False):
            inside.is_ours = False
            assert state(own) == with_hook

            def run() -> None:
                found.append(plain_greedy(own, PROMPT, 6, eos=None))
                with torch.no_grad():
                    found.append(own.model(torch.tensor([PROMPT]))[0])

            in_another_thread(run)
            with torch.inference_mode(False):
                run()

    hook = own.model.layers[2].mlp.down_proj.register_forward_hook(look_around)
    with_hook = state(own)
    inside.is_ours = True
    assert model.generate(PROMPT, max_new_tokens=6, ignore_eos=True).token_ids[0] == wanted
    hook.remove()
    assert found[0] == found[2] == wanted
    assert torch.equal(found[1], wanted_hidden)
    assert torch.equal(found[3], wanted_hidden)
    assert state(own) == before


def test_nothing_is_left_in_transformers_when_ours_is_gone(head: Path) -> None:
    gc.collect()
    before = [dict(interface._global_mapping) for interface in INTERFACES]
    first, second = (SpeculativeModel.from_pretrained(tiny_target("llama"), head) for _ in range(2))
    assert all(attention.ATTENTION_NAME in interface._global_mapping for interface in INTERFACES)
    del first
    gc.collect()
    assert len(second.generate(PROMPT, max_new_tokens=3, ignore_eos=True).token_ids[0]) == 3
    del second
    gc.collect()
    assert [dict(interface._global_mapping) for interface in INTERFACES] == before


def test_a_target_that_is_let_go_is_free_at_once(head: Path) -> None:
    """Its memory must not wait for a search for garbage."""
    model = SpeculativeModel.from_pretrained(tiny_target("llama"), head)
    model.generate(PROMPT, max_new_tokens=3)
    own = ref(model.target.model)
    with garbage_kept():
        del model
        assert own() is None


def test_garbage_is_looked_for_after_one_load_ends_while_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    is_enabled, has_begun, ends = gc.isenabled, threading.Event(), threading.Event()

    def load() -> None:
        with garbage_kept():
            has_begun.set()
            ends.wait()

    def meanwhile() -> bool:
        found = is_enabled()
        ends.set()
        first.join(0.1)
        return found

    first = threading.Thread(target=load)
    first.start()
    has_begun.wait()
    monkeypatch.setattr(gc, "isenabled", meanwhile)
    with garbage_kept():
        pass
    first.join()
    assert is_enabled()


class Interrupt:
    """Raises KeyboardInterrupt at the first time that a line is reached, or, without one, notes the lines."""

    def __init__(self, line: tuple[str, int] | None = None) -> None:
        self.line, self.lines = line, dict[tuple[str, int], None]()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            at = frame.f_code.co_filename, frame.f_lineno
            self.lines[at] = None
            if at == self.line:
                self.line = None
                raise KeyboardInterrupt
        return self

    def run(self, act: Callable[[], object]) -> bool:
        """Run something under the tracer; whether it was interrupted."""
        outside = sys.gettrace()
        sys.settrace(self)
        try:
            act()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(outside)
        return False


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_leaves_nothing_behind(step: int, head: Path) -> None:
    own: Any = tiny_target("llama", num_hidden_layers=4)
    wanted = plain_greedy(own, PROMPT, 4, eos=None)
    model = SpeculativeModel.from_pretrained(own, head, tree=TreeConfig(2, 2, 5))

    def generate() -> list[int]:
        own.config.seen = own.config.seen + 1  # a change, so that the model is taken anew
        return model.generate(PROMPT, max_new_tokens=4, ignore_eos=True).token_ids[0]

    def hold() -> None:
        with model.target.hold():
            pass

    own.config.seen = 0
    noted = Interrupt()
    assert not noted.run(generate)
    assert {line[0] for line in noted.lines} >= {shared_copy.__file__, wrapper.__file__}
    before = state(own)
    for line in list(noted.lines)[::step]:
        assert Interrupt(line).run(generate), line
        own.config.seen = 1
        assert state(own) == before, line
        in_another_thread(hold)
    assert in_another_thread(generate) == wanted


def in_another_thread(act: Callable[[], Any]) -> Any:
    """Return what an act gives there, whose end is waited for."""
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.append(act()))
    other.start()
    other.join(1800)
    assert not other.is_alive()
    return results[0]
