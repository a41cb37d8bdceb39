"""The order of columns in which FP4 codes reach the tensor cores where they lie.

A product sums over columns in any order, as long as both operands have the same one. Weights are
the operand that a thread holds in registers: of 16 columns the thread t of a quad has columns
2t, 2t + 1, 2t + 8 and 2t + 9 of rows g and g + 8 (PTX ISA, wgmma, operand A). If it is to read 16
bytes of a row of codes at once and use them all itself, those 32 codes have to be 8 of its quads of
columns. So columns are renumbered: in each chunk of 128, column (t, word, i, half), counted with
half fastest, 4 * 4 * 4 * 2 of them, takes place (word, i, t, half): pairs of columns stay together
(engine.kernels.fp4 has words of pairs). A thread's 32 codes share one scale.

Rows of x are brought into that order once (`weave_triton`), and rows of hidden values are written
in it; rows of weights stay as they are stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.fp4 import pair_values
from engine.kernels.triton_compat import INTERPRETED, tl, triton

#: Columns that are renumbered among themselves.
CHUNK = 128

_INTERPRETED = tl.constexpr(INTERPRETED)
#: Words of eight codes and a factor, twice, in; pairs of columns 2 i, 2 i + 1 out.
_PAIRS_ASM = tl.constexpr(
    "{ .reg .b32 a, b;"
    " shl.b32 a, $4, 6; and.b32 a, a, 0x81C081C0; mul.rn.bf16x2 $0, a, $5;"
    " shl.b32 a, $4, 2; and.b32 a, a, 0x81C081C0; mul.rn.bf16x2 $1, a, $5;"
    " shf.r.wrap.b32 a, $4, $4, 4; and.b32 a, a, 0x81C081C0; mul.rn.bf16x2 $2, a, $5;"
    " and.b32 a, $4, 0x81808180; shr.u32 b, $4, 8;"
    " lop3.b32 a, b, 0x00400040, a, 0xEA; mul.rn.bf16x2 $3, a, $5; }"
)


def weave_torch(x: Tensor) -> Tensor:
    """Renumber the columns of x [T, K], K a multiple of CHUNK."""
    rows, k = x.shape
    return x.view(rows, k // CHUNK, 4, 4, 4, 2).permute(0, 1, 3, 4, 2, 5).reshape(rows, k)


@triton.jit
def weave_device(x):
    """weave_torch of a tile [M, N], N a multiple of CHUNK."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    apart = tl.reshape(x, (M, N // 128, 4, 4, 4, 2))
    return tl.reshape(tl.permute(apart, (0, 1, 3, 4, 2, 5)), (M, N))


@triton.jit(do_not_specialize=["T"])  # no new kernel for every number of rows
def _weave_kernel(x, out, T, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * K + column[None, :]
    mask = (row < T)[:, None] & (column < K)[None, :]
    tl.store(out + at, weave_device(tl.load(x + at, mask=mask, other=0.0)), mask=mask)


def weave_triton(x: Tensor) -> Tensor:
    """As `weave_torch`; one launch."""
    rows, k = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _weave_kernel[(triton.cdiv(rows, 16), triton.cdiv(k, 512))](
        x.contiguous(), out, rows, K=k, ROWS=16, COLUMNS=512, num_warps=4
    )
    return out


@triton.jit
def woven_rows(M: tl.constexpr, WARPS: tl.constexpr):
    """Which row of a tile [M] `woven_weights` wants at each place, int32.

    A warp reads eight rows at a time, whole runs of 32 bytes, and multiplies sixteen.
    """
    i = tl.arange(0, M)
    run: tl.constexpr = 16 * WARPS
    return i // run * run + i % (8 * WARPS) // 8 * 16 + i // (8 * WARPS) % 2 * 8 + i % 8


@triton.jit
def woven_weights(codes, scales, WARPS: tl.constexpr):
    """Values times 2**-16 of one chunk of M rows, bfloat16 [M, 128] (float32 when interpreted).

    Args:
        codes: uint8 [M, 64], rows in the order of `woven_rows`.
        scales: int32 [M, 4], scale bytes in the same order.
        WARPS: of the program.

    Returns:
        Rows in their own order, columns in that of `weave_torch`.
    """
    M: tl.constexpr = codes.shape[0]
    SHAPE: tl.constexpr = (M // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2, 2)
    if _INTERPRETED:
        factor = ((scales + 110) << 23).to(tl.float32, bitcast=True)
        low, high = pair_values(codes)
        value = tl.reshape(tl.join(low, high), (M, 4, 32)) * factor[:, :, None]
        parts = tl.permute(tl.reshape(value, SHAPE), (0, 2, 1, 3, 5, 6, 7, 4, 8))
    else:
        factor = ((scales + 110) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (M, 4, 16)), (M, 64))
        # In a byte of a result, as bytes are numbered: its lowest bit is the half, the other one
        # the lower bit of i, whose upper bit says which result it is.
        low, high = tl.inline_asm_elementwise(
            _PAIRS_ASM, "=&r,=&r,=&r,=&r,r,r,r", [codes, factor],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
        parts = tl.permute(tl.reshape(tl.join(low, high), SHAPE), (0, 2, 1, 3, 5, 8, 6, 4, 7))
    return tl.reshape(parts, (M, 128))
