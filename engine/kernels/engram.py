"""Engram on the device: n-gram history, hashes, table lookup and the gate (model.md 2.10).

The history of a slot is a ring of folded ids: int64 [slots, ring], position p in row p mod ring,
ring >= n, the longest n-gram. Positions before the sequence and image tokens hold no token; an
n-gram that reaches one has the pad's folded id there and everywhere behind it.

A table may lie on the device or in pinned host memory, which kernels read over the bus.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.formats import powers
from engine.kernels.rows import Rows

#: Marks a place that holds no text token.
NO_TOKEN = -1
#: Columns of a table row that share a scale.
TABLE_GROUP = 32

# ---------------------------------------------------------------- torch


@dataclass(frozen=True, slots=True)
class Hashes:
    """What hashes the n-grams of one layer; all int64 on the device.

    Args:
        multipliers: [n], the latest token takes the first.
        primes: [orders * heads], order by order, orders = n - 1.
        offsets: [orders * heads], first table row of each.
    """

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor


def engram_lookup_torch(
    rows: Rows,
    fold: Tensor,
    history: Tensor,
    hashes: Hashes,
    weight: Tensor,
    scale: Tensor | None,
    *,
    pad: int,
    image: int,
    dtype: torch.dtype,
) -> Tensor:
    """Look up the table rows of every row's n-grams.

    Args:
        rows: of the pass.
        fold: int64 [vocab], token id to folded id.
        history: int64 [slots, ring], as of before this pass.
        hashes: of the layer.
        weight: [table rows, width]: e4m3, bfloat16 or float32; on the device or on the host (read
            there by this twin, which then waits for the device and cannot be captured).
        scale: uint8 [table rows, ceil(width / 32)], beside e4m3 only; where the weight is.
        pad: folded id that stands for what is no token.
        image: token id of images; -1 without.
        dtype: of the result.

    Returns:
        [T, orders * heads * width].
    """
    ngrams = _ngrams(rows, fold, history, len(hashes.multipliers), pad, image)
    products = ngrams * hashes.multipliers
    hashed, found = products[:, 0], []
    for order in range(1, products.shape[1]):
        hashed = hashed ^ products[:, order]
        found.append(hashed)
    heads = len(hashes.primes) // len(found)
    spread = torch.stack(found, 1).repeat_interleave(heads, 1)
    places = (spread % hashes.primes + hashes.offsets).flatten().to(weight.device)
    values = weight.view(torch.uint8) if scale is not None else weight
    values = values.index_select(0, places)
    if scale is not None:
        spread = powers(scale.index_select(0, places)).repeat_interleave(TABLE_GROUP, -1)
        values = values.view(torch.float8_e4m3fn).float() * spread[:, : weight.shape[1]]
    return values.to(rows.ids.device, dtype).view(rows.num_rows, -1)


def store_history_torch(
    rows: Rows,
    fold: Tensor,
    history: Tensor,
    *,
    image: int,
    lengths: Tensor | None = None,
) -> None:
    """Remember the last ids of each sequence, after every lookup of the pass.

    Args:
        rows: of the pass.
        fold: int64 [vocab].
        history: int64 [slots, ring], written.
        image: token id of images; -1 without.
        lengths: int32 [G], rows of each sequence that count, where not all do (a verify pass).
    """
    ring = history.shape[1]
    seq = rows.seq.long()
    limit = (rows.lengths if lengths is None else lengths)[seq]
    offset = torch.arange(rows.num_rows, device=seq.device) - rows.first[seq]
    kept = (offset < limit) & (offset >= limit - ring)
    slot = torch.where(kept, rows.slots[seq], 0)  # the dummy slot takes what nobody keeps
    places = slot.long() * ring + rows.positions % ring
    history.view(-1).index_copy_(0, places, _folded(rows.ids, fold, image))


def engram_apply_torch(
    streams: Tensor,
    projected: Tensor,
    weight: Tensor,
    rows: Rows,
    *,
    eps: float,
    image: int,
) -> Tensor:
    """Add to each stream its share of the looked-up value.

    Args:
        streams: R [T, S, d].
        projected: [T, (S + 1) * d], S keys and a value.
        weight: q weight times k weight, float32 [S, d].
        rows: of the pass; image tokens take nothing.
        eps: of both norms.
        image: token id of images; -1 without.

    Returns:
        [T, S, d] in the streams' dtype; sums and gate in float32.
    """
    count, streams_count, dim = streams.shape
    wide = streams.float()
    parts = projected.float().view(count, streams_count + 1, dim)
    keys, value = parts[:, :-1], parts[:, -1:]
    delta = (wide * weight * keys).sum(-1)
    delta = delta * torch.rsqrt(wide.square().mean(-1) + eps)
    delta = delta * torch.rsqrt(keys.square().mean(-1) + eps) * dim**-0.5
    gate = torch.sigmoid(torch.sign(delta) * delta.abs().clamp(min=1e-6).sqrt())
    gate = gate.masked_fill((rows.ids == image)[:, None], 0)
    return (wide + gate[..., None] * value).to(streams.dtype)


def _folded(ids: Tensor, fold: Tensor, image: int) -> Tensor:
    return torch.where(ids == image, NO_TOKEN, fold[ids])


def _ngrams(
    rows: Rows, fold: Tensor, history: Tensor, longest: int, pad: int, image: int
) -> Tensor:
    """The latest folded ids at every row, latest first: int64 [T, longest]."""
    own = _folded(rows.ids, fold, image)
    seq, ring = rows.seq.long(), history.shape[1]
    back = torch.arange(longest, device=own.device)
    positions = rows.positions[:, None] - back
    index = (torch.arange(len(own), device=own.device)[:, None] - back).clamp(min=0)
    carried = history.view(-1)[rows.slots[seq].long()[:, None] * ring + positions % ring]
    ids = torch.where(positions >= rows.starts[seq][:, None], own[index], carried)
    ids = torch.where(positions < 0, NO_TOKEN, ids)
    cut = (ids == NO_TOKEN).cummax(1).values
    return torch.where(cut, pad, ids)
