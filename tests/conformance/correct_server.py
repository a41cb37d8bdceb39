"""A server that speaks the three protocols correctly, without a model and without a parser.

It knows the cases: asked for one (header x-bathyal-script) it gives the result the case wants,
written to the wire by hand from the protocols' references and independent of the codec. So it
proves the checks: it passes them all, and each small mutation of it (broken_servers.py) is seen by
some. It proves nothing about the cases' expectations; the official codec does (codec_server.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from conformance import strict_json
from conformance.client import Exchange, Request
from conformance.model import Case
from conformance.protocols.render import PATHS, assign
from tests.conformance.correct_wire import (
    DOCUMENTS,
    WRITERS,
    Frames,
    Plan,
    as_json,
    frame_bytes,
)

ENVELOPE_TYPES = {401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error"}


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    chunks: list[bytes] = field(default_factory=list)
    fault: str | None = None
    pause_s: float = 0.01


class Mutation:
    """Changes nothing; broken servers override one method each."""

    def plan(self, plan: Plan, body: dict[str, Any]) -> Plan:
        return plan

    def frames(self, protocol: str, frames: Frames) -> Frames:
        return frames

    def document(self, protocol: str, document: dict[str, Any]) -> dict[str, Any]:
        return document

    def error(self, protocol: str, document: dict[str, Any], status: int) -> dict[str, Any]:
        return document

    def reply(self, protocol: str, reply: Reply) -> Reply:
        return reply

    def engine_left(self) -> bool:
        return True


class CorrectServer:
    """Answers requests; also a conformance Sender, so that tests need no socket."""

    def __init__(self, cases: list[Case], mutation: Mutation | None = None) -> None:
        self.cases = {case.id: case for case in cases}
        self.mutation = mutation or Mutation()

    async def send(self, request: Request) -> Exchange:
        reply = self.answer(request.method, request.path, request.headers, request.body)
        exchange = Exchange(
            request, reply.status, dict(reply.headers), url="http://test" + request.path
        )
        for number, piece in enumerate(reply.chunks):
            exchange.reads.append(((number + 1) * reply.pause_s, piece))
            if request.leave_after is not None:
                break
        exchange.fault = reply.fault
        return exchange

    async def left(self, within_s: float) -> bool:
        """Whether the engine behind, if there were one, would see that it was abandoned."""
        return self.mutation.engine_left()

    def answer(self, method: str, path: str, headers: Any, raw: bytes) -> Reply:
        protocol = next((p for p, known in PATHS.items() if known == path), "chat")
        if "/v1/messages" in path:
            protocol = "messages"
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            body = {}
        body = body if isinstance(body, dict) else {}
        case = self.cases.get(headers.get("x-bathyal-script", "").split("@")[0])
        reply = self._reply(protocol, body, case)
        return self.mutation.reply(protocol, reply)

    def _reply(self, protocol: str, body: dict[str, Any], case: Case | None) -> Reply:
        if protocol == "parse":
            return self._json(200, self.mutation.document("parse", self._parse(body)))
        expect = case.expect[0] if case else {}
        status = expect.get("status", 200)
        status = status if isinstance(status, int) else status[0]
        if status >= 400:
            param = expect.get("param")
            param = param.get(protocol) if isinstance(param, dict) else param
            words = " ".join(expect.get("message_has", ())) or "refused"
            return self._error(protocol, status, f"Not so: {words}", param)
        if "document_has" in expect:
            page: dict[str, Any] = {"data": [{}]}
            size = self._prompt_tokens(case, body) if case else 0
            for place, value in expect["document_has"].items():
                assign(page, place, {"<text>": "m", "<count>": size}.get(value, value))
            return self._json(200, page)
        plan = self._plan_of(case, body) if case else _improvise(body)
        plan = self.mutation.plan(plan, body)
        if body.get("stream"):
            frames = self.mutation.frames(protocol, WRITERS[protocol](plan, body))
            reply = Reply(
                200,
                {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"},
            )
            reply.chunks = [frame_bytes(name, data) for name, data in frames]
            if protocol == "chat" and not plan.fault:
                reply.chunks.append(b"data: [DONE]\n\n")
            reply.chunks.insert(1, b": keep-alive\n\n")
            return reply
        if plan.fault:
            return self._error(protocol, 502, "the backend failed", None)
        document = DOCUMENTS[protocol](plan, body)
        return self._json(200, self.mutation.document(protocol, document))

    def _json(self, status: int, document: Any) -> Reply:
        return Reply(status, {"content-type": "application/json"}, [as_json(document)])

    def _error(self, protocol: str, status: int, message: str, param: str | None) -> Reply:
        kind = ENVELOPE_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        error: dict[str, Any] = {"message": message, "type": kind}
        if protocol == "messages":
            document = {"type": "error", "error": error}
        else:
            document = {"error": error | {"param": param, "code": kind}}
        return self._json(status, self.mutation.error(protocol, document, status))

    def _plan_of(self, case: Case, body: dict[str, Any]) -> Plan:
        expect = case.expect[0]
        calls = tuple(
            (f"call_{number:02}_abcdefghij0123456789{number:04}", call["name"], _arguments(call))
            for number, call in enumerate(expect.get("calls", ()))
        )
        content = next(
            (expect[k] for k in ("content", "content_trimmed", "content_has") if k in expect), ""
        )
        script = case.script
        finish = expect.get("finish", "tool_calls" if calls else "stop")
        stops = body.get("stop_sequences") or []
        fitting = [s for s in stops if script and s in script.output] if finish == "stop" else []
        return Plan(
            content=content,
            reasoning=expect.get("reasoning"),
            calls=calls,
            finish=finish,
            prompt_tokens=self._prompt_tokens(case, body),
            fault=script is not None and script.finish == "error",
            stop_sequence=fitting[0] if fitting else None,
        )

    def _prompt_tokens(self, case: Case, body: dict[str, Any]) -> int:
        expect = case.expect[0]
        if "prompt_tokens" in expect:
            want = expect["prompt_tokens"]
            return int(want)
        for key, more in (("same_prompt_as", 0), ("longer_prompt_than", 5)):
            if key in expect:
                return self._prompt_tokens(self.cases[expect[key]], body) + more
        return 20

    def _parse(self, body: dict[str, Any]) -> dict[str, Any]:
        names = [tool["function"]["name"] for tool in body["tools"]]
        case = next(
            c
            for c in self.cases.values()
            if c.tier == "parse"
            and c.script
            and body["text"] in {c.script.output, respelled(c.script.output)}
            and [t if isinstance(t, str) else t["name"] for t in c.request.get("tools", ())]
            == names
        )
        expect = case.expect[0]
        calls = [
            {
                "tool_index": names.index(call["name"]) if call["name"] in names else -1,
                "name": call["name"],
                "parameters": _arguments(call),
            }
            for call in expect.get("calls", ())
        ]
        return {"normal_text": expect.get("content", ""), "calls": calls}


def respelled(output: str) -> str:
    return output.replace("｜DSML｜ calls", "｜DSML｜tool_calls").replace("｜DSML｜ ", "｜DSML｜")


def _arguments(call: dict[str, Any]) -> str:
    for key in ("arguments_text", "arguments_prefix"):
        if key in call:
            return str(call[key])
    return strict_json.dumps(call.get("arguments", {}))


def _improvise(body: dict[str, Any]) -> Plan:
    """A plausible model for the live tier: calls the first tool it may, then answers."""
    turns = body.get("messages") or body.get("input") or []
    last = turns[-1] if isinstance(turns, list) and turns else {}
    answered = last.get("role") == "tool" or last.get("type") == "function_call_output"
    answered = answered or "tool_result" in str(last)
    choice = body.get("tool_choice")
    tools = [t.get("function", t) for t in body.get("tools") or ()]
    none = choice == "none" or (isinstance(choice, dict) and choice.get("type") == "none")
    if not tools or answered or none:
        return Plan(content="Grüße, 日本 🎉. " * 8, reasoning="Short.")
    named = (
        choice.get("name") or choice.get("function", {}).get("name")
        if isinstance(choice, dict)
        else None
    )
    tool = next((t for t in tools if t["name"] == named), tools[0])
    return Plan(
        reasoning="A tool helps.",
        calls=(("call_00_aaaaaaaaaaaaaaaaaaaa0001", tool["name"], '{"city": "Oslo"}'),),
        finish="tool_calls",
    )
