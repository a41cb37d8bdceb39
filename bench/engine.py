"""What a client of the engine sees on a GPU: first tokens, pace, pace beside a prompt, cached turns.

    python -m bench.engine --geometry v4-flash-8l --what ttft,decode,beside,cached
    python -m bench.engine --mode eager,graph,fused --what decode --batch 1,64

The whole engine runs but for thread and HTTP: scheduler, fast runner, sampler, deltas, driven as
fast as it goes. Weights are drawn from a seed, prompts are random ids that share nothing, greedy, EOS
ignored. Modes: `eager` calls torch's own operations, `graph` captures them, `fused` captures the
kernels. The experts are ours in all of them: their twin unpacks every expert in every step, seconds
long, so that any kernel would win against it.

Rows: bench
* "start": seconds from nothing to ready: weights drawn, steps captured and kernels made ready; and
  what is held on the device against the memory plan;
* "ttft": one prompt alone, from its submission to its first token;
* "decode": `batch` streams of 128 prompt tokens (the twins': 16), 256 new tokens each, and with
  --what long of long prompts: host_us is what the host adds to a step beside waiting for the device,
  bound_ms the time to read each weight once (of experts those that were touched) and the KV;
* "beside": eight running streams while a prompt of `prompt_tokens` is processed: time between a
  stream's tokens alone (`alone_ms`) and meanwhile (`itl_ms`, `itl_p99_ms`), and the prompt's ttft_ms;
* "cached": a turn of 500 new tokens after `prompt_tokens` that are in the prefix cache;
* "load": 1,000 requests of mixed length with random aborts: all served, all memory back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from bench.driven import Driven, config_of
from bench.rows import gpu_pace, make_rows, percentile, spread, write_rows
from engine.api import FinishReason, TokenDelta
from engine.device.build import free_memory
from engine.options import DECODE_BUCKETS

WARM_UPS = 1
#: Streams and prompt tokens of the rows "decode" with a long context.
LONG = ((1, 65536), (16, 32768))
#: Rows of decode steps that are always captured; the twins take their time.
NEEDED = (1, 16)


class Engine(Driven):
    """An engine that tells how fast it is."""

    def ttft(self, length: int, repeats: int) -> dict[str, Any]:
        """Time to the first token of a prompt alone."""
        values = []
        for _ in range(WARM_UPS + repeats):
            ids, came = self.ids(length), list[float]()
            begin = time.perf_counter()
            self.submit(ids, 1)
            self.run(lambda delta, now, came=came: came.append(now))  # type: ignore[misc]
            values.append((came[0] - begin) * 1e3)
        return {
            "bench": "ttft",
            "batch": 1,
            "prompt_tokens": length,
            "ttft_ms": spread(values[WARM_UPS:], 2),
        }

    def decode(
        self, batch: int, prompt: int, new: int, repeats: int, warm_ups: int = WARM_UPS
    ) -> dict[str, Any]:
        """Milliseconds of a step of streams, from when the last one has begun."""
        steps, rates, host = [], [], []
        for _ in range(warm_ups + repeats):
            names = [self.submit(self.ids(prompt), self.context - prompt) for _ in range(batch)]
            begun: set[str] = set()
            while len(begun) < batch:
                begun.update(delta.request_id for delta in self.step())
            begin, launched, waited = time.perf_counter(), self.runner.num_launched, self.waited
            tokens = 0
            while tokens < batch * (new - 1):
                tokens += len(self.step())
            spent = time.perf_counter() - begin
            pace = gpu_pace()
            busy = spent - (self.waited - waited)
            host.append(busy * 1e6 / (self.runner.num_launched - launched))
            rates.append(tokens / spent)
            steps.append(spent * 1e3 * batch / tokens)
            for name in names:
                self.core.abort(name)
        touched, bound = self.bound(batch, prompt + new // 2)
        ms_step = spread(steps[warm_ups:], 4)
        return {
            "bench": "decode",
            "batch": batch,
            "prompt_tokens": prompt,
            "new_tokens": new,
            "ms_step": ms_step,
            "host_us": spread(host[warm_ups:], 1),
            "kernels": self.kernels(batch),
            "experts_touched": touched,
            "bound_ms": round(bound, 4),
            "bound_share": round(bound / ms_step["median"], 3),
            "tok_s": spread(rates[warm_ups:], 1),
            **pace,
        }

    def beside(self, streams: int, length: int) -> dict[str, Any]:
        """Time between tokens of streams, before a prompt comes and while it is processed."""
        names = {self.submit(self.ids(128), 100_000) for _ in range(streams)}
        times: dict[str, list[float]] = {}

        def steps(until: Callable[[], bool]) -> None:
            while not until():
                for delta in self.step():
                    times.setdefault(delta.request_id, []).append(time.perf_counter())

        steps(lambda: len(times) == streams and min(map(len, times.values())) > 100)
        alone = [
            b - a
            for name in names
            for a, b in zip(times[name][20:], times[name][21:], strict=False)
        ]
        ids = self.ids(length)
        begin = time.perf_counter()
        late = self.submit(ids, 1)
        steps(lambda: late in times)
        end = times[late][0]
        gaps = [
            b - a
            for name in names
            for a, b in zip(times[name], times[name][1:], strict=False)
            if b > begin and a < end
        ]
        for name in names:
            self.core.abort(name)
        return {
            "bench": "beside",
            "batch": streams,
            "prompt_tokens": length,
            "alone_ms": spread([gap * 1e3 for gap in alone], 3),
            "itl_ms": spread([gap * 1e3 for gap in gaps], 3),
            "itl_p99_ms": round(percentile(gaps, 99) * 1e3, 3),
            "itl_p99_over_median_alone": round(percentile(gaps, 99) / percentile(alone, 50), 2),
            "ttft_ms": round((end - begin) * 1e3, 1),
        }

    def cached(self, length: int, repeats: int) -> dict[str, Any]:
        """Time to the first token of a turn that goes on from a cached prompt."""
        ids = self.ids(length)
        values, hits = [], []
        self.submit(ids, 1)
        self.run(lambda delta, now: None)
        for _ in range(WARM_UPS + repeats):
            came: list[tuple[float, int]] = []

            def note(delta: TokenDelta, now: float, came: list[tuple[float, int]] = came) -> None:
                came.append((now, delta.usage.cached_tokens if delta.usage else 0))

            turn = ids + self.ids(500)
            begin = time.perf_counter()
            self.submit(turn, 1)
            self.run(note)
            values.append((came[0][0] - begin) * 1e3)
            hits.append(came[0][1])
        return {
            "bench": "cached",
            "batch": 1,
            "prompt_tokens": length,
            "new_prompt_tokens": 500,
            "cached_tokens": min(hits),
            "ttft_ms": spread(values[WARM_UPS:], 2),
        }

    def load(self, count: int) -> dict[str, Any]:
        """Requests of mixed length with random aborts, as many at once as run."""
        draw, ended, aborted = self.draw, dict[str, FinishReason](), set[str]()
        open_names: list[str] = []
        begin, tokens = time.perf_counter(), 0
        left = count
        while left or self.core.has_work:
            while left and len(open_names) < 128:
                open_names.append(
                    self.submit(self.ids(draw.choice((16, 130, 700, 3000))), draw.randint(1, 60))
                )
                left -= 1
            if open_names and draw.random() < 0.05:
                name = open_names.pop(draw.randrange(len(open_names)))
                self.core.abort(name)
                aborted.add(name)
            for delta in self.step():
                tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    ended[delta.request_id] = delta.finish_reason
                    open_names.remove(delta.request_id)
        seconds = time.perf_counter() - begin
        self.core.check_integrity()
        self.core._scheduler.prefix.clear()
        stats = self.core.stats()
        reasons = sorted({reason.value for reason in ended.values()})
        return {
            "bench": "load",
            "batch": count,
            "aborted": len(aborted),
            "lost": count - len(ended) - len(aborted),
            "reasons": reasons,
            "blocks_held_at_the_end": stats.total_blocks - stats.free_blocks,
            "tok_s": round(tokens / seconds, 1),
            "late_kernels": self.runner.compiles.late,
            **self.memory(),
        }


def figures(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one run, each as soon as it is there."""
    batches = [int(b) for b in args.batch.split(",") if b]
    prompts = [int(n) for n in args.prompt.split(",") if n]
    mixes = [int(n) for n in args.mixed.split(",")]
    what = args.what.split(",")
    config = config_of(args.geometry)
    for mode in args.mode.split(","):
        engine = Engine(
            config,
            mode,
            device=args.device,
            context=args.context,
            streams=max([*batches, 9]),
            chunk=args.chunk,
            mixed=mixes[0],
            tokens=args.tokens,
            buckets=DECODE_BUCKETS if mode == "fused" else sorted({*batches, *NEEDED}),
        )
        common = {"geometry": args.geometry, "mode": mode, "chunk": args.chunk}
        yield {"bench": "start", **common, **engine.start}
        engine.begin_anew(prefix_cache=False)
        prompt = 128 if mode == "fused" else 16  # the twins take long for a prompt
        for batch in batches if "decode" in what else ():
            yield {**engine.decode(batch, prompt, args.new_tokens, args.repeats), **common}
        for length in prompts if "ttft" in what else ():
            repeats = max(2, args.repeats * 8192 // max(length, 8192))
            yield {**engine.ttft(length, repeats), **common}
        for batch, length in LONG if "long" in what else ():
            engine.begin_anew(prefix_cache=False, mixed=args.chunk)
            # Prompts take long and everything is warm by now, so once is enough.
            yield {**engine.decode(batch, length, args.new_tokens, 1, warm_ups=0), **common}
        for mixed in mixes if "beside" in what else ():
            engine.begin_anew(mixed=mixed)
            yield {**engine.beside(8, args.beside), **common, "mixed": mixed}
        engine.begin_anew()
        if "cached" in what:
            yield {**engine.cached(args.cached, args.repeats), **common}
        if "load" in what:
            yield {**engine.load(1000), **common}
        runner = engine.runner
        ahead = {"launched": runner.num_launched, "ahead": runner.num_ahead}
        print(f"# {mode}: {ahead}, compiled late: {runner.compiles.late}", flush=True)
        del engine, runner
        free_memory()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default="v4-flash-8l", help="of bench.geometries, or tiny")
    parser.add_argument("--mode", default="fused", help="comma-separated: eager, graph, fused")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--what", default="ttft,decode,beside,cached")
    parser.add_argument("--batch", default="1,4,16,64")
    parser.add_argument("--prompt", default="1024,8192,32768,65536")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument(
        "--beside", type=int, default=32768, help="tokens of the prompt beside streams"
    )
    parser.add_argument("--cached", type=int, default=65536, help="tokens of the cached prompt")
    parser.add_argument("--context", type=int, default=68 * 1024)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--mixed", default="1024", help="rows of prompts beside streams, by turns")
    parser.add_argument("--tokens", type=int, default=576 * 1024, help="that the pool has room for")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", default="", help="file of rows under bench/results")
    args = parser.parse_args()
    rows = []
    for row in figures(args):
        print(orjson.dumps(row, option=orjson.OPT_NON_STR_KEYS).decode(), flush=True)
        rows.append(orjson.loads(orjson.dumps(row, option=orjson.OPT_NON_STR_KEYS)))
        if args.out:  # as it stands: what was measured is kept if the run is cut
            write_rows(args.out, make_rows("bench.engine", args.device, rows))


if __name__ == "__main__":
    main()
