"""Experts for a few rows: narrow weights, streamed once (twin: engine.kernels.moe.moe_torch).

W13, the rounding of hidden values, W2: three launches. A program is one warp. It multiplies one or
more tiles of 16 weight rows by up to 8 rows of x, and shares nothing with other warps, so that none
waits for another and their loads and arithmetic overlap by chance. That needs many warps; registers
are limited to make room for them. A tile of W13 is 8 gate rows and the 8 up rows of the same hidden
values. Programs take equal, contiguous shares of all these *units*, so that each reads about the
same number of bytes, whatever was routed where; some programs take the shared expert, in the same
way.

What bounds it beside the memory is the level-1 cache's data stage: rows of x come from there as
often as a tile is multiplied, more bytes than the weights have. Hence several tiles at a time, and
weights in stripes (engine.kernels.fp4), whose loads meet no bank conflicts. Slower on an H200 were
four warps that share x and copies into shared memory; overlapping the two products gained nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.kernels.fp4 import codes_of_row, has_stripes, scale_place
from engine.kernels.overlap import fetch
from engine.kernels.roundtrip import fp8_device
from engine.kernels.router import DECODE_TILE, STREAM_ROWS, Routing, parts_dtype
from engine.kernels.stream import CHUNK, SUM_SCALE, accumulate, load16, rows_of_x
from engine.kernels.triton_compat import INTERPRETED, cast, tl, triton


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
    group = chunk * 4 + tl.arange(0, 32) % 4
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
            BLOCK: tl.constexpr):  # fmt: skip
    """Add R chunks of columns of TILES tiles to their sums, 4 * TILES float32."""
    group = chunk * 4 + tl.arange(0, 32) % 4
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
            w = load16(data + at, mine < K // 32)
            v = load16(data + at + below, mine < K // 32)
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
def _ask(data, row, step, K: tl.constexpr, R: tl.constexpr, APART: tl.constexpr,
         FURTHER: tl.constexpr, TILES: tl.constexpr, FP4: tl.constexpr):  # fmt: skip
    """Ask for a step's bytes of TILES tiles, `row` the first, for the level-2 cache."""
    thread = tl.arange(0, 32)
    start = data.to(tl.pointer_type(tl.int8), bitcast=True)
    if FP4:
        run: tl.constexpr = R * 4  # lines of a stripe
        for part in tl.static_range((run * 2 * TILES + 31) // 32):
            line = part * 32 + thread
            stripe = tl.minimum(line // run, 2 * TILES - 1)
            first = row + stripe // 2 * FURTHER + stripe % 2 * APART
            within = tl.minimum(step * run + line % run, K // 32 - 1)
            fetch(start + first.to(tl.int64) * (K // 2) + within * 128, 1, 1)
    else:
        for tile in tl.static_range(TILES):
            line = thread // 2
            line = row + tile * FURTHER + line % 8 + line // 8 * APART
            for part in tl.static_range((R + 1) // 2):
                within = tl.minimum((step * R + part * 2 + thread % 2) * 128, K - 1)
                fetch(start + line.to(tl.int64) * K + within, 1, 1)


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
        gate = tl.minimum(a * SUM_SCALE, limit)
        up = tl.minimum(tl.maximum(b * SUM_SCALE, -limit), limit)
        hidden = gate / (1.0 + tl.exp(-gate)) * up * weight
        tl.store(at, cast(hidden, tl.bfloat16), mask=valid)


@triton.jit
def _tile(tile, low, high, data, scale, data_apart, scale_apart, x, out, order, tiles, weights,
          experts, T, limit, CHOICES: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
          WIDTH: tl.constexpr, SECOND: tl.constexpr, SHARED: tl.constexpr, TILES: tl.constexpr,
          R: tl.constexpr, FP4: tl.constexpr, BLOCK: tl.constexpr,
          AHEAD: tl.constexpr):  # fmt: skip
    """Units [low, high) of one tile of up to eight rows."""
    apart: tl.constexpr = 8 if SECOND else N // 2
    further: tl.constexpr = 16 if SECOND else 8  # from tile to tile of weight rows
    STEPS: tl.constexpr = (K + R * 128 - 1) // (R * 128)
    thread = tl.arange(0, 32)
    mine = thread // 4  # g: a weight row of a tile, and a column of the tensor cores
    if SHARED:
        first = tile * 8
        count = tl.minimum(T - first, 8)
    else:
        first = tl.load(tiles + tile * 3 + 1)
        count = tl.load(tiles + tile * 3 + 2)
        expert = tl.load(tiles + tile * 3).to(tl.int64)
        data += expert * data_apart
        scale += expert * scale_apart
    # The tensor cores' columns 2 t hold the tile's rows 0 .. 3, 2 t + 1 the rows 4 .. 7, so that
    # few rows need half of the stores only. Columns beyond the tile's rows repeat the last one.
    place = first + tl.minimum(mine // 2 + mine % 2 * 4, count - 1)
    n0 = thread % 4
    n1 = n0 + 4
    p0 = first + tl.minimum(n0, count - 1)
    p1 = first + tl.minimum(n1, count - 1)
    w0 = tl.full((32,), 1.0, tl.float32)
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
    if SECOND and SHARED:
        row = (first + tl.minimum(mine, count - 1)) * CHOICES
        least = tl.load(experts + row)
        for choice in tl.static_range(1, CHOICES):
            least = tl.minimum(least, tl.load(experts + row + choice))
        gaps = tl.min(least, axis=0) < 0
    zero = tl.zeros((32,), tl.float32)
    for unit in range(low, high):
        column = unit * TILES * further + mine
        sums = ()
        for _ in tl.static_range(4 * TILES):
            sums = sums + (zero,)  # type: ignore[assignment]  # noqa: RUF005
        for step in range(STEPS):
            if AHEAD:
                last = step == STEPS - 1
                then = tl.where(last, tl.minimum(unit + 1, high - 1), unit) * TILES * further
                _ask(data, then, tl.where(last, 0, step + 1), K, R, apart, further, TILES, FP4)
            sums = _chunks(data, scale, column, step * R, x_row, sums, K, R, apart, further,
                           TILES, FP4, BLOCK)  # fmt: skip
        for i in tl.static_range(TILES):
            _finish(sums[4 * i], sums[4 * i + 2], out, t0, w0, n0 < count,
                    column + i * further, limit, SECOND)  # fmt: skip
            if count > 4:
                _finish(sums[4 * i + 1], sums[4 * i + 3], out, t1, w1, n1 < count,
                        column + i * further, limit, SECOND)  # fmt: skip
        if SECOND and SHARED:  # noqa: SIM102 - one of the two is known to the compiler
            if gaps:  # nobody else writes choices that reach no expert
                _clear(out, experts, p0, n0 < count, column, CHOICES, TILES, WIDTH)
                _clear(out, experts, p1, n1 < count, column, CHOICES, TILES, WIDTH)


@triton.jit(do_not_specialize=["T", "shared_programs"])  # one kernel for all batches
def _experts_kernel(data, scale, data_apart, scale_apart, shared_data, shared_scale, x, out, order,
                    tiles, num_tiles, weights, experts, T, limit, shared_programs,
                    CHOICES: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
                    SECOND: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, FP4: tl.constexpr,
                    BLOCK: tl.constexpr, SHARED_TILES: tl.constexpr, SHARED_R: tl.constexpr,
                    SHARED_FP4: tl.constexpr, SHARED_BLOCK: tl.constexpr,
                    AHEAD: tl.constexpr):  # fmt: skip
    """One of the two products: programs of the shared expert first, then those of the tiles."""
    program = tl.program_id(0)
    if program < shared_programs:
        units: tl.constexpr = N // (16 * SHARED_TILES)
        total = (T + 7) // 8 * units
        begin = program * total // shared_programs
        end = (program + 1) * total // shared_programs
        for tile in range(begin // units, (end + units - 1) // units):
            low = tl.maximum(begin - tile * units, 0)
            high = tl.minimum(end - tile * units, units)
            _tile(tile, low, high, shared_data, shared_scale, 0, 0, x, out, order, tiles, weights,
                  experts, T, limit, CHOICES, N, K, WIDTH, SECOND, True, SHARED_TILES, SHARED_R,
                  SHARED_FP4, SHARED_BLOCK, AHEAD)  # fmt: skip
    else:
        parts: tl.constexpr = N // (16 * TILES)
        total = tl.load(num_tiles) * parts
        programs = tl.num_programs(0) - shared_programs
        begin = (program - shared_programs) * total // programs
        end = (program - shared_programs + 1) * total // programs
        for tile in range(begin // parts, (end + parts - 1) // parts):
            low = tl.maximum(begin - tile * parts, 0)
            high = tl.minimum(end - tile * parts, parts)
            _tile(tile, low, high, data, scale, data_apart, scale_apart, x, out, order, tiles,
                  weights, experts, T, limit, CHOICES, N, K, WIDTH, SECOND, False, TILES, R,
                  FP4, BLOCK, AHEAD)  # fmt: skip


@triton.jit(do_not_specialize=["pairs"])
def _round_kernel(x, tiles, num_tiles, pairs, WIDTH: tl.constexpr, W: tl.constexpr,
                  GROUP: tl.constexpr):  # fmt: skip
    """Round rows of hidden in place; places of pairs that reach no expert hold nothing."""
    row = tl.program_id(0)
    last = tl.maximum(tl.load(num_tiles) - 1, 0) * 3
    used = tl.load(tiles + last + 1) + tl.load(tiles + last + 2)
    if (row < used) | (row >= pairs):
        column = tl.program_id(1) * W + tl.arange(0, W)
        at = x + row.to(tl.int64) * WIDTH + column
        value = tl.load(at, mask=column < WIDTH, other=0.0).to(tl.float32)
        rounded = tl.reshape(fp8_device(tl.reshape(value, (1, W)), GROUP, 0), (W,))
        tl.store(at, cast(rounded, tl.bfloat16), mask=column < WIDTH)


# ---------------------------------------------------------------- launches

_NARROW = ("fp4", "fp8")


def can_stream(x: Tensor, *weights: Matrix) -> bool:
    """Whether `stream_experts` takes these operands; else it is the grouped products' work."""
    return x.dtype == torch.bfloat16 and all(
        w.kind in _NARROW
        and w.shape[-1] % 32 == 0
        and w.shape[-2] % 32 == 0
        and (w.kind != "fp4" or has_stripes(*w.shape[-2:]))
        and w.data.data_ptr() % 16 == 0
        and w.data.stride(0) % 16 == 0
        and w.scale is not None
        for w in weights
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """How a product is laid out on the device.

    Args:
        tiles: of 16 weight rows that a warp multiplies at a time.
        chunks: of 128 columns that are fetched together.
        shared_tiles: `tiles` for the shared expert, or other FP8 weights.
        shared_chunks: `chunks` for them.
        resident: warps per multiprocessor.
        registers: of a thread, at most; resident * registers fit 65536 / 32.
        ahead: whether a step's bytes are asked for into the level-2 cache one step before.
    """

    tiles: int
    chunks: int
    shared_tiles: int = 1
    shared_chunks: int = 4
    resident: int = 16
    registers: int = 128
    ahead: bool = False

    @property
    def programs(self) -> int:
        """As many as run at once."""
        if INTERPRETED:
            return 3
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        count: int = device.multi_processor_count
        return self.resident * count

    def cut(self, w: Matrix) -> tuple[int, int]:
        """Tiles and chunks for a matrix."""
        n, k = w.shape[-2:]
        packed = w.kind == "fp4"
        tiles, chunks = (self.tiles, self.chunks) if packed else (
            self.shared_tiles, self.shared_chunks)  # fmt: skip
        while n % (32 * tiles):
            tiles //= 2
        return max(tiles, 1), min(chunks, triton.next_power_of_2(triton.cdiv(k, CHUNK)))


#: By the most rows: one or two need many warps, more rows tiles that share x.
LAYOUTS = {2: Layout(1, 4, ahead=True), 8: Layout(4, 1), STREAM_ROWS: Layout(2, 2)}


def layout_of(rows: int) -> Layout:
    """For a pass of `rows` rows."""
    return next(layout for most, layout in LAYOUTS.items() if rows <= most)


def _shared_programs(
    programs: int, rows: int, pairs: int, routed: Matrix, shared: Matrix, tall: int
) -> int:
    """The shared expert's part of the programs, by the bytes that are probably to be read.

    All of them get equally many of its units (of `tall` weight rows), which are long: one more
    would outlast the rest.
    """
    experts = routed.shape[0]
    touched = experts * (1.0 - (1.0 - 1.0 / experts) ** pairs)
    tiles = triton.cdiv(rows, DECODE_TILE)
    ours = shared.nbytes * tiles
    part: float = ours / (ours + routed.nbytes / experts * touched)
    units: int = tiles * (shared.shape[-2] // tall)
    each = max(1, round(units / (programs * part)))
    return min(-(-units // each), programs - 1)


def _product(
    source: Tensor,
    out: Tensor,
    w: Matrix,
    shared: Matrix | None,
    routing: Routing,
    layout: Layout,
    *,
    limit: float,
    second: bool,
) -> None:
    """One of the two products: source [.., K] into out [.., WIDTH]."""
    rows, choices = routing.experts.shape
    programs, own = layout.programs, 0
    tiles, chunks = layout.cut(w)
    shared_tiles, shared_chunks = layout.cut(shared or w)
    if shared is None:
        shared = w[0]
    else:
        own = _shared_programs(programs, rows, rows * choices, w, shared, 16 * shared_tiles)
    # With very few rows there are fewer units than warps that fit: one each, and no idle ones.
    programs = min(programs, own + len(routing.tiles) * (w.shape[-2] // (16 * tiles)))
    assert w.scale is not None
    assert shared.scale is not None
    data = w.data.view(torch.int32)
    _experts_kernel[(programs,)](
        data,
        w.scale,
        data.stride(0),
        w.scale.stride(0),
        shared.data.view(torch.int32),
        shared.scale,
        source.view(torch.int32),
        out,
        routing.order,
        routing.tiles,
        routing.num_tiles,
        routing.weights,
        routing.experts,
        rows,
        limit,
        own,
        CHOICES=choices,
        N=w.shape[-2],
        K=source.shape[1],
        WIDTH=out.shape[-1],
        SECOND=second,
        TILES=tiles,
        R=chunks,
        FP4=w.kind == "fp4",
        BLOCK=w.block,
        SHARED_TILES=shared_tiles,
        SHARED_R=shared_chunks,
        SHARED_FP4=shared.kind == "fp4",
        SHARED_BLOCK=shared.block,
        AHEAD=layout.ahead and not INTERPRETED,
        num_warps=1,
        maxnreg=layout.registers,
    )


def stream_experts(
    x: Tensor,
    routing: Routing,
    w13: Matrix,
    w2: Matrix,
    shared13: Matrix | None,
    shared2: Matrix | None,
    *,
    limit: float,
    act_group: int | None,
    layout: Layout | None = None,
) -> Tensor:
    """Run the experts for up to STREAM_ROWS rows; arguments and result as `moe_torch`.

    `layout` is for measurements.
    """
    rows, choices = routing.experts.shape
    layout = layout or layout_of(rows)
    d, inner = w2.shape[-2:]
    hidden = torch.empty(rows * (choices + 1), inner, dtype=x.dtype, device=x.device)
    # What nobody writes is 0; with a shared expert its programs see to that.
    new = torch.zeros if shared2 is None else torch.empty
    parts = new((rows, choices + 1, d), dtype=parts_dtype(x), device=x.device)
    _product(x.contiguous(), hidden, w13, shared13, routing, layout, limit=limit, second=False)
    if act_group is not None:
        wide = min(1024, triton.next_power_of_2(inner))
        written = len(hidden) if shared2 is not None else rows * choices
        _round_kernel[(written, triton.cdiv(inner, wide))](
            hidden, routing.tiles, routing.num_tiles, rows * choices, WIDTH=inner, W=wide,
            GROUP=act_group, num_warps=4,
        )  # fmt: skip
    _product(hidden, parts, w2, shared2, routing, layout, limit=limit, second=True)
    return parts
