"""Head, target and tokenizer: found and opened; whether they belong together is checked before weights are loaded."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from eagle_slim.convert.errors import UnsupportedHeadError
from eagle_slim.convert.heads.artifact import Artifact
from eagle_slim.convert.heads.draft_head import DraftHead, has_padding_of
from eagle_slim.convert.heads.open import D2tForm, open_head
from eagle_slim.convert.heads.taps import default_taps
from eagle_slim.convert.sources.builtin import EMBEDDED_TARGET_REPO, embedded_target_folder, load_embedded_counts
from eagle_slim.convert.sources.source import open_head_source
from eagle_slim.convert.targets.model import choose_target
from eagle_slim.vocab_tools.errors import EagleSlimError, TokenizerError
from eagle_slim.vocab_tools.files import read_object
from eagle_slim.vocab_tools.hub import keep_limit, trouble_of
from eagle_slim.vocab_tools.ranking import rank_vocabulary
from eagle_slim.vocab_tools.tokenizer import load_tokenizer
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from numpy.typing import NDArray
from torch import nn

from .drafter.weights import choose_draft_ids
from .errors import DeviceMemoryError, PairingError, SpeedWarning, TargetError, UsageError, check_choice, misfit
from .ops import lacks_fp8
from .target.fp8_forms import AT_LOAD, Fp8Form, read_form
from .target.fp8_loading import UNREAD, fetch_target, load_fp8
from .target.location import given_target, recorded_target
from .target.wrapper import check_supported

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INSTRUCTIONS = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}
"""Linux' names of the instructions that multiply in a type, on x86 and on ARM."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class OpenedHead:
    """A head ready to be paired: an artifact's, or one as its authors published it."""

    head: DraftHead
    ranks: DraftVocab | None = None
    """The ranking in the manifest; None without one."""
    tokenizer_hash: str | None = None
    target_name: str | None = None
    """Repository or folder of the target; None where the head does not name it."""
    target_folder: str | None = None
    """Name of the local folder that the target was in when the head was converted."""
    folder: Path | None = None
    """Folder of a converted head."""
    is_embedded: bool = False
    """Whether it is the unconverted head that the package carries; its counts give it a ranking."""

    def __post_init__(self) -> None:
        if self.head.kind == "dflash":
            problem = "is a DFlash draft; this runtime drafts with EAGLE heads.\nServe it: docs/serving.md."
            raise UnsupportedHeadError.at(self.head.location, problem)

    @cached_property
    def ranking(self) -> DraftVocab | None:
        """Ranking of the rows: the manifest's, or that of the built-in head by its own counts; None without either."""
        if not self.is_embedded:
            return self.ranks
        tokenizer = load_tokenizer(embedded_target_folder(), offline=True)
        return rank_vocabulary(load_embedded_counts(), tokenizer=tokenizer, target_vocab=self.head.target_vocab)

    def choose(self, draft_vocab: int | np.integer[Any] | DraftVocab | None) -> NDArray[np.int64]:
        """Choose the target ids to draft over, ascending; see `choose_draft_ids`."""
        if isinstance(draft_vocab, np.integer):
            draft_vocab = int(draft_vocab)
        needs_ranking = isinstance(draft_vocab, int) and draft_vocab != self.head.draft_vocab
        ranked = self.ranking if needs_ranking else self.ranks
        if ranked is None:
            return choose_draft_ids(self.head, draft_vocab, None)
        return choose_draft_ids(self.head, draft_vocab, ranked.target_ids, ranked.num_forced)

    def rank_rows(
        self, draft_ids: NDArray[np.int64], draft_vocab: int | np.integer[Any] | DraftVocab | None
    ) -> NDArray[np.int64] | None:
        """Return the rows of ``draft_ids`` (what `choose` gave for ``draft_vocab``) best first, int64 [draft_vocab].

        The first N of them are what `choose` gives for N. Ids that were never ranked come last. None without a ranking.
        """
        given = self.ranking if draft_vocab is None or isinstance(draft_vocab, (int, np.integer)) else draft_vocab
        if given is None or not given.ranked:
            return None
        place = np.full(self.head.target_vocab, len(given), dtype=np.int64)
        place[given.target_ids] = np.arange(len(given))
        return np.argsort(place[draft_ids], kind="stable")


def open_any_head(
    head: str | Path | DraftHead | Artifact | None,
    revision: str | None = None,
    offline: bool = False,
    d2t_form: D2tForm = "auto",
    tap_layers: Sequence[int] | None = None,
) -> OpenedHead:
    """Open an artifact, an unconverted head or a public one; None is the head built into the package.

    Raises the errors of `open_head` and `Artifact.load`, and `UsageError` when ``tap_layers`` or ``d2t_form`` is given
    for an artifact, whose manifest settles both.
    """
    check_choice("d2t_form", d2t_form, get_args(D2tForm))
    is_embedded = head is None
    if not isinstance(head, (Artifact, DraftHead)):
        source = open_head_source(head, revision=revision, offline=offline)
        if source.manifest is None:
            head = open_head(source, d2t_form=d2t_form, tap_layers=tap_layers)
        elif tap_layers is not None or d2t_form != "auto":
            raise UsageError(
                f"{head} is a converted head, whose manifest says which tap layers and map form it has. Leave "
                "tap_layers and d2t_form out."
            )
        else:
            head = Artifact.load(source)
    if isinstance(head, Artifact):
        target = head.manifest.target
        name = EMBEDDED_TARGET_REPO if "wheel" in target else target.get("repo_id")
        return OpenedHead(head.head, head.manifest.ranks, head.tokenizer_hash, name, target.get("name"), head.folder)
    choice = choose_target(head, is_embedded)
    return OpenedHead(
        head,
        tokenizer_hash=load_embedded_counts().tokenizer_hash if is_embedded else None,
        target_name=None if choice is None else choice.name or EMBEDDED_TARGET_REPO,
        is_embedded=is_embedded,
    )


def choose_device(device: str | torch.device | None) -> torch.device:
    """Read a device such as "cuda:1" or "cpu"; None is the first GPU where there is one, else the CPU.

    Raises `UsageError` for an unknown name, and for a device that is not there.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.zeros(1, device=place).item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"device = {str(device)!r} cannot be computed on ({reason}). Use cpu, cuda or cuda:1, or leave it out."
        ) from error
    return place


@contextmanager
def _naming(target: str | Path) -> Iterator[None]:
    """Name the target in the errors of transformers, which has no class of its own for them."""
    keep_limit()
    try:
        yield
    except (EagleSlimError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
        # Without transformers' list of every model type it knows.
        reason = " ".join(said.split("\nModel type should be one of")[0].split()).rstrip(".")
        if "trust_remote_code" in reason:
            reason = (
                "its class is Python code beside its files (auto_map), which is never run here, and transformers has "
                "no class of its own for it"
            )
        folder = "" if Path(target).exists() else "there is no such folder here, and "
        # Nothing of a folder is fetched, so the Hub cannot be the reason there.
        if folder and isinstance(error, OSError) and (trouble := trouble_of(error, str(target))).is_unreachable:
            raise TargetError(f"Target {target}: {folder}{trouble}") from error
        raise TargetError(
            f"Target {target}: {folder}transformers cannot load it ({reason}). Expected the folder of a causal "
            "language model, or its repository on the Hub (name/model). A model of another class, such as a "
            "vision-language one, has to be loaded by you and passed to from_pretrained (in Python)."
        ) from error


def check_target_weights(target_weights: str, is_loaded: bool, device: torch.device, dtype: torch.dtype | None) -> None:
    """Raise `UsageError` for an unknown name, and for "fp8" with a loaded model, device or type that cannot have it."""
    check_choice("target_weights", target_weights, ("auto", "fp8"))
    if target_weights == "fp8":
        reason = "quantises while a target is loaded, and this one is" if is_loaded else _unfit_for_fp8(device, dtype)
        if reason is not None:
            raise UsageError(f"target_weights = 'fp8' {reason}. Leave target_weights out.")


def _unfit_for_fp8(device: torch.device, dtype: torch.dtype | None) -> str | None:
    """Return why weights in FP8 cannot be, as the end of a sentence; ``dtype``: of all else, None if not known yet."""
    if dtype not in (None, torch.bfloat16, torch.float16):
        return f"goes with activations in bfloat16 or float16, and these are in {dtype} (see dtype)"
    return lacks_fp8(device)


def choose_form(
    target: str | Path,
    config: Any,
    target_weights: str,
    dtype: torch.dtype | None,
    device: torch.device,
    revision: str | None,
    offline: bool,
) -> Fp8Form | None:
    """Return how a target's weights are in FP8: as published, or quantised where ``target_weights`` asks; None: not.

    ``config``: transformers' own; a ``quantization_config`` that quantises nothing is taken out of it. Raises
    `TargetError` for weights quantised otherwise, and for published FP8 where it cannot run.
    """
    from transformers.utils import cached_file

    settings = getattr(config, "quantization_config", None)
    if not settings:
        with _naming(target):
            file = cached_file(
                target,
                "hf_quant_config.json",
                revision=revision,
                local_files_only=offline,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        settings = None if file is None else read_object(Path(file), TargetError)
    form = read_form(settings, str(target))
    vars(config).pop("quantization_config", None)
    if form is not None and (reason := _unfit_for_fp8(device, dtype)) is not None:
        raise TargetError(
            f"Target {target}: it is published in FP8 ({form.method}), which {reason}. Take the model that it was made "
            "from, or load it with transformers, which may dequantise it, and pass it to from_pretrained (in Python)."
        )
    return AT_LOAD if form is None and target_weights == "fp8" else form


def load_target(
    target: str | Path,
    dtype: torch.dtype | None,
    device: torch.device,
    revision: str | None,
    offline: bool,
    config: Any = None,
    form: Fp8Form | None = None,
) -> nn.Module:
    """Load a causal LM in evaluation mode on a device: with transformers, or with weights in FP8 (``form``).

    ``dtype`` None: that of the files; on a CPU see `dtype_on_cpu`. ``config``: that of `load_target_config`, needed for
    FP8. Raises `TargetError`, and `DeviceMemoryError` where it does not fit; for FP8 as `load_fp8`, too.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import is_peft_available
    from transformers.utils.peft_utils import find_adapter_config_file

    wanted: Any = dtype
    weights = "in FP8"
    if form is not None:
        wanted = dtype or config.dtype
        reason = _unfit_for_fp8(device, wanted) if wanted else "names no type in its config.json"
        if reason is not None:
            raise TargetError(
                f"Target {target}, whose weights are to be in FP8, {reason}. Load it with dtype='bfloat16'."
            )
    try:
        with _naming(target):
            takes_adapters = form is None and is_peft_available()
            if not takes_adapters and find_adapter_config_file(target, revision=revision, local_files_only=offline):
                needs = "the package peft" if form is None else "a target that is not in FP8"
                raise ValueError(f"it has an adapter (adapter_config.json), which needs {needs}; or merge it first")
            if form is not None:
                return load_fp8(fetch_target(target, revision, offline), config, form, wanted, device)
            if dtype is None and device.type == "cpu":
                wanted = dtype_on_cpu(config or load_target_config(target, revision, offline))
            model, found = AutoModelForCausalLM.from_pretrained(
                target,
                config=config,
                dtype=wanted or "auto",
                revision=revision,
                local_files_only=offline,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            # transformers draws such weights at random.
            if drawn := [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]:
                problem = "are missing, or have other shapes than its config.json says"
                raise ValueError(f"{len(drawn)} tensors, such as {min(drawn)}, {problem}")
            # It does without these: a bias, or scales whose weights it then takes unscaled.
            modules, surplus = dict(model.named_modules()), found["unexpected_keys"]
            if left := [each for each in surplus if each.rpartition(".")[0] in modules and not each.endswith(UNREAD)]:
                problem = "belong to layers that have none by its config.json, which may lack a quantization_config"
                raise ValueError(f"{len(left)} tensors, such as {min(left)}, {problem}")
        needed = sum(weight.nbytes for weight in model.parameters())
        weights = f"{needed / 1e9:.1f} GB in {str(model.dtype).removeprefix('torch.')}"
        moved: nn.Module = model.to(device).eval()
        return moved
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
    raise DeviceMemoryError(
        f"Target {target}: its weights are {weights}, and the memory of {device} does not suffice ({reason}). Load it "
        "in a narrower type (dtype, target_weights), take a smaller target or another device, or free memory there."
    )


def dtype_on_cpu(config: Any) -> torch.dtype | str:
    """Return the type to load a causal language model in: float32, or "auto" for that of its files.

    ``config``: transformers' own, which names the type of the files. Float32 is for 16-bit files that this CPU has no
    instructions for, as every product would be widened first. Where it does not fit into 0.9 of the free memory, a
    `SpeedWarning` says so. The processor's speed is not asked for, so that one machine always gives one text.
    """
    stored = getattr(config, "dtype", None)
    if stored not in _INSTRUCTIONS or _INSTRUCTIONS[stored] & cpu_instructions():
        return "auto"
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        needed = 4 * sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    free = free_memory_bytes()
    if needed <= 0.9 * free:
        return torch.float32
    warnings.warn(
        f"This CPU has no {str(stored)[6:]} instructions, and float32 would be faster, but takes {needed / 1e9:.1f} GB "
        f"of {free / 1e9:.1f} GB of free memory: the target stays in {str(stored)[6:]}.",
        SpeedWarning,
        stacklevel=4,
    )
    return "auto"


@cache
def cpu_instructions() -> frozenset[str]:
    """Read the names of this CPU's instruction sets from Linux; empty where it lists none."""
    text = _read(Path("/proc/cpuinfo"))
    return frozenset(" ".join(re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)).split())


def free_memory_bytes(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free memory in bytes: the machine's, or less under the limit of its control group."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _read(proc / "meminfo"), re.MULTILINE)
    free = int(found[1]) * 1024 if found else 0
    limit, used = _read(group / "memory.max").strip(), re.search(r"^anon (\d+)", _read(group / "memory.stat"), re.M)
    return min(free, int(limit) - int(used[1])) if limit.isdigit() and used else free


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def load_target_config(target: str | Path, revision: str | None, offline: bool) -> Any:
    """Load a target's configuration. Raises `TargetError`."""
    from transformers import AutoConfig

    with _naming(target):
        # Never code of the folder: without this transformers asks on stdin, which may be the prompt.
        return AutoConfig.from_pretrained(target, revision=revision, local_files_only=offline, trust_remote_code=False)


def load_tokenizer_and_hash(target: str | Path, revision: str | None, offline: bool) -> tuple[Any | None, str | None]:
    """Load a target's tokenizer and its hash; (None, None) for a local folder without a tokenizer."""
    folder = Path(target)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None, None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded = load_tokenizer(str(target), revision=revision, offline=offline)
    where: dict[str, Any] = {"revision": revision, "local_files_only": offline}
    with _naming(target):
        try:
            tokenizer = AutoTokenizer.from_pretrained(target, **where, trust_remote_code=False)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            # A class that only code of the folder has; its tokenizer.json, which is loaded above, needs none.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(target, **where)
    return tokenizer, loaded.tokenizer_hash


def hash_of_source(tokenizer: Any) -> str | None:
    """Hash of the files that a transformers tokenizer was loaded from; None where they cannot be found here."""
    source = getattr(tokenizer, "name_or_path", None)
    try:
        return load_tokenizer(source, offline=True).tokenizer_hash if source else None
    except TokenizerError:
        return None


def read_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the float type that ``dtype`` is or names; None for "auto". Raises `UsageError` for any other."""
    if dtype in (None, "auto"):
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in _DTYPES:
        raise misfit("dtype", f"'auto', {', '.join(map(str, _DTYPES))}", dtype)
    return found


def check_loaded(target: nn.Module, dtype: torch.dtype | None, device: str | torch.device | None) -> None:
    """Raise `UsageError` when a loaded target is not of the type or on the device that is asked for.

    Raises `UnsupportedModelError` for what cannot be a target at all, such as a single layer (`check_supported`).
    """
    check_supported(target)
    weight = next(target.parameters())
    if dtype not in (None, weight.dtype):
        raise UsageError(f"dtype = {dtype}, but the loaded target is in {weight.dtype}. Leave dtype out.")
    place = weight.device if device is None else choose_device(device)
    if place.type != weight.device.type or place.index not in (None, weight.device.index):
        raise UsageError(f"device = {str(device)!r}, but the loaded target is on {weight.device}. Leave device out.")


def target_location(
    opened: OpenedHead, given: str | Path | None, offline: bool = False, revision: str | None = None
) -> str | Path:
    """Return where to load the target from: as given, else as the head names it; the built-in one, if of no revision.

    Raises `UsageError` when neither names one that can be found (`given_target`, `recorded_target`).
    """
    if given is not None:
        return given_target(given, offline, revision)
    if opened.target_name is not None:
        is_built_in = opened.target_name == EMBEDDED_TARGET_REPO and revision is None
        return embedded_target_folder() if is_built_in else opened.target_name
    if opened.target_folder is not None and opened.folder is not None:
        return recorded_target(opened.target_folder, opened.folder)
    raise UsageError(f"Head {opened.head.location} does not say which target it belongs to. Give the target.")


def resolve_tap_layers(head: DraftHead, num_layers: int) -> tuple[int, ...] | None:
    """Return the decoder layers whose inputs the head reads; None for the last hidden state (EAGLE-1/2).

    Raises `MismatchError` where the head's configuration contradicts itself, or names a layer that the target lacks.
    """
    taps = head.taps(num_layers)
    if head.kind == "eagle" or taps == ():
        return None
    return default_taps(num_layers) if taps is None else taps


def check_pairing(head: DraftHead, text_config: Any, target_name: str) -> None:
    """Compare a head with a target's (text) configuration.

    Raises `PairingError`, naming the value of both sides, when hidden sizes or vocabularies differ, when a draft id is
    outside the target's vocabulary, or when a tap layer is not one of the target's.
    """
    hidden, vocab = int(text_config.hidden_size), int(text_config.vocab_size)
    layers = int(text_config.num_hidden_layers)
    where = f"Head {head.location} and target {target_name} do not belong together"
    problem = None
    highest = -1 if head.draft_ids_to_target is None else int(head.draft_ids_to_target.max())
    taps = resolve_tap_layers(head, layers)
    fc_columns = head.tensors.shape("fc.weight")[1] if "fc.weight" in head.tensors else None
    if head.target_hidden_size != hidden:
        problem = f"the head was trained for a hidden size of {head.target_hidden_size}, the target has {hidden}"
    elif not has_padding_of(head.target_vocab, vocab):
        problem = f"the head's vocab_size is {head.target_vocab}, the target's {vocab}"
    elif highest >= vocab:
        problem = f"the head drafts id {highest}, the target has {vocab} tokens; d2t may have the other form (d2t_form)"
    elif taps is not None and fc_columns not in (None, len(taps) * hidden):
        problem = f"fc.weight takes {fc_columns} features, and {len(taps)} tap layers of width {hidden} give other ones"
    if problem is not None:
        raise PairingError(f"{where}: {problem}. Give the target that the head was trained for.")


def check_tokenizer(made_with: str | None, target_hash: str | None, what: str, target_name: str) -> None:
    """Raise `PairingError` when both tokenizer hashes are known and differ; ``what`` was made with the first."""
    if made_with is not None and target_hash is not None and made_with != target_hash:
        raise PairingError(
            f"{what} was made with another tokenizer than that of target {target_name}: expected {target_hash[:23]}…, "
            f"found {made_with[:23]}…. Its ids are other tokens there. Convert or rank for this target."
        )


def check_vocabulary(vocab: object, target_hash: str | None, target_name: str) -> None:
    """Raise `PairingError` when a `DraftVocab` says that it was made with another tokenizer than the target's."""
    made_with = getattr(vocab, "provenance", {}).get("tokenizer_hash")
    check_tokenizer(made_with, target_hash, "The draft vocabulary", target_name)
