"""Products of one row with plain weights (twins: linear_torch, moe_torch).

A single row meets each weight once, so there is nothing to share and no use for tensor cores. Dense
weights do not depend on the kernel before: a program asks for all of its few rows of them before that
kernel has ended, and keeps them in registers. Which experts come next does depend on it; their programs
are small enough for all of them to run at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.kernels.overlap import await_previous, begin_next, overlapping
from engine.kernels.router import Routing
from engine.kernels.triton_compat import cast, tl, triton

#: Weights that one thread holds, at most (bfloat16: 64 registers).
_HELD = 128
_WARPS = 4
#: Columns that a program of the summed product takes at a time.
_CHUNK = 256
#: Registers of its threads: few enough for all 2048 programs of Qwen3-30B's to run at once. A few
#: programs that begin when others have ended cost as much time as all of these.
_SUM_REGISTERS = 32
#: Widest row: of so many columns a program would hold two rows.
_MOST_WIDTH = _HELD * _WARPS * 32 // 2


@triton.jit
def _linear_kernel(
    x, w, out, N, K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Program of BN rows of w [N, K]."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, WIDTH)
    inside = (n < N)[:, None] & (k < K)[None, :]
    held = tl.load(w + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)
    # Before the wait: the next kernel touches nothing of ours before it has waited for us.
    begin_next(OVERLAP)
    await_previous(OVERLAP)
    value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    total = tl.sum(held.to(tl.float32) * value[None, :], 1)
    tl.store(out + n, cast(total, out.dtype.element_ty), mask=n < N)


@triton.jit
def _clear(parts, experts, CHOICES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros where no program of the second product will write: the last part, and padding's."""
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    column = tl.arange(0, BLOCK)
    if program <= CHOICES:
        empty = program == CHOICES
        if program < CHOICES:
            empty = tl.load(experts + program) < 0
        if empty:
            tl.store(parts + program * D + column, tl.zeros((BLOCK,), tl.float32), mask=column < D)


@triton.jit
def _first_kernel(
    x, data, data_apart, hidden, parts, experts, tiles, order, weights, limit, CHOICES: tl.constexpr,
    INNER: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
    CLEARS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (BN hidden values, tile of one pair)."""
    block, tile = tl.program_id(0), tl.program_id(1)
    n, k = block * BN + tl.arange(0, BN), tl.arange(0, WIDTH)
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    if CLEARS:
        _clear(parts, experts, CHOICES, D, WIDTH)
    expert = tl.load(tiles + tile * 3)
    if expert < 0:
        return
    at = data + expert.to(tl.int64) * data_apart
    inside = (n < INNER)[:, None] & (k < D)[None, :]
    gate = tl.load(at + n[:, None] * D + k[None, :], mask=inside, other=0.0)
    up = tl.load(at + (n + INNER)[:, None] * D + k[None, :], mask=inside, other=0.0)
    value = tl.load(x + k, mask=k < D, other=0.0).to(tl.float32)[None, :]
    weight = tl.load(weights + tl.load(order + tile))
    g = tl.minimum(tl.sum(gate.to(tl.float32) * value, 1), limit)
    u = tl.minimum(tl.maximum(tl.sum(up.to(tl.float32) * value, 1), -limit), limit)
    made = g / (1.0 + tl.exp(-g)) * u * weight
    tl.store(hidden + tile * INNER + n, cast(made, hidden.dtype.element_ty), mask=n < INNER)


@triton.jit
def _second_kernel(
    hidden, data, data_apart, parts, tiles, order, INNER: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, BN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (BN output values, tile of one pair)."""
    block, tile = tl.program_id(0), tl.program_id(1)
    n, k = block * BN + tl.arange(0, BN), tl.arange(0, WIDTH)
    begin_next(OVERLAP)
    await_previous(OVERLAP)
    expert = tl.load(tiles + tile * 3)
    if expert < 0:
        return
    at = data + expert.to(tl.int64) * data_apart + n[:, None] * INNER + k[None, :]
    held = tl.load(at, mask=(n < D)[:, None] & (k < INNER)[None, :], other=0.0)
    value = tl.load(hidden + tile * INNER + k, mask=k < INNER, other=0.0).to(tl.float32)
    total = tl.sum(held.to(tl.float32) * value[None, :], 1)
    tl.store(parts + tl.load(order + tile) * D + n, total, mask=n < D)


@triton.jit
def _sum_kernel(
    hidden, data, data_apart, out, tiles, CHOICES: tl.constexpr, TILES: tl.constexpr,
    INNER: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program of one output value of all tiles, WIDTH columns at a time."""
    tile = tl.arange(0, TILES)[:, None]
    n = tl.program_id(0)
    begin_next(OVERLAP)
    await_previous(OVERLAP)
    expert = tl.load(tiles + tile * 3, mask=tile < CHOICES, other=-1)
    real = tl.where(expert >= 0, INNER, 0)
    at = data + tl.maximum(expert, 0).to(tl.int64) * data_apart + n * INNER
    sums = tl.zeros((TILES, WIDTH), tl.float32)
    for first in tl.static_range(0, INNER, WIDTH):
        k = first + tl.arange(0, WIDTH)[None, :]
        held = tl.load(at + k, mask=k < real, other=0.0).to(tl.float32)
        value = tl.load(hidden + tile * INNER + k, mask=k < real, other=0.0).to(tl.float32)
        sums += held * value
    tl.store(out + n, tl.sum(tl.sum(sums, 1), 0))


@triton.jit
def _norm_linear_kernel(
    h, part, norm, eps, w, h_out, out, N, K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
    HAS_PART: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program of BN rows of w [N, K]; every program adds and norms the row."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, WIDTH)
    inside = (n < N)[:, None] & (k < K)[None, :]
    held = tl.load(w + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)
    scales = tl.load(norm + k, mask=k < K, other=0.0)
    begin_next(OVERLAP)
    await_previous(OVERLAP)
    dtype: tl.constexpr = h_out.dtype.element_ty
    value = tl.load(h + k, mask=k < K, other=0.0).to(tl.float32)
    if HAS_PART:
        more = tl.load(part + k, mask=k < K, other=0.0).to(tl.float32)
        value = cast(value + more, dtype).to(tl.float32)
        if tl.program_id(0) == 0:
            tl.store(h_out + k, cast(value, dtype), mask=k < K)
    x = value * tl.rsqrt(tl.sum(value * value, 0) / K + eps) * scales
    x = cast(x, dtype).to(tl.float32)
    total = tl.sum(held.to(tl.float32) * x[None, :], 1)
    tl.store(out + n, cast(total, out.dtype.element_ty), mask=n < N)


# ---------------------------------------------------------------- launches


def _tiling(width: int) -> tuple[int, int]:
    """Columns as a power of two, and weight rows of a program."""
    columns = triton.next_power_of_2(width)
    return columns, max(1, _HELD * _WARPS * 32 // columns)


def takes_row(x: Tensor, *weights: Matrix) -> bool:
    """Whether the kernels here take x [T, K] and weights."""
    return len(x) == 1 and all(
        w.kind == "plain" and w.data.dtype == x.dtype and w.shape[-1] <= _MOST_WIDTH
        for w in weights
    )


def linear_row(x: Tensor, w: Matrix, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Run linear_torch for one row.

    Args:
        x: [1, K].
        w: plain [N, K], of x's dtype.
        out_dtype: of the result; x's by default.

    Returns:
        [1, N].
    """
    height, width = w.shape
    columns, rows = _tiling(width)
    out = torch.empty((1, height), dtype=out_dtype or x.dtype, device=x.device)
    _linear_kernel[(triton.cdiv(height, rows),)](
        x, w.data, out, height, K=width, WIDTH=columns, BN=rows, num_warps=_WARPS,
        **overlapping(x.device),
    )  # fmt: skip
    return out


def norm_linear_row(
    h: Tensor,
    parts: Tensor | None,
    norm: Tensor,
    eps: float,
    w: Matrix,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Run add_norm_torch and then linear_torch for one row and one summand, or none.

    Args:
        h: residual [1, K].
        parts: [1, 1, K], or None.
        norm: [K].
        eps: of the norm.
        w: plain [N, K], of h's dtype.
        out_dtype: of the product; h's by default.

    Returns:
        the new residual [1, K] and the product [1, N].
    """
    height, width = w.shape
    columns, rows = _tiling(width)
    out = torch.empty((1, height), dtype=out_dtype or h.dtype, device=h.device)
    new = h if parts is None else torch.empty_like(h)
    _norm_linear_kernel[(triton.cdiv(height, rows),)](
        h, h if parts is None else parts, norm, eps, w.data, new, out, height, K=width,
        WIDTH=columns, BN=rows, HAS_PART=parts is not None, num_warps=_WARPS,
        **overlapping(h.device),
    )  # fmt: skip
    return new, out


def experts_row(
    x: Tensor, routing: Routing, w13: Matrix, w2: Matrix, *, limit: float, summed: bool = False
) -> Tensor:
    """Run moe_torch for one row without a shared expert; arguments as there.

    Args:
        x: [1, d].
        routing: of the row.
        w13: [N, 2 * I, d].
        w2: [N, d, I].
        limit: swiglu_limit.
        summed: whether the parts are added up, by expert.

    Returns:
        float32 [1, k + 1, d] as moe_torch, or [1, 1, d].
    """
    choices, (d, inner) = routing.experts.shape[1], w2.shape[-2:]
    tiles, device = len(routing.tiles), x.device
    hidden = torch.empty((choices, inner), dtype=x.dtype, device=device)
    shape = (1, 1, d) if summed else (1, choices + 1, d)
    parts = torch.empty(shape, dtype=torch.float32, device=device)
    columns, rows = _tiling(d)
    how = {"num_warps": _WARPS, **overlapping(device)}
    _first_kernel[(max(triton.cdiv(inner, rows), triton.cdiv(choices + 1, tiles)), tiles)](
        x, w13.data, w13.data.stride(0), hidden, parts, routing.experts, routing.tiles,
        routing.order, routing.weights, limit, CHOICES=choices, INNER=inner, D=d, WIDTH=columns,
        BN=rows, CLEARS=not summed, **how,
    )  # fmt: skip
    data, apart = w2.data, w2.data.stride(0)
    if summed:
        _sum_kernel[(d,)](
            hidden, data, apart, parts, routing.tiles, CHOICES=tiles,
            TILES=triton.next_power_of_2(tiles), INNER=inner,
            WIDTH=min(_CHUNK, triton.next_power_of_2(inner)),
            maxnreg=_SUM_REGISTERS if x.dtype == torch.bfloat16 else None, **how,
        )  # fmt: skip
        return parts
    columns, rows = _tiling(inner)
    _second_kernel[(triton.cdiv(d, rows), tiles)](
        hidden, data, apart, parts, routing.tiles, routing.order, INNER=inner, D=d, WIDTH=columns,
        BN=rows, **how,
    )  # fmt: skip
    return parts
