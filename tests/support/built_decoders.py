from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import pytest
from eagle_slim.runtime.step.decoder import Decoder


@dataclass
class BuiltDecoders:
    """Their number so far, and those that are still there."""

    count: int = 0
    alive: WeakSet[Decoder] = field(default_factory=WeakSet)


def watch_decoders(monkeypatch: pytest.MonkeyPatch) -> BuiltDecoders:
    built, build = BuiltDecoders(), Decoder.__init__

    def watched(decoder: Decoder, *given: Any, **options: Any) -> None:
        build(decoder, *given, **options)
        built.count += 1
        built.alive.add(decoder)

    monkeypatch.setattr(Decoder, "__init__", watched)
    return built
