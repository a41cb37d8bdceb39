"""The end of a decode step: what was drawn becomes the next step's input, on the device.

One launch, so that a step can follow another before the host has seen a token. Results go to a ring
of two rows, so that one step's can be read while the next one runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.overlap import await_previous, overlapping
from engine.kernels.triton_compat import tl, triton

#: What stands for a token where nothing could be drawn.
UNUSABLE = -1
#: Rows that one program takes; more are taken by a wider one.
MOST_ROWS = 64

# ---------------------------------------------------------------- torch


def feed_torch(
    drawn: Tensor,
    usable: Tensor,
    slots: Tensor,
    ids: Tensor,
    positions: Tensor,
    index: Tensor,
    results: Tensor,
    half: Tensor,
) -> None:
    """Hand the drawn tokens on.

    Args:
        drawn: int64 [B], token of each row.
        usable: bool [B], whether it counts.
        slots: int32 [B]; 0 marks a padding row, which stays where it is.
        ids: int64 [B], written: the token, 0 for rows that pad or have none.
        positions: int32 [B], advanced by one.
        index: int32 [B], output index, advanced by one.
        results: int64 [2, N >= B], written in the row that `half` names: the token, or UNUSABLE.
        half: int64 [1], 0 or 1; turned over.
    """
    count = drawn.shape[0]
    live = slots > 0
    results[:, :count].index_copy_(0, half, torch.where(usable, drawn, UNUSABLE)[None])
    ids.copy_(torch.where(live & usable, drawn, 0))
    positions.add_(live)
    index.add_(live)
    half.bitwise_xor_(1)


# ---------------------------------------------------------------- triton


@triton.jit(do_not_specialize=["count", "stride"])
def _feed(
    drawn,
    usable,
    slots,
    ids,
    positions,
    index,
    results,
    half,
    count,
    stride,
    ROWS: tl.constexpr,
    NOTHING: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """All rows in one program, so that turning `half` over is not a race."""
    await_previous(OVERLAP)
    row = tl.arange(0, ROWS)
    real = row < count
    token = tl.load(drawn + row, mask=real, other=0)
    good = tl.load(usable + row, mask=real, other=0) != 0
    live = tl.load(slots + row, mask=real, other=0) > 0
    side = tl.load(half)
    tl.store(results + side * stride + row, tl.where(good, token, NOTHING), mask=real)
    tl.store(ids + row, tl.where(good & live, token, 0), mask=real)
    position = tl.load(positions + row, mask=real, other=0)
    tl.store(positions + row, position + live.to(tl.int32), mask=real)
    step = tl.load(index + row, mask=real, other=0)
    tl.store(index + row, step + live.to(tl.int32), mask=real)
    tl.store(half, side ^ 1)


def feed_triton(
    drawn: Tensor,
    usable: Tensor,
    slots: Tensor,
    ids: Tensor,
    positions: Tensor,
    index: Tensor,
    results: Tensor,
    half: Tensor,
) -> None:
    """Run feed_torch as one kernel."""
    count = drawn.shape[0]
    _feed[(1,)](
        drawn,
        usable,
        slots,
        ids,
        positions,
        index,
        results,
        half,
        count,
        results.stride(0),
        ROWS=max(MOST_ROWS, triton.next_power_of_2(count)),  # so one compilation serves all
        NOTHING=UNUSABLE,
        num_warps=1,
        **overlapping(drawn.device, count),
    )
