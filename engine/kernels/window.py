"""Window keys (model.md 2.4 step 4): norm, rotation and storage form, and the rings that keep them.

A ring is [slots, W, ...]: position p of a sequence lies in row p mod W of its slot, as D numbers or
as a record of bytes (engine.plan.records). The keys of the running pass are used from where
window_keys leaves them, k_rows [T, ...], of the same form, and enter the ring by store_window
afterwards: so a chunk's first rows still find the keys that its last rows replace, and rows that turn
out not to count (rejected drafts) are never stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.record_device import store_record_device
from engine.kernels.records import layout_of, pack_torch, rows_like
from engine.kernels.rope import rotate_torch
from engine.kernels.rows import Rows
from engine.kernels.triton_compat import cast, tl, triton
from engine.plan.records import Form


def _check(
    kv: Tensor, rope: Tensor, rows: Rows, ring: Tensor | None, form: Form, *, store: bool
) -> None:
    if ring is not None:
        layout_of(ring, form, kv.shape[1], 2 * rope.shape[-1], kv.dtype)
    if store and (ring is None or not rows.is_decode):
        raise ValueError(
            "store: expected a ring and sequences of one row, got "
            f"{'no ring' if ring is None else f'up to {rows.max_length} rows'}"
        )


def window_keys_torch(
    kv: Tensor,
    norm_w: Tensor,
    eps: float,
    rope: Tensor,
    rows: Rows,
    ring: Tensor | None,
    *,
    form: Form,
    store: bool,
) -> Tensor:
    """Window keys of all rows, as a cache stores them.

    RMSNorm, rounded to kv's dtype; rotation, rounded likewise; packed in `form`.

    Args:
        kv: float32 or bfloat16 [T, D], rows may be strided.
        norm_w: [D].
        eps: of the norm.
        rope: table float32 [P, 2, R].
        rows: the pass.
        ring: [slots, W, ...] in that form; needed to store. Plain k_rows are rounded to its dtype.
        form: see engine.plan.records.
        store: write the keys into the ring at once. Only for sequences of one row: that row
            replaces the one key its window no longer covers.

    Returns:
        k_rows: [T, D] in kv's dtype for form "none", else uint8 [T, nbytes].

    Raises:
        ValueError: store without a ring or with longer sequences, or a ring of another form.
    """
    _check(kv, rope, rows, ring, form, store=store)
    wide = kv.to(torch.promote_types(kv.dtype, torch.float32))
    rho = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    k = (wide * rho * norm_w.to(wide.dtype)).to(kv.dtype)
    k = rotate_torch(k, rope, rows.positions)
    k = pack_torch(k, form, tail=2 * rope.shape[-1])
    if ring is not None:
        k = k.to(ring.dtype).to(k.dtype)
        if store:
            store_window_torch(k, rows, ring)
    return k


def store_window_torch(
    k_rows: Tensor, rows: Rows, ring: Tensor, lengths: Tensor | None = None
) -> None:
    """Keep the keys of the last W rows of each sequence.

    Args:
        k_rows: [T, ...].
        rows: the pass; what comes before a sequence's first row belongs to nobody.
        ring: [slots, W, ...], written. Slot 0 takes what is not kept.
        lengths: int32 [G], rows of each sequence that count, where not all do; may be 0.
    """
    width = ring.shape[1]
    seq = rows.seq.long()
    counted = (rows.lengths if lengths is None else lengths)[seq]
    offset = torch.arange(rows.num_rows, device=seq.device, dtype=torch.int32) - rows.first[seq]
    kept = (offset >= 0) & (offset < counted) & (offset >= counted - width)
    slots = torch.where(kept, rows.slots[seq], 0).long()
    ring.index_put_((slots, rows.positions.long() % width), k_rows.to(ring.dtype))


@triton.jit
def window_keys_kernel(
    kv,
    norm_w,
    rope,
    k_rows,
    ring,
    positions,
    slots,
    stride,
    eps,
    W: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    FORM: tl.constexpr,
    HAS_RING: tl.constexpr,
    STORE: tl.constexpr,
):
    """One row a program. What depends on nothing is loaded first: latency is all it costs."""
    row = tl.program_id(0)
    column = tl.arange(0, D)[None, :]
    position = tl.load(positions + row)
    source = kv + row.to(tl.int64) * stride
    x = tl.load(source + column)
    # The other half of each pair is loaded again rather than fetched from another thread.
    partner = tl.load(source + (column ^ 1)).to(tl.float32)
    weight = tl.load(norm_w + column).to(tl.float32)
    partner_weight = tl.load(norm_w + (column ^ 1)).to(tl.float32)
    if STORE:
        slot = tl.load(slots + row).to(tl.int64)
    tail = column - (D - 2 * R)
    at = rope + position.to(tl.int64) * (2 * R) + tail // 2
    cos = tl.load(at, mask=tail >= 0, other=1.0)
    sin = tl.load(at + R, mask=tail >= 0, other=0.0)
    sin = tl.where(column % 2 == 0, -sin, sin)
    wide = x.to(tl.float32)
    rho = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
    normed = cast(wide * rho * weight, x.dtype).to(tl.float32)
    partner = cast(partner * rho * partner_weight, x.dtype).to(tl.float32)
    x = cast(normed * cos + partner * sin, x.dtype)
    if FORM == "none" and HAS_RING:
        x = cast(x.to(tl.float32), ring.dtype.element_ty).to(tl.float32).to(x.dtype)
    one = tl.zeros((1,), tl.int64)
    there = one == 0
    store_record_device(k_rows, one + row, x, there, D, 2 * R, FORM)
    if STORE:
        store_record_device(ring, one + slot * W + position % W, x, there, D, 2 * R, FORM)


@triton.jit
def _store_window(
    k_rows,
    ring,
    positions,
    seq,
    slots,
    first,
    lengths,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """One row of WIDTH numbers or words a program; most rows of a long chunk have nothing to do."""
    row = tl.program_id(0)
    sequence = tl.load(seq + row)
    counted = tl.load(lengths + sequence)
    offset = row - tl.load(first + sequence)
    if (offset >= 0) & (offset < counted) & (offset >= counted - W):
        slot = tl.load(slots + sequence).to(tl.int64)
        column = tl.arange(0, PADDED)
        x = tl.load(k_rows + row.to(tl.int64) * WIDTH + column, mask=column < WIDTH)
        if PLAIN:
            x = cast(x.to(tl.float32), ring.dtype.element_ty)
        target = ring + (slot * W + tl.load(positions + row) % W) * WIDTH + column
        tl.store(target, x, mask=column < WIDTH)


def window_keys_triton(
    kv: Tensor,
    norm_w: Tensor,
    eps: float,
    rope: Tensor,
    rows: Rows,
    ring: Tensor | None,
    *,
    form: Form,
    store: bool,
) -> Tensor:
    """Run window_keys_torch as one kernel; D is a power of two."""
    _check(kv, rope, rows, ring, form, store=store)
    tokens, dim = kv.shape
    k_rows = rows_like(kv, form, dim, 2 * rope.shape[-1], tokens)
    window_keys_kernel[(tokens,)](
        kv,
        norm_w,
        rope,
        k_rows,
        k_rows if ring is None else ring,
        rows.positions,
        rows.slots,
        kv.stride(0),
        eps,
        W=1 if ring is None else ring.shape[1],
        D=dim,
        R=rope.shape[-1],
        FORM=form,
        HAS_RING=ring is not None,
        STORE=store,
        num_warps=4 if dim > 128 else 1,
    )
    return k_rows


def store_window_triton(
    k_rows: Tensor, rows: Rows, ring: Tensor, lengths: Tensor | None = None
) -> None:
    """Run store_window_torch as one kernel; what is not kept is written nowhere."""
    plain = ring.dtype != torch.uint8
    if not plain:
        k_rows, ring = k_rows.view(torch.int32), ring.view(torch.int32)
    tokens, width = k_rows.shape
    _store_window[(tokens,)](
        k_rows,
        ring,
        rows.positions,
        rows.seq,
        rows.slots,
        rows.first,
        rows.lengths if lengths is None else lengths,
        W=ring.shape[1],
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        PLAIN=plain,
        num_warps=2,
    )
