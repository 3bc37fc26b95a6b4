#!/usr/bin/env bash
# Build .venv-engines (3.5 GB) without our own package, unless it holds what the lock names.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-engines
lock=tests/engines/requirements.lock
cmp -s "$lock" "$venv/.installed.lock" && exit
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
# --no-deps: the lock is complete, and the engines' own pins exclude each other. Packages are compiled as they are
# imported, which most of their files never are.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement "$lock"
cp "$lock" "$venv/.installed.lock"
