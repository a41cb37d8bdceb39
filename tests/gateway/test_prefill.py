"""Prefill modes and prompt log-probabilities through the gateway."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine.api import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from gateway import Settings
from gateway.app import served_model
from gateway.launch import open_backend
from gateway.metrics import Metrics
from gateway.recorder import replay
from parsers import PROFILES, Codec
from tests.gateway.support import (
    EOS,
    FunctionBackend,
    RawCall,
    call,
    chat_body,
    data_frames,
    run,
    running,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS: dict[str, dict[str, Any]] = {
    CHAT: chat_body(),
    COMPLETIONS: {"model": "test-model", "prompt": "one two three four", "max_tokens": 4},
}
HEADER, PARITY = "x-bathyal-prefill", "x-bathyal-trainer-parity"


async def told(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
    """A backend that says it did as asked, and scores the prompt's tokens by their position."""
    length, start = len(request.prompt_ids), request.prompt_logprobs_start
    mode, scores = request.prefill or "off", None
    if request.prompt_logprobs is not None:
        rivals = tuple((7 + i, -9.0) for i in range(request.prompt_logprobs))
        scores = tuple(TokenLogprob(-float(p), rivals) if p else None for p in range(start, length))
    usage = Usage(length, 1, prefill=mode, prefill_reason="why", tail_rows=3)
    yield TokenDelta(request.id, (5,), None, None, usage, None, scores)
    yield TokenDelta(request.id, (EOS,), None, FinishReason.STOP, usage)


def ask(info: ModelInfo, path: str, fields: dict[str, Any], headers: dict[str, str] | None = None, **settings: Any) -> tuple[int, dict[str, Any], list[GenerateRequest]]:  # fmt: skip
    async def main() -> tuple[int, dict[str, Any], list[GenerateRequest]]:
        backend = FunctionBackend(info, told)
        async with running(backend, **settings) as app:
            status, reply = await call(app, path, {**PATHS[path], **fields}, headers=headers or {})
        return status, reply, backend.requests

    return run(main())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["off", "exact", "bounded"])
def test_a_header_chooses_the_mode(info: ModelInfo, path: str, mode: str) -> None:
    """It reaches the engine, and the reply says what was done."""
    status, reply, (request,) = ask(info, path, {}, {HEADER: mode.upper()})

    assert status == 200
    assert (request.prefill, request.trainer_parity) == (mode, False)
    assert reply["bathyal"]["prefill"] == {"mode": mode, "tail_rows": 3, "reason": "why"}


@pytest.mark.parametrize("path", PATHS)
def test_without_a_header_nothing_is_said(info: ModelInfo, path: str) -> None:
    """The server's setting holds, and a reply processed as ever looks as ever."""
    status, reply, (request,) = ask(info, path, {})

    assert status == 200
    assert (request.prefill, request.trainer_parity, request.prompt_logprobs) == (None, False, None)
    assert "bathyal" not in reply
    assert "prompt_logprobs" not in reply["choices"][0]


def test_parity_is_passed_on(info: ModelInfo) -> None:
    """A second header rules approximations out."""
    _, _, (request,) = ask(info, CHAT, {}, {PARITY: "true"})

    assert (request.prefill, request.trainer_parity) == (None, True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "headers", "message"),
    [
        ({}, {HEADER: "fast"}, "x-bathyal-prefill: expected one of off, exact, bounded, got 'fast'"),
        ({}, {PARITY: "1"}, "x-bathyal-trainer-parity: expected true or false, got '1'"),
        ({}, {HEADER: "bounded", PARITY: "true"}, "x-bathyal-prefill: expected off or exact beside x-bathyal-trainer-parity: true, got 'bounded'"),
        ({"prompt_logprobs": 21}, {}, "prompt_logprobs: expected an integer in [0, 20], got the number 21"),
        ({"prompt_logprobs": True}, {}, "prompt_logprobs: expected an integer in [0, 20], got true"),
        ({"prompt_logprobs_start": 1}, {}, "prompt_logprobs_start: needs prompt_logprobs"),
        ({"prompt_logprobs": 0, "prompt_logprobs_start": 9999}, {}, "prompt_logprobs_start: expected a position of the prompt of"),
    ],
)  # fmt: skip
def test_bad_values_are_refused(
    info: ModelInfo, path: str, fields: dict[str, Any], headers: dict[str, str], message: str
) -> None:
    """Status 400 with the name, what was expected and what came; nothing is generated."""
    status, reply, requests = ask(info, path, fields, headers)

    assert status == 400
    assert message in reply["error"]["message"]
    assert requests == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("start", [0, 2])
def test_scores_of_a_prompt(info: ModelInfo, path: str, start: int) -> None:
    """One entry per prompt token from the asked one on, spelled, with its rivals."""
    fields = {"prompt_logprobs": 2, "prompt_logprobs_start": start}
    status, reply, (request,) = ask(info, path, fields)

    assert status == 200
    assert (request.prompt_logprobs, request.prompt_logprobs_start) == (2, start)
    holder = reply["bathyal"] if path == CHAT else reply["choices"][0]
    scores = holder["prompt_logprobs"]
    assert len(scores) == len(request.prompt_ids) - start
    assert (scores[0] is None) == (start == 0)
    for position, score in enumerate(scores, start):
        if score is not None:
            assert score["token_id"] == request.prompt_ids[position]
            assert score["logprob"] == -position
            assert [top["token_id"] for top in score["top_logprobs"]] == [7, 8]
    assert isinstance(scores[1]["token"], str)
    assert "prompt_logprobs" not in ask(info, path, {}, {HEADER: "exact"})[1].get("bathyal", {})


def test_a_stream_ends_with_them(info: ModelInfo) -> None:
    """The last chunk carries what a whole reply does."""

    async def main() -> bytes:
        async with running(FunctionBackend(info, told)) as app:
            body = orjson.dumps({**PATHS[CHAT], "stream": True, "prompt_logprobs": 0})
            one = RawCall(app, CHAT, body, headers={HEADER: "bounded"})
            await one.start()
            return await one.rest()

    chunks = [frame for frame in data_frames(run(main())) if isinstance(frame, dict)]
    extensions = [chunk.get("bathyal") for chunk in chunks]
    assert extensions[:-1] == [None] * (len(chunks) - 1)
    assert extensions[-1]["prefill"]["mode"] == "bounded"
    assert extensions[-1]["prompt_logprobs"][0] is None


@pytest.mark.parametrize("path", PATHS)
def test_a_record_plays_again(info: ModelInfo, path: str, tmp_path: Path) -> None:
    """What was told of the prompt is recorded with the steps."""
    record = tmp_path / "record.jsonl"
    ask(info, path, {"prompt_logprobs": 1}, {HEADER: "exact"}, record=record)

    model = served_model(Settings(), FunctionBackend(info, told))
    assert list(replay(record, Codec.load(model, PROFILES["agent"]))) == [None]


def test_the_whole_way() -> None:
    """With the checkpoint that ships: a server of bounded prefill, scores equal to those of off."""
    settings = Settings(device="cpu", prefill="bounded")
    words = " ".join(f"word{i}" for i in range(150))

    async def main() -> dict[str, dict[str, Any]]:
        backend = open_backend(settings)
        found = {}
        async with running(backend) as app:
            name = backend.info.name
            for mode in ("", "off", "exact", "bounded"):
                for scores in (None, 0):
                    body = {"model": name, "prompt": words, "max_tokens": 2, "temperature": 0}
                    if scores is not None:
                        body["prompt_logprobs"] = scores
                    headers = {HEADER: mode} if mode else {}
                    status, reply = await call(app, COMPLETIONS, body, headers=headers)
                    assert status == 200, reply
                    found[f"{mode} {scores}"] = reply
        return found

    found = run(main())
    plain = {
        name: reply["bathyal"]["prefill"] for name, reply in found.items() if "bathyal" in reply
    }
    length = found["off None"]["usage"]["prompt_tokens"]
    assert length > 300
    assert plain[" None"] == {"mode": "bounded", "tail_rows": 128}
    assert plain["off None"]["tail_rows"] == length
    assert plain["bounded 0"] == {
        "mode": "exact",
        "tail_rows": length,
        "reason": "prompt logprobs from row 0",
    }
    want = found["off 0"]["choices"][0]["prompt_logprobs"]
    for mode in ("", "exact", "bounded"):
        got = found[f"{mode} 0"]["choices"][0]["prompt_logprobs"]
        assert len(got) == len(want) == length
        for mine, theirs in zip(got[1:], want[1:], strict=True):
            assert mine["token_id"] == theirs["token_id"]
            assert math.isclose(mine["logprob"], theirs["logprob"], abs_tol=1e-4)


def test_rows_left_out_are_a_metric() -> None:
    """By mode, as the backend counts them."""
    stats = EngineStats(tail_rows=(("off", 40, 0), ("bounded", 256, 7936)))
    text = Metrics(lambda: stats).text().decode()

    name = "bathyal_backend_tail_rows_total"
    assert f'{name}{{prefill="off",rows="processed"}} 40.0' in text
    assert f'{name}{{prefill="bounded",rows="processed"}} 256.0' in text
    assert f'{name}{{prefill="bounded",rows="left_out"}} 7936.0' in text
