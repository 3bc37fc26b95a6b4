import pytest
from eagle_slim.runtime.settings import PartialVerification, TreeConfig

from benchmarks.shared import decoding
from benchmarks.shared.drawn_verdicts import survivals


def test_rows(random_model: decoding.RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every token confirmed, a step gives all that its partial passes accept, and one more."""
    monkeypatch.setattr(decoding, "draw_lengths", lambda *a: [2] * 240)
    tree = TreeConfig(3, 4, 8)
    option = PartialVerification(num_blocks=2, num_steps=3, num_tokens=9)
    rows = list(decoding.measure_partial(random_model, 60, tree, 2, 400, [option], 2.0, [1.0, 0.5], steps=6, rounds=1))
    assert [row["survival"] for row in rows] == [1.0, 0.5]
    assert [row["full"]["accepted_length"] for row in rows] == [2.0, 2.0]
    assert rows[0]["ahead"]["accepted_length"] == 3 * 2 + 1
    assert 1 <= rows[1]["ahead"]["accepted_length"] < 3 * 2 + 1
    for row in rows:
        assert row["plain"]["accepted_length"] == 1.0
        assert row["ratio"] == row["ahead"]["tokens_per_s"] / row["full"]["tokens_per_s"]
        assert row["over_plain"] == row["ahead"]["tokens_per_s"] / row["plain"]["tokens_per_s"]
        assert row["full_over_plain"] == row["full"]["tokens_per_s"] / row["plain"]["tokens_per_s"]


def test_survivals() -> None:
    drawn = survivals(0.9, 31, 28)
    assert max(drawn) <= 31
    # The mean of a geometric law that is cut off.
    assert sum(drawn) / 28 == pytest.approx(sum(0.9**k for k in range(1, 32)), rel=0.02)
    assert set(survivals(1.0, 31, 28)) == {31}
