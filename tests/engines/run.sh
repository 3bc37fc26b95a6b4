#!/usr/bin/env bash
# Run the artifact in real engines. Builds .venv-engines (3.5 GB) once, then runs tests/engines in it; arguments go to
# pytest, e.g. `tests/engines/run.sh -k sglang`. An engine that is missing fails the run here instead of being skipped.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-engines
lock=tests/engines/requirements.lock
if ! cmp -s "$lock" "$venv/.installed.lock"; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    # --no-deps: the lock is complete, and the engines' own pins exclude each other.
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --requirement "$lock"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --editable .
    cp "$lock" "$venv/.installed.lock"
fi
# Threads that wait must sleep: spinning, they take the cores from the processes they wait for.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 EAGLE_SLIM_REQUIRE_ENGINES=1
exec "$venv/bin/python" -m pytest -o testpaths=tests/engines "$@"
