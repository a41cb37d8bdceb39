"""Weights as they lie in memory: plain, FP8 in square blocks, or packed FP4 (model.md 2.1).

A product's weight is [..., N, K] and y = x @ W^T. Values are exact: an e4m3 or e2m1 code times a
power of two is a bfloat16 number, so a kernel may multiply in bfloat16 without a loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["plain", "fp8", "fp4"]
#: Columns that share a scale in packed FP4.
FP4_GROUP = 32


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight, or a stack of them along leading dimensions.

    Args:
        kind: of the storage.
        data: plain: float [..., N, K]; fp8: float8_e4m3fn [..., N, K]; fp4: uint8 [..., N, K / 2],
            the low nibble holding the even column.
        scale: None for plain; uint8 exponents with bias 127: fp8 [..., ceil(N / block),
            ceil(K / block)], fp4 [..., N, K / 32].
        block: side of an FP8 block; 32 for fp4, 0 for plain.
    """

    kind: Kind
    data: Tensor
    scale: Tensor | None = None
    block: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        *lead, columns = self.data.shape
        return (*lead, columns * 2 if self.kind == "fp4" else columns)

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def __getitem__(self, index: int) -> Matrix:
        """One matrix of a stack."""
        scale = None if self.scale is None else self.scale[index]
        return Matrix(self.kind, self.data[index], scale, self.block)


def rows_from(m: Matrix, first: int) -> Matrix:
    """Rows first .. N of a matrix [N, K]; `first` is a multiple of an FP8 block's side."""
    scale = m.scale
    if scale is not None:
        scale = scale[first // m.block if m.kind == "fp8" else first :]
    return Matrix(m.kind, m.data[first:], scale, m.block)


def powers(scale: Tensor) -> Tensor:
    """Float32 values 2 ** (byte - 127) of scale bytes uint8 [...]; 255 is NaN."""
    return scale.view(torch.float8_e8m0fnu).to(torch.float32)


def dequantise(m: Matrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., N, K] of a matrix; the twin of every in-kernel dequantisation."""
    if m.scale is None:
        return m.data.to(dtype)
    scale = powers(m.scale)
    if m.kind == "fp8":
        rows, columns = m.data.shape[-2:]
        spread = scale.repeat_interleave(m.block, -2).repeat_interleave(m.block, -1)
        return (m.data.to(torch.float32) * spread[..., :rows, :columns]).to(dtype)
    codes = torch.stack((m.data & 15, m.data >> 4), -1).flatten(-2)
    magnitudes = torch.tensor(
        (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float32, device=m.data.device
    )
    table = torch.cat((magnitudes, -magnitudes))
    values = table[codes.long()] * scale.repeat_interleave(FP4_GROUP, -1)
    return values.to(dtype)
