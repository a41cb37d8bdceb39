"""Paged experts: tokens per second by hit rate, beside the formula and beside everything resident.

    python -m bench.paged --geometry qwen3-30b-a3b --slots 40 --hit 0.5,0.67,0.81,0.887,0.9,0.95,0.99
    python -m bench.paged --geometry v4-flash-43l --slots 128 --resident-layers 20 --hit 0.9

Weights are drawn from a seed, and random weights route at random, which no real traffic does. So
choices are injected: a *trace* says for each step and layer which experts a row gets. `reuse` draws
each one from the K experts used last with probability h, else from the others, so that h is about
the hit rate of K slots; `zipf` draws independently with weights 1 / rank. The hit rate that the
slots counted is in every row. The router still runs.

Rows, bench "paged": ms_step and tok_s of captured decode steps, hit_rate as counted, slots,
offloaded_gb, formula_ms = resident step + (1 - h) * k * layers * bytes of an expert / 51 GB/s, with
the resident step measured in the same run on the same model (every choice resident).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import operator
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.device_step import BLOCK
from bench.geometries import QWEN3_30B, geometry
from bench.rows import make_rows, spread, write_rows
from engine.device.kvpool import KVPool
from engine.device.qwen_pool import QwenPool
from engine.device.rows import build_rows
from engine.kernels.paging import HITS, MISSES
from engine.kernels.router import Routing
from engine.kernels.rows import Rows
from engine.model.experts import PagedExperts
from engine.model.fast import FastModel, random_fast_model
from engine.model.qwen3 import Qwen3Model, random_qwen3
from engine.plan.step import Chunk
from engine.qwen3_config import Qwen3Config

BUS = 51e9  # bytes per second at which kernels read pinned memory, measured (engine.md B0)
CONTEXT = 4096


def reuse_trace(
    steps: int, experts: int, per_row: int, slots: int, hit: float, seed: int
) -> list[list[int]]:
    """Choices of one layer and one row: distinct within a step, from the last K with probability h."""
    draw = random.Random(seed)
    recent = list(range(slots))  # least recently used first
    found = []
    for _ in range(steps):
        known = set(recent)
        chosen: list[int] = []
        others = [e for e in range(experts) if e not in known]
        for _ in range(per_row):
            source = recent if draw.random() < hit or not others else others
            expert = draw.choice(source)
            while expert in chosen:
                expert = draw.choice(source if len(set(source) - set(chosen)) else recent)
            chosen.append(expert)
        found.append(chosen)
        for expert in chosen:
            if expert in known:
                recent.remove(expert)
            recent.append(expert)
        recent = recent[-slots:]
    return found


def zipf_trace(steps: int, experts: int, per_row: int, seed: int) -> list[list[int]]:
    """Choices of one layer and one row, drawn independently, the r-th expert with weight 1 / r."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, experts + 1)
    ranks = rng.permutation(experts)
    draws = [
        rng.choice(experts, per_row, replace=False, p=weights / weights.sum()) for _ in range(steps)
    ]
    return [ranks[d].tolist() for d in draws]


class Injected:
    """Puts a trace in place of what the router chose; capturable, the step is counted on the device.

    Args:
        model: whose operations are replaced.
        trace: int32 [steps, layers, rows, k] on the device.
    """

    def __init__(self, model: FastModel | Qwen3Model, trace: Tensor) -> None:
        self.step = torch.zeros(1, dtype=torch.int64, device=trace.device)
        self._trace = trace
        self._layer = 0
        self._plain = model.ops
        self._model = model
        model.ops = dataclasses.replace(model.ops, route=self._route)

    def _route(self, x: Tensor, gate: Tensor, *args: Any, **kwargs: Any) -> Routing:
        routing = self._plain.route(x, gate, *args, **kwargs)
        experts = self._trace.index_select(0, self.step)[0, self._layer].contiguous()
        self._layer = (self._layer + 1) % self._trace.shape[1]
        return Routing(experts, routing.weights, *self._plain.group(experts, len(gate)))

    def close(self) -> None:
        """Give the model its router back."""
        self._model.ops = self._plain


class Bench:
    """A model with some layers paged, and memory for a few sequences."""

    def __init__(self, name: str, slots: dict[int, int], rows: int, *, fp8: bool = False) -> None:
        self.model: FastModel | Qwen3Model
        self.pool: KVPool | QwenPool
        per = CONTEXT // BLOCK
        if name == "qwen3-30b-a3b":
            config = Qwen3Config.from_dict(QWEN3_30B)
            self.layers, self.experts = config.num_hidden_layers, config.num_experts
            self.per_row, self.vocab = config.num_experts_per_tok, config.vocab_size
            self.model = random_qwen3(
                config, kernels="triton", device="cuda", max_model_len=16384, slots=slots, fp8=fp8
            )
            self.pool = QwenPool(
                config,
                num_blocks=rows * per + 64,
                block_size=BLOCK,
                device="cuda",
                dtype=torch.bfloat16,
            )
            self.held = [layer.experts for layer in self.model.layers]
        else:
            shape = geometry(name)
            self.layers, self.experts = shape.num_hidden_layers, shape.n_routed_experts
            self.per_row, self.vocab = shape.num_experts_per_tok, shape.vocab_size
            self.model = random_fast_model(
                shape, kernels="triton", device="cuda", max_model_len=16384, slots=slots
            )
            self.pool = KVPool(
                shape, num_blocks=rows * per + 64, block_size=BLOCK, num_slots=rows + 1,
                device="cuda", dtype=torch.bfloat16, ring_history=True,
                forms=self.model.forms,
            )  # fmt: skip
            self.held = [layer.moe.experts for layer in self.model.weights.layers]
        self.paged = [e for e in self.held if isinstance(e, PagedExperts)]

    def rows(self, batch: int) -> Rows:
        """Decode rows at position 128."""
        per = CONTEXT // BLOCK
        chunks = [
            Chunk(str(i), i + 1, 128, (11 + i,), tuple(range(1 + i * per, 1 + (i + 1) * per)), True)
            for i in range(batch)
        ]
        rows, _ = build_rows(chunks, block_size=BLOCK, device="cuda")
        return dataclasses.replace(rows, max_end=CONTEXT, spans=())

    def counts(self) -> tuple[int, int]:
        """Hits and misses of all paged layers so far."""
        totals = [p.state.counters.tolist() for p in self.paged]
        return sum(t[HITS] for t in totals), sum(t[MISSES] for t in totals)

    def time_steps(self, rows: Rows, trace: Tensor, warm: int, steps: int) -> list[float]:
        """Milliseconds of each captured step after the warm-up."""
        injected = Injected(self.model, trace)

        def step() -> None:
            logits = self.model.decode(rows, self.pool)  # type: ignore[arg-type]
            rows.ids.copy_(logits.argmax(-1))
            rows.positions.add_(1)
            rows.starts.add_(1)
            injected.step.add_(1)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        injected.step.zero_()
        for _ in range(warm):
            graph.replay()
        torch.cuda.synchronize()
        self.before = self.counts()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        injected.close()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def figures(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one run."""
    batches = [int(b) for b in args.batch.split(",")]
    begin = time.perf_counter()
    layers = 48 if args.geometry == "qwen3-30b-a3b" else geometry(args.geometry).num_hidden_layers
    slots = dict.fromkeys(range(args.resident_layers, layers), args.slots) if args.slots else {}
    bench = Bench(args.geometry, slots, max(batches), fp8=args.fp8)
    torch.cuda.synchronize()
    load_s = time.perf_counter() - begin
    store = sum(p.store.nbytes for p in bench.paged)
    pin_s = sum(p.pin_seconds for p in bench.paged)
    offloaded = store - sum(p.slots.nbytes for p in bench.paged)
    per_expert = bench.paged[0].layout.nbytes if bench.paged else 0
    print(
        f"# {args.geometry}: GPU {torch.cuda.memory_allocated() / 1e9:.1f} GB, host {store / 1e9:.1f} GB, "
        f"ready in {load_s:.1f} s, pinning {pin_s:.1f} s = {store / 1e9 / max(pin_s, 1e-9):.1f} GB/s",
        flush=True,
    )
    common = {
        "bench": "paged", "geometry": args.geometry, "mode": "paged" if slots else "resident",
        "experts": "fp8" if args.fp8 else "as published",
        "slots": args.slots, "paged_layers": len(slots), "offloaded_gb": round(offloaded / 1e9, 2),
        "host_gb": round(store / 1e9, 2), "gpu_gb": round(torch.cuda.memory_allocated() / 1e9, 2),
        "load_s": round(load_s, 1), "pin_s": round(pin_s, 1), "prompt_tokens": 128,
    }  # fmt: skip
    total = args.warm + args.steps
    for batch in batches:
        if slots and batch * bench.per_row > args.slots:
            print(
                f"# batch {batch} is beyond {args.slots} // {bench.per_row}, not captured",
                flush=True,
            )
            continue
        resident_ms = 0.0
        kinds = [("reuse", 1.0), *(("reuse", float(h)) for h in args.hit.split(",") if h)]
        kinds += [("zipf", 0.0)] if args.zipf else []
        for kind, hit in kinds if slots else [("uniform", 0.0)]:
            trace = _trace(bench, kind, hit, total + 1, batch, args.slots or bench.experts)
            times = bench.time_steps(bench.rows(batch), trace, args.warm, args.steps)
            found = spread(times, 4)
            row = {**common, "batch": batch, "trace": f"{kind} {hit}" if kind == "reuse" else kind,
                   "ms_step": found, "tok_s": round(batch * 1e3 / found["median"], 1)}  # fmt: skip
            if slots:
                mean = sum(times) / len(times)
                hits, misses = (b - a for a, b in zip(bench.before, bench.counts(), strict=True))
                h = hits / (hits + misses)
                moved = misses * per_expert / len(times)
                if hit == 1.0:
                    resident_ms = found["median"]
                formula = resident_ms + moved / BUS * 1e3
                row |= {
                    "hit_rate": round(h, 4), "ms_step_mean": round(mean, 4),
                    "tok_s": round(batch * 1e3 / mean, 1), "formula_ms": round(formula, 4),
                    "over_formula": round(mean / formula, 3),
                }  # fmt: skip
            print(
                f"{args.geometry} K={args.slots} batch {batch} {row['trace']}: {row['tok_s']} tok/s, "
                f"{found['median']} ms, h {row.get('hit_rate')}, formula {row.get('formula_ms')} ms, "
                f"{row.get('over_formula')}x of it",
                flush=True,
            )
            yield row
    if args.check:
        for number, paged in enumerate(bench.paged[:: max(1, len(bench.paged) // 4)]):
            paged.check_integrity()
            print(f"# slots of paged layer {number} hold the store's bytes", flush=True)
    for length in (int(n) for n in args.prompt.split(",") if n):
        yield _prompt(bench, common, length, args.repeats, store, offloaded)


def _trace(bench: Bench, kind: str, hit: float, steps: int, batch: int, slots: int) -> Tensor:
    k, experts = bench.per_row, bench.experts
    lines = []
    for layer in range(bench.layers):
        if kind == "reuse":
            line = reuse_trace(steps, experts, k * batch, min(slots, experts), hit, layer)
        else:
            line = [functools.reduce(operator.iadd, p, []) for p in zip(*(
                zipf_trace(steps, experts, k, 1000 * layer + b) if kind == "zipf"
                else [random.Random(9 * s + b + layer).sample(range(experts), k) for s in range(steps)]
                for b in range(batch)), strict=True)]  # fmt: skip
        lines.append(line)
    array = np.array(lines, np.int32).reshape(bench.layers, steps, batch, k)
    return torch.from_numpy(np.ascontiguousarray(array.transpose(1, 0, 2, 3))).cuda()


def _prompt(
    bench: Bench, common: dict[str, Any], length: int, repeats: int, store: int, offloaded: int
) -> dict[str, Any]:
    """Time a prompt in one chunk; experts come in waves, copied while the wave before computes."""
    ids = torch.randint(0, bench.vocab, (length,)).tolist()
    blocks = tuple(range(1, 1 + -(-length // BLOCK)))
    rows, wanted = build_rows(
        [Chunk("p", 1, 0, tuple(ids), blocks, True)], block_size=BLOCK, device="cuda"
    )
    times = []
    for repeat in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        *_, logits = bench.model.prefill(rows, bench.pool, wanted)  # type: ignore[arg-type]
        assert logits is not None
        logits.argmax(-1).cpu()
        if repeat:
            times.append((time.perf_counter() - begin) * 1e3)
    row = {
        **common,
        "bench": "paged_prompt",
        "batch": 1,
        "prompt_tokens": length,
        "ttft_ms": spread(times),
    }
    if bench.paged:
        row["copy_ms"] = round(offloaded / 55e9 * 1e3, 1)
    print(
        f"prompt {length}: {row['ttft_ms']}, copying what is not resident {row.get('copy_ms')} ms",
        flush=True,
    )
    return row


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default="qwen3-30b-a3b")
    parser.add_argument(
        "--slots", type=int, default=0, help="K of each paged layer; 0: all resident"
    )
    parser.add_argument("--resident-layers", type=int, default=0, help="layers that are not paged")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--fp8", action="store_true", help="qwen3: experts in FP8, not bfloat16")
    parser.add_argument("--hit", default="0.5,0.67,0.81,0.887,0.9,0.95,0.99")
    parser.add_argument("--zipf", action="store_true", help="also independent choices by 1 / rank")
    parser.add_argument("--prompt", default="")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm", type=int, default=32)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument(
        "--check", action="store_true", help="compare slots with the store at the end"
    )
    parser.add_argument(
        "--out", default="", help="file of rows under bench/results, none by default"
    )
    args = parser.parse_args()
    rows = []
    for row in figures(args):  # written as they come: what was measured is kept if a run is cut
        rows.append(row)
        if args.out:
            write_rows(args.out, make_rows("bench.paged", "cuda", rows))


if __name__ == "__main__":
    torch.inference_mode()(main)()
