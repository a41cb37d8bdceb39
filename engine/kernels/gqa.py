"""Grouped-query attention with a norm per head, over keys and values in blocks (Qwen3).

Rotary pairs are half a head apart: (x_i, x_{i + D/2}), unlike DeepSeek's adjacent ones. Keys and
values of a layer are [blocks, block_size, Hkv, D]; position p of a sequence lies in row p mod
block_size of block tables[p // block_size]. Scores and sums are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.overlap import await_previous, begin_next, overlapping
from engine.kernels.reference import rms_norm
from engine.kernels.rows import Rows
from engine.kernels.triton_compat import cast, tl, triton

#: Most rows of a step whose small kernels, between products and experts, begin before their
#: predecessors have ended; measured with Qwen3-30B, of whose layer of 16 rows it takes 5 us of 232.
OVERLAP_ROWS = 16

# ---------------------------------------------------------------- torch


def _turned(x: Tensor, rope: Tensor, positions: Tensor) -> Tensor:
    """Rotate all of x [T, heads, D] in float32; rope is float32 [P, 2, D / 2]."""
    turns = rope.index_select(0, positions.long())[:, :, None]
    cos, sin = turns[:, 0], turns[:, 1]
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _places(rows: Rows, seq: Tensor, positions: Tensor) -> Tensor:
    """Flat pool rows of positions of sequences."""
    column = (positions // rows.block_size).clamp(max=rows.tables.shape[1] - 1).long()
    block = rows.tables[seq.long(), column].long()
    return block * rows.block_size + positions % rows.block_size


def prepare_qkv_torch(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    rope: Tensor,
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
) -> Tensor:
    """Norm and rotate queries and keys; write keys and values of every row.

    Args:
        qkv: [T, (H + 2 * Hkv) * D]: queries, keys, values.
        q_norm: [D].
        k_norm: [D].
        eps: of both norms.
        rope: float32 [P, 2, D / 2].
        rows: of the pass.
        keys: [blocks, block_size, Hkv, D], written.
        values: likewise.
        heads: H.

    Returns:
        queries [T, H, D] in qkv's dtype.
    """
    key_heads, dim = keys.shape[2:]
    q, k, v = qkv.view(len(qkv), -1, dim).split([heads, key_heads, key_heads], 1)
    q = _turned(rms_norm(q.float(), q_norm, eps).to(qkv.dtype), rope, rows.positions)
    k = _turned(rms_norm(k.float(), k_norm, eps).to(qkv.dtype), rope, rows.positions)
    places = _places(rows, rows.seq, rows.positions)
    keys.view(-1, key_heads, dim).index_copy_(0, places, k.to(keys.dtype))
    values.view(-1, key_heads, dim).index_copy_(0, places, v.to(values.dtype))
    return q.to(qkv.dtype)


def attend_gqa_torch(q: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """Attention of every row over its sequence up to itself.

    Args:
        q: [T, H, D], unscaled.
        keys: [blocks, block_size, Hkv, D].
        values: likewise.
        rows: of the pass.

    Returns:
        [T, H * D].
    """
    key_heads, dim = keys.shape[2:]
    count = rows.max_end
    line = torch.arange(count, device=q.device)
    found = []
    step = max(1, (1 << 24) // (count * key_heads * dim))
    for first in range(0, len(q), step):
        part = slice(first, first + step)
        seen = line <= rows.positions[part][:, None]
        places = torch.where(seen, _places(rows, rows.seq[part][:, None], line), 0)
        k = keys.view(-1, key_heads, dim)[places].float().transpose(1, 2)
        v = values.view(-1, key_heads, dim)[places].float().transpose(1, 2)
        own = q[part].float().unflatten(1, (key_heads, -1))
        scores = own @ k.transpose(-1, -2) * dim**-0.5
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        found.append((scores.softmax(-1) @ v).flatten(1))
    return torch.cat(found).to(q.dtype)


def decode_gqa_torch(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    rope: Tensor,
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
) -> Tensor:
    """Prepare one row a sequence and attend; arguments as `prepare_qkv_torch`.

    Returns:
        [T, H * D].
    """
    q = prepare_qkv_torch(qkv, q_norm, k_norm, eps, rope, rows, keys, values, heads=heads)
    return attend_gqa_torch(q, keys, values, rows)


def add_norm_torch(
    h: Tensor, parts: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add a sublayer's summands to the residual and norm it.

    Args:
        h: residual [T, d].
        parts: [T, P, d], added in order in float32; None for nothing.
        weight: [d].
        eps: of the norm.

    Returns:
        the new residual and its norm, [T, d] each in h's dtype.
    """
    if parts is not None:
        total = parts[:, 0].float()
        for part in parts.unbind(1)[1:]:
            total = total + part.float()
        h = (h.float() + total).to(h.dtype)
    return h, rms_norm(h.float(), weight, eps).to(h.dtype)


# ---------------------------------------------------------------- Triton


@triton.jit
def _prepare_kernel(
    qkv, q_norm, k_norm, eps, rope, positions, seq, tables, keys, values, q_out,
    stride, table_width, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Program (row, head); heads are queries, keys, then values."""
    row, head = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, D // 2)
    at = qkv + row.to(tl.int64) * stride + head * D
    low_raw, high_raw = tl.load(at + half), tl.load(at + D // 2 + half)
    position = tl.load(positions + row)
    block = tl.load(tables + tl.load(seq + row) * table_width + position // BLOCK_SIZE)
    place = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    if head >= HEADS + KEY_HEADS:
        to = values + (place * KEY_HEADS + head - HEADS - KEY_HEADS) * D
        tl.store(to + half, low_raw.to(values.dtype.element_ty))
        tl.store(to + D // 2 + half, high_raw.to(values.dtype.element_ty))
    else:
        low, high = low_raw.to(tl.float32), high_raw.to(tl.float32)
        scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / D + eps)
        weight = q_norm if head < HEADS else k_norm
        low = cast(low * scale * tl.load(weight + half), low_raw.dtype).to(tl.float32)
        high = cast(high * scale * tl.load(weight + D // 2 + half), low_raw.dtype).to(tl.float32)
        turn = rope + position.to(tl.int64) * D
        cos, sin = tl.load(turn + half), tl.load(turn + D // 2 + half)
        if head < HEADS:
            to = q_out + (row.to(tl.int64) * HEADS + head) * D
            tl.store(to + half, cast(low * cos - high * sin, low_raw.dtype))
            tl.store(to + D // 2 + half, cast(high * cos + low * sin, low_raw.dtype))
        else:
            to = keys + (place * KEY_HEADS + head - HEADS) * D
            tl.store(to + half, cast(low * cos - high * sin, keys.dtype.element_ty))
            tl.store(to + D // 2 + half, cast(high * cos + low * sin, keys.dtype.element_ty))


def prepare_qkv_triton(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    rope: Tensor,
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
) -> Tensor:
    """Run prepare_qkv_torch as one kernel."""
    key_heads, dim = keys.shape[2:]
    out = torch.empty((len(qkv), heads, dim), dtype=qkv.dtype, device=qkv.device)
    _prepare_kernel[(len(qkv), heads + 2 * key_heads)](
        qkv, q_norm, k_norm, eps, rope, rows.positions, rows.seq, rows.tables, keys, values, out,
        qkv.stride(0), rows.tables.shape[1], BLOCK_SIZE=rows.block_size, HEADS=heads,
        KEY_HEADS=key_heads, D=dim, num_warps=1,
    )  # fmt: skip
    return out


def attend_gqa_triton(q: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """Run attend_gqa_torch by torch's fused attention, sequence by sequence; chunks alone."""
    key_heads, dim = keys.shape[2:]
    found = torch.empty_like(q)
    for sequence, (first, length, start) in enumerate(rows.spans):
        end = start + length
        used = -(-end // rows.block_size)
        blocks = rows.tables[sequence, :used].long()
        k = keys[blocks].view(-1, key_heads, dim)[:end].transpose(0, 1)[None]
        v = values[blocks].view(-1, key_heads, dim)[:end].transpose(0, 1)[None]
        own = q[first : first + length].transpose(0, 1)[None]
        mask = None
        if start:
            at = torch.arange(start, end, device=q.device)[:, None]
            mask = torch.arange(end, device=q.device) <= at
        o = F.scaled_dot_product_attention(
            own, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        found[first : first + length] = o[0].transpose(0, 1)
    return found.flatten(1)


@triton.jit
def _add_norm_kernel(
    h, parts, weight, h_out, x_out, eps, width, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    real = column < width
    scales = tl.load(weight + column, mask=real, other=0.0)
    # Before the wait: products that follow read nothing but their weights before theirs.
    begin_next(OVERLAP)
    await_previous(OVERLAP)
    value = tl.load(h + row * width + column, mask=real, other=0.0).to(tl.float32)
    if PARTS > 0:
        total = tl.zeros((WIDTH,), tl.float32)
        for part in tl.static_range(PARTS):
            at = parts + (row * PARTS + part) * width + column
            total += tl.load(at, mask=real, other=0.0).to(tl.float32)
        value = cast(value + total, h_out.dtype.element_ty).to(tl.float32)
        tl.store(h_out + row * width + column, cast(value, h_out.dtype.element_ty), mask=real)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    normed = value * scale * scales
    tl.store(x_out + row * width + column, cast(normed, x_out.dtype.element_ty), mask=real)


def add_norm_triton(
    h: Tensor, parts: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Run add_norm_torch as one kernel."""
    rows, width = h.shape
    total, x = (h if parts is None else torch.empty_like(h)), torch.empty_like(h)
    _add_norm_kernel[(rows,)](
        h, h if parts is None else parts.contiguous(), weight, total, x, eps, width,
        WIDTH=triton.next_power_of_2(width), PARTS=0 if parts is None else parts.shape[1],
        num_warps=8, **overlapping(h.device, rows, OVERLAP_ROWS),
    )  # fmt: skip
    return total, x
