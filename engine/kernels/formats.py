"""Weights as they lie in memory: plain, or codes with what turns them into values (model.md 2.1).

A product's weight is [..., N, K] and y = x @ W^T. The kernels read three kinds: plain, FP8 in square
blocks and packed FP4. Their values are exact: an e4m3 or e2m1 code times a power of two is a
bfloat16 number, so a kernel may multiply in bfloat16 without a loss. The other kinds are those of
other publishers' checkpoints (issue 7); they are unfolded to plain weights before a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from engine.kernels.fp4 import natural_codes, natural_scales

Kind = Literal[
    "plain",
    "fp8",
    "fp4",
    "fp8_block",
    "fp8_channel",
    "int8_channel",
    "nvfp4",
    "int4_awq",
    "int4_gptq",
]
#: What the product kernels read as it is.
KERNEL_KINDS: frozenset[Kind] = frozenset(("plain", "fp8", "fp4"))
#: Kinds of two codes a byte.
NIBBLES: frozenset[Kind] = frozenset(("fp4", "nvfp4", "int4_awq", "int4_gptq"))
#: Columns that share a scale in packed FP4.
FP4_GROUP = 32
#: Columns that share a scale in NVFP4.
NVFP4_GROUP = 16
#: What a symmetric INT4 code counts from.
INT4_MIDDLE = 8


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight, or a stack of them along leading dimensions.

    Args:
        kind: of the storage.
        data: plain: float [..., N, K]; fp8*: float8_e4m3fn [..., N, K]; int8_channel: int8
            [..., N, K]; fp4: uint8 [..., N, K / 2] in the order of engine.kernels.fp4; nvfp4,
            int4_*: uint8 [..., N, K / 2], the low nibble holding the even column.
        scale: None for plain. uint8 exponents with bias 127: fp8 [..., ceil(N / block),
            ceil(K / block)], fp4 [..., N, K / 32] in the order of engine.kernels.fp4. Float: fp8_block as fp8, *_channel
            [..., N, 1], nvfp4 float8_e4m3fn [..., N, K / 16], int4_* [..., N, K / block].
        block: side of an FP8 block; columns of a group for fp4, nvfp4 and int4_*; else 0.
        extra: further tensors, by name. nvfp4: global_scale float32 [..., N, 1]. int4_awq: zeros
            uint8 [..., N, K / block], subtracted from the codes. int4_gptq: zeros likewise, which
            the checkpoint has and nobody reads: codes are symmetric around 8.
    """

    kind: Kind
    data: Tensor
    scale: Tensor | None = None
    block: int = 0
    extra: tuple[tuple[str, Tensor], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        *lead, columns = self.data.shape
        return (*lead, columns * 2 if self.kind in NIBBLES else columns)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that it is made of, by name: what has to move with it."""
        scale = {} if self.scale is None else {"scale": self.scale}
        return {"data": self.data, **scale, **dict(self.extra)}

    def of(self, tensors: Mapping[str, Tensor]) -> Matrix:
        """Give a matrix of this kind and block, made of other tensors of the same names."""
        extra = tuple((name, tensors[name]) for name, _ in self.extra)
        return Matrix(self.kind, tensors["data"], tensors.get("scale"), self.block, extra)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __getitem__(self, index: int) -> Matrix:
        """One matrix of a stack."""
        return self.of({name: tensor[index] for name, tensor in self.tensors.items()})

    def take(self, index: Tensor) -> Matrix:
        """Matrices of a stack, copied: int64 [n] of them."""
        return self.of({n: on_bytes(_take, t, index) for n, t in self.tensors.items()})


def on_bytes(work: Callable[..., Tensor], tensor: Tensor, *args: Any) -> Tensor:
    """Do what only moves elements; torch moves bytes where it does not move float8."""
    if tensor.dtype.itemsize == 1:
        return work(tensor.view(torch.uint8), *args).view(tensor.dtype)
    return work(tensor, *args)


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor.index_select(0, index)


def rows_from(m: Matrix, first: int) -> Matrix:
    """Rows first .. N of a matrix [N, K]; `first` is a multiple of an FP8 block's side."""
    scale = m.scale
    if scale is not None:
        scale = scale[first // m.block if m.kind == "fp8" else first :]
    return Matrix(m.kind, m.data[first:], scale, m.block)


def powers(scale: Tensor) -> Tensor:
    """Float32 values 2 ** (byte - 127) of scale bytes (uint8 or float8_e8m0fnu); 255 is NaN."""
    return scale.view(torch.float8_e8m0fnu).to(torch.float32)


def dequantise(m: Matrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., N, K] of a matrix; the twin of every in-kernel dequantisation."""
    if m.scale is None:
        return m.data.to(dtype)
    return _VALUES[m.kind](m).to(dtype)


def _by_block(m: Matrix, scale: Tensor) -> Tensor:
    rows, columns = m.data.shape[-2:]
    spread = scale.repeat_interleave(m.block, -2).repeat_interleave(m.block, -1)
    return m.data.to(torch.float32) * spread[..., :rows, :columns]


def _by_channel(m: Matrix) -> Tensor:
    return m.data.to(torch.float32) * _float(m.scale)


def _e2m1(data: Tensor, scale: Tensor, group: int) -> Tensor:
    codes = _nibbles(data).to(torch.int32)
    exponent, fraction = (codes >> 1) & 3, codes & 1
    # in halves; arithmetic instead of a table, so that it can be captured
    halves = (fraction + 2 * (exponent > 0)) << (exponent.clamp(min=1) - 1)
    values = halves * 0.5
    return torch.where(codes > 7, -values, values) * scale.repeat_interleave(group, -1)


def _int4(m: Matrix, zeros: Tensor | int) -> Tensor:
    codes = _nibbles(m.data).to(torch.float32)
    if isinstance(zeros, Tensor):
        zeros = zeros.to(torch.float32).repeat_interleave(m.block, -1)
    return (codes - zeros) * _float(m.scale).repeat_interleave(m.block, -1)


def _nibbles(data: Tensor) -> Tensor:
    """Codes uint8 [..., K] of packed bytes [..., K / 2]."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def _float(scale: Tensor | None) -> Tensor:
    return cast("Tensor", scale).to(torch.float32)


_VALUES: dict[Kind, Callable[[Matrix], Tensor]] = {
    "fp8": lambda m: _by_block(m, powers(cast("Tensor", m.scale))),
    "fp8_block": lambda m: _by_block(m, _float(m.scale)),
    "fp8_channel": _by_channel,
    "int8_channel": _by_channel,
    "fp4": lambda m: _e2m1(
        natural_codes(m.data), powers(natural_scales(cast("Tensor", m.scale))), FP4_GROUP
    ),
    "nvfp4": lambda m: _e2m1(m.data, _float(m.scale) * dict(m.extra)["global_scale"], NVFP4_GROUP),
    "int4_awq": lambda m: _int4(m, dict(m.extra)["zeros"]),
    "int4_gptq": lambda m: _int4(m, INT4_MIDDLE),
}
