"""Rotary turns (model.md 2.3): the table kernels read, and the rotation itself.

A *table* is float32 [P, 2, R]: cosines, then sines, of every position below P. The last 2 * R
dimensions of a vector are R adjacent pairs (a, b), which become (a c - b s, a s + b c).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.triton_compat import tl, triton

#: Positions whose angles are worked out at a time, in float64.
_CHUNK = 1 << 16


def rope_table(freqs: Tensor, positions: int) -> Tensor:
    """Cosines and sines of every position.

    Args:
        freqs: float64 [R], angle per position; engine.kernels.reference.rope_frequencies.
        positions: how many, from 0.

    Returns:
        float32 [positions, 2, R] on the device of freqs.
    """
    table = torch.empty(positions, 2, len(freqs), dtype=torch.float32, device=freqs.device)
    for first in range(0, positions, _CHUNK):
        last = min(first + _CHUNK, positions)
        at = torch.arange(first, last, dtype=freqs.dtype, device=freqs.device)
        angles = torch.outer(at, freqs)
        table[first:last, 0] = angles.cos()
        table[first:last, 1] = angles.sin()
    return table


def rotate_torch(x: Tensor, rope: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last 2 * R dimensions, in float32 at least.

    Args:
        x: [T, (heads,) D].
        rope: table [P, 2, R].
        positions: int32 [T], each below P.
        inverse: turn back.

    Returns:
        a new tensor of x's shape and dtype.
    """
    pairs = rope.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = rope[positions.long()].to(wide).unbind(1)
    if inverse:
        sin = -sin
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    plain = x.shape[-1] - 2 * pairs
    even, odd = x[..., plain::2].to(wide), x[..., plain + 1 :: 2].to(wide)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :plain], turned.to(x.dtype)), -1)


@triton.jit
def rotate_device(x, rope, positions, R: tl.constexpr, INVERSE: tl.constexpr = False):
    """Rotate a float32 tile [M, N] that is in registers, row m to positions [M]; float32 back.

    N is a power of two, at least 2 * R. INVERSE turns back.
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    column = tl.arange(0, N) - (N - 2 * R)
    turned = (column >= 0)[None, :]
    at = positions.to(tl.int64)[:, None] * (2 * R) + (column // 2)[None, :]
    cos = tl.load(rope + at, mask=turned, other=1.0)
    sin = tl.load(rope + at + R, mask=turned, other=0.0)
    sin = tl.where((column % 2 == 0)[None, :] == INVERSE, sin, -sin)
    partner = tl.reshape(tl.flip(tl.reshape(x, (M, N // 2, 2)), 2), (M, N))
    return x * cos + partner * sin


@triton.jit
def rotate_pairs_device(x, partner, rope, positions, R: tl.constexpr):
    """As rotate_device, where the other number of each pair is there as well, float32 [M, N].

    For tiles of many rows: turns are read several at a time, and nothing moves between threads.
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    pair = tl.arange(0, N // 2) - (N // 2 - R)
    turned = (pair >= 0)[None, :]
    at = positions.to(tl.int64)[:, None] * (2 * R) + pair[None, :]
    cos = tl.load(rope + at, mask=turned, other=1.0)
    sin = tl.load(rope + at + R, mask=turned, other=0.0)
    cos = tl.reshape(tl.join(cos, cos), (M, N))
    return x * cos + partner * tl.reshape(tl.join(-sin, sin), (M, N))
