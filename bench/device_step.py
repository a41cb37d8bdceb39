"""What one pass costs on the GPU: decode steps by batch and context, prompts by length.

    python -m bench.device_step --geometry v4-flash-8l --mode fused --batch 1,4,16,64
    python -m bench.device_step --geometry v41-8l --mode eager,graph,fused --profile

Modes are the engine's own: `eager` runs the torch twins launch by launch, `graph` the same
operations captured in a CUDA graph, `fused` the Triton kernels in a graph. Weights are drawn from a
seed, prompts are random ids, every sequence has its own. The device alone is timed here (CUDA
events around graph replays; around whole prompts); bench.engine measures what a client sees.

Rows: bench "step": ms_step over replays; `bound_ms` is the time to read each weight once (those of
the experts that were touched) and the KV at 4.43 TB/s, `bound_share` bound_ms / ms_step.
bench "prompt": ttft_ms of a prompt processed in chunks, up to its logits.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.bound import bound_ms, experts_touched, prompt_flops
from bench.geometries import geometry
from bench.rows import fill_finite, make_rows, spread, write_rows
from engine.api import PrefillMode
from engine.device.kvpool import KVPool
from engine.device.rows import build_narrowings, build_rows
from engine.kernels.feed import feed_torch, feed_triton
from engine.kernels.ops import Implementation
from engine.kernels.rows import Rows
from engine.model.loading import random_fast_model
from engine.plan.replay import stages, tail_of
from engine.plan.step import Chunk

BLOCK = 256
KERNELS: dict[str, Implementation] = {"eager": "torch", "graph": "torch", "fused": "triton"}


class Bench:
    """A model with room for `sequences` of `context` tokens.

    Args:
        name: of the geometry.
        mode: eager, graph or fused.
        sequences: most at once.
        context: most tokens of one.
    """

    def __init__(self, name: str, mode: str, sequences: int, context: int, tokens: int) -> None:
        self.mode = mode
        self.config = geometry(name)
        self.model = random_fast_model(
            self.config, kernels=KERNELS[mode], device="cuda", max_model_len=context
        )
        blocks = sequences + -(-tokens // BLOCK) + 1
        self.pool = KVPool(
            self.config,
            num_blocks=blocks,
            block_size=BLOCK,
            num_slots=sequences + 1,
            device="cuda",
            dtype=torch.bfloat16,
            forms=self.model.forms,
            ring_history=True,
        )
        # What a sequence's past would have left: any finite values will do for timing.
        for tensor in (
            *self.pool.window,
            *self.pool.entries.values(),
            *self.pool.index_keys.values(),
        ):
            fill_finite(tensor)
        for tensor in (*self.pool.state.values(), *self.pool.index_state.values()):
            tensor.normal_()
        self.pool.history.random_(0, 1000)

    def rows(self, batch: int, context: int) -> Rows:
        """Decode rows of sequences that have `context` tokens each."""
        per = -(-(context + 1024) // BLOCK)
        chunks = [
            Chunk(
                request_id=str(i),
                slot=i + 1,
                start=context + 3 * i % 128,
                token_ids=(17 * i + 11,),
                block_ids=tuple(
                    (1 + i * per + j) % (self.pool.num_blocks - 1) + 1 for j in range(per)
                ),
                wants_logits=True,
            )
            for i in range(batch)
        ]
        rows, _ = build_rows(chunks, block_size=BLOCK, device="cuda")
        limit = per * BLOCK
        return dataclasses.replace(rows, max_end=limit)

    def time_steps(self, rows: Rows, repeats: int, steps: int) -> tuple[list[float], int]:
        """Milliseconds of a step, one figure per repeat, and the kernels of one step."""
        rows = dataclasses.replace(rows, starts=rows.positions)
        step = self._step(rows)
        run = step
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.synchronize()
        if self.mode != "eager":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        start = rows.positions.clone()
        found = []
        for repeat in range(repeats + 2):
            rows.positions.copy_(start)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(steps):
                run()
            end.record()
            torch.cuda.synchronize()
            if repeat >= 2:
                found.append(begin.elapsed_time(end) / steps)
        return found, self._count_kernels(run)

    def _step(self, rows: Rows) -> Callable[[], None]:
        """The engine's step: decode, draw (greedily, no token ruled out), hand the tokens on."""
        count, words = rows.num_rows, -(-self.config.vocab_size // 32)
        slots = rows.slots.index_select(0, rows.seq)
        feed = feed_triton if self.model.ops.name == "triton" else feed_torch
        with torch.device("cuda"):
            temperature, top_p = torch.zeros(count), torch.ones(count)
            seeds, index = torch.zeros(count, dtype=torch.int64), torch.zeros_like(rows.positions)
            mask = torch.full((count, words), -1, dtype=torch.int32)
            forced = torch.full((count,), -1, dtype=torch.int32)
            results = torch.zeros(2, count, dtype=torch.int64)
            half = torch.zeros(1, dtype=torch.int64)

        def step() -> None:
            logits = self.model.decode(rows, self.pool)
            drawn, usable = self.model.ops.sample(
                logits, temperature, top_p, seeds, index, mask=mask, forced=forced
            )
            feed(drawn, usable, slots, rows.ids, rows.positions, index, results, half)

        return step

    def _count_kernels(self, run: Any) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            run()
            torch.cuda.synchronize()
        self.trace = trace
        return sum(e.count for e in trace.key_averages() if e.self_device_time_total > 0)

    def profile_prompt(self, length: int, chunk: int, limit: int) -> None:
        """Print the kernels of one prompt."""
        ids = torch.randint(0, self.config.vocab_size, (length,)).tolist()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            self.run_prompt(ids, chunk)
            torch.cuda.synchronize()
        print(_table(trace, limit), flush=True)

    def run_prompt(
        self,
        ids: list[int],
        chunk: int,
        mode: PrefillMode = "off",
        slot: int = 1,
        first_block: int = 1,
    ) -> Tensor:
        """Process a prompt in chunks; gives its last token's logits [1, V]."""
        length = len(ids)
        blocks = tuple(range(first_block, first_block + -(-length // BLOCK)))
        tail = tail_of(self.config)
        logits = torch.empty(0)
        for first in range(0, length, chunk):
            end = min(first + chunk, length)
            piece = Chunk(
                request_id="p",
                slot=slot,
                start=first,
                token_ids=tuple(ids[first:end]),
                block_ids=blocks,
                wants_logits=end == length,
                prefill=mode,
                anchor=0 if mode == "off" else length - 1,
            )
            rows, wanted = build_rows([piece], block_size=BLOCK, device="cuda")
            plan = stages(tail, [piece])
            narrowings, narrowed = build_narrowings(rows, [piece], plan)
            *_, last = self.model.prefill(
                rows, self.pool, narrowed if plan else wanted, narrowings=narrowings
            )
            assert last is not None
            logits = last
        return logits

    def time_prompt(
        self, length: int, chunk: int, repeats: int, modes: Sequence[PrefillMode] = ("off",)
    ) -> dict[PrefillMode, list[float]]:
        """Milliseconds from the first launch to the last token's logits, modes in turn."""
        ids = torch.randint(0, self.config.vocab_size, (length,)).tolist()
        found: dict[PrefillMode, list[float]] = {mode: [] for mode in modes}
        for repeat in range(repeats + 1):
            for mode in modes:
                torch.cuda.synchronize()
                begin = time.perf_counter()
                self.run_prompt(ids, chunk, mode).argmax(-1).cpu()
                if repeat:
                    found[mode].append((time.perf_counter() - begin) * 1e3)
        return found


def _table(trace: Any, limit: int) -> str:
    """Kernels of a trace, the most expensive first: total us, launches, us each."""
    events = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events)
    lines = [f"{total:10.1f} us in all, {sum(e.count for e in events)} launches"]
    for e in events[:limit]:
        each = e.self_device_time_total / max(e.count, 1)
        lines.append(
            f"{e.self_device_time_total:10.1f} us {e.count:5d} x {each:9.1f}  {e.key[:90]}"
        )
    return "\n".join(lines)


def figures(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one run."""
    batches = [int(b) for b in args.batch.split(",") if b]
    contexts = [int(n) for n in args.context.split(",") if n]
    prompts = [int(n) for n in args.prompt.split(",") if n]
    context = max([*contexts, *prompts, 256]) + 2048
    tokens = max([context, *(b * (n + 2048) for b in batches for n in contexts)])
    for mode in args.mode.split(","):
        begin = time.perf_counter()
        bench = Bench(
            args.geometry, mode, max([*batches, 1]), context, min(tokens, args.max_tokens)
        )
        torch.cuda.synchronize()
        common = {"geometry": args.geometry, "mode": mode}
        print(
            f"# {args.geometry} {mode}: {torch.cuda.memory_allocated() / 1e9:.1f} GB, weights drawn in {time.perf_counter() - begin:.1f} s",
            flush=True,
        )
        for length in prompts:
            begin = time.perf_counter()
            modes: list[PrefillMode] = args.prefill.split(",")
            # A long prompt is timed less often: a repeat of it takes as long as many short ones.
            repeats = max(1, args.repeats * 16384 // max(length, 16384))
            by_mode = bench.time_prompt(length, args.chunk, repeats, modes)
            base = statistics.median(by_mode[modes[0]])
            flops = prompt_flops(bench.config, bench.model.weights, length)
            for prefill, values in by_mode.items():
                found = spread(values)
                row = {
                    "bench": "prompt",
                    **common,
                    "batch": 1,
                    "prompt_tokens": length,
                    "chunk": args.chunk,
                    "prefill": prefill,
                    "ttft_ms": found,
                    "ttft_ratio": round(found["median"] / base, 3),
                }
                if prefill == "off":
                    row["tflop_s"] = round(flops / found["median"] / 1e9, 1)
                print(
                    f"{mode} prompt {length} {prefill}: {found}, ratio {row['ttft_ratio']}, "
                    f"{row.get('tflop_s')} TFLOP/s",
                    flush=True,
                )
                yield row
            print(f"# {time.perf_counter() - begin:.1f} s", flush=True)
            if args.profile:
                bench.profile_prompt(length, args.chunk, args.profile)
        for n in contexts:
            for batch in batches:
                begin = time.perf_counter()
                rows = bench.rows(batch, n)
                step = functools.partial(bench.model.decode, rows, bench.pool)
                touched = experts_touched(bench.model, step)
                times, kernels = bench.time_steps(rows, args.repeats, args.steps)
                bound = bound_ms(bench.model, bench.pool, batch, n, touched)
                found = spread(times, 4)
                row = {
                    "bench": "step",
                    **common,
                    "batch": batch,
                    "prompt_tokens": n,
                    "ms_step": found,
                    "tok_s": round(batch * 1e3 / found["median"], 1),
                    "kernels": kernels,
                    "kernels_per_layer": round(kernels / bench.config.num_hidden_layers, 1),
                    "experts_touched": touched,
                    "bound_ms": round(bound, 4),
                    "bound_share": round(bound / found["median"], 3),
                }
                print(
                    f"{mode} step batch {batch} context {n}: {found['median']} ms (p10 {found['p10']}, p90 {found['p90']}), bound {bound:.3f} ms = {row['bound_share']}, {kernels} kernels, experts {touched} ({time.perf_counter() - begin:.1f} s)",
                    flush=True,
                )
                if args.profile:
                    print(_table(bench.trace, args.profile), flush=True)
                yield row
        del bench
        torch.cuda.empty_cache()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default="v4-flash-8l")
    parser.add_argument("--mode", default="fused", help="comma-separated: eager, graph, fused")
    parser.add_argument("--batch", default="1,4,16,64")
    parser.add_argument("--context", default="256")
    parser.add_argument("--prompt", default="")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--prefill", default="off", help="comma-separated: off, exact, bounded")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--max-tokens", type=int, default=1 << 21, help="tokens the KV pool has room for"
    )
    parser.add_argument("--profile", type=int, default=0, help="kernels of one step to list")
    parser.add_argument(
        "--out", default="", help="file of rows under bench/results, none by default"
    )
    args = parser.parse_args()
    rows = []
    for row in figures(args):  # written as they come: what was measured is kept if a run is cut
        rows.append(row)
        if args.out:
            write_rows(args.out, make_rows("bench.device_step", "cuda", rows))


if __name__ == "__main__":
    torch.inference_mode()(main)()
