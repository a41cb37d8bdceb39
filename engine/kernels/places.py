"""Where things lie: rotation tables, and pool rows of a sequence's entries.

Torch side and device side of the two lookups that most kernels make. A *rope table* is float32
[P, 2, R]: cos and sin of position * freq, for positions below P. Pairs are adjacent and lie in the
last 2 * R dimensions (model.md 2.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.rows import Rows
from engine.kernels.triton_compat import tl, triton

# ---------------------------------------------------------------- torch


def rope_table(freqs: Tensor, positions: Tensor) -> Tensor:
    """Rotations as a table.

    Args:
        freqs: float64 [R]; angles are exact to far beyond any context.
        positions: integers [P].

    Returns:
        float32 [P, 2, R], cos and sin.
    """
    angles = torch.outer(positions.to(freqs.dtype), freqs)
    return torch.stack((angles.cos(), angles.sin()), 1).float()


def rotate(x: Tensor, rope: Tensor, positions: Tensor) -> Tensor:
    """Rotate the last 2 * R dimensions of x [T, (heads,) D], in float32, rounded to x's dtype.

    Args:
        x: floating.
        rope: float32 [P, 2, R].
        positions: integers [T], below P.
    """
    pairs = rope.shape[2]
    turns = rope.index_select(0, positions.long())
    cos, sin = turns[:, 0], turns[:, 1]
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    tail = x[..., -2 * pairs :].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., : -2 * pairs], turned.to(x.dtype)), -1)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in float32, rounded to x's dtype; a zero row stays zero."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def completes(rows: Rows, ratio: int) -> Tensor:
    """Whether a row is the last of its group of `ratio` tokens: bool [T]."""
    return (rows.positions + 1) % ratio == 0


def entry_places(rows: Rows, seq: Tensor, entries: Tensor, ratio: int) -> Tensor:
    """Flat pool rows of entries of sequences.

    Args:
        rows: of the pass.
        seq: integers, sequences; broadcasts with `entries`.
        entries: integers, entry indices; beyond the block table the last block's rows come back.
        ratio: tokens per entry.

    Returns:
        int64, block * n + row within the block, n = block_size / ratio.
    """
    per_block = rows.block_size // ratio
    column = (entries // per_block).clamp(0, rows.tables.shape[1] - 1).long()
    return rows.tables[seq.long(), column].long() * per_block + entries % per_block


# ---------------------------------------------------------------- Triton


@triton.jit
def entry_place_device(tables, table_width, seq, entry, PER_BLOCK: tl.constexpr, mask):
    """entry_places of a tile of entries of one sequence: int64; 0 where the mask is false."""
    column = tl.minimum(entry // PER_BLOCK, table_width - 1)
    block = tl.load(tables + seq * table_width + column, mask=mask, other=0).to(tl.int64)
    return tl.where(mask, block * PER_BLOCK + entry % PER_BLOCK, 0)


@triton.jit
def rotate_device(x, rope, positions, PAIRS: tl.constexpr):
    """Tile form of `rotate`: float32 [M, N] whose row m is at positions [M]; N is a power of two."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    pair = tl.arange(0, N // 2) - (N // 2 - PAIRS)
    turned = (pair >= 0)[None, :]
    at = positions.to(tl.int64)[:, None] * (2 * PAIRS) + pair[None, :]
    cos = tl.load(rope + at, mask=turned, other=1.0)
    sin = tl.load(rope + at + PAIRS, mask=turned, other=0.0)
    even, odd = tl.split(tl.reshape(x, (M, N // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (M, N))
