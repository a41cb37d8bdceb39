"""The choice of entries: exact top-k with ties to the lowest index, and candidate groups.

Entries beyond what a row sees have no score. Among equal scores the lowest entry wins, and +0 and
-0 are equal, so that every implementation and every split of a pass chooses alike (model.md 2.6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.index import SHORT, scores_torch, scores_triton
from engine.kernels.overlap import await_previous, begin_next, overlapping
from engine.kernels.places import entry_places
from engine.kernels.rows import Rows
from engine.kernels.triton_compat import tl, triton
from engine.plan.records import Form

# ---------------------------------------------------------------- torch


def choose_torch(
    q: Tensor,
    head_w: Tensor,
    keys: Tensor,
    rows: Rows,
    *,
    ratio: int,
    topk: int,
    key_form: Form = "none",
    candidates: Tensor | None = None,
    candidate_group: int = 0,
    candidate_topk: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Choose the entries each row attends.

    Args:
        q: [T, Hi, Di], index queries.
        head_w: [T, Hi], scaled; may be negative.
        keys: [blocks, block_size / ratio, ...].
        rows: of the pass.
        ratio: tokens per entry.
        topk: most entries of a row.
        key_form: of the keys (engine.plan.records).
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
        key_form=key_form,
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


# ---------------------------------------------------------------- Triton

#: Entries that one program holds in registers; longer rows are chosen from in parts, then merged.
SEGMENT = 4096
#: Entries that may be left to merge; segments grow beyond SEGMENT for very long rows to keep to it.
MERGED = 16384
#: Entries a warp holds: few where rows are few, more in a prompt, which fills the device anyway.
PER_WARP = (256, 1024)
#: Scores held at once while a prompt's rows choose.
CHUNK_SCORES = 1 << 25


@triton.jit
def _order(score, valid):
    """Integers that compare as the scores do, +0 and -0 alike; the lowest integer if not valid."""
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(score == 0.0, 0, bits)
    return tl.where(valid, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)


@triton.jit
def _best(score, valid, k):
    """The k best of a tile [N], N <= 2 ** 15, ties to the lowest index.

    A search for the highest threshold that k scores reach. Each step parts what is left into
    thirds: two counts come in one sum, and a sum over all warps is what takes the time.

    Returns:
        bool [N] which are chosen, int32 [N] how many are chosen before, and how many in all.
    """
    key = _order(score, valid)
    total = tl.sum(valid.to(tl.int32), 0)
    few = total <= k
    low = tl.where(few, -2147483647, -2147483648).to(tl.int64)
    reach = tl.where(few, k, -1)
    left = tl.full((), 1 << 32, tl.int64)  # the threshold lies in low .. low + left - 1
    while (left > 1) & (reach != k):
        step = (left + 2) // 3
        one, two = low + step, tl.minimum(low + 2 * step, 2147483647)
        counts = (key >= one.to(tl.int32)).to(tl.int32)
        counts += (key >= two.to(tl.int32)).to(tl.int32) << 16
        both = tl.sum(counts, 0)
        first, second = both & 0xFFFF, both >> 16
        low = tl.where(second >= k, two, tl.where(first >= k, one, low))
        left = tl.where(second >= k, left - 2 * step, step)
        reach = tl.where(second >= k, second, tl.where(first >= k, first, reach))
    low = low.to(tl.int32)
    above, level = key > low, valid & (key == low)
    # Both running counts in one: neither reaches 2 ** 15.
    running = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), 0)
    spare = k - tl.sum(above.to(tl.int32), 0)
    chosen = above | (level & ((running >> 16) <= spare))
    before = (running & 0xFFFF) + tl.minimum(running >> 16, spare) - chosen.to(tl.int32)
    return chosen, before, tl.minimum(total, k)


@triton.jit
def _write(
    places, row, entry, before, chosen, tables, table_width, g,
    K: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """Put chosen entries, translated to pool rows, at their ranks."""
    block = tl.load(tables + g * table_width + entry // PER_BLOCK, mask=chosen, other=0)
    tl.store(places + row * K + before, block * PER_BLOCK + entry % PER_BLOCK, mask=chosen)


@triton.jit
def _fill(places, row, count, K: tl.constexpr, KP: tl.constexpr):
    """Mark the ranks from `count` on as empty."""
    rank = tl.arange(0, KP)
    tl.store(
        places + row * K + rank, tl.full((KP,), -1, tl.int32), mask=(rank >= count) & (rank < K)
    )


@triton.jit
def _write_all(
    places, row, count, tables, table_width, g,
    K: tl.constexpr, KP: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the first `count` entries."""
    rank = tl.arange(0, KP)
    _write(places, row, rank, rank, rank < count, tables, table_width, g, K, PER_BLOCK)
    _fill(places, row, count, K, KP)


@triton.jit
def _choose_segment(
    scores, row, width, base, n, k, places, tables, table_width, g, part_score, part_entry,
    part_count, segment, segments,
    K: tl.constexpr, KP: tl.constexpr, PER_BLOCK: tl.constexpr, N: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Choose among n <= N scores from `base` on; into places if that is all, else into parts."""
    at = tl.arange(0, N)
    score = tl.load(scores + row * width + base + at, mask=at < n, other=float("-inf"))
    chosen, before, count = _best(score, score > float("-inf"), k)
    if WHOLE:
        _write(places, row, base + at, before, chosen, tables, table_width, g, K, PER_BLOCK)
        _fill(places, row, count, K, KP)
    else:
        to = (row * segments + segment) * K + before
        tl.store(part_score + to, score, mask=chosen)
        tl.store(part_entry + to, base + at, mask=chosen)
        tl.store(part_count + row * segments + segment, count)


@triton.jit
def _select(
    scores, width, positions, seq, tables, table_width, places, part_score, part_entry, part_count,
    k, idle,
    RATIO: tl.constexpr, PER_BLOCK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    SEGMENT: tl.constexpr, SMALL: tl.constexpr, WHOLE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (s, t): segment s of the scores of row t."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    segment, segments = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    g = tl.load(seq + row)
    seen = (tl.load(positions + row) + 1) // RATIO
    base = segment * SEGMENT
    n = tl.minimum(seen - base, SEGMENT)
    if seen <= idle:
        if WHOLE:
            _write_all(places, row, seen, tables, table_width, g, K, KP, PER_BLOCK)
    elif n <= 0:
        if WHOLE:
            _fill(places, row, 0, K, KP)
        else:
            tl.store(part_count + row * segments + segment, 0)
    elif n <= SMALL:
        _choose_segment(
            scores, row, width, base, n, k, places, tables, table_width, g, part_score, part_entry,
            part_count, segment, segments, K, KP, PER_BLOCK, SMALL, WHOLE,
        )  # fmt: skip
    else:
        _choose_segment(
            scores, row, width, base, n, k, places, tables, table_width, g, part_score, part_entry,
            part_count, segment, segments, K, KP, PER_BLOCK, SEGMENT, WHOLE,
        )  # fmt: skip


@triton.jit
def _select_all(
    positions, seq, tables, table_width, places,
    RATIO: tl.constexpr, PER_BLOCK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program t: everything that row t sees, which is no more than K entries."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    seen = (tl.load(positions + row) + 1) // RATIO
    _write_all(places, row, seen, tables, table_width, tl.load(seq + row), K, KP, PER_BLOCK)


@triton.jit
def _merge_parts(
    part_score, part_entry, part_count, row, segments, k, places, tables, table_width, g,
    K: tl.constexpr, KP: tl.constexpr, PER_BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Choose among what up to N / K segments chose."""
    at = tl.arange(0, N)
    segment = at // K
    count = tl.load(part_count + row * segments + segment, mask=segment < segments, other=0)
    valid = at % K < count
    score = tl.load(part_score + row * segments * K + at, mask=valid, other=0.0)
    entry = tl.load(part_entry + row * segments * K + at, mask=valid, other=0)
    chosen, before, total = _best(score, valid, k)
    _write(places, row, entry, before, chosen, tables, table_width, g, K, PER_BLOCK)
    _fill(places, row, total, K, KP)


@triton.jit
def _merge(
    part_score, part_entry, part_count, segments, positions, seq, tables, table_width, places, k,
    idle,
    RATIO: tl.constexpr, PER_BLOCK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    SEGMENT: tl.constexpr, N: tl.constexpr, SMALL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program t: row t, whose segments have chosen."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    g = tl.load(seq + row)
    seen = (tl.load(positions + row) + 1) // RATIO
    if seen <= idle:
        _write_all(places, row, seen, tables, table_width, g, K, KP, PER_BLOCK)
    elif tl.cdiv(seen, SEGMENT) * K <= SMALL:
        _merge_parts(
            part_score, part_entry, part_count, row, segments, k, places, tables, table_width, g,
            K, KP, PER_BLOCK, SMALL,
        )  # fmt: skip
    else:
        _merge_parts(
            part_score, part_entry, part_count, row, segments, k, places, tables, table_width, g,
            K, KP, PER_BLOCK, N,
        )  # fmt: skip


@triton.jit
def _group_keys(best, first, shown, N: tl.constexpr):
    """Order of the highest scores of N groups; the newest group that is shown beats all."""
    group = first + tl.arange(0, N)
    score = tl.load(best + group, mask=group < shown, other=0.0)
    return tl.where(group == shown - 1, 2147483647, _order(score, group < shown))


@triton.jit
def _reaching(best, shown, probe, N: tl.constexpr):
    """How many groups have at least an order of `probe`."""
    count = tl.full((), 0, tl.int32)
    for first in range(0, shown, N):
        count += tl.sum((_group_keys(best, first, shown, N) >= probe).to(tl.int32), 0)
    return count


@triton.jit
def _candidates(
    best, groups, positions, kept, k, RATIO: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr
):
    """Program t: which of up to N groups are row t's candidates."""
    row = tl.program_id(0).to(tl.int64)
    shown = tl.cdiv((tl.load(positions + row) + 1) // RATIO, GROUP)
    group = tl.arange(0, N)
    if shown <= k:
        chosen = group < shown
    else:
        score = tl.load(best + row * groups + group, mask=group < shown, other=0.0)
        score = tl.where(group == shown - 1, float("inf"), score)  # the newest is always kept
        chosen, _before, _total = _best(score, group < shown, k)
    tl.store(kept + row * groups + group, chosen.to(tl.int8), mask=group < groups)


@triton.jit
def _many_candidates(
    best, groups, positions, kept, k, RATIO: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr
):
    """As `_candidates` for more groups than registers hold: the search of `_best`, over memory."""
    row = tl.program_id(0).to(tl.int64)
    best += row * groups
    shown = tl.cdiv((tl.load(positions + row) + 1) // RATIO, GROUP)
    few = shown <= k
    low = tl.full((), -2147483648, tl.int32)
    if not few:
        low = tl.where(_reaching(best, shown, 0, N) >= k, 0, low)
        for step in range(31):
            probe = low + (1 << (30 - step))
            low = tl.where(_reaching(best, shown, probe, N) >= k, probe, low)
        spare = k - _reaching(best, shown, low + 1, N)
    else:
        spare = k
    levels = tl.full((), 0, tl.int32)
    for first in range(0, groups, N):
        group = first + tl.arange(0, N)
        key = _group_keys(best, first, shown, N)
        level = ((key == low) & (group < shown)).to(tl.int32)
        running = levels + tl.cumsum(level, 0)
        levels += tl.sum(level, 0)
        chosen = (key > low) | ((level > 0) & (running <= spare))
        chosen = (few | chosen) & (group < shown)
        tl.store(kept + row * groups + group, chosen.to(tl.int8), mask=group < groups)


def choose_triton(
    q: Tensor,
    head_w: Tensor,
    keys: Tensor,
    rows: Rows,
    *,
    ratio: int,
    topk: int,
    key_form: Form = "none",
    candidates: Tensor | None = None,
    candidate_group: int = 0,
    candidate_topk: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Do as `choose_torch`.

    One launch where nothing can be left out, two for up to SEGMENT entries, else three, and one
    more to build candidates; for prompts per so many rows as CHUNK_SCORES allows.
    """
    count, width = q.shape[0], max(1, rows.max_end // ratio)
    k = min(topk, width)
    builds = 0 < candidate_topk * candidate_group < width
    places = torch.empty((count, k), dtype=torch.int32, device=q.device)
    restricted = candidates is not None
    idle = 0 if restricted else topk  # rows that see no more choose all
    made = None
    if builds:
        groups = -(-width // candidate_group)
        made = torch.empty((count, groups), dtype=torch.bool, device=q.device)
    step = max(1, CHUNK_SCORES // width // 128 * 128 or CHUNK_SCORES // width)
    for first in range(0, count, step):
        part = slice(first, first + step)
        scores, best = None, None
        if width > topk or builds or restricted:
            scores, best = scores_triton(
                q, head_w, keys, rows, ratio=ratio, key_form=key_form, first=first,
                last=min(first + step, count),
                idle=min(idle, candidate_topk * candidate_group) if builds else idle,
                candidates=candidates, candidate_group=candidate_group, build=builds,
            )  # fmt: skip
        if made is not None and best is not None:
            size = triton.next_power_of_2(best.shape[1])
            kernel = _candidates if size <= MERGED else _many_candidates
            kernel[(len(best),)](
                best, best.shape[1], rows.positions[part], made[part].view(torch.int8),
                candidate_topk, RATIO=ratio, GROUP=candidate_group, N=min(size, MERGED),
                num_warps=_warps(min(size, MERGED), rows),
            )  # fmt: skip
        _choose(scores, places[part], rows, part, ratio, idle)
    return places, candidates if made is None else made


def _choose(
    scores: Tensor | None, places: Tensor, rows: Rows, part: slice, ratio: int, idle: int
) -> None:
    """Launch the selection for rows whose scores are there; none where all rows are idle."""
    count, k = places.shape
    shared = {
        "RATIO": ratio, "PER_BLOCK": rows.block_size // ratio, "K": k,
        "KP": triton.next_power_of_2(k), **overlapping(places.device, count),
    }  # fmt: skip
    lookup = rows.positions[part], rows.seq[part], rows.tables, rows.tables.shape[1]
    if scores is None:
        _select_all[(count,)](*lookup, places, **shared, num_warps=4)
        return
    width = scores.shape[1]
    segment = min(SEGMENT, triton.next_power_of_2(width))
    while segment < MERGED < -(-width // segment) * k:
        segment *= 2
    segments = -(-width // segment)
    parts: tuple[Tensor | None, ...] = (None, None, None)
    if segments > 1:
        shape = (count, segments, k)
        parts = (
            places.new_empty(shape, dtype=torch.float32),
            places.new_empty(shape),
            places.new_empty(shape[:2]),
        )
    _select[(segments, count)](
        scores, width, *lookup, places, *parts, k, idle,
        **shared, SEGMENT=segment, SMALL=min(2048, segment), WHOLE=segments == 1,
        num_warps=_warps(segment, rows),
    )  # fmt: skip
    if segments > 1:
        size = triton.next_power_of_2(segments * k)
        _merge[(count,)](
            *parts, segments, *lookup, places, k, idle,
            **shared, SEGMENT=segment, N=size, SMALL=min(2048, size),
            num_warps=_warps(size, rows),
        )  # fmt: skip


def _warps(entries: int, rows: Rows) -> int:
    """Warps of a program that holds so many entries."""
    short, long = PER_WARP
    return max(1, min(32, entries // (short if rows.max_length <= SHORT else long)))
