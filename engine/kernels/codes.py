"""Products of FP8 rows with FP8 weights, multiplied as FP8: weights go to tensor cores as stored.

What enters an FP8 linear is rounded to FP8 in groups as wide as the weight's blocks (model.md 2.1),
so both operands exist as codes. Products of codes of a block are summed by the tensor cores and
scaled, in float32, by the power of the row's group and that of the weight's block. Beside
engine.kernels.gemv, which makes bfloat16 of every weight, this has a third of the instructions: 42 MB
of queries take 14 us at 64 rows on an H200, and took 32.

Hopper's tensor cores align the FP8 products of one instruction to the largest and cut off what lies
some 13 bits below, and no error is carried beyond a block. Against exact sums, up to 2**-10.8 of the
largest result was measured: less than what rounding results to bfloat16 costs (2**-9), which is why
results in float32 are summands only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.kernels.overlap import await_previous, begin_next, is_hopper, overlaps
from engine.kernels.roundtrip import (
    E4M3_MAX,
    FP8_AMAX_FLOOR,
    fp8_scale_device,
    group_amax,
    power_of_two_at_least,
    reciprocal_device,
    round_e4m3_device,
    to_e4m3,
    to_groups,
)
from engine.kernels.triton_compat import INTERPRETED, cast, dot, tl, triton

_INTERPRETED = tl.constexpr(INTERPRETED)
#: Most rows, and as many as `Codes.powers` has room for.
MAX_ROWS = 64
#: Up to so many rows there is room for the programs of two kernels.
OVERLAP_ROWS = 32


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows rounded to FP8.

    Args:
        codes: e4m3 [T, K].
        powers: float32 [K / group, MAX_ROWS], powers of two; columns from T on are unused.
        group: columns of a row that share a power.
    """

    codes: Tensor
    powers: Tensor
    group: int

    @staticmethod
    def empty(rows: int, width: int, group: int, device: torch.device) -> Codes:
        """Make room for T rows of K columns."""
        return Codes(
            torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device),
            torch.empty((width // group, MAX_ROWS), dtype=torch.float32, device=device),
            group,
        )

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The rounded values [T, K]."""
        rows, width = self.codes.shape
        groups = self.codes.float().view(rows, width // self.group, self.group)
        return (groups * self.powers[:, :rows].t()[:, :, None]).reshape(rows, width).to(dtype)


def encode_torch(x: Tensor, group: int) -> Codes:
    """Round rows [T, K] to FP8, as `round_trip_fp8` does; K a multiple of the group."""
    made = Codes.empty(len(x), x.shape[1], group, x.device)
    groups = to_groups(x.float(), group)
    power = power_of_two_at_least(group_amax(groups, FP8_AMAX_FLOOR) / E4M3_MAX)
    made.codes.copy_(to_e4m3(groups / power).view(x.shape))
    made.powers[:, : len(x)] = power[:, :, 0].t()
    return made


# ---------------------------------------------------------------- Triton


@triton.jit
def encode_device(x, codes, powers, t, first, T, K, GROUP: tl.constexpr):
    """Store float32 rows t [R] of x [R, C] as codes and powers; columns begin at `first`."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    groups = tl.reshape(x, (R, C // GROUP, GROUP))
    amax = tl.max(tl.abs(groups), axis=2)
    power = fp8_scale_device(tl.maximum(amax, 1e-4))
    scaled = round_e4m3_device(groups * reciprocal_device(power)[:, :, None])
    code = tl.reshape(scaled, (R, C)).to(tl.float8e4nv)
    column = first + tl.arange(0, C)[None, :]
    live = (t < T)[:, None]
    tl.store(codes + t[:, None].to(tl.int64) * K + column, code, mask=live & (column < K))
    group = first // GROUP + tl.arange(0, C // GROUP)[None, :]
    tl.store(powers + group * 64 + t[:, None], power, mask=live & (group < K // GROUP))


@triton.jit
def power_device(byte):
    """2 ** (byte - 127) of a scale byte, float32."""
    # Byte 0 is a subnormal: its one bit lies below the exponent's.
    return tl.maximum(byte.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def _bytes(
    scale, block, K, W_BLOCK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Scale bytes of a step's pieces: scalars, [BN, 1] where rows differ, [BN, 16] for few rows."""
    found = ()
    row = tl.arange(0, BN)[:, None] // W_BLOCK * (K // W_BLOCK)
    for piece in tl.static_range(PIECES):
        at = scale + block + piece
        if BT < 16:
            byte = tl.load(at + row + tl.arange(0, 16)[None, :] % (16 // BT))
        elif BN <= W_BLOCK:
            byte = tl.load(at)
        else:
            byte = tl.load(at + row)
        found = found + (byte,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _sums(
    codes, powers, w, scale, n0, first, last, T, K, W_BLOCK: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over blocks [first, last) of columns, BLOCKS of them at a step: float32 [BN, BT].

    Where there are fewer than 16 rows each is there once per block of a step, with zeros outside
    that block: its blocks are multiplied together and their sums still lie apart.
    """
    WIDE: tl.constexpr = 16 if BT < 16 else BT
    APART: tl.constexpr = WIDE // BT
    PIECES: tl.constexpr = BLOCKS // APART
    column = tl.arange(0, WIDE)
    t = column // APART
    n = n0 + tl.arange(0, BN)
    k = tl.arange(0, W_BLOCK * APART)
    rows = codes + t[None, :] * K
    # Rows beyond the last are not read: one place asked for by all would be a queue.
    live = (t < T)[None, :]
    if APART > 1:
        live = live & (k[:, None] // W_BLOCK == column[None, :] % APART)
    columns = w + n[:, None].to(tl.int64) * K
    scale += n0 // W_BLOCK * (K // W_BLOCK)
    acc = tl.zeros((BN, WIDE), tl.float32)
    ahead = _bytes(scale, first, K, W_BLOCK, BT, BN, PIECES)
    for block in tl.range(first, last, BLOCKS, num_stages=STAGES):
        # The next step's scales are on their way while this step's blocks are multiplied.
        here = ahead
        ahead = _bytes(scale, tl.minimum(block + BLOCKS, last - BLOCKS), K, W_BLOCK, BT, BN, PIECES)
        for piece in tl.static_range(PIECES):
            at = block + piece
            # Powers of rows beyond the last are anything, as their sums are.
            own = tl.load(powers + (at + column % APART) * 64 + t)
            if _INTERPRETED:  # numpy would warn
                own = tl.where(t < T, own, 0.0)
            factor = own[None, :] * power_device(here[piece])
            a = tl.load(columns + (at * W_BLOCK + k)[None, :])
            b = tl.load(rows + (at * W_BLOCK + k)[:, None], mask=live, other=0.0)
            acc += dot(a, b, tl.zeros((BN, WIDE), tl.float32)) * factor
    if APART > 1:
        acc = tl.sum(tl.reshape(acc, (BN, BT, APART)), axis=2)
    return acc


@triton.jit(do_not_specialize=["T", "end", "wanted_from"])
def _product(
    codes, powers, w, scale, out, N, split, share, end, w_1, scale_1, out_1, N_1, positions,
    wanted_from, T, K,
    W_BLOCK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BLOCKS: tl.constexpr,
    STAGES: tl.constexpr, SKIPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program: BN columns of one of two products, over one share of K.

    SKIPS: the second one has no columns to sum where all T positions lie below `wanted_from`.
    """
    program = tl.program_id(0)
    second = program >= end
    program = tl.where(second, program - end, program)
    w = tl.where(second, w_1, w)
    scale = tl.where(second, scale_1, scale)
    out = tl.where(second, out_1, out)
    N = tl.where(second, N_1, N)
    n0 = program // split * BN
    part = program % split
    first = part * share
    last = tl.minimum(first + share, K // W_BLOCK)
    if SKIPS:  # noqa: SIM102 - one of the two is known to the compiler
        if second:
            row = tl.arange(0, 64)
            newest = tl.max(tl.load(positions + row, mask=row < T, other=0), 0)
            last = tl.where(newest < wanted_from, first, last)
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    acc = _sums(codes, powers, w, scale, n0, first, last, T, K, W_BLOCK, BT, BN, BLOCKS, STAGES)
    t = tl.arange(0, BT)[:, None]
    n = n0 + tl.arange(0, BN)[None, :]
    own = out + (t * split + part).to(tl.int64) * N + n
    tl.store(own, cast(tl.trans(acc), out.dtype.element_ty), mask=t < T)


# ---------------------------------------------------------------- launch


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut up.

    Args:
        bn: columns of the result per program.
        split: shares of K, each a summand of the result.
        stages: of the software pipeline.
        warps: of a program.
    """

    bn: int
    split: int
    stages: int
    warps: int


def take(x: Tensor, ws: Sequence[Matrix], group: int) -> bool:
    """Whether products of rows x, rounded in groups, are for this kernel."""
    return (
        (is_hopper(x.device) or INTERPRETED)
        and x.dtype == torch.bfloat16
        and len(x) <= MAX_ROWS
        and len(ws) <= 2
        and all(
            w.kind == "fp8" and w.block == group and w.shape[0] % 128 == 0 and w.shape[1] % 128 == 0
            for w in ws
        )
    )


def choose(rows: int, ws: Sequence[Matrix], *, parts: bool) -> Cut:
    """How to cut a product of T rows, from host shapes alone."""
    if not parts:
        if ws[0].block < 128:
            return Cut(128, 1, 3, 8) if rows > 32 else Cut(64, 1, 4, 4)
        return Cut(64, 1, 3, 4) if rows > 32 else Cut(128, 1, 3, 4)
    tiles, steps = ws[0].shape[0] // 64, ws[0].shape[1] // 128
    split = max(1, min(8, 264 // tiles, steps // 2))
    stages = 6 if rows > 32 and ws[0].block < 128 else 4
    return Cut(64, triton.cdiv(steps, triton.cdiv(steps, split)), stages, 4)


def launch(
    x: Codes,
    ws: Sequence[Matrix],
    outs: Sequence[Tensor],
    cut: Cut,
    wanted: tuple[Tensor, int] | None = None,
) -> None:
    """Multiply rows with one or two weights in one launch.

    Args:
        x: [T, K].
        ws: FP8 [N, K], blocks as wide as x's groups.
        outs: [T, N] each, or float32 [T, cut.split, N] of a single weight.
        cut: how.
        wanted: see `run`.
    """
    rows, width = x.codes.shape
    w, other = ws[0], ws[-1]
    blocks, step = width // x.group, 128 // x.group
    share = triton.cdiv(triton.cdiv(blocks, cut.split), step) * step
    tile = next(size for size in (16 // step, 16, 32, 64) if rows <= size)
    end = w.shape[0] // cut.bn * cut.split
    total = end + (other.shape[0] // cut.bn if len(ws) == 2 else 0)
    overlap = overlaps(x.codes.device) and rows <= OVERLAP_ROWS
    _product[(total,)](
        x.codes, x.powers, w.data, w.scale, outs[0], w.shape[0], cut.split, share, end,
        other.data, other.scale, outs[-1], other.shape[0],
        x.powers if wanted is None else wanted[0], 0 if wanted is None else wanted[1], rows, width,
        W_BLOCK=x.group, BT=tile, BN=cut.bn, BLOCKS=step, STAGES=cut.stages,
        SKIPS=wanted is not None, OVERLAP=overlap,
        num_warps=cut.warps, launch_pdl=overlap,
    )  # fmt: skip


def run(
    x: Codes,
    ws: Sequence[Matrix],
    dtype: torch.dtype,
    wanted: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, ...]:
    """Multiply rows with one or two weights: [T, N] each.

    Args:
        x: [T, K].
        ws: as for `launch`.
        dtype: of the results.
        wanted: int32 [T], and what none of it may reach for the second product to be zeros instead.
    """
    rows, device = len(x.codes), x.codes.device
    outs = tuple(torch.empty((rows, w.shape[0]), dtype=dtype, device=device) for w in ws)
    launch(x, ws, outs, choose(rows, ws, parts=False), wanted)
    return outs


def run_parts(x: Codes, w: Matrix) -> Tensor:
    """Multiply rows with a weight: float32 summands [T, P, N]."""
    rows, device = len(x.codes), x.codes.device
    cut = choose(rows, (w,), parts=True)
    out = torch.empty((rows, cut.split, w.shape[0]), dtype=torch.float32, device=device)
    launch(x, (w,), (out,), cut)
    return out
