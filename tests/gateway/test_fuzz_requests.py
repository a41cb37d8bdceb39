"""The fuzz of requests: some of its cases, what it has found, and faults that it would see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway import plain
from gateway.call import whole_number
from parsers import ClientError, chat_messages, responses
from tests.gateway import fuzz_requests
from tests.gateway.fuzz_bodies import IMAGE, KEPT, RICH, STRICT
from tests.gateway.fuzz_requests import GOOD, BrokenError, Case, Servers, rendered
from tests.gateway.support import run

MODEL = {"model": "test-model"}
ASK = {"role": "user", "content": "U"}
DEEP = b"[" * 1000 + b"]" * 1000
KEPT_ONLY = {**MODEL, "previous_response_id": KEPT}
SEARCHED = {
    **MODEL,
    "input": [
        {"type": "tool_search_call", "call_id": "c", "arguments": {}},
        {
            "type": "tool_search_output",
            "call_id": "c",
            "tools": [{"type": "custom", "name": "k", "description": "d"}],
        },
    ],
}


def shaped(schema: Any) -> dict[str, Any]:
    shape = {"format": {"type": "json_schema", "schema": schema}}
    return {**MODEL, "max_tokens": 9, "messages": [ASK], "output_config": shape}


def filed(data: str) -> dict[str, Any]:
    part = {"type": "file", "file": {"filename": "a.png", "file_data": data}}
    return {**MODEL, "messages": [{"role": "user", "content": [part]}]}


def tool(**fields: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    return {
        **MODEL,
        "messages": [ASK],
        "tools": [{"type": "function", "function": {**function, **fields}}],
    }


async def played(folder: Path, cases: list[Case]) -> Servers:
    async with Servers(folder) as servers:
        for case in cases:
            await servers.check(case)
    return servers


def ask(folder: Path, server: str, protocol: str, body: bytes) -> tuple[int, Any]:
    async def main() -> tuple[int, Any]:
        async with Servers(folder) as servers:
            case = Case(0, server, protocol, body, {}, "")
            await servers.check(case)
            status, reply = await servers.send(servers.apps[server], protocol, servers.filled(case))
            return status, orjson.loads(reply)

    return run(main())


def test_the_first_cases_hold(tmp_path: Path) -> None:
    """All servers and endpoints are among them, and replies as well as refusals."""
    cases = [fuzz_requests.make(0, number) for number in range(10_000)]
    servers = run(played(tmp_path, cases))

    assert {case.server for case in cases} == set(fuzz_requests.SETTINGS)
    assert {case.protocol for case in cases} == set(fuzz_requests.PATHS)
    assert {200, 400, 415} <= set(servers.statuses) <= {200, 400, 413, 415, 502}
    assert servers.statuses[200] > 1000


@pytest.mark.parametrize("server", ["agent", "sees"])
def test_the_good_bodies_are_good(tmp_path: Path, server: str) -> None:
    """Changes of a body that is refused as it stands would find little."""

    async def main() -> list[int]:
        async with Servers(tmp_path) as servers:
            return [
                (
                    await servers.send(
                        servers.apps[server],
                        protocol,
                        servers.filled(Case(0, server, protocol, rendered(body), {}, "")),
                    )
                )[0]
                for protocol, body in GOOD[: len(RICH)]
            ]

    assert run(main()) == [200] * len(RICH)


def test_a_case_is_a_function_of_its_number() -> None:
    """So that what was found can be played again."""
    assert fuzz_requests.make(0, 5) == fuzz_requests.make(0, 5)
    assert fuzz_requests.make(0, 5) != fuzz_requests.make(1, 5)


FOUND: dict[str, tuple[str, str, bytes, int, str]] = {
    "a format's schema that is none": (
        "agent",
        "messages",
        rendered(shaped({"type": "object", "required": [{}]})),
        400,
        "output_config.format.schema: expected a JSON Schema: $.required[0]: ",
    ),
    "properties that are a list": (
        "agent",
        "messages",
        rendered(shaped({"type": "object", "properties": [1]})),
        400,
        "output_config.format.schema: expected a JSON Schema: $.properties: ",
    ),
    "a deep body that may be a background one": (
        "agent",
        "responses",
        b'{"model": "test-model", "input": "U", "background": true, "x": %b}' % DEEP,
        400,
        "request body: nesting is too deep",
    ),
    "a deep body that may hold images": (
        "sees",
        "responses",
        b'{"model": "test-model", "input": %b}' % DEEP,
        400,
        "request body: nesting is too deep",
    ),
    "a deep name of a parser": (
        "agent",
        "separate",
        b'{"text": "x", "reasoning_parser": %b}' % DEEP,
        400,
        "request body: nesting is too deep",
    ),
    "a stored response and no further input": ("agent", "responses", rendered(KEPT_ONLY), 200, ""),
    "custom tools that only a search declares": ("agent", "responses", rendered(SEARCHED), 200, ""),
    "calls of a user": (
        "agent",
        "chat",
        rendered({**MODEL, "messages": [{**ASK, "tool_calls": {"type": "x"}}]}),
        200,
        "",
    ),
    "an image as a file for a model that does not see": (
        "agent",
        "chat",
        rendered(filed(IMAGE)),
        400,
        "messages[0].content[0]: model 'test-model' cannot take images",
    ),
    "a file that only says that it is an image": (
        "sees",
        "chat",
        rendered(filed("data:image/png;base64,Rg==")),
        400,
        "messages[0].content[0].file_data: expected a PNG, JPEG, GIF or WebP image",
    ),
    "a part of the body that the codec refuses without its path": (
        "agent",
        "messages",
        rendered(
            {**MODEL, "max_tokens": 9, "messages": [ASK], "system": [{"type": [], "text": "S"}]}
        ),
        400,
        "system[0]",
    ),
    "a strict tool whose schema the codec does not take": (
        "agent",
        "chat",
        rendered(tool(strict=True, parameters={**STRICT, "properties": {"a": {}}})),
        400,
        "tools[0]: Invalid tool parameters schema",
    ),
    "a part of the only message": (
        "agent",
        "chat",
        rendered({**MODEL, "messages": [{**ASK, "name": {}}]}),
        400,
        "messages[0].name: ",
    ),
    "a value that the codec repeats in full": (
        "agent",
        "chat",
        rendered(tool(parameters={"type": "object", "required": "x" * 5000})),
        400,
        "Invalid schema for function 'f'",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(tmp_path: Path, name: str) -> None:
    """Most of it was a 500; the message names the place, and is short."""
    server, protocol, body, wanted, words = FOUND[name]

    status, reply = ask(tmp_path, server, protocol, body)

    assert status == wanted, reply
    if words:
        assert reply["error"]["message"].startswith(words)
        assert len(reply["error"]["message"]) <= 1003


@pytest.mark.parametrize("text", ["", "-1", "x", "1.5", "²", "9" * 5000])
def test_numbers_of_headers_and_queries(text: str) -> None:
    """Python converts no number of some thousand digits: it raises, which was a 500."""
    assert whole_number(text) is None
    assert whole_number("17") == 17


def test_a_limit_of_any_length_is_refused(tmp_path: Path) -> None:
    """400 with the range."""

    async def main() -> tuple[int, bytes]:
        async with Servers(tmp_path) as servers:
            path = f"/v1/responses/{servers.kept['agent']['id']}/input_items"
            return await servers.send(
                servers.apps["agent"],
                "",
                b"",
                path=path,
                method="GET",
                query=b"limit=" + b"9" * 5000,
            )

    status, reply = run(main())
    assert status == 400
    assert orjson.loads(reply)["error"]["message"].startswith("limit: expected 1 to 100, got ")


def crash(*_args: Any, **_kwargs: Any) -> Any:
    raise KeyError("planted")


def refuse_tersely(*_args: Any, **_kwargs: Any) -> Any:
    raise ClientError("no")


@pytest.mark.parametrize(
    ("room", "name", "fault"),
    [
        (chat_messages, "_lenient", crash),
        (chat_messages, "_distinct", crash),
        (responses, "_echo", crash),
        (plain, "_check_family", crash),
        (chat_messages, "_check_content", refuse_tersely),
    ],
)
def test_planted_faults_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: Any, name: str, fault: Callable[..., Any]
) -> None:
    """A reader that raises, or refuses without a word, breaks a rule within a few hundred cases."""
    monkeypatch.setattr(room, name, fault)
    with pytest.raises((KeyError, BrokenError)):
        run(played(tmp_path, [fuzz_requests.make(0, number) for number in range(400)]))


@pytest.mark.parametrize(
    ("protocol", "stream"),
    [
        ("chat", b'data: {"choices": []}\n\n'),
        ("chat", b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n'),
        ("messages", b'event: message_start\ndata: {"type": "message_start"}\n\n'),
        ("responses", b'event: response.created\ndata: {"type": "response.created"}\n\n'),
        ("responses", b'event: response.failed\ndata: {"type": "response.failed"}\n\n'),
        ("completions", b": keep-alive\n\n"),
    ],
)
def test_streams_that_break_off_are_seen(protocol: str, stream: bytes) -> None:
    """No end, an error, or no frame at all."""
    with pytest.raises(BrokenError):
        fuzz_requests.check_stream(protocol, stream)
