"""Attention of one pass over window keys and compressed entries (model.md 2.4).

Every row's H heads attend one set of keys, which are the values too: the last W positions, as far
as its sequence's floor allows, and compressed entries, either those of a choice or all that are
visible. Rows of a *block* (a draft's, model.md 2.11) see all of it and the W positions before it. A
sink per head takes probability and gives no value. Queries come raw from their projection: head norm
(V4) and rotation happen here, and the outputs are rotated back. Those of a decode step come ready
(engine.kernels.inputs): every program of a row would ready them anew.

Where keys lie:

* position p of sequence g at or after starts[g]: k_rows[first[g] + p - starts[g]];
* an earlier position: ring[slots[g], p mod W];
* entry j of g: row tables[g, j // n] * n + j mod n of entries seen as [blocks * n, ...].

A key is D numbers, or a record of bytes that the kernel unpacks as it reads (engine.plan.records).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kernels.attention_kernel import attend_kernel, combine_kernel
from engine.kernels.overlap import overlapping
from engine.kernels.records import layout_of, unpack_torch
from engine.kernels.rope import rotate_torch
from engine.kernels.rows import Rows
from engine.kernels.unfold import Keys, is_worth_it, unfolded
from engine.plan.records import ALIGNMENT, Form

#: Rows whose keys the torch form gathers at a time: bounds the memory it takes.
_CHUNK = 32


def ready_queries_torch(
    q: Tensor, heads: int, head_norm_eps: float | None, rope: Tensor, rows: Rows
) -> Tensor:
    """Head norm and rotation of queries, as attention does them to raw ones.

    Args:
        q: [T, H * D].
        heads: H.
        head_norm_eps: of V4's norm per query head; None without it.
        rope: table float32 [P, 2, R].
        rows: the pass.

    Returns:
        [T, H * D] in q's dtype.
    """
    q = q.view(len(q), heads, -1)
    wide = torch.promote_types(q.dtype, torch.float32)
    if head_norm_eps is not None:
        square = q.to(wide).square().mean(-1, keepdim=True)
        q = (q.to(wide) * torch.rsqrt(square + head_norm_eps)).to(q.dtype)
    return rotate_torch(q, rope, rows.positions).flatten(1)


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
    window_form: Form = "none",
    entry_form: Form = "none",
    block: int = 0,
    ready: bool = False,
) -> Tensor:
    """Attention of all rows.

    Args:
        q: float32 or bfloat16 [T, H * D], before head norm and rotation.
        k_rows: window keys of this pass: [T, D], or uint8 [T, nbytes] in a narrow form.
        ring: [slots, W, ...] likewise, window keys of earlier passes.
        entries: [blocks, n, ...] likewise, n = block_size // ratio; None in window layers.
        choice: int32 [T, K], rows of entries seen as [blocks * n, ...], ascending, then -1 as
            padding; None to attend every visible entry: j < (position + 1) // ratio.
        sink: float32 [H], a logit.
        rope: table float32 [P, 2, R].
        rows: the pass.
        ratio: tokens per entry; 0 in window layers.
        head_norm_eps: of V4's norm per query head; None without it.
        window: W.
        scale: of the logits.
        window_form: of k_rows and ring.
        entry_form: of entries.
        block: rows of every sequence in a pass whose rows see each other, later ones too; 0 for a
            pass in which rows see what is before them.
        ready: whether q has gone through head norm and rotation (ready_queries_torch).

    Returns:
        [T, H * D] in q's dtype.
    """
    tokens, heads = rows.num_rows, sink.shape[0]
    if not ready:
        q = ready_queries_torch(q, heads, head_norm_eps, rope, rows)
    q = q.view(tokens, heads, -1)
    shape = q.shape[-1], 2 * rope.shape[-1], q.dtype
    wide = torch.promote_types(q.dtype, torch.float32)
    o = torch.empty_like(q)
    for first in range(0, tokens, _CHUNK):
        part = slice(first, min(first + _CHUNK, tokens))
        keys, shown = _window_of(part, k_rows, ring, rows, window, block)
        keys = unpack_torch(keys, window_form, *shape)
        if entries is not None:
            more, visible = _entries_of(part, entries, choice, rows, ratio)
            more = unpack_torch(more, entry_form, *shape)
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
    part: slice, k_rows: Tensor, ring: Tensor, rows: Rows, window: int, block: int
) -> tuple[Tensor, Tensor]:
    """Window keys [M, W + block, ...] of the rows of a part, and which exist: bool [M, W + block]."""
    seq = rows.seq[part].long()
    starts = rows.starts[seq][:, None]
    last = starts + block - 1 if block else rows.positions[part, None]
    at = last + torch.arange(1 - window - block, 1, dtype=torch.int32, device=seq.device)
    own = at >= starts
    passed = torch.where(own, rows.first[seq][:, None] + at - starts, 0).long()
    slots = rows.slots[seq].long()[:, None]
    kept = ring[slots, at.long() % window].to(k_rows.dtype)
    floors = 0 if rows.floors is None else rows.floors[seq][:, None]
    return torch.where(own[..., None], k_rows[passed], kept), at >= floors


def _entries_of(
    part: slice, entries: Tensor, choice: Tensor | None, rows: Rows, ratio: int
) -> tuple[Tensor, Tensor]:
    """Entries [M, K, ...] that the rows of a part attend, and which are real, bool [M, K]."""
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


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work of a pass is cut.

    Args:
        heads: of a program, at least 16.
        keys: of a tile.
        splits: programs that share the keys of a row, each walking its own.
        warps: per program.
        ahead: tiles on their way to shared memory when one is computed.
    """

    heads: int
    keys: int
    splits: int
    warps: int
    ahead: int


#: By rows of the pass, up to each: fewer programs per row where there are more rows.
_FEW_ROWS = {
    2: Tile(heads=16, keys=64, splits=10, warps=8, ahead=1),
    8: Tile(heads=16, keys=64, splits=5, warps=8, ahead=1),
    16: Tile(heads=16, keys=64, splits=3, warps=8, ahead=1),
    32: Tile(heads=64, keys=64, splits=4, warps=8, ahead=1),
    128: Tile(heads=64, keys=64, splits=2, warps=8, ahead=1),
}
#: The same for records, of which few heads read few tiles a program: too few to load ahead.
_FEW_ROWS_RECORDS = {
    2: Tile(heads=16, keys=32, splits=20, warps=4, ahead=0),
    8: Tile(heads=16, keys=64, splits=5, warps=8, ahead=0),
    16: Tile(heads=64, keys=64, splits=5, warps=8, ahead=1),
    32: Tile(heads=64, keys=64, splits=4, warps=8, ahead=1),
    128: Tile(heads=64, keys=64, splits=2, warps=8, ahead=1),
}
#: The same for records of two forms, which few rows do read ahead.
_FEW_ROWS_TWO_FORMS = _FEW_ROWS_RECORDS | {2: Tile(heads=16, keys=32, splits=20, warps=4, ahead=1)}
#: Where all keys are those of a window: too few to be worth parts that must be combined, but for
#: few rows of records, whose unpacking takes longer than that.
_FEW_ROWS_WINDOW = {32: Tile(heads=16, keys=64, splits=1, warps=8, ahead=1)}
_FEW_ROWS_WINDOW_RECORDS = {
    8: Tile(heads=16, keys=32, splits=4, warps=4, ahead=0),
    32: Tile(heads=16, keys=64, splits=1, warps=8, ahead=0),
}
_MANY_ROWS = Tile(heads=64, keys=64, splits=1, warps=8, ahead=1)
#: Without narrow tensor cores.
_FLOAT32 = Tile(heads=16, keys=16, splits=4, warps=4, ahead=0)

#: Rows of a launch: bounds the lists of their keys.
_LAUNCH = 4096
#: Width of choices up to this one: short prompts need no compilation of their own.
_LEAST_CHOICE = 512


def tile_for(
    rows: int, heads: int, window_form: Form, entry_form: Form | None, dtype: torch.dtype
) -> Tile:
    """Choose the cut, from what is the same for all passes of a size.

    Args:
        rows: of the pass.
        heads: of the layer.
        window_form: of window keys.
        entry_form: of entries, None where rows attend none.
        dtype: of the queries.
    """
    if entry_form is None:
        few = _FEW_ROWS_WINDOW if window_form == "none" else _FEW_ROWS_WINDOW_RECORDS
    elif window_form == "none":
        few = _FEW_ROWS
    else:
        few = _FEW_ROWS_RECORDS if window_form == entry_form else _FEW_ROWS_TWO_FORMS
    tile = next((tile for most, tile in few.items() if rows <= most), _MANY_ROWS)
    if dtype == torch.float32:
        tile = _FLOAT32
    most = 1 << max(heads - 1, 15).bit_length()
    return replace(tile, heads=min(tile.heads, most))


def attend_triton(
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
    window_form: Form = "none",
    entry_form: Form = "none",
    block: int = 0,
    ready: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Run attend_torch as one kernel, or two where the keys of a row are split; D a power of two.

    Args:
        q: this and all others as for attend_torch.
        k_rows: as above.
        ring: as above.
        entries: as above, plain numbers or records as ring has them.
        choice: as above.
        sink: as above.
        rope: as above.
        rows: as above.
        ratio: as above.
        head_norm_eps: as above.
        window: as above.
        scale: as above.
        window_form: as above.
        entry_form: as above.
        block: as above.
        ready: as above.
        tile: how to cut, else tile_for.

    Raises:
        ValueError: entries and ring differ in dtype or are of other forms than said, or the ring
            is not `window` wide, or pools are not aligned to 8 numbers or 16 bytes of records.
    """
    width, tail = ring.shape[1], 2 * rope.shape[-1]
    if width != window:
        raise ValueError(f"window: expected the width of the ring, {width}, got {window}")
    if entries is not None and entries.dtype != ring.dtype:
        raise ValueError(f"entries: expected the ring's {ring.dtype}, got {entries.dtype}")
    tokens, heads = rows.num_rows, sink.shape[0]
    dim = q.shape[1] // heads
    record = layout_of(ring, window_form, dim, tail, q.dtype)
    if record and is_worth_it(rows, entries):
        given = Keys(k_rows, ring, entries, choice, rows)
        plain = unfolded(given, window_form, entry_form, width=dim, tail=tail, dtype=q.dtype)
        return attend_triton(
            q, plain.k_rows, plain.ring, plain.entries, plain.choice, sink, rope, plain.rows,
            ratio=ratio, head_norm_eps=head_norm_eps, window=window, scale=scale, block=block,
            ready=ready, tile=tile,
        )  # fmt: skip
    units = dim // 8 if record is None else record.nbytes // ALIGNMENT
    entry_units = units
    if entries is not None:
        of_entry = layout_of(entries, entry_form, dim, tail, q.dtype)
        entry_units = dim // 8 if of_entry is None else of_entry.nbytes // ALIGNMENT
    per_block = 1 if entries is None else entries.shape[1]
    topk = 0 if choice is None else choice.shape[1]
    most = 0
    if entries is not None:
        most = topk if choice is not None else rows.max_end // ratio
    has_entries = entries is not None
    if tile is None:
        tile = tile_for(tokens, heads, window_form, entry_form if has_entries else None, q.dtype)
    o = torch.empty(tokens, heads * dim, dtype=q.dtype, device=q.device)
    parts = sums = scratch = o
    chosen = rows.tables if choice is None else choice
    if tile.splits > 1:
        shape = (tokens, tile.splits, heads)
        parts = torch.empty(*shape, dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
    # Entries of another form begin with a tile of their own.
    keys = (-(-(window + block) // tile.keys) - (-most // tile.keys)) * tile.keys
    lists = torch.empty(min(tokens, _LAUNCH), keys, dtype=torch.int64, device=q.device)
    k_rows = k_rows if record else k_rows.to(ring.dtype)
    for row in range(0, tokens, _LAUNCH):
        attend_kernel[(min(tokens - row, _LAUNCH), -(-heads // tile.heads), tile.splits)](
            q,
            ring,
            _place(k_rows, ring),
            0 if entries is None else _place(entries, ring),
            chosen,
            sink,
            rope,
            rows.positions,
            rows.seq,
            rows.slots,
            rows.starts,
            rows.first,
            rows.first if rows.floors is None else rows.floors,
            parts,
            sums,
            scratch,
            lists,
            row,
            heads,
            topk,
            chosen.stride(0),
            keys,
            scale * math.log2(math.e),
            head_norm_eps or 0.0,
            W=window,
            D=dim,
            R=rope.shape[-1],
            RATIO=max(ratio, 1),
            PER_BLOCK=per_block,
            WINDOW_FORM=window_form,
            ENTRY_FORM=entry_form,
            UNITS=units,
            ENTRY_UNITS=entry_units,
            HAS_ENTRIES=has_entries,
            CHOICE=0 if choice is None else max(1 << (topk - 1).bit_length(), _LEAST_CHOICE),
            HEAD_NORM=head_norm_eps is not None,
            READY=ready,
            HAS_FLOORS=rows.floors is not None,
            IS_DECODE=rows.is_decode,
            BLOCK=block,
            SPLITS=tile.splits,
            M=tile.heads,
            N=tile.keys,
            LIST=1024 if tile.splits == 1 else 256,
            # The place of a key is loaded a tile before the key.
            STAGES=tile.ahead * (1 if tile.heads >= 64 else 2) + 1,
            num_warps=tile.warps,
            **overlapping(q.device, tokens),
        )
    if tile.splits > 1:
        padded = 1 << (tile.splits - 1).bit_length()
        # Many programs of few bytes each would take twice the time of the bytes.
        together = max(1, 8 // padded) if tokens > 32 else 1
        combine_kernel[(tokens, -(-heads // together))](
            parts,
            sums,
            rope,
            rows.positions,
            o,
            heads,
            D=dim,
            R=rope.shape[-1],
            SPLITS=tile.splits,
            PADDED=padded,
            M=together,
            num_warps=4,
            **overlapping(q.device, tokens),
        )
    return o


def _place(tensor: Tensor, ring: Tensor) -> int:
    """Where a tensor begins, counted from a ring in units of 8 numbers, or 16 bytes of records."""
    unit = ALIGNMENT if ring.dtype == torch.uint8 else 8 * ring.itemsize
    place, odd = divmod(tensor.data_ptr() - ring.data_ptr(), unit)
    if odd:
        raise ValueError(f"expected tensors that begin a multiple of {unit} bytes apart")
    return place
