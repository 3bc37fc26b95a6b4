"""Free forwards compute what ours do, and the fastest parts that agree are chosen."""

import pytest
import torch

from benchmarks.price import Pricer, attentions, lay_out, measure


@pytest.fixture
def pricer(random_model):
    torch.manual_seed(0)
    return Pricer(random_model.target.model, random_model.new_cache(2, 60), lambda run: run)


@pytest.mark.parametrize(("places", "nodes", "prefix"), [(1, 1, 0), (2, 7, 33), (1, 8, 16)])
def test_parts_compute_what_ours_do(pricer, places, nodes, prefix):
    is_prompt = nodes == 8
    with torch.inference_mode():
        rows = lay_out(places, nodes, prefix, is_prompt or nodes == 1, pricer.device)
        run, expected = pricer.forward(rows, is_prompt, {})
        run()
        others = [("tree_attention", *each) for each in attentions(rows, prefix, 2, torch.float32)]
        assert [name for _, name, _ in others] == (["math"] if nodes == 7 else ["flash", "math"])
        for part, name, other in [*pricer.products, *others]:
            run, logits = pricer.forward(rows, is_prompt, {part: other})
            run()
            torch.testing.assert_close(logits, expected, msg=lambda text, at=(part, name): f"{at}: {text}")


def test_what_is_faster_and_right_is_chosen(pricer, monkeypatch):
    """The clock says that each forward is faster than the one before; the second product gives other logits."""

    def wrong(rows, norm, weight, bias, out, *others):
        out.fill_(7)

    def broken(*given):
        raise RuntimeError("no such kernel\nand more")

    clock = iter(range(1000, 0, -1))
    monkeypatch.setattr(Pricer, "time_ms", lambda *a: float(next(clock)))
    pricer.products = [*pricer.products[:1], ("gated_product", "wrong", wrong), ("head_product", "broken", broken)]
    row = pricer.price(1, 7, 20)
    assert row["free"] == {"qkv_product": "cublas", "tree_attention": "math"}
    assert row["percent"] == pytest.approx(100 * (row["exact_ms"] / row["free_ms"] - 1))
    assert list(pricer.failed.values()) == ["other logits", "no such kernel"]


def test_rows(pricer, monkeypatch):
    asked = []

    def price(places, nodes, prefix, is_prompt=False):
        asked.append((places, nodes, prefix, is_prompt))
        return {"exact_ms": 3.0 + prefix, "free_ms": 2.0, "percent": 50.0, "free": {}}

    monkeypatch.setattr(pricer, "price", price)
    rows = list(measure(pricer, 2, (8, 32), 8))
    assert asked[:2] == [(2, 1, 8, False), (2, 1, 32, False)]
    assert [begin for *_, begin, is_prompt in asked if is_prompt] == [0, 0, 24]
    found = [(row["prompt"], row["exact_ms"], row["percent"]) for row in rows[-2:]]
    assert found == [(8, 3.0, 50.0), (32, 60.0, 650.0)]
