"""Products of one row, or very few, with plain weights (twins: linear_torch, moe_torch).

A single row meets each weight once, so there is nothing to share and no use for tensor cores. A
program asks for all of its few weight rows at once and keeps them in registers; whatever does not
depend on the kernel before (dense weights; which experts, for their second product) is on its way
before that kernel has ended.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.kernels.overlap import await_previous, begin_next, overlapping
from engine.kernels.router import Routing
from engine.kernels.triton_compat import cast, tl, triton

#: Most rows: of more, tensor cores make less work.
MOST_ROWS = 4
#: Weights that one thread holds, at most (bfloat16: 64 registers).
_HELD = 128
_WARPS = 4
#: Widest row: of so many columns a program would hold two rows.
_MOST_WIDTH = _HELD * _WARPS * 32 // 2


@triton.jit
def _linear_kernel(
    x, w, out, N, K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program of BN rows of w [N, K], for ROWS rows of x."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, WIDTH)
    inside = (n < N)[:, None] & (k < K)[None, :]
    held = tl.load(w + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)
    # Before the wait: the next kernel touches nothing of ours before it has waited for us.
    begin_next(OVERLAP)
    await_previous(OVERLAP)
    for row in tl.static_range(ROWS):
        value = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        total = tl.sum(held.to(tl.float32) * value[None, :], 1)
        tl.store(out + row * N + n, cast(total, out.dtype.element_ty), mask=n < N)


@triton.jit
def _clear(parts, experts, T, CHOICES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros where no program of the second product will write: the last part, and padding's."""
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    column = tl.arange(0, BLOCK)
    if program < T * (CHOICES + 1):
        choice = program % (CHOICES + 1)
        empty = choice == CHOICES
        if choice < CHOICES:
            empty = tl.load(experts + program // (CHOICES + 1) * CHOICES + choice) < 0
        if empty:
            tl.store(parts + program * D + column, tl.zeros((BLOCK,), tl.float32), mask=column < D)


@triton.jit
def _pair(x, gate, up, hidden, order, weights, place, n, k, limit, CHOICES: tl.constexpr,
          INNER: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Hidden values n of the pair at a place."""
    pair = tl.load(order + place)
    weight = tl.load(weights + pair)
    value = tl.load(x + pair // CHOICES * D + k, mask=k < D, other=0.0).to(tl.float32)[None, :]
    g = tl.minimum(tl.sum(gate.to(tl.float32) * value, 1), limit)
    u = tl.minimum(tl.maximum(tl.sum(up.to(tl.float32) * value, 1), -limit), limit)
    made = g / (1.0 + tl.exp(-g)) * u * weight
    tl.store(hidden + place * INNER + n, cast(made, hidden.dtype.element_ty), mask=n < INNER)


@triton.jit(do_not_specialize=["T"])
def _first_kernel(
    x, data, data_apart, hidden, parts, experts, tiles, order, weights, T, limit,
    CHOICES: tl.constexpr, INNER: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BN: tl.constexpr, T_IS_ONE: tl.constexpr, CLEARS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (BN hidden values, tile of a few pairs)."""
    block, tile = tl.program_id(0), tl.program_id(1)
    n, k = block * BN + tl.arange(0, BN), tl.arange(0, WIDTH)
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    if CLEARS:
        _clear(parts, experts, T, CHOICES, D, WIDTH)
    expert = tl.load(tiles + tile * 3)
    if expert < 0:
        return
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    at = data + expert.to(tl.int64) * data_apart
    inside = (n < INNER)[:, None] & (k < D)[None, :]
    gate = tl.load(at + n[:, None] * D + k[None, :], mask=inside, other=0.0)
    up = tl.load(at + (n + INNER)[:, None] * D + k[None, :], mask=inside, other=0.0)
    if T_IS_ONE:  # registers need not outlive a loop
        _pair(x, gate, up, hidden, order, weights, first, n, k, limit, CHOICES, INNER, D)
    else:
        for place in range(first, first + count):
            _pair(x, gate, up, hidden, order, weights, place, n, k, limit, CHOICES, INNER, D)


@triton.jit
def _second_kernel(
    hidden, data, data_apart, parts, tiles, order, CHOICES: tl.constexpr, INNER: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (BN output values, tile of a few pairs).

    The first product let this one begin after its own wait, so the tiles are there.
    """
    block, tile = tl.program_id(0), tl.program_id(1)
    n, k = block * BN + tl.arange(0, BN), tl.arange(0, WIDTH)
    expert = tl.load(tiles + tile * 3)
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    height = tl.where(expert >= 0, D, 0)  # 0: a tile that is not there
    inside = (n < height)[:, None] & (k < INNER)[None, :]
    at = data + tl.maximum(expert, 0).to(tl.int64) * data_apart
    held = tl.load(at + n[:, None] * INNER + k[None, :], mask=inside, other=0.0)
    begin_next(OVERLAP)
    await_previous(OVERLAP)
    for place in range(first, first + count):
        pair = tl.load(order + place)
        value = tl.load(hidden + place * INNER + k, mask=k < INNER, other=0.0).to(tl.float32)
        total = tl.sum(held.to(tl.float32) * value[None, :], 1)
        tl.store(parts + (pair + pair // CHOICES) * D + n, total, mask=n < height)


@triton.jit
def _sum_kernel(
    hidden, data, data_apart, out, tiles, CHOICES: tl.constexpr, TILES: tl.constexpr,
    INNER: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program of BN output values of all tiles; as `_second_kernel`, summed by expert."""
    tile = tl.arange(0, TILES)
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, WIDTH)
    expert = tl.load(tiles + tile * 3, mask=tile < CHOICES, other=-1)
    length = tl.where(expert >= 0, INNER, 0)
    column = (n < D)[None, :, None] & (k[None, :] < length[:, None])[:, None, :]
    at = data + (tl.maximum(expert, 0).to(tl.int64) * data_apart)[:, None, None]
    held = tl.load(at + n[None, :, None] * INNER + k[None, None, :], mask=column, other=0.0)
    begin_next(OVERLAP)
    await_previous(OVERLAP)
    value = tl.load(hidden + tile[:, None] * INNER + k[None, :], mask=k[None, :] < length[:, None],
                    other=0.0)  # fmt: skip
    products = held.to(tl.float32) * value.to(tl.float32)[:, None, :]
    tl.store(out + n, tl.sum(tl.sum(products, 2), 0), mask=n < D)


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


def _tiling(width: int, stacks: int = 1) -> tuple[int, int]:
    """Columns as a power of two, and weight rows of a program that reads `stacks` of them."""
    columns = triton.next_power_of_2(width)
    return columns, max(1, _HELD * _WARPS * 32 // columns // stacks)


def takes_rows(x: Tensor, *weights: Matrix, most: int = MOST_ROWS) -> bool:
    """Whether the kernels here take x [T, K] of up to `most` rows, and weights."""
    return len(x) <= most and all(
        w.kind == "plain" and w.data.dtype == x.dtype and w.shape[-1] <= _MOST_WIDTH
        for w in weights
    )


def linear_rows(x: Tensor, w: Matrix, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Run linear_torch for up to MOST_ROWS rows.

    Args:
        x: [T, K].
        w: plain [N, K], of x's dtype.
        out_dtype: of the result; x's by default.

    Returns:
        [T, N].
    """
    height, width = w.shape
    columns, rows = _tiling(width)
    out = torch.empty((len(x), height), dtype=out_dtype or x.dtype, device=x.device)
    _linear_kernel[(triton.cdiv(height, rows),)](
        x.contiguous(), w.data, out, height, K=width, WIDTH=columns, BN=rows, ROWS=len(x),
        num_warps=_WARPS, **overlapping(x.device),
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


def experts_rows(
    x: Tensor, routing: Routing, w13: Matrix, w2: Matrix, *, limit: float, summed: bool = False
) -> Tensor:
    """Run moe_torch for up to MOST_ROWS rows without a shared expert; arguments as there.

    Args:
        x: [T, d].
        routing: of the rows.
        w13: [N, 2 * I, d].
        w2: [N, d, I].
        limit: swiglu_limit.
        summed: whether one row's parts are added up, by expert.

    Returns:
        float32 [T, k + 1, d] as moe_torch, or [1, 1, d].
    """
    (count, choices), (d, inner) = routing.experts.shape, w2.shape[-2:]
    tiles = len(routing.tiles)
    hidden = torch.empty((count * choices, inner), dtype=x.dtype, device=x.device)
    shape = (1, 1, d) if summed else (count, choices + 1, d)
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    columns, rows = _tiling(d, 2)
    blocks = max(triton.cdiv(inner, rows), triton.cdiv(count * (choices + 1), tiles))
    _first_kernel[(blocks, tiles)](
        x.contiguous(), w13.data, w13.data.stride(0), hidden, parts, routing.experts, routing.tiles,
        routing.order, routing.weights, count, limit, CHOICES=choices, INNER=inner, D=d,
        WIDTH=columns, BN=rows, T_IS_ONE=count == 1, CLEARS=not summed, num_warps=_WARPS, **overlapping(x.device),
    )  # fmt: skip
    data, apart = w2.data, w2.data.stride(0)
    if summed:
        padded = triton.next_power_of_2(tiles)
        columns, rows = _tiling(inner, padded)
        _sum_kernel[(triton.cdiv(d, rows),)](
            hidden, data, apart, parts, routing.tiles, CHOICES=tiles, TILES=padded, INNER=inner,
            D=d, WIDTH=columns, BN=rows, num_warps=_WARPS, **overlapping(x.device),
        )  # fmt: skip
        return parts
    columns, rows = _tiling(inner)
    _second_kernel[(triton.cdiv(d, rows), tiles)](
        hidden, data, apart, parts, routing.tiles, routing.order, CHOICES=choices, INNER=inner,
        D=d, WIDTH=columns, BN=rows, num_warps=_WARPS, **overlapping(x.device),
    )  # fmt: skip
    return parts
