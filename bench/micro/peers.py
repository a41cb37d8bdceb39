"""FlashInfer's sampling, top-k and grouped products beside ours, on one GPU.

    python -m bench.micro.peers

FlashInfer compiles its kernels with nvcc when they are first called, unless compiled ones are
installed; that time is given (`first_call_s`) and not counted. Draws: ours are exact (float64, a pure
function of seed and position), FlashInfer's by rejection, float32. Top-k: 512 of the index scores of
a context; ours gives places in the pool in ascending order, ties to the lowest entry, FlashInfer's
unsorted entries. Experts of a prompt: ours is the whole of it, from rows to weighted parts of each
row; FlashInfer's (its grouped CUTLASS product) and torch's (grouped_mm, CUTLASS too) are the two
products alone over rows that lie sorted, without the gathering, the activation and the weights, so
that they are faster here than they would be in service. Qwen3-30B's experts are bfloat16 for all;
V4-Flash's are FP4 for ours, and bfloat16 for the others, which do not read it.

Rows, bench "peer": us of each over operands that no cache holds, replayed from a CUDA graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import flashinfer
import torch
from flashinfer import sampling
from torch import Tensor
from torch.nn.functional import silu

from bench.micro.moe import LIMIT, packed
from bench.micro.timing import copies, replayed_us
from bench.rows import make_rows, write_rows
from engine.device.rows import build_rows
from engine.kernels.formats import Matrix, dequantise
from engine.kernels.grouping import group_triton
from engine.kernels.moe import moe_triton
from engine.kernels.router import Routing
from engine.kernels.sampler import sample_triton
from engine.kernels.select import _choose
from engine.plan.step import Chunk

VOCAB = 129280
TOP_K, RATIO, BLOCK = 512, 4, 256
#: d, hidden width, experts, experts of a row, format of our weights.
EXPERTS = {"qwen3-30b-a3b": (2048, 768, 128, 8, "plain"), "v4-flash": (4096, 2048, 256, 6, "fp4")}


def first_call(call: Callable[[], object]) -> float:
    """Seconds of a first call, which compiles."""
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return round(time.perf_counter() - begin, 1)


def sampling_rows(batch: int, top_p: float) -> Iterator[dict[str, Any]]:
    """Time one draw for each of some rows of logits."""
    number = copies(batch * VOCAB * 4)
    logits = [torch.randn(batch, VOCAB, device="cuda") * 3 for _ in range(number)]
    temperature = torch.full((batch,), 0.8, dtype=torch.float64, device="cuda")
    nucleus = torch.full((batch,), top_p, dtype=torch.float64, device="cuda")
    seeds = torch.arange(batch, device="cuda")
    index = torch.zeros(batch, dtype=torch.int32, device="cuda")
    narrow = temperature.float()

    def ours(x: Tensor) -> object:
        return sample_triton(x, temperature, nucleus, seeds, index)

    def theirs(x: Tensor) -> object:
        if top_p == 1:
            return sampling.sampling_from_logits(x / narrow[:, None], seed=1, offset=0)
        probs = sampling.softmax(x, narrow)
        return sampling.top_p_sampling_from_probs(probs, top_p, seed=1, offset=0)

    for name, draw in (("ours", ours), ("flashinfer", theirs)):
        seconds = first_call(lambda draw=draw: draw(logits[0]))  # type: ignore[misc]
        us = replayed_us([lambda x=x, draw=draw: draw(x) for x in logits])  # type: ignore[misc]
        yield {
            "bench": "peer", "what": "sample", "mode": name, "batch": batch, "top_p": top_p,
            "us": round(us, 1), "first_call_s": seconds,
        }  # fmt: skip


def top_k_rows(batch: int, context: int) -> Iterator[dict[str, Any]]:
    """Time the choice of the best entries of each of some rows."""
    width = context // RATIO
    scores = [torch.randn(batch, width, device="cuda") for _ in range(copies(batch * width * 4))]
    blocks = tuple(range(1, context // BLOCK + 1))
    chunks = [Chunk(str(i), i + 1, context - 1, (1,), blocks, True) for i in range(batch)]
    rows, _ = build_rows(chunks, block_size=BLOCK, device="cuda")
    places = torch.empty((batch, TOP_K), dtype=torch.int32, device="cuda")

    def ours(x: Tensor) -> None:
        _choose(x, places, rows, slice(0, batch), RATIO, 0)

    def theirs(x: Tensor) -> object:
        return flashinfer.top_k(x, TOP_K)

    for name, choose in (("ours", ours), ("flashinfer", theirs)):
        seconds = first_call(lambda choose=choose: choose(scores[0]))  # type: ignore[misc]
        us = replayed_us([lambda x=x, choose=choose: choose(x) for x in scores])  # type: ignore[misc]
        if name == "ours":
            entries = {place - BLOCK // RATIO for place in places[0].tolist()}  # blocks from 1 on
            best = set(scores[-1][0].topk(TOP_K).indices.tolist())
            assert entries == best, "ours must be the best entries before it is timed"
        yield {
            "bench": "peer", "what": "top_k", "mode": name, "batch": batch,
            "prompt_tokens": context, "us": round(us, 1), "first_call_s": seconds,
        }  # fmt: skip


def apart(got: Tensor, want: Tensor, most: float) -> None:
    """Check a result before it is timed, by its distance relative to the norm."""
    far = float((got.float() - want.float()).norm() / want.float().norm())
    assert far < most, f"expected results at most {most} apart, got {far:.1e}"


def expert_rows(shape: str, rows: int) -> Iterator[dict[str, Any]]:
    """Time the routed experts of one layer for the rows of a prompt, routed at random."""
    d, inner, count, k, kind = EXPERTS[shape]
    x = torch.randn(rows, d, device="cuda", dtype=torch.bfloat16)
    w13, w2 = (
        packed("fp4", count, n, m)
        if kind == "fp4"
        else Matrix("plain", torch.randn(count, n, m, device="cuda").bfloat16() / m**0.5)
        for n, m in ((2 * inner, d), (d, inner))
    )
    chosen = torch.rand(rows, count, device="cuda").topk(k).indices.to(torch.int32)
    weights = torch.rand(rows, k, device="cuda")
    routing = Routing(chosen, weights, *group_triton(chosen, count))
    group = 128 if kind == "fp4" else None

    def ours(_: int) -> Tensor:
        return moe_triton(x, routing, w13, w2, None, None, limit=LIMIT, act_group=group)

    # Rows sorted by expert, and what stands between the products.
    plain = [torch.stack([dequantise(w[i]).bfloat16() for i in range(count)]) for w in (w13, w2)]
    order = routing.order.long()
    ends = chosen.flatten().long().bincount(minlength=count).cumsum(0)
    starts = torch.cat((ends.new_zeros(1), ends))
    sources = [x[order // k]]
    outs = [torch.empty(rows * k, w.shape[1], device="cuda").bfloat16() for w in plain]
    segments = flashinfer.SegmentGEMMWrapper(
        torch.empty(128 << 20, dtype=torch.int8, device="cuda"), backend="sm90"
    )

    def theirs(which: int) -> Tensor:
        given: Tensor = segments.run(
            sources[which], plain[which], count, True, out=outs[which], seg_indptr=starts
        )
        return given

    def torchs(which: int) -> Tensor:
        return torch._grouped_mm(
            sources[which], plain[which].transpose(1, 2), offs=ends.to(torch.int32)
        )

    gate, up = torchs(0).chunk(2, -1)
    of_rows = weights.flatten()[order, None]
    hidden = silu(gate.float().clamp(max=LIMIT)) * up.float().clamp(-LIMIT, LIMIT) * of_rows
    sources.append(hidden.bfloat16())
    parts = torch.empty_like(outs[1])
    parts[order] = torchs(1)
    got = moe_triton(x, routing, w13, w2, None, None, limit=LIMIT, act_group=group)[:, :k]
    apart(got.reshape(parts.shape), parts, 2e-2 if kind == "plain" else 8e-2)
    flops = 6 * rows * k * d * inner
    for name, run in (("ours", ours), ("flashinfer", theirs), ("torch", torchs)):
        number = 1 if name == "ours" else 2
        seconds = sum(first_call(lambda i=i, run=run: run(i)) for i in range(number))  # type: ignore[misc]
        if number == 2:
            apart(run(1), torchs(1), 1e-2)
        us = sum(replayed_us([lambda i=i, run=run: run(i)] * 2) for i in range(number))  # type: ignore[misc]
        yield {
            "bench": "peer", "what": "experts", "geometry": shape, "mode": name, "batch": 1,
            "prompt_tokens": rows, "us": round(us, 1), "tflop_s": round(flops / us / 1e6, 1),
            "first_call_s": seconds,
        }  # fmt: skip


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", default="", help="file of rows under bench/results")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    # One of each kind first, since a run may be cut.
    cases = [
        *(sampling_rows(batch, 0.95) for batch in (1, 64)),
        *(top_k_rows(batch, context) for batch, context in ((1, 65536), (64, 8192))),
        *(expert_rows(shape, 8192) for shape in EXPERTS),
        *(
            sampling_rows(batch, top_p)
            for batch, top_p in ((16, 0.95), (1, 1.0), (16, 1.0), (64, 1.0))
        ),
        top_k_rows(16, 32768),
        *(expert_rows(shape, 1024) for shape in EXPERTS),
    ]
    for case in cases:
        for row in case:
            print(row, flush=True)
            rows.append(row)
            if args.out:
                write_rows(args.out, make_rows("bench.micro.peers", "cuda", rows))


if __name__ == "__main__":
    torch.inference_mode()(main)()
