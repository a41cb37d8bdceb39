"""Experts of few rows on FP8 tensor cores: microseconds and share of the bandwidth, by cut.

python -m bench.micro.moe_tiles
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from bench.micro.moe import LIMIT, TOPK, Layer, routed
from bench.micro.timing import BANDWIDTH, replayed_us
from engine.kernels.formats import Matrix
from engine.kernels.moe import moe_torch
from engine.kernels.moe_tiles import TileCut, tile_experts
from engine.kernels.roundtrip import round_trip_fp8
from engine.kernels.router import Routing, group_torch

CUTS = [
    TileCut(64, 4, 2),
    TileCut(64, 4, 3),
    TileCut(128, 4, 2),
    TileCut(128, 4, 3),
    TileCut(128, 8, 3),
]


def check(name: str) -> None:
    """Compare with the twin."""
    layer = Layer(name, 6, 1)
    for rows in (1, 13, 64):
        x = round_trip_fp8(layer.rows(rows), layer.block)
        routing = routed(rows, 6)
        args = x, routing, layer.w13, layer.w2, *layer.shared[0]
        keywords = {"limit": LIMIT, "act_group": layer.block}
        want, got = moe_torch(*args, **keywords), tile_experts(*args, **keywords)
        error = ((got - want).float().norm() / want.float().norm()).item()
        print(f"{name} {rows} rows: relative error {error:.1e}", flush=True)


def decode(name: str, layer: Layer, rows: int, cuts: list[TileCut]) -> None:
    """Time passes of few rows."""
    calls = 16 if rows < 16 else 4
    inputs = [(layer.rows(rows), routed(rows, layer.experts)) for _ in range(calls)]
    nbytes = sum(layer.nbytes(routing) for _, routing in inputs) / calls
    for cut in cuts:
        us = replayed_us(
            [
                partial(
                    tile_experts, x, routing, layer.w13, layer.w2, *layer.shared[i % len(layer.shared)],
                    limit=LIMIT, act_group=layer.block, cuts=(cut, cut),
                )
                for i, (x, routing) in enumerate(inputs)
            ]
        )  # fmt: skip
        share = nbytes / us / 1e-6 / BANDWIDTH * 100
        print(
            f"{name} B={rows:2d} {us:7.1f} us {nbytes / 1e6:7.1f} MB {share:5.1f}%: {cut}",
            flush=True,
        )


def plain(rows: int) -> None:
    """Time Qwen3-30B's experts in bfloat16."""
    experts, k = 128, 8
    w13 = Matrix("plain", torch.randn(experts, 1536, 2048, device="cuda", dtype=torch.bfloat16))
    w2 = Matrix("plain", torch.randn(experts, 2048, 768, device="cuda", dtype=torch.bfloat16))
    calls, nbytes = [], 0
    for _ in range(8):
        chosen = torch.rand(rows, experts, device="cuda").topk(k).indices.to(torch.int32)
        routing = Routing(chosen, torch.rand(rows, k, device="cuda"), *group_torch(chosen, experts))
        x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
        nbytes += int(chosen.unique().numel()) * (w13.nbytes + w2.nbytes) // experts // 8
        calls.append(
            partial(tile_experts, x, routing, w13, w2, None, None, limit=LIMIT, act_group=None)
        )
    us = replayed_us(calls)
    print(
        f"qwen B={rows:2d} {us:7.1f} us {nbytes / 1e6:7.1f} MB {nbytes / us / 1e-6 / BANDWIDTH * 100:5.1f}%",
        flush=True,
    )


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", type=int, help="only compile one cut, by number")
    only = parser.parse_args().compile
    torch.manual_seed(0)
    assert TOPK
    if only is not None:
        decode("compiled", Layer("v4-flash", 16, 1), 1, [CUTS[only]])
        return
    check("v4-flash")
    layer = Layer("v4-flash")
    for rows in (1, 64, 4, 16):
        decode("v4-flash", layer, rows, CUTS)
    del layer
    for rows in (1, 4, 64):
        plain(rows)
    decode("v41", Layer("v41"), 1, CUTS[1:4:2])


if __name__ == "__main__":
    main()
