"""What `make demo` runs, on the real built-in head."""

import re

from eagle_slim.convert import verify_artifact
from eagle_slim.convert.demo import main


def test_demo_can_be_run_again(tmp_path, capfd):
    for _ in range(2):
        assert main([str(tmp_path)]) == 0
    out, err = capfd.readouterr()
    folder = tmp_path / "smollm2-135m-instruct-eagle3-v32000"
    assert re.search(r"rows of the LM head +49,152 +32,000", out)
    assert re.search(r"held-out tokens covered .* 99\.\d\d% \(95%", out)
    assert str(folder / "coverage.png") in out
    assert "built-in" in err
    assert verify_artifact(folder).ok
