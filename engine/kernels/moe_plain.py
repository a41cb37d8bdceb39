"""Experts for a few rows, weights as wide as x (twin: engine.kernels.moe.moe_torch).

A tile is up to eight pairs of one expert. Two launches, W13 and W2, of programs of 64 weight rows
and a tile each: weights are the left operand, the rows of x have eight columns of the right one.
Gate and up rows of the same hidden values alternate. Programs are small and several share a
multiprocessor, which hides the latency of their loads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.kernels.grouping import DECODE_TILE
from engine.kernels.overlap import await_previous, begin_next, fetch, overlapping
from engine.kernels.router import Routing
from engine.kernels.swiglu import swiglu
from engine.kernels.triton_compat import cast, dot, tl, triton

#: Weight rows of a program.
_ROWS = 64


@triton.jit
def _finish(acc, out, target, weight, column, count, limit, SECOND: tl.constexpr, BN: tl.constexpr):
    """Add the two halves of the columns up and store what became of the tile's rows."""
    r = tl.arange(0, 8)
    total = tl.sum(tl.reshape(acc, (BN, 2, 8)), 1)
    real = (r < count)[None, :]
    if SECOND:
        tl.store(out + target[None, :] + column[:, None], total, mask=real)
    else:
        both = tl.permute(tl.reshape(total, (BN // 2, 2, 8)), (0, 2, 1))
        gate, up = tl.split(both)
        hidden = swiglu(gate, up, limit) * weight[None, :]
        tl.store(
            out + target[None, :] + column[:, None], cast(hidden, out.dtype.element_ty), mask=real
        )


@triton.jit
def _fetch_rows(data, data_apart, tiles, num_tiles, routed, block, tile, K: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Ask for what the pipeline of a tile's weights will ask for first."""
    if (tile < routed) & (tile < tl.load(num_tiles)):
        expert = tl.load(tiles + tile * 3).to(tl.int64)
        size: tl.constexpr = data.dtype.element_ty.primitive_bitwidth // 8
        row = (block * BN + tl.arange(0, BN)).to(tl.int64)
        fetch(data + expert * data_apart + row * K, K * size, (STAGES - 1) * BK * size // 128)


@triton.jit
def _clear_parts(parts, experts, T, CHOICES: tl.constexpr, WIDTH: tl.constexpr,
                 SHARED: tl.constexpr):  # fmt: skip
    """Write zeros where no program of the second product will write."""
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    column = tl.arange(0, 1024)
    for place in range(program, T * (CHOICES + 1), tl.num_programs(0) * tl.num_programs(1)):
        choice = place % (CHOICES + 1)
        if choice == CHOICES:
            empty = not SHARED
        else:
            empty = tl.load(experts + place // (CHOICES + 1) * CHOICES + choice) < 0
        if empty:
            for first in range(0, WIDTH, 1024):
                inside = first + column < WIDTH
                at = parts + place * WIDTH + first + column
                tl.store(at, tl.zeros((1024,), tl.float32), mask=inside)


@triton.jit(do_not_specialize=["T", "routed"])
def _plain_kernel(
    data, data_apart, shared_data, x, stride, out, order, tiles, num_tiles, weights, T, routed,
    experts, parts, limit, CHOICES: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    WIDTH: tl.constexpr, PARTS_WIDTH: tl.constexpr, SHARED: tl.constexpr, SECOND: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (BN weight rows, tile), for weights that are as wide as x."""
    block, tile = tl.program_id(0), tl.program_id(1)
    if SECOND:
        if OVERLAP:
            # Tiles were there before the first product began; its end need not be awaited to know
            # which weights come next.
            _fetch_rows(data, data_apart, tiles, num_tiles, routed, block, tile, K, BN, BK, STAGES)
        await_previous(OVERLAP)
        begin_next(OVERLAP)
    else:
        await_previous(OVERLAP)
        begin_next(OVERLAP)
        _clear_parts(parts, experts, T, CHOICES, PARTS_WIDTH, SHARED)
    r, n, col, k = tl.arange(0, 8), tl.arange(0, BN), tl.arange(0, 16), tl.arange(0, BK)
    is_shared = tile >= routed
    if SECOND:
        row = block * BN + n
        column = row
    else:
        row = block * (BN // 2) + n // 2 + (n % 2) * (N // 2)
        column = block * (BN // 2) + tl.arange(0, BN // 2)
    if is_shared:
        first = (tile - routed) * 8
        count = tl.minimum(T - first, 8)
        index = first + tl.minimum(r, count - 1)
        target = index * (CHOICES + 1) + CHOICES if SECOND else T * CHOICES + index
        source = first + tl.minimum(col % 8, count - 1) + (T * CHOICES if SECOND else 0)
        weight = tl.full((8,), 1.0, tl.float32)
        w_at = shared_data + row[:, None] * K + k[None, :]
    else:
        if tile >= tl.load(num_tiles):
            return
        expert = tl.load(tiles + tile * 3).to(tl.int64)
        first = tl.load(tiles + tile * 3 + 1)
        count = tl.load(tiles + tile * 3 + 2)
        pair = tl.load(order + first + tl.minimum(r, count - 1))
        target = pair + pair // CHOICES if SECOND else first + tl.minimum(r, count - 1)
        weight = tl.load(weights + pair)
        place = first + tl.minimum(col % 8, count - 1)
        source = place if SECOND else tl.load(order + place) // CHOICES
        w_at = data + expert * data_apart + row[:, None] * K + k[None, :]
    x_at = x + source.to(tl.int64)[None, :] * stride + k[:, None]
    own = (col < 8)[None, :]
    acc = tl.zeros((BN, 16), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        inside = k0 + k < K
        w = tl.load(w_at + k0, mask=inside[None, :], other=0.0)
        value = tl.load(x_at + k0, mask=own & inside[:, None], other=0.0)
        acc = dot(w.to(value.dtype), value, acc)
    _finish(acc, out, target.to(tl.int64) * WIDTH, weight, column, count, limit, SECOND, BN)


# ---------------------------------------------------------------- launches


def can_take_plain(x: Tensor, act_group: int | None, *weights: Matrix) -> bool:
    """Whether `plain_experts` takes these operands."""
    return act_group is None and all(
        w.kind == "plain" and w.shape[-2] % _ROWS == 0 and w.data.dtype == x.dtype for w in weights
    )


def _product(
    source: Tensor,
    out: Tensor,
    w: Matrix,
    shared: Matrix | None,
    routing: Routing,
    parts: Tensor,
    *,
    limit: float,
    second: bool,
) -> None:
    """One of the two launches: source [.., K] into out [.., WIDTH]; the first clears `parts`."""
    rows, choices = routing.experts.shape
    height, width = w.shape[-2:]
    routed = len(routing.tiles)
    shared_tiles = 0 if shared is None else triton.cdiv(rows, DECODE_TILE)
    other = w[0] if shared is None else shared
    _plain_kernel[(height // _ROWS, routed + shared_tiles)](
        w.data, w.data.stride(0), other.data, source, source.stride(0), out, routing.order,
        routing.tiles, routing.num_tiles, routing.weights, rows, routed, routing.experts, parts,
        limit, CHOICES=choices, N=height, K=width, WIDTH=out.shape[-1],
        PARTS_WIDTH=parts.shape[-1], SHARED=shared is not None, SECOND=second, BN=_ROWS,
        BK=64 if w.data.dtype == torch.float32 else 128, STAGES=4, num_warps=4,
        **overlapping(source.device, rows),
    )  # fmt: skip


def plain_experts(
    x: Tensor,
    routing: Routing,
    w13: Matrix,
    w2: Matrix,
    shared13: Matrix | None,
    shared2: Matrix | None,
    *,
    limit: float,
    act_group: int | None,
) -> Tensor:
    """Run the experts for up to DECODE_ROWS rows; arguments and result as `moe_torch`.

    act_group is None: plain weights take x as it is.
    """
    rows, choices = routing.experts.shape
    d, inner = w2.shape[-2:]
    hidden = torch.empty(rows * (choices + 1), inner, dtype=x.dtype, device=x.device)
    parts = torch.empty((rows, choices + 1, d), dtype=torch.float32, device=x.device)
    _product(x, hidden, w13, shared13, routing, parts, limit=limit, second=False)
    _product(hidden, parts, w2, shared2, routing, parts, limit=limit, second=True)
    return parts
