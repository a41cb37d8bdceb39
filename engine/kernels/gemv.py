"""Products of few rows with packed weights: bound by reading the weights once.

One launch takes several products. A program computes a tile [BT rows, BN columns of the result]
over a share of K; K is split so that enough programs read at once. Shares are either left to the
caller as summands or added, in order, by the program of a tile that finishes last.

FP8 weights become bfloat16 in registers, without their scale; the scale of a block multiplies the
float32 sums of that block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.codes import encode_device
from engine.kernels.formats import Matrix
from engine.kernels.overlap import await_previous, begin_next, is_hopper, overlaps
from engine.kernels.roundtrip import fp8_device
from engine.kernels.triton_compat import INTERPRETED, cast, dot, tl, triton

#: Most rows this kernel takes, and of blocks with a short side; more are a matter of arithmetic
#: (engine.kernels.gemm).
MAX_ROWS, MAX_ROWS_SHORT = 128, 64
#: Programs an H200 has room for: three on each of its 132 processors.
_PROGRAMS = 396
_MAX_JOBS = 4
#: Up to so many rows there is room for the programs of two kernels.
OVERLAP_ROWS = 32
#: Most shares of K that a kernel adds up.
_MOST_SHARES = 8


@dataclass(frozen=True, slots=True)
class Job:
    """One product.

    Args:
        x: [T, K], or [T, G * K] with groups; the last dimension is contiguous.
        w: plain or fp8, [N, K].
        out: [T, N] contiguous, or float32 [T, P, N] for summands, P from `splits`, or e4m3 [T, N].
        groups: rows of w per group of x's columns is N / groups.
        out_group: group of the result's FP8 rounding; 0 for none.
        powers: where those of e4m3 results go (engine.kernels.codes); None for any other.
    """

    x: Tensor
    w: Matrix
    out: Tensor
    groups: int = 1
    out_group: int = 0
    powers: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """Tiling of one job.

    Args:
        bt: rows per program; fewer than 16 for blocks of which a step has 16 / bt.
        bn: columns of the result per program.
        bk: columns of the weight per step.
        split: shares of K.
        stages: of the software pipeline.
    """

    bt: int
    bn: int
    bk: int
    split: int
    stages: int


# ---------------------------------------------------------------- Triton


@triton.jit
def _e4m3_as_bf16(w):
    """Values of e4m3 codes [..., 4 n] times 2 ** -120 as bfloat16, four at a time.

    A code's seven low bits are the lowest exponent and the highest mantissa bits of a bfloat16. A
    byte permutation can extend signs, so that sign and bits arrive by one shift and one mask.
    """
    return tl.inline_asm_elementwise(
        asm="""
        {
        .reg .b32 a, b;
        prmt.b32 a, $2, 0, 0x9180;
        prmt.b32 b, $2, 0, 0xB3A2;
        shl.b32 a, a, 4;
        shl.b32 b, b, 4;
        and.b32 $0, a, 0x87F087F0;
        and.b32 $1, b, 0x87F087F0;
        }
        """,
        constraints="=r,=r,r",
        args=[w],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _power(byte):
    """2 ** (byte - 127) of a scale byte, float32."""
    # Byte 0 is a subnormal: its one bit lies below the exponent's.
    return tl.maximum(byte.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def _with(values, value):
    """A tuple with one more value."""
    return values + (value,)  # noqa: RUF005 - the compiler has no starred elements


@triton.constexpr_function
def _side(block, step, bt):
    """Columns of a step that share a scale: a step takes as many blocks as it has.

    All of them where the blocks of a row lie apart (see `_tile`).
    """
    return block if 0 < block < step and bt >= 16 else step


@triton.jit
def _scales(
    scale,
    n0,
    k,
    N,
    K,
    BLOCK: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    SIDE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Scale bytes of columns n0 ... of the result for the pieces of a step at column k.

    One scalar per piece, or [1, BN] where columns differ, or [16, BN] where a row's blocks do.
    Beyond the last column of the weight they are those of the last. They stay bytes until they are
    used: whatever is done with a value that is carried round a loop is waited for within the round.
    """
    wide = tl.cdiv(K, BLOCK)
    found = ()
    for piece in tl.static_range(PIECES):
        block = tl.minimum(k + piece * SIDE, K - 1) // BLOCK
        if BT < 16:
            n = (n0 + tl.arange(0, BN))[None, :]
            block += (tl.arange(0, 16) % (16 // BT))[:, None]
            byte = tl.load(
                scale + n // BLOCK * wide + block, mask=(n < N) & (block < wide), other=127
            )
        elif BN <= BLOCK:
            byte = tl.load(scale + n0 // BLOCK * wide + block)
        else:
            n = (n0 + tl.arange(0, BN))[None, :]
            byte = tl.load(scale + n // BLOCK * wide + block, mask=n < N, other=127)
        found = _with(found, byte)
    return found


@triton.jit
def _tile(
    x,
    w,
    scale,
    bytes_ahead,
    n0,
    t0,
    first,
    last,
    T,
    N,
    K,
    stride,
    HOPPER: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums over k in [first, last) for rows t0 ... and columns n0 ... : float32 [BT, BN].

    A tensor core takes 16 rows. Where there are fewer, each row of x is there once per block of a
    step, with zeros outside that block, so that blocks with scales of their own are read and
    multiplied together and their sums still lie apart.
    """
    TALL: tl.constexpr = 16 if BT < 16 else BT
    APART: tl.constexpr = TALL // BT
    line = tl.arange(0, TALL)
    t = t0 + line // APART
    n = n0 + tl.arange(0, BN)
    SIDE: tl.constexpr = _side(BLOCK, BK, BT)
    PIECES: tl.constexpr = BK // SIDE
    k = tl.arange(0, SIDE)
    acc = tl.zeros((TALL, BN), tl.float32)
    wide: tl.constexpr = (x.dtype.element_ty == tl.float32) | (w.dtype.element_ty == tl.float32)
    work: tl.constexpr = tl.float32 if wide else tl.bfloat16
    quick: tl.constexpr = HOPPER and not wide
    live = (t < T)[:, None]
    if APART > 1:
        live = live & (k[None, :] // BLOCK == line[:, None] % APART)
    for k0 in tl.range(first, last, BK, num_stages=STAGES):
        if BLOCK > 0:
            # The next step's scales are on their way while this step's blocks are multiplied.
            bytes_here = bytes_ahead
            bytes_ahead = _scales(scale, n0, k0 + BK, N, K, BLOCK, BT, BN, SIDE, PIECES)
        for piece in tl.static_range(PIECES):
            at = k0 + piece * SIDE + k
            rows = x + t[:, None] * stride + at[None, :]
            columns = w + n[None, :].to(tl.int64) * K + at[:, None]
            if EVEN:
                a = tl.load(rows, mask=live, other=0.0)
                b = tl.load(columns)
            else:
                inside = at < last
                a = tl.load(rows, mask=live & inside[None, :], other=0.0)
                b = tl.load(columns, mask=(n < N)[None, :] & inside[:, None], other=0.0)
            if BLOCK > 0:
                b = _e4m3_as_bf16(b) if quick else b.to(tl.float32).to(work)
                factor = _power(bytes_here[piece])
                products = dot(a.to(work), b, tl.zeros((TALL, BN), tl.float32))
                # What the codes lack comes in two steps, half of it here and half at the end:
                # neither the scale nor the sums may leave their range.
                acc += products * (factor * 2.0**60 if quick else factor)
            else:
                acc = dot(a.to(work), b.to(work), acc)
    if APART > 1:
        acc = tl.sum(tl.reshape(acc, (BT, APART, BN)), axis=1)
    return acc * 2.0**60 if quick and BLOCK > 0 else acc


@triton.jit
def _finish(acc, out, powers, n0, t, T, N, GROUP: tl.constexpr):
    """Cast, round and store a tile of the result, whose columns begin at n0."""
    dtype: tl.constexpr = out.dtype.element_ty
    n = n0 + tl.arange(0, acc.shape[1])
    if dtype == tl.float8e4nv:
        encode_device(cast(acc, tl.bfloat16).to(tl.float32), out, powers, t, n0, T, N, GROUP)
    else:
        y = cast(acc, dtype)
        if GROUP > 0:
            y = cast(fp8_device(y.to(tl.float32), GROUP, 0), dtype)
        inside = (t < T)[:, None] & (n < N)[None, :]
        tl.store(out + t[:, None].to(tl.int64) * N + n[None, :], y, mask=inside)


@triton.jit
def _job(
    x,
    w,
    scale,
    out,
    powers,
    scratch,
    counters,
    program,
    T,
    N,
    K,
    stride,
    rows_of_group,
    split,
    share,
    HOPPER: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    WAITS: tl.constexpr,
    GROUP: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    MOST: tl.constexpr,
):
    """One program of one product: a tile of the result, over one share of K."""
    tiles = tl.cdiv(N, BN)
    tile = program // split
    part = program % split
    n0 = tile % tiles * BN
    t0 = tile // tiles * BT
    first = part * share
    last = tl.minimum(first + share, K)
    scales = ()
    if BLOCK > 0:
        side: tl.constexpr = _side(BLOCK, BK, BT)
        scales = _scales(scale, n0, first, N, K, BLOCK, BT, BN, side, BK // side)
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    x += n0 // rows_of_group * K
    acc = _tile(
        x, w, scale, scales, n0, t0, first, last, T, N, K, stride,
        HOPPER, BLOCK, EVEN, BT, BN, BK, STAGES,
    )  # fmt: skip
    t = t0 + tl.arange(0, BT)
    n = n0 + tl.arange(0, BN)
    inside = (t < T)[:, None] & (n < N)[None, :]
    own = (t[:, None] * split).to(tl.int64) * N + n[None, :]
    if PARTS:
        tl.store(out + own + part * N, acc, mask=inside)
    elif not WAITS:
        _finish(acc, out, powers, n0, t, T, N, GROUP)
    else:
        tl.store(scratch + own + part * N, acc, mask=inside)
        # All threads' stores come before the count that says they are there.
        tl.debug_barrier()
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if done == split - 1:
            _add_up(scratch, out, powers, n0, t0, T, N, split, GROUP, BT, BN, MOST)
            tl.store(counters + tile, 0)


@triton.jit
def _add_up(
    scratch,
    out,
    powers,
    n0,
    t0,
    T,
    N,
    split,
    GROUP: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    MOST: tl.constexpr,
):
    """Add the shares of a tile's rows up, in order, and finish them, some rows at a time.

    All shares of those rows are asked for at once: each round waits for memory once.
    """
    SOME: tl.constexpr = (16 if BT >= 64 else 8) * (2 if MOST <= 4 else 1)
    n = n0 + tl.arange(0, BN)
    for r in tl.range(t0, tl.minimum(t0 + BT, T), SOME, num_stages=1):
        t = r + tl.arange(0, SOME)
        inside = (t < T)[:, None] & (n < N)[None, :]
        places = scratch + (t[:, None] * split).to(tl.int64) * N + n[None, :]
        total = tl.zeros((SOME, BN), tl.float32)
        for part in tl.static_range(MOST):
            there = inside & (tl.full((1, 1), part, tl.int32) < split)
            share = tl.load(places + part * N, mask=there, other=0.0, cache_modifier=".cg")
            total += share
        _finish(total, out, powers, n0, t, T, N, GROUP)


@triton.jit(do_not_specialize=["ends", "T", "splits"])
def _gemv(
    xs,
    ws,
    scales,
    outs,
    powers,
    scratches,
    counters,
    ends,
    T,
    Ns,
    Ks,
    strides,
    group_rows,
    splits,
    shares,
    HOPPER: tl.constexpr,
    OVERLAP: tl.constexpr,
    MOST: tl.constexpr,
    FORMS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Programs of up to four products.

    FORMS: (block, even, parts, waits, out group) of each; TILES: (bt, bn, bk, stages).
    """
    program = tl.program_id(0)
    first = 0
    for j in tl.static_range(len(TILES)):
        if (program >= first) & (program < ends[j]):
            _job(
                xs[j], ws[j], scales[j], outs[j], powers[j], scratches[j], counters[j],
                program - first, T, Ns[j], Ks[j], strides[j], group_rows[j], splits[j], shares[j],
                HOPPER, OVERLAP, FORMS[j][0], FORMS[j][1], FORMS[j][2], FORMS[j][3], FORMS[j][4],
                TILES[j][0], TILES[j][1], TILES[j][2], TILES[j][3], MOST,
            )  # fmt: skip
        first = ends[j]


# ---------------------------------------------------------------- launch


def takes(rows: int, w: Matrix) -> bool:
    """Whether a product of T rows with a weight is one for this kernel."""
    most = MAX_ROWS_SHORT if w.kind == "fp8" and w.block < 128 else MAX_ROWS
    return w.kind in ("plain", "fp8") and rows <= most


def choose(job: Job, share: float = 1.0) -> Config:
    """Tiling of a job, from host shapes alone: a table by class of shape.

    Args:
        job: the product.
        share: part of the launch's bytes that it reads.
    """
    n, k = job.w.shape
    rows = job.x.shape[0]
    bt, bn, stages, programs = 16, 128, 4, _PROGRAMS * share
    if job.w.kind == "fp8":
        bk = 128
    else:
        bk = 128 // job.w.data.element_size()
        bn = 64 if rows <= 32 else 128
    spread = job.w.kind == "fp8" and 4 * job.w.block == bk and k % bk == 0
    if spread and rows <= 4:
        bt = 4
    elif rows > 32 and (job.w.kind == "plain" or job.w.block >= 128):
        # One tile of rows, so that weights are read and unpacked once; a program is twice as large.
        bt, bk, programs = 64, min(bk, 64), programs * 2 / 3
    elif rows > 16:
        bt, programs = 32, programs * 2 / 3
    if torch.float32 in (job.x.dtype, job.w.data.dtype) and not INTERPRETED:
        # Products in float32 are written out one by one: small tiles, for the compiler's sake.
        bt, bn, bk, stages = 16, max(32, job.out_group), 32, 3
    if job.groups > 1:
        bn = min(bn, n // job.groups)
    tiles, steps = triton.cdiv(n, bn) * triton.cdiv(rows, bt), triton.cdiv(k, bk)
    most = 2 * _MOST_SHARES if job.out.dim() == 3 else _MOST_SHARES
    split = max(1, min(int(programs / tiles), steps // 2, most))
    return Config(bt, bn, bk, triton.cdiv(steps, triton.cdiv(steps, split)), stages)


_COUNTERS: dict[torch.device, Tensor] = {}
#: Result tiles of one launch that may wait for shares of K.
_MOST_TILES = 1 << 16


def _counters(device: torch.device) -> Tensor:
    """Zeros that every launch leaves as zeros; one buffer per device, made before any capture.

    Launches that share it must not run at the same time: products of a device keep to one stream.
    """
    if device not in _COUNTERS:
        _COUNTERS[device] = torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
    return _COUNTERS[device]


def launch(jobs: Sequence[Job], configs: Sequence[Config]) -> None:
    """Run up to four products of the same T rows in one launch.

    Args:
        jobs: see `Job`; out is written whole.
        configs: one per job.
    """
    rows = jobs[0].x.shape[0]
    device = jobs[0].x.device
    counters = _counters(device)
    overlap = overlaps(device) and rows <= OVERLAP_ROWS
    scratches, offsets, ends, shares, forms = [], [], list[int](), [], []
    used, most, large = 0, 1, any(config.bt == 64 for config in configs)
    for job, config in zip(jobs, configs, strict=True):
        n, k = job.w.shape
        tiles = triton.cdiv(n, config.bn) * triton.cdiv(rows, config.bt)
        share = triton.cdiv(triton.cdiv(k, config.bk), config.split) * config.bk
        even = n % config.bn == 0 and k % config.bk == 0
        parts = job.out.dim() == 3
        waits = config.split > 1 and not parts
        most = max(most, triton.next_power_of_2(config.split) if waits else 1)
        scratches.append(
            torch.empty(rows * config.split * n, dtype=torch.float32, device=device)
            if waits
            else job.out
        )
        offsets.append(counters[used : used + tiles] if waits else counters)
        used += triton.cdiv(tiles, 4) * 4 if waits else 0  # aligned, as the compiler then knows
        ends.append((ends[-1] if ends else 0) + tiles * config.split)
        shares.append(share)
        forms.append((job.w.block if job.w.kind == "fp8" else 0, even, parts, waits, job.out_group))
    _gemv[(ends[-1],)](
        tuple(job.x for job in jobs),
        tuple(job.w.data for job in jobs),
        tuple(job.x if job.w.scale is None else job.w.scale for job in jobs),
        tuple(job.out for job in jobs),
        tuple(job.out if job.powers is None else job.powers for job in jobs),
        tuple(scratches),
        tuple(offsets),
        tuple(ends),
        rows,
        tuple(job.w.shape[0] for job in jobs),
        tuple(job.w.shape[1] for job in jobs),
        tuple(job.x.stride(0) for job in jobs),
        tuple(job.w.shape[0] // job.groups for job in jobs),
        tuple(config.split for config in configs),
        tuple(shares),
        HOPPER=is_hopper(device),
        OVERLAP=overlap,
        MOST=most,
        FORMS=tuple(forms),
        TILES=tuple((c.bt, c.bn, c.bk, c.stages) for c in configs),
        num_warps=8 if large else 4,
        maxnreg=128 if large else None,
        launch_pdl=overlap,
    )


def run(jobs: Sequence[Job]) -> None:
    """Run products of the same rows, four to a launch, with the tilings of `choose`."""
    for first in range(0, len(jobs), _MAX_JOBS):
        batch = jobs[first : first + _MAX_JOBS]
        total = sum(job.w.nbytes for job in batch)
        launch(batch, [choose(job, job.w.nbytes / total) for job in batch])


def run_parts(x: Tensor, w: Matrix) -> Tensor:
    """Product of x [T, K] with w [N, K] as float32 summands [T, P, N]."""
    unknown = torch.empty((0, 0, 0), dtype=torch.float32, device=x.device)
    config = choose(Job(x, w, unknown))
    shape = len(x), config.split, w.shape[0]
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    launch([Job(x, w, out)], [config])
    return out
