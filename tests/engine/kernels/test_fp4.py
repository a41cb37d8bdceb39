"""The order in which packed FP4 lies in memory."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.formats import Matrix, dequantise
from engine.kernels.fp4 import (
    PAIR_SCALE,
    code_in_row,
    codes_of_row,
    natural_codes,
    natural_scales,
    pair_values,
    scale_place,
    stored_codes,
    stored_scales,
)
from engine.kernels.triton_compat import tl, triton
from engine.model import quant
from tests.engine.kernels.passes import DEVICE


@triton.jit
def _values_kernel(codes, out, M: tl.constexpr, N: tl.constexpr):
    row, column = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    even, odd = pair_values(tl.load(codes + row * N + column))
    tl.store(out + row * (2 * N) + 2 * column, even * PAIR_SCALE)
    tl.store(out + row * (2 * N) + 2 * column + 1, odd * PAIR_SCALE)


@triton.jit
def _places_kernel(codes, scales, M: tl.constexpr, K: tl.constexpr):
    row = tl.arange(0, M)[:, None]
    byte = code_in_row(tl.arange(0, K // 2), True)[None, :]
    at = row * (K // 2) + tl.arange(0, K // 2)[None, :]
    tl.store(codes + at, codes_of_row(row, K, True) + byte)
    group = tl.arange(0, K // 32)[None, :]
    tl.store(scales + row * (K // 32) + group, scale_place(row, group, K, True))


@pytest.mark.parametrize("shape", [(2, 24, 128), (3, 5, 48), (1, 4, 64)], ids=str)
def test_orders_undo_each_other(shape: tuple[int, int, int]) -> None:
    """A code is lost or leaves its word between a checkpoint's order and the kernels'."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    stored = stored_codes(codes)
    assert stored.shape == codes.shape
    assert not torch.equal(stored, codes)
    assert torch.equal(natural_codes(stored), codes)
    changed = codes.clone()
    changed[0, 3, 20] ^= 0x51
    places = (stored_codes(changed) != stored).flatten().nonzero().flatten()
    assert len({place // 4 for place in places.tolist()}) == 1
    scales = torch.randint(0, 256, (*shape[:2], shape[2] // 16), dtype=torch.uint8)
    assert torch.equal(natural_scales(stored_scales(scales)), scales)


def test_stripes_are_where_the_kernels_look() -> None:
    """A kernel finds a code or a scale elsewhere than they were put."""
    rows, columns = 16, 256
    codes = torch.empty(rows, columns // 2, dtype=torch.int32, device=DEVICE)
    scales = torch.empty(rows, columns // 32, dtype=torch.int32, device=DEVICE)
    _places_kernel[(1,)](codes, scales, M=rows, K=columns)
    number = torch.arange(rows * columns // 32, dtype=torch.uint8).view(rows, columns // 32)
    found = stored_scales(number).flatten()[scales.cpu().long()]
    assert torch.equal(found, number)
    words = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    for row, byte in ((0, 0), (7, 5), (9, 70), (15, 127)):
        words.zero_()
        words[row, byte // 4 * 4 : byte // 4 * 4 + 4] = 255
        found = stored_codes(words).flatten()[codes.cpu().long()]
        assert torch.equal(found, words), "a word is elsewhere"


@pytest.mark.parametrize("rows", [6, 16])
def test_a_loaded_matrix_has_the_values_it_was_written_with(rows: int) -> None:
    """A matrix in the kernels' order has other values than its checkpoint."""
    values = torch.randn(rows, 128, generator=torch.Generator().manual_seed(3))
    values *= torch.linspace(0.1, 30, rows)[:, None]
    codes, scale = quant.quantise_fp4(values, 32)
    code_bytes, scale_bytes = codes.view(torch.uint8), scale.view(torch.uint8)
    want = quant.dequantise_fp4(codes, scale, 32)
    matrix = Matrix("fp4", stored_codes(code_bytes), stored_scales(scale_bytes), 32)
    assert torch.equal(dequantise(matrix), want)
    wrong = Matrix("fp4", code_bytes, stored_scales(scale_bytes), 32)
    assert not torch.equal(dequantise(wrong), want), "the order makes no difference"


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (8, 32)])
def test_pairs_are_the_values(rows: int, columns: int) -> None:
    """The kernel reads other values out of bytes than the torch form."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=DEVICE)
    out = torch.full((rows, 2 * columns), torch.nan, device=DEVICE)
    _values_kernel[(1,)](codes, out, M=rows, N=columns)
    ones = torch.full((rows, max(1, columns // 16)), 127, dtype=torch.uint8, device=DEVICE)
    stored = torch.nn.functional.pad(codes, (0, -columns % 16))
    assert torch.equal(out, dequantise(Matrix("fp4", stored, ones, 32))[:, : 2 * columns])
