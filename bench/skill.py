"""How well a checkpoint calls tools, decoded greedily by the serving engine.

    python -m bench.skill                        the shipped checkpoint: two held-out seeds, demo
    python -m bench.skill --dialogues 100        a quick look

Cases and metrics are training/evaluate.py's. The cases are spread over processes of one thread
each. Rows go to bench/results/skill-GEOMETRY.jsonl, one for each set, seed and metric.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import orjson

from bench.rows import make_rows, write_rows
from engine import TINY_CHECKPOINT
from engine.options import usable_cores
from training.dialogues import Split
from training.evaluate import Case, Report, cases, demo_cases, engine_generate, score

#: dialogues are shared out in pieces of so many cases, so that no process waits long for another
PIECE = 32


def _write(job: tuple[Path, list[tuple[int, ...]]]) -> list[list[int]]:
    checkpoint, prompts = job
    key = str(checkpoint)
    if key not in _ENGINES:
        _ENGINES[key] = engine_generate(checkpoint)
    return [list(out) for out in _ENGINES[key](prompts)]


_ENGINES: dict[str, Any] = {}  # of this process: a checkpoint is loaded once


def measure(checkpoint: Path, chosen: Sequence[Case], processes: int) -> Report:
    """Have every case written by the engine and score the outputs."""
    order = sorted(range(len(chosen)), key=lambda i: len(chosen[i].prompt))
    pieces = [order[at : at + PIECE] for at in range(0, len(order), PIECE)]
    jobs = [(checkpoint, [chosen[i].prompt for i in piece]) for piece in reversed(pieces)]
    outputs: list[list[int]] = [[] for _ in chosen]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for piece, written in zip(reversed(pieces), pool.map(_write, jobs), strict=True):
            for i, output in zip(piece, written, strict=True):
                outputs[i] = output
    return score(chosen, outputs)


def rows_of(report: Report, **labels: Any) -> list[dict[str, Any]]:
    """One row per metric, with the groups' counts beside the total's."""
    return [
        {"bench": "skill", "metric": metric, **labels, **groups.pop("all"), "groups": groups}
        for metric, groups in report.json().items()
    ]


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=TINY_CHECKPOINT)
    parser.add_argument("--dialogues", type=int, default=1000, help="per seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--processes", type=int, default=usable_cores())
    parser.add_argument("--failures", type=Path, help="write the wrong cases there, as JSON lines")
    args = parser.parse_args()
    plan = [("held_out", seed, cases(Split.HELD_OUT, seed, args.dialogues)) for seed in args.seeds]
    plan.append(
        ("in_distribution", 1, cases(Split.IN_DISTRIBUTION, 1, max(1, args.dialogues // 2)))
    )
    plan.append(("demo", 0, demo_cases()))
    figures: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    for name, seed, chosen in plan:
        start = time.perf_counter()
        report = measure(args.model, chosen, args.processes)
        seconds = time.perf_counter() - start
        figures += rows_of(
            report, geometry=args.model.name, set=name, seed=seed, turns=len(chosen), mode="greedy"
        )
        wrong += [{"set": name, "seed": seed, **failure} for failure in report.failures]
        rates = {m: round(report.rate(m), 4) for m in report.tallies}
        print(f"{name} seed {seed}: {len(chosen)} turns in {seconds:.0f} s", rates, flush=True)
    print(write_rows(f"skill-{args.model.name}", make_rows("bench.skill", "cpu", figures)).name)
    if args.failures:
        args.failures.write_bytes(b"".join(orjson.dumps(w) + b"\n" for w in wrong))


if __name__ == "__main__":
    main()
