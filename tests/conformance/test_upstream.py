"""The engine that the suite serves behind the server under test."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from conformance import load, scripts, sse
from conformance.client import HttpSender
from conformance.dialect import respell
from conformance.model import Case, Result, Variant, Verdict
from conformance.runner import Options, run
from conformance.upstream import Upstream
from conformance.vocabulary import Vocabulary, _byte_letters


def variant(cases: list[Case], name: str, **which: Any) -> Variant:
    case = next(c for c in cases if c.id == name)
    return next(
        v
        for v in load.variants([case])
        if all(getattr(v, key) == value for key, value in which.items())
    )


@contextmanager
def tokenizer(folder: Path) -> Iterator[tuple[Path, dict[int, bytes]]]:
    letters = _byte_letters()
    vocab = dict(letters.items())
    path = folder / "tokenizer.json"
    special = [{"content": "｜DSML｜", "id": 300}]
    path.write_bytes(orjson.dumps({"model": {"vocab": vocab}, "added_tokens": special}))
    yield path, {b: bytes([b]) for b in range(256)} | {300: "｜DSML｜".encode()}


async def ask(upstream: Upstream, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(f"http://127.0.0.1:{upstream.port}{path}", json=body)


def frames(reply: httpx.Response) -> list[dict[str, Any]]:
    items = sse.Decoder().feed(reply.content)
    data = [item.data for item in items if isinstance(item, sse.Frame)]
    return [orjson.loads(text) for text in data if text != "[DONE]"]


@pytest.mark.parametrize("dialect", ["v4.1", "v4"])
def test_generate_plays_ids_and_text(cases: list[Case], tmp_path: Path, dialect: str) -> None:
    """SGLang's form carries ids whose bytes are the output, growing, then the finish."""

    async def go(path: Path) -> list[dict[str, Any]]:
        upstream = Upstream(tokenizer=path)
        await upstream.start()
        upstream.play(played)
        try:
            return frames(await ask(upstream, "/generate", {"stream": True, "input_ids": [1, 2]}))
        finally:
            await upstream.aclose()

    played = variant(cases, "call/text-then-two", dialect=dialect)
    with tokenizer(tmp_path) as (path, known):
        got = asyncio.run(go(path))
    assert played.case.script is not None
    ids = got[-1]["output_ids"]

    assert respell(played.case.script.output, dialect).encode() == b"".join(known[i] for i in ids)  # type: ignore[arg-type]
    assert all(
        a["output_ids"] == b["output_ids"][: len(a["output_ids"])]
        for a, b in itertools.pairwise(got)
    )
    assert [None] * (len(got) - 1) == [g["meta_info"]["finish_reason"] for g in got[:-1]]
    assert got[-1]["meta_info"]["finish_reason"]["type"] == "stop"


def test_completions_play_text(cases: list[Case]) -> None:
    """OpenAI's completions form carries the raw output as text."""

    async def go() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        upstream = Upstream()
        await upstream.start()
        upstream.play(played)
        try:
            stream = frames(await ask(upstream, "/v1/completions", {"stream": True, "model": "m"}))
            return stream, (await ask(upstream, "/v1/completions", {"model": "m"})).json()
        finally:
            await upstream.aclose()

    played = variant(cases, "cut/in-string", dialect="v4.1")
    stream, whole = asyncio.run(go())
    assert played.case.script is not None
    text = "".join(chunk["choices"][0]["text"] for chunk in stream)

    assert played.case.script.output == text == whole["choices"][0]["text"]
    assert stream[-1]["choices"][0]["finish_reason"] == "length"


def test_chat_form_passes_the_suite_itself(cases: list[Case]) -> None:
    """What the suite serves as a chat engine is correct by the suite's own checks."""
    todo = [
        v
        for v in load.variants(load.select(cases, tiers=["scripted"]), protocols=["chat"])
        if v.case.id.split("/")[0] in {"call", "arguments", "utf8", "cut", "choices", "cancel"}
    ]

    async def go() -> Any:
        upstream = Upstream()
        await upstream.start()
        sender = HttpSender(f"http://127.0.0.1:{upstream.port}")
        options = Options(model="scripted", concurrency=1, before=upstream.play)
        try:
            return await run(todo, sender, options)
        finally:
            await sender.aclose()
            await upstream.aclose()

    bad = [
        (o.variant, o.check, o.message)
        for r in asyncio.run(go()).results
        for o in r.outcomes
        if o.verdict in {Verdict.FAIL, Verdict.ERROR}
    ]
    assert bad == []


@pytest.mark.parametrize("passes_on", [True, False])
def test_engine_sees_whether_it_was_abandoned(cases: list[Case], passes_on: bool) -> None:
    """A server that hangs up on its engine when its client left passes, one that reads on fails."""

    async def go() -> Result:
        upstream = Upstream()
        await upstream.start()
        relays: set[asyncio.Task[None]] = set()
        writers: set[asyncio.StreamWriter] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Relays one exchange; the client's end of file ends it, or is not looked at."""
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            body = await reader.readexactly(size)
            from_engine, to_engine = await asyncio.open_connection("127.0.0.1", upstream.port)
            writers.update({writer, to_engine})
            to_engine.write(head + body)

            async def relay() -> None:
                while data := await from_engine.read(65536):
                    writer.write(data)

            task = asyncio.ensure_future(relay())
            relays.add(task)
            if passes_on:
                await reader.read()
                task.cancel()
                to_engine.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        sender = HttpSender(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        options = Options(
            model="m", concurrency=1, before=upstream.play, left=lambda _: upstream.left(0.5)
        )
        try:
            found = await run([variant(cases, "cancel/stops-engine")], sender, options)
            return found.results[0]
        finally:
            server.close()
            for task in relays:
                task.cancel()
            for writer in writers:
                writer.close()
            await asyncio.gather(*(w.wait_closed() for w in writers), return_exceptions=True)
            await sender.aclose()
            await upstream.aclose()

    result = asyncio.run(go())

    assert [o.check for o in result.outcomes] == ["cancel/engine-stops"]
    assert result.verdict is (Verdict.PASS if passes_on else Verdict.FAIL)


def test_abandoned_reply_is_skipped_without_an_engine_to_look_at(cases: list[Case]) -> None:
    """Where the engine is not the suite's, the case is skipped with that reason."""

    async def go() -> Result:
        sender = HttpSender("http://127.0.0.1:9")
        try:
            found = await run([variant(cases, "cancel/stops-engine")], sender, Options(model="m"))
            return found.results[0]
        finally:
            await sender.aclose()

    result = asyncio.run(go())

    assert result.verdict is Verdict.SKIP
    assert "--upstream" in result.outcomes[0].message


def test_bytes_that_are_no_text_are_played_as_ids(cases: list[Case], tmp_path: Path) -> None:
    """U+FFFD in an output stands for the case's bytes, a token each, in both forms of playing."""

    async def go(path: Path) -> list[dict[str, Any]]:
        upstream = Upstream(tokenizer=path)
        await upstream.start()
        upstream.play(played)
        try:
            return frames(await ask(upstream, "/generate", {"stream": True}))
        finally:
            await upstream.aclose()

    played = variant(cases, "half/before-text")
    with tokenizer(tmp_path) as (path, known):
        got = asyncio.run(go(path))
        line = scripts.line(played, Vocabulary(path))
    assert line is not None

    assert b"".join(known[i] for i in got[-1]["output_ids"]) == b"\xf0\x92zz"
    assert line["token_ids"] == got[-1]["output_ids"]
    assert scripts.line(played) is None


def test_fault_in_a_script_breaks_off(cases: list[Case]) -> None:
    """A script that dies ends without finish and [DONE]; a whole reply is a 500."""

    async def go() -> tuple[httpx.Response, httpx.Response]:
        upstream = Upstream()
        await upstream.start()
        upstream.play(variant(cases, "fault/in-answer"))
        try:
            return (
                await ask(upstream, "/v1/completions", {"stream": True}),
                await ask(upstream, "/v1/completions", {}),
            )
        finally:
            await upstream.aclose()

    stream, whole = asyncio.run(go())
    assert b"[DONE]" not in stream.content
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in frames(stream))
    assert whole.status_code == 500
