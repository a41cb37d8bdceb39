"""Which experts a row goes to, and with what weight (model.md 2.7).

scores = sqrt(softplus(x Wg^T)) in float32. Learned layers take the k best of scores + bias, ties to
the lowest expert; hash layers read them from a table by token id. The weights are the chosen
scores, normalised, times the scaling factor; a bias moves the choice only.

The T * k (row, choice) *pairs* are numbered t * k + j. Sorted by expert they are cut into *tiles*
of pairs of one expert, which is what a grouped product works on (engine.kernels.grouping). Nothing
of this is known to the host: it knows only how many tiles there can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.counters import counters
from engine.kernels.grouping import (
    DECODE_ROWS,
    _group,
    _group_few,
    count_groups,
    group_torch,
    ints,
    most_tiles,
    tile_pairs,
)
from engine.kernels.overlap import await_previous, begin_next, overlapping
from engine.kernels.rows import Rows
from engine.kernels.triton_compat import dot, tl, triton

Scoring = Literal["sqrtsoftplus", "softmax"]


def parts_dtype(x: Tensor) -> torch.dtype:
    """Of the experts' parts of rows x [T, d]: few cost nothing in float32, many are a burden."""
    return torch.float32 if len(x) <= DECODE_ROWS else x.dtype


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice of experts for T rows.

    Args:
        experts: int32 [T, k]; -1 for a padding row.
        weights: float32 [T, k]; 0 for a padding row.
        order: int32 [T * k], pairs by expert, those of equal experts ascending, padding last.
        tiles: int32 [NT, 3]: expert, first place in `order`, pairs (1 .. tile_pairs(T)); by
            expert, then place. Unused ones are (-1, 0, 0) and come last. Replacing each expert by
            the slot that holds it (in `tiles` alone) is all that paging experts takes.
        num_tiles: int32 [1], tiles in use.
    """

    experts: Tensor
    weights: Tensor
    order: Tensor
    tiles: Tensor
    num_tiles: Tensor


# ---------------------------------------------------------------- torch


def route_torch(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    rows: Rows,
    *,
    k: int,
    scaling: float,
    image: Tensor | None = None,
    image_bias: Tensor | None = None,
    scoring: Scoring = "sqrtsoftplus",
) -> Routing:
    """Choose experts; rows of slot 0 (padding) reach none.

    Args:
        x: [T, d], not rounded.
        gate: [E, d], bfloat16 or float32.
        bias: float32 [E] of a learned layer, else None.
        table: integer [V, k] of a hash layer, else None; exactly one of the two is given with
            sqrtsoftplus, none with softmax.
        rows: of the pass.
        k: experts of a row.
        scaling: routed_scaling_factor.
        image: bool [T], rows of image tokens, for which image_bias replaces bias.
        image_bias: float32 [E].
        scoring: "sqrtsoftplus" (DeepSeek), or "softmax" over all experts (Qwen3).

    Returns:
        The routing.

    Raises:
        ValueError: bias and table do not fit the scoring.
    """
    _check_choice(bias, table, scoring)
    logits = x.float() @ gate.float().t()
    scores = logits.softmax(-1) if scoring == "softmax" else reference.sqrt_softplus(logits)
    if scoring == "softmax":
        experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    elif table is not None:
        experts = table.index_select(0, rows.ids).long()
    else:
        assert bias is not None
        biased = scores + bias
        if image is not None and image_bias is not None:
            biased = torch.where(image[:, None], scores + image_bias, biased)
        experts = biased.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = reference.route(scores, experts, scaling)
    padding = (rows.slots.index_select(0, rows.seq) == 0)[:, None]
    experts = torch.where(padding, -1, experts).to(torch.int32)
    weights = torch.where(padding, 0.0, weights)
    return Routing(experts, weights, *group_torch(experts, len(gate)))


def _check_choice(bias: Tensor | None, table: Tensor | None, scoring: Scoring) -> None:
    given = (bias is not None) + (table is not None)
    wanted = 0 if scoring == "softmax" else 1
    if given != wanted:
        raise ValueError(
            f"route: expected {wanted} of bias and table of experts for {scoring}, got {given}"
        )


# ---------------------------------------------------------------- Triton


@triton.jit
def _score(x):
    """sqrt(softplus(x)), float32, accurate to a few units in the last place."""
    u = tl.exp(-tl.abs(x))
    # log1p(u) = 2 atanh(u / (2 + u)), whose argument is at most 1 / 3
    z = u / (2.0 + u)
    zz = z * z
    series = 1.0 / 11 + zz * (1.0 / 13 + zz * (1.0 / 15))
    series = 1.0 / 5 + zz * (1.0 / 7 + zz * (1.0 / 9 + zz * series))
    log1p = 2.0 * z * (1.0 + zz * (1.0 / 3 + zz * series))
    plain = tl.sqrt_rn(tl.maximum(x, 0.0) + log1p)
    return tl.where(x < -16.0, tl.exp(0.5 * x), plain)  # before exp(x) leaves its range


@triton.jit
def _with(values, value):
    """A tuple with one more value."""
    return values + (value,)  # noqa: RUF005 - the compiler has no starred elements


@triton.jit
def _partial_logits(x, gate, logits, first, expert, split, T, E: tl.constexpr, D: tl.constexpr,
                    SPLITS: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
                    BK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Logits of BT rows and BE experts over one part of the columns: [SPLITS, T, E].

    A few steps' weights, which no kernel writes, are on their way while it waits for the one before.
    """
    rows = first + tl.arange(0, BT)
    experts = expert + tl.arange(0, BE)
    per: tl.constexpr = (D + SPLITS * BK - 1) // (SPLITS * BK) * BK
    AHEAD: tl.constexpr = per // BK if per <= 4 * BK else 0
    of_gate = gate + experts[:, None] * D
    of_x = x + rows[None, :].to(tl.int64) * D
    ahead = ()
    for step in tl.static_range(AHEAD):
        columns = split * per + step * BK + tl.arange(0, BK)
        inside = (experts < E)[:, None] & (columns < D)[None, :]
        ahead = _with(ahead, tl.load(of_gate + columns[None, :], mask=inside, other=0.0))
    # In this order: engine.kernels.paging reads its tables before it waits itself.
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    acc = tl.zeros((BE, BT), tl.float32)
    for step in tl.static_range(AHEAD):
        columns = split * per + step * BK + tl.arange(0, BK)
        inside = (rows < T)[None, :] & (columns < D)[:, None]
        values = tl.load(of_x + columns[:, None], mask=inside, other=0.0)
        acc = dot(ahead[step], values.to(gate.dtype.element_ty), acc)
    for begin in range(AHEAD * BK, per, BK):
        place = split * per + begin + tl.arange(0, BK)
        w = tl.load(of_gate + place[None, :], mask=(experts < E)[:, None] & (place < D)[None, :],
                    other=0.0)  # fmt: skip
        mine = tl.load(of_x + place[:, None], mask=(rows < T)[None, :] & (place < D)[:, None],
                       other=0.0)  # fmt: skip
        acc = dot(w, mine.to(w.dtype), acc)
    out = logits + (split * T + rows[None, :]).to(tl.int64) * E + experts[:, None]
    tl.store(out, acc, mask=(rows < T)[None, :] & (experts < E)[:, None])


@triton.jit
def _given(ids, seq, slots, table, first, T, K: tl.constexpr, KP: tl.constexpr,
           ROWS: tl.constexpr, HASHED: tl.constexpr):  # fmt: skip
    """What is known of ROWS rows before their logits: slots, and the experts of a hash layer."""
    row = first + tl.arange(0, ROWS)
    slot = tl.load(slots + tl.load(seq + row, mask=row < T, other=0), mask=row < T, other=0)
    chosen = tl.full((ROWS, KP), -1, tl.int32)
    if HASHED:
        place = tl.arange(0, KP)[None, :]
        token = tl.load(ids + row, mask=row < T, other=0)[:, None]
        mask = (row < T)[:, None] & (place < K)
        chosen = tl.load(table + token * K + place, mask=mask, other=-1).to(tl.int32)
    return slot, chosen


@triton.jit
def _better(v0, s0, i0, v1, s1, i1):
    """Of two (value, score, expert) the one with the larger value, then the lower expert."""
    first = (v0 > v1) | ((v0 == v1) & (i0 < i1))
    return tl.where(first, v0, v1), tl.where(first, s0, s1), tl.where(first, i0, i1)


@triton.jit
def _choose_rows(logits, bias, image, image_bias, slot, chosen, experts, weights, first, T,
                 scaling, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
                 SPLITS: tl.constexpr, ROWS: tl.constexpr, HASHED: tl.constexpr,
                 IMAGES: tl.constexpr, SOFTMAX: tl.constexpr):  # fmt: skip
    """Experts and weights of ROWS rows, from all parts of their logits; gives the experts."""
    row = first + tl.arange(0, ROWS)
    real = row < T
    column = tl.arange(0, EP)
    mask = real[:, None] & (column < E)[None, :]
    at = logits + row[:, None].to(tl.int64) * E + column[None, :]
    total = tl.zeros((ROWS, EP), tl.float32)
    for split in tl.static_range(SPLITS):
        # written by other programs of this launch, perhaps: past the first-level cache
        total += tl.load(at + split * T * E, mask=mask, other=0.0, cache_modifier=".cg")
    if SOFTMAX:
        total = tl.where(mask, total, -1e30)
        shifted = tl.exp(total - tl.max(total, axis=1)[:, None])
        scores = shifted / tl.sum(shifted, axis=1)[:, None]
    else:
        scores = tl.where(mask, _score(total), 0.0)
    place = tl.arange(0, KP)[None, :]
    taken = tl.zeros((ROWS, KP), tl.float32)
    if HASHED:
        for i in tl.static_range(K):
            best = tl.sum(tl.where(place == i, chosen, 0), axis=1)
            score = tl.sum(tl.where(column[None, :] == best[:, None], scores, 0.0), axis=1)
            taken = tl.where(place == i, score[:, None], taken)
    else:
        moved = total if SOFTMAX else scores
        if not SOFTMAX:
            moved += tl.load(bias + column, mask=column < E, other=0.0)[None, :]
        if IMAGES:
            other = scores + tl.load(image_bias + column, mask=column < E, other=0.0)[None, :]
            is_image = tl.load(image + row, mask=real, other=0) != 0
            moved = tl.where(is_image[:, None], other, moved)
        moved = tl.where((column < E)[None, :], moved, float("-inf"))
        number = tl.broadcast_to(column[None, :], (ROWS, EP))
        for i in tl.static_range(K):
            _, score, best = tl.reduce((moved, scores, number), 1, _better)
            moved = tl.where(number == best[:, None], float("-inf"), moved)
            chosen = tl.where(place == i, best[:, None], chosen)
            taken = tl.where(place == i, score[:, None], taken)
    weight = tl.div_rn(taken, tl.broadcast_to(tl.sum(taken, axis=1)[:, None] + 1e-20, (ROWS, KP)))
    live = (slot != 0)[:, None]
    out = row[:, None] * K + place
    inside = real[:, None] & (place < K)
    chosen = tl.where(live, chosen, -1)
    tl.store(experts + out, chosen, mask=inside)
    tl.store(weights + out, tl.where(live, weight * scaling, 0.0), mask=inside)
    return chosen


@triton.jit
def _is_last(counter, programs):
    """Whether all other programs of the launch have been here; resets the counter if so.

    Their writes before this call can be read afterwards.
    """
    tl.debug_barrier()  # the writes of all threads come before the one that counts
    last = tl.atomic_add(counter, 1) == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit(do_not_specialize=["T", "most"])
def _router_kernel(x, gate, logits, counter, bias, image, image_bias, table, ids, seq, slots,
                   experts, weights, order, tiles, num_tiles, scratch, T, most, scaling,
                   E: tl.constexpr, D: tl.constexpr, EP: tl.constexpr, K: tl.constexpr,
                   KP: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
                   BK: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr,
                   HASHED: tl.constexpr, IMAGES: tl.constexpr, SOFTMAX: tl.constexpr,
                   WHOLE: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Parts of the logits; WHOLE (up to ROWS rows): the last program does all the rest."""
    if WHOLE:  # read by all, since the last one would have to wait for it
        slot, chosen = _given(ids, seq, slots, table, 0, T, K, KP, ROWS, HASHED)
    _partial_logits(x, gate, logits, tl.program_id(1) * BT, tl.program_id(0) * BE,
                    tl.program_id(2), T, E, D, SPLITS, BT, BE, BK, OVERLAP)  # fmt: skip
    if WHOLE:  # noqa: SIM102 - one of the two is known to the compiler
        if _is_last(counter, tl.num_programs(0) * tl.num_programs(2)):
            chosen = _choose_rows(logits, bias, image, image_bias, slot, chosen, experts, weights,
                                  0, T, scaling, E, EP, K, KP, SPLITS, ROWS, HASHED, IMAGES,
                                  SOFTMAX)  # fmt: skip
            _group_few(chosen, order, tiles, num_tiles, T, most, E, K, TILE)


@triton.jit(do_not_specialize=["T", "most"])
def _choose_kernel(logits, counter, bias, image, image_bias, table, ids, seq, slots, experts,
                   weights, order, tiles, num_tiles, scratch, T, most, scaling, E: tl.constexpr,
                   EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SPLITS: tl.constexpr,
                   ROWS: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr,
                   HASHED: tl.constexpr, IMAGES: tl.constexpr, SOFTMAX: tl.constexpr,
                   GROUPED: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Choose for ROWS rows; GROUPED: the last program sorts the pairs."""
    first = tl.program_id(0) * ROWS
    slot, chosen = _given(ids, seq, slots, table, first, T, K, KP, ROWS, HASHED)
    # In this order: engine.kernels.paging reads its tables before it waits itself.
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    _choose_rows(logits, bias, image, image_bias, slot, chosen, experts, weights, first, T,
                 scaling, E, EP, K, KP, SPLITS, ROWS, HASHED, IMAGES, SOFTMAX)  # fmt: skip
    if GROUPED:  # noqa: SIM102
        if _is_last(counter, tl.num_programs(0)):
            _group(experts, order, tiles, num_tiles, scratch, T * K, most, E, PAIRS, TILE)


# ---------------------------------------------------------------- launch

#: Most rows that the program which ends last chooses for; of more each program chooses for some.
_ROWS = 8
#: So many of a decode step, or of a prompt.
_APART = (1, 8)
#: Up to so many rows kernels overlap.
OVERLAP_ROWS = 32


def _product_shape(rows: int) -> tuple[int, int, int, int]:
    """Rows and experts of a program of the logits, its columns per step, parts of the columns."""
    if rows <= DECODE_ROWS:
        return max(16, triton.next_power_of_2(rows)), 16, 256, 8
    return 64, 64, 64, 1


def route_triton(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    rows: Rows,
    *,
    k: int,
    scaling: float,
    image: Tensor | None = None,
    image_bias: Tensor | None = None,
    scoring: Scoring = "sqrtsoftplus",
) -> Routing:
    """As `route_torch`: one launch up to eight rows, two up to DECODE_ROWS, else five.

    Raises:
        RuntimeError: the first call on a device is under capture.
    """
    _check_choice(bias, table, scoring)
    count, (num_experts, d), device = len(x), gate.shape, x.device
    most, pairs = most_tiles(count, k, num_experts), count * k
    tile_rows, tile_experts, step, splits = _product_shape(count)
    decode, whole = count <= DECODE_ROWS, count <= _ROWS
    padded = triton.next_power_of_2(pairs) if decode else 1
    sizes = pairs, pairs, 3 * most, 1, padded
    experts, order, tiles, num_tiles, scratch = ints(device, *sizes)
    weights = torch.empty(count, k, dtype=torch.float32, device=device)
    logits = torch.empty(splits, count, num_experts, dtype=torch.float32, device=device)
    x = x.contiguous()
    grid = (
        triton.cdiv(num_experts, tile_experts),
        triton.cdiv(count, tile_rows),
        splits,
    )
    # What a layer lacks is not read: any pointer will do.
    choice = (
        x if bias is None else bias,
        x if image is None else image.view(torch.uint8),
        x if image_bias is None else image_bias,
        x if table is None else table,
        rows.ids,
        rows.seq,
        rows.slots,
        experts,
        weights,
        order,
        tiles,
        num_tiles,
        scratch,
    )
    constants = {
        "E": num_experts,
        "EP": triton.next_power_of_2(num_experts),
        "K": k,
        "KP": triton.next_power_of_2(k),
        "SPLITS": splits,
        "ROWS": triton.next_power_of_2(count) if whole else _APART[not decode],
        "PAIRS": padded,
        "TILE": tile_pairs(count),
        "HASHED": table is not None,
        "IMAGES": image is not None and image_bias is not None and bias is not None,
        "SOFTMAX": scoring == "softmax",
        **overlapping(device, count, OVERLAP_ROWS),
    }
    counter = counters("route", 1, device)
    _router_kernel[grid](
        x, gate, logits, counter, *choice, count, most, scaling,
        D=d, BT=tile_rows, BE=tile_experts, BK=step, WHOLE=whole,
        num_warps=8 if whole and count > 1 else 4, **constants,
    )  # fmt: skip
    if not whole:
        _choose_kernel[(triton.cdiv(count, _APART[not decode]),)](
            logits, counter, *choice, count, most, scaling, GROUPED=decode, num_warps=4, **constants
        )
    experts = experts.view(count, k)
    if not decode:
        count_groups(experts, num_experts, order, tiles, num_tiles, tile_pairs(count))
    return Routing(experts, weights, order, tiles.view(most, 3), num_tiles)
