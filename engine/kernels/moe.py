"""Experts: every row through the k it was routed to and the shared one (model.md 2.7).

hidden = silu(min(g, limit)) * clamp(u, +-limit) * routing weight with (g | u) = W13 x, then
y = W2 round(hidden). The caller gives x already rounded; hidden is cast to x's dtype and rounded
in groups of `act_group` here. The shared expert has no weight. Nothing is summed over experts:
the result has one part for each choice of a row and one for the shared expert, and is the same
whatever else is in the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import reference
from engine.kernels.formats import Matrix, dequantise
from engine.kernels.grouping import DECODE_ROWS, STREAM_ROWS
from engine.kernels.moe_decode import can_stream, stream_experts
from engine.kernels.moe_plain import can_take_plain, plain_experts
from engine.kernels.moe_prefill import grouped_experts
from engine.kernels.roundtrip import round_trip_fp8
from engine.kernels.router import Routing, parts_dtype

# ---------------------------------------------------------------- torch


def _expert(
    x: Tensor, w13: Matrix, w2: Matrix, weights: Tensor, limit: float, act_group: int | None
) -> Tensor:
    """Give [T, n, d]: one expert's answer to each row under each of n weights [T, n]."""
    gate_up = F.linear(x.float(), dequantise(w13))[:, None].expand(-1, weights.shape[1], -1)
    hidden = reference.swiglu(gate_up, limit, weights).to(x.dtype)
    if act_group is not None:
        hidden = round_trip_fp8(hidden, act_group)
    return F.linear(hidden.float(), dequantise(w2)).to(parts_dtype(x))


def moe_torch(
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
    """Run the experts that `routing.tiles` names, and the shared one.

    Args:
        x: [T, d], rounded as the weights' format asks for.
        routing: of these rows; `tiles` may name slots of w13 and w2 instead of experts, and may
            leave out pairs, whose `experts` are then -1.
        w13: [N, 2 * I, d], gate rows first; N experts or slots, which may lie apart.
        w2: [N, d, I].
        shared13: [2 * I, d]; None for a pass without the shared expert, whose part is then 0.
        shared2: [d, I], or None.
        limit: swiglu_limit.
        act_group: group of hidden's FP8 rounding, None for none.

    Returns:
        [T, k + 1, d], to be summed in order: a row's choices, then the shared expert; 0 for
        pairs that reach no expert. float32 up to DECODE_ROWS rows, else x's dtype.
    """
    rows, k = routing.experts.shape
    parts = torch.zeros(rows, k + 1, x.shape[-1], dtype=parts_dtype(x), device=x.device)
    # Where each pair's tile says that its weights are; every expert visits every row, since which
    # rows are its own is known to the device alone.
    slot, first, pairs = routing.tiles.long().unbind(-1)
    place = torch.arange(rows * k, device=x.device)
    inside = (place[:, None] >= first) & (place[:, None] < first + pairs)
    by_place = torch.where(inside, slot + 1, 0).sum(-1) - 1
    slots = by_place.scatter(0, routing.order.long(), by_place).view(rows, k)
    for index in range(w13.shape[0]):
        y = _expert(x, w13[index], w2[index], routing.weights, limit, act_group)
        parts[:, :k] = torch.where((slots == index)[:, :, None], y, parts[:, :k])
    if shared13 is not None and shared2 is not None:
        one = torch.ones(rows, 1, device=x.device)
        parts[:, k:] = _expert(x, shared13, shared2, one, limit, act_group)
    return parts


# ---------------------------------------------------------------- Triton


def moe_triton(
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
    """As `moe_torch`, by the kernels for few rows or those for many."""
    given = [w for w in (w13, w2, shared13, shared2) if w is not None]
    run = grouped_experts
    if len(x) <= STREAM_ROWS and can_stream(x, *given):
        run = stream_experts
    elif len(x) <= DECODE_ROWS and can_take_plain(x, act_group, *given):
        run = plain_experts
    return run(x, routing, w13, w2, shared13, shared2, limit=limit, act_group=act_group)
