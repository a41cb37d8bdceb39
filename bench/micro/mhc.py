"""Turning from one site to the next at V4-Flash's widths: `python -m bench.micro.mhc [--quick]`.

Microseconds of `hc_turn` for tilings of its first kernel, the one that ships marked with *;
a check against the torch twin comes first.
"""

from __future__ import annotations

import argparse
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.micro.timing import BANDWIDTH, copies, replayed_us
from engine.kernels import mhc, mhc_launch

DEVICE = "cuda"
STREAMS, WIDTH = 4, 4096
MIXING: dict[str, Any] = {"eps": 1e-6, "hc_eps": 1e-6, "iterations": 20, "act_group": 128}


@dataclass(frozen=True)
class Inputs:
    """One site's tensors."""

    streams: Tensor
    parts: Tensor
    post: Tensor
    comb: Tensor
    fn: Tensor
    base: Tensor
    norm: Tensor

    @classmethod
    def make(cls, rows: int) -> Inputs:
        """Random ones; decode's sublayers leave several summands, prefill's one."""
        normal = torch.randn(STREAMS * (STREAMS + 2), STREAMS * WIDTH, device=DEVICE)
        count = 8 if rows <= 64 else 1
        kind = torch.float32 if rows <= 64 else torch.bfloat16
        return cls(
            torch.randn(rows, STREAMS, WIDTH, device=DEVICE, dtype=torch.bfloat16),
            torch.randn(rows, count, WIDTH, device=DEVICE, dtype=kind),
            torch.rand(rows, STREAMS, device=DEVICE) * 2,
            torch.rand(rows, STREAMS, STREAMS, device=DEVICE) / STREAMS,
            normal * (STREAMS * WIDTH) ** -0.5,
            torch.randn(STREAMS * (STREAMS + 2), device=DEVICE),
            torch.ones(WIDTH, device=DEVICE),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that a turn reads and writes at least."""
        moved = 3 * self.streams.nbytes + self.streams.nbytes // 2  # read, write, read; x and xq
        return moved + self.parts.nbytes + self.fn.nbytes

    def turn(self, cut: mhc_launch.Tiling | None) -> tuple[Tensor, ...]:
        """`hc_turn` with a tiling of choice."""
        mixed, sums = mhc_launch.mixed(
            self.streams, (self.parts, self.post, self.comb), self.fn, cut
        )
        return mhc_launch.opened(mixed, sums, self.base, self.norm, None, **MIXING)

    def close(self, cut: mhc_launch.Tiling | None) -> Tensor:
        """The first kernel alone."""
        return mhc_launch.mixed(self.streams, (self.parts, self.post, self.comb), self.fn, cut)[0]


def check() -> None:
    """Compare with the twin on the GPU, at decode's, odd and prefill's numbers of rows."""
    for rows in (1, 64):
        i = Inputs.make(rows)
        args = i.streams, i.parts, i.post, i.comb, i.fn, i.base, i.norm, None
        mixed, opened = mhc.hc_turn_triton(*args, **MIXING)
        other, twin = mhc.hc_turn_torch(*args, **MIXING)
        errors = {
            name: float((getattr(opened, name).float() - getattr(twin, name).float()).abs().max())
            for name in ("x", "xq", "pre", "post", "comb")
        }
        errors["streams"] = float((mixed.float() - other.float()).abs().max())
        print(f"check: T {rows}", {name: f"{error:.1e}" for name, error in errors.items()})


def tilings(rows: int) -> dict[str, mhc_launch.Tiling | None]:
    """Tilings to try."""
    if rows <= mhc_launch.FEW:
        options = [mhc_launch.Tiling(1, 32, 4), mhc_launch.Tiling(1, 64, 8)]
    elif rows <= mhc_launch.MANY:
        options = [mhc_launch.Tiling(16, 32, 4), mhc_launch.Tiling(16, 64, 8)]
    else:
        options = [mhc_launch.Tiling(1, 1024, 4), mhc_launch.Tiling(32, 64, 4)]
    return {"*": None} | {str(list(astuple(cut))): cut for cut in options}


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="the shipped tilings only")
    quick = parser.parse_args().quick
    check()
    for rows in (1, 64) if quick else (1, 16, 64, 8192):
        first = Inputs.make(rows)
        sets = [first] + [Inputs.make(rows) for _ in range(copies(first.nbytes, 40) - 1)]
        for name, cut in tilings(rows).items():
            if quick and cut is not None:
                continue
            both = replayed_us([partial(i.turn, cut) for i in sets], repeats=8)
            alone = replayed_us([partial(i.close, cut) for i in sets], repeats=8)
            share = first.nbytes / (both * 1e-6) / BANDWIDTH
            line = f"hc_turn T {rows:5} {both:8.2f} us (first {alone:7.2f}) {share:4.0%}  {name}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
