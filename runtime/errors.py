"""Errors and warnings of the runtime, by what a user can do about them."""

from eagle_slim.vocab_tools.errors import EagleSlimError as EagleSlimError
from eagle_slim.vocab_tools.errors import UsageError as UsageError
from eagle_slim.vocab_tools.errors import check_choice as check_choice
from eagle_slim.vocab_tools.errors import page

_LONGEST = 100
OTHER_NAMES = f"{page('docs/upstream.md')}, Names used elsewhere, says what other drafters' names are called here."


class TargetError(EagleSlimError):
    """The target cannot be loaded: name another folder, repository or revision, or connect to the Hub."""


class UnsupportedModelError(EagleSlimError):
    """The model's class or one of its options is outside what the runtime handles: take another model."""


class PairingError(EagleSlimError):
    """Head, draft vocabulary, tokenizer and target do not belong together: take another head or target."""


class PromptError(EagleSlimError):
    """A prompt is empty, or leaves no room in the model's context; ``prompt``: its place in the call."""

    def __init__(self, message: str = "", /, prompt: int = 0) -> None:
        super().__init__(message)
        self.prompt = prompt


class LogitsError(EagleSlimError):
    """The target's logits at a position are no distribution: a NaN, an infinite value, or every token barred."""


class DrafterError(EagleSlimError):
    """The drafter asked for cannot run with these dimensions or on this device: take another."""


class DeviceMemoryError(EagleSlimError):
    """The memory of the device is full; the message says what can be lowered. What the call held is free again."""


class CheckError(DrafterError):
    """``EAGLE_SLIM_CHECK=1`` found a wrong value in a decoding step: a defect, to be reported with the message."""


class GPUAssertionError(DrafterError):
    """A call that is made for a GPU found none that it can use: take another machine, or a CPU drafter."""


class PromptFileError(EagleSlimError):
    """A file of prompts cannot be read as Spec-Bench or MT-bench lines, or as plain text."""


class SamplingWarning(UserWarning):
    """An option that only sampling reads was given to greedy decoding, which ignores it."""


class SpeedWarning(UserWarning):
    """Something runs slower on this machine than it would on another, or with more memory."""


class TargetWarning(UserWarning):
    """The target is another copy than was named, or not what its configuration says."""


class HeadWarning(UserWarning):
    """A head's weights are damaged, or its vocabulary lacks ids: output stays exact, but drafts are worse."""


class AcceptanceWarning(UserWarning):
    """Hardly any drafted token was accepted: output stays exact, but something about the head is probably wrong."""


def brief(value: object) -> str:
    """Return a value as text that fits a line of an error message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def misfit(name: str, expected: object, found: object) -> UsageError:
    """Return the error for an option, a field or a tensor that cannot be what it is."""
    return UsageError(f"{name} must be {expected}, got {brief(found)}.")
