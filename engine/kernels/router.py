"""Which experts a row goes to, with what weight, and which rows each expert gets (model.md 2.7).

scores = sqrt(softplus(x Wg^T)) in float32. Learned layers take the k best of scores + bias, ties to
the lowest expert; hash layers read them from a table by token id. The weights are the chosen
scores, normalised, times the scaling factor; a bias moves the choice only.

The T * k (row, choice) *pairs* are numbered t * k + j. Sorted by expert they are cut into *tiles*
of pairs of one expert, which is what a grouped product works on. Nothing of this is known to the
host: it knows only how many tiles there can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.rows import Rows

Scoring = Literal["sqrtsoftplus", "softmax"]

#: Most rows that take the kernels bound by the reading of weights.
DECODE_ROWS = 64
#: Pairs of a tile, up to DECODE_ROWS rows and beyond.
DECODE_TILE = 8
PREFILL_TILE = 128


def tile_pairs(rows: int) -> int:
    """Pairs of a tile in a pass of `rows` rows."""
    return DECODE_TILE if rows <= DECODE_ROWS else PREFILL_TILE


def most_tiles(rows: int, k: int, experts: int) -> int:
    """Most tiles a pass can have: each expert's last one may be short."""
    pairs = rows * k
    return min(pairs, min(experts, pairs) + pairs // tile_pairs(rows))


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


def group_torch(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert and cut them into tiles.

    Args:
        experts: int32 [T, k], -1 for a padding row.
        num_experts: experts there are; every id is below.

    Returns:
        `order`, `tiles` and `num_tiles` of `Routing`.
    """
    rows, k = experts.shape
    size, device = tile_pairs(rows), experts.device
    # Padding sorts last, and is counted in a place of its own that is then cut off.
    keys = torch.where(experts < 0, num_experts, experts).flatten().long()
    order = keys.sort(stable=True).indices.to(torch.int32)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts = counts.scatter_add(0, keys, torch.ones_like(keys))[:num_experts]
    first = counts.cumsum(0) - counts
    tiles = (counts + size - 1) // size
    ends = tiles.cumsum(0)
    index = torch.arange(most_tiles(rows, k, num_experts), device=device)
    expert = torch.searchsorted(ends, index, right=True)
    used = expert < num_experts
    expert = expert.clamp(max=num_experts - 1)
    offset = (index - (ends - tiles)[expert]) * size
    fields = expert, first[expert] + offset, (counts[expert] - offset).clamp(max=size)
    unused = (-1, 0, 0)
    table = torch.stack([torch.where(used, f, u) for f, u in zip(fields, unused, strict=True)], -1)
    return order, table.to(torch.int32), ends[-1:].to(torch.int32)


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
