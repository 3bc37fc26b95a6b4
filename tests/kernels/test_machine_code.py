"""Loops of matrix products, cut short from what nvdisasm prints of kernels for sm_90."""

import pytest
from kernels.machine_code import mixed_halves, overwritten_operands, spills_among_products


def listing(*instructions: str) -> str:
    code = [*instructions, "@!P3 BRA `(.L_x_6)"]
    lines = [f"        /*{16 * place:04x}*/                   {each} ;" for place, each in enumerate(code)]
    return "\n".join([".L_x_6:", *lines])


NUMBER = "@P4 IADD3 R113, P5, R158, 0x30, RZ"
LOAD = "LDSM.16.M88.4 R124, [R162+UR14+0x8000]"
WIDEN = "LOP3.LUT R116, R124, 0x87f087f0, RZ, 0xc0, !PT"
FIRST = "HGMMA.64x64x16.F32.BF16 R56, R116, gdesc[UR24], R56, gsb0"
SECOND = "HGMMA.64x64x16.F32.BF16 R56, R112, gdesc[UR24], R56, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, {}"


@pytest.mark.parametrize(("left", "found"), [("0x0", []), ("0x1", [NUMBER]), ("0x2", [NUMBER, WIDEN])])
def test_operands_are_kept_until_their_products_have_ended(left: str, found: list[str]) -> None:
    """Of two groups of products, those of the last ``left`` may still run when the next turn writes registers."""
    assert overwritten_operands(listing(LOAD, NUMBER, WIDEN, FIRST, SECOND, WAIT.format(left))) == found


def test_a_load_of_four_registers_overwrites_the_last_and_products_of_shared_memory_hold_none() -> None:
    load = "LDSM.16.M88.4 R112, [R162]"
    assert overwritten_operands(listing(load, FIRST, SECOND, WAIT.format("0x1"))) == [load]
    assert overwritten_operands(listing(load, FIRST, SECOND, WAIT.format("0x0"))) == []
    product = "HGMMA.64x64x16.F32.BF16 R56, gdesc[UR24], R56, gsb0"
    assert overwritten_operands(listing("MOV R113, R1", product, WAIT.format("0x1"))) == []


def test_spills_between_products_are_counted() -> None:
    copy = "LDGSTS.E.BYPASS.128 [R1], [R2.64]"
    assert spills_among_products(listing("LDL R1, [R2]", copy, FIRST, "STL [R1], R3", "LDL R1, [R2]", SECOND)) == [2]


def test_a_shift_that_runs_into_the_other_half_is_found() -> None:
    """Of tiles of 64 columns and 128 rows in four warps (Triton 3.6), whose sums were wrong on an H100 and an H200."""
    pair = """
        shl.b64         %rd20, %rd19, 39;
        {}
        or.b64          %rd22, %rd21, %rd20;
        mov.b64         {{_, %r5}}, %rd22;
    """
    assert mixed_halves(pair.format("mul.wide.u32    %rd21, %r3, 2147483648;")) == ["mov.b64 {_, %r5}, %rd22;"]
    assert mixed_halves(pair.format("cvt.u64.u32     %rd21, %r3;")) == []
