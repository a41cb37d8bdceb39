"""Products of many rows: bound by arithmetic, so weights are unpacked once and cuBLAS multiplies.

Unpacking reads a byte (or half of one) and writes two per weight, little beside the product from a
few hundred rows on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.formats import FP4_GROUP, Matrix
from engine.kernels.fp4 import (
    PAIR_SCALE,
    code_in_row,
    codes_of_row,
    has_stripes,
    pair_values,
    scale_place,
)
from engine.kernels.triton_compat import cast, tl, triton

_ROWS, _COLUMNS = 16, 512


@triton.jit
def _unpack(
    data,
    scale,
    out,
    N,
    K,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    STRIPES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Values of a tile [ROWS, COLUMNS]; BLOCK columns, and rows unless PACKED, share a scale."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    k = first + tl.arange(0, COLUMNS)
    inside = (n < N)[:, None] & (k < K)[None, :]
    line = n.to(tl.int64)[:, None]
    if PACKED:
        byte = first // 2 + tl.arange(0, COLUMNS // 2)
        stored = (n < N)[:, None] & (byte < K // 2)[None, :]
        places = codes_of_row(line, K, STRIPES) + code_in_row(byte, STRIPES)[None, :]
        codes = tl.load(data + places, mask=stored, other=0)
        even, odd = pair_values(codes)
        values = tl.reshape(tl.join(even, odd), (ROWS, COLUMNS)) * PAIR_SCALE
    else:
        values = tl.load(data + line * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    wide = tl.cdiv(K, BLOCK)
    block = first // BLOCK + tl.arange(0, COLUMNS // BLOCK)
    if PACKED:
        places = scale_place(line, block[None, :], K, STRIPES)
    else:
        places = line // BLOCK * wide + block[None, :]
    byte_of = tl.load(scale + places, mask=(n < N)[:, None] & (block < wide)[None, :], other=127)
    power = tl.maximum(byte_of.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
    values = tl.reshape(values, (ROWS, COLUMNS // BLOCK, BLOCK)) * power[:, :, None]
    values = cast(tl.reshape(values, (ROWS, COLUMNS)), out.dtype.element_ty)
    tl.store(out + line * K + k[None, :], values, mask=inside)


def unpack(m: Matrix, dtype: torch.dtype) -> Tensor:
    """Values [N, K] of a matrix, like `dequantise`.

    Args:
        m: [N, K] of any kind.
        dtype: float32 or bfloat16.
    """
    if m.scale is None:
        return m.data.to(dtype)
    n, k = m.shape
    out = torch.empty((n, k), dtype=dtype, device=m.data.device)
    packed = m.kind == "fp4"
    _unpack[(triton.cdiv(n, _ROWS), triton.cdiv(k, _COLUMNS))](
        m.data,
        m.scale,
        out,
        n,
        k,
        BLOCK=FP4_GROUP if packed else m.block,
        PACKED=packed,
        STRIPES=packed and has_stripes(n, k),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )
    return out


def multiply(x: Tensor, w: Matrix, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Give x [T, K] times w [N, K] transposed: [T, N].

    Args:
        x: float32 or bfloat16.
        w: any kind.
        out_dtype: of the result, at least as wide as x's.
        out: [T, N] of that dtype to write to, whose rows may lie apart; new by default.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and w.data.dtype != torch.float32:
        values = unpack(w, x.dtype).t()
        if out is None:
            return torch.mm(x, values, out_dtype=out_dtype)
        if out_dtype == x.dtype:
            return torch.mm(x, values, out=out)
        return out.copy_(torch.mm(x, values, out_dtype=out_dtype))
    work = torch.promote_types(x.dtype, out_dtype)
    if w.kind == "plain":
        work = torch.promote_types(work, w.data.dtype)
    result = F.linear(x.to(work), unpack(w, work)).to(out_dtype)
    return result if out is None else out.copy_(result)


def multiply_grouped(o: Tensor, w: Matrix, groups: int) -> Tensor:
    """Give each of G column groups of o [T, G * Kg] times its rows of w [G * R, Kg]: [T, G * R]."""
    rows, (n, k) = len(o), w.shape
    values = unpack(w, o.dtype).view(groups, n // groups, k)
    out = torch.empty((rows, n), dtype=o.dtype, device=o.device)
    by_group = out.view(rows, groups, -1).transpose(0, 1)
    torch.bmm(o.view(rows, groups, k).transpose(0, 1), values.transpose(1, 2), out=by_group)
    return out
