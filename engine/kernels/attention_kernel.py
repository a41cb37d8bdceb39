"""The kernel of attention: some heads of one row over a share of the row's keys.

A row's keys are those of its window that exist, oldest first, then its compressed entries. Before
it walks them a program writes down where each lies, so that the walk itself knows no difference
between a ring, the keys of the pass and a pool of entries: addresses take no instructions there.
Only where few heads read records, of which a thread reads few rows, does a program work places out
as it goes, and waits less.
Places are offsets from the ring, in units of 16 bytes of records or of 8 plain numbers: what the
compiler needs to know to load 16 bytes at a time. Where window keys and entries are records of two
forms, entries begin with a tile of their own, and there are two walks.
"""

from __future__ import annotations

from engine.kernels.overlap import await_previous, begin_next
from engine.kernels.record_device import record_tile_device
from engine.kernels.rope import rotate_device
from engine.kernels.triton_compat import cast, dot, tl, triton


@triton.jit
def store_queries_device(
    x,
    tail,
    out,
    rope,
    position,
    head,
    H,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
):
    """Store queries of some heads of a row, normed and rotated.

    Args:
        x: raw queries [M, D].
        tail: their last 2 * R columns.
        out: pointer to the row in a buffer of all queries' shape and dtype.
        rope: pointer to the table.
        position: of the row.
        head: int32 [M].
        H: heads.
        eps: of the head norm.
        D: head width.
        R: rotary pairs.
        NORM: whether there is one.
    """
    at = head[:, None] * D + tl.arange(0, D)[None, :]
    tail_at = head[:, None] * D + (D - 2 * R) + tl.arange(0, 2 * R)[None, :]
    there = (head < H)[:, None]
    if NORM:
        wide = x.to(tl.float32)
        rho = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
        x = cast(wide * rho, x.dtype)
        tail = cast(tail.to(tl.float32) * rho, x.dtype)
    turned = rotate_device(tail.to(tl.float32), rope, tl.zeros((1,), tl.int32) + position, R)
    tl.store(out + at, x, mask=there & (tl.arange(0, D) < D - 2 * R)[None, :])
    tl.store(out + tail_at, cast(turned, x.dtype), mask=there)


@triton.jit
def turn_queries_device(
    q, out, rope, position, head, H, eps, D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Norm and rotate the queries of some heads [M] of a row, from q to out; both point to the row."""
    there = (head < H)[:, None]
    raw = q + head[:, None] * D
    x = tl.load(raw + tl.arange(0, D)[None, :], mask=there, other=0.0)
    tail = tl.load(raw + D - 2 * R + tl.arange(0, 2 * R)[None, :], mask=there, other=0.0)
    store_queries_device(x, tail, out, rope, position, head, H, eps, D, R, NORM)


@triton.jit
def ready_queries_device(
    x, tail, scratch, rope, position, head, H, eps, D: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Queries of some heads of a row, normed and rotated [M, D]; zero for heads beyond H.

    They pass through memory: so the rotation handles its few columns alone, and what is loaded
    can be a product's left operand from shared memory, where from registers it would take all
    that the accumulator leaves. Programs that share heads write the same there. Arguments are those
    of store_queries_device.
    """
    store_queries_device(x, tail, scratch, rope, position, head, H, eps, D, R, NORM)
    tl.debug_barrier()
    at = head[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(scratch + at, mask=(head < H)[:, None], other=0.0)


@triton.jit
def store_output_device(o, x, rope, position, head, H, D: tl.constexpr, R: tl.constexpr):
    """Rotate outputs [M, D] float32 of some heads of a row back and store them at o."""
    M: tl.constexpr = x.shape[0]
    G: tl.constexpr = D // (2 * R)
    there = (head < H)[:, None]
    plain = there & (tl.arange(0, D) < D - 2 * R)[None, :]
    kind: tl.constexpr = o.dtype.element_ty
    tl.store(o + head[:, None] * D + tl.arange(0, D)[None, :], cast(x, kind), mask=plain)
    last = (tl.arange(0, G) == G - 1)[None, :, None]
    tail = tl.sum(tl.where(last, tl.reshape(x, (M, G, 2 * R)), 0.0), axis=1)
    turned = rotate_device(tail, rope, tl.zeros((1,), tl.int32) + position, R, True)
    tail_at = head[:, None] * D + (D - 2 * R) + tl.arange(0, 2 * R)[None, :]
    tl.store(o + tail_at, cast(turned, kind), mask=there)


@triton.jit
def places_device(
    i, last, window, entries_from, newest, start, own, kept, entries, chosen,
    W: tl.constexpr, UNITS: tl.constexpr, ENTRY_UNITS: tl.constexpr, PER_BLOCK: tl.constexpr,
    CHOICE: tl.constexpr, HAS_ENTRIES: tl.constexpr, ONE_FORM: tl.constexpr,
):  # fmt: skip
    """Where keys i of a row lie, and which of them count.

    What does not count is read all the same: then it is the newest key, or, among entries of
    another form, the first entry of the dummy block.

    Args:
        i: int32 [N], numbers of keys.
        last: end of the keys.
        window: keys of the row's window.
        entries_from: number of the first entry, `window` or more.
        newest: position of the newest key of the window.
        start: position of the first row of its sequence in this pass.
        own: place of that row's key.
        kept: place of the sequence's ring.
        entries: place of entry 0 of the pool.
        chosen: pointer to the row's choice, or to its sequence's block table.
        W: rows of a ring.
        UNITS: of a window key.
        ENTRY_UNITS: of an entry.
        PER_BLOCK: entries in a block.
        CHOICE: 0 if `chosen` is a block table.
        HAS_ENTRIES: whether there are any.
        ONE_FORM: whether entries have the form of window keys.

    Returns:
        int64 [N] and bool [N].
    """
    at = newest + 1 - window + i
    place = tl.where(at >= start, own + (at - start) * UNITS, kept + at % W * UNITS)
    real = i < tl.minimum(window, last)
    place = tl.where(real, place, own + (newest - start) * UNITS)
    if HAS_ENTRIES:
        entry = i - entries_from
        there = (entry >= 0) & (i < last)
        if CHOICE > 0:
            of_pool = tl.load(chosen + entry, mask=there, other=-1).to(tl.int64)
            there = of_pool >= 0
        else:
            block = tl.load(chosen + entry // PER_BLOCK, mask=there, other=0)
            of_pool = block.to(tl.int64) * PER_BLOCK + entry % PER_BLOCK
        of_pool = entries + of_pool * ENTRY_UNITS
        if ONE_FORM:
            place = tl.where(there, of_pool, place)
        else:
            place = tl.where(entry >= 0, tl.where(there, of_pool, entries), place)
        real = real | there
    return place, real


@triton.jit
def attend_tile_device(queries, key, real, is_whole, scale, acc, top, total):
    """Take one tile of keys in.

    Args:
        queries: [M, D].
        key: [N, D].
        real: bool [N], which of them have weight.
        is_whole: whether all have.
        scale: of the logits, times log2(e).
        acc: float32 [M, D], weighted sum so far.
        top: float32 [M], largest logit so far (base 2).
        total: float32 [M, N], sums of weights so far, by column.

    Returns:
        acc, top and total with the tile.
    """
    M: tl.constexpr = queries.shape[0]
    N: tl.constexpr = key.shape[0]
    whole = tl.zeros((M, N), tl.float32)
    if M < 64:
        scores = dot(queries, tl.trans(key), whole) * scale
        scores = tl.where(real[None, :], scores, float("-inf"))
    # Where a product is not seen to lead straight to the next one, the compiler shares its columns
    # among the warp groups instead of computing all of them in each.
    elif is_whole:
        scores = dot(queries, tl.trans(key), whole) * scale
    else:
        scores = dot(queries, tl.trans(key), whole) * scale
        scores = tl.where(real[None, :], scores, float("-inf"))
    peak = tl.maximum(top, tl.max(scores, axis=1))
    base = peak
    if M < 64:  # where a tile may have no key that counts
        base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    acc = dot(cast(weights, key.dtype), key, acc * fade[:, None])
    return acc, peak, total * fade[:, None] + weights


@triton.jit
def walk_device(
    ring, keys, first, last, end, window, entries_from, newest, start, own, kept, entries, chosen,
    queries, scale, acc, top, total,
    W: tl.constexpr, UNITS: tl.constexpr, ENTRY_UNITS: tl.constexpr, PER_BLOCK: tl.constexpr,
    CHOICE: tl.constexpr, HAS_ENTRIES: tl.constexpr, ONE_FORM: tl.constexpr, D: tl.constexpr,
    TAIL: tl.constexpr, FORM: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Take the tiles of keys from `first` up to `last` in; keys from number `end` on do not count.

    Args:
        ring: what places count from.
        keys: pointer to the row's list.
        first: number of the first key, of a tile.
        last: end.
        end: of what counts.
        window: this and all to chosen as for places_device.
        entries_from: as above.
        newest: as above.
        start: as above.
        own: as above.
        kept: as above.
        entries: as above.
        chosen: as above.
        queries: this and all to total as for attend_tile_device.
        scale: as above.
        acc: as above.
        top: as above.
        total: as above.
        W: this and all to ONE_FORM as for places_device.
        UNITS: as above.
        ENTRY_UNITS: as above.
        PER_BLOCK: as above.
        CHOICE: as above.
        HAS_ENTRIES: as above.
        ONE_FORM: as above.
        D: head width.
        TAIL: rotary dimensions.
        FORM: of the keys.
        N: keys of a tile.
        STAGES: of the loop.
        LISTED: whether there is a list; else places are worked out.
    """
    M: tl.constexpr = queries.shape[0]
    for tile in tl.range(first, last, N, num_stages=STAGES):
        i = tile + tl.arange(0, N)
        if LISTED:
            key = record_tile_device(ring, tl.load(keys + i), D, TAIL, FORM, queries.dtype)
            real, is_whole = i < end, tile + N <= end
        else:
            place, real = places_device(
                i, end, window, entries_from, newest, start, own, kept, entries, chosen,
                W, UNITS, ENTRY_UNITS, PER_BLOCK, CHOICE, HAS_ENTRIES, ONE_FORM,
            )  # fmt: skip
            key = record_tile_device(ring, place, D, TAIL, FORM, queries.dtype)
            is_whole = False
        if M < 64:  # noqa: SIM114 - decided at compile time, unlike the other
            acc, top, total = attend_tile_device(
                queries, key, real, is_whole, scale, acc, top, total
            )
        # Always so. What the compiler finds under a condition it puts behind the loads of the
        # next tile, which otherwise would begin when this one is done.
        elif tile < last:
            acc, top, total = attend_tile_device(
                queries, key, real, is_whole, scale, acc, top, total
            )
    return acc, top, total


# What differs from pass to pass must not need another compilation.
@triton.jit(
    do_not_specialize=[
        "k_rows_place",
        "entries_place",
        "row_0",
        "topk",
        "chosen_stride",
        "list_stride",
    ]
)
def attend_kernel(
    q,
    ring,
    k_rows_place: tl.int64,  # whatever it is now, so that no distance needs a kernel of its own
    entries_place: tl.int64,
    chosen,
    sink,
    rope,
    positions,
    seq,
    slots,
    starts,
    first,
    floors,
    o,
    sums,
    scratch,
    lists,
    row_0,
    H,
    topk,
    chosen_stride,
    list_stride,
    scale,
    eps,
    W: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    RATIO: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    WINDOW_FORM: tl.constexpr,
    ENTRY_FORM: tl.constexpr,
    UNITS: tl.constexpr,
    ENTRY_UNITS: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
    CHOICE: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    READY: tl.constexpr,
    HAS_FLOORS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    LIST: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row, M heads, split). With one split: final output; else its part, for combine.

    o: [T, H * D], or float32 [T, SPLITS, H, D], not divided. sums: float32 [T, SPLITS, H, 2], the
    maximum logit (base 2) and the sum of weights. scratch: q's dtype [T, H * D]; may be o. lists:
    int64 [rows of the launch, list_stride]. Rows start at row_0. scale is times log2(e). BLOCK: rows
    of a sequence that see each other, 0 where each sees what is before it. chosen: the choice, CHOICE topk's next power of two; or the block tables, CHOICE 0, to attend all.
    """
    await_previous(OVERLAP)
    row = row_0 + tl.program_id(0)
    head = tl.program_id(1) * M + tl.arange(0, M)
    split = tl.program_id(2)
    position = tl.load(positions + row)
    # What depends on nothing is loaded before what must be waited for.
    of_row = row.to(tl.int64) * (H * D)
    column = tl.arange(0, D)[None, :]
    raw = q + of_row + head[:, None] * D
    queries = tl.load(raw + column, mask=(head < H)[:, None], other=0.0)
    if not READY:
        tail_column = D - 2 * R + tl.arange(0, 2 * R)[None, :]
        tail = tl.load(raw + tail_column, mask=(head < H)[:, None], other=0.0)
    if IS_DECODE:
        sequence = row
        start = position
        first_row = row
    else:
        sequence = tl.load(seq + row)
        start = tl.load(starts + sequence)
        first_row = tl.load(first + sequence)

    newest = position
    if BLOCK:
        newest = start + BLOCK - 1
    reach = newest + 1
    if HAS_FLOORS:
        reach = tl.maximum(reach - tl.load(floors + sequence), 0)
    window = tl.minimum(reach, W + BLOCK)
    first_key = 0
    LISTED: tl.constexpr = M >= 64 or WINDOW_FORM == "none"
    ONE_FORM: tl.constexpr = WINDOW_FORM == ENTRY_FORM or not HAS_ENTRIES
    entries_from = window if ONE_FORM else tl.cdiv(window, N) * N
    last_key = entries_from
    if HAS_ENTRIES:
        if CHOICE > 0:
            chosen += row.to(tl.int64) * chosen_stride
            if not LISTED:
                last_key += tl.minimum(topk, (position + 1) // RATIO)  # or less: -1 tells
            else:
                at = tl.arange(0, CHOICE)
                places = tl.load(chosen + at, mask=at < topk, other=-1)
                last_key += tl.sum((places >= 0).to(tl.int32), axis=0)
        else:
            chosen += sequence.to(tl.int64) * chosen_stride
            last_key += (position + 1) // RATIO
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(last_key, N), SPLITS) * N
        first_key = split * share
        last_key = tl.minimum(first_key + share, last_key)
    keys = lists + tl.program_id(0).to(tl.int64) * list_stride
    own = k_rows_place + first_row.to(tl.int64) * UNITS
    kept = tl.load(slots + sequence).to(tl.int64) * (W * UNITS)
    if LISTED:
        filled = first_key + tl.cdiv(last_key - first_key, N) * N
        for base in range(first_key, filled, LIST):
            i = base + tl.arange(0, LIST)
            place, _real = places_device(
                i, last_key, window, entries_from, newest, start, own, kept, entries_place, chosen,
                W, UNITS, ENTRY_UNITS, PER_BLOCK, CHOICE, HAS_ENTRIES, ONE_FORM,
            )  # fmt: skip
            tl.store(keys + i, place, mask=i < filled)
    if READY and LISTED:
        tl.debug_barrier()  # of the list, which threads read that have not written it
    if not READY:
        queries = ready_queries_device(
            queries, tail, scratch + of_row, rope, position, head, H, eps, D, R, HEAD_NORM
        )
    # The sink is a key of weight 1 at first, with no value; one split takes it in.
    top = tl.load(sink + head, mask=head < H, other=0.0) * 1.4426950408889634
    # Weights are summed up by column: what a thread adds to its own needs no exchange.
    total = tl.where(tl.arange(0, N)[None, :] == 0, 1.0, tl.zeros((M, N), tl.float32))
    if SPLITS > 1:
        top = tl.where(split == 0, top, float("-inf"))
        total = tl.where(split == 0, total, 0.0)
    acc = tl.zeros((M, D), tl.float32)
    if ONE_FORM:
        acc, top, total = walk_device(
            ring, keys, first_key, last_key, last_key, window, entries_from, newest, start, own,
            kept, entries_place, chosen, queries, scale, acc, top, total, W, UNITS, ENTRY_UNITS,
            PER_BLOCK, CHOICE, HAS_ENTRIES, True, D, 2 * R, WINDOW_FORM, N, STAGES, LISTED,
        )  # fmt: skip
    else:
        # Asked first: a loop that does not run costs what it takes to begin one.
        middle = tl.minimum(last_key, entries_from)
        if first_key < middle:
            acc, top, total = walk_device(
                ring, keys, first_key, middle, tl.minimum(last_key, window), window, entries_from,
                newest, start, own, kept, entries_place, chosen, queries, scale, acc, top, total,
                W, UNITS, ENTRY_UNITS, PER_BLOCK, CHOICE, False, True, D, 2 * R, WINDOW_FORM, N,
                STAGES, LISTED,
            )  # fmt: skip
        middle = tl.maximum(first_key, entries_from)
        if middle < last_key:
            acc, top, total = walk_device(
                ring, keys, middle, last_key, last_key, window, entries_from, newest, start, own,
                kept, entries_place, chosen, queries, scale, acc, top, total, W, UNITS,
                ENTRY_UNITS, PER_BLOCK, CHOICE, True, False, D, 2 * R, ENTRY_FORM, N, STAGES, LISTED,
            )  # fmt: skip

    begin_next(OVERLAP)
    sum_of_weights = tl.sum(total, axis=1)
    if SPLITS == 1:
        store_output_device(
            o + of_row, acc / sum_of_weights[:, None], rope, position, head, H, D, R
        )
    else:
        part = (row.to(tl.int64) * SPLITS + split) * H + head
        tl.store(sums + part * 2, top, mask=head < H)
        tl.store(sums + part * 2 + 1, sum_of_weights, mask=head < H)
        tl.store(o + part[:, None] * D + column, acc, mask=(head < H)[:, None])


@triton.jit
def combine_kernel(
    parts,
    sums,
    rope,
    positions,
    o,
    H,
    D: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
    M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row, M heads): the parts of attend_kernel, weighted, divided and rotated back."""
    await_previous(OVERLAP)
    row = tl.program_id(0)
    head = tl.program_id(1) * M + tl.arange(0, M)
    position = tl.load(positions + row)
    split = tl.arange(0, PADDED)[:, None]
    mine = tl.minimum(head, H - 1)  # what is beyond is not stored
    at = (row.to(tl.int64) * SPLITS + split) * H + mine[None, :]
    real = (split < SPLITS) & (mine >= 0)[None, :]
    top = tl.load(sums + at * 2, mask=real, other=float("-inf"))
    total = tl.load(sums + at * 2 + 1, mask=real, other=0.0)
    column = tl.arange(0, D)[None, None, :]
    part = tl.load(parts + at[:, :, None] * D + column, mask=real[:, :, None], other=0.0)
    begin_next(OVERLAP)
    weight = tl.exp2(top - tl.max(top, axis=0)[None, :])
    sum_of_weights = tl.sum(total * weight, axis=0)
    mixed = tl.sum(part * weight[:, :, None], axis=0) / sum_of_weights[:, None]
    target = o + row.to(tl.int64) * (H * D)
    store_output_device(target, mixed, rope, position, head, H, D, R)
