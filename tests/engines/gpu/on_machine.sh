#!/usr/bin/env bash
# Run a wave of engine starts on a GPU machine without a network, from the repository's root:
#     PARTS=folder WORK=folder tests/engines/gpu/on_machine.sh WAVE[,WAVE...] [OPTION OF run.py ...]
# PARTS holds what pack.py wrote (and is emptied), WORK is for what comes of it, OUT for results.
set -euo pipefail
parts=${PARTS:?the folder of packs} work=${WORK:?a folder to work in} out=${OUT:-build/gpu-results}
here=tests/engines/gpu waves=${1:?a wave, or several joined by commas}
shift
mkdir -p "$work/package" "$out"
# The checkout as if it were installed.
ln -sfn "$PWD" "$work/package/eagle_slim"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
mkdir -p "$work/package/eagle_slim-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: eagle-slim\nVersion: %s\n' "$version" \
    > "$work/package/eagle_slim-$version.dist-info/METADATA"

# A later call finds what an earlier one unpacked.
if [ -n "$(find "$parts" -name '*.tar.xz*' -print -quit)" ]; then
    python3 "$here/unpack.py" "$parts" "$work/site"
    rm -r "$parts"
    mkdir "$parts"
fi
if [ -d "$work/site/sglang" ] && [ ! -d "$work/site/sglang/jit-cache" ]; then
    # An engine that needs one of them earlier waits for it: each is built under a lock.
    python3 "$here/sglang_kernels.py" "$work/site" &
fi
# What eagle_slim needs and the machine lacks is in either pack.
extra=$work/site/smollm2
[ -d "$extra" ] || extra=$work/site/sglang
PYTHONPATH="$work/package:$extra" python3 "$here/models.py" "$work/models" "$waves"
echo "models written after $SECONDS s"

status=0
python3 "$here/run.py" "$waves" "$@" --site "$work/site" --models "$work/models" --out "$out/engines.jsonl" --logs "$work/logs" \
    || status=$?
tar -C "$work" --exclude '*.cache' -czf "$out/logs.tar.gz" logs
echo "ended after $SECONDS s"
exit $status
