"""A server that speaks the three protocols correctly, without a model and without a parser.

It knows the cases: asked for one (header x-bathyal-script) it gives the result the case wants,
written to the wire by hand from the protocols' references and independent of the codec. So it
proves the checks: it passes them all, and each small mutation of it (broken_servers.py) is seen by
some. It proves nothing about the cases' expectations; the official codec does (codec_server.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from conformance import load, strict_json
from conformance.client import Exchange, Request
from conformance.model import Case
from conformance.protocols.render import PATHS, assign

Frames = list[tuple[str, dict[str, Any]]]
ENVELOPE_TYPES = {401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error"}


@dataclass(frozen=True)
class Plan:
    """What the server is going to say, before it is written in a protocol."""

    content: str = ""
    reasoning: str | None = None
    calls: tuple[tuple[str, str, str], ...] = ()  # id, name, arguments
    finish: str = "stop"
    prompt_tokens: int = 20
    fault: bool = False
    stop_sequence: str | None = None

    @property
    def completion_tokens(self) -> int:
        text = self.content + (self.reasoning or "") + "".join(c[1] + c[2] for c in self.calls)
        return 1 + len(text) // 4


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
            for place, value in expect["document_has"].items():
                assign(page, place, {"<text>": "m", "<count>": 7}.get(value, value))
            return self._json(200, page)
        plan = self._plan_of(case, body) if case else _improvise(body)
        plan = self.mutation.plan(plan, body)
        if body.get("stream"):
            frames = self.mutation.frames(protocol, _WRITERS[protocol](plan, body))
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
        document = _DOCUMENTS[protocol](plan, body)
        return self._json(200, self.mutation.document(protocol, document))

    def _json(self, status: int, document: Any) -> Reply:
        return Reply(status, {"content-type": "application/json"}, [orjson_any(document)])

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


def orjson_any(value: Any) -> bytes:
    return strict_json.dumps(value).encode("utf-8", "surrogatepass")


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
        return Plan(content="Grüße, 日本 🎉.", reasoning="Short.")
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


def frame_bytes(name: str, data: dict[str, Any]) -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson_any(data) + b"\n\n"


def pieces(text: str, size: int = 5) -> Iterator[str]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


def _usage(plan: Plan) -> dict[str, Any]:
    done = plan.completion_tokens
    return {
        "prompt_tokens": plan.prompt_tokens,
        "completion_tokens": done,
        "total_tokens": plan.prompt_tokens + done,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {
            "reasoning_tokens": min(done, len(plan.reasoning or "") // 4)
        },
    }


def chat_frames(plan: Plan, body: dict[str, Any]) -> Frames:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> tuple[str, dict[str, Any]]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return "", base | {"choices": [choice], "usage": None}

    base = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": body.get("model", "m"),
    }
    frames = [chunk({"role": "assistant", "content": ""})]
    frames += [chunk({"reasoning_content": piece}) for piece in pieces(plan.reasoning or "")]
    frames += [chunk({"content": piece}) for piece in pieces(plan.content)]
    if plan.fault:
        error = {"message": "the backend failed", "type": "api_error", "param": None, "code": "api"}
        return [*frames, ("", {"error": error})]
    for index, (identity, name, arguments) in enumerate(plan.calls):
        function = {"name": name, "arguments": ""}
        opening = {"index": index, "id": identity, "type": "function", "function": function}
        frames.append(chunk({"tool_calls": [opening]}))
        for piece in pieces(arguments):
            frames.append(
                chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
            )
    frames.append(chunk({}, plan.finish))
    if (body.get("stream_options") or {}).get("include_usage"):
        frames.append(("", base | {"choices": [], "usage": _usage(plan)}))
    return frames


def chat_document(plan: Plan, body: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": plan.content}
    if plan.reasoning is not None:
        message["reasoning_content"] = plan.reasoning
    if plan.calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
            for i, n, a in plan.calls
        ]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": body.get("model", "m"),
        "choices": [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": plan.finish}
        ],
        "usage": _usage(plan),
    }


def _items(plan: Plan) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if plan.reasoning:
        content = [{"type": "reasoning_text", "text": plan.reasoning}]
        items.append({"id": "rs_0", "type": "reasoning", "summary": [], "content": content})
    if plan.content:
        content = [{"type": "output_text", "text": plan.content, "annotations": []}]
        items.append(
            {
                "id": "msg_0",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": content,
            }
        )
    for number, (identity, name, arguments) in enumerate(plan.calls):
        items.append(
            {
                "id": f"fc_{number}",
                "type": "function_call",
                "call_id": identity,
                "name": name,
                "arguments": arguments,
                "status": "completed",
            }
        )
    return items


def responses_document(plan: Plan, body: dict[str, Any]) -> dict[str, Any]:
    reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
    reason = reasons.get(plan.finish)
    usage = _usage(plan)
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1_700_000_000,
        "model": body.get("model", "m"),
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "error": None,
        "output": _items(plan),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": 4},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def responses_frames(plan: Plan, body: dict[str, Any]) -> Frames:
    frames: Frames = []

    def emit(kind: str, **data: Any) -> None:
        frames.append((kind, {"type": kind, "sequence_number": len(frames), **data}))

    final = responses_document(plan, body)
    running = final | {"status": "in_progress", "output": [], "usage": None}
    running["incomplete_details"] = None
    emit("response.created", response=running)
    emit("response.in_progress", response=running)
    for index, item in enumerate([] if plan.fault else _items(plan)):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "function_call":
            emit(
                "response.output_item.added",
                output_index=index,
                item=item | {"arguments": "", "status": "in_progress"},
            )
            for piece in pieces(item["arguments"]):
                emit("response.function_call_arguments.delta", **place, delta=piece)
            emit("response.function_call_arguments.done", **place, arguments=item["arguments"])
        else:
            emit("response.output_item.added", output_index=index, item=item | {"content": []})
            part = item["content"][0]
            kind = part["type"]
            place["content_index"] = 0
            emit("response.content_part.added", **place, part=part | {"text": ""})
            for piece in pieces(part["text"]):
                emit(f"response.{kind}.delta", **place, delta=piece)
            emit(f"response.{kind}.done", **place, text=part["text"])
            emit("response.content_part.done", **place, part=part)
        emit("response.output_item.done", output_index=index, item=item)
    if plan.fault:
        error = {"code": "server_error", "message": "the backend failed"}
        emit("response.failed", response=running | {"status": "failed", "error": error})
    else:
        emit("response." + final["status"], response=final)
    return frames


def _stop_reason(plan: Plan) -> str:
    if plan.stop_sequence is not None:
        return "stop_sequence"
    reasons = {"tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
    return reasons.get(plan.finish, "end_turn")


def messages_document(plan: Plan, body: dict[str, Any]) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if plan.reasoning:
        content.append({"type": "thinking", "thinking": plan.reasoning, "signature": "s1"})
    if plan.content:
        content.append({"type": "text", "text": plan.content})
    for identity, name, arguments in plan.calls:
        try:
            value = strict_json.loads(arguments)
        except strict_json.JsonError:
            value = {}
        content.append({"type": "tool_use", "id": identity, "name": name, "input": value})
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": body.get("model", "m"),
        "content": content,
        "stop_reason": _stop_reason(plan),
        "stop_sequence": plan.stop_sequence,
        "usage": {
            "input_tokens": plan.prompt_tokens - 4,
            "cache_read_input_tokens": 4,
            "output_tokens": plan.completion_tokens,
        },
    }


def messages_frames(plan: Plan, body: dict[str, Any]) -> Frames:
    frames: Frames = []

    def emit(kind: str, **data: Any) -> None:
        frames.append((kind, {"type": kind, **data}))

    final = messages_document(plan, body)
    start = final | {"content": [], "stop_reason": None, "stop_sequence": None}
    start["usage"] = final["usage"] | {"output_tokens": 0}
    emit("message_start", message=start)
    emit("ping")
    if plan.fault:
        emit("error", error={"type": "api_error", "message": "the backend failed"})
        return frames
    texts = {call[0]: call[2] for call in plan.calls}
    for index, block in enumerate(final["content"]):
        kind = block["type"]
        empty = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}
        emit(
            "content_block_start",
            index=index,
            content_block=block | empty.get(kind, {"input": {}}),
        )
        text = texts[block["id"]] if kind == "tool_use" else block[kind]
        delta, field_name = {
            "thinking": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
            "tool_use": ("input_json_delta", "partial_json"),
        }[kind]
        for piece in pieces(text):
            emit("content_block_delta", index=index, delta={"type": delta, field_name: piece})
        if kind == "thinking":
            emit(
                "content_block_delta",
                index=index,
                delta={"type": "signature_delta", "signature": block["signature"]},
            )
        emit("content_block_stop", index=index)
    emit(
        "message_delta",
        delta={"stop_reason": final["stop_reason"], "stop_sequence": final["stop_sequence"]},
        usage={"output_tokens": plan.completion_tokens},
    )
    emit("message_stop")
    return frames


_WRITERS = {"chat": chat_frames, "responses": responses_frames, "messages": messages_frames}
_DOCUMENTS = {
    "chat": chat_document,
    "responses": responses_document,
    "messages": messages_document,
}
__all__ = ["CorrectServer", "Frames", "Mutation", "Plan", "Reply", "load", "replace"]
