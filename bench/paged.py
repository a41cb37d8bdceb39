"""Paged experts: tokens per second by hit rate, beside the formula and beside everything resident.

    python -m bench.paged --batch 1,4,16,64 --prompt 8192                     (all resident)
    python -m bench.paged --slots 40 --hit 0.5,0.67,0.81,0.887,0.9,0.95,0.99 --baselines
    python -m bench.paged --slots 64,16,24,32,48,96 --hit "" --zipf --prompt 8192   (sweep over K)
    python -m bench.paged --geometry v4-flash-43l --slots 128 --resident-layers 30 --hit 0.9

Routing is injected where experts are paged (bench.paged_model). `reuse` draws each choice from the K
experts used last with probability h, else from the others, so that h is about the hit rate of K
slots; `zipf` draws independently with weights 1 / rank. The hit rate that the slots counted is in
every row. Resident models are routed by their own routers.

Rows, bench "paged": ms_step and tok_s of captured decode steps (no scheduler, sampler or readback:
bench.engine has those), hit_rate as counted, slots, offloaded_gb, page_ins of a step (median and p99).
tok_s is over all steps: misses make steps unequal.

* formula_ms = resident step + (1 - h) * k * layers * bytes of an expert / 51 GB/s. resident_ms is that
  step of the same model wholly on the GPU, measured first and given back; None where the model is
  larger than the GPU, for which full_hit_ms stands in: the paged model's step with every choice in a
  slot.
* bound_ms: no step can take less: the longer of reading at 4.43 TB/s all that it needs, each weight
  once (of experts those that were touched, experts_touched by layer, a mean over the steps), and of
  moving what it misses at 51 GB/s.

"paged_prompt": ttft_ms of a prompt in one chunk (which is its one step, so ms_step too), hit_rate of
it, copy_ms of what it copies alone, compute_ms without the copies. "paged_baseline": see
bench.paged_baselines.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from bench.bound import bound_ms, experts_touched
from bench.geometries import QWEN, QWEN3_30B, geometry
from bench.paged_baselines import baselines
from bench.paged_model import Choices, PagedBench, Timed, mark, peaks
from bench.rows import make_rows, percentile, spread, write_rows
from engine.device.build import free_memory
from engine.model.expert_stream import ExpertStream

#: Steps before the first that are measured; awaking_ms of the rows has the first and last of them.
AWAKING, ENDS = 256, 32
BUS = 51e9  # bytes per second at which kernels read pinned memory, measured (engine.md B0)


def figures(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one run."""
    batches = [int(b) for b in args.batch.split(",") if b]
    counts = [int(k) for k in args.slots.split(",") if k]
    if args.gpu_budget_gb:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.gpu_budget_gb * 1e9 / total)
    resident = _resident_steps(args, batches) if counts and args.geometry == QWEN else {}
    begin = time.perf_counter()
    layers = (
        QWEN3_30B["num_hidden_layers"]
        if args.geometry == QWEN
        else geometry(args.geometry).num_hidden_layers
    )
    slots = dict.fromkeys(range(args.resident_layers, layers), counts[0]) if counts else {}
    bench = PagedBench(args.geometry, slots, max([1, *batches]), fp8=args.fp8, pins=args.pins)
    torch.cuda.synchronize()
    load_s = time.perf_counter() - begin
    store = sum(p.store.nbytes - args.pins * p.layout.nbytes for p in bench.paged)
    pin_s = sum(p.pin_seconds for p in bench.paged)
    loaded = {
        "geometry": args.geometry, "mode": "paged" if slots else "resident",
        "experts": "fp8" if args.fp8 else "as published", "paged_layers": len(slots),
        "host_gb": round(store / 1e9, 2), "load_s": round(load_s, 1), "pin_s": round(pin_s, 1),
        "pin_gb_s": round(store / 1e9 / pin_s, 2) if pin_s else None,
        "gpu_budget_gb": args.gpu_budget_gb or None, "pins": args.pins,
    }  # fmt: skip
    print(f"# {loaded}, GPU {torch.cuda.memory_allocated() / 1e9:.1f} GB", flush=True)
    loaded["awaking_ms"] = _awake(bench, args.warm)
    for count in counts or [0]:
        if count != (counts or [0])[0]:
            bench.use_slots(count)
        offloaded = store - sum(p.slots.nbytes for p in bench.paged)
        common = {**loaded, "slots": count, "offloaded_gb": round(offloaded / 1e9, 2)}
        for batch in batches:
            for row in _decode(bench, args, batch, count, resident.get(batch)):
                yield {**common, **row, **peaks()}
        if args.check:
            for number, paged in enumerate(bench.paged[:: max(1, len(bench.paged) // 4)]):
                paged.check_integrity()
                print(f"# slots of paged layer {number} hold the store's bytes", flush=True)
        if count == (counts or [0])[0]:  # others over the same store have no buffers for prompts
            for length in (int(n) for n in args.prompt.split(",") if n):
                yield {**common, **_prompt(bench, length, args.repeats), **peaks()}


def _awake(bench: PagedBench, warm: int) -> dict[str, float]:
    """Run steps that are nobody's figure; milliseconds of the first and the last."""
    trace = bench.trace("reuse", 1.0, warm + AWAKING + 1, 1) if bench.paged else None
    ms = bench.time_steps(1, trace, warm, AWAKING).ms
    ends = {"first": ms[:ENDS], "last": ms[-ENDS:]}
    return {name: round(statistics.median(part), 4) for name, part in ends.items()}


def _resident_steps(args: argparse.Namespace, batches: list[int]) -> dict[int, float]:
    """Milliseconds of a step by batch, of the same model wholly on the GPU; it is given back."""
    bench = PagedBench(args.geometry, {}, max([1, *batches]), fp8=args.fp8)
    _awake(bench, args.warm)
    found = {}
    for batch in batches:
        steps = max(1, args.steps // batch)
        trace = bench.trace("reuse", 1.0, args.warm + steps + 1, batch)
        found[batch] = spread(bench.time_steps(batch, trace, args.warm, steps).ms, 4)["median"]
    del bench
    free_memory()
    held = torch.cuda.memory_allocated() / 1e9
    print(f"# resident steps by batch, ms: {found}; {held:.1f} GB of it still held", flush=True)
    torch.cuda.reset_peak_memory_stats()
    return found


def _decode(
    bench: PagedBench, args: argparse.Namespace, batch: int, slots: int, resident_ms: float | None
) -> Iterator[dict[str, Any]]:
    """Rows of one batch size."""
    base = {"bench": "paged", "batch": batch, "prompt_tokens": 128}
    name = f"{args.geometry} K={slots} batch {batch}"
    if slots and batch * bench.per_row > slots:
        print(f"# {name} is beyond {slots} // {bench.per_row}, not captured", flush=True)
        return
    if not slots:
        step = functools.partial(bench.model.decode, bench.rows(batch), bench.pool)  # type: ignore[arg-type]
        touched = experts_touched(bench.model, step)
        timed = bench.time_steps(batch, None, args.warm, args.steps)
        found = spread(timed.ms, 4)
        rate = round(batch * 1e3 / found["median"], 1)
        print(f"{name} resident: {rate} tok/s, {found['median']} ms", flush=True)
        bound = bound_ms(
            bench.model, bench.pool, batch, bench.middle(args.warm, args.steps), touched
        )
        yield {
            **base, "trace": "own routers", "ms_step": found, "tok_s": rate,
            "experts_touched": touched, "bound_ms": round(bound, 4),
            "bound_share": round(bound / found["median"], 3),
        }  # fmt: skip
        return
    hits = [float(h) for h in args.hit.split(",") if h]
    kinds = [("reuse", 1.0), *(("reuse", h) for h in hits)]
    kinds += [("zipf", 0.0)] if args.zipf else []
    full_hit_ms = 0.0
    steps = max(1, args.steps // batch)  # as many choices for any batch
    for kind, hit in kinds:
        trace = bench.trace(kind, hit, args.warm + steps + 1, batch)
        timed = bench.time_steps(batch, trace, args.warm, steps)
        if hit == 1.0:
            full_hit_ms = spread(timed.ms, 4)["median"]
        base |= {"resident_ms": resident_ms, "full_hit_ms": full_hit_ms}
        step_ms = resident_ms or full_hit_ms
        asked = trace[args.warm : args.warm + steps]
        context = bench.middle(args.warm, steps)
        row = _row(bench, timed, asked, context, step_ms)
        row["trace"] = f"{kind} {hit}" if kind == "reuse" else kind
        print(
            f"{name} {row['trace']}: {row['tok_s']} tok/s, h {row['hit_rate']}, formula "
            f"{row['formula_ms']} ms, took {row['over_formula']} of it, page-ins {row['page_ins']}",
            flush=True,
        )
        yield {**base, **row}
        for accuracy in (float(a) for a in args.prefetch.split(",") if a):
            if hit == 1.0:
                continue
            timed = bench.time_steps(batch, trace, args.warm, steps, accuracy)
            guessed = {**_row(bench, timed, asked, context, step_ms), "trace": row["trace"]}
            guessed["prefetch_accuracy"] = accuracy
            over = round(guessed["tok_s"] / row["tok_s"], 3)
            print(
                f"{name} {row['trace']} prefetch {accuracy}: {guessed['tok_s']} tok/s, {over} of "
                f"without, h {guessed['hit_rate']}",
                flush=True,
            )
            yield {**base, **guessed, "over_without": over}
        if args.baselines and hit == hits[-1]:
            for other in baselines(bench, step_ms, hits):
                print(f"{name} {other}", flush=True)
                yield {**base, **other}


def distinct(asked: Choices) -> list[float]:
    """Experts that a step asks of each layer, mean over steps.

    Args:
        asked: int32 [steps, layers, rows, k].
    """
    ordered = np.sort(asked.reshape(*asked.shape[:2], -1), axis=-1)
    counts = 1 + (np.diff(ordered, axis=-1) != 0).sum(-1)
    return [round(float(mean), 1) for mean in counts.mean(0)]


def _row(
    bench: PagedBench, timed: Timed, asked: Choices, context: int, step_ms: float
) -> dict[str, Any]:
    """Figures of steps, beside formula and bound.

    Args:
        bench: what ran.
        timed: the steps.
        asked: what they were routed to.
        context: tokens that each sequence had on average.
        step_ms: the formula's resident step.
    """
    batch, touched = asked.shape[2], distinct(asked)
    moved = timed.misses / len(timed.ms) * bench.paged[0].layout.nbytes
    bus = moved / BUS * 1e3
    formula = step_ms + bus
    bound = max(bus, bound_ms(bench.model, bench.pool, batch, context, touched))
    return {
        "ms_step": spread(timed.ms, 4),
        "ms_step_mean": round(timed.mean_ms, 4),
        "tok_s": round(batch * 1e3 / timed.mean_ms, 1),
        "hit_rate": round(timed.hit_rate, 4),
        "formula_ms": round(formula, 4),
        "over_formula": round(timed.mean_ms / formula, 3),
        "experts_touched": touched,
        "bound_ms": round(bound, 4),
        "bound_share": round(bound / timed.mean_ms, 3),
        "page_ins": {
            "median": percentile(timed.page_ins, 50),
            "p99": percentile(timed.page_ins, 99),
        },
    }


def _prompt(bench: PagedBench, length: int, repeats: int) -> dict[str, Any]:
    """Time a prompt in one chunk: whole, without its copies, and its copies alone."""
    rows, wanted = bench.prompt(length)

    def measure() -> list[float]:
        times = []
        for _ in range(repeats + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            bench.run_prompt(rows, wanted)
            times.append((time.perf_counter() - begin) * 1e3)
        return times[1:]

    row: dict[str, Any] = {"bench": "paged_prompt", "batch": 1, "prompt_tokens": length}
    before = bench.counts()
    row["ttft_ms"] = row["ms_step"] = spread(measure())
    if bench.paged:
        hits, misses = (b - a for a, b in zip(before, bench.counts(), strict=True))
        row["hit_rate"] = round(hits / (hits + misses), 4)
        row["copy_ms"] = round(_copy_ms(bench), 1)
        copy, ExpertStream._copy = ExpertStream._copy, _no_copy  # type: ignore[method-assign, assignment]
        row["compute_ms"] = spread(measure())["median"]
        ExpertStream._copy = copy  # type: ignore[method-assign]
        longer = max(row["copy_ms"], row["compute_ms"])
        row["over_longer"] = round(row["ttft_ms"]["median"] / longer, 3)
    print(f"prompt {length}: {row}", flush=True)
    return row


def _no_copy(self: ExpertStream, *_: object) -> None:
    """In place of ExpertStream._copy."""


def _copy_ms(bench: PagedBench) -> float:
    """Milliseconds that the copy engine takes for what no slot of any layer holds."""
    begin, end = mark(), mark()
    absent = [(p, (p.state.expert_slot < 0).nonzero().flatten().tolist()) for p in bench.paged]
    scratch = torch.empty_like(bench.paged[0].slots[0])
    torch.cuda.synchronize()
    begin.record()
    for paged, experts in absent:
        for expert in experts:
            scratch.copy_(paged.store[expert], non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default=QWEN)
    parser.add_argument(
        "--slots", default="", help="K of each paged layer, or several; empty: all resident"
    )
    parser.add_argument("--resident-layers", type=int, default=0, help="layers that are not paged")
    parser.add_argument("--gpu-budget-gb", type=int, default=0, help="most memory taken of the GPU")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--fp8", action="store_true", help="qwen3: experts in FP8, not bfloat16")
    parser.add_argument(
        "--pins", type=int, default=0, help="qwen3: experts of each layer that stay, spread evenly"
    )
    parser.add_argument("--hit", default="0.5,0.67,0.81,0.887,0.9,0.95,0.99")
    parser.add_argument("--zipf", action="store_true", help="also independent choices by 1 / rank")
    parser.add_argument(
        "--baselines", action="store_true", help="also other ways to serve what is off the GPU"
    )
    parser.add_argument(
        "--prefetch", default="", help="also with prefetch, shares of right guesses: 0.5,0.8"
    )
    parser.add_argument("--prompt", default="")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm", type=int, default=24)
    parser.add_argument(
        "--steps", type=int, default=96, help="timed; of injected traces over the rows of a step"
    )
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
