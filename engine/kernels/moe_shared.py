"""The shared expert for many rows: two products of every row (twin: engine.kernels.moe.moe_torch)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.kernels.gemm import multiply
from engine.kernels.roundtrip import fp8_device
from engine.kernels.swiglu import swiglu
from engine.kernels.triton_compat import INTERPRETED, cast, tl, triton


@triton.jit(do_not_specialize=["T"])  # no new kernel for every number of rows
def _activate_kernel(wide, hidden, experts, parts, T, limit, INNER: tl.constexpr,
                     D: tl.constexpr, CHOICES: tl.constexpr, ROUND: tl.constexpr,
                     ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program (i, j): BLOCK hidden values of ROWS rows; j = 0 clears parts that nobody writes."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < T)[:, None] & (column < INNER)[None, :]
    at = row.to(tl.int64)[:, None] * INNER + column[None, :]
    gate_at = wide + row.to(tl.int64)[:, None] * (2 * INNER) + column[None, :]
    gate = tl.load(gate_at, mask=inside, other=0.0)
    value = swiglu(gate, tl.load(gate_at + INNER, mask=inside, other=0.0), limit)
    if ROUND > 0:
        # In x's dtype first, as it would be stored.
        value = fp8_device(cast(value, hidden.dtype.element_ty).to(tl.float32), ROUND, 0)
    tl.store(hidden + at, cast(value, hidden.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        for choice in tl.static_range(CHOICES):
            expert = tl.load(experts + row * CHOICES + choice, mask=row < T, other=0)
            if tl.min(expert, 0) < 0:
                part = parts + (row.to(tl.int64) * (CHOICES + 1) + choice)[:, None] * D
                for first in range(0, D, BLOCK):
                    place = first + tl.arange(0, BLOCK)[None, :]
                    zero = tl.zeros((ROWS, BLOCK), parts.dtype.element_ty)
                    tl.store(part + place, zero, mask=(expert < 0)[:, None] & (place < D))


def shared_expert(
    x: Tensor,
    experts: Tensor,
    w13: Matrix,
    w2: Matrix,
    parts: Tensor,
    *,
    limit: float,
    act_group: int | None,
) -> None:
    """Write the last part of every row, and 0 into those of choices that reach no expert.

    Args:
        x: [T, d], rounded as the weights' format asks for.
        experts: int32 [T, k] of the routing, -1 for none.
        w13: [2 * I, d], gate rows first.
        w2: [d, I].
        parts: [T, k + 1, d], float32 or x's dtype, written.
        limit: swiglu_limit.
        act_group: group of hidden's FP8 rounding, None for none.
    """
    (rows, choices), (d, inner) = experts.shape, w2.shape
    wide = multiply(x, w13, torch.float32)
    hidden = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    block = min(512, max(triton.next_power_of_2(inner), act_group or 1))
    tall = 64 if INTERPRETED else 8
    _activate_kernel[(triton.cdiv(rows, tall), triton.cdiv(inner, block))](
        wide, hidden, experts, parts, rows, limit, INNER=inner, D=d, CHOICES=choices,
        ROUND=act_group or 0, ROWS=tall, BLOCK=block, num_warps=4,
    )  # fmt: skip
    multiply(hidden, w2, parts.dtype, out=parts[:, choices])
