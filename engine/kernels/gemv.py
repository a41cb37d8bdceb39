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

from engine.kernels.formats import Matrix
from engine.kernels.gemv_kernel import gemv_kernel
from engine.kernels.overlap import is_hopper, overlaps
from engine.kernels.triton_compat import INTERPRETED, triton

#: Most rows this kernel takes, and of blocks with a short side; more are a matter of arithmetic
#: (engine.kernels.gemm).
MAX_ROWS, MAX_ROWS_SHORT = 128, 64
#: Programs an H200 has room for: three on each of its 132 processors.
_PROGRAMS = 396
_MAX_JOBS = 4
#: Up to so many rows there is room for the programs of two kernels.
OVERLAP_ROWS = 32
#: From more rows on weights are the left operand, if they have at most so many rows of their own:
#: more of those fill the GPU without shares of K.
LEFT_ROWS, _LEFT_COLUMNS = 32, 16384
#: Most shares of K that a kernel adds up.
_MOST_SHARES = 8
#: Most columns of a result that few programs make.
_LOW = 2048


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
        left: whether the weight is the left operand; bfloat16, or FP8 with rows of bfloat16.
    """

    bt: int
    bn: int
    bk: int
    split: int
    stages: int
    left: bool = False


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
    # Whole steps of V4 gain 1 % at 1 row and 1.6 % at 16 by both cuts, and lose 2.7 % at 4.
    finer = rows == 1 or 8 < rows <= 16
    if job.w.kind == "fp8":
        bk = 128
        if finer and n <= _LOW and job.w.block >= bk and job.out_group <= 64:
            bn = 64  # more programs, of fewer columns
    else:
        bk = 128 // job.w.data.element_size()
        bn = 64 if rows <= 32 else 128
    spread = job.w.kind == "fp8" and 4 * job.w.block == bk and k % bk == 0
    narrow = torch.float32 not in (job.x.dtype, job.w.data.dtype)
    left = False
    if spread and rows <= 4:
        bt = 4
    elif rows > LEFT_ROWS and (job.w.kind == "plain" or job.w.block >= 128):
        # One tile of rows, so that weights are read and unpacked once; a program is twice as large.
        bt, programs = 64, programs * 2 / 3
        left = narrow and n <= _LEFT_COLUMNS
        if left and job.out_group > 64:
            programs /= 2  # fewer shares: rounding in groups waits for all of them
        elif left:
            bn, stages = 64, 3
        else:
            bk = min(bk, 64)
    elif rows > 16:
        bt, programs = 32, programs * 2 / 3
    if not narrow and not INTERPRETED:
        # Products in float32 are written out one by one: small tiles, for the compiler's sake.
        bt, bn, bk, stages = 16, max(32, job.out_group), 32, 3
    if job.groups > 1:
        bn = min(bn, n // job.groups)
    if finer and job.out_group > 64:
        programs /= 3  # fewer shares: rounding in groups waits for all of them
    tiles, steps = triton.cdiv(n, bn) * triton.cdiv(rows, bt), triton.cdiv(k, bk)
    most = 2 * _MOST_SHARES if job.out.dim() == 3 else _MOST_SHARES
    split = max(1, min(int(programs / tiles + left / 2), steps // 2, most))
    if bt == 16 and split == 1 and narrow and job.w.kind == "plain":
        bk *= 2  # a large matrix: longer runs of each of its rows
        steps = triton.cdiv(k, bk)
    return Config(bt, bn, bk, triton.cdiv(steps, triton.cdiv(steps, split)), stages, left)


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
    gemv_kernel[(ends[-1],)](
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
        TILES=tuple((c.bt, c.bn, c.bk, c.stages, c.left) for c in configs),
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
