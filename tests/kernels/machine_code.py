"""Read a kernel's PTX, and nvdisasm's listing of it, for what slows loops of matrix products or computes wrongly."""

import re
from collections.abc import Iterator

_PRODUCT = re.compile(r"\b[A-Z0-9]*MMA\b")  # HMMA, QMMA; HGMMA, QGMMA (wgmma); UTCHMMA, UTCQMMA (tcgen05)
_COPY = re.compile(r"\b(LDGSTS|UTMALDG)\b")
_LOCAL = re.compile(r"\b(LDL|STL)\b")
_FROM_REGISTERS = re.compile(r"\b[HQ]GMMA\S* R\d+, R(\d+)")
_WAIT = re.compile(r"\bWARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)")
_TARGET = re.compile(r"(?:@!?U?P\w+ )?(\S+) (?:U?PT?\w*, )*R(\d+)\b")
_WITHOUT_TARGET = re.compile(r"(?:@!?U?P\w+ )?(ST|RED|BAR|BRA|SYNCS|WARPGROUP|HGMMA|QGMMA|LDGSTS|R2UR|VOTE)")
FAULTS = "overwritten_operands", "mixed_halves"
"""What makes results wrong, here and in reports."""


def spills_among_products(sass: str) -> list[int]:
    """Count accesses to local memory, between the first and the last product of a loop.

    Of each innermost loop that multiplies matrices while it copies the next tiles.
    """
    spills = []
    for body in _loops(sass):
        if any(map(_COPY.search, body)):
            products = [place for place, instruction in enumerate(body) if _PRODUCT.search(instruction)]
            spills.append(sum(bool(_LOCAL.search(x)) for x in body[products[0] : products[-1] + 1]))
    return spills


def overwritten_operands(sass: str) -> list[str]:
    """List the instructions of loops that write registers which asynchronous products (sm_90) may still read.

    A product reads the four registers of its first operand until a wait that leaves fewer groups of products running
    than have begun since. Loops are gone through twice: what one turn leaves is overwritten by the next.
    """
    found: dict[str, None] = {}
    for body in _loops(sass):
        running: list[set[int]] = []
        group: set[int] = set()
        for instruction in body * 2:
            if product := _FROM_REGISTERS.search(instruction):
                group |= set(range(int(product[1]), int(product[1]) + 4))
            if " gsb0" in instruction and _PRODUCT.search(instruction):
                running, group = [*running, group], set()
            elif wait := _WAIT.search(instruction):
                running = running[max(0, len(running) - int(wait[1], 16)) :]
            elif _written(instruction) & set().union(*running):
                found[instruction] = None
    return list(found)


def mixed_halves(ptx: str) -> list[str]:
    """List the instructions that take the upper one of two packed integers into which the lower one was shifted.

    LLVM of Triton 3.6 shifts an integer that nothing reads by ``mul.wide.u32``, which does not cut it to its 32 bits.
    """
    shifted = set(re.findall(r"mul\.wide\.u32\s+(%rd\d+), %r\d+, \d+;", ptx))
    joined = re.findall(r"or\.b64\s+(%rd\d+), (%rd\d+), (%rd\d+);", ptx)
    packed = {pair for pair, *halves in joined if shifted & {*halves}}
    taken = re.findall(r"(mov\.b64\s+\{_, %r\d+\}, (%rd\d+);)", ptx)
    return [" ".join(instruction.split()) for instruction, pair in taken if pair in packed]


def _written(instruction: str) -> set[int]:
    target = None if _WITHOUT_TARGET.match(instruction) else _TARGET.match(instruction)
    if target is None:
        return set()
    name, first = target[1], int(target[2])
    is_four = (name.startswith("LDSM") and name.endswith(".4")) or ".128" in name
    return set(range(first, first + (4 if is_four else 2 if ".64" in name or ".WIDE" in name else 1)))


def _loops(sass: str) -> Iterator[list[str]]:
    """Yield the instructions of each innermost loop that multiplies matrices."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in sass.splitlines():
        if found := re.match(r"\s*(\.L_\w+):", line):
            labels[found[1]] = len(code)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(" ".join(found[1].split()))
    spans = []
    for place, instruction in enumerate(code):
        jump = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", instruction)
        if jump and labels[jump[1]] <= place and any(map(_PRODUCT.search, code[labels[jump[1]] : place + 1])):
            spans.append((labels[jump[1]], place))
    for first, last in sorted(set(spans)):
        if not any(first <= start and stop <= last and (start, stop) != (first, last) for start, stop in spans):
            yield code[first : last + 1]
