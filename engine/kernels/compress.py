"""Compressed entries: pool groups of projected rows, normalise, rotate, round, write.

A compressor of ratio r turns each r tokens into an entry, by a softmax over the group per channel
(model.md 2.5, 2.9). With overlap (V4's CSA) an entry pools the group before as well: width is then
2 * D, the first half of the channels (A) is taken of the group before, the second (B) of the group
itself. Ratio 1 pools nothing. A group is complete with its last token; rows of open groups wait in
a *state* ring: float32 [slots, ring, 2 * width], kv | gate score with its position bias added, of
position p in row p mod ring, ring >= r (2 r with overlap).

Rounding happens where the official code stores bfloat16: after pooling, norm and rotation, each time
to the dtype of activations; everything else is float32. Entries are stored as numbers of that dtype
or as records of bytes (engine.plan.records).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.places import completes, entry_places, norm
from engine.kernels.record_device import store_record_device
from engine.kernels.records import layout_of, pack_torch
from engine.kernels.rope import rotate_device, rotate_torch
from engine.kernels.roundtrip import signs_device, signs_for
from engine.kernels.rows import Rows
from engine.kernels.triton_compat import cast, tl, triton
from engine.plan.records import Form

# ---------------------------------------------------------------- torch


def compress_torch(
    proj: Tensor,
    ape: Tensor | None,
    state: Tensor | None,
    rows: Rows,
    *,
    ratio: int,
    overlap: bool,
    norm_w: Tensor,
    eps: float,
    rope: Tensor,
    form: Form,
    pool: Tensor,
    dtype: torch.dtype,
    want_latent: bool = False,
    store: bool = True,
) -> Tensor | None:
    """Write the entries whose last token is in this pass, and keep what later passes need.

    Args:
        proj: float32 [T, 2 * width], kv | gate; [T, D] for ratio 1, any float. Rows may be strided.
        ape: float32 [ratio, width], position bias of the gate, or None.
        state: float32 [slots, ring, 2 * width]; None for ratio 1.
        rows: of the pass.
        ratio: tokens per entry.
        overlap: whether an entry pools the group before too.
        norm_w: [D].
        eps: of the norm.
        rope: float32 [P, 2, R]; entry j is rotated to position j * ratio.
        form: how entries are stored.
        pool: [blocks, block_size / ratio, ...] in that form, written.
        dtype: of activations.
        want_latent: whether the caller needs the values before rotation.
        store: whether all rows of the pass count; else `store_state` is to follow with those that do.

    Returns:
        latents [T, D] in that dtype: row t has that of the group which row t completes, and zeros
        where it completes none; None unless wanted.

    Raises:
        ValueError: the pool is of another form.
    """
    count, tail = proj.shape[0], 2 * rope.shape[2]
    layout_of(pool, form, norm_w.shape[0], tail, dtype)
    done = completes(rows, ratio)
    if ratio == 1:
        pooled, at = proj.float(), torch.arange(count, device=proj.device)
        real = done
    else:
        assert state is not None
        biased = _biased(proj, ape, rows, ratio)
        # Completed rows of a sequence are ratio apart, so that these numbers are distinct.
        number = torch.arange(count, device=proj.device) // ratio + rows.seq
        last = torch.full((count // ratio + rows.num_sequences + 1,), -1, device=proj.device)
        last.scatter_(0, torch.where(done, number, len(last) - 1).long(), rows_of(proj))
        last, number = last[:-1], number.long()
        real, at = last >= 0, last.clamp(min=0)
        pooled = _pooled(biased, state, rows, at, ratio, overlap)
        pooled = torch.where(real[:, None], pooled, 0)
    latent = norm(pooled.to(dtype), norm_w, eps)
    entry = rows.positions[at] // ratio
    stored = pack_torch(rotate_torch(latent, rope, entry * ratio), form, tail)
    # What is not real goes to the dummy block, whose content is nobody's.
    places = torch.where(real, entry_places(rows, rows.seq[at], entry, ratio), 0)
    flat = pool.view(-1, pool.shape[-1])
    flat.index_copy_(0, places, torch.where(real[:, None], stored, 0))
    if store and state is not None:
        store_state_torch(proj, ape, state, rows, ratio=ratio)
    if not want_latent:
        return None
    if ratio == 1:
        return latent
    return torch.where(done[:, None], latent[number.clamp(max=len(last) - 1)], 0)


def store_state_torch(
    proj: Tensor,
    ape: Tensor | None,
    state: Tensor,
    rows: Rows,
    *,
    ratio: int,
    lengths: Tensor | None = None,
) -> None:
    """Keep the last rows of each sequence, as many as the ring has.

    Args:
        proj: float32 [T, 2 * width], kv | gate.
        ape: float32 [ratio, width] or None.
        state: float32 [slots, ring, 2 * width], written.
        rows: of the pass.
        ratio: tokens per entry.
        lengths: int32 [G], rows of each sequence that count, where not all do (a verify pass).
    """
    ring = state.shape[1]
    limit = (rows.lengths if lengths is None else lengths)[rows.seq.long()]
    offset = rows_of(proj) - rows.first[rows.seq.long()]
    kept = (offset < limit) & (offset >= limit - ring)
    slot = torch.where(kept, rows.slots[rows.seq.long()], 0)
    flat = state.view(-1, state.shape[-1])
    places = slot.long() * ring + rows.positions % ring
    flat.index_copy_(0, places, _biased(proj, ape, rows, ratio).to(state.dtype))


def rows_of(x: Tensor) -> Tensor:
    """Numbers of the rows of x, int64 [T]."""
    return torch.arange(x.shape[0], device=x.device)


def _biased(proj: Tensor, ape: Tensor | None, rows: Rows, ratio: int) -> Tensor:
    """Projected rows with the position bias on their gates, float32."""
    if ape is None:
        return proj.float()
    kv, gate = proj.float().chunk(2, -1)
    return torch.cat((kv, gate + ape[(rows.positions % ratio).long()]), -1)


def _pooled(
    biased: Tensor, state: Tensor, rows: Rows, last: Tensor, ratio: int, overlap: bool
) -> Tensor:
    """Pool the groups whose last rows are `last` [N]: float32 [N, D]."""
    members = ratio * (2 if overlap else 1)
    seq = rows.seq[last].long()[:, None]
    wanted = rows.positions[last][:, None] - torch.arange(members - 1, -1, -1, device=biased.device)
    own = (rows.first[seq] + wanted - rows.starts[seq]).clamp(min=0, max=len(biased) - 1)
    ring = state.shape[1]
    carried = state.view(-1, state.shape[-1])[rows.slots[seq].long() * ring + wanted % ring]
    values = torch.where((wanted >= rows.starts[seq])[..., None], biased[own.long()], carried)
    absent = torch.zeros_like(biased[0])
    absent[absent.shape[0] // 2 :] = -torch.inf  # before the sequence: no weight, no value
    values = torch.where((wanted >= 0)[..., None], values, absent)
    return reference.pool_entries(values, overlap)


# ---------------------------------------------------------------- Triton


@triton.jit
def pooled_device(
    proj, proj_stride, ape, state, slot, start, own_first, position,
    RATIO: tl.constexpr, PAIRED: tl.constexpr, D: tl.constexpr, RING: tl.constexpr,
    HAS_APE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Pool the group whose last row is at `position`: float32 [D].

    The softmax is taken online over chunks of members, of which HCA has 128.
    """
    MEMBERS: tl.constexpr = RATIO * 2 if PAIRED else RATIO
    WIDTH: tl.constexpr = 2 * D if PAIRED else D
    column = tl.arange(0, D)[None, :]
    best = tl.full((D,), float("-inf"), tl.float32)
    weight = tl.zeros((D,), tl.float32)
    total = tl.zeros((D,), tl.float32)
    for chunk in range(0, MEMBERS, CHUNK):
        member = chunk + tl.arange(0, CHUNK)
        wanted = position - (MEMBERS - 1) + member
        own, carried = wanted >= start, (wanted < start) & (wanted >= 0)
        at = column + tl.where(member >= RATIO, D, 0)[:, None]
        if not PAIRED:
            at = column + tl.zeros((CHUNK, 1), tl.int32)
        here = (own_first + wanted).to(tl.int64)[:, None] * proj_stride + at
        there = (slot.to(tl.int64) * RING + wanted % RING)[:, None] * (2 * WIDTH) + at
        gate = tl.load(proj + here + WIDTH, mask=own[:, None], other=float("-inf")).to(tl.float32)
        if HAS_APE:
            bias = (wanted % RATIO)[:, None] * WIDTH + at
            gate += tl.load(ape + bias, mask=own[:, None], other=0.0)
        old = tl.load(state + there + WIDTH, mask=carried[:, None], other=float("-inf"))
        score = tl.where(own[:, None], gate, old)
        kv = tl.load(proj + here, mask=own[:, None], other=0.0).to(tl.float32)
        kv += tl.load(state + there, mask=carried[:, None], other=0.0)
        # The group's own last row is always there, but not in the first chunk: 0 until one is.
        higher = tl.maximum(best, tl.max(score, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp(best - base)
        share = tl.exp(score - base[None, :])
        weight = weight * fade + tl.sum(share, 0)
        total = total * fade + tl.sum(share * kv, 0)
        best = higher
    return total / weight


@triton.jit
def store_row_device(
    proj, proj_stride, ape, state, slot, row, position,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, HAS_APE: tl.constexpr,
):  # fmt: skip
    """Keep one projected row in the state ring."""
    column = tl.arange(0, WIDTH)
    here = proj + row.to(tl.int64) * proj_stride + column
    there = state + (slot.to(tl.int64) * RING + position % RING) * (2 * WIDTH) + column
    kv, gate = tl.load(here).to(tl.float32), tl.load(here + WIDTH).to(tl.float32)
    if HAS_APE:
        gate += tl.load(ape + position % RATIO * WIDTH + column)
    tl.store(there, kv)
    tl.store(there + WIDTH, gate)


@triton.jit
def compress_device(
    t, proj, proj_stride, ape, state, positions, seq, slots, starts, first, tables, table_width,
    norm_w, eps, rope, signs, pool, latent,
    RATIO: tl.constexpr, PAIRED: tl.constexpr, D: tl.constexpr, RING: tl.constexpr,
    PER_BLOCK: tl.constexpr, PAIRS: tl.constexpr, FORM: tl.constexpr, HAS_APE: tl.constexpr,
    LATENT: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Everything a compressor does with row t of a pass; `latent` has the dtype of activations."""
    kind: tl.constexpr = latent.dtype.element_ty
    WIDTH: tl.constexpr = 2 * D if PAIRED else D
    g = tl.load(seq + t)
    position, slot = tl.load(positions + t), tl.load(slots + g)
    column = tl.arange(0, D)
    if (position + 1) % RATIO == 0:
        if RATIO == 1:
            pooled = tl.load(proj + t.to(tl.int64) * proj_stride + column).to(tl.float32)
        else:
            start = tl.load(starts + g)
            own_first = tl.load(first + g) - start
            pooled = pooled_device(
                proj, proj_stride, ape, state, slot, start, own_first, position,
                RATIO, PAIRED, D, RING, HAS_APE, CHUNK,
            )  # fmt: skip
        x = cast(pooled, kind).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        x = cast(x * scale * tl.load(norm_w + column).to(tl.float32), kind)
        if LATENT:
            tl.store(latent + t.to(tl.int64) * D + column, x)
        entry = position // RATIO
        tile = tl.reshape(x.to(tl.float32), (1, D))
        tile = rotate_device(tile, rope, tl.full((1,), 0, tl.int32) + entry * RATIO, PAIRS)
        matrix = signs_device(signs, FORM, D)
        block = tl.load(tables + g * table_width + entry // PER_BLOCK).to(tl.int64)
        place = tl.zeros((1,), tl.int64) + block * PER_BLOCK + entry % PER_BLOCK
        store_record_device(pool, place, cast(tile, kind), place >= 0, D, 2 * PAIRS, FORM, matrix)
    elif LATENT:
        tl.store(latent + t.to(tl.int64) * D + column, tl.zeros((D,), kind))
    if STORE:
        store_row_device(
            proj, proj_stride, ape, state, slot, t, position, RATIO, WIDTH, RING, HAS_APE
        )


@triton.jit
def _compress(
    proj, proj_stride, ape, state, positions, seq, slots, starts, first, tables, table_width,
    norm_w, eps, rope, signs, pool, latent,
    RATIO: tl.constexpr, PAIRED: tl.constexpr, D: tl.constexpr, RING: tl.constexpr,
    PER_BLOCK: tl.constexpr, PAIRS: tl.constexpr, FORM: tl.constexpr, HAS_APE: tl.constexpr,
    LATENT: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program t: row t."""
    compress_device(
        tl.program_id(0), proj, proj_stride, ape, state, positions, seq, slots, starts, first,
        tables, table_width, norm_w, eps, rope, signs, pool, latent,
        RATIO, PAIRED, D, RING, PER_BLOCK, PAIRS, FORM, HAS_APE, LATENT, STORE, CHUNK,
    )  # fmt: skip


@triton.jit
def _store_state(
    proj, proj_stride, ape, state, slots, starts, first, lengths,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, HAS_APE: tl.constexpr,
):  # fmt: skip
    """Program (i, g): ring row i of sequence g, if one of its last rows belongs there."""
    i, g = tl.program_id(0), tl.program_id(1)
    start, length = tl.load(starts + g), tl.load(lengths + g)
    end = start + length
    back = (end - 1 - i) % RING  # rows before the last one; end - 1 - i >= -RING
    back = tl.where(back < 0, back + RING, back)
    if back < length:
        offset = length - 1 - back
        store_row_device(
            proj, proj_stride, ape, state, tl.load(slots + g), tl.load(first + g) + offset,
            start + offset, RATIO, WIDTH, RING, HAS_APE,
        )  # fmt: skip


def compress_triton(
    proj: Tensor,
    ape: Tensor | None,
    state: Tensor | None,
    rows: Rows,
    *,
    ratio: int,
    overlap: bool,
    norm_w: Tensor,
    eps: float,
    rope: Tensor,
    form: Form,
    pool: Tensor,
    dtype: torch.dtype,
    want_latent: bool = False,
    store: bool = True,
) -> Tensor | None:
    """Do as `compress_torch`; one launch for decode, two for longer chunks that store state."""
    count, dim = proj.shape[0], norm_w.shape[0]
    layout_of(pool, form, dim, 2 * rope.shape[2], dtype)
    latent = proj.new_empty((count if want_latent else 0, dim), dtype=dtype)
    store = store and state is not None
    # A later row of a chunk would overwrite what an earlier group still has to read.
    fused = store and rows.is_decode
    members = ratio * (2 if overlap else 1)
    _compress[(count,)](
        proj, proj.stride(0), ape, state, rows.positions, rows.seq, rows.slots, rows.starts,
        rows.first, rows.tables, rows.tables.shape[1], norm_w, eps, rope,
        signs_for(form, dim, dtype, pool.device), pool, latent,
        RATIO=ratio, PAIRED=overlap, D=dim, RING=1 if state is None else state.shape[1],
        PER_BLOCK=rows.block_size // ratio, PAIRS=rope.shape[2], FORM=form,
        HAS_APE=ape is not None, LATENT=want_latent, STORE=fused, CHUNK=min(members, 8),
        num_warps=8 if members > 8 else 4,
    )  # fmt: skip
    if store and not fused:
        assert state is not None
        store_state_triton(proj, ape, state, rows, ratio=ratio)
    return latent if want_latent else None


def store_state_triton(
    proj: Tensor,
    ape: Tensor | None,
    state: Tensor,
    rows: Rows,
    *,
    ratio: int,
    lengths: Tensor | None = None,
) -> None:
    """Do as `store_state_torch`."""
    ring = state.shape[1]
    _store_state[(ring, rows.num_sequences)](
        proj, proj.stride(0), ape, state, rows.slots, rows.starts, rows.first,
        rows.lengths if lengths is None else lengths,
        RATIO=ratio, WIDTH=state.shape[2] // 2, RING=ring, HAS_APE=ape is not None, num_warps=4,
    )  # fmt: skip
