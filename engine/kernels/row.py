"""Products of one row, and experts of few, with plain weights (twins: linear_torch, moe_torch).

A single row meets each weight once, so there is nothing to share and no use for tensor cores. Weights
that do not depend on the kernel before are asked for before it has ended, and kept in registers: dense
ones, and those of the experts' second product. The first product's experts are known when the router
has ended; its programs are many and small.

Of two to four rows few share an expert, so experts are computed in the same way, and the rows that do
meet an expert's weights in registers, one by one. On an H200, experts of a layer of Qwen3-30B's shape
with four rows take 76 us so (53 and 23 for the products), as streams of tiles (moe_plain.py) 85 us;
the whole layer takes 103 us instead of 108.5. Dense products of four rows stay with gemv.py: from
registers the head took 193 us, by tensor cores 148 us.

Of paged experts the products read what no slot holds yet from the host, and leave it in its slot: what
comes over the bus is computed with as it comes, and experts that were there do not wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.kernels.gemv_kernel import _with
from engine.kernels.overlap import await_previous, begin_next, overlapping
from engine.kernels.router import Routing
from engine.kernels.swiglu import swiglu
from engine.kernels.triton_compat import INTERPRETED, cast, tl, triton

_INTERPRETED = tl.constexpr(INTERPRETED)
#: Weights that one thread of norm and product holds, at most (bfloat16: 64 registers), and warps.
_HELD, _WARPS = 128, 4
#: The same of a product alone: with more, threads have so many registers that its programs take two
#: rounds, of which the second asks for its weights late.
_ALONE_HELD, _ALONE_WARPS = 32, 8
#: Hidden values of a program of the experts' first product, and its warps.
_HIDDEN, _HIDDEN_WARPS = 4, 8
#: Columns of every expert that a program of the second product takes at a time, its warps, and
#: most registers of its threads; six programs fit a processor, which is quicker than eight.
_CHUNK, _SUM_WARPS, _SUM_REGISTERS = 256, 8, 40
#: Most rows of `experts_rows`.
FEW_ROWS = 4
#: Of few rows: hidden values of a program of the experts' first product, its warps, and most registers
#: of its threads; warps of one of the second product, output values of each of them, and registers.
_FEW_HIDDEN, _FEW_HIDDEN_WARPS, _FEW_HIDDEN_REGISTERS = 4, 4, 104
_OUT_WARPS, _OUT_EACH, _OUT_REGISTERS = 4, 4, 96
#: Widest row: of so many columns a program of norm and product would hold two rows, of a product one.
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
def _again(held):
    """Give bfloat16 weights [..] as they are, and what is made of them is made anew.

    The compiler would keep them converted for the next row, in twice the registers.
    """
    if not _INTERPRETED and held.dtype == tl.bfloat16:
        held = tl.inline_asm_elementwise(
            asm="mov.b32 $0, $1;", constraints="=r,r", args=[held], dtype=tl.bfloat16,
            is_pure=False, pack=2,
        )  # fmt: skip
    return held


@triton.jit
def _gated(held, value, weight, limit, BN: tl.constexpr):
    """BN hidden values of one pair; gate and up rows of `held` alternate."""
    gate, up = tl.split(tl.reshape(tl.sum(held.to(tl.float32) * value, 1), (BN, 2)))
    return swiglu(gate, up, limit) * weight


@triton.jit
def _first_kernel(
    x, data, data_apart, store, store_apart, origins, hidden, tiles, order, weights, limit,
    INNER: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
    MISSES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (BN hidden values, tile of one pair)."""
    block, tile = tl.program_id(0), tl.program_id(1)
    k, line = tl.arange(0, WIDTH)[None, :], tl.arange(0, 2 * BN)
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    expert = tl.load(tiles + tile * 3)
    if expert < 0:
        return
    place = data + expert.to(tl.int64) * data_apart
    source = place
    missing = False
    if MISSES:
        origin = tl.load(origins + tile)
        missing = origin >= 0
        if missing:
            source = store + origin.to(tl.int64) * store_apart
    row = (block * BN + line // 2)[:, None]  # gate and up rows alternate
    at = (row + line[:, None] % 2 * INNER) * D + k
    inside = (row < INNER) & (k < D)
    held = tl.load(source + at, mask=inside, other=0.0)
    weight = tl.load(weights + tl.load(order + tile))
    # All weights are asked for before any is used: what uses them needs x, which is loaded behind a
    # barrier. Left to itself the compiler would have two or three loads under way.
    tl.debug_barrier()
    value = tl.load(x + k, mask=k < D, other=0.0).to(tl.float32)
    made = _gated(held, value, weight, limit, BN)
    n = block * BN + tl.arange(0, BN)
    tl.store(hidden + tile * INNER + n, cast(made, hidden.dtype.element_ty), mask=n < INNER)
    if missing:
        tl.store(place + at, held, mask=inside)


@triton.jit
def _sum_kernel(
    hidden, data, data_apart, store, store_apart, origins, out, tiles, CHOICES: tl.constexpr,
    TILES: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
    MISSES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program of one output value of all tiles.

    Tiles were there before the first product began, so weights are asked for before it has ended.
    """
    n = tl.program_id(0)
    tile, k = tl.arange(0, TILES)[:, None], tl.arange(0, WIDTH)[None, :]
    expert = tl.load(tiles + tile * 3, mask=tile < CHOICES, other=-1)
    width = tl.where(expert >= 0, INNER, 0)
    place = data + tl.maximum(expert, 0).to(tl.int64) * data_apart + n * INNER
    source = place
    if MISSES:
        origin = tl.load(origins + tile, mask=tile < CHOICES, other=-1)
        there = store + tl.maximum(origin, 0).to(tl.int64) * store_apart + n * INNER
        source = tl.where(origin >= 0, there, place)
    held = ()
    for chunk in tl.static_range(CHUNKS):
        column = chunk * WIDTH + k
        held = _with(held, tl.load(source + column, mask=column < width, other=0.0))
    begin_next(OVERLAP)
    await_previous(OVERLAP)
    sums = tl.zeros((TILES, WIDTH), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        column = chunk * WIDTH + k
        value = tl.load(hidden + tile * INNER + column, mask=column < width, other=0.0)
        sums += held[chunk].to(tl.float32) * value.to(tl.float32)
    tl.store(out + n, tl.sum(tl.sum(sums, 1), 0))
    if MISSES:
        left = tl.where(origin >= 0, INNER, 0)
        for chunk in tl.static_range(CHUNKS):
            column = chunk * WIDTH + k
            tl.store(place + column, held[chunk], mask=column < left)


@triton.jit
def _first_rows_kernel(
    x, data, data_apart, hidden, experts, out, tiles, order, weights, limit, ROWS: tl.constexpr,
    CHOICES: tl.constexpr, INNER: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (BN hidden values, tile), which meets the tile's rows one by one.

    What the second product will not write, parts of pairs that reach no expert, is zeroed here.
    """
    block, tile = tl.program_id(0), tl.program_id(1)
    k, line = tl.arange(0, WIDTH)[None, :], tl.arange(0, 2 * BN)
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    expert = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    program, programs = tile * tl.num_programs(0) + block, tl.num_programs(0) * tl.num_programs(1)
    for pair in range(program, ROWS * CHOICES, programs):
        if tl.load(experts + pair) < 0:
            tl.store(out + pair * D + k, tl.zeros((1, WIDTH), tl.float32), mask=k < D)
    if expert < 0:
        return
    row = (block * BN + line // 2)[:, None]
    at = data + expert.to(tl.int64) * data_apart + (row + line[:, None] % 2 * INNER) * D + k
    held = tl.load(at, mask=(row < INNER) & (k < D), other=0.0)
    tl.debug_barrier()  # as in _first_kernel
    n = block * BN + tl.arange(0, BN)
    for place in range(first, first + count):
        pair = tl.load(order + place)
        value = tl.load(x + pair // CHOICES * D + k, mask=k < D, other=0.0).to(tl.float32)
        made = _gated(_again(held), value, tl.load(weights + pair), limit, BN)
        tl.store(hidden + place * INNER + n, cast(made, hidden.dtype.element_ty), mask=n < INNER)


@triton.jit
def _second_rows_kernel(
    hidden, data, data_apart, out, tiles, order, INNER: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, CHUNKS: tl.constexpr, LINES: tl.constexpr, EACH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (LINES * EACH output values, tile), for one part of each of the tile's pairs.

    With a line a warp nothing is added up between warps. Weights are asked for as in _sum_kernel.
    """
    block, tile = tl.program_id(0), tl.program_id(1)
    line, k = tl.arange(0, LINES), tl.arange(0, WIDTH)[None, :]
    expert = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    width = tl.where(expert >= 0, INNER, 0)
    place = data + tl.maximum(expert, 0).to(tl.int64) * data_apart
    held = ()
    for each in tl.static_range(EACH):
        n = ((block * EACH + each) * LINES + line)[:, None]
        for chunk in tl.static_range(CHUNKS):
            column = chunk * WIDTH + k
            inside = (n < D) & (column < width)
            held = _with(held, tl.load(place + n * INNER + column, mask=inside, other=0.0))
    begin_next(OVERLAP)
    await_previous(OVERLAP)
    # Every line reads all of a pair's hidden values, so that warps exchange nothing.
    columns = k + tl.zeros((LINES, 1), tl.int32)
    for at in range(first, first + count):
        to = out + tl.load(order + at) * D
        values = ()
        for chunk in tl.static_range(CHUNKS):
            inside = columns < INNER - chunk * WIDTH
            value = tl.load(hidden + at * INNER + chunk * WIDTH + columns, mask=inside, other=0.0)
            values = _with(values, value.to(tl.float32))
        for each in tl.static_range(EACH):
            sums = tl.zeros((LINES, WIDTH), tl.float32)
            for chunk in tl.static_range(CHUNKS):
                sums += _again(held[each * CHUNKS + chunk]).to(tl.float32) * values[chunk]
            one = (block * EACH + each) * LINES + line
            tl.store(to + one, tl.sum(sums, 1), mask=one < D)


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


def _tiling(width: int, held: int, warps: int) -> tuple[int, int]:
    """Columns as a power of two, and weight rows of a program."""
    columns = triton.next_power_of_2(width)
    return columns, max(1, held * warps * 32 // columns)


def takes_row(x: Tensor, *weights: Matrix, most: int = 1) -> bool:
    """Whether kernels here take x [T, K], a single row or up to `most`, and weights."""
    return len(x) <= most and all(
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
    columns, rows = _tiling(width, _ALONE_HELD, _ALONE_WARPS)
    out = torch.empty((1, height), dtype=out_dtype or x.dtype, device=x.device)
    _linear_kernel[(triton.cdiv(height, rows),)](
        x, w.data, out, height, K=width, WIDTH=columns, BN=rows, num_warps=_ALONE_WARPS,
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
    columns, rows = _tiling(width, _HELD, _WARPS)
    out = torch.empty((1, height), dtype=out_dtype or h.dtype, device=h.device)
    new = h if parts is None else torch.empty_like(h)
    _norm_linear_kernel[(triton.cdiv(height, rows),)](
        h, h if parts is None else parts, norm, eps, w.data, new, out, height, K=width,
        WIDTH=columns, BN=rows, HAS_PART=parts is not None, num_warps=_WARPS,
        **overlapping(h.device),
    )  # fmt: skip
    return new, out


@dataclass(frozen=True, slots=True)
class Missing:
    """Experts that tiles name a slot for which does not hold them yet.

    Args:
        w13: of the host's store, [E, 2 * I, d].
        w2: of the same, [E, d, I].
        origins: int32 [tiles], the expert of each tile that is to be read there, -1 for none.
    """

    w13: Matrix
    w2: Matrix
    origins: Tensor


def experts_row(
    x: Tensor,
    routing: Routing,
    w13: Matrix,
    w2: Matrix,
    *,
    limit: float,
    missing: Missing | None = None,
) -> Tensor:
    """Run moe_torch for one row without a shared expert, and add the parts up.

    Args:
        x: [1, d].
        routing: of the row.
        w13: [N, 2 * I, d].
        w2: [N, d, I].
        limit: swiglu_limit.
        missing: what is to be read from the host, and written where w13 and w2 say.

    Returns:
        float32 [1, 1, d].
    """
    tiles, (d, inner), device = len(routing.tiles), w2.shape[-2:], x.device
    hidden = torch.empty((tiles, inner), dtype=x.dtype, device=device)
    out = torch.empty((1, 1, d), dtype=torch.float32, device=device)
    misses = missing is not None
    first, second = (missing.w13, missing.w2) if missing is not None else (w13, w2)
    origins = missing.origins if missing is not None else routing.order
    how = {"MISSES": misses, **overlapping(device)}
    _first_kernel[(triton.cdiv(inner, _HIDDEN), tiles)](
        x, w13.data, w13.data.stride(0), first.data, first.data.stride(0), origins, hidden,
        routing.tiles, routing.order, routing.weights, limit, INNER=inner, D=d,
        WIDTH=triton.next_power_of_2(d), BN=_HIDDEN, num_warps=_HIDDEN_WARPS, **how,
    )  # fmt: skip
    width = min(_CHUNK, triton.next_power_of_2(inner))
    _sum_kernel[(d,)](
        hidden, w2.data, w2.data.stride(0), second.data, second.data.stride(0), origins, out,
        routing.tiles, CHOICES=tiles, TILES=triton.next_power_of_2(tiles), INNER=inner,
        WIDTH=width, CHUNKS=triton.cdiv(inner, width), num_warps=_SUM_WARPS,
        maxnreg=_SUM_REGISTERS if x.dtype == torch.bfloat16 else None, **how,
    )  # fmt: skip
    return out


def experts_rows(x: Tensor, routing: Routing, w13: Matrix, w2: Matrix, *, limit: float) -> Tensor:
    """Run moe_torch for up to FEW_ROWS rows without a shared expert, nor a part for one.

    Args:
        x: [T, d].
        routing: of the rows.
        w13: [N, 2 * I, d].
        w2: [N, d, I].
        limit: swiglu_limit.

    Returns:
        float32 [T, k, d], to be summed in order; no bit depends on other rows.
    """
    tiles, (d, inner), device = len(routing.tiles), w2.shape[-2:], x.device
    rows, choices = routing.experts.shape
    hidden = torch.empty((rows * choices, inner), dtype=x.dtype, device=device)
    out = torch.empty((rows, choices, d), dtype=torch.float32, device=device)
    narrow, how = x.dtype == torch.bfloat16, overlapping(device)
    _first_rows_kernel[(triton.cdiv(inner, _FEW_HIDDEN), tiles)](
        x.contiguous(), w13.data, w13.data.stride(0), hidden, routing.experts, out, routing.tiles,
        routing.order, routing.weights, limit, ROWS=rows, CHOICES=choices, INNER=inner, D=d,
        WIDTH=triton.next_power_of_2(d), BN=_FEW_HIDDEN, num_warps=_FEW_HIDDEN_WARPS,
        maxnreg=_FEW_HIDDEN_REGISTERS if narrow else None, **how,
    )  # fmt: skip
    width = min(_CHUNK, triton.next_power_of_2(inner))
    _second_rows_kernel[(triton.cdiv(d, _OUT_WARPS * _OUT_EACH), tiles)](
        hidden, w2.data, w2.data.stride(0), out, routing.tiles, routing.order, INNER=inner, D=d,
        WIDTH=width, CHUNKS=triton.cdiv(inner, width), LINES=_OUT_WARPS, EACH=_OUT_EACH,
        num_warps=_OUT_WARPS, maxnreg=_OUT_REGISTERS if narrow else None, **how,
    )  # fmt: skip
    return out
