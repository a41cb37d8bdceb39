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
from engine.kernels.triton_compat import cast, tl, triton

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


# ---------------------------------------------------------------- Triton

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit
def _lookup(
    ids, positions, seq, slots, starts, fold, history, multipliers, primes, offsets, weight, scale,
    out, pad, image,
    N: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Program (i, t): the i-th table row, order by order, of row t."""
    i, t = tl.program_id(0), tl.program_id(1)
    g = tl.load(seq + t)
    position, start, slot = tl.load(positions + t), tl.load(starts + g), tl.load(slots + g)
    hashed = tl.full((), 0, tl.int64)
    ended = tl.full((), 0, tl.int32)
    for back in tl.static_range(N):
        at = position - back
        own, carried = at >= start, (at >= 0) & (at < start)
        token = tl.load(ids + t - back, mask=own, other=0)
        folded = tl.where(token == image, _NO_TOKEN, tl.load(fold + token, mask=own, other=0))
        old = tl.load(history + slot.to(tl.int64) * RING + at % RING, mask=carried, other=_NO_TOKEN)
        one = tl.where(own, folded, old)
        ended = tl.where(one == _NO_TOKEN, 1, ended)
        one = tl.where(ended > 0, pad, one)
        hashed ^= tl.where(back <= i // HEADS + 1, one * tl.load(multipliers + back), 0)
    prime = tl.load(primes + i)
    place = hashed % prime
    place = tl.where(place < 0, place + prime, place) + tl.load(offsets + i)
    column = tl.arange(0, BLOCK)
    real = column < WIDTH
    value = tl.load(weight + place * WIDTH + column, mask=real, other=0)
    if SCALED:
        groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        power = tl.load(scale + place * groups + column // GROUP, mask=real, other=0)
        # A power's exponent bits as they stand in a float32; byte 0 stands for 2 ** -127.
        power = tl.where(power == 0, 1 << 22, power.to(tl.int32) << 23)
        wide = value.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        value = wide * power.to(tl.float32, bitcast=True)
    to = out + (t.to(tl.int64) * tl.num_programs(0) + i) * WIDTH + column
    tl.store(to, cast(value.to(tl.float32), out.dtype.element_ty), mask=real)


@triton.jit
def _store_history(
    ids, slots, starts, first, lengths, fold, history, image,
    RING: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program g: the last ids of sequence g."""
    g = tl.program_id(0)
    length = tl.load(lengths + g)
    i = tl.arange(0, LANES)
    back = (tl.load(starts + g) + length - 1 - i) % RING
    back = tl.where(back < 0, back + RING, back)
    kept = (i < RING) & (back < length)
    token = tl.load(ids + tl.load(first + g) + length - 1 - back, mask=kept, other=0)
    folded = tl.where(token == image, _NO_TOKEN, tl.load(fold + token, mask=kept, other=0))
    tl.store(history + tl.load(slots + g).to(tl.int64) * RING + i, folded, mask=kept)


@triton.jit
def _apply(
    streams, projected, weight, ids, out, eps, image,
    S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (s, t): stream s of row t."""
    s, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < D
    at = (t * S + s) * D + column
    part = projected + t * ((S + 1) * D) + column
    stream = tl.load(streams + at, mask=real, other=0.0).to(tl.float32)
    key = tl.load(part + s * D, mask=real, other=0.0).to(tl.float32)
    value = tl.load(part + S * D, mask=real, other=0.0).to(tl.float32)
    w = tl.load(weight + s * D + column, mask=real, other=0.0)
    delta = tl.sum(stream * w * key, 0)
    delta *= tl.rsqrt(tl.sum(stream * stream, 0) / D + eps)
    delta *= tl.rsqrt(tl.sum(key * key, 0) / D + eps) * (D**-0.5)
    root = tl.sqrt(tl.maximum(tl.abs(delta), 1e-6))
    root = tl.where(delta > 0, root, tl.where(delta < 0, -root, 0.0))
    gate = tl.where(tl.load(ids + t) == image, 0.0, 1 / (1 + tl.exp(-root)))
    tl.store(out + at, cast(stream + gate * value, out.dtype.element_ty), mask=real)


def engram_lookup_triton(
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
    """Do as `engram_lookup_torch`; one launch. A host table must be pinned (and so its scale)."""
    count, width = len(hashes.primes), weight.shape[1]
    longest = len(hashes.multipliers)
    out = torch.empty((rows.num_rows, count * width), dtype=dtype, device=rows.ids.device)
    _lookup[(count, rows.num_rows)](
        rows.ids, rows.positions, rows.seq, rows.slots, rows.starts, fold, history,
        hashes.multipliers, hashes.primes, hashes.offsets,
        weight if scale is None else weight.view(torch.uint8), scale, out, pad, image,
        N=longest, RING=history.shape[1], HEADS=count // (longest - 1), WIDTH=width,
        BLOCK=triton.next_power_of_2(width), GROUP=TABLE_GROUP, SCALED=scale is not None,
        num_warps=1,
    )  # fmt: skip
    return out


def store_history_triton(
    rows: Rows,
    fold: Tensor,
    history: Tensor,
    *,
    image: int,
    lengths: Tensor | None = None,
) -> None:
    """Do as `store_history_torch`."""
    ring = history.shape[1]
    _store_history[(rows.num_sequences,)](
        rows.ids, rows.slots, rows.starts, rows.first, rows.lengths if lengths is None else lengths,
        fold, history, image, RING=ring, LANES=triton.next_power_of_2(ring), num_warps=1,
    )  # fmt: skip


def engram_apply_triton(
    streams: Tensor,
    projected: Tensor,
    weight: Tensor,
    rows: Rows,
    *,
    eps: float,
    image: int,
) -> Tensor:
    """Do as `engram_apply_torch`; one launch."""
    count, streams_count, dim = streams.shape
    out = torch.empty_like(streams)
    block = triton.next_power_of_2(dim)
    _apply[(streams_count, count)](
        streams, projected, weight, rows.ids, out, eps, image,
        S=streams_count, D=dim, BLOCK=block, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return out
