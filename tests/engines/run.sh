#!/usr/bin/env bash
# Run the artifact in real engines. Builds .venv-engines (3.5 GB) once, then runs tests/engines in it; arguments go to
# pytest, e.g. `tests/engines/run.sh -k sglang`. An engine that is missing fails the run here instead of being skipped.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-engines
tests/engines/install.sh
# Not in install.sh, which may run beside `make check`: two installations of one folder would be in each other's way.
[ -x "$venv/bin/eagle-convert" ] ||
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --editable .
# Engines import thousands of files, which are compiled once.
unset PYTHONDONTWRITEBYTECODE
# Threads that wait must sleep: spinning, they take the cores from the processes they wait for.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 EAGLE_SLIM_REQUIRE_ENGINES=1
exec "$venv/bin/python" -m pytest -o testpaths=tests/engines "$@"
