"""What a real model may do without the endpoint failing, and where the endpoint fails all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from conformance import load
from conformance.client import Exchange, Request
from conformance.model import Case, Mode, Variant
from conformance.protocols.render import render
from conformance.runner import Options, run

FORCED: dict[str, Any] = {"tools": ["now", "get_weather"], "tool_choice": "required"}
NAMED: dict[str, Any] = FORCED | {"tool_choice": {"name": "now"}}
FREE: dict[str, Any] = {"tools": ["now"]}
LEAK = '{"zone": "x</\\uff5cDSML\\uff5c parameter>"}'


class Scripted:
    """A sender that gives one chat reply, as a stream in one piece or whole."""

    def __init__(self, content: str, call: tuple[str, str] | None, finish: str) -> None:
        function = {"name": call[0], "arguments": call[1]} if call else {}
        self.calls = [{"id": "c1", "type": "function", "function": function}] if call else []
        self.content, self.finish = content, finish

    async def send(self, request: Request) -> Exchange:
        usage = {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}
        head = {"id": "x", "created": 1, "model": "m", "usage": usage}
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish}
        if not orjson.loads(request.body)["stream"]:
            message = {"role": "assistant", "content": self.content}
            choice["message"] = message | ({"tool_calls": self.calls} if self.calls else {})
            body = orjson.dumps(head | {"object": "chat.completion", "choices": [choice]})
            kind = "application/json"
        else:
            chunk = head | {"object": "chat.completion.chunk", "usage": None}
            said = choice | {
                "delta": {"role": "assistant", "content": self.content},
                "finish_reason": None,
            }
            end = chunk | {"choices": [choice | {"delta": {}}], "usage": usage}
            frames = [orjson.dumps(chunk | {"choices": [said]}), orjson.dumps(end), b"[DONE]"]
            body = b"".join(b"data: " + frame + b"\n\n" for frame in frames)
            kind = "text/event-stream"
        headers = {"content-type": kind, "cache-control": "no-cache"}
        return Exchange(request, 200, headers, [(0.5, body)])


def variant(
    folder: Path, request: dict[str, Any], mode: Mode, tier: str = "live", expect: Any = None
) -> Variant:
    case = {
        "id": "mine/one",
        "tier": tier,
        "why": "A sentence that says why.",
        "source": "a test",
        "request": request,
        "script": {"output": "invoke"},
        "expect": expect or {"status": 200},
        "modes": [mode],
        "protocols": ["chat"],
    }
    if tier == "live":
        del case["script"]
    path = folder / "cases.json"
    path.write_bytes(orjson.dumps({"cases": [case]}))
    cases = [case for case in load.load_cases([path]) if case.id == "mine/one"]
    return load.variants(cases)[0]


@pytest.mark.parametrize(
    ("request_", "content", "call", "finish", "check", "verdict"),
    [
        (FORCED, "I rather talk.", None, "stop", "live/forced-call", "warn"),
        (FORCED, "I rather talk.", None, "stop", "tool-call/forced", None),
        (FORCED, "", ("now", "{}"), "tool_calls", "live/forced-call", "pass"),
        (NAMED, "", ("get_weather", "{}"), "tool_calls", "tool-call/forced", "fail"),
        (NAMED, "", ("now", "{}"), "stop", "finish/agrees-with-calls", "pass"),
        (FREE, "", ("now", "{}"), "stop", "finish/agrees-with-calls", "fail"),
        (FREE, "", ("now", LEAK), "tool_calls", "live/markup-in-arguments", "warn"),
        (FREE, "", ("now", LEAK), "tool_calls", "leak/dsml", "pass"),
        (FREE, "</｜DSML｜ calls>", None, "stop", "leak/dsml", "fail"),
    ],
)
def test_models_choice_is_no_failure(
    tmp_path: Path,
    request_: dict[str, Any],
    content: str,
    call: tuple[str, str] | None,
    finish: str,
    check: str,
    verdict: str | None,
) -> None:
    """What only the model decides warns at most; what the endpoint promises fails."""
    one = variant(tmp_path, request_, "whole")
    result = asyncio.run(run([one], Scripted(content, call, finish), Options("m"))).results[0]
    found = {outcome.check: outcome.verdict.value for outcome in result.outcomes}

    assert found.get(check) == verdict


def test_escaped_markup_is_seen_in_scripted_arguments(tmp_path: Path) -> None:
    """An escape in the argument JSON does not hide a tag that leaked into a value."""
    one = variant(tmp_path, FREE, "whole", tier="scripted")
    sender = Scripted("", ("now", LEAK), "tool_calls")
    result = asyncio.run(run([one], sender, Options("m"))).results[0]
    found = {outcome.check: outcome.verdict.value for outcome in result.outcomes}

    assert found["leak/dsml"] == "fail"


@pytest.mark.parametrize(("request_", "verdict"), [({}, "fail"), (FREE, None)])
def test_what_may_be_a_call_is_held_back(
    tmp_path: Path, request_: dict[str, Any], verdict: str | None
) -> None:
    """One late piece is a lump, but for a reply with tools whose tokens made no call."""
    one = variant(tmp_path, request_, "stream")
    result = asyncio.run(run([one], Scripted("A remark.", None, "stop"), Options("m"))).results[0]
    found = {outcome.check: outcome.verdict.value for outcome in result.outcomes}

    assert found.get("stream/first-before-last") == verdict


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_switch_moves(tmp_path: Path, thinking: bool) -> None:
    """With the other switch chat asks for thinking where vLLM and SGLang look for it."""
    one = variant(tmp_path, {"thinking": thinking}, "whole")
    tools = load.load_tools()
    _, usual = render(one, "m", tools)
    _, moved = render(one, "m", tools, "chat_template_kwargs")

    assert usual["thinking"]["type"] == ("enabled" if thinking else "disabled")
    assert "thinking" not in moved
    assert moved["chat_template_kwargs"] == {"thinking": thinking, "enable_thinking": thinking}
    del usual["thinking"], moved["chat_template_kwargs"]
    assert usual == moved


def test_live_brings_what_needs_no_model(cases: list[Case]) -> None:
    """Refusals and pages are tested live too; client requests are then judged by invariants."""
    chosen = {case.id: case for case in load.select(cases, tiers=["live", "agents"])}
    scripted = {case.id: case for case in cases}

    assert {"live/plain", "refuse/role-unknown", "endpoint/models", "agents/cline"} <= set(chosen)
    assert {case.tier for case in chosen.values()} == {"live"}
    assert all(case.script is None for case in chosen.values())
    assert "text/blanks-only" not in chosen
    assert "refuse/choice-forced-in-thinking" not in chosen  # one of its answers is the model's
    assert chosen["agents/cline"].expect == ({"status": 200},)
    assert "agents/cline" not in {c.id for c in load.select(cases, tiers=["live"])}
    assert load.select(cases, tiers=["scripted"]) == [
        case for case in scripted.values() if case.tier == "scripted"
    ]


@pytest.mark.parametrize("request_", [{"body_text": "{no json"}, {"set": {"chat": {"seed": -1}}}])
def test_live_seed_replaces_nothing(tmp_path: Path, request_: dict[str, Any]) -> None:
    """The seed of live requests is put in where the case says nothing of it, and nowhere else."""
    one = variant(tmp_path, request_, "whole")
    sent = []

    class Noting(Scripted):
        async def send(self, request: Request) -> Exchange:
            sent.append(request.body)
            return Exchange(request, 400, {"content-type": "application/json"}, [(0.1, b"{}")])

    asyncio.run(run([one], Noting("", None, "stop"), Options("m")))

    assert sent == [render(one, "m", load.load_tools())[0].body]


@pytest.mark.parametrize(
    ("wanted", "verdict"),
    [
        ([{"calls": [], "finish": "stop"}, {"status": [502], "policy": "error"}], "pass"),
        ([{"calls": [], "finish": "stop"}, {"status": 400, "policy": "refused"}], "fail"),
        ({"calls": [], "finish": "stop"}, "fail"),
    ],
)
def test_an_error_in_a_stream_is_a_5xx(tmp_path: Path, wanted: Any, verdict: str) -> None:
    """Where a 5xx will do so does an error event, whose status was sent before; nowhere else."""
    one = variant(tmp_path, FREE, "stream", tier="scripted", expect=wanted)
    error = {"message": "no call", "type": "server_error", "param": None, "code": "x"}
    body = b'data: {"error": ' + orjson.dumps(error) + b"}\n\ndata: [DONE]\n\n"

    class Failing(Scripted):
        async def send(self, request: Request) -> Exchange:
            headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
            return Exchange(request, 200, headers, [(0.5, body)])

    result = asyncio.run(run([one], Failing("", None, "stop"), Options("m"))).results[0]
    found = {outcome.check: outcome.verdict.value for outcome in result.outcomes}

    assert found["expect/finish"] == verdict
