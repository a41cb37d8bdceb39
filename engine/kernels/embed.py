"""The streams that a pass begins with: a token's embedding, once per stream, in one launch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.overlap import begin_next, overlapping
from engine.kernels.triton_compat import cast, tl, triton

# ---------------------------------------------------------------- torch


def embed_torch(ids: Tensor, table: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Look tokens up.

    Args:
        ids: int64 [T].
        table: [V, d].
        count: S streams.
        dtype: of the result, no narrower than the table's.

    Returns:
        [T, S, d], contiguous: every stream is the embedding (model.md 2.2).
    """
    found = F.embedding(ids, table).to(dtype)
    return found[:, None].expand(-1, count, -1).contiguous()


# ---------------------------------------------------------------- Triton


@triton.jit
def _embed(
    ids, table, out, D, S: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Program (t, c): columns c * BLOCK and after of token t."""
    begin_next(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    value = tl.load(table + tl.load(ids + t) * D + d, mask=inside, other=0.0).to(tl.float32)
    value = cast(value, out.dtype.element_ty)
    for s in tl.static_range(S):
        tl.store(out + (t * S + s) * D + d, value, mask=inside)


def embed_triton(ids: Tensor, table: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Do as `embed_torch`."""
    width = table.shape[1]
    out = torch.empty((len(ids), count, width), dtype=dtype, device=table.device)
    block = 1024
    overlap = overlapping(table.device, len(ids))["OVERLAP"]  # of the kernel behind it
    _embed[(len(ids), triton.cdiv(width, block))](
        ids, table, out, width, S=count, BLOCK=block, OVERLAP=overlap
    )
    return out
