"""Experts for a few rows: narrow weights, streamed once (twin: engine.kernels.moe.moe_torch).

One launch does W13, the rounding of hidden values and W2. A warp multiplies one or more tiles of 16
weight rows by up to 8 rows of x, whole rows, so that nothing is summed across warps; their loads
and arithmetic overlap by chance, which needs many, so registers are limited to make room for them.
A tile of W13 is 8 gate rows and the 8 up rows of the same hidden values.

A program takes tickets: numbers of shares, tiles of all of its warps, that follow each other
through the shared expert's W13, the routed experts', and both W2. Multiprocessors are not equally
near to memory: with equal shares of all units, fixed beforehand, the slowest decided, and a step
of 64 rows took 11 % longer on an H200. A share of W2 waits until hidden values of its rows are
rounded and there. All shares that it waits for have been taken before, or are the first of programs
that begin at once: there are no more programs than a GPU has room for (engine.kernels.at_once), and
two such launches must not run side by side on one, where each could wait for programs that the
other leaves no room.

What bounds it beside the memory are the caches: rows of x come from there as often as a tile is
multiplied. Hence several tiles at a time, programs of two warps, whose tiles meet the same rows,
weights that leave the level-1 cache first, and stripes (engine.kernels.fp4).

Measured on an H200 with V4-Flash's layer: 53, 76, 86, 90 and 87 % of its bandwidth at 1, 4, 6, 16
and 64 rows; three launches with fixed shares had 57, 68, 71, 78 and 78 %. No better were rings in
shared memory that bulk copies fill (3 % faster at 4 rows, 4 % slower at 16), the next step's bytes in
registers, and four tiles at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.at_once import PROGRAMS, REGISTERS, WARP, WARPS, launch_at_once
from engine.kernels.counters import counters
from engine.kernels.formats import Matrix
from engine.kernels.fp4 import has_stripes
from engine.kernels.grouping import DECODE_TILE, STREAM_ROWS
from engine.kernels.moe_decode_kernel import experts_kernel
from engine.kernels.overlap import FEW_ROWS, overlaps
from engine.kernels.router import Routing, parts_dtype
from engine.kernels.stream import CHUNK
from engine.kernels.triton_compat import INTERPRETED, triton

_NARROW = ("fp4", "fp8")


def can_stream(x: Tensor, *weights: Matrix) -> bool:
    """Whether `stream_experts` takes these operands; else it is the grouped products' work.

    Args:
        x: the rows.
        weights: W13 and W2, and those of the shared expert if there is one.
    """
    pairs = zip(weights[::2], weights[1::2], strict=True)
    return (
        x.dtype == torch.bfloat16
        and all(
            first.kind == second.kind and first.block == second.block for first, second in pairs
        )
        and all(
            w.kind in _NARROW
            and w.shape[-1] % 32 == 0
            and w.shape[-2] % 32 == 0
            and (w.kind != "fp4" or has_stripes(*w.shape[-2:]))
            and w.data.data_ptr() % 16 == 0
            and w.data.stride(0) % 16 == 0
            and w.scale is not None
            for w in weights
        )
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """How the products are laid out on the device.

    Args:
        tiles: of 16 weight rows that a warp multiplies at a time.
        chunks: of 128 columns that are fetched together.
        shared_tiles: `tiles` for the shared expert, or other FP8 weights.
        shared_chunks: `chunks` for them.
        warps: of a program; they share rows of x in the level-1 cache.
        resident: warps per multiprocessor.
        registers: of a thread, at most.

    Raises:
        ValueError: a multiprocessor has no room for that many warps at once.
    """

    tiles: int
    chunks: int
    shared_tiles: int = 1
    shared_chunks: int = 4
    warps: int = 2
    resident: int = 16
    registers: int = 128

    def __post_init__(self) -> None:
        bounds = (
            ("resident", self.resident, "warps", WARPS),
            ("resident * registers * 32", self.resident * self.registers * WARP, "registers", REGISTERS),
            ("resident // warps", self.resident // self.warps, "programs", PROGRAMS),
        )  # fmt: skip
        for name, seen, what, most in bounds:
            if not 1 <= seen <= most:
                raise ValueError(
                    f"{name}: expected 1 to {most} {what} of a multiprocessor, got {seen}"
                )

    @property
    def programs(self) -> int:
        """As many as run at once."""
        if INTERPRETED:  # which runs programs one after the other: none may wait for the next
            return 1
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        count: int = device.multi_processor_count
        return self.resident // self.warps * count

    def fitted(self, d: int, inner: int) -> int:
        """Warps of a program for experts of these widths."""
        warps = self.warps
        while inner % (8 * warps) or d % (16 * warps):
            warps //= 2
        return warps

    def cut(self, w13: Matrix, w2: Matrix, act_group: int | None) -> tuple[int, ...]:
        """Tiles, chunks of both products, form and span of one kind of experts."""
        d, inner = w2.shape[-2:]
        packed, warps = w13.kind == "fp4", self.fitted(d, inner)
        tiles, chunks = (self.tiles, self.chunks) if packed else (
            self.shared_tiles, self.shared_chunks)  # fmt: skip
        while inner % (8 * tiles * warps) or d % (16 * tiles * warps):
            tiles //= 2
        both = (min(chunks, triton.next_power_of_2(triton.cdiv(k, CHUNK))) for k in (d, inner))
        return tiles, *both, packed, w13.block, max(8 * tiles * warps, act_group or 0)


#: The best at 4 to 64 rows; at one row none is more than 2 % faster in a step.
LAYOUT = Layout(2, 2)


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
    layout: Layout = LAYOUT,
) -> Tensor:
    """Run the experts for up to STREAM_ROWS rows; arguments and result as `moe_torch`.

    With a shared expert, x must have been there before the kernel that comes before this one
    began, as rows are before they are routed: the shared expert's products do not wait for it.

    `layout` is for measurements.

    Raises:
        GridError: the layout's programs do not fit on the device at once.
        RuntimeError: the first call of a shape on a device is under capture.
    """
    rows, choices = routing.experts.shape
    d, inner = w2.shape[-2:]
    x = x.contiguous()
    hidden = torch.empty(rows * (choices + 1), inner, dtype=x.dtype, device=x.device)
    # What nobody writes is 0; with a shared expert its programs see to that.
    new = torch.zeros if shared2 is None else torch.empty
    parts = new((rows, choices + 1, d), dtype=parts_dtype(x), device=x.device)
    mixed = 0 if shared2 is None else triton.cdiv(rows, DECODE_TILE)
    s13, s2 = (w13[0], w2[0]) if shared13 is None or shared2 is None else (shared13, shared2)
    cuts = layout.cut(w13, w2, act_group), layout.cut(s13, s2, act_group)
    # Room for the tiles of any pass, so that one state serves all of a shape.
    most = (STREAM_ROWS + 1) * choices + triton.cdiv(STREAM_ROWS, DECODE_TILE)
    size = 32 + most * (1 + triton.cdiv(inner, act_group or inner))
    state = counters(f"experts of {size}", 32 + 2 * size, x.device)
    warps = layout.fitted(d, inner)
    overlap = mixed > 0 and overlaps(x.device) and rows <= FEW_ROWS
    assert w13.scale is not None
    assert w2.scale is not None
    data, data2 = w13.data.view(torch.int32), w2.data.view(torch.int32)
    launch_at_once(
        experts_kernel,
        layout.programs,
        x.device,
        data,
        w13.scale,
        data.stride(0),
        w13.scale.stride(0),
        data2,
        w2.scale,
        data2.stride(0),
        w2.scale.stride(0),
        s13.data.view(torch.int32),
        s13.scale,
        s2.data.view(torch.int32),
        s2.scale,
        x.view(torch.int32),
        hidden,
        parts,
        routing.order,
        routing.tiles,
        routing.num_tiles,
        routing.weights,
        routing.experts,
        state,
        rows,
        mixed,
        most,
        limit,
        CHOICES=choices,
        D=d,
        I=inner,
        SIZE=size,
        CUT=cuts[0],
        SHARED_CUT=cuts[1],
        GROUP=act_group or 0,
        WARPS=warps,
        OVERLAP=overlap,
        num_warps=warps,
        maxnreg=layout.registers,
        launch_pdl=overlap,
    )
    return parts
