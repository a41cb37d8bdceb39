"""Which rows each expert gets: (row, choice) pairs sorted by expert and cut into tiles (model.md 2.7).

Few rows are grouped by one program, which may be the last one of the launch that chose: of up to
eight, every pair counts those before it (`_group_few`); of a decode step, keys are sorted (`_group`).

Pairs of more rows are counted, in chunks. One launch counts the experts of each chunk, one sums those
counts over the chunks before, and in the third every pair knows its place: after all pairs of lower
experts, those of its own in earlier chunks and those before it in its chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.triton_compat import tl, triton

#: Most rows that take the kernels bound by the reading of weights.
DECODE_ROWS = 64
#: Most rows whose experts are streamed where weights are narrow: a window, the tail of a prompt.
STREAM_ROWS = 128
#: Most rows of which an expert gets so few that wide tiles would stay empty.
SHORT_ROWS = 1024
#: Pairs of a tile: up to STREAM_ROWS rows, up to SHORT_ROWS and beyond.
DECODE_TILE = 8
SHORT_TILE = 64
LONG_TILE = 128
#: Pairs of a chunk; columns of a program that sums, and chunks that it takes at a time.
CHUNK = 256
_EXPERTS, _CHUNKS = 32, 64


def tile_pairs(rows: int) -> int:
    """Pairs of a tile in a pass of `rows` rows."""
    if rows <= STREAM_ROWS:
        return DECODE_TILE
    return SHORT_TILE if rows <= SHORT_ROWS else LONG_TILE


def most_tiles(rows: int, k: int, experts: int) -> int:
    """Most tiles a pass can have: each expert's last one may be short."""
    pairs = rows * k
    return min(pairs, min(experts, pairs) + pairs // tile_pairs(rows))


# ---------------------------------------------------------------- torch


def group_torch(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert and cut them into tiles.

    Args:
        experts: int32 [T, k], -1 for a padding row.
        num_experts: experts there are; every id is below.

    Returns:
        `order`, `tiles` and `num_tiles` of engine.kernels.router.Routing.
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


# ---------------------------------------------------------------- Triton, few rows


@triton.jit
def _store_tiles(tiles, num_tiles, opens, tile, expert, begin, pairs, index, most):
    """Store the tiles that `opens` marks, and that there are no others."""
    used = tl.sum(opens.to(tl.int32), 0)
    tl.store(num_tiles, used)
    unused = (index >= used) & (index < most)
    tl.store(tiles + index * 3, -1, mask=unused)
    tl.store(tiles + index * 3 + 1, 0, mask=unused)
    tl.store(tiles + index * 3 + 2, 0, mask=unused)
    tl.store(tiles + tile * 3, expert, mask=opens)
    tl.store(tiles + tile * 3 + 1, begin, mask=opens)
    tl.store(tiles + tile * 3 + 2, pairs, mask=opens)


@triton.jit
def _group_few(chosen, order, tiles, num_tiles, T, most, E: tl.constexpr, K: tl.constexpr,
               TILE: tl.constexpr):  # fmt: skip
    """Group the experts [ROWS, KP] of up to eight rows: every pair counts those before it."""
    KP: tl.constexpr = chosen.shape[1]
    P: tl.constexpr = chosen.shape[0] * KP
    i = tl.arange(0, P)
    valid = (i % KP < K) & (i // KP < T)
    pair = i // KP * K + i % KP
    expert = tl.reshape(chosen, (P,))
    expert = tl.where(valid, tl.where(expert < 0, E, expert), E + 1)  # padding late, absent last
    key = expert * P + i
    before = key[None, :] < key[:, None]
    same = expert[None, :] == expert[:, None]
    rank = tl.sum(before.to(tl.int32), axis=1)
    among = tl.sum((before & same).to(tl.int32), axis=1)
    fellows = tl.sum(same.to(tl.int32), axis=1)
    opens = (expert < E) & (among % TILE == 0)
    tile = tl.sum((before & opens[None, :]).to(tl.int32), axis=1)
    tl.store(order + rank, pair, mask=valid)
    _store_tiles(tiles, num_tiles, opens, tile, expert, rank, tl.minimum(fellows - among, TILE), i,
                 most)  # fmt: skip


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _group(experts, order, tiles, num_tiles, scratch, pairs, most, E: tl.constexpr,
           PAIRS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Sort pairs and cut tiles, as `group_torch`; one program, at most PAIRS pairs."""
    i = tl.arange(0, PAIRS)
    real = i < pairs
    expert = tl.load(experts + i, mask=real, other=-1, cache_modifier=".cg")
    # Padding, and what is beyond the pairs, sorts last.
    key = tl.sort(tl.where(expert < 0, E, expert) * PAIRS + i)
    tl.store(order + i, key % PAIRS, mask=real)
    tl.store(scratch + i, key)
    tl.debug_barrier()
    own = key // PAIRS
    before = tl.load(scratch + i - 1, mask=i > 0, other=-1, cache_modifier=".cg") // PAIRS
    after = tl.load(scratch + i + 1, mask=i < PAIRS - 1, other=E * PAIRS, cache_modifier=".cg")
    begin = tl.associative_scan(tl.where(before != own, i, 0), 0, _larger)
    last = tl.where(after // PAIRS != own, i, PAIRS)
    end = tl.associative_scan(last, 0, _smaller, reverse=True) + 1
    opens = (own < E) & ((i - begin) % TILE == 0)
    tile = tl.cumsum(opens.to(tl.int32), 0) - 1
    _store_tiles(tiles, num_tiles, opens, tile, own, i, tl.minimum(end - i, TILE), i, most)


@triton.jit(do_not_specialize=["pairs", "most"])
def _group_kernel(experts, order, tiles, num_tiles, scratch, pairs, most, E: tl.constexpr,
                  PAIRS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    _group(experts, order, tiles, num_tiles, scratch, pairs, most, E, PAIRS, TILE)


# ---------------------------------------------------------------- Triton, many rows


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


# ---------------------------------------------------------------- launch


def ints(device: torch.device, *sizes: int) -> list[Tensor]:
    """Uninitialised int32 [size] each, of one allocation.

    All begin at 16 bytes: Triton compiles anew for another alignment.
    """
    padded = [-(-size // 4) * 4 for size in sizes]
    whole = torch.empty(sum(padded), dtype=torch.int32, device=device)
    return [part[:size] for part, size in zip(whole.split(padded), sizes, strict=True)]


def count_groups(
    experts: Tensor, num_experts: int, order: Tensor, tiles: Tensor, num_tiles: Tensor, tile: int
) -> None:
    """Sort pairs of many rows and cut tiles; three launches.

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


def group_triton(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `group_torch`; one launch up to DECODE_ROWS rows, else three."""
    rows, k = experts.shape
    pairs, most = rows * k, most_tiles(rows, k, num_experts)
    padded = triton.next_power_of_2(pairs) if rows <= DECODE_ROWS else 1
    order, tiles, num_tiles, scratch = ints(experts.device, pairs, 3 * most, 1, padded)
    if rows > DECODE_ROWS:
        count_groups(experts.contiguous(), num_experts, order, tiles, num_tiles, tile_pairs(rows))
        return order, tiles.view(most, 3), num_tiles
    _group_kernel[(1,)](
        experts.contiguous(), order, tiles, num_tiles, scratch, pairs, most,
        E=num_experts, PAIRS=padded, TILE=tile_pairs(rows), num_warps=4,
    )  # fmt: skip
    return order, tiles.view(most, 3), num_tiles
