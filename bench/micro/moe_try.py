"""Candidate decode kernels beside the one in use (temporary)."""

from __future__ import annotations

from functools import partial

import torch

from bench.micro.moe import LIMIT, Layer, routed
from bench.micro.timing import BANDWIDTH, replayed_us
from engine.kernels.moe_decode import stream_experts
from engine.kernels.moe_rows import row_experts

torch.manual_seed(0)
layer = Layer("v4-flash", None, 2)
for rows in (64, 1, 16):
    calls = 8
    inputs = [(layer.rows(rows), routed(rows, layer.experts)) for _ in range(calls)]
    nbytes = sum(layer.nbytes(r) for _, r in inputs) / calls
    call = [
        partial(row_experts, x, r, layer.w13, layer.w2, *layer.shared[i % 2], limit=LIMIT,
                act_group=128) for i, (x, r) in enumerate(inputs)
    ]  # fmt: skip
    if rows == 64:
        want = stream_experts(*call[0].args, limit=LIMIT, act_group=128)
        got = call[0]()
        print("error", ((got - want).norm() / want.norm()).item(), flush=True)
    us = replayed_us(call, repeats=5)
    print(f"rows B={rows} {us:.1f} us {nbytes / us / 1e-6 / BANDWIDTH * 100:.1f}%", flush=True)
