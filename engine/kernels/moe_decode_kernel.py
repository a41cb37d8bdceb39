"""Triton kernel of engine.kernels.moe_decode: experts of a few rows, both products in one launch."""

from __future__ import annotations

from engine.kernels.fp4 import codes_of_row, scale_place
from engine.kernels.overlap import await_previous
from engine.kernels.roundtrip import fp8_device
from engine.kernels.stream import SUM_SCALE, accumulate, load16, rows_of_x
from engine.kernels.swiglu import swiglu
from engine.kernels.triton_compat import INTERPRETED, cast, tl, triton

_INTERPRETED = tl.constexpr(INTERPRETED)
_TAKE = tl.constexpr(
    "{ .reg .pred first; setp.eq.s32 first, $2, 0; mov.u32 $0, 0;"
    " @first atom.global.relaxed.gpu.add.u32 $0, [$1], 1; }"
)
_AWAIT = tl.constexpr(
    "{ .reg .pred others, there; .reg .s32 seen; setp.ne.s32 others, $3, 0; @others bra done;"
    " again: ld.acquire.gpu.global.s32 seen, [$1]; setp.ge.s32 there, seen, $2;"
    " @there bra done; nanosleep.u32 20; bra again; done: mov.u32 $0, 0; }"
)


@triton.jit
def _take(counter, THREADS: tl.constexpr):
    """Ask for a ticket: a number whose largest element is the ticket, when it is there."""
    thread = tl.arange(0, THREADS)
    if _INTERPRETED:
        got = tl.atomic_add(counter, 1) + thread * 0
    else:
        got = tl.inline_asm_elementwise(
            _TAKE,
            "=&r,l,r",
            [counter.to(tl.int64) + thread * 0, thread],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return got


@triton.jit
def _await(counter, least, THREADS: tl.constexpr):
    """Wait until a counter has reached `least`, and what was written before it can be read."""
    if not _INTERPRETED:
        thread = tl.arange(0, THREADS)
        tl.inline_asm_elementwise(
            _AWAIT,
            "=r,l,r,r",
            [counter.to(tl.int64) + thread * 0, least + thread * 0, thread],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()


@triton.jit
def _scales(scale, row, chunk, K: tl.constexpr, R: tl.constexpr, FP4: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Scale bytes of a thread's columns of one weight row in R chunks: R int32.

    Args:
        scale: pointer to uint8.
        row: the thread's weight row.
        chunk: the first of R chunks.
        K: columns.
        R: chunks.
        FP4: e2m1 in stripes, else e4m3 with one scale per square of side BLOCK.
        BLOCK: as said.
    """
    group = chunk * 4 + tl.arange(0, row.shape[0]) % 4
    result = ()
    for c in tl.static_range(R):
        mine = group + c * 4
        if FP4:
            place = scale_place(row, mine, K, True)
        else:
            place = row // BLOCK * ((K + BLOCK - 1) // BLOCK) + mine * 32 // BLOCK
        byte = tl.load(scale + place, mask=mine < K // 32, other=0).to(tl.int32)
        result = result + (byte,)  # type: ignore[assignment]  # noqa: RUF005
    return result


@triton.jit
def _chunks(data, scale, row, chunk, x_row, sums, K: tl.constexpr, R: tl.constexpr,
            APART: tl.constexpr, FURTHER: tl.constexpr, TILES: tl.constexpr, FP4: tl.constexpr,
            BLOCK: tl.constexpr, ONCE: tl.constexpr):  # fmt: skip
    """Add R chunks of columns of TILES tiles to their sums, 4 * TILES float32.

    ONCE: whether weights are read this once, and need no place in the level-1 cache.
    """
    group = chunk * 4 + tl.arange(0, row.shape[0]) % 4
    halves: tl.constexpr = 1 if FP4 else 2
    below: tl.constexpr = APART * (K // 8) if FP4 else APART * (K // 4)  # whole stripes, in int32
    steps = ()
    for tile in tl.static_range(TILES):
        line = row + tile * FURTHER
        s0 = _scales(scale, line, chunk, K, R, FP4, BLOCK)
        s1 = _scales(scale, line + APART, chunk, K, R, FP4, BLOCK)
        for j in tl.static_range(R * halves):
            mine = group + j // halves * 4
            if FP4:
                at = (codes_of_row(line, K, True) + mine // 4 * 512 + mine % 4 * 16) // 4
            else:
                at = line * (K // 4) + mine * 8 + j % halves * 4
            w = load16(data + at, mine < K // 32, ONCE)
            v = load16(data + at + below, mine < K // 32, ONCE)
            step = (
                w[0],
                w[1],
                w[2],
                w[3],
                v[0],
                v[1],
                v[2],
                v[3],
                s0[j // halves],
                s1[j // halves],
            )
            steps = steps + (step,)  # type: ignore[assignment]  # noqa: RUF005
    xs = rows_of_x(x_row, group, R, K, FP4)
    total = ()
    for tile in tl.static_range(TILES):
        c = (sums[4 * tile], sums[4 * tile + 1], sums[4 * tile + 2], sums[4 * tile + 3])
        for j in tl.static_range(R * halves):
            c = accumulate(steps[tile * R * halves + j], xs, j * (16 // halves), c, FP4)
        total = total + c  # type: ignore[assignment]
    return total


@triton.jit
def _clear(out, experts, row, valid, column, CHOICES: tl.constexpr, TILES: tl.constexpr,
           WIDTH: tl.constexpr):  # fmt: skip
    """Store zeros where a row's choices reach no expert."""
    for choice in tl.static_range(CHOICES):
        empty = valid & (tl.load(experts + row * CHOICES + choice) < 0)
        at = out + (row * (CHOICES + 1) + choice).to(tl.int64) * WIDTH + column
        for part in tl.static_range(2 * TILES):
            tl.store(at + part * 8, 0.0, mask=empty)


@triton.jit
def _finish(a, b, out, target, weight, valid, column, limit, SECOND: tl.constexpr):
    """Store what became of two weight rows and one row of x."""
    at = out + target + column
    if SECOND:
        tl.store(at, a * SUM_SCALE, mask=valid)
        tl.store(at + 8, b * SUM_SCALE, mask=valid)
    else:
        hidden = swiglu(a * SUM_SCALE, b * SUM_SCALE, limit) * weight
        tl.store(at, cast(hidden, tl.bfloat16), mask=valid)


@triton.jit
def _hand_on(hidden, counts, ready, share, first, count, WIDTH: tl.constexpr, SPAN: tl.constexpr,
             WIDE: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Round a span of hidden values when its last share is there, and say that it can be read.

    Args:
        hidden: of the product.
        counts: of the tile's spans: shares that are there.
        ready: of the tile: spans that are there.
        share: which this one is.
        first: row of hidden.
        count: rows.
        WIDTH: of hidden.
        SPAN: columns that are rounded at a time.
        WIDE: columns of a share.
        GROUP: of the rounding, 0 for none.
    """
    tl.debug_barrier()  # all threads' stores come before the count that says they are there
    span = share * WIDE // SPAN
    last = True
    if WIDE < SPAN:
        needed = tl.minimum(SPAN, WIDTH - span * SPAN) // WIDE
        last = tl.atomic_add(counts + span, 1, sem="acq_rel") == needed - 1
    if last:
        if GROUP > 0:
            line = tl.arange(0, 8)[:, None]
            column = span * SPAN + tl.arange(0, SPAN)[None, :]
            at = hidden + (first + line).to(tl.int64) * WIDTH + column
            there = (line < count) & (column < WIDTH)
            value = tl.load(at, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
            tl.store(at, cast(fp8_device(value, GROUP, 0), tl.bfloat16), mask=there)
            tl.debug_barrier()
        tl.atomic_add(ready, 1, sem="acq_rel")


@triton.jit
def _share(tile, share, data, scale, data_apart, scale_apart, x, out, order, tiles, weights,
           experts, counts, ready, T, limit, CHOICES: tl.constexpr, N: tl.constexpr,
           K: tl.constexpr, WIDTH: tl.constexpr, SECOND: tl.constexpr, SHARED: tl.constexpr,
           TILES: tl.constexpr, R: tl.constexpr, FP4: tl.constexpr, BLOCK: tl.constexpr,
           SPAN: tl.constexpr, GROUP: tl.constexpr, WARPS: tl.constexpr,
           OVERLAP: tl.constexpr):  # fmt: skip
    """One share of one tile of up to eight rows: TILES tiles of 16 weight rows for each warp."""
    THREADS: tl.constexpr = 32 * WARPS
    apart: tl.constexpr = 8 if SECOND else N // 2
    further: tl.constexpr = 16 if SECOND else 8  # from tile to tile of weight rows
    STEPS: tl.constexpr = (K + R * 128 - 1) // (R * 128)
    thread = tl.arange(0, THREADS)
    mine = thread % 32 // 4  # g: a weight row of a tile, and a column of the tensor cores
    if SHARED:
        first = tile * 8
        count = tl.minimum(T - first, 8)
    else:
        first = tl.load(tiles + tile * 3 + 1)
        count = tl.load(tiles + tile * 3 + 2)
        expert = tl.load(tiles + tile * 3).to(tl.int64)
        data += expert * data_apart
        scale += expert * scale_apart
    if SECOND:
        _await(ready, (K + SPAN - 1) // SPAN, THREADS)
    # The tensor cores' columns 2 t hold the tile's rows 0 .. 3, 2 t + 1 the rows 4 .. 7, so that
    # few rows need half of the stores only. Columns beyond the tile's rows repeat the last one.
    place = first + tl.minimum(mine // 2 + mine % 2 * 4, count - 1)
    n0 = thread % 4
    n1 = n0 + 4
    p0 = first + tl.minimum(n0, count - 1)
    p1 = first + tl.minimum(n1, count - 1)
    w0 = tl.full((THREADS,), 1.0, tl.float32)
    w1 = w0
    if SHARED:
        source = place + (T * CHOICES if SECOND else 0)
        o0 = p0 * (CHOICES + 1) + CHOICES if SECOND else p0 + T * CHOICES
        o1 = p1 * (CHOICES + 1) + CHOICES if SECOND else p1 + T * CHOICES
    elif SECOND:
        source = place
        o0 = tl.load(order + p0)
        o1 = tl.load(order + p1)
        o0 = o0 + o0 // CHOICES
        o1 = o1 + o1 // CHOICES
    else:
        source = tl.load(order + place) // CHOICES
        o0 = p0
        o1 = p1
        w0 = tl.load(weights + tl.load(order + p0))
        w1 = tl.load(weights + tl.load(order + p1))
    t0 = o0.to(tl.int64) * WIDTH
    t1 = o1.to(tl.int64) * WIDTH
    x_row = x + source.to(tl.int64) * (K // 2)
    zero = tl.zeros((THREADS,), tl.float32)
    column = (share * WARPS + thread // 32) * (TILES * further) + mine
    sums = ()
    for _ in tl.static_range(4 * TILES):
        sums = sums + (zero,)  # type: ignore[assignment]  # noqa: RUF005
    for step in range(STEPS):
        sums = _chunks(data, scale, column, step * R, x_row, sums, K, R, apart, further,
                       TILES, FP4, BLOCK, not SHARED)  # fmt: skip
    if SHARED and not SECOND:
        await_previous(OVERLAP)  # until here nothing was written
    for i in tl.static_range(TILES):
        _finish(sums[4 * i], sums[4 * i + 2], out, t0, w0, n0 < count,
                column + i * further, limit, SECOND)  # fmt: skip
        if count > 4:
            _finish(sums[4 * i + 1], sums[4 * i + 3], out, t1, w1, n1 < count,
                    column + i * further, limit, SECOND)  # fmt: skip
    if not SECOND:
        row = first + (T * CHOICES if SHARED else 0)
        _hand_on(out, counts, ready, share, row, count, WIDTH, SPAN, 8 * TILES * WARPS, GROUP)
    elif SHARED:
        row = (first + tl.minimum(mine, count - 1)) * CHOICES
        least = tl.load(experts + row)
        for choice in tl.static_range(1, CHOICES):
            least = tl.minimum(least, tl.load(experts + row + choice))
        if tl.min(least, axis=0) < 0:  # nobody else writes choices that reach no expert
            _clear(out, experts, p0, n0 < count, column, CHOICES, TILES, WIDTH)
            _clear(out, experts, p1, n1 < count, column, CHOICES, TILES, WIDTH)


@triton.jit(do_not_specialize=["T", "mixed", "most"])  # one kernel for all batches
def experts_kernel(w13, s13, w13_apart, s13_apart, w2, s2, w2_apart, s2_apart, shared13,
                   shared_s13, shared2, shared_s2, x, hidden, out, order, tiles, num_tiles,
                   weights, experts, state, T, mixed, most, limit, CHOICES: tl.constexpr,
                   D: tl.constexpr, I: tl.constexpr, SIZE: tl.constexpr, CUT: tl.constexpr,
                   SHARED_CUT: tl.constexpr, GROUP: tl.constexpr, WARPS: tl.constexpr,
                   OVERLAP: tl.constexpr):  # fmt: skip
    """Take shares by tickets: the shared expert's and the routed ones' W13, then their W2.

    state is int32: whose turn it is, and at 32 two sets of SIZE: the next ticket, at 32 spans that
    are ready [most] and shares of spans that are there [most, spans]. mixed are the tiles of the
    shared expert, 0 without one; most bounds all tiles, of which its own come from the end. CUT, of
    routed weights, and SHARED_CUT: tiles, chunks of W13 and of W2, FP4, block, span.
    """
    THREADS: tl.constexpr = 32 * WARPS
    thread = tl.arange(0, THREADS)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tall: tl.constexpr = 16 * WARPS * CUT[0]
    shared_tall: tl.constexpr = 16 * WARPS * SHARED_CUT[0]
    spans: tl.constexpr = (I + CUT[5] - 1) // CUT[5]
    shared_spans: tl.constexpr = (I + SHARED_CUT[5] - 1) // SHARED_CUT[5]
    # What the shared expert's W13 reads was there before the kernel before this one began.
    turn = tl.load(state)
    mine = state + 32 + turn * SIZE
    ready = mine + 32
    counts = ready + most
    middle = hidden.to(tl.pointer_type(tl.int32), bitcast=True)
    first = mixed * (2 * I // shared_tall)
    ticket = program
    while ticket < first:
        got = _take(mine, THREADS)
        tile = ticket // (2 * I // shared_tall)
        place = most - 1 - tile
        _share(tile, ticket % (2 * I // shared_tall), shared13, shared_s13, 0, 0, x, hidden, order,
               tiles, weights, experts, counts + place * shared_spans, ready + place, T, limit,
               CHOICES, 2 * I, D, I, False, True, SHARED_CUT[0], SHARED_CUT[1], SHARED_CUT[3],
               SHARED_CUT[4], SHARED_CUT[5], GROUP, WARPS, OVERLAP)  # fmt: skip
        ticket = tl.max(got, axis=0) + programs
    await_previous(OVERLAP)
    found = tl.load(num_tiles)
    second = first + found * (2 * I // tall)
    third = second + mixed * (D // shared_tall)
    total = third + found * (D // tall)
    # The set that the next launch counts in; the last launch did. Programs without work may begin
    # when all is done and another set's turn has come, so they leave it alone.
    active = tl.minimum(programs, total)
    if program < active:
        other = state + 32 + (1 - turn) * SIZE
        for at in range(program * THREADS, SIZE, active * THREADS):
            tl.store(other + at + thread, 0, mask=at + thread < SIZE)
    while ticket < total:
        got = _take(mine, THREADS)
        if ticket < second:
            share = ticket - first
            tile = share // (2 * I // tall)
            _share(tile, share % (2 * I // tall), w13, s13, w13_apart, s13_apart, x, hidden, order,
                   tiles, weights, experts, counts + tile * spans, ready + tile, T, limit, CHOICES,
                   2 * I, D, I, False, False, CUT[0], CUT[1], CUT[3], CUT[4], CUT[5], GROUP,
                   WARPS, OVERLAP)  # fmt: skip
        elif ticket < third:
            share = ticket - second
            tile = share // (D // shared_tall)
            _share(tile, share % (D // shared_tall), shared2, shared_s2, 0, 0, middle, out, order,
                   tiles, weights, experts, counts, ready + most - 1 - tile, T, limit, CHOICES, D,
                   I, D, True, True, SHARED_CUT[0], SHARED_CUT[2], SHARED_CUT[3], SHARED_CUT[4],
                   SHARED_CUT[5], GROUP, WARPS, OVERLAP)  # fmt: skip
        else:
            share = ticket - third
            tile = share // (D // tall)
            _share(tile, share % (D // tall), w2, s2, w2_apart, s2_apart, middle, out, order, tiles,
                   weights, experts, counts, ready + tile, T, limit, CHOICES, D, I, D, True, False,
                   CUT[0], CUT[2], CUT[3], CUT[4], CUT[5], GROUP, WARPS, OVERLAP)  # fmt: skip
        ticket = tl.max(got, axis=0) + programs
    # Who takes the last of all tickets knows that whoever has work has read whose turn it is.
    if (ticket == total + programs - 1) & (total > 0):
        tl.store(state, 1 - turn)
