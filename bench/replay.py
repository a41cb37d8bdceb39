"""What leaving rows of a prompt out of the late layers gains: modes side by side, in one run.

    python -m bench.replay --geometry v41-40l
    python -m bench.replay --geometry v41-12l --what ttft,tails --prompt 1024,8192

The whole engine runs but for thread and HTTP, over weights drawn from a seed; prompts are random ids
that share nothing. Modes take turns, so that what changes on the machine meets all of them; ratios
are to `off` of the same run. First tokens are timed with the prefix cache off.

Rows, by "bench", each with mode off, exact or bounded:
* "ttft": one prompt, from its submission to its first token, by chunk; tflop_s of `off`;
* "many": prompts that come at once: seconds to the first token of the last one and to the last
  token of all; tokens of prompts and replies per second;
* "cached": a turn of 500 new tokens after a prompt that is in the prefix cache;
* "tail": one tail, captured (mode graph) and launch by launch (mode eager), by rows, both timed from
  the host; pool_mb is what its graph added to the pool, which larger ones began.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
import torch

from bench.bound import prompt_flops
from bench.driven import config_of
from bench.engine import Engine
from bench.rows import make_rows, spread, write_rows
from engine.api import PrefillMode, TokenDelta
from engine.kernels.rows import Narrowing
from engine.model.flow import Flow, Pass
from engine.options import TAIL_BUCKETS

Row = dict[str, Any]
WARM_UPS = 1


class Replay:
    """An engine whose prompts are processed in turn in every mode.

    Args:
        engine: of a model with a tail.
        modes: the first is what the others are compared with.
        graphs: whether tails that were captured are used.
        end: when to stop repeating, of time.perf_counter().
    """

    def __init__(
        self, engine: Engine, modes: Sequence[PrefillMode], *, graphs: bool, end: float
    ) -> None:
        self.engine = engine
        self._end = end
        self._modes = tuple(modes)
        self._tails = engine.runner.prompts.tails
        self.use_graphs(graphs)

    def use_graphs(self, on: bool) -> None:
        """Run tails as they were captured, or launch by launch."""
        self.engine.runner.prompts.tails = self._tails if on else None

    def ttft(self, length: int, repeats: int, chunk: int | None = None) -> Iterator[Row]:
        """One prompt alone, in chunks of the engine's size or smaller ones."""
        self.engine.begin_anew(prefix_cache=False, chunk=chunk)
        found: dict[PrefillMode, list[float]] = {mode: [] for mode in self._modes}
        for repeat in range(WARM_UPS + repeats):
            ids, warms_up = self.engine.ids(length), repeat < WARM_UPS
            if self._is_late(repeat):
                break
            # A long prompt takes many chunks, so that one mode of it is enough to warm up.
            for mode in self._modes[-1:] if warms_up and length > 1 << 14 else self._modes:
                times = self._run([ids], 1, mode)
                if not warms_up:
                    found[mode].append(times[0] * 1e3)
        model = self.engine.runner._model
        flops = prompt_flops(model.config, model.weights, length)  # type: ignore[attr-defined]
        base = statistics.median(found[self._modes[0]])
        for mode, values in found.items():
            times_of = spread(values, 2)
            row = {"bench": "ttft", "mode": mode, "batch": 1, "prompt_tokens": length,
                   "chunk": chunk or self.engine.chunk, "ttft_ms": times_of, "ttft_ratio": round(times_of["median"] / base, 4)}  # fmt: skip
            if mode == "off":
                row["tflop_s"] = round(flops / times_of["median"] / 1e9, 1)
            yield row

    def many(self, count: int, length: int, new: int, repeats: int) -> Iterator[Row]:
        """Prompts that come at once."""
        self.engine.begin_anew(prefix_cache=False)
        modes = [mode for mode in self._modes if mode != "exact" or length < 8192]
        found: dict[PrefillMode, list[tuple[float, float]]] = {mode: [] for mode in modes}
        # What takes a minute is not run once more to warm up.
        warm_ups = WARM_UPS if count * length <= 1 << 17 else 0
        for repeat in range(warm_ups + repeats):
            if self._is_late(repeat):
                break
            prompts = [self.engine.ids(length) for _ in range(count)]
            for mode in modes:
                times = self._run(prompts, new, mode)
                if repeat >= warm_ups:
                    found[mode].append(times)
        base = [statistics.median(part) for part in zip(*found[modes[0]], strict=True)]
        for mode, values in found.items():
            firsts, whole = ([v[i] for v in values] for i in (0, 1))
            seconds = statistics.median(whole)
            yield {
                "bench": "many", "mode": mode, "batch": count, "prompt_tokens": length,
                "new_tokens": new, "last_ttft_s": spread(firsts), "whole_s": spread(whole),
                "ttft_ratio": round(statistics.median(firsts) / base[0], 4),
                "throughput_ratio": round(base[1] / seconds, 4),
                "tok_s": round(count * (length + new) / seconds, 1),
            }  # fmt: skip

    def cached(self, length: int, repeats: int) -> Iterator[Row]:
        """A turn of 500 new tokens that goes on from a cached prompt."""
        self.engine.begin_anew(prefix_cache=True)
        ids = self.engine.ids(length)
        for mode in self._modes:
            self._run([ids], 1, mode)
        found: dict[PrefillMode, list[float]] = {mode: [] for mode in self._modes}
        hits: dict[PrefillMode, list[int]] = {mode: [] for mode in self._modes}
        for repeat in range(WARM_UPS + repeats):
            if self._is_late(repeat):
                break
            turn = ids + self.engine.ids(500)
            for mode in self._modes:
                times = self._run([turn], 1, mode, hits[mode].append)
                if repeat >= WARM_UPS:
                    found[mode].append(times[0] * 1e3)
        base = statistics.median(found[self._modes[0]])
        for mode, values in found.items():
            yield {
                "bench": "cached", "mode": mode, "batch": 1, "prompt_tokens": length,
                "new_prompt_tokens": 500, "cached_tokens": min(hits[mode]),
                "ttft_ms": spread(values, 2),
                "ttft_ratio": round(statistics.median(values) / base, 4),
            }  # fmt: skip

    def tail(self, count: int, repeats: int) -> Iterator[Row]:
        """The tail of several prompts at once, captured and not."""
        runner, tails = self.engine.runner, self._tails
        if tails is None or self.engine.tail is None:
            raise ValueError("no tails are captured")
        self.engine.begin_anew(prefix_cache=False)
        model, pool, first = runner._model, runner._pool, self.engine.tail.first
        run, rows = tails.run, list[Row]()

        def eager(flow: Flow, to: Narrowing) -> Flow:
            state = Pass(to.rows, pool, written=first)  # type: ignore[arg-type]
            return model.run_tail(first, flow.narrow(to), state)  # type: ignore[attr-defined, no-any-return]

        def both(flow: Flow, to: Narrowing) -> Flow | None:
            times: dict[str, list[tuple[float, float]]] = {"eager": [], "graph": []}
            for repeat in range(2 + repeats):
                for mode, how in (("eager", eager), ("graph", run)):
                    took = _timed(self.engine, lambda how=how: how(flow, to))  # type: ignore[misc]
                    if repeat >= 2:
                        times[mode].append(took)
            base = statistics.median(took for took, _ in times["eager"])
            pool_mb = {c.bucket: round(c.pool_bytes / 1e6, 1) for c in tails.captured}
            for mode, values in times.items():
                whole = spread([took * 1e3 for took, _ in values])
                rows.append({
                    "bench": "tail", "mode": mode, "batch": count, "rows": to.rows.num_rows,
                    "ms": whole, "host_ms": spread([host * 1e3 for _, host in values]),
                    "ratio": round(whole["median"] / base / 1e3, 4),
                    "pool_mb": pool_mb.get(to.rows.num_rows, 0),
                })  # fmt: skip
            return run(flow, to)

        tails.run = both  # type: ignore[method-assign]
        self.use_graphs(True)
        length = self.engine.chunk // count
        self._run([self.engine.ids(length) for _ in range(count)], 1, "bounded")
        tails.run = run  # type: ignore[method-assign]
        yield from rows

    def _is_late(self, repeat: int) -> bool:
        """Whether to do with the repeats there are: two at least."""
        return repeat > WARM_UPS + 1 and time.perf_counter() > self._end

    def _run(
        self,
        prompts: Sequence[tuple[int, ...]],
        new: int,
        mode: PrefillMode,
        hit: Callable[[int], None] = lambda tokens: None,
    ) -> tuple[float, float]:
        """Seconds to the last request's first token, and to the last token."""
        firsts: dict[str, float] = {}
        last = 0.0

        def note(delta: TokenDelta, now: float) -> None:
            nonlocal last
            if delta.request_id not in firsts and delta.usage is not None:
                hit(delta.usage.cached_tokens)
            firsts.setdefault(delta.request_id, now)
            last = now

        begin = time.perf_counter()
        for ids in prompts:
            self.engine.submit(ids, new, mode)
        self.engine.run(note)
        return max(firsts.values()) - begin, last - begin


def _timed(engine: Engine, work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds until the device is through, and until the host is."""
    engine.sync()
    begin = time.perf_counter()
    work()
    host = time.perf_counter() - begin
    engine.sync()
    return time.perf_counter() - begin, host


def figures(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of one run, each as soon as it is there."""

    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",") if n]

    end = time.perf_counter() + args.seconds
    prompts, what = numbers(args.prompt), args.what.split(",")
    many = [numbers(one.replace("x", ",")) for one in args.many.split(",") if one]
    buckets = numbers(args.tail_buckets)
    modes: list[PrefillMode] = args.prefill.split(",")
    engine = Engine(
        config_of(args.geometry),
        args.kernels,
        device=args.device,
        context=args.context,
        streams=args.streams,
        chunk=args.chunk,
        mixed=args.chunk,
        tokens=max(args.tokens, args.context),
        tail_buckets=buckets,
        buckets=(args.streams,),
    )
    tail = engine.tail
    if tail is None:
        raise ValueError(f"{args.geometry} has no tail")
    common = {"geometry": args.geometry, "kernels": args.kernels, "chunk": args.chunk,
              "tail_share": round((tail.num_layers - tail.first) / tail.num_layers, 3)}  # fmt: skip
    start: Row = {"bench": "start", "mode": "off", **common, **engine.start}
    tails = engine.runner.prompts.tails
    if tails is not None:
        start["tail_buffers_mb"] = round(tails.buffer_bytes / 1e6, 1)
        start["tail_pool_mb"] = {c.bucket: round(c.pool_bytes / 1e6, 1) for c in tails.captured}
        start["tail_capture_s"] = round(sum(c.seconds for c in tails.captured), 2)
    if args.device == "cuda":
        start["allocated_gb"] = round(torch.cuda.memory_allocated() / 1e9, 2)
    yield start
    replay = Replay(engine, modes, graphs=bool(buckets), end=end)
    rows: list[Iterator[Row]] = []
    if "tails" in what:
        rows += [replay.tail(-(-bucket // tail.window), args.repeats) for bucket in buckets]
    if "ttft" in what:
        rows += [replay.ttft(length, args.repeats) for length in prompts]
    if "cached" in what:
        rows.append(replay.cached(args.cached, args.repeats))
    if "many" in what:  # last: the longest of all
        rows += [replay.many(n, length, new, times) for n, length, new, times in many]
    if "chunks" in what:
        rows += [
            replay.ttft(length, 3, chunk)
            for chunk in numbers(args.chunks)
            for length in prompts
            if chunk < length < 1 << 16
        ]
    for part in rows:
        begin = time.perf_counter()
        for row in part:
            yield {**common, **row, "tail_graphs": bool(buckets)}
        print(f"# {time.perf_counter() - begin:.1f} s", flush=True)
    if buckets and "ttft" in what:
        # The same once more without graphs, where they could matter most.
        replay.use_graphs(False)
        for row in replay.ttft(min(prompts), args.repeats):
            yield {**common, **row, "tail_graphs": False}
    print(f"# compiled late: {engine.runner.compiles.late}", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default="v41-40l", help="of bench.geometries, or tiny")
    parser.add_argument("--kernels", default="fused", help="eager, graph or fused")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--what", default="ttft,many,cached", help="of ttft, many, cached, tails, chunks"
    )
    parser.add_argument("--prefill", default="off,bounded,exact")
    parser.add_argument("--prompt", default="1024,8192,32768,65536")
    parser.add_argument(
        "--many",
        default="16x1024x1x7,16x32768x1x1",
        help="comma-separated: prompts x tokens x new tokens x repeats",
    )
    parser.add_argument("--cached", type=int, default=65536, help="tokens of the cached prompt")
    parser.add_argument(
        "--tail-buckets", default=",".join(map(str, TAIL_BUCKETS)), help="rows of tails to capture"
    )
    parser.add_argument("--context", type=int, default=68 * 1024)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--chunks", default="2048,4096", help="smaller chunks to try")
    parser.add_argument("--tokens", type=int, default=576 * 1024, help="that the pool has room for")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="after which nothing is repeated any more"
    )
    parser.add_argument("--out", default="", help="file of rows under bench/results")
    args = parser.parse_args()
    rows = []
    for row in figures(args):
        # As it stands: what was measured is kept if the run is cut.
        text = orjson.dumps(row, option=orjson.OPT_NON_STR_KEYS)
        rows += make_rows("bench.replay", args.device, [orjson.loads(text)])
        print(orjson.dumps(rows[-1]).decode(), flush=True)
        if args.out:
            write_rows(args.out, rows)


if __name__ == "__main__":
    main()
