"""The dense half of a V4-Flash layer, kernel after kernel: `python -m bench.micro.chain`.

Two turns of the residual streams and the products of a layer with an indexer, in the order of the
model, without what lies between (attention, experts): microseconds per layer from a graph over
layers of different weights, with kernels that overlap and with kernels that do not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.micro.linear import fp8, plain
from bench.micro.mhc import MIXING, Inputs
from bench.micro.timing import BANDWIDTH, replayed_us
from engine.kernels import linear, mhc, overlap


def layer(rows: int) -> tuple[Callable[[], list[Tensor]], int]:
    """One layer's calls, and the bytes of its weights."""
    turns = Inputs.make(rows), Inputs.make(rows)
    first = [fp8(1536, 4096), plain(2048, 4096), plain(512, 4096), plain(64, 4096)]
    queries = [fp8(32768, 1024), fp8(8192, 1024)]
    wo_a, wo_b = fp8(8192, 4096), fp8(4096, 8192)
    norm = torch.ones(1024, device="cuda")
    o = torch.randn(rows, 32768, device="cuda", dtype=torch.bfloat16)
    kinds = [None, torch.float32, torch.float32, torch.float32]

    def turn(i: Inputs, parts: Tensor) -> tuple[Tensor, mhc.HcIn]:
        return mhc.hc_turn_triton(
            i.streams, parts, i.post, i.comb, i.fn, i.base, i.norm, None, **MIXING
        )

    def run() -> list[Tensor]:
        _, site = turn(turns[0], turns[0].parts)
        inputs = [site.xq, site.x, site.x, site.x]
        projected, *rest = linear.linears_triton(inputs, first, out_dtypes=kinds)
        q = linear.norm_linear_triton(projected[:, :1024], norm, 1e-6, queries, act_group=128)
        parts = linear.attention_output_triton(o, wo_a, wo_b, 8, act_group=128)
        streams, other = turn(turns[1], parts)
        return [*rest, *q, streams, other.xq]

    nbytes = sum(w.nbytes for w in [*first, *queries, wo_a, wo_b]) + 2 * turns[0].fn.nbytes
    return run, nbytes


def main() -> None:
    """Run."""
    for rows in (1, 4, 16, 64):
        layers = [layer(rows) for _ in range(3)]
        calls, nbytes = [run for run, _ in layers] * 2, layers[0][1]
        found = {}
        for on in (False, True):
            overlap.ENABLED = on
            found[on] = calls[0]()
            us = replayed_us(calls)
            share = nbytes / (us * 1e-6) / BANDWIDTH
            how = "overlapping" if on else "one by one"
            print(f"dense half of a layer, T {rows:2}: {us:7.1f} us {share:4.0%} {how}", flush=True)
        same = all(torch.equal(a, b) for a, b in zip(found[False], found[True], strict=True))
        print(f"  bitwise equal: {same}", flush=True)


if __name__ == "__main__":
    main()
