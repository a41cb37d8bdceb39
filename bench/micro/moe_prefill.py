"""Experts of many rows on a GPU, by how launches are cut; the router's grouping.

    python -m bench.micro.moe_prefill [--quick] [--profile INDEX]

V4-Flash's layer (256 FP4 experts, top 6, FP8 shared expert) and V4.1's (128 experts), rows routed at
random. First the result is compared with the twin. Kernels are compiled by processes of their own
beforehand, all at once. --profile makes the launches of one cut twice and times nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from bench.micro.index import setting
from bench.micro.moe import LIMIT, TOPK, Layer, routed
from bench.micro.timing import BANDWIDTH, RATE, replayed_us
from engine.kernels import grouping, moe_prefill
from engine.kernels.grouping import LONG_TILE, SHORT_TILE, group_torch, group_triton
from engine.kernels.moe import moe_torch, moe_triton
from engine.kernels.moe_prefill import LONG_FP4, SHORT_FP4, Tiling

#: Rows, pairs of a tile and the cut for them; the first of each number of rows is the one in use.
CUTS: list[tuple[int, int, Tiling]] = [
    (1024, SHORT_TILE, SHORT_FP4),
    (8192, LONG_TILE, LONG_FP4),
    (1024, 32, Tiling(128, 128, 8, 4, 128)),
    (1024, 32, Tiling(128, 128, 8, 2, 80)),
    (1024, 128, LONG_FP4),
    (8192, 64, Tiling(128, 128, 8, 3, 128)),
    (8192, 128, Tiling(128, 128, 8, 4)),
]


def error(layer: Layer, rows: int) -> float:
    """Relative distance from the twin."""
    args = layer.rows(rows), routed(rows, layer.experts), layer.w13, layer.w2, *layer.shared[0]
    want = moe_torch(*args, limit=LIMIT, act_group=layer.block)
    got = moe_triton(*args, limit=LIMIT, act_group=layer.block)
    again = moe_triton(*args, limit=LIMIT, act_group=layer.block)
    if not torch.equal(got, again):
        return float("nan")  # differs from run to run
    return float((got - want).float().norm() / want.float().norm())


@contextmanager
def using(pairs: int, cut: Tiling) -> Iterator[None]:
    """All launches cut like this for a while."""
    with (
        setting(moe_prefill, SHORT_FP4=cut, LONG_FP4=cut),
        setting(grouping, SHORT_TILE=pairs, LONG_TILE=pairs),
    ):
        yield


def launches(layer: Layer, rows: int) -> list[partial[None]]:
    """The two launches of the routed experts."""
    routing, inner = routed(rows, layer.experts), layer.w2.shape[-1]
    hidden = torch.randn(rows * TOPK, inner, device="cuda", dtype=torch.bfloat16)
    parts = torch.empty(rows, TOPK + 1, layer.d, device="cuda", dtype=torch.bfloat16)
    call = partial(moe_prefill._product, routing=routing, limit=LIMIT, act_group=layer.block)
    return [
        partial(call, layer.rows(rows), hidden, layer.w13, second=False, weave=True),
        partial(call, hidden, parts, layer.w2, second=True, weave=False),
    ]


def cuts(layer: Layer, only: list[int]) -> None:
    """Time the launches of some cuts."""
    small = Layer("v4-flash", 6, 1)
    for rows, pairs, cut in (CUTS[i] for i in only):
        with using(pairs, cut):
            far = error(small, 300)
            times = [replayed_us([call], repeats=3) for call in launches(layer, rows)]
        flops = 6 * rows * TOPK * layer.d * layer.w2.shape[-1]
        nbytes = layer.w13.nbytes + layer.w2.nbytes
        us = sum(times)
        print(f"{rows} rows {' + '.join(f'{t:.0f}' for t in times)} us {flops / us / 1e6:4.0f} "
              f"TFLOP/s {nbytes / us / BANDWIDTH * 1e8:3.0f}% read, error {far:.1e}: {pairs} "
              f"pairs, {cut}", flush=True)  # fmt: skip


def whole(layer: Layer, name: str, rows: int) -> None:
    """Time all launches of a layer's experts."""
    args = layer.rows(rows), routed(rows, layer.experts), layer.w13, layer.w2, *layer.shared[0]
    us = replayed_us([partial(moe_triton, *args, limit=LIMIT, act_group=layer.block)], repeats=3)
    rate = 6 * rows * (TOPK + 1) * layer.d * layer.w2.shape[-1] / us / 1e-6
    print(f"{name} T={rows} {us:8.1f} us {rate / 1e12:6.1f} TFLOP/s, {rate / RATE * 100:.0f}% of "
          f"{RATE / 1e12}", flush=True)  # fmt: skip


def groupings(rows: int, experts: int) -> None:
    """Time the sorting of pairs by expert, as twin and as kernels."""
    chosen: Tensor = routed(rows, experts).experts
    for name, group in (("torch", group_torch), ("kernels", group_triton)):
        us = replayed_us([partial(group, chosen, experts)] * 4, repeats=5)
        print(f"group {rows} rows, {name}: {us:.1f} us", flush=True)


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the cuts in use")
    parser.add_argument("--profile", type=int, help="one cut, without timing")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.profile is not None:
        rows, pairs, cut = CUTS[given.profile]
        with using(pairs, cut):
            for call in launches(Layer("v4-flash", 256 if rows > 1024 else 64, 1), rows) * 2:
                call()
        torch.cuda.synchronize()
        return
    only = list(range(2 if given.quick else len(CUTS)))
    compilers = [
        subprocess.Popen([sys.executable, "-m", __spec__.name, "--profile", str(i)]) for i in only
    ]
    small = Layer("v4-flash", 6, 1)
    for rows in (200, 1300):
        print(f"{rows} rows: error {error(small, rows):.1e}", flush=True)
    if any(compiler.wait() for compiler in compilers):
        raise SystemExit("a cut could not be run: see above")
    layer = Layer("v4-flash", shared=1)
    for rows in (1024, 2048, 8192, 16384):
        whole(layer, "v4-flash", rows)
    cuts(layer, only)
    for rows in (1024, 8192):
        groupings(rows, layer.experts)
    del layer
    layer = Layer("v41", shared=1)
    for rows in (1024, 8192):
        whole(layer, "v41", rows)


if __name__ == "__main__":
    main()
