"""The order in which FP4 weights and rows of x meet."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.formats import Matrix, dequantise
from engine.kernels.fp4 import code_in_row, codes_of_row, scale_place
from engine.kernels.triton_compat import tl, triton
from engine.kernels.weave import (
    CHUNK,
    weave_torch,
    weave_triton,
    woven_rows,
    woven_weights,
)
from tests.engine.kernels.passes import DEVICE


@triton.jit
def _weights_kernel(codes, scales, out, M: tl.constexpr, WARPS: tl.constexpr):
    row = woven_rows(M, WARPS)
    byte = code_in_row(tl.arange(0, 64), True)[None, :]
    code = tl.load(codes + codes_of_row(row, 128, True)[:, None] + byte)
    group = tl.arange(0, 4)[None, :]
    scale = tl.load(scales + scale_place(row[:, None], group, 128, True)).to(tl.int32)
    values = woven_weights(code, scale, WARPS).to(tl.float32) * 65536.0
    tl.store(out + tl.arange(0, M)[:, None] * 128 + tl.arange(0, 128)[None, :], values)


@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (19, 640)])
def test_rows_are_woven_as_the_twin_has_it(rows: int, columns: int) -> None:
    """The kernel puts columns elsewhere than the torch form."""
    x = torch.arange(rows * columns, device=DEVICE, dtype=torch.float32).view(rows, columns)
    woven = weave_triton(x)
    assert torch.equal(woven, weave_torch(x))
    assert torch.equal(woven.sort().values, x), "a column is lost"
    assert not torch.equal(woven, x)


@pytest.mark.parametrize(("rows", "warps"), [(64, 4), (256, 8), (128, 8)])
def test_weights_meet_woven_rows(rows: int, warps: int) -> None:
    """Unpacked codes are other numbers, of other rows or in another order than rows of x."""
    codes = torch.randint(0, 256, (rows, CHUNK // 2), device=DEVICE, dtype=torch.uint8)
    scales = torch.randint(110, 140, (rows, CHUNK // 32), device=DEVICE, dtype=torch.uint8)
    out = torch.full((rows, CHUNK), torch.nan, device=DEVICE)
    _weights_kernel[(1,)](codes, scales, out, M=rows, WARPS=warps, num_warps=warps)
    want = dequantise(Matrix("fp4", codes, scales, 32))
    assert torch.equal(out, weave_torch(want))
