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
from engine.kernels.overlap import await_previous, begin_next, overlapping
from engine.kernels.places import completes, entry_places, norm
from engine.kernels.record_device import record_tile_device, store_record_device
from engine.kernels.records import layout_of, pack_torch, unpack_torch
from engine.kernels.rope import rotate_device, rotate_pairs_device, rotate_torch
from engine.kernels.roundtrip import round_trip, round_trip_device, signs_device, signs_for
from engine.kernels.rows import Rows
from engine.kernels.triton_compat import cast, dot, tl, triton
from engine.plan.records import ALIGNMENT, Form

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
        pool: [blocks, block_size / ratio, ...] in that form, written.
        ratio: tokens per entry.
        form: how keys are stored.

    Raises:
        ValueError: the pool is of another form.
    """
    layout_of(pool, form, norm_w.shape[0], 0, latent.dtype)
    key = torch.nn.functional.linear(latent, dequantise(wk, latent.dtype))
    entry = rows.positions // ratio
    key = rotate_torch(norm(key, norm_w, eps), rope, entry * ratio)
    done = completes(rows, ratio)
    places = torch.where(done, entry_places(rows, rows.seq, entry, ratio), 0)
    stored = torch.where(done[:, None], pack_torch(key, form), 0)
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
    key_form: Form = "none",
    candidates: Tensor | None = None,
    candidate_group: int = 0,
) -> Tensor:
    """Score all entries of every row.

    Args:
        q: [T, Hi, Di].
        head_w: [T, Hi], scaled; may be negative.
        keys: [blocks, block_size / ratio, ...].
        rows: of the pass.
        ratio: tokens per entry.
        key_form: of the keys.
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
        own = keys.view(-1, keys.shape[-1])[torch.where(seen, places, 0)]
        own = unpack_torch(own, key_form, q.shape[-1], 0, q.dtype).float()
        found = reference.index_scores(q[part].float(), own, head_w[part].float())
        if candidates is not None:
            seen = seen & candidates[part].repeat_interleave(candidate_group, 1)[:, : len(entries)]
        parts.append(found.masked_fill(~seen, -torch.inf))
    return torch.cat(parts)


# ---------------------------------------------------------------- Triton

#: Passes of at most so many rows a sequence are scored row by row (decode, verification).
SHORT = 8
#: Heads of a tile of queries.
HEADS = 16
#: Of a prompt: heads of a tile, tiles of a program, which reads the transform's matrix once, and
#: its warps. No pipeline: turns would fill shared memory, and few programs fit beside each other.
PROMPT_HEADS = (64, 8, 4)
#: Entries and warps of a program that scores rows one by one, and how many programs there are at
#: most; more tiles of entries are visited in turn.
SHORT_TILE = (64, 4, 512)
#: Rows, entries, warps and pipeline stages of a program that scores a prompt.
LONG_TILE = (64, 128, 4, 3)


@triton.jit
def _index_keys(
    latent, wk, norm_w, eps, rope, positions, seq, tables, table_width, pool, count,
    RATIO: tl.constexpr, PER_BLOCK: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr,
    PAIRS: tl.constexpr, FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program i: rows i * BM and after. WIDE is the latents' width, D the keys'."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    kind: tl.constexpr = latent.dtype.element_ty
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    real = row < count
    column = tl.arange(0, D)
    acc = tl.zeros((BM, D), tl.float32)
    for k in range(0, WIDE, BK):
        deep = k + tl.arange(0, BK)
        x = tl.load(
            latent + row.to(tl.int64)[:, None] * WIDE + deep[None, :], mask=real[:, None], other=0.0
        )
        w = tl.load(wk + column[None, :] * WIDE + deep[:, None])
        acc = dot(x, cast(w.to(tl.float32), x.dtype), acc)
    key = cast(acc, kind).to(tl.float32)
    scale = tl.rsqrt(tl.sum(key * key, 1) / D + eps)
    key = cast(key * scale[:, None] * tl.load(norm_w + column).to(tl.float32)[None, :], kind)
    position = tl.load(positions + row, mask=real, other=0)
    entry = position // RATIO
    turned = rotate_device(key.to(tl.float32), rope, entry * RATIO, PAIRS)
    done = real & ((position + 1) % RATIO == 0)
    g = tl.load(seq + row, mask=done, other=0)
    block = tl.load(tables + g * table_width + entry // PER_BLOCK, mask=done, other=0)
    place = block.to(tl.int64) * PER_BLOCK + entry % PER_BLOCK
    store_record_device(pool, place, cast(turned, kind), done, D, 0, FORM)


def index_keys_from_latent_triton(
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
    """Do as `index_keys_from_latent_torch`; one launch."""
    count, wide = latent.shape
    layout_of(pool, form, norm_w.shape[0], 0, latent.dtype)
    tile = 16 if count <= 1024 else 64
    _index_keys[(triton.cdiv(count, tile),)](
        latent, wk.data, norm_w, eps, rope, rows.positions, rows.seq, rows.tables,
        rows.tables.shape[1], pool, count,
        RATIO=ratio, PER_BLOCK=rows.block_size // ratio, WIDE=wide, D=norm_w.shape[0],
        PAIRS=rope.shape[2], FORM=form, BM=tile, BK=min(wide, 128), num_warps=4,
        **overlapping(latent.device, count),
    )  # fmt: skip


@triton.jit
def index_queries_device(
    q, q_stride, rope, positions, signs, out, first, count,
    H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """TILES * ROWS heads from `first` on, of `count`, counted over all rows of the pass."""
    matrix = signs_device(signs, FORM, D)
    column = tl.arange(0, D)[None, :]
    for tile in range(TILES):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        real = row < count
        t = row // H
        at = q + (t.to(tl.int64) * q_stride + row % H * D)[:, None]
        position = tl.load(positions + t, mask=real, other=0)
        x = tl.load(at + column, mask=real[:, None], other=0.0)
        # From the cache: an exchange between threads would go through shared memory.
        partner = tl.load(at + (column ^ 1), mask=real[:, None], other=0.0).to(tl.float32)
        turned = rotate_pairs_device(x.to(tl.float32), partner, rope, position, PAIRS)
        turned = cast(turned, x.dtype)
        stored = round_trip_device(turned, FORM, 0, matrix)
        tl.store(out + row.to(tl.int64)[:, None] * D + column, stored, mask=real[:, None])


@triton.jit
def _index_queries(
    q, q_stride, rope, positions, signs, out, count,
    H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Program i: heads i * TILES * ROWS and after."""
    index_queries_device(
        q, q_stride, rope, positions, signs, out, tl.program_id(0) * (TILES * ROWS), count,
        H, D, PAIRS, FORM, ROWS, TILES,
    )  # fmt: skip


def index_queries_triton(
    q_raw: Tensor, rope: Tensor, rows: Rows, *, head_dim: int, form: Form
) -> Tensor:
    """Do as `index_queries_torch`; one launch."""
    tokens, heads = q_raw.shape[0], q_raw.shape[1] // head_dim
    out = q_raw.new_empty((tokens, heads, head_dim))
    few = tokens * heads <= 1 << 14
    tile, tiles, warps = (HEADS, 1, 4) if few else PROMPT_HEADS
    _index_queries[(triton.cdiv(tokens * heads, tiles * tile),)](
        q_raw, q_raw.stride(0), rope, rows.positions,
        signs_for(form, head_dim, q_raw.dtype, q_raw.device), out, tokens * heads,
        H=heads, D=head_dim, PAIRS=rope.shape[2], FORM=form, ROWS=tile, TILES=tiles,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return out


@triton.jit
def _key_tile(
    keys, tables, table_width, g, entry, mask, PER_BLOCK: tl.constexpr, D: tl.constexpr,
    FORM: tl.constexpr, UNITS: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Keys of entries [N] of sequence g: [N, D]; those of the dummy block where the mask is false."""
    block = tl.load(tables + g * table_width + entry // PER_BLOCK, mask=mask, other=0)
    place = block.to(tl.int64) * PER_BLOCK + entry % PER_BLOCK
    return record_tile_device(keys, place * UNITS, D, 0, FORM, kind)


@triton.jit
def _scores_short(
    q, head_w, keys, positions, seq, tables, table_width, candidates, groups, out, best, width,
    idle,
    RATIO: tl.constexpr, PER_BLOCK: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    FORM: tl.constexpr, UNITS: tl.constexpr, HP: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, BUILD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (i, t): every num_programs(0)-th tile of entries of row t; keys are the rows."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    t = tl.program_id(1)
    g = tl.load(seq + t)
    seen = (tl.load(positions + t) + 1) // RATIO
    if seen > idle:
        head = tl.arange(0, HP)
        at = t.to(tl.int64) * (H * D) + head[None, :] * D + tl.arange(0, D)[:, None]
        query = tl.load(q + at, mask=(head < H)[None, :], other=0.0)
        weight = tl.load(head_w + t * H + head, mask=head < H, other=0.0).to(tl.float32)
        for first in range(tl.program_id(0) * BN, seen, tl.num_programs(0) * BN):
            entry = first + tl.arange(0, BN)
            key = _key_tile(
                keys, tables, table_width, g, entry, entry < seen, PER_BLOCK, D, FORM, UNITS,
                query.dtype,
            )  # fmt: skip
            found = dot(key, query, tl.zeros((BN, HP), tl.float32))
            score = tl.sum(tl.maximum(found, 0.0) * weight[None, :], 1)
            score = tl.where(entry < seen, score, float("-inf"))
            row = t.to(tl.int64)
            if BUILD:
                group = first // GROUP + tl.arange(0, BN // GROUP)
                highest = tl.max(tl.reshape(score, (BN // GROUP, GROUP)), 1)
                tl.store(best + row * groups + group, highest, mask=group < groups)
            if MASKED:
                kept = tl.load(
                    candidates + row * groups + entry // GROUP, mask=entry < seen, other=0
                )
                score = tl.where(kept != 0, score, float("-inf"))
            tl.store(out + row * width + entry, score, mask=entry < width)


# Not made anew for one sequence or two, nor for every number of rows.
@triton.jit(do_not_specialize=["idle", "from_row", "to_row", "sequences"])
def _scores_long(
    q, head_w, keys, positions, first, lengths, tables, table_width, candidates, groups, out, best,
    width, idle, from_row, to_row, sequences,
    RATIO: tl.constexpr, PER_BLOCK: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    FORM: tl.constexpr, UNITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GP: tl.constexpr, GROUP: tl.constexpr,
    MASKED: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """Program (j, i): tile j of entries for the i-th tile of rows, counted sequence by sequence.

    Heads are summed up in registers, one product of queries and keys each. Offsets within a tile
    are 32 bits wide: wider ones would take those registers.
    """
    j, i = tl.program_id(0), tl.program_id(1)
    seq = tl.arange(0, GP)
    low = tl.load(first + seq, mask=seq < sequences, other=0)
    high = tl.minimum(low + tl.load(lengths + seq, mask=seq < sequences, other=0), to_row)
    low = tl.maximum(low, from_row)
    tiles = tl.cdiv(tl.maximum(high - low, 0), BM)
    after = tl.cumsum(tiles, 0)
    g = tl.sum((after <= i).to(tl.int32), 0)
    if g < sequences:
        mine = seq == g
        top = tl.sum(tl.where(mine, low + (i - after + tiles) * BM, 0), 0)
        count = tl.sum(tl.where(mine, high, 0), 0) - top
        r = tl.arange(0, BM)
        own = r < count
        position = tl.load(positions + top) + r
        most = (tl.load(positions + top) + tl.minimum(count, BM)) // RATIO
        if (most > idle) & (most > j * BN):
            entry = j * BN + tl.arange(0, BN)
            key = _key_tile(
                keys, tables, table_width, g, entry, entry < most, PER_BLOCK, D, FORM, UNITS,
                q.dtype.element_ty,
            )  # fmt: skip
            key = tl.trans(key)
            score = tl.zeros((BM, BN), tl.float32)
            tile_q = q + top.to(tl.int64) * (H * D)
            tile_w = head_w + top.to(tl.int64) * H
            at = (r * (H * D))[:, None] + tl.arange(0, D)[None, :]
            for h in range(H):
                query = tl.load(tile_q + h * D + at, mask=own[:, None], other=0.0)
                weight = tl.load(tile_w + h + r * H, mask=own, other=0.0).to(tl.float32)
                found = dot(query, key, tl.zeros((BM, BN), tl.float32))
                score += tl.maximum(found, 0.0) * weight[:, None]
            shown = (entry + 1)[None, :] * RATIO <= (position + 1)[:, None]
            score = tl.where(shown, score, float("-inf"))
            to = (top - from_row).to(tl.int64)
            if BUILD:
                group = tl.arange(0, BN // GROUP)
                highest = tl.max(tl.reshape(score, (BM, BN // GROUP, GROUP)), 2)
                into = best + to * groups + j * (BN // GROUP)
                inside = own[:, None] & (j * (BN // GROUP) + group < groups)[None, :]
                tl.store(into + (r * groups)[:, None] + group[None, :], highest, mask=inside)
            if MASKED:
                of_tile = candidates + top.to(tl.int64) * groups
                of_row = of_tile + (r * groups)[:, None] + (entry // GROUP)[None, :]
                kept = tl.load(of_row, mask=shown & own[:, None], other=0)
                score = tl.where(kept != 0, score, float("-inf"))
            into = out + to * width + j * BN
            inside = own[:, None] & (entry < width)[None, :]
            tl.store(into + (r * width)[:, None] + tl.arange(0, BN)[None, :], score, mask=inside)


def scores_triton(
    q: Tensor,
    head_w: Tensor,
    keys: Tensor,
    rows: Rows,
    *,
    ratio: int,
    idle: int,
    key_form: Form = "none",
    first: int = 0,
    last: int | None = None,
    candidates: Tensor | None = None,
    candidate_group: int = 0,
    build: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Score the entries of rows first .. last - 1, as `scores_torch` but for what nobody reads.

    Args:
        q: [T, Hi, Di].
        head_w: [T, Hi].
        keys: [blocks, block_size / ratio, ...].
        rows: of the pass.
        ratio: tokens per entry.
        idle: rows that see at most so many entries may be left out.
        key_form: of the keys.
        first: row.
        last: row, T by default.
        candidates: bool [T, ceil(E / candidate_group)] or None.
        candidate_group: entries of a group.
        build: give the highest score of each group as well, before candidates limit it.

    Returns:
        float32 [last - first, E]: what lies at or beyond the entries that a row sees is undefined
        (-inf or not written), and so is the row of an idle one.
        float32 [last - first, ceil(E / candidate_group)], likewise, if built.

    Raises:
        ValueError: the keys are of another form.
    """
    record = layout_of(keys, key_form, q.shape[-1], 0, q.dtype)
    last = rows.num_rows if last is None else last
    count, (heads, dim) = last - first, q.shape[1:]
    width = max(1, rows.max_end // ratio)
    out = q.new_empty((count, width), dtype=torch.float32)
    groups = -(-width // candidate_group) if candidate_group else 0
    best = q.new_empty((count, groups), dtype=torch.float32) if build else None
    mask = None if candidates is None else candidates.view(torch.int8)
    shared = {
        "RATIO": ratio, "PER_BLOCK": rows.block_size // ratio, "H": heads, "D": dim,
        "GROUP": candidate_group, "MASKED": mask is not None, "BUILD": build, "FORM": key_form,
        "UNITS": dim // 8 if record is None else record.nbytes // ALIGNMENT,
    }  # fmt: skip
    if rows.max_length <= SHORT:
        tile, warps, programs = SHORT_TILE
        padded = max(16, triton.next_power_of_2(heads))
        splits = min(triton.cdiv(width, tile), max(1, programs // count))
        part = slice(first, last)
        _scores_short[(splits, count)](
            q[part], head_w[part], keys, rows.positions[part], rows.seq[part], rows.tables,
            rows.tables.shape[1], None if mask is None else mask[part], groups, out, best, width,
            idle, **shared, HP=padded, BN=tile, num_warps=warps,
            **overlapping(q.device, count),
        )  # fmt: skip
    else:
        bm, bn, warps, stages = LONG_TILE
        # A sequence's last tile may be short, so that there is up to one more for each.
        grid = (triton.cdiv(width, bn), count // bm + rows.num_sequences)
        _scores_long[grid](
            q, head_w, keys, rows.positions, rows.first, rows.lengths, rows.tables,
            rows.tables.shape[1], mask, groups, out, best, width, idle, first, last,
            rows.num_sequences, **shared, BM=bm, BN=bn,
            GP=max(16, triton.next_power_of_2(rows.num_sequences)),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, best
