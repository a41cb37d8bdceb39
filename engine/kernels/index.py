"""Index keys, index queries and scores: what decides which entries a row attends.

Row t scores entry j of its sequence by sum over heads of w[t, h] * relu(q[t, h] . key[j]) in
float32 (model.md 2.6, 2.9). V4's index keys come from a compressor of their own
(engine/kernels/compress.py), V4.1's from the latents of the entries, here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.formats import Matrix, dequantise
from engine.kernels.places import completes, entry_places, norm
from engine.kernels.rope import rotate_torch
from engine.kernels.roundtrip import Form, round_trip
from engine.kernels.rows import Rows

# ---------------------------------------------------------------- torch

#: Elements of the keys that the twin gathers at a time.
_GATHERED = 1 << 22


def index_keys_from_latent_torch(
    latent: Tensor,
    wk: Matrix,
    norm_w: Tensor,
    eps: float,
    rope: Tensor,
    rows: Rows,
    pool: Tensor,
    *,
    ratio: int,
    form: Form,
) -> None:
    """Write the index keys of the groups that this pass completes (V4.1).

    Args:
        latent: [T, D], from compress.
        wk: plain [Di, D].
        norm_w: [Di].
        eps: of the norm.
        rope: float32 [P, 2, R]; key j is rotated to position j * ratio.
        rows: of the pass.
        pool: [blocks, block_size / ratio, Di], written.
        ratio: tokens per entry.
        form: how keys are stored.
    """
    key = torch.nn.functional.linear(latent, dequantise(wk, latent.dtype)).to(pool.dtype)
    entry = rows.positions // ratio
    key = rotate_torch(norm(key, norm_w, eps), rope, entry * ratio)
    done = completes(rows, ratio)
    places = torch.where(done, entry_places(rows, rows.seq, entry, ratio), 0)
    stored = torch.where(done[:, None], round_trip(key, form), 0)
    pool.view(-1, pool.shape[-1]).index_copy_(0, places, stored)


def index_queries_torch(
    q_raw: Tensor, rope: Tensor, rows: Rows, *, head_dim: int, form: Form
) -> Tensor:
    """Rotate index queries to their positions and round them.

    Args:
        q_raw: [T, Hi * Di], from the projection.
        rope: float32 [P, 2, R].
        rows: of the pass.
        head_dim: Di.
        form: how queries are rounded.

    Returns:
        [T, Hi, Di] in the same dtype.
    """
    q = q_raw.view(q_raw.shape[0], -1, head_dim)
    return round_trip(rotate_torch(q, rope, rows.positions), form)


def scores_torch(
    q: Tensor,
    head_w: Tensor,
    keys: Tensor,
    rows: Rows,
    *,
    ratio: int,
    candidates: Tensor | None = None,
    candidate_group: int = 0,
) -> Tensor:
    """Score all entries of every row.

    Args:
        q: [T, Hi, Di].
        head_w: [T, Hi], scaled; may be negative.
        keys: [blocks, block_size / ratio, Di].
        rows: of the pass.
        ratio: tokens per entry.
        candidates: bool [T, ceil(E / candidate_group)], groups that may be chosen; all if None.
        candidate_group: consecutive entries of a group.

    Returns:
        float32 [T, E], E = max(1, rows.max_end // ratio); -inf where row t does not see entry j,
        that is unless (j + 1) * ratio <= position + 1, or may not choose it.
    """
    entries = torch.arange(max(1, rows.max_end // ratio), device=q.device)
    parts = []
    step = max(1, _GATHERED // (len(entries) * q.shape[-1]))
    for first in range(0, len(q), step):
        part = slice(first, first + step)
        places = entry_places(rows, rows.seq[part][:, None], entries, ratio)
        seen = (entries + 1) * ratio <= rows.positions[part][:, None] + 1
        own = keys.view(-1, keys.shape[-1])[torch.where(seen, places, 0)].float()
        found = reference.index_scores(q[part].float(), own, head_w[part].float())
        if candidates is not None:
            seen = seen & candidates[part].repeat_interleave(candidate_group, 1)[:, : len(entries)]
        parts.append(found.masked_fill(~seen, -torch.inf))
    return torch.cat(parts)
