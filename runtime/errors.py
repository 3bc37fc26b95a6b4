"""Errors of the runtime, by what a user can do about them.

EagleSlimError
├── UsageError              the arguments contradict each other or the input: other arguments
│   └── NothingToFollowError  the draft vocabulary holds every id that could join it: a smaller one
├── TargetError             the target cannot be loaded: other folder, repository or revision, or a connection
├── UnsupportedModelError   this model class or one of its options is outside what the runtime handles: other model
├── PairingError            head, vocabulary, tokenizer and target do not belong together: other head or target
├── PromptError             the prompt is empty or too long for the model: other prompt
├── LogitsError             logits that are no distribution: other weights, type of weights or options
├── DrafterError            the drafter asked for cannot run here: other drafter or device
│   ├── CheckError          EAGLE_SLIM_CHECK found a wrong value in a step: a defect, to be reported with the message
│   └── GPUAssertionError   a call that is made for a GPU found none that it can use: other machine, or a CPU drafter
├── DeviceMemoryError       the GPU's memory is full: fewer slots, shorter texts, smaller trees
└── PromptFileError         a prompt file cannot be read as Spec-Bench/MT-bench lines or plain text
"""

from collections.abc import Collection
from difflib import get_close_matches

# Under their own names again, so that they can be imported from here.
from eagle_slim.vocab_tools.errors import EagleSlimError as EagleSlimError
from eagle_slim.vocab_tools.errors import UsageError as UsageError

_LONGEST = 100


class NothingToFollowError(UsageError):
    """A draft vocabulary holds every id that could join it."""


class TargetError(EagleSlimError):
    """The target cannot be loaded."""


class UnsupportedModelError(EagleSlimError):
    """The target or head is of a kind that tree drafting cannot serve."""


class PairingError(EagleSlimError):
    """Head, draft vocabulary, tokenizer and target do not belong together."""


class PromptError(EagleSlimError):
    """A prompt is empty, or leaves no room in the model's context; ``prompt``: its place in the call."""

    def __init__(self, message: str = "", /, prompt: int = 0) -> None:
        super().__init__(message)
        self.prompt = prompt


class LogitsError(EagleSlimError):
    """The target's logits at a position are no distribution: a NaN, an infinite value, or every token barred."""


class DrafterError(EagleSlimError):
    """The drafter asked for cannot run with these dimensions or on this device."""


class DeviceMemoryError(EagleSlimError):
    """The memory of the device is full; says what can be lowered. The next call starts with what was free before."""


class CheckError(DrafterError):
    """``EAGLE_SLIM_CHECK=1`` found a value in a decoding step that breaks a rule; names slot, phase and value."""


class GPUAssertionError(DrafterError):
    """A call that is made for a GPU found none that it can use; says what was expected, what was found, what to do."""


class PromptFileError(EagleSlimError):
    """A file of prompts cannot be read."""


class SamplingWarning(UserWarning):
    """An option that only sampling reads was given to greedy decoding, which ignores it."""


class SpeedWarning(UserWarning):
    """Something runs slower on this machine than it would on another, or with more memory."""


class TargetWarning(UserWarning):
    """Another copy of the target stands in for the one that was named."""


class HeadWarning(UserWarning):
    """A head's weights are damaged: output stays exact, but drafts are bad."""


class AcceptanceWarning(UserWarning):
    """Hardly any drafted token was accepted: output stays exact, but something about the head is probably wrong."""


def did_you_mean(name: str, choices: Collection[str]) -> str:
    """Return a sentence that names the choice nearest to a mistyped name, with a space before it; "" without one."""
    return "".join(f" Did you mean {near}?" for near in get_close_matches(name, choices, n=1))


def brief(value: object) -> str:
    """Return a value as text that fits a line of an error message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def misfit(name: str, expected: object, found: object) -> UsageError:
    """Return the error for an option, a field or a tensor that cannot be what it is."""
    return UsageError(f"{name} must be {expected}, got {brief(found)}.")


def check_choice(option: str, value: object, choices: Collection[object]) -> None:
    """Raise `UsageError` for a value that is none of ``choices``."""
    if value not in choices:
        names = ", ".join(map(repr, choices))
        raise UsageError(f"{option} = {value!r} is unknown; expected one of {names}.")
