"""The way from a sublayer's output to the experts of each row: residual, norm, router.

A few rows take one kernel. Each program adds and norms a row once more than needed and takes a few
experts' logits; a row's program that finishes last chooses. More rows of a decode step take three:
norm, logits as products of tiles, and a choice by one program a row. Four rows of Qwen3-30B's width
take an H200 6.8 us so, with three kernels 8.1 us.

A softmax is monotonous, so experts are ranked by their logits; an expert's place is found by counting
those before it, without a loop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.counters import counters
from engine.kernels.gqa import OVERLAP_ROWS, add_norm_torch, add_norm_triton
from engine.kernels.grouping import DECODE_ROWS, _group, _group_few, most_tiles, tile_pairs
from engine.kernels.overlap import await_previous, begin_next, overlapping
from engine.kernels.router import (
    Routing,
    _is_last,
    _partial_logits,
    _product_shape,
    route_torch,
    route_triton,
)
from engine.kernels.rows import Rows
from engine.kernels.triton_compat import cast, tl, triton

#: Experts of a program, of one row and of more.
_ONE_ROW_EXPERTS, _EXPERTS = 4, 8
#: Most rows that take one kernel.
_ONE_KERNEL_ROWS = 4


def norm_route_torch(
    h: Tensor, parts: Tensor, norm: Tensor, eps: float, gate: Tensor, rows: Rows, *, k: int
) -> tuple[Tensor, Tensor, Routing]:
    """Add a sublayer's summands, norm, and route by softmax.

    Args:
        h: residual [T, d].
        parts: [T, P, d], added in order in float32.
        norm: [d].
        eps: of the norm.
        gate: [E, d].
        rows: of the pass.
        k: experts of a row.

    Returns:
        the new residual [T, d], its norm [T, d] and the routing of that.
    """
    h, x = add_norm_torch(h, parts, norm, eps)
    return h, x, route_torch(x, gate, None, None, rows, k=k, scaling=1.0, scoring="softmax")


@triton.jit
def _choose(logits, experts, weights, slot, row, apart, E: tl.constexpr, EP: tl.constexpr,
            K: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Store a row's choice; its logits are the sum of SPLITS parts that lie `apart`."""
    i = tl.arange(0, EP)
    value = tl.where(i < E, 0.0, -float("inf"))
    for split in tl.static_range(SPLITS):
        at = logits + split * apart + row * E + i
        value += tl.load(at, mask=i < E, other=0.0, cache_modifier=".cg")
    before = (value[:, None] > value[None, :]) | (
        (value[:, None] == value[None, :]) & (i[:, None] < i[None, :])
    )
    place = tl.sum(before.to(tl.int32), 0)
    chosen = place < K
    share = tl.where(chosen, tl.exp(value - tl.max(value, 0)), 0.0)
    live = slot != 0
    tl.store(experts + row * K + place, tl.where(live, i, -1), mask=chosen)
    weight = tl.where(live, share / tl.sum(share, 0), 0.0)
    tl.store(weights + row * K + place, weight, mask=chosen)
    return chosen, place, live


@triton.jit
def _group_one(chosen, place, live, order, tiles, num_tiles, K: tl.constexpr):
    """Tiles of a single row: its experts, ascending, each with its one pair; none of padding."""
    i = tl.arange(0, chosen.shape[0])
    at = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(order + tl.where(live, at, place), place, mask=chosen)
    tl.store(tiles + at * 3, tl.where(live, i, -1), mask=chosen)
    tl.store(tiles + at * 3 + 1, tl.where(live, at, 0), mask=chosen)
    tl.store(tiles + at * 3 + 2, tl.where(live, 1, 0), mask=chosen)
    tl.store(num_tiles, tl.where(live, K, 0))


@triton.jit
def _group_written(experts, order, tiles, num_tiles, T, most, ROWS: tl.constexpr,
                   E: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Group the pairs of T rows, up to ROWS of eight, that other programs have written."""
    row = tl.arange(0, triton.next_power_of_2(ROWS))[:, None]
    choice = tl.arange(0, triton.next_power_of_2(K))[None, :]
    real = (row < T) & (choice < K)
    chosen = tl.load(experts + row * K + choice, mask=real, other=-1, cache_modifier=".cg")
    _group_few(chosen, order, tiles, num_tiles, T, most, E, K, TILE)


@triton.jit
def _norm_route_kernel(
    h, parts, norm, eps, gate, h_out, x_out, logits, counter, seq, slots, experts, weights, order,
    tiles, num_tiles, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, BE: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr,
    TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (BE experts, row); a row's last one chooses, and the last of those groups."""
    row = tl.program_id(1) if ROWS > 1 else 0
    column = tl.arange(0, WIDTH)
    real = column < D
    expert = tl.program_id(0) * BE + tl.arange(0, BE)
    # Without a mask that counts, what is loaded is left as it comes: with one it is unpacked behind
    # the wait, before anything else is asked for.
    inside = real[None, :] if E % BE == 0 else (expert < E)[:, None] & real[None, :]
    held = tl.load(gate + expert[:, None] * D + column[None, :], mask=inside, other=0.0)
    scales = tl.load(norm + column, mask=real, other=0.0)
    slot = tl.load(slots + tl.load(seq + row))
    # In this order: engine.kernels.paging reads its tables before it waits itself.
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    value = tl.load(h + row * D + column, mask=real, other=0.0).to(tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (row * PARTS + part) * D + column, mask=real, other=0.0).to(
            tl.float32
        )
    dtype: tl.constexpr = h_out.dtype.element_ty
    value = cast(value + total, dtype).to(tl.float32)
    x = value * tl.rsqrt(tl.sum(value * value, 0) / D + eps) * scales
    x = cast(x, dtype)
    if tl.program_id(0) == 0:
        tl.store(h_out + row * D + column, cast(value, dtype), mask=real)
        tl.store(x_out + row * D + column, x, mask=real)
    found = tl.sum(held.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    tl.store(logits + row * E + expert, found, mask=expert < E)
    if _is_last(counter + row, tl.num_programs(0)):
        chosen, place, live = _choose(logits, experts, weights, slot, row, 0, E, EP, K, 1)
        if ROWS == 1:
            _group_one(chosen, place, live, order, tiles, num_tiles, K)
        elif _is_last(counter + ROWS, ROWS):
            _group_written(experts, order, tiles, num_tiles, ROWS, MOST, ROWS, E, K, TILE)


@triton.jit(do_not_specialize=["T"])
def _logits_kernel(
    x, gate, logits, T, E: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    _partial_logits(x, gate, logits, tl.program_id(1) * BT, tl.program_id(0) * BE,
                    tl.program_id(2), T, E, D, SPLITS, BT, BE, BK, OVERLAP)  # fmt: skip


@triton.jit(do_not_specialize=["T", "most"])
def _choose_kernel(
    logits, counter, seq, slots, experts, weights, order, tiles, num_tiles, scratch, T, most,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr,
    PAIRS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program of one row; the last one groups the pairs, by counting those of up to eight rows."""
    row = tl.program_id(0)
    slot = tl.load(slots + tl.load(seq + row))
    # In this order: engine.kernels.paging reads its tables before it waits itself.
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    _choose(logits, experts, weights, slot, row, T * E, E, EP, K, SPLITS)
    if _is_last(counter, tl.num_programs(0)):
        if ROWS <= 8:
            _group_written(experts, order, tiles, num_tiles, T, most, ROWS, E, K, TILE)
        else:
            _group(experts, order, tiles, num_tiles, scratch, T * K, most, E, PAIRS, TILE)


def norm_route_triton(
    h: Tensor, parts: Tensor, norm: Tensor, eps: float, gate: Tensor, rows: Rows, *, k: int
) -> tuple[Tensor, Tensor, Routing]:
    """Run norm_route_torch: one kernel up to _ONE_KERNEL_ROWS, three up to DECODE_ROWS."""
    count, (num_experts, d), device = len(h), gate.shape, h.device
    if count > DECODE_ROWS:
        h, x = add_norm_triton(h, parts, norm, eps)
        return h, x, route_triton(x, gate, None, None, rows, k=k, scaling=1.0, scoring="softmax")
    most, tile = most_tiles(count, k, num_experts), tile_pairs(count)
    counter = counters("norm_route", _ONE_KERNEL_ROWS + 1, device)
    weights = torch.empty((count, k), dtype=torch.float32, device=device)
    experts, order = (torch.empty(count * k, dtype=torch.int32, device=device) for _ in range(2))
    tiles = torch.empty((most, 3), dtype=torch.int32, device=device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=device)
    found = rows.seq, rows.slots, experts, weights, order, tiles, num_tiles
    routing = Routing(experts.view(count, k), weights, order, tiles, num_tiles)
    shapes = {"E": num_experts, "EP": triton.next_power_of_2(num_experts), "K": k, "TILE": tile}
    if count <= _ONE_KERNEL_ROWS:
        new, x = torch.empty_like(h), torch.empty_like(h)
        logits = torch.empty((count, num_experts), dtype=torch.float32, device=device)
        each = _ONE_ROW_EXPERTS if count == 1 else _EXPERTS
        _norm_route_kernel[(triton.cdiv(num_experts, each), count)](
            h, parts.contiguous(), norm, eps, gate, new, x, logits, counter, *found,
            D=d, WIDTH=triton.next_power_of_2(d), PARTS=parts.shape[1], BE=each, ROWS=count,
            MOST=most, num_warps=4, **shapes, **overlapping(device),
        )  # fmt: skip
        return new, x, routing
    h, x = add_norm_triton(h, parts, norm, eps)
    tile_rows, tile_experts, step, splits = _product_shape(count)
    logits = torch.empty((splits, count, num_experts), dtype=torch.float32, device=device)
    grid = triton.cdiv(num_experts, tile_experts), triton.cdiv(count, tile_rows), splits
    _logits_kernel[grid](
        x, gate, logits, count, E=num_experts, D=d, SPLITS=splits, BT=tile_rows, BE=tile_experts,
        BK=step, num_warps=4, **overlapping(device, count, OVERLAP_ROWS),
    )  # fmt: skip
    padded = triton.next_power_of_2(count * k)
    scratch = torch.empty(padded, dtype=torch.int32, device=device)
    _choose_kernel[(count,)](
        logits, counter, *found, scratch, count, most, SPLITS=splits, PAIRS=padded,
        ROWS=triton.next_power_of_2(count), num_warps=4, **shapes,
        **overlapping(device, count, OVERLAP_ROWS),
    )  # fmt: skip
    return h, x, routing
