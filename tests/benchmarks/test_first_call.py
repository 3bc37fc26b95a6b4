"""The first call: what was found beside what is wanted, of the rows that ran."""

from benchmarks import first_call

PLAIN = {"row": "plain/1", "imported_s": 5.0, "loaded_s": 7.0, "first_s": 8.0, "done_s": 9.0, "silence_s": 0.1}
AUTO = PLAIN | {"row": "auto/1", "done_s": 10.0, "ready_s": None}
LARGE = PLAIN | {"row": "8b/1", "ready_s": 37.0}


def test_rows_are_judged_by_what_is_wanted():
    found = {name: verdict["found"] for name, verdict in first_call.judged([PLAIN, AUTO, LARGE]).items()}
    assert found == {
        "auto/1 answer": 5.0,
        "auto/1 silence": 0.1,
        "auto/1 all shapes": None,
        "8b/1 first token": 1.0,
        "8b/1 all shapes": 30.0,
        "auto/1 over plain": 1.25,
    }
    assert first_call.judged([]) == {}
