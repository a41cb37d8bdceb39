"""The order in which packed FP4 lies in memory."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.formats import Matrix, dequantise
from engine.kernels.fp4 import PAIR_SCALE, natural_order, pair_values, stored_order
from engine.kernels.triton_compat import tl, triton
from engine.model import quant
from tests.engine.kernels.passes import DEVICE


@triton.jit
def _values_kernel(codes, out, M: tl.constexpr, N: tl.constexpr):
    row, column = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    even, odd = pair_values(tl.load(codes + row * N + column))
    tl.store(out + row * (2 * N) + 2 * column, even * PAIR_SCALE)
    tl.store(out + row * (2 * N) + 2 * column + 1, odd * PAIR_SCALE)


def test_orders_undo_each_other() -> None:
    """A code is lost or moved to another word between a checkpoint's order and the kernels'."""
    codes = torch.randint(0, 256, (3, 5, 48), dtype=torch.uint8)
    stored = stored_order(codes)
    assert stored.shape == codes.shape
    assert not torch.equal(stored, codes)
    assert torch.equal(natural_order(stored), codes)
    changed = codes.clone()
    changed[1, 2, 20] ^= 0x51
    places = (stored_order(changed) != stored).nonzero()
    assert {tuple(place[:2]) for place in places.tolist()} == {(1, 2)}
    assert {place[2] // 4 for place in places.tolist()} == {5}


def test_a_loaded_matrix_has_the_values_it_was_written_with() -> None:
    """A matrix in the kernels' order has other values than its checkpoint."""
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    codes, scale = quant.quantise_fp4(values, 32)
    matrix = Matrix("fp4", stored_order(codes.view(torch.uint8)), scale.view(torch.uint8), 32)
    want = quant.dequantise_fp4(codes, scale, 32)
    assert torch.equal(dequantise(matrix), want)
    wrong = Matrix("fp4", codes.view(torch.uint8), scale.view(torch.uint8), 32)
    assert not torch.equal(dequantise(wrong), want), "the order makes no difference"


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (8, 32)])
def test_pairs_are_the_values(rows: int, columns: int) -> None:
    """The kernel reads other values out of bytes than the torch form."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=DEVICE)
    out = torch.full((rows, 2 * columns), torch.nan, device=DEVICE)
    _values_kernel[(1,)](codes, out, M=rows, N=columns)
    ones = torch.full((rows, max(1, columns // 16)), 127, dtype=torch.uint8, device=DEVICE)
    want = torch.nn.functional.pad(codes, (0, -columns % 16))
    assert torch.equal(out, dequantise(Matrix("fp4", want, ones, 32))[:, : 2 * columns])
