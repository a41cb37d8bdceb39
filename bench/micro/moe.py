"""Experts of few rows on a GPU: microseconds and share of the bandwidth, by layout.

    python -m bench.micro.moe [--quick]

V4-Flash's layer (256 FP4 experts, top 6, FP8 shared expert) and V4.1's (128 experts). Rows are
routed at random, differently in each call of a round. First the result is compared with the twin.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor

from bench.micro.timing import BANDWIDTH, replayed_us
from engine.kernels.formats import FP4_GROUP, Matrix
from engine.kernels.grouping import group_torch
from engine.kernels.moe import moe_torch, moe_triton
from engine.kernels.moe_decode import LAYOUT, Layout, stream_experts
from engine.kernels.router import Routing, route_triton
from engine.kernels.rows import Rows

TOPK = 6
LIMIT = 10.0
#: d, I, experts, side of the shared expert's scale blocks.
SHAPES = {"v4-flash": (4096, 2048, 256, 128), "v41": (5120, 2304, 128, 32)}
#: Layouts to compare.
LAYOUTS = [LAYOUT, Layout(2, 2, 4, 1, warps=4), Layout(1, 4)]


def codes(*shape: int, least: int = 0, most: int) -> Tensor:
    """Random bytes below `most`."""
    return torch.empty(*shape, dtype=torch.uint8, device="cuda").random_(least, most)


def packed(kind: str, *shape: int, block: int = FP4_GROUP) -> Matrix:
    """Random bytes with scales that keep values near 1 / sqrt(columns)."""
    *lead, rows, columns = shape
    exponent = int(127 - torch.tensor(columns).log2().item() / 2 - (1 if kind == "fp4" else 6))
    scales = {"least": exponent - 1, "most": exponent + 2}
    if kind == "fp4":
        data = codes(*lead, rows, columns // 2, most=256)
        scale = codes(*lead, rows, columns // FP4_GROUP, **scales)
        return Matrix("fp4", data, scale, FP4_GROUP)
    # Codes below 0x70 keep away from NaN.
    data = codes(*lead, rows, columns, most=0x70)
    data |= torch.empty_like(data).random_(0, 2) << 7
    scale = codes(*lead, -(-rows // block), -(-columns // block), **scales)
    return Matrix("fp8", data.view(torch.float8_e4m3fn), scale, block)


def routed(rows: int, experts: int) -> Routing:
    """Random distinct experts for each row."""
    chosen = torch.rand(rows, experts, device="cuda").topk(TOPK).indices.to(torch.int32)
    weights = torch.rand(rows, TOPK, device="cuda")
    return Routing(chosen, weights, *group_torch(chosen, experts))


class Layer:
    """Weights of a layer."""

    def __init__(self, shape: str, experts: int | None = None, shared: int = 4) -> None:
        self.d, inner, every, block = SHAPES[shape]
        self.experts = experts or every
        self.block = block
        self.w13 = packed("fp4", self.experts, 2 * inner, self.d)
        self.w2 = packed("fp4", self.experts, self.d, inner)
        self.shared = [
            (
                packed("fp8", 2 * inner, self.d, block=block),
                packed("fp8", self.d, inner, block=block),
            )
            for _ in range(shared)
        ]

    def rows(self, count: int) -> Tensor:
        """Random input."""
        return torch.randn(count, self.d, device="cuda", dtype=torch.bfloat16)

    def nbytes(self, routing: Routing) -> int:
        """Of the weights that a call must read."""
        touched = int(routing.experts.unique().numel())  # type: ignore[no-untyped-call]
        one = (self.w13.nbytes + self.w2.nbytes) // self.experts
        return touched * one + sum(m.nbytes for m in self.shared[0])


def check() -> None:
    """Compare with the twin and say how far apart they are."""
    layer = Layer("v4-flash", 6, 1)
    for rows in (1, 64, 200):
        x, routing = layer.rows(rows), routed(rows, 6)
        args = x, routing, layer.w13, layer.w2, *layer.shared[0]
        want = moe_torch(*args, limit=LIMIT, act_group=layer.block)
        kernels = partial(moe_triton, *args, limit=LIMIT, act_group=layer.block)
        got = kernels()
        error = ((got - want).float().norm() / want.float().norm()).item()
        same = torch.equal(got, kernels())
        print(f"{rows} rows: relative error {error:.1e}, repeats bitwise: {same}", flush=True)


def decode(layer: Layer, name: str, rows: int, layouts: list[Layout]) -> None:
    """Time passes of few rows."""
    calls = 16 if rows < 16 else 8
    inputs = [(layer.rows(rows), routed(rows, layer.experts)) for _ in range(calls)]
    nbytes = sum(layer.nbytes(routing) for _, routing in inputs) / calls
    for layout in layouts:
        us = replayed_us(
            [
                partial(
                    stream_experts, x, routing, layer.w13, layer.w2, *layer.shared[i % 4],
                    limit=LIMIT, act_group=layer.block, layout=layout,
                )
                for i, (x, routing) in enumerate(inputs)
            ]
        )  # fmt: skip
        share = nbytes / us / 1e-6 / BANDWIDTH * 100
        print(f"{name} B={rows:2d} {us:7.1f} us {nbytes / 1e6:7.1f} MB {share:5.1f}% of the "
              f"bandwidth: {layout}", flush=True)  # fmt: skip


def routes(rows: int) -> None:
    """Time the router."""
    d, _, experts, _ = SHAPES["v4-flash"]
    gates = [torch.randn(experts, d, device="cuda", dtype=torch.bfloat16) for _ in range(40)]
    x, bias = (
        torch.randn(rows, d, device="cuda", dtype=torch.bfloat16),
        torch.zeros(experts, device="cuda"),
    )
    ints = torch.arange(rows, device="cuda", dtype=torch.int32)
    one = torch.ones_like(ints)
    a_pass = Rows(ints.long(), ints, ints, one, one, ints, one, one[:, None], 256, 1, 2)
    calls = [
        partial(route_triton, x, gate, bias, None, a_pass, k=TOPK, scaling=1.5) for gate in gates
    ]
    print(f"route {rows} rows: {replayed_us(calls):.1f} us", flush=True)


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the layouts in use")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    check()
    for name in SHAPES:
        layer = Layer(name)
        for rows in (1, 4, 16, 64):
            decode(layer, name, rows, [LAYOUT] if quick else LAYOUTS)
        del layer
    for rows in (1, 64, 8192):
        routes(rows)


if __name__ == "__main__":
    main()
