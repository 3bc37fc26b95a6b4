"""What a comparison generated, as counts for `eagle-vocab`: a source for each category of the prompts."""

from __future__ import annotations

from collections.abc import Sequence

from ..miss_log import MissLog, vocabulary_name
from ..model import SpeculativeModel
from .answers import Answer
from .compare import PLAIN, Candidate, Plan


def log_of_answers(
    model: SpeculativeModel, plan: Plan, answers: Sequence[Answer], candidates: Sequence[Candidate]
) -> MissLog:
    """Count plain decoding's answers, each text once: those of the first repeat and of the first batch size.

    The provenance says of each draft vocabulary what it missed in its own answers to the same prompts, each once.
    """
    log = MissLog.of(model)
    batch, names = plan.batches[0], _names(candidates)
    groups = {group[0]: group for group in plan.groups(batch)}
    counted = set[tuple[str, str, int, int]]()
    for answer in answers:
        key = answer.key
        if (key.repeat, key.batch) != (0, batch):
            continue
        is_plain = key.candidate == PLAIN
        name = PLAIN if is_plain else names[key.candidate]
        places = [place for place in groups[key.group] if key.turn < len(plan.prompts[place].turns)]
        missed = answer.missed or (0,) * len(places)
        for place, row, num_missed in zip(places, answer.token_ids, missed, strict=True):
            # A group that is filled up holds prompts that were answered before, or a prompt several times; and one
            # draft vocabulary may be compared with several trees.
            if (name, key.mode, key.turn, place) in counted:
                continue
            counted.add((name, key.mode, key.turn, place))
            category = plan.prompts[place].category
            if is_plain:
                log.add_tokens([row], source=category)
            else:
                log.add_tokens([], {name: (len(row), num_missed)}, category)
    return log


def _names(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Name each candidate's draft vocabulary; those of one name are one vocabulary, with whatever tree."""
    names, sizes = dict[str, str](), dict[str, str]()
    for each in candidates:
        name = vocabulary_name(each.model)
        name = name if each.head == candidates[0].head else f"{each.head}: {name}"
        # An artifact's own ids, and as many by another ranking.
        is_other = sizes.setdefault(name, each.size) != each.size
        names[each.label] = f"{name} ({each.size})" if is_other else name
    return names
