"""Compressed entries: pool groups of projected rows, normalise, rotate, round, write.

A compressor of ratio r turns each r tokens into an entry, by a softmax over the group per channel
(model.md 2.5, 2.9). With overlap (V4's CSA) an entry pools the group before as well: width is then
2 * D, the first half of the channels (A) is taken of the group before, the second (B) of the group
itself. Ratio 1 pools nothing. A group is complete with its last token; rows of open groups wait in
a *state* ring: float32 [slots, ring, 2 * width], kv | gate score with its position bias added, of
position p in row p mod ring, ring >= r (2 r with overlap).

Rounding happens where the official code stores bfloat16: after pooling, norm, rotation and round
trip, each time to the pool's dtype; everything else is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.places import completes, entry_places, norm, rotate
from engine.kernels.roundtrip import Form, round_trip
from engine.kernels.rows import Rows

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
        pool: [blocks, block_size / ratio, D], written.
        want_latent: whether the caller needs the values before rotation.
        store: whether all rows of the pass count; else `store_state` is to follow with those that do.

    Returns:
        latents [T, D] in the pool's dtype: row t has that of the group which row t completes, and
        zeros where it completes none; None unless wanted.
    """
    count, dim = proj.shape[0], pool.shape[-1]
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
    latent = norm(pooled.to(pool.dtype), norm_w, eps)
    entry = rows.positions[at] // ratio
    stored = round_trip(rotate(latent, rope, entry * ratio), form, 2 * rope.shape[2])
    # What is not real goes to the dummy block, whose content is nobody's.
    places = torch.where(real, entry_places(rows, rows.seq[at], entry, ratio), 0)
    pool.view(-1, dim).index_copy_(0, places, torch.where(real[:, None], stored, 0))
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
