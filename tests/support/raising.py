"""Expect an error by its class and the names its message holds, so that a reworded message breaks no test."""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from eagle_slim.vocab_tools.errors import EagleSlimError
from eagle_slim.vocab_tools.hub import HubError


@contextmanager
def raises_hub_error(reason: str, *words: str) -> Iterator[pytest.ExceptionInfo[HubError]]:
    """Pass if the block raises HubError for this reason, as it names them, with a message that holds these words."""
    with raises_with(HubError, *words) as caught:
        yield caught
    assert caught.value.reason == reason, str(caught.value)


@contextmanager
def raises_with(kind: type[EagleSlimError], *words: str) -> Iterator[pytest.ExceptionInfo[EagleSlimError]]:
    """Pass if the block raises ``kind`` (or a subclass) with a message that holds these names and values."""
    with pytest.raises(kind) as caught:
        yield caught
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, str(caught.value)


def raises(kind: type[EagleSlimError], option: str = "") -> AbstractContextManager[pytest.ExceptionInfo]:
    """Pass if the block raises ``kind`` (or a subclass) with a message that names the option."""
    return raises_with(kind, option)


def exit_code(command: Callable[..., object], *arguments: object) -> int:
    """Run a command in this process and return the exit code that it ends with."""
    with pytest.raises(SystemExit) as stopped:
        command(*arguments)
    return stopped.value.code


@contextmanager
def waiting_for_nothing() -> Iterator[None]:
    """Raise TimeoutError where the block reads what never comes, as from a pipe."""

    def ring(*_: object) -> None:
        raise TimeoutError("waited for something that is not a regular file")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(1800)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
