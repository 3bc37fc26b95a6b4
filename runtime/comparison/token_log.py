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

    The provenance says what each draft vocabulary missed, where answers are of one category.
    """
    log = MissLog.of(model)
    batch, names = plan.batches[0], {candidate.label: vocabulary_name(candidate.model) for candidate in candidates}
    groups = {group[0]: group for group in plan.groups(batch)}
    counted = set[tuple[str, int, int]]()
    for answer in answers:
        key = answer.key
        if (key.repeat, key.batch) != (0, batch):
            continue
        if key.candidate == PLAIN:
            places = [place for place in groups[key.group] if key.turn < len(plan.prompts[place].turns)]
            for place, row in zip(places, answer.token_ids, strict=True):
                # A group that is filled up holds prompts that were answered before, or a prompt several times.
                if (key.mode, key.turn, place) not in counted:
                    counted.add((key.mode, key.turn, place))
                    log.add_tokens([row], source=plan.prompts[place].category)
        elif answer.category is not None:
            num_tokens = sum(len(row) for row in answer.token_ids)
            figures = (num_tokens, answer.num_missed)
            log.add_tokens([], {names[key.candidate]: figures}, plan.prompts[key.group].category)
    return log
