"""The longest that anything holds the event loop, with the largest requests and replies.

    python -m bench.gateway_loop

The application runs in this process over played tokens. Every callback of the loop is timed twice: by
the CPU time of the loop's thread, which says what the code on the loop costs and is what the limit
of issue 3 (5 ms) is for, and by the wall clock, in which it may also wait for the interpreter that a
worker's thread holds, or for the machine. Rows go to bench/results/gateway-loop.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import orjson

from bench import rows
from engine import TINY_CHECKPOINT
from gateway import Settings, create_app
from gateway.backends.embedded import EmbeddedBackend
from gateway.backends.scripted import Line, ScriptedBackend
from gateway.launch import keep_loop_free
from tests.gateway.support import RawCall

CONTEXT = 1 << 20
LIMIT_SECONDS = 0.005
TEXT = "the answer is a number of words, each as plain as the next one; "
#: Tokens of TEXT, at most; prompts and outputs are sized by it.
PER_TEXT = 34
ROW = '{"path": "a/b.txt", "line": 17, "tags": ["x", "y"], "text": "some words of a plain kind"}'
TOOL = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {
                "rows": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "path": {"type": "string", "pattern": "^[a-z/.]+$"},
                            "line": {"type": "integer", "minimum": 0},
                            "tags": {"type": "array", "items": {"type": "string"}},
                            "text": {"type": "string"},
                        },
                        "required": ["path", "line"],
                    },
                }
            },
        },
    },
}
CALL = (
    '</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="edit">\n'
    '<｜DSML｜ parameter name="rows" string="false">[{}]</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@dataclass
class Watch:
    """What the loop's callbacks took."""

    callbacks: int = 0
    longest_cpu: float = 0.0
    longest_wall: float = 0.0
    long: int = 0


@contextmanager
def watched() -> Iterator[Watch]:
    """Time every callback that runs in the meantime."""
    watch = Watch()
    run = asyncio.events.Handle._run

    def timed(handle: Any) -> None:
        cpu, wall = time.thread_time(), time.perf_counter()
        run(handle)
        taken = time.thread_time() - cpu
        watch.callbacks += 1
        watch.long += taken > LIMIT_SECONDS
        watch.longest_wall = max(watch.longest_wall, time.perf_counter() - wall)
        watch.longest_cpu = max(watch.longest_cpu, taken)

    with mock.patch.object(asyncio.events.Handle, "_run", timed):
        yield watch


@dataclass(frozen=True)
class Load:
    """One request.

    Args:
        mode: name of the row.
        path: where it goes.
        body: what is sent.
        line: what is played.
        slow_reader: whether what is sent is taken late, so that steps are joined.
    """

    mode: str
    path: str
    body: dict[str, Any]
    line: str = "short"


def text(tokens: int) -> str:
    """About so many tokens of prompt."""
    return TEXT * (tokens // PER_TEXT)


def loads() -> list[Load]:
    """The largest of each kind."""
    user = [{"role": "user", "content": "Go on."}]
    chat, million = "/v1/chat/completions", text(900_000)
    long = [{"role": "user", "content": million}]
    many = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}] * 4_999
    refused = [{"role": "user", "content": "x" * (31 << 20)}]
    tools = [
        {**TOOL, "function": {**TOOL["function"], "name": f"edit{i}"}}  # type: ignore[dict-item]
        for i in range(1000)
    ]
    return [
        Load("body-32-mib-refused", chat, {"messages": refused}),
        Load("prompt-million", chat, {"messages": long, "stream": True}),
        Load("prompt-million-messages", "/v1/messages", {"messages": long, "max_tokens": 99}),
        Load("prompt-million-responses", "/v1/responses", {"input": million}),
        Load("prompt-million-completions", "/v1/completions", {"prompt": million}),
        Load("prompt-million-count", "/v1/messages/count_tokens", {"messages": long}),
        Load("prompt-million-tokenize", "/v1/tokenize", {"prompt": million}),
        Load(
            "prompt-million-forced",
            chat,
            {"messages": long, "tools": [TOOL], "tool_choice": "required", "stream": True},
            "forced, forced-call",
        ),
        Load("messages-ten-thousand", chat, {"messages": [*many, *user], "stream": True}),
        Load("tools-thousand", chat, {"messages": user, "tools": tools, "stream": True}),
        Load(
            "body-just-below-a-thread",
            chat,
            {"messages": [{"role": "user", "content": "x " * 1900}]},
        ),
        Load("reply-200k-stream", chat, {"messages": user, "stream": True}, "long"),
        Load("reply-200k-whole", chat, {"messages": user}, "long"),
        Load("reply-200k-gated", chat, {"messages": user, "tools": [TOOL]}, "long"),
        Load("reply-200k-responses", "/v1/responses", {"input": "q", "stream": True}, "long"),
        Load(
            "reply-200k-messages", "/v1/messages", {"messages": user, "max_tokens": 250_000}, "long"
        ),
        Load("step-of-30k-tokens", chat, {"messages": user, "stream": True}, "lump"),
        Load(
            "step-of-30k-tokens-completions",
            "/v1/completions",
            {"prompt": "q", "max_tokens": 250_000},
            "lump",
        ),
        Load("call-100k-stream", chat, {"messages": user, "tools": [TOOL], "stream": True}, "call"),
        Load("call-100k-whole", chat, {"messages": user, "tools": [TOOL]}, "call"),
        Load(
            "call-of-one-step",
            chat,
            {"messages": user, "tools": [TOOL], "stream": True},
            "small-call",
        ),
        Load(
            "json-100k",
            chat,
            {
                "messages": [{"role": "user", "content": "As JSON."}],
                "response_format": {"type": "json_object"},
                "stream": True,
            },
            "json",
        ),
    ]


def lines() -> list[Line]:
    """What is played."""
    rows_ = ", ".join([ROW] * 3000)
    return [
        Line("output", "</think>Well.", name="short"),
        Line("output", text(190_000) + "</think>" + text(20_000), name="long", tokens_per_step=8),
        Line(
            "output", text(20_000) + "</think>" + text(20_000), name="lump", tokens_per_step=30_000
        ),
        Line("output", CALL.format(rows_), name="call", tokens_per_step=8),
        Line("output", CALL.format(ROW), name="small-call", tokens_per_step=300),
        Line("output", f"</think>[{rows_}]", name="json", tokens_per_step=8),
        Line("output", "Thinking.</think>", name="forced"),
        Line(
            "output",
            '<｜DSML｜ parameter name="rows" string="false">[]</｜DSML｜ parameter>\n'
            "</｜DSML｜ invoke>\n</｜DSML｜ calls>",
            name="forced-call",
        ),
    ]


async def play(app: Any, load: Load) -> tuple[Watch, int, float]:
    """Send one request and take its reply; returns what the loop did, the status and the seconds."""
    body = orjson.dumps({"model": "bathyal-tiny", **load.body})
    parts = [body[i : i + 65_536] for i in range(0, len(body), 65_536)]
    began = time.perf_counter()
    with watched() as watch:
        call = RawCall(app, load.path, b"", parts=parts, headers={"x-bathyal-script": load.line})
        status, _ = await call.start()
        more = True
        while more:
            more = (await call.message()).get("more_body", False)
        await call.task
    return watch, status, time.perf_counter() - began


async def measure(folder: Path) -> list[dict[str, Any]]:
    """Send every load, in a row; two keep the store and the record busy too."""
    info = replace(EmbeddedBackend(TINY_CHECKPOINT).info, max_model_len=CONTEXT)
    backend = ScriptedBackend(lines(), info)
    settings = Settings(record=folder / "record.jsonl", log="error")
    app = create_app(settings, backend)
    found = []
    async with app.router.lifespan_context(app):
        keep_loop_free()
        for load in [Load("warm-up", *_rest(one)) for one in loads()[-3:]] + loads():
            watch, status, seconds = await play(app, load)
            if load.mode == "warm-up":
                continue
            found.append(
                {
                    "bench": "gateway-loop",
                    "mode": load.mode,
                    "status": status,
                    "seconds": round(seconds, 2),
                    "callbacks": watch.callbacks,
                    "longest_cpu_ms": round(watch.longest_cpu * 1000, 2),
                    "longest_wall_ms": round(watch.longest_wall * 1000, 2),
                    "over_5_ms_cpu": watch.long,
                }
            )
            print({k: v for k, v in found[-1].items() if k not in ("bench",)}, flush=True)
    return found


def _rest(load: Load) -> tuple[str, dict[str, Any], str]:
    return load.path, load.body, load.line


def main() -> None:
    """Measure, print, keep."""
    # It has no flags: a question or a mistyped one must not write rows.
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder)))
    print(rows.write_rows("gateway-loop", rows.make_rows("bench.gateway_loop", "cpu", figures)))


if __name__ == "__main__":
    main()
