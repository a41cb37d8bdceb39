"""Pairs of many rows sorted by expert, by counting (twin: engine.kernels.router.group_torch).

Pairs are cut into chunks. One launch counts the experts of each chunk, one sums those counts over
the chunks before, and in the third every pair knows its place: after all pairs of lower experts,
those of its own in earlier chunks and those before it in its chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.triton_compat import tl, triton

#: Pairs of a chunk; columns of a program that sums, and chunks that it takes at a time.
CHUNK = 256
_EXPERTS, _CHUNKS = 32, 64


@triton.jit
def _keys(experts, first, pairs, E: tl.constexpr, C: tl.constexpr):
    """Expert of C pairs from `first` on; padding is E, what is beyond the pairs E + 1."""
    i = first + tl.arange(0, C)
    expert = tl.load(experts + i, mask=i < pairs, other=-1)
    return tl.where(i < pairs, tl.where(expert < 0, E, expert), E + 1)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(experts, counts, pairs, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr):
    """Program p: how often each key comes in chunk p, [P, EP]."""
    p = tl.program_id(0)
    found = tl.histogram(_keys(experts, p * C, pairs, E, C), EP)
    tl.store(counts + p * EP + tl.arange(0, EP), found)


@triton.jit(do_not_specialize=["chunks"])
def _sum_kernel(counts, totals, chunks, EP: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr):
    """Program j: counts of BE keys become those of the chunks before; totals [EP]."""
    key = tl.program_id(0) * BE + tl.arange(0, BE)
    total = tl.zeros((BE,), tl.int32)
    for first in range(0, chunks, BP):
        p = first + tl.arange(0, BP)
        at = counts + p[:, None] * EP + key[None, :]
        found = tl.load(at, mask=(p < chunks)[:, None], other=0)
        before = tl.cumsum(found, 0) - found + total[None, :]
        tl.store(at, before, mask=(p < chunks)[:, None])
        total += tl.sum(found, 0)
    tl.store(totals + key, total)


@triton.jit(do_not_specialize=["pairs", "most"])
def _place_kernel(experts, counts, totals, order, tiles, num_tiles, pairs, most, E: tl.constexpr,
                  EP: tl.constexpr, C: tl.constexpr, PART: tl.constexpr,
                  TILE: tl.constexpr):  # fmt: skip
    """Program p places the pairs of chunk p; the last one cuts the tiles."""
    p = tl.program_id(0)
    every = tl.arange(0, EP)
    total = tl.load(totals + every)
    begin = tl.cumsum(total, 0) - total
    if p < tl.num_programs(0) - 1:
        key = _keys(experts, p * C, pairs, E, C)
        i = tl.arange(0, C)
        place = tl.gather(begin, key, 0) + tl.load(counts + p * EP + key)
        for first in range(0, C, PART):  # a matrix of all with all would not fit into registers
            other = _keys(experts, p * C + first, pairs, E, PART)
            before = (first + tl.arange(0, PART))[None, :] < i[:, None]
            place += tl.sum((before & (other[None, :] == key[:, None])).to(tl.int32), 1)
        tl.store(order + place, p * C + i, mask=p * C + i < pairs)
    else:
        own = tl.where(every < E, (total + TILE - 1) // TILE, 0)
        tile = tl.cumsum(own, 0) - own
        used = tl.sum(own, 0)
        tl.store(num_tiles, used)
        for j in range(tl.max(own, 0)):
            at = tiles + (tile + j) * 3
            tl.store(at, every, mask=j < own)
            tl.store(at + 1, begin + j * TILE, mask=j < own)
            tl.store(at + 2, tl.minimum(total - j * TILE, TILE), mask=j < own)
        for first in range(used, most, EP):
            at = tiles + (first + every) * 3
            tl.store(at, -1, mask=first + every < most)
            tl.store(at + 1, 0, mask=first + every < most)
            tl.store(at + 2, 0, mask=first + every < most)


def count_groups(
    experts: Tensor, num_experts: int, order: Tensor, tiles: Tensor, num_tiles: Tensor, tile: int
) -> None:
    """Sort pairs and cut tiles; three launches.

    Args:
        experts: int32 [T, k], contiguous, -1 for a padding row.
        num_experts: experts there are; every id is below.
        order: int32 [T * k], written, and so are the others.
        tiles: int32 [NT, 3] or as many in a row.
        num_tiles: int32 [1].
        tile: most pairs of a tile.
    """
    pairs, most = order.numel(), tiles.numel() // 3
    chunks = triton.cdiv(pairs, CHUNK)
    wide = max(_EXPERTS, triton.next_power_of_2(num_experts + 2))
    counts = torch.empty((chunks + 1) * wide, dtype=torch.int32, device=experts.device)
    totals = counts[chunks * wide :]
    _count_kernel[(chunks,)](
        experts, counts, pairs, E=num_experts, EP=wide, C=CHUNK, num_warps=4
    )  # fmt: skip
    _sum_kernel[(wide // _EXPERTS,)](
        counts, totals, chunks, EP=wide, BE=_EXPERTS, BP=_CHUNKS, num_warps=4
    )
    _place_kernel[(chunks + 1,)](
        experts, counts, totals, order, tiles, num_tiles, pairs, most,
        E=num_experts, EP=wide, C=CHUNK, PART=32, TILE=tile, num_warps=4,
    )  # fmt: skip
