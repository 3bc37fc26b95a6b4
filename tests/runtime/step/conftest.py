from functools import partial

import pytest


@pytest.fixture
def run_ahead(monkeypatch):
    """Let partial verification run ahead over two blocks, from the first token on; a test may ask for other sizes."""
    # What imports Triton is imported here: this file is read before the interpreter is chosen.
    from eagle_slim.runtime.settings import PartialVerification

    def set_sizes(**sizes):
        made = partial(PartialVerification, **{"num_blocks": 2, "min_length": 0, **sizes})
        monkeypatch.setattr("eagle_slim.runtime.step.plan.PartialVerification", made)

    set_sizes()
    return set_sizes
