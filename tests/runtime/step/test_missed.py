"""What the draft vocabulary did not hold: counted of exactly what was generated."""

from collections import Counter
from pathlib import Path

import pytest
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from eagle_slim.runtime.step import plan
from support.tiny_models import random_prompts, tiny_target, write_head

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
DRAFTED = [2, 3, 5, 7, 8, 11, 12, 13, 17, 19]


def test_the_answers_tokens_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an early end of sequence, slots that are taken again, and a stop in the middle of an accepted path."""
    head = write_head(tmp_path, draft_ids=DRAFTED)
    model = SpeculativeModel.from_pretrained(tiny_target("llama"), head, tree=TreeConfig(2, 3, 10))
    output = model.generate(random_prompts([1, 9, 5, 2]), max_new_tokens=12, max_slots=2)
    expected = Counter(token for row in output.token_ids for token in row if token not in DRAFTED)
    assert output.stats.missed_ids == dict(expected)
    assert expected
    assert output.stats.missed_rate == sum(expected.values()) / output.stats.num_new_tokens
    for result in output.results:
        assert result.stats.missed_ids == Counter(token for token in result.token_ids if token not in DRAFTED)
    plain = model.generate(random_prompts([3]), max_new_tokens=4, speculative=False).stats
    assert (plain.missed_ids, plain.missed_rate) == ({}, 0.0)
    # Plain decoding that was chosen as the fastest misses as any other tree.
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_choose_shapes", lambda *_: ((None,), "measured"))
        chosen = model.generate(random_prompts([9]), max_new_tokens=12)
    assert chosen.stats.missed_ids == Counter(token for token in chosen.token_ids[0] if token not in DRAFTED)
    head = write_head(tmp_path / "full")
    whole = SpeculativeModel.from_pretrained(model.target.model, head, tree=TreeConfig.of(2, 3))
    assert whole.generate(random_prompts([3]), max_new_tokens=4).stats.num_missed == 0
