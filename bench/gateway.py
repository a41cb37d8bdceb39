"""The gateway against a minimal server around the bare codec, on the same machine in the same run.

    python -m bench.gateway [--quick] [--others DIR]

Both servers run as processes of their own over the same played tokens, on one core; the load comes
from another. Their costs are read from the kernel (CPU seconds of the process), so that what the
load generator and the machine do beside them does not count as theirs. Figures of issue 3.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from bench import gateway_others as others, rows
from engine import TINY_CHECKPOINT
from engine.api import ModelInfo
from gateway.backends.embedded import EmbeddedBackend

MODULE = "bench.gateway"
TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        },
    },
}
PROSE = "The quick brown fox jumps over the lazy dog, and the dog does not mind it at all. "
CALL = (
    'Writing.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="write_file">\n'
    '<｜DSML｜ parameter name="path" string="true">a.txt</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="text" string="true">{}</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@dataclass(frozen=True)
class Load:
    """What is sent, and how.

    Args:
        name: of the measurement.
        script: line of the script that is played.
        tools: whether the request declares a tool.
        stream: whether it asks for a stream.
        requests: how many are sent.
        at_once: how many are open at a time.
    """

    name: str
    script: str
    tools: bool
    stream: bool
    requests: int
    at_once: int


def script_lines() -> list[dict[str, Any]]:
    """The outputs that are played, long enough for the ends not to count."""
    return [
        {"name": "prose", "output": PROSE * 40},
        {"name": "prose8", "output": PROSE * 75, "tokens_per_step": 8},
        {"name": "call", "output": CALL.format(PROSE * 40)},
        {"name": "call8", "output": CALL.format(PROSE * 75), "tokens_per_step": 8},
        {"name": "short", "output": PROSE},
        {"name": "open", "output": PROSE * 4, "delay_ms": 250},
    ]


def body(load: Load, model: str) -> bytes:
    """The request of a load."""
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Please go on as you think best."}],
        "thinking": {"type": "disabled"},
        "stream": load.stream,
    }
    if load.tools:
        fields["tools"] = [TOOL]
    return orjson.dumps(fields)


@contextmanager
def server(command: list[str], core: int | None) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server process on a core of its own; yields it and its port."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=rows.ROOT
        )
        try:
            if core is not None:
                os.sched_setaffinity(process.pid, {core})
            assert process.stdout is not None
            port = 0
            for line in process.stdout:
                if "http://127.0.0.1:" in line:
                    port = int(line.partition("http://127.0.0.1:")[2].split("/")[0].split()[0])
                    break
            if not port:
                raise SystemExit(f"{command[2]} did not start{others.last_words(errors)}")
            yield process, port
        finally:
            process.terminate()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """CPU time that a process has used, its living threads included, to the nanosecond."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def resident_bytes(process: subprocess.Popen[str]) -> int:
    """Memory that a process holds."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def one_request(port: int, head: bytes, content: bytes) -> tuple[float, bytes]:
    """One request over a connection of its own; returns seconds and the reply."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    writer.write(head + content)
    reply = await reader.read(-1)
    writer.close()
    if not reply.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"a request failed: {reply[:300]!r}")
    return time.perf_counter() - began, reply


def head(load: Load, content: bytes) -> bytes:
    """The request's head; the connection is closed by the server, so its end is seen."""
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
        f"authorization: Bearer {others.KEY}\r\ncontent-type: application/json\r\n"
        f"x-bathyal-script: {load.script}\r\ncontent-length: {len(content)}\r\n\r\n"
    ).encode()


async def drive(port: int, load: Load, model: str) -> tuple[list[float], float]:
    """Send a load; returns the seconds of each request and of all."""
    content = body(load, model)
    line = head(load, content)
    left = iter(range(load.requests))
    taken: list[float] = []

    async def client() -> None:
        for _ in left:
            seconds, reply = await one_request(port, line, content)
            taken.append(seconds)
            if b'"finish_reason":"length"' in reply or (load.stream and b"[DONE]" not in reply):
                raise SystemExit("a reply was cut")

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.at_once)))
    return taken, time.perf_counter() - began


def measure(
    process: subprocess.Popen[str], port: int, load: Load, model: str
) -> tuple[float, float, list[float]]:
    """Return CPU seconds per request, requests per second, and each request's seconds."""
    before = cpu_seconds(process)
    taken, seconds = asyncio.run(drive(port, load, model))
    return (cpu_seconds(process) - before) / load.requests, load.requests / seconds, taken


def tokens_of(info: ModelInfo) -> dict[str, int]:
    """How many tokens each line of the script holds."""
    from gateway.backends.scripted import encoders

    encode = encoders(info.tokenizer_path)["output"].encode
    return {
        line["name"]: len(encode(line["output"], add_special_tokens=False).ids)
        for line in script_lines()
    }


def compare(ours: Any, bare: Any, load: Load, model: str, repeats: int) -> dict[str, list[float]]:
    """Measure both servers in turn, so that the machine's moods hit both."""
    found: dict[str, list[float]] = {
        name: [] for name in ("cpu", "bare_cpu", "rate", "bare_rate", "ms", "bare_ms")
    }
    for _ in range(repeats):
        for prefix, (process, port) in (("", ours), ("bare_", bare)):
            cpu, rate, taken = measure(process, port, load, model)
            found[f"{prefix}cpu"].append(cpu)
            found[f"{prefix}rate"].append(rate)
            found[f"{prefix}ms"].append(median(taken) * 1000)
    return found


def streaming(
    ours: Any, bare: Any, model: str, info: ModelInfo, quick: bool
) -> Iterator[dict[str, Any]]:
    """CPU of streams: against the bare codec's server, and per token."""
    tokens = tokens_of(info)
    for script, tools in (("prose", False), ("call", True), ("prose8", False), ("call8", True)):
        load = Load(f"stream-{script}", script, tools, True, 4 if quick else 16, 4)
        found = compare(ours, bare, load, model, 2 if quick else 5)
        count = tokens[script]
        yield {
            "mode": load.name,
            "tokens": count,
            "tokens_per_step": 8 if script.endswith("8") else 1,
            "cpu_us_per_token": rows.spread([cpu / count * 1e6 for cpu in found["cpu"]]),
            "bare_cpu_us_per_token": rows.spread([c / count * 1e6 for c in found["bare_cpu"]]),
            "cpu_ratio": rows.spread(
                [a / b for a, b in zip(found["cpu"], found["bare_cpu"], strict=True)]
            ),
        }


def whole(ours: Any, bare: Any, model: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Whole requests: as many as possible, then one after another."""
    load = Load("whole", "short", False, False, 50 if quick else 300, 16)
    found = compare(ours, bare, load, model, 2 if quick else 5)
    yield {
        "mode": "whole-16-at-once",
        "requests_per_s": rows.spread(found["rate"]),
        "bare_requests_per_s": rows.spread(found["bare_rate"]),
        "rate_ratio": rows.spread(
            [a / b for a, b in zip(found["rate"], found["bare_rate"], strict=True)]
        ),
        "cpu_us_per_request": rows.spread([cpu * 1e6 for cpu in found["cpu"]]),
        "bare_cpu_us_per_request": rows.spread([cpu * 1e6 for cpu in found["bare_cpu"]]),
    }
    load = Load("whole", "short", False, False, 50 if quick else 200, 1)
    found = compare(ours, bare, load, model, 2 if quick else 5)
    yield {
        "mode": "whole-serial",
        "latency_ms": rows.spread(found["ms"]),
        "bare_latency_ms": rows.spread(found["bare_ms"]),
        "added_latency_ms": rows.spread(
            [a - b for a, b in zip(found["ms"], found["bare_ms"], strict=True)]
        ),
    }


def many(ours: Any, model: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Short streams a second, and the memory of streams that are open."""
    process, port = ours
    load = Load("streams", "short", False, True, 100 if quick else 600, 32)
    rates = [measure(process, port, load, model)[1] for _ in range(2 if quick else 5)]
    yield {"mode": "short-streams", "streams_per_s": rows.spread(rates)}

    count = 100 if quick else 1000
    load = Load("open", "open", False, True, count, count)
    before = resident_bytes(process)
    peak = asyncio.run(_peak(process, port, load, model))
    yield {
        "mode": "open-streams",
        "streams": count,
        "kib_per_stream": rows.spread([(peak - before) / count / 1024]),
    }


def beside(
    bin_: Path, folder: Path, info: ModelInfo, core: int | None, quick: bool
) -> Iterator[dict[str, Any]]:
    """The figures of LiteLLM's proxy and of smg, each in front of our server."""
    tokens = tokens_of(info)
    played = [line for line in script_lines() if line["name"] in ("prose", "call", "short")]
    streams, wholes = (2, 20) if quick else (8, 150)
    loads = [
        Load("stream-prose", "prose", False, True, streams, 4),
        Load("stream-call", "call", True, True, streams, 4),
        Load("whole-16-at-once", "short", False, False, wholes, 16),
        Load("whole-serial", "short", False, False, wholes, 1),
    ]
    with others.engines(folder, played, server) as ports:
        with others.litellm(bin_, folder, ports, others_port(), core) as found:
            for load in loads:
                if load.tools:
                    continue
                yield _beside("litellm", found, load, load.script, tokens, quick)
        for load in loads:
            with others.smg(bin_, ports[load.script], others_port(), core) as found:
                yield _beside("smg", found, load, "bathyal-tiny", tokens, quick)


def _beside(
    name: str, found: Any, load: Load, model: str, tokens: dict[str, int], quick: bool
) -> dict[str, Any]:
    process, port = found
    measure(process, port, load, model)  # warms up
    taken = [measure(process, port, load, model) for _ in range(1 if quick else 5)]
    row: dict[str, Any] = {"mode": f"{name}-{load.name}"}
    if load.stream:
        per_token = [cpu / tokens[load.script] * 1e6 for cpu, _, _ in taken]
        return {**row, "cpu_us_per_token": rows.spread(per_token)}
    return {
        **row,
        "cpu_us_per_request": rows.spread([cpu * 1e6 for cpu, _, _ in taken]),
        "requests_per_s": rows.spread([rate for _, rate, _ in taken]),
        "latency_ms": rows.spread([median(seconds) * 1000 for _, _, seconds in taken]),
    }


def others_port() -> int:
    """A port that is free now, and the one behind it most likely."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


async def _peak(process: subprocess.Popen[str], port: int, load: Load, model: str) -> int:
    """Drive a load; returns the most memory the server held meanwhile."""
    task = asyncio.create_task(drive(port, load, model))
    peak = 0
    while not task.done():
        peak = max(peak, resident_bytes(process))
        await asyncio.wait({task}, timeout=0.1)
    await task
    return peak


def main() -> None:
    """Measure, print, and keep the rows of a whole run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repeats, nothing is kept")
    parser.add_argument("--others", type=Path, help="folder of litellm and smg, to measure too")
    arguments = parser.parse_args()
    quick = arguments.quick
    info = EmbeddedBackend(TINY_CHECKPOINT).info
    cores = sorted(os.sched_getaffinity(0))
    core, rest = (cores[0], set(cores[1:])) if len(cores) > 1 else (None, set(cores))
    os.sched_setaffinity(0, rest)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.jsonl"
        script.write_bytes(b"\n".join(orjson.dumps(line) for line in script_lines()))
        ours_command = [
            *(sys.executable, "-m", "gateway", "serve", "--port", "0"),
            *("--backend", f"scripted:{script}", "--max-open-requests", "2000"),
        ]
        bare_command = [sys.executable, "-m", "bench.gateway_bare", str(script)]
        with server(ours_command, core) as ours, server(bare_command, core) as bare:
            figures = [
                *streaming(ours, bare, info.name, info, quick),
                *whole(ours, bare, info.name, quick),
                *many(ours, info.name, quick),
            ]
        if arguments.others is not None:
            figures += beside(arguments.others, Path(folder), info, core, quick)
    for figure in figures:
        figure |= {"bench": "gateway", "load_average_before": round(load_before, 1)}
        print(orjson.dumps(figure).decode())
    if not quick:
        made = rows.make_rows(MODULE, "cpu", figures)
        for row in made:  # where somebody keeps other gateways says nothing
            row["command"] = row["command"].replace(str(arguments.others), "DIR")
        rows.write_rows("gateway", made)


if __name__ == "__main__":
    main()
