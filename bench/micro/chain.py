"""The dense half of a V4-Flash layer, kernel after kernel: `python -m bench.micro.chain`.

Two turns of the residual streams and the products of a layer with an indexer, in the order of the
model, without what lies between (attention, experts), and each by itself: microseconds per layer
from a graph over layers of different weights, with kernels that overlap and kernels that do not.
It reads 143 MB of weights, which takes 32 us at the bandwidth of an H200.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.micro.linear import fp8, plain
from bench.micro.mhc import MIXING, Inputs
from bench.micro.timing import replayed_us
from engine.kernels import linear, mhc, overlap


def layer(rows: int) -> dict[str, Callable[[], object]]:
    """One layer's calls, by name, each on weights of its own."""
    turns = Inputs.make(rows), Inputs.make(rows)
    first = [fp8(1536, 4096), plain(2048, 4096), plain(512, 4096), plain(64, 4096)]
    queries = [fp8(32768, 1024), fp8(8192, 1024)]
    wo_a, wo_b = fp8(8192, 4096), fp8(4096, 8192)
    norm = torch.ones(1024, device="cuda")
    o = torch.randn(rows, 32768, device="cuda", dtype=torch.bfloat16)
    low = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    kinds = [None, torch.float32, torch.float32, torch.float32]

    def turn(i: Inputs, parts: Tensor) -> tuple[Tensor, mhc.HcIn]:
        return mhc.hc_turn_triton(
            i.streams, parts, i.post, i.comb, i.fn, i.base, i.norm, None, **MIXING
        )

    def inputs(site: mhc.HcIn) -> tuple[Tensor, ...]:
        xs = [site.xq, site.x, site.x, site.x]
        return linear.linears_triton(xs, first, out_dtypes=kinds)

    def query(projected: Tensor) -> tuple[Tensor, ...]:
        return linear.norm_linear_triton(projected, norm, 1e-6, queries, act_group=128)

    def output() -> Tensor:
        return linear.attention_output_triton(o, wo_a, wo_b, 8, act_group=128)

    def whole() -> list[Tensor]:
        _, site = turn(turns[0], turns[0].parts)
        projected, *rest = inputs(site)
        q = query(projected[:, :1024])
        streams, other = turn(turns[1], output())
        return [*rest, *q, streams, other.xq]

    _, site = turn(turns[0], turns[0].parts)
    return {
        "half of a layer": whole,
        "turn": lambda: turn(turns[0], turns[0].parts),
        "inputs": lambda: inputs(site),
        "queries": lambda: query(low),
        "output": output,
        "norm": lambda: linear._prepared(low, norm, 1e-6, 128),
        "wo_a": lambda: linear.grouped_linear_triton(o, wo_a, 8, out_act_group=128),
    }


def main() -> None:
    """Run."""
    for rows in (1, 64, 16):
        layers = [layer(rows) for _ in range(3)]
        found = {}
        for on in (True, False):
            overlap.ENABLED = on
            found[on] = layers[0]["half of a layer"]()
            how = "overlapping" if on else "one by one"
            for name in layers[0] if rows != 16 else ["half of a layer"]:
                us = replayed_us([each[name] for each in layers] * 2, repeats=8)
                print(f"T {rows:2} {how:11} {name:16} {us:7.1f} us", flush=True)
        pairs = zip(found[False], found[True], strict=True)  # type: ignore[call-overload]
        print(f"  bitwise equal: {all(torch.equal(a, b) for a, b in pairs)}", flush=True)


if __name__ == "__main__":
    main()
