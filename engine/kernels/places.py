"""What the torch forms of compressors and indexer share: norm, groups, places of entries."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.rows import Rows


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
