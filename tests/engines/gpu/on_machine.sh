#!/usr/bin/env bash
# Run waves of engine starts on a GPU machine without a network, from the repository's root:
#     PARTS=folder WORK=folder tests/engines/gpu/on_machine.sh WAVE...
# PARTS holds what pack.py wrote (and is emptied), WORK is for what comes of it, OUT for results.
set -euo pipefail
parts=${PARTS:?the folder of packs} work=${WORK:?a folder to work in} out=${OUT:-build/gpu-results}
here=tests/engines/gpu
mkdir -p "$work/package" "$out"
ln -sfn "$PWD" "$work/package/eagle_slim"

# A later call finds what an earlier one unpacked.
if [ -n "$(find "$parts" -name '*.tar.xz*' -print -quit)" ]; then
    python3 "$here/unpack.py" "$parts" "$work/site"
    rm -r "$parts"
    mkdir "$parts"
fi
if [ -d "$work/site/sglang" ] && [ ! -d "$work/site/sglang/jit-cache" ]; then
    python3 "$here/sglang_kernels.py" "$work/site" &
fi
if [ ! -d "$work/models" ]; then
    PYTHONPATH="$work/package:$work/site/smollm2" python3 "$here/models.py" "$work/models"
    echo "models written after $SECONDS s"
fi
wait

status=0
python3 "$here/run.py" "$@" --site "$work/site" --models "$work/models" --out "$out/engines.jsonl" --logs "$work/logs" \
    || status=$?
tar -C "$work" --exclude '*.cache' -czf "$out/logs.tar.gz" logs
echo "ended after $SECONDS s"
exit $status
