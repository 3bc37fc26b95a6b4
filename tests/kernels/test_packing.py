"""Rounding to FP8, of weights and of what they multiply."""

import torch
import triton
import triton.language as tl
from eagle_slim.runtime.drafter.kernels.packing import quantize_rows
from eagle_slim.runtime.drafter.kernels.weight_stream import store_activation


def test_fp8_error_is_bounded() -> None:
    """e4m3 has 3 bits of mantissa: half a step is 2^-4 of the value, or 2^-10 among the smallest, times the scale."""
    weight = torch.randn(50, 96) * torch.logspace(-6, 3, 50)[:, None]
    weight[7] = 0
    weight[8, 0] = 1e4
    rounded, scale = quantize_rows(weight)
    assert rounded.dtype == torch.float8_e4m3fn
    assert scale[7] == 1
    torch.testing.assert_close(scale, torch.where(weight.any(1), weight.abs().amax(1) / 448, 1.0))
    scaled = weight / scale[:, None]
    assert ((rounded.float() - scaled).abs() <= (scaled.abs() * 2**-4).clamp(min=2**-10) * 1.0001).all()
    assert torch.equal(rounded.float().abs().amax(1)[weight.any(1)], torch.full((49,), 448.0))


@triton.jit
def _store_kernel(value_ptr, out_ptr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    store_activation(out_ptr, offs * 0, offs, tl.load(value_ptr + offs), offs < SIZE, SIZE)


def test_pairs_of_e4m3(device: str) -> None:
    """The high half is the nearest e4m3 number, ties to even; both carry about the 8 bits of bf16; 448 is the end."""
    every = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # all from 0 to 448
    halfway = (every[1:] + every[:-1]) / 2
    values = torch.cat([every, -every, halfway, -halfway, torch.randn(500) * torch.logspace(-4, 2, 500)])
    values = torch.cat([values, torch.tensor([1e6, -1e6])])
    size = triton.next_power_of_2(len(values))
    padded = torch.zeros(size)
    padded[: len(values)] = values
    out = torch.zeros(2 * size, dtype=torch.float8_e4m3fn, device=device)
    _store_kernel[(1,)](padded.to(device), out, SIZE=size)
    high, low = out.cpu().float().view(2, size)
    clamped = padded.clamp(-448, 448)
    assert torch.equal(high, clamped.to(torch.float8_e4m3fn).float())
    # The low half is converted by the hardware. The interpreter does that wrongly: it cuts bits off, and where rounding
    # up reaches the next power of two it gives half of it.
    error = (high + low / 16 - clamped).abs()
    bits = 5 if device == "cpu" else 8
    assert (error <= (clamped.abs() * 2**-bits).clamp(min=2**-11)).all()
