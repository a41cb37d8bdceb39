"""Records of exchanges, and their replay by today's parsers."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine import TINY_CHECKPOINT
from engine.api import ModelInfo
from gateway.app import served_model
from gateway.backends.scripted import Line, ScriptedBackend
from gateway.cli import main
from gateway.recorder import ReplayError, replay
from gateway.settings import Settings
from parsers import PROFILES, Codec
from tests.gateway.support import RawCall, call, chat_body, run, running, text_line

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
CALL = (
    'why</think>so\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="true">x</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    "</｜DSML｜ calls>"
)
REST = CALL.partition('name="f">\n')[2]
FORCED = {"tool_choice": {"type": "function", "function": {"name": "f"}}}
ON = {"thinking": {"type": "enabled"}}


def recorded(info: ModelInfo, path: Path, lines: list[Line], asks: list[Any]) -> None:
    """Play (path, body, headers) triples against a recording server."""

    async def work() -> None:
        async with running(ScriptedBackend(lines, info), record=path) as app:
            for url, body, headers in asks:
                one = RawCall(app, url, orjson.dumps(body), headers=headers)
                await one.start()
                await one.rest()

    run(work())


def differences(info: ModelInfo, path: Path, profile: str = "agent") -> list[Any]:
    model = served_model(Settings(), ScriptedBackend([text_line("a")], info))
    return list(replay(path, Codec.load(model, PROFILES[profile])))


def asks() -> list[Any]:
    user = [{"role": "user", "content": "?"}]
    responses_tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    messages_tool = {"name": "f", "input_schema": {"type": "object"}}
    rows: list[Any] = []
    for stream in (False, True):
        raw = {"model": "test-model", "prompt": "?", "stream": stream}
        plain = {"x-bathyal-script": "plain"}
        rows += [
            ("/v1/completions", raw, plain),
            ("/v1/completions", {**raw, "logprobs": 1, "stop": "x"}, plain),
            (
                "/v1/chat/completions",
                chat_body(stream=stream, logprobs=True, top_logprobs=2),
                plain,
            ),
            ("/v1/chat/completions", chat_body(tools=[TOOL], stream=stream, **ON), {}),
            (
                "/v1/chat/completions",
                chat_body(tools=[TOOL], stream=stream, **ON, **FORCED),
                {"x-bathyal-script": "call, rest"},
            ),
            (
                "/v1/chat/completions",
                chat_body(tools=[TOOL], stream=stream, **FORCED),
                {"x-bathyal-script": "plain, rest"},  # tried once more
            ),
            (
                "/v1/chat/completions",
                chat_body(tools=[TOOL], stream=stream, **FORCED),
                {"x-bathyal-script": "other"},  # twice: an error
            ),
            (
                "/v1/chat/completions",
                chat_body(n=2, stream=stream),
                {"x-bathyal-script": "call"},
            ),
            (
                "/v1/responses",
                {
                    "model": "test-model",
                    "input": "?",
                    "stream": stream,
                    "tools": [responses_tool],
                },
                {"x-bathyal-script": "call"},
            ),
            (
                "/v1/messages",
                {
                    "model": "test-model",
                    "max_tokens": 300,
                    "messages": user,
                    "stream": stream,
                    "tools": [messages_tool],
                    "thinking": {"type": "enabled", "budget_tokens": 1024},
                },
                {"x-bathyal-script": "call"},
            ),
            ("/v1/chat/completions", chat_body(), {"x-bathyal-script": "broken"}),
        ]
    return rows


LINES = [
    text_line(CALL, name="call"),
    text_line(REST, name="rest"),
    text_line("abc", name="broken", finish="error"),
    text_line("abc, x", name="plain"),
    text_line('<｜DSML｜ invoke name="rm">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>', name="other"),
]


def test_a_replay_of_every_protocol_comes_out_the_same(info: ModelInfo, tmp_path: Path) -> None:
    """Streams and whole replies, two generations, several choices, faults: no difference."""
    path = tmp_path / "record.jsonl"
    recorded(info, path, LINES, asks())

    found = differences(info, path)
    assert found == [None] * len(asks())
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert {line["protocol"] for line in lines} == {
        *("chat", "responses", "messages", "completions")
    }
    assert [len(line["choices"][0]["generations"]) for line in lines].count(2) == 6
    assert [line["failure"] for line in lines].count("backend_error") == 2
    assert [line["failure"] for line in lines].count("forced_call_missing") == 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"reply":"', b'"reply":"x', "byte 0"),
        (b'"profile":"agent"', b'"profile":"official"', "recorded under profile 'official'"),
        (b'\\"model\\":\\"test-model\\"', b'\\"model\\":\\"other\\"', "refused now"),
    ],
)
def test_a_difference_is_shown(
    info: ModelInfo, tmp_path: Path, old: bytes, new: bytes, words: str
) -> None:
    """A record whose reply, profile or request is not what it was is told apart from the rest."""
    path = tmp_path / "record.jsonl"
    recorded(info, path, LINES, asks()[:1])
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))

    (found,) = differences(info, path)
    assert words in found.text


def test_other_tokens_are_another_reply(info: ModelInfo, tmp_path: Path) -> None:
    """The replay is made of the recorded tokens, not of the recorded reply."""
    path = tmp_path / "record.jsonl"
    recorded(info, path, [text_line("abc")], [("/v1/chat/completions", chat_body(), {})])
    record = orjson.loads(path.read_bytes())
    record["choices"][0]["generations"][0][0] = record["choices"][0]["generations"][0][1]
    path.write_bytes(orjson.dumps(record))

    (found,) = differences(info, path)
    assert "recorded" in found.text
    assert "bbc" in found.text


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (b"{", "no JSON: "),
        (b"[]", "expected a JSON object"),
        (b"{}", "it has no 'profile'"),
        (b'{"profile": "agent"}', "it has no 'body'"),
    ],
)
def test_a_file_that_is_no_record_is_refused(
    info: ModelInfo, tmp_path: Path, row: bytes, why: str
) -> None:
    """The error names the line and what is missing there."""
    path = tmp_path / "record.jsonl"
    path.write_bytes(b"\n" + row)

    with pytest.raises(ReplayError, match=f"line 2: not a record: {why}"):
        differences(info, path)


def test_restored_reasoning_is_lent_again(info: ModelInfo, tmp_path: Path) -> None:
    """A turn whose reasoning came from the cache is replayed without that cache."""
    path = tmp_path / "record.jsonl"

    async def work() -> None:
        backend = ScriptedBackend([text_line(CALL), text_line("x</think>y")], info)
        async with running(backend, record=path) as app:
            body = chat_body(tools=[TOOL], **ON)
            _, first = await call(app, "/v1/chat/completions", body)
            message = {**first["choices"][0]["message"], "reasoning_content": None}
            result = {
                "role": "tool",
                "tool_call_id": message["tool_calls"][0]["id"],
                "content": "r",
            }
            messages = [*body["messages"], message, result]
            await call(app, "/v1/chat/completions", {**body, "messages": messages})

    run(work())
    assert orjson.loads(path.read_bytes().splitlines()[1])["reasoning"]
    assert differences(info, path) == [None, None]


def test_a_client_that_left_is_recorded_as_far_as_it_went(info: ModelInfo, tmp_path: Path) -> None:
    """The tokens up to there are the ones that a replay needs."""
    path = tmp_path / "record.jsonl"

    async def work() -> None:
        backend = ScriptedBackend([text_line("a" * 1000, delay_ms=5)], info)
        async with running(backend, record=path) as app:
            one = RawCall(app, "/v1/chat/completions", orjson.dumps(chat_body(stream=True)))
            await one.start()
            await asyncio.sleep(0.05)
            one.leave()
            await one.task

    run(work())
    (line,) = [orjson.loads(row) for row in path.read_bytes().splitlines()]
    assert line["failure"] == "left"
    assert line["choices"][0]["generations"][0]
    assert differences(info, path) == [None]


def test_nothing_is_recorded_unasked(info: ModelInfo, tmp_path: Path) -> None:
    """Without the setting no file is written."""

    async def work() -> None:
        async with running(ScriptedBackend([text_line("a")], info)) as app:
            await call(app, "/v1/chat/completions", chat_body())

    run(work())
    assert not list(tmp_path.iterdir())


def test_the_command_tells_how_many_differ(
    info: ModelInfo,
    tmp_path: Path,
    tokenizer_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`bathyal replay` exits with 0 where all is as it was, else with 1."""
    model = tmp_path / "test-model"
    model.mkdir()
    shutil.copy(TINY_CHECKPOINT / "config.json", model)
    shutil.copy(tokenizer_path, model / "tokenizer.json")
    path = tmp_path / "record.jsonl"
    recorded(info, path, LINES, asks()[:2])
    body = rb'"model\":\"test-model\"'
    assert body in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(b"test-model", b"other-name"))
    arguments = ["replay", str(path), "--model", str(model)]

    assert main(arguments) == 0
    assert capsys.readouterr().out == "2 exchanges, 0 otherwise than recorded\n"
    path.write_bytes(path.read_bytes().replace(b'"reply":"', b'"reply":"x', 1))
    assert main(arguments) == 1
    said = capsys.readouterr().out
    assert said.startswith("line 1, ")
    assert said.endswith("2 exchanges, 1 otherwise than recorded\n")
    assert main([*arguments[:1], str(tmp_path / "none"), *arguments[2:]]) == 2
