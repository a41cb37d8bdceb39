"""Experts on a GPU: microseconds, share of the bandwidth or of the tensor cores' rate, by layout.

    python -m bench.micro.moe [--quick]

V4-Flash's layer (256 FP4 experts, top 6, FP8 shared expert) and V4.1's (128 experts). Rows are
routed at random, differently in each call of a round. First the result is compared with the twin.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product

import torch
from torch import Tensor

from bench.micro.timing import BANDWIDTH, replayed_us
from engine.kernels.formats import FP4_GROUP, Matrix
from engine.kernels.moe import moe_torch
from engine.kernels.moe_decode import Layout, stream_experts
from engine.kernels.router import Routing, group_torch

TOPK = 6
LIMIT = 10.0
#: d, I, experts, side of the shared expert's scale blocks.
SHAPES = {"v4-flash": (4096, 2048, 256, 128), "v41": (5120, 2304, 128, 32)}
FIRST = [Layout(16, 1, 128), Layout(8, 2, 128), Layout(8, 1, 255)]
SECOND = [Layout(8, 2, 128), Layout(16, 1, 128), Layout(8, 1, 255), Layout(4, 4, 128)]


def packed(kind: str, *shape: int, block: int = FP4_GROUP) -> Matrix:
    """Random bytes with scales that keep values near 1 / sqrt(columns)."""
    *lead, rows, columns = shape
    exponent = int(127 - torch.tensor(columns).log2().item() / 2 - (1 if kind == "fp4" else 6))
    options = {"dtype": torch.uint8, "device": "cuda"}
    if kind == "fp4":
        data = torch.empty(*lead, rows, columns // 2, **options).random_(0, 256)
        scale = torch.empty(*lead, rows, columns // FP4_GROUP, **options)
        return Matrix("fp4", data, scale.random_(exponent - 1, exponent + 2), FP4_GROUP)
    # Codes below 0x70 keep away from NaN.
    data = torch.empty(*lead, rows, columns, **options).random_(0, 0x70)
    data |= torch.empty_like(data).random_(0, 2) << 7
    scale = torch.empty(*lead, -(-rows // block), -(-columns // block), **options)
    scale = scale.random_(exponent - 1, exponent + 2)
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
        touched = int(routing.experts.unique().numel())
        one = (self.w13.nbytes + self.w2.nbytes) // self.experts
        return touched * one + sum(m.nbytes for m in self.shared[0])


def check() -> None:
    """Compare with the twin and say how far apart they are."""
    for shape, rows in product(SHAPES, (1, 5, 64)):
        layer = Layer(shape, 12, 1)
        x, routing = layer.rows(rows), routed(rows, 12)
        args = x, routing, layer.w13, layer.w2, *layer.shared[0]
        want = moe_torch(*args, limit=LIMIT, act_group=layer.block)
        got = stream_experts(*args, limit=LIMIT, act_group=layer.block)
        again = stream_experts(*args, limit=LIMIT, act_group=layer.block)
        error = ((got - want).norm() / want.norm()).item()
        same = torch.equal(got, again)
        print(f"{shape} {rows} rows: relative error {error:.2e}, repeats bitwise: {same}")


def decode(shape: str, batches: tuple[int, ...], layouts: list[tuple[Layout, Layout]]) -> None:
    """Time passes of few rows."""
    layer = Layer(shape)
    lines = []
    for rows in batches:
        calls = 16 if rows < 16 else 8
        inputs = [(layer.rows(rows), routed(rows, layer.experts)) for _ in range(calls)]
        nbytes = sum(layer.nbytes(routing) for _, routing in inputs) / calls
        for pair in layouts:
            round_ = [
                partial(
                    stream_experts,
                    x,
                    routing,
                    layer.w13,
                    layer.w2,
                    *layer.shared[i % 4],
                    limit=LIMIT,
                    act_group=layer.block,
                    layouts=pair,
                )  # fmt: skip
                for i, (x, routing) in enumerate(inputs)
            ]
            try:
                us = replayed_us(round_)
            except Exception as error:  # a layout that does not fit is a result too
                print(f"{shape} B={rows} {pair}: {type(error).__name__}: {error}"[:200])
                continue
            lines.append((rows, us, nbytes, pair))
    print(f"{shape}: rows, us, MB, % of {BANDWIDTH / 1e12} TB/s, (warps, resident, registers) x 2")
    for rows, us, nbytes, pair in sorted(lines, key=lambda line: line[:2]):
        share = nbytes / us / 1e-6 / BANDWIDTH * 100
        names = " ".join(str((p.warps, p.resident, p.registers)) for p in pair)
        print(f"{rows:4d} {us:8.1f} {nbytes / 1e6:8.1f} {share:5.1f}%  {names}")


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the layouts in use")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    check()
    layouts = [(FIRST[0], SECOND[0])]
    if not quick:
        layouts += [(f, SECOND[0]) for f in FIRST[1:]] + [(FIRST[0], s) for s in SECOND[1:]]
    decode("v4-flash", (1, 4, 16, 64), layouts)
    torch.cuda.empty_cache()
    if not quick:
        decode("v41", (1, 64), layouts[:2])


if __name__ == "__main__":
    main()
