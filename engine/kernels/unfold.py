"""Cached keys of a long pass as plain numbers, in memory of its own.

A prompt's rows attend the same keys over and over, several hundred times each. Unpacking records in
the attention's walk, as decode does, would take a sixth of its time there; so a pass of many rows
unpacks every key once, and attends numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kernels.record_device import record_tile_device
from engine.kernels.records import layout_of
from engine.kernels.rows import Rows
from engine.kernels.triton_compat import tl, triton
from engine.plan.records import ALIGNMENT, Form

#: Passes of more rows are worth it: shorter ones are bound by their launches, of which this is five.
MOST_ROWS_PACKED = 2048
#: Most entries that are unpacked: 128 MiB at the models' width.
MOST_ENTRIES = 1 << 17


@dataclass(frozen=True, slots=True)
class Keys:
    """What attend takes of keys; rows name places in these."""

    k_rows: Tensor
    ring: Tensor
    entries: Tensor | None
    choice: Tensor | None
    rows: Rows


def is_worth_it(rows: Rows, entries: Tensor | None) -> bool:
    """Whether a pass over records should unpack them first; from host numbers alone."""
    if rows.num_rows <= MOST_ROWS_PACKED:
        return False
    return entries is None or _blocks(rows) * entries.shape[1] <= MOST_ENTRIES


def _blocks(rows: Rows) -> int:
    """Blocks of all sequences of a pass, all as long as the longest may be."""
    return rows.num_sequences * min(rows.tables.shape[1], -(-rows.max_end // rows.block_size))


def unfolded(
    keys: Keys, window_form: Form, entry_form: Form, *, width: int, tail: int, dtype: torch.dtype
) -> Keys:
    """Unpack all keys of a pass: its own, its sequences' rings and their entries.

    Args:
        keys: records.
        window_form: of k_rows and ring.
        entry_form: of entries.
        width: of a key.
        tail: rotary dimensions.
        dtype: of the numbers.
    """
    rows, ring, entries, choice = keys.rows, keys.ring, keys.entries, keys.choice
    count, window = rows.num_sequences, ring.shape[1]
    shape = width, tail, dtype
    order = torch.arange(count, dtype=torch.int32, device=ring.device)
    own = _unpack(keys.k_rows, rows.num_rows, window_form, *shape)
    kept = _unpack(ring, count * window, window_form, *shape, slots=rows.slots, window=window)
    kept = kept.view(count, window, width)
    if entries is None:
        return Keys(own, kept, None, None, replace(rows, slots=order))
    blocks, per_block = _blocks(rows), entries.shape[1]
    # Where a block of the pool is found; of blocks that sequences share, one copy will do.
    inverse = torch.empty(entries.shape[0], dtype=torch.int32, device=ring.device)
    found = _unpack(entries, blocks * per_block, entry_form, *shape, rows=rows, inverse=inverse)
    tables = torch.arange(blocks, dtype=torch.int32, device=ring.device).view(count, -1)
    if choice is not None:
        given, size = choice.contiguous(), 1024
        choice = torch.empty_like(given)
        _translate[(triton.cdiv(choice.numel(), size),)](
            given, inverse, choice, choice.numel(), PER_BLOCK=per_block, N=size
        )
    rows = replace(rows, slots=order, tables=tables)
    return Keys(own, kept, found.view(blocks, per_block, width), choice, rows)


def _unpack(
    records: Tensor,
    count: int,
    form: Form,
    width: int,
    tail: int,
    dtype: torch.dtype,
    *,
    slots: Tensor | None = None,
    window: int = 1,
    rows: Rows | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    """Unpack `count` rows [count, width]: consecutive ones, those of rings, or of blocks."""
    record = layout_of(records, form, width, tail, dtype)
    assert record is not None
    out = torch.empty(count, width, dtype=dtype, device=records.device)
    tile = 32
    per_block = records.shape[1] if rows is not None else 1
    _unpack_kernel[(triton.cdiv(count, tile),)](
        records, out, slots, inverse,
        None if rows is None else rows.starts, None if rows is None else rows.lengths,
        None if rows is None else rows.tables, 0 if rows is None else rows.tables.shape[1],
        count, 1 if rows is None else count // rows.num_sequences,
        W=window, RATIO=1 if rows is None else rows.block_size // per_block, PER_BLOCK=per_block,
        RING=slots is not None, BLOCKS=rows is not None, UNITS=record.nbytes // ALIGNMENT,
        D=width, TAIL=tail, FORM=form, N=tile, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_width", "count", "per_sequence"])
def _unpack_kernel(
    records, out, slots, inverse, starts, lengths, tables, table_width, count, per_sequence,
    W: tl.constexpr, RATIO: tl.constexpr, PER_BLOCK: tl.constexpr, RING: tl.constexpr,
    BLOCKS: tl.constexpr, UNITS: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr,
    FORM: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program i: rows i * N and after. Blocks of which a sequence sees nothing stay undefined."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    real = row < count
    place = row.to(tl.int64)
    if RING:
        slot = tl.load(slots + row // W, mask=real, other=0)
        place = slot.to(tl.int64) * W + row % W
    if BLOCKS:
        g, entry = row // per_sequence, row % per_sequence
        end = tl.load(starts + g, mask=real, other=0) + tl.load(lengths + g, mask=real, other=0)
        real = real & (entry // PER_BLOCK * PER_BLOCK < end // RATIO)
        block = tl.load(tables + g * table_width + entry // PER_BLOCK, mask=real, other=0)
        place = block.to(tl.int64) * PER_BLOCK + entry % PER_BLOCK
        tl.store(inverse + block, row // PER_BLOCK, mask=real & (entry % PER_BLOCK == 0))
    place = tl.where(real, place, 0) * UNITS
    x = record_tile_device(records, place, D, TAIL, FORM, out.dtype.element_ty)
    to = out + row.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(to, x, mask=real[:, None])


@triton.jit(do_not_specialize=["count"])
def _translate(choice, inverse, out, count, PER_BLOCK: tl.constexpr, N: tl.constexpr):
    """Program i: N places of a pool's entries, as places of the copies."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    place = tl.load(choice + at, mask=at < count, other=-1)
    block = tl.load(inverse + place // PER_BLOCK, mask=place >= 0, other=0)
    copy = block * PER_BLOCK + place % PER_BLOCK
    tl.store(out + at, tl.where(place >= 0, copy, -1), mask=at < count)
