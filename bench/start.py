"""Seconds from nothing to the first token on a GPU: the first start ever, and the second.

    python -m bench.start --geometry v4-flash-8l

Each start is a process of its own, timed from its launch: interpreter, imports, weights drawn from a
seed, captured decode steps, kernels made ready, one prompt of 128 tokens. The first one finds no
compiled kernel (a cache folder of its own), the second those that the first has left.

Rows: bench "start_up", mode "first" or "second": seconds to the first token, and of what they are made.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

from bench.rows import ROOT, make_rows, write_rows


def child(args: argparse.Namespace) -> None:
    """Start an engine, have it give one token, and print what that took."""
    begin = time.perf_counter()
    from bench.driven import config_of
    from bench.engine import Engine

    imported = time.perf_counter()
    engine = Engine(
        config_of(args.geometry),
        "fused" if args.device == "cuda" else "eager",
        device=args.device,
        context=args.context,
        streams=args.streams,
        chunk=args.chunk,
        mixed=1024,
        tokens=args.context,
    )
    built = time.perf_counter()
    engine.submit(engine.ids(128), 1)
    engine.run(lambda delta, now: None)
    parts = {
        "import_s": round(imported - begin, 2),
        **engine.start,
        "token_s": round(time.perf_counter() - built, 3),
        "late_kernels": len(engine.runner.compiles.late),
    }
    print(orjson.dumps(parts, option=orjson.OPT_NON_STR_KEYS).decode(), flush=True)


def start(args: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """Time one start whose kernels are kept in a folder."""
    command = [sys.executable, "-m", "bench.start", "--child", *sys.argv[1:]]
    begin = time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("{")), "")
        seconds = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode or not line:
        raise SystemExit(f"the engine did not start: exit code {process.returncode}")
    return {"seconds": round(seconds, 2), **orjson.loads(line)}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default="v4-flash-8l", help="of bench.geometries, or tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--context", type=int, default=68 * 1024)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--out", default="", help="file of rows under bench/results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("first", "second"):
            found = start(args, Path(folder))
            row = {"bench": "start_up", "geometry": args.geometry, "mode": mode, "batch": 1}
            rows.append({**row, "prompt_tokens": 128, **found})
            print(orjson.dumps(rows[-1]).decode(), flush=True)
            if args.out:
                write_rows(args.out, make_rows("bench.start", args.device, rows))


if __name__ == "__main__":
    main()
