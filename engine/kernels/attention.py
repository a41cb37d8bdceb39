"""Attention of one pass over window keys and compressed entries (model.md 2.4), and for decode.

Every row's H heads attend one set of keys, which are the values too: the last W positions, and
compressed entries, either those of a choice or all that are visible. A sink per head takes
probability and gives no value. Queries come raw from their projection: head norm (V4) and rotation
happen here, and the outputs are rotated back.

Where keys lie:

* position p of sequence g at or after starts[g]: k_rows[first[g] + p - starts[g]];
* an earlier position: ring[slots[g], p mod W];
* entry j of g: row tables[g, j // n] * n + j mod n of entries seen as [blocks * n, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.rope import rotate_torch
from engine.kernels.rows import Rows

#: Rows whose keys the torch form gathers at a time: bounds the memory it takes.
_CHUNK = 32


def attend_torch(
    q: Tensor,
    k_rows: Tensor,
    ring: Tensor,
    entries: Tensor | None,
    choice: Tensor | None,
    sink: Tensor,
    rope: Tensor,
    rows: Rows,
    *,
    ratio: int,
    head_norm_eps: float | None,
    window: int,
    scale: float,
) -> Tensor:
    """Attention of all rows.

    Args:
        q: float32 or bfloat16 [T, H * D], before head norm and rotation.
        k_rows: [T, D], window keys of this pass.
        ring: [slots, W, D], window keys of earlier passes.
        entries: [blocks, n, D], n = block_size // ratio; None in window layers.
        choice: int32 [T, K], rows of entries seen as [blocks * n, D], ascending, then -1 as
            padding; None to attend every visible entry: j < (position + 1) // ratio.
        sink: float32 [H], a logit.
        rope: table float32 [P, 2, R].
        rows: the pass.
        ratio: tokens per entry; 0 in window layers.
        head_norm_eps: of V4's norm per query head; None without it.
        window: W.
        scale: of the logits.

    Returns:
        [T, H * D] in q's dtype.
    """
    tokens, heads = rows.num_rows, sink.shape[0]
    q = q.view(tokens, heads, -1)
    wide = torch.promote_types(q.dtype, torch.float32)
    if head_norm_eps is not None:
        square = q.to(wide).square().mean(-1, keepdim=True)
        q = (q.to(wide) * torch.rsqrt(square + head_norm_eps)).to(q.dtype)
    q = rotate_torch(q, rope, rows.positions)
    o = torch.empty_like(q)
    for first in range(0, tokens, _CHUNK):
        part = slice(first, min(first + _CHUNK, tokens))
        keys, shown = _window_of(part, k_rows, ring, rows, window)
        if entries is not None:
            more, visible = _entries_of(part, entries, choice, rows, ratio)
            keys, shown = torch.cat((keys, more), 1), torch.cat((shown, visible), 1)
        # Memory that is not shown may hold anything, also what no product with 0 removes.
        keys = keys.masked_fill(~shown[..., None], 0).to(wide)
        scores = torch.matmul(q[part].to(wide), keys.transpose(1, 2)) * scale
        scores = scores.masked_fill(~shown[:, None], -torch.inf)
        sinks = sink.to(wide).expand(len(scores), heads)[..., None]
        shares = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        mixed = rotate_torch(torch.matmul(shares, keys), rope, rows.positions[part], inverse=True)
        o[part] = mixed.to(q.dtype)
    return o.view(tokens, -1)


def _window_of(
    part: slice, k_rows: Tensor, ring: Tensor, rows: Rows, window: int
) -> tuple[Tensor, Tensor]:
    """Window keys [M, W, D] of the rows of a part, and which of them exist, bool [M, W]."""
    seq = rows.seq[part].long()
    back = torch.arange(1 - window, 1, dtype=torch.int32, device=seq.device)
    at = rows.positions[part, None] + back
    starts = rows.starts[seq][:, None]
    own = at >= starts
    passed = torch.where(own, rows.first[seq][:, None] + at - starts, 0).long()
    slots = rows.slots[seq].long()[:, None]
    kept = ring[slots, at.long() % window].to(k_rows.dtype)
    return torch.where(own[..., None], k_rows[passed], kept), at >= 0


def _entries_of(
    part: slice, entries: Tensor, choice: Tensor | None, rows: Rows, ratio: int
) -> tuple[Tensor, Tensor]:
    """Entries [M, K, D] that the rows of a part attend, and which are real, bool [M, K]."""
    flat = entries.reshape(-1, entries.shape[-1])
    if choice is not None:
        places = choice[part].long()
        return flat[places.clamp(min=0)], places >= 0
    per_block = entries.shape[1]
    seq = rows.seq[part].long()
    most = min(rows.max_end // ratio, rows.tables.shape[1] * per_block)
    j = torch.arange(most, device=seq.device)
    visible = j < (rows.positions[part, None] + 1) // ratio
    places = rows.tables[seq].long()[:, j // per_block] * per_block + j % per_block
    return flat[torch.where(visible, places, 0)], visible
