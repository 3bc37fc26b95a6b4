"""Put the pieces that `pack.py` wrote together again: ``python unpack.py FOLDER_OF_PIECES SITE``.

Every archive of a pack NAME goes to ``SITE/NAME``, which then belongs on PYTHONPATH; several archives at a time.
Standard library only.
"""

import compileall
import io
import itertools
import lzma
import sys
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def unpack(pieces: list[Path], site: Path) -> str:
    """Extract one archive, given as its pieces in order, below ``site``; returns the folder's name."""
    archive = pieces[0].name.split(".tar.xz")[0]
    pack = archive.rpartition("-")[0]
    data = b"".join(piece.read_bytes() for piece in pieces)
    with lzma.open(io.BytesIO(data)) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            # Before tarfile makes it, which fails if another archive's process does at the same time.
            (site / pack / member.name).parent.mkdir(parents=True, exist_ok=True)
            tar.extract(member, site / pack, filter="data")
    return pack


def main(pieces: Path, site: Path) -> None:
    """Unpack all archives found in ``pieces``, and compile their modules, which no wheel carries compiled."""
    began = time.monotonic()
    found = sorted(pieces.rglob("*.tar.xz*"), key=lambda path: path.name)
    archives = [list(group) for _, group in itertools.groupby(found, key=lambda path: path.name.split(".tar.xz")[0])]
    if not archives:
        sys.exit(f"There is no *.tar.xz below {pieces}.")
    with ProcessPoolExecutor() as pool:
        packs = sorted(set(pool.map(unpack, archives, itertools.repeat(site))))
    compileall.compile_dir(str(site), quiet=2, workers=0)
    print(f"unpacked {', '.join(packs)} into {site} in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
