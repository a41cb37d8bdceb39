"""The end of a speculative step: how far each draft agrees, and what the next step begins with.

A sequence's pass had a drawn token x and its draft as rows. Each row drew the token that plain
decoding would draw there; the draft is taken as far as it agrees with those. One launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.feed import UNUSABLE
from engine.kernels.triton_compat import tl, triton

#: Ids that may end a sequence inside a block; a request with more of them takes single tokens.
MOST_STOPS = 8
#: Stands for no id in a list of stops.
NO_STOP = -1

# ---------------------------------------------------------------- torch


def accept_torch(
    drafted: Tensor,
    drawn: Tensor,
    usable: Tensor,
    control: Tensor,
    left: Tensor,
    ids: Tensor,
    positions: Tensor,
    index: Tensor,
    results: Tensor,
) -> Tensor:
    """Count what each sequence gets, and hand the last of it on.

    A token that stops its sequence is its last. One that cannot be drawn is an error where it is the
    first; else the step ends before it, and the next one begins there.

    Args:
        drafted: int64 [B, n].
        drawn: int64 [B, n + 1]: the tokens drawn after x, after the first drafted one, and so on.
        usable: bool [B, n + 1], whether they count.
        control: int64 [B, 2 + M]: most tokens each may get in a step, 0 for rows that pad; the first
            position that its blocks do not cover; then ids that end it, NO_STOP elsewhere.
        left: int64 [B], tokens each may still get; lowered by the count, 0 after one that ends it.
        ids: int64 [B], written: the last token of those that get one, 0 where it does not count.
        positions: int32 [B], advanced by the count.
        index: int32 [B], output index, advanced by the count.
        results: int64 [N >= B, n + 2], written: the count, then the drawn tokens, or UNUSABLE.

    Returns:
        counts int32 [B].
    """
    size = drafted.shape[1]
    stopped = (drawn[:, :, None] == control[:, None, 2:]).any(-1) & usable
    agrees = (drafted == drawn[:, :-1]) & usable[:, :-1] & ~stopped[:, :-1]
    accepted = agrees.int().cumprod(1).sum(1)
    next_counts = usable.gather(1, accepted[:, None])[:, 0]
    counts = torch.where(next_counts | (accepted == 0), accepted + 1, accepted)
    room = torch.minimum(torch.minimum(control[:, 0], left), control[:, 1] - positions)
    counts = torch.minimum(counts, room).clamp(min=0).int()
    tokens = torch.where(usable, drawn, UNUSABLE)
    results[: len(ids), 0] = counts
    results[: len(ids), 1 : size + 2] = tokens
    place = (counts - 1).clamp(min=0).long()[:, None]
    last = tokens.gather(1, place)[:, 0]
    ended = stopped.gather(1, place)[:, 0] & (counts > 0)
    left.copy_(torch.where(ended, 0, left - counts))
    ids.copy_(torch.where(counts > 0, last.clamp(min=0), ids))
    positions.add_(counts)
    index.add_(counts)
    return counts


# ---------------------------------------------------------------- triton


@triton.jit(do_not_specialize=["count"])
def _accept(
    drafted,
    drawn,
    usable,
    control,
    left,
    ids,
    positions,
    index,
    results,
    counts,
    count,
    SIZE: tl.constexpr,
    STOPS: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    NOTHING: tl.constexpr,
):
    """Program i: sequences i * ROWS and after."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, PLACES)[None, :]
    real = row < count
    inside = real[:, None] & (place <= SIZE)
    own = row[:, None] * (SIZE + 1) + place
    token = tl.load(drawn + own, mask=inside, other=-2)
    good = tl.load(usable + own, mask=inside, other=0) != 0
    guess = tl.load(
        drafted + row[:, None] * SIZE + place, mask=real[:, None] & (place < SIZE), other=-3
    )
    stopped = token == -4
    for number in range(STOPS):
        stop = tl.load(control + row * (STOPS + 2) + 2 + number, mask=real, other=-5)
        stopped = stopped | (token == stop[:, None])
    stopped = stopped & good
    agrees = (guess == token) & good & (stopped == 0)
    # Places before the first disagreement; the last place has no guess and disagrees.
    accepted = tl.sum((tl.cumsum((~agrees).to(tl.int32), 1) == 0).to(tl.int32), 1)
    good_after = tl.sum(tl.where(place == accepted[:, None], good.to(tl.int32), 0), 1)
    found = accepted + tl.where((good_after > 0) | (accepted == 0), 1, 0)
    position = tl.load(positions + row, mask=real, other=0)
    limit = tl.load(control + row * (STOPS + 2), mask=real, other=0)
    more = tl.load(left + row, mask=real, other=0)
    cover = tl.load(control + row * (STOPS + 2) + 1, mask=real, other=0)
    limit = tl.maximum(tl.minimum(tl.minimum(limit, more), cover - position), 0)
    found = tl.minimum(found, limit.to(tl.int32))
    is_last = place == found[:, None] - 1
    ended = tl.sum(tl.where(is_last, stopped.to(tl.int32), 0), 1) > 0
    tl.store(left + row, tl.where(ended, 0, more - found), mask=real)
    token = tl.where(good, token, NOTHING)
    tl.store(counts + row, found, mask=real)
    tl.store(results + row * (SIZE + 2), found.to(tl.int64), mask=real)
    tl.store(results + row[:, None] * (SIZE + 2) + 1 + place, token, mask=inside)
    last = tl.sum(tl.where(is_last, token, 0), 1)
    tl.store(ids + row, tl.maximum(last, 0), mask=real & (found > 0))
    tl.store(positions + row, position + found, mask=real)
    step = tl.load(index + row, mask=real, other=0)
    tl.store(index + row, step + found, mask=real)


def accept_triton(
    drafted: Tensor,
    drawn: Tensor,
    usable: Tensor,
    control: Tensor,
    left: Tensor,
    ids: Tensor,
    positions: Tensor,
    index: Tensor,
    results: Tensor,
) -> Tensor:
    """Run accept_torch as one kernel."""
    count, size = drafted.shape
    counts = torch.empty_like(index)
    _accept[(triton.cdiv(count, 16),)](
        drafted,
        drawn,
        usable,
        control,
        left,
        ids,
        positions,
        index,
        results,
        counts,
        count,
        SIZE=size,
        STOPS=control.shape[1] - 2,
        ROWS=16,
        PLACES=triton.next_power_of_2(size + 1),
        NOTHING=UNUSABLE,
        num_warps=1,
    )
    return counts
