"""Experts for a few rows: narrow weights, streamed once (twin: engine.kernels.moe.moe_torch).

Two launches, W13 and W2. Work is counted in *units*: TILES tiles of 16 weight rows times up to 8
rows of x. A tile of W13 is 8 gate rows and the 8 up rows of the same hidden values. Every program
takes an equal, contiguous share of the units of all tiles of pairs, so that each reads the same
number of bytes, whatever was routed where; some programs take the shared expert, in the same way.
A program's warps split the columns between them and add up at the end of a unit. Weights come
through shared memory by asynchronous copies, some units ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.kernels.router import DECODE_TILE, Routing
from engine.kernels.stream import CHUNK, SUM_SCALE, accumulate, fetch, rows_of_x
from engine.kernels.triton_compat import INTERPRETED, cast, tl, triton


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _across_warps(sums, first: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr):
    """Add up what the warps have of rows g and g + 8 of the tiles, of one of two columns."""
    s0 = tl.reshape(sums[first], (WARPS, 32))
    s1 = tl.reshape(sums[first + 2], (WARPS, 32))
    if TILES == 1:
        total = tl.reduce((s0, s1), 0, _add2)
    else:
        s2 = tl.reshape(sums[first + 4], (WARPS, 32))
        s3 = tl.reshape(sums[first + 6], (WARPS, 32))
        total = tl.reduce((s0, s1, s2, s3), 0, _add4)
    return total


@triton.jit
def _finish(sums, half: tl.constexpr, out, target, weight, valid, column, limit,
            SECOND: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """Store what became of four of the eight rows of x; `target` is where each begins in out."""
    total = _across_warps(sums, half, TILES, WARPS)
    at = out + target + column
    if SECOND:
        for i in tl.static_range(2 * TILES):
            tl.store(at + i * 8, total[i] * SUM_SCALE, mask=valid)
    else:
        for i in tl.static_range(TILES):
            gate = tl.minimum(total[2 * i] * SUM_SCALE, limit)
            up = tl.minimum(tl.maximum(total[2 * i + 1] * SUM_SCALE, -limit), limit)
            hidden = gate / (1.0 + tl.exp(-gate)) * up * weight
            tl.store(at + i * 8, cast(hidden, tl.bfloat16), mask=valid)


@triton.jit
def _unit(data, scale, row, group, xs, NT: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
          APART: tl.constexpr, FURTHER: tl.constexpr, TILES: tl.constexpr, FP4: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Read a unit's weights and multiply: 4 * TILES sums."""
    halves: tl.constexpr = 1 if FP4 else 2
    steps = ()
    for i in tl.static_range(TILES * C * halves):
        step = fetch(data, scale, row + i // (C * halves) * FURTHER,
                     group + i % (C * halves) // halves * 4, i % halves, K, FP4, BLOCK,
                     APART)  # fmt: skip
        steps = steps + (step,)  # type: ignore[assignment]  # noqa: RUF005
    zero = tl.zeros((NT,), tl.float32)
    sums = ()
    for tile in tl.static_range(TILES):
        c = (zero, zero, zero, zero)
        for j in tl.static_range(C * halves):
            c = accumulate(steps[tile * C * halves + j], xs, j * (16 // halves), c, FP4)
        sums = sums + c  # type: ignore[assignment]
    return sums


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
def _tile(tile, low, high, data, scale, data_apart, scale_apart, x, out, order, tiles, weights,
          experts, T, limit, CHOICES: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
          WIDTH: tl.constexpr, SECOND: tl.constexpr, SHARED: tl.constexpr, TILES: tl.constexpr,
          WARPS: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr, FP4: tl.constexpr,
          BLOCK: tl.constexpr, ROUND: tl.constexpr):  # fmt: skip
    """Units [low, high) of one tile of up to eight rows."""
    apart: tl.constexpr = 8 if SECOND else N // 2
    further: tl.constexpr = 16 if SECOND else 8  # from tile to tile of weight rows
    thread = tl.arange(0, 32 * WARPS)
    group = thread // 32 * (4 * C) + thread % 4
    mine = thread % 32 // 4  # g: a weight row of a tile, and a column of the tensor cores
    lane = tl.arange(0, 32)
    if SHARED:
        first = tile * 8
        count = tl.minimum(T - first, 8)
    else:
        first = tl.load(tiles + tile * 3 + 1)
        count = tl.load(tiles + tile * 3 + 2)
        expert = tl.load(tiles + tile * 3).to(tl.int64)
        data += expert * data_apart
        scale += expert * scale_apart
    words = scale.to(tl.pointer_type(tl.int32))
    # The tensor cores' columns 2 t hold the tile's rows 0 .. 3, 2 t + 1 the rows 4 .. 7, so that
    # few rows need half of the sums only. Columns beyond the tile's rows repeat the last one.
    place = first + tl.minimum(mine // 2 + mine % 2 * 4, count - 1)
    n0 = lane % 4
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
    if SECOND and SHARED:
        every = tl.arange(0, 64)
        rows = tl.minimum(every // 8, count - 1)
        choice = tl.minimum(every % 8, CHOICES - 1)
        tl.static_assert(CHOICES <= 8)
        gaps = tl.min(tl.load(experts + (first + rows) * CHOICES + choice)) < 0
    xs = rows_of_x(x + source.to(tl.int64) * (K // 2), group, C, K, FP4, ROUND)
    for unit in tl.range(low, high, num_stages=STAGES):
        sums = _unit(data, words, mine + unit * (further * TILES), group, xs, 32 * WARPS, K, C,
                     apart, further, TILES, FP4, BLOCK)  # fmt: skip
        column = unit * (further * TILES) + lane // 4
        _finish(sums, 0, out, t0, w0, n0 < count, column, limit, SECOND, TILES, WARPS)
        if count > 4:
            _finish(sums, 1, out, t1, w1, n1 < count, column, limit, SECOND, TILES, WARPS)
        if SECOND and SHARED:  # noqa: SIM102 - one of the two is known to the compiler
            if gaps:  # nobody else writes choices that reach no expert
                _clear(out, experts, p0, n0 < count, column, CHOICES, TILES, WIDTH)
                _clear(out, experts, p1, n1 < count, column, CHOICES, TILES, WIDTH)


@triton.jit(do_not_specialize=["T", "shared_programs"])  # one kernel for all batches
def _experts_kernel(data, scale, data_apart, scale_apart, shared_data, shared_scale, x, out, order,
                    tiles, num_tiles, weights, experts, T, limit, shared_programs,
                    CHOICES: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
                    SECOND: tl.constexpr, WARPS: tl.constexpr, C: tl.constexpr,
                    TILES: tl.constexpr, STAGES: tl.constexpr, FP4: tl.constexpr,
                    BLOCK: tl.constexpr, SHARED_TILES: tl.constexpr, SHARED_STAGES: tl.constexpr,
                    SHARED_FP4: tl.constexpr, SHARED_BLOCK: tl.constexpr,
                    ROUND: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    if program < shared_programs:
        shared_units: tl.constexpr = N // (16 * SHARED_TILES)
        total = (T + 7) // 8 * shared_units
        begin = program * total // shared_programs
        end = (program + 1) * total // shared_programs
        for tile in range(begin // shared_units, (end + shared_units - 1) // shared_units):
            low = tl.maximum(begin - tile * shared_units, 0)
            high = tl.minimum(end - tile * shared_units, shared_units)
            _tile(tile, low, high, shared_data, shared_scale, 0, 0, x, out, order, tiles, weights,
                  experts, T, limit, CHOICES, N, K, WIDTH, SECOND, True, SHARED_TILES, WARPS, C,
                  SHARED_STAGES, SHARED_FP4, SHARED_BLOCK, ROUND)  # fmt: skip
    else:
        units: tl.constexpr = N // (16 * TILES)
        total = tl.load(num_tiles) * units
        programs = tl.num_programs(0) - shared_programs
        begin = (program - shared_programs) * total // programs
        end = (program - shared_programs + 1) * total // programs
        for tile in range(begin // units, (end + units - 1) // units):
            low = tl.maximum(begin - tile * units, 0)
            high = tl.minimum(end - tile * units, units)
            _tile(tile, low, high, data, scale, data_apart, scale_apart, x, out, order, tiles,
                  weights, experts, T, limit, CHOICES, N, K, WIDTH, SECOND, False, TILES, WARPS, C,
                  STAGES, FP4, BLOCK, ROUND)  # fmt: skip


# ---------------------------------------------------------------- launches

_NARROW = ("fp4", "fp8")


def can_stream(x: Tensor, *weights: Matrix) -> bool:
    """Whether `stream_experts` takes these operands; else it is the grouped products' work."""
    return x.dtype == torch.bfloat16 and all(
        w.kind in _NARROW
        and w.shape[-1] % 32 == 0
        and w.shape[-2] % 32 == 0
        and w.data.data_ptr() % 16 == 0
        and w.data.stride(0) % 16 == 0
        and w.scale is not None
        and w.scale.data_ptr() % 4 == 0
        and (w.scale.dim() == 2 or w.scale.stride(0) % 4 == 0)
        for w in weights
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """How a product is laid out on the device.

    Args:
        warps: of a program; they split the columns.
        resident: programs per multiprocessor.
        registers: of a thread, at most.
    """

    warps: int
    resident: int
    registers: int

    @classmethod
    def of(cls, columns: int) -> Layout:
        """The one for a product over `columns` columns (bench/micro/moe.py compares some)."""
        warps = min(
            16 if columns > 2048 else 8, triton.next_power_of_2(triton.cdiv(columns, CHUNK))
        )
        return cls(warps, max(16 // warps, 1), 128)

    def ahead(self, kind: str, chunks: int) -> tuple[int, int]:
        """Tiles of a unit and stages of the pipeline: what shared memory holds."""
        halves = 1 if kind == "fp4" else 2
        tile = chunks * halves * self.warps * 32 * 40  # bytes, weights and scales
        room = 200_000 // self.resident
        tiles = 2 if 4 * tile <= room else 1
        return tiles, max(2, min(room // (tiles * tile) + 1, 5))

    @property
    def programs(self) -> int:
        """As many as run at once."""
        if INTERPRETED:
            return 3
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        count: int = device.multi_processor_count
        return self.resident * count


def _shared_programs(programs: int, rows: int, pairs: int, routed: Matrix, shared: Matrix) -> int:
    """The shared expert's part of the programs, by the bytes that are probably to be read."""
    experts = routed.shape[0]
    touched = experts * (1.0 - (1.0 - 1.0 / experts) ** pairs)
    ours = shared.nbytes * triton.cdiv(rows, DECODE_TILE)
    part: float = ours / (ours + routed.nbytes / experts * touched)
    return min(max(round(programs * part), 1), programs - 1)


def _product(
    source: Tensor,
    out: Tensor,
    w: Matrix,
    shared: Matrix | None,
    routing: Routing,
    layout: Layout,
    *,
    limit: float,
    act_group: int | None,
    second: bool,
) -> None:
    """One of the two launches: source [.., K] into out [.., WIDTH]."""
    rows, choices = routing.experts.shape
    columns = source.shape[1]
    chunks = triton.cdiv(columns, CHUNK * layout.warps)
    tiles, stages = layout.ahead(w.kind, chunks)
    programs, own = layout.programs, 0
    if shared is None:
        shared = w[0]
    else:
        own = _shared_programs(programs, rows, rows * choices, w, shared)
    shared_tiles, shared_stages = layout.ahead(shared.kind, chunks)
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
        K=columns,
        WIDTH=out.shape[-1],
        SECOND=second,
        WARPS=layout.warps,
        C=chunks,
        TILES=tiles,
        STAGES=stages,
        FP4=w.kind == "fp4",
        BLOCK=w.block,
        SHARED_TILES=shared_tiles,
        SHARED_STAGES=shared_stages,
        SHARED_FP4=shared.kind == "fp4",
        SHARED_BLOCK=shared.block,
        ROUND=(act_group or 0) if second else 0,
        num_warps=layout.warps,
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
    layouts: tuple[Layout, Layout] | None = None,
) -> Tensor:
    """Run the experts for up to DECODE_ROWS rows; arguments and result as `moe_torch`.

    `layouts` are those of the two launches, for measurements; chosen by shape otherwise.
    """
    rows, choices = routing.experts.shape
    d, inner = w2.shape[-2:]
    first, second = layouts or (Layout.of(d), Layout.of(inner))
    hidden = torch.empty(rows * (choices + 1), inner, dtype=x.dtype, device=x.device)
    # What nobody writes is 0; with a shared expert its programs see to that.
    new = torch.zeros if shared2 is None else torch.empty
    parts = new((rows, choices + 1, d), dtype=torch.float32, device=x.device)
    x = x.contiguous()
    _product(x, hidden, w13, shared13, routing, first, limit=limit, act_group=None, second=False)
    _product(hidden, parts, w2, shared2, routing, second, limit=limit, act_group=act_group,
             second=True)  # fmt: skip
    return parts
