"""The choice of entries: exact top-k with ties to the lowest index, and candidate groups.

Entries beyond what a row sees have no score. Among equal scores the lowest entry wins, and +0 and
-0 are equal, so that every implementation and every split of a pass chooses alike (model.md 2.6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.index import scores_torch
from engine.kernels.places import entry_places
from engine.kernels.rows import Rows

# ---------------------------------------------------------------- torch


def choose_torch(
    q: Tensor,
    head_w: Tensor,
    keys: Tensor,
    rows: Rows,
    *,
    ratio: int,
    topk: int,
    candidates: Tensor | None = None,
    candidate_group: int = 0,
    candidate_topk: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Choose the entries each row attends.

    Args:
        q: [T, Hi, Di], index queries.
        head_w: [T, Hi], scaled; may be negative.
        keys: [blocks, block_size / ratio, Di].
        rows: of the pass.
        ratio: tokens per entry.
        topk: most entries of a row.
        candidates: bool [T, ceil(E / candidate_group)] from the candidate source, E = max(1,
            rows.max_end // ratio): groups that may be chosen; None leaves all.
        candidate_group: consecutive entries of a candidate group; needed with either of the others.
        candidate_topk: groups to keep as candidates for other layers; 0 where this layer is no
            candidate source.

    Returns:
        places: int32 [T, K], flat pool rows in ascending order of entries, then -1; K =
            min(topk, E).
        candidates: those built, or those given; None where no choice could be limited by them.
    """
    scores = scores_torch(
        q,
        head_w,
        keys,
        rows,
        ratio=ratio,
        candidates=candidates,
        candidate_group=candidate_group,
    )
    count = scores.shape[1]
    if candidate_topk and candidate_topk * candidate_group < count:
        seen = (rows.positions.long() + 1) // ratio
        kept = reference.candidate_entries(scores, seen, candidate_group, candidate_topk)
        candidates = kept[:, ::candidate_group]
    chosen, real = reference.select_entries(scores, topk)
    chosen = torch.where(real, chosen, count).sort(-1).values
    places = entry_places(rows, rows.seq[:, None], chosen, ratio)
    return torch.where(chosen < count, places, -1).int(), candidates
