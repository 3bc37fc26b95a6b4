"""Text for benchmarks that no library has seen: chats and code whose words are partly made up.

Documents are put together from sentences of the built-in chats and lines of the standard library, drawn at random. In
each about every tenth word is replaced by a number or a made-up word, so that caches of words are neither useless nor
complete.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

_SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]+\s*")
_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
_WORDS_PER_CHANGE = 10


class TextMaker:
    """Yields documents without end; each seed gives others."""

    def __init__(self) -> None:
        data = resources.files("eagle_slim.convert.default").joinpath("self_chat.jsonl.gz").read_bytes()
        chats = [json.loads(line)["messages"] for line in gzip.decompress(data).splitlines()]
        prose = "\n".join(message["content"] for messages in chats for message in messages)
        stdlib = Path(sysconfig.get_path("stdlib"))
        files = (file for file in sorted(stdlib.rglob("*.py")) if not _SKIPPED & set(file.relative_to(stdlib).parts))
        code = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
        self._prose = _SENTENCE.findall(prose)
        self._code = [line for line in code.splitlines(keepends=True) if line.strip()]
        self._words = sorted(set(re.findall(r"[A-Za-z]{5,}", prose + code)))

    def documents(self, seed: int) -> Iterator[str]:
        """Yield documents of about 0.5 to 6 KB."""
        draw = random.Random(seed)
        while True:
            pool = self._code if draw.random() < 0.3 else self._prose
            sentences = draw.choices(pool, k=draw.randint(8, 60))
            yield "".join(self._change(sentence, draw.random) for sentence in sentences)

    def _change(self, sentence: str, draw: Callable[[], float]) -> str:
        # random() only: randrange and choice take five times as long, and a large corpus is to be written.
        words = sentence.split(" ")
        for _ in range(1 + len(words) // _WORDS_PER_CHANGE):
            at = int(draw() * len(words))
            kind = draw()
            if kind < 0.2:
                words[at] = str(int(draw() * 10 ** int(1 + draw() * 6)))
            elif kind < 0.4:
                words[at] = f"{draw() * 1000:.3f}"
            else:
                first = self._words[int(draw() * len(self._words))]
                second = self._words[int(draw() * len(self._words))]
                words[at] = first[: 2 + int(draw() * 5)] + second[-2 - int(draw() * 5) :]
        return " ".join(words)

    def texts(self, seed: int, num_bytes: int) -> list[str]:
        """Return documents of `num_bytes` in total."""
        texts = []
        for text in self.documents(seed):
            texts.append(text)
            num_bytes -= len(text)
            if num_bytes <= 0:
                return texts
        raise AssertionError("documents never end")

    def write(self, path: Path, seed: int, num_bytes: int) -> None:
        """Write a JSON-lines file with `num_bytes` of text."""
        with path.open("w", encoding="utf-8") as file:
            for text in self.documents(seed):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                num_bytes -= len(text)
                if num_bytes <= 0:
                    return
