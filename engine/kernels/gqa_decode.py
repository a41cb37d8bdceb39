"""Grouped-query attention of one row a sequence, in one kernel (twin: engine.kernels.gqa.decode_gqa_torch).

Norms and turns queries and the new key, writes key and value into their block, and attends. A
program takes the query heads of one key head, a share of the positions before the row's own, and all
columns of values or a piece of them; the first share takes the row's own position too, which needs no
memory. The program of a head and piece that finishes last adds the shares up. What lies in the blocks
was written by earlier steps, so a share's first tile is loaded before the kernel that makes this row's
projections has ended.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.counters import counters
from engine.kernels.gemv_kernel import _with
from engine.kernels.gqa import OVERLAP_ROWS
from engine.kernels.overlap import await_previous, begin_next, overlapping
from engine.kernels.rows import Rows
from engine.kernels.triton_compat import cast, dot, tl, triton

#: Positions of a tile, warps and stages: of few pairs of row and key head, for which one tile is
#: often all there is, and of more.
_FEW_PAIRS, _FEW, _MANY = 64, (256, 8, 1), (64, 4, 2)
#: Pieces of the values' columns, where that leaves room for as many shares, and fewest columns of one.
#: Keys are read by every piece, but each has less to add up. Steps of one row of 8 layers of
#: Qwen3-30B's shape take 498, 507, 527 and 598 us so at 128, 300, 3000 and 12000 positions (in one
#: piece 502, 520, 539 and 634); of four rows 954, 957, 1083 and 1425 (973, 986, 1051 and 1274).
_PIECES, _LEAST_WIDTH = 2, 32
#: Shares that are asked for at once when they are added up.
_AT_ONCE = tl.constexpr(4)
#: Most shares of a sequence's positions. A second share costs a step of one row 1.1 us a layer, which
#: fewer shares or longer ones do not save.
_MOST_SPLITS = 16
#: Programs that are worth having: two on each of an H200's processors.
_PROGRAMS = 264
#: Pairs of row and key head that may wait for shares.
_MOST_PAIRS = 4096


@triton.jit
def _with_other(at, mask, D: tl.constexpr):
    """Columns of what begins at `at`, and beside each the one that it turns with: c +- D / 2."""
    column = tl.arange(0, D)[None, :]
    x = tl.load(at + column, mask=mask, other=0.0)
    return x.to(tl.float32), tl.load(at + (column + D // 2) % D, mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def _turned(x, y, norm, other_norm, cos, sin, eps, D: tl.constexpr, DTYPE: tl.constexpr):
    """Norm and turn heads [N, D], with their other columns y: float32 values of DTYPE."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x = cast(x * scale * norm, DTYPE).to(tl.float32)
    y = cast(y * scale * other_norm, DTYPE).to(tl.float32)
    return x * cos + tl.where(tl.arange(0, D)[None, :] < D // 2, -y, y) * sin


@triton.jit
def _line_offsets(table, line, seen, head, BLOCK_SIZE: tl.constexpr, KEY_HEADS: tl.constexpr,
                  D: tl.constexpr):  # fmt: skip
    """Where keys of positions lie: [TILE, 1]."""
    block = tl.load(table + line // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    return ((block * BLOCK_SIZE + line % BLOCK_SIZE) * KEY_HEADS + head)[:, None] * D


@triton.jit
def _attended(q, k, v, seen, top, total, acc, scale):
    """An online softmax goes on over a tile of positions; without one that is seen, nothing changes."""
    start = tl.zeros((q.shape[0], k.shape[0]), tl.float32)
    scores = dot(q, tl.trans(k).to(q.dtype), start) * scale
    scores = tl.where(seen[None, :], scores, -float("inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    against = tl.where(new == -float("inf"), 0.0, new)
    weight = tl.exp2(scores - against[:, None])
    shrink = tl.exp2(top - against)
    total = total * shrink + tl.sum(weight, 1)
    acc = dot(cast(weight, v.dtype), v, acc * shrink[:, None])
    return new, total, acc


@triton.jit
def _added_up(part_o, part_m, part_s, first, live, member, column, WIDTH: tl.constexpr,
              GROUP: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Attention [PADDED, WIDTH] from the shares of `live` programs, _AT_ONCE of them asked for at once."""
    top = tl.full((PADDED,), -float("inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    acc = tl.zeros((PADDED, WIDTH), tl.float32)
    for begin in range(0, live, _AT_ONCE):
        tops, totals, parts = (), (), ()
        for further in tl.static_range(_AT_ONCE):
            split = begin + further
            inside = (member < GROUP) & (tl.zeros_like(member) + split < live)
            at = first + split * GROUP + member
            # As other processors wrote them: not from this one's level-1 cache.
            tops = _with(tops, tl.load(part_m + at, mask=inside, other=-float("inf"),
                                       cache_modifier=".cg"))  # fmt: skip
            totals = _with(
                totals, tl.load(part_s + at, mask=inside, other=0.0, cache_modifier=".cg")
            )
            o = tl.load(part_o + at[:, None] * WIDTH + column[None, :], mask=inside[:, None],
                        other=0.0, cache_modifier=".cg")  # fmt: skip
            parts = _with(parts, o)
        new = top
        for further in tl.static_range(_AT_ONCE):
            new = tl.maximum(new, tops[further])
        against = tl.where(new == -float("inf"), 0.0, new)  # of members there are none of
        shrink = tl.exp2(top - against)
        total, acc = total * shrink, acc * shrink[:, None]
        for further in tl.static_range(_AT_ONCE):
            weight = tl.exp2(tops[further] - against)
            total += weight * totals[further]
            acc += weight[:, None] * parts[further]
        top = new
    return acc / tl.where(member < GROUP, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["splits"])
def _decode_kernel(
    qkv, q_norm, k_norm, eps, rope, positions, seq, tables, keys, values, out, part_o, part_m,
    part_s, counters, stride, table_width, scale, splits, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, PADDED: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (row, key head and WIDTH columns of its values, split); `scale` is in powers of two."""
    row, split = tl.program_id(0), tl.program_id(2)
    head, piece = tl.program_id(1) // (D // WIDTH), tl.program_id(1) % (D // WIDTH)
    position = tl.load(positions + row)
    table = tables + tl.load(seq + row) * table_width
    column, member, v_column = tl.arange(0, D), tl.arange(0, PADDED), tl.arange(0, WIDTH)
    share = tl.maximum(tl.cdiv(tl.cdiv(position, TILE), splits), 1) * TILE
    live = tl.maximum(tl.cdiv(position, share), 1)
    if split >= live:
        return
    values += piece * WIDTH
    begin = split * share
    end = tl.minimum(begin + share, position)
    line = begin + tl.arange(0, TILE)
    at = _line_offsets(table, line, line < end, head, BLOCK_SIZE, KEY_HEADS, D)
    early_keys = tl.load(keys + at + column[None, :], mask=(line < end)[:, None], other=0.0)
    early_values = tl.load(values + at + v_column[None, :], mask=(line < end)[:, None], other=0.0)
    # What no kernel writes is loaded before the wait, what is waited for all at once behind it.
    zero = tl.zeros((1, 1), tl.int32)
    norm, other_norm = _with_other(q_norm + zero, zero == 0, D)
    key_norm, other_key_norm = _with_other(k_norm + zero, zero == 0, D)
    turn = rope + position.to(tl.int64) * D
    cos = tl.load(turn + column % (D // 2))[None, :]
    sin = tl.load(turn + D // 2 + column % (D // 2))[None, :]
    own_block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    dtype: tl.constexpr = qkv.dtype.element_ty
    stored: tl.constexpr = keys.dtype.element_ty
    own = qkv + row.to(tl.int64) * stride
    mask = (member < GROUP)[:, None]
    x, y = _with_other(own + (head * GROUP + member)[:, None] * D, mask, D)
    is_first = (zero + split) == 0
    key, other_key = _with_other(own + (KEY_HEADS * GROUP + head) * D + zero, is_first, D)
    v_at = own + (KEY_HEADS * (GROUP + 1) + head) * D + piece * WIDTH + v_column
    new_value = tl.load(v_at, mask=(v_column * 0 + split) == 0, other=0.0).to(tl.float32)
    q = cast(_turned(x, y, norm, other_norm, cos, sin, eps, D, dtype), dtype)
    top = tl.full((PADDED,), -float("inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    acc = tl.zeros((PADDED, WIDTH), tl.float32)
    if split == 0:
        k = _turned(key, other_key, key_norm, other_key_norm, cos, sin, eps, D, dtype)
        k, v = cast(k, stored), cast(new_value, stored)
        place = ((own_block * BLOCK_SIZE + position % BLOCK_SIZE) * KEY_HEADS + head) * D
        tl.store(keys + place + column[None, :], k, mask=(zero + piece) == 0)
        tl.store(values + place + v_column, v)
        top = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
        total = tl.full((PADDED,), 1.0, tl.float32)
        acc += v.to(tl.float32)[None, :]
    top, total, acc = _attended(q, early_keys, early_values, line < end, top, total, acc, scale)
    for first in range(begin + TILE, end, TILE):
        line = first + tl.arange(0, TILE)
        seen = line < end
        at = _line_offsets(table, line, seen, head, BLOCK_SIZE, KEY_HEADS, D)
        keys_here = tl.load(keys + at + column[None, :], mask=seen[:, None], other=0.0)
        values_here = tl.load(values + at + v_column[None, :], mask=seen[:, None], other=0.0)
        top, total, acc = _attended(q, keys_here, values_here, seen, top, total, acc, scale)
    to = (row * KEY_HEADS + head).to(tl.int64) * GROUP + member
    to = out + to[:, None] * D + piece * WIDTH + v_column[None, :]
    if live == 1:
        tl.store(to, cast(acc / total[:, None], out.dtype.element_ty), mask=mask)
        return
    pair = row * tl.num_programs(1) + tl.program_id(1)
    first = (pair * splits).to(tl.int64) * GROUP
    at = first + split * GROUP + member
    tl.store(part_o + at[:, None] * WIDTH + v_column[None, :], acc, mask=mask)
    tl.store(part_m + at, top, mask=member < GROUP)
    tl.store(part_s + at, total, mask=member < GROUP)
    # All threads' stores come before the count that says they are there.
    tl.debug_barrier()
    done = tl.atomic_add(counters + pair, 1, sem="acq_rel")
    if done == live - 1:
        mixed = _added_up(part_o, part_m, part_s, first, live, member, v_column, WIDTH, GROUP,
                          PADDED)  # fmt: skip
        tl.store(to, cast(mixed, out.dtype.element_ty), mask=mask)
        tl.store(counters + pair, 0)


def decode_gqa_triton(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    rope: Tensor,
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
) -> Tensor:
    """Run decode_gqa_torch as one kernel."""
    key_heads, dim = keys.shape[2:]
    batch, group, device = len(qkv), heads // key_heads, qkv.device
    few = batch * key_heads <= _FEW_PAIRS and qkv.element_size() == 2
    tile, warps, stages = _FEW if few else _MANY
    roomy = _PROGRAMS // (batch * key_heads * _PIECES) >= _MOST_SPLITS
    pieces = _PIECES if few and roomy and dim >= _PIECES * _LEAST_WIDTH else 1
    pairs = batch * key_heads * pieces
    splits = _splits(pairs, rows, tile)
    count = pairs * group * splits if splits > 1 else 1
    part_o = torch.empty((count, dim // pieces), dtype=torch.float32, device=device)
    part_m, part_s = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(2))
    out = torch.empty((batch, heads * dim), dtype=qkv.dtype, device=device)
    _decode_kernel[(batch, key_heads * pieces, splits)](
        qkv, q_norm, k_norm, eps, rope, rows.positions, rows.seq, rows.tables, keys, values, out,
        part_o, part_m, part_s, counters("decode_gqa", _MOST_PAIRS, device), qkv.stride(0), rows.tables.shape[1],
        dim**-0.5 * 1.4426950408889634, splits, BLOCK_SIZE=rows.block_size, GROUP=group,
        PADDED=max(16, triton.next_power_of_2(group)), KEY_HEADS=key_heads, D=dim,
        WIDTH=dim // pieces, TILE=tile, num_warps=warps, num_stages=stages,
        **overlapping(device, batch, OVERLAP_ROWS),
    )  # fmt: skip
    return out


def _splits(pairs: int, rows: Rows, tile: int) -> int:
    """Shares of the positions, so that a small batch still fills the GPU; decided by shapes."""
    tiles = -(-rows.max_end // tile)
    return max(1, min(tiles, _PROGRAMS // pairs, _MOST_SPLITS))
