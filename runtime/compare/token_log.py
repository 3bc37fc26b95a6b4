"""What a comparison generated, as counts for `eagle-vocab`: a source for each category of the prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..miss_log import MissLog, vocabulary_name
from .answers import Answer
from .plan import Plan


def log_of_answers(log: MissLog, plan: Plan, answers: Sequence[Answer]) -> MissLog:
    """Count plain decoding's answers into a log, each text once: those of the first repeat and batch size.

    The provenance says of each draft vocabulary what it missed in its own answers to the same prompts, each once.
    """
    batch, names = plan.options.batches[0], _names(plan)
    groups = {group[0]: group for group in plan.groups(batch)}
    texts = defaultdict[str, list[Sequence[int]]](list)
    missed = defaultdict[str, dict[int | str, tuple[int, int]]](dict)
    counted = set[tuple[str | None, str, int, int]]()
    for answer in answers:
        key = answer.key
        if (key.repeat, key.batch) != (0, batch):
            continue
        name = names[key.candidate]
        places = [place for place in groups[key.group] if key.turn < len(plan.prompts[place].turns)]
        missed_of = answer.missed or (0,) * len(places)
        for place, row, num_missed in zip(places, answer.token_ids, missed_of, strict=True):
            # A group that is filled up holds prompts that were answered before, or a prompt several times; and one
            # draft vocabulary may be compared with several trees.
            if (name, key.mode, key.turn, place) in counted:
                continue
            counted.add((name, key.mode, key.turn, place))
            category = plan.prompts[place].category
            if name is None:
                texts[category].append(row)
            else:
                tokens, before = missed[category].get(name, (0, 0))
                missed[category][name] = (tokens + len(row), before + num_missed)
    for category in {**texts, **missed}:
        log.add_tokens(texts[category], missed[category], category)
    return log


def _names(plan: Plan) -> dict[str, str | None]:
    """Name each candidate's draft vocabulary, None for plain decoding; those of one name are one vocabulary."""
    plain, *drafted = plan.candidates
    names, sizes = dict[str, str | None]({plain.label: None}), dict[str, str]()
    for each in drafted:
        name = vocabulary_name(each.draft_vocab, each.follow)
        name = name if each.head == drafted[0].head else f"{each.head}: {name}"
        # An artifact's own ids, and as many by another ranking.
        is_other = sizes.setdefault(name, each.size) != each.size
        names[each.label] = f"{name} ({each.size})" if is_other else name
    return names
