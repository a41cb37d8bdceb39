"""All broken servers; here the faults that every protocol shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson

from tests.conformance import broken_chat, broken_events
from tests.conformance.correct_server import Reply
from tests.conformance.correct_wire import Plan
from tests.conformance.faults import BROKEN, broken

# what is said, in every protocol


@broken("plan", "calls-lost", "expect/calls", "tool-call/forced", "live/forced-call")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, calls=())


@broken("plan", "calls-lost-with-reason", "finish/agrees-with-calls")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    """mastra-ai/mastra#14187: tool_calls is said and there is none."""
    return replace(plan, calls=(), finish="tool_calls")


@broken("plan", "stop-with-calls", "finish/agrees-with-calls", "expect/finish")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, finish="stop")


@broken("plan", "content-cut", "expect/content")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, content=plan.content[:-1])


@broken("plan", "thinking-lost", "expect/reasoning")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, reasoning=None)


@broken("plan", "thinking-tags-shown", "leak/think", "expect/content")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, reasoning=None, content=f"<think>{plan.reasoning}</think>{plan.content}")


@broken("plan", "markup-shown", "leak/dsml")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, calls=(), finish="stop", content="<｜DSML｜ calls>\n")


@broken("plan", "ascii-markup-shown", "leak/dsml")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, calls=(), finish="stop", content="<|DSML|tool_calls>\n")


@broken("plan", "end-token-shown", "leak/end-token")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, content=plan.content + "<｜end▁of▁sentence｜>")


@broken("plan", "characters-cut", "leak/replacement-character", "live/replacement-character")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, content="".join(c if ord(c) < 128 else "\ufffd" for c in plan.content))


def _arguments(plan: Plan, change: Callable[[str], str]) -> Plan:
    return replace(plan, calls=tuple((i, n, change(a)) for i, n, a in plan.calls))


@broken("plan", "markup-escaped-in-arguments", "leak/dsml", "live/markup-in-arguments")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return _arguments(plan, lambda a: '{"a": "x</\\uff5cDSML\\uff5c parameter>"}')


@broken("plan", "arguments-cut", "arguments/json")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return _arguments(plan, lambda a: a[:-1])


@broken("plan", "arguments-nan", "arguments/finite")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return _arguments(plan, lambda _: '{"a": NaN}')


@broken("plan", "arguments-key-twice", "arguments/unique-keys")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return _arguments(plan, lambda _: '{"a": 1, "a": 2}')


@broken("plan", "arguments-in-a-string", "arguments/object", "expect/arguments")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    """vllm-project/vllm#54964."""
    return _arguments(plan, lambda a: orjson.dumps(a).decode())


@broken("plan", "arguments-flushed-marker", "arguments/beginning-when-cut")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return _arguments(plan, lambda a: a + '"</x' if plan.finish == "length" else a)


@broken("plan", "numbers-as-floats", "expect/arguments")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return _arguments(plan, lambda a: a.replace("1234567890123456789", "1234567890123456800"))


@broken(
    "plan",
    "undeclared-call",
    "tool-call/declared",
    "tool-call/none-means-none",
    "tool-call/one-when-not-parallel",
)
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    extra = (("call_99_abcdefghij01234567890099", "rm_rf", "{}"),)
    return replace(plan, calls=plan.calls + extra, finish="tool_calls")


@broken("plan", "one-id-for-all", "tool-call/id-unique")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, calls=tuple(("call_0", n, a) for _, n, a in plan.calls))


@broken("plan", "nameless-call", "tool-call/name-given")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, calls=tuple((i, "", a) for i, _, a in plan.calls))


@broken("plan", "faults-end-in-stop", "fault/told", "fault/no-good-end")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, fault=False)


@broken("plan", "prompt-not-counted", "usage/counts")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, prompt_tokens=0)


@broken("plan", "prompt-counted-by-characters", "expect/prompt-tokens", "prompt/same")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, prompt_tokens=len(orjson.dumps(body)))


@broken("plan", "prompt-count-constant", "prompt/longer")
def _(plan: Plan, body: dict[str, Any]) -> Plan:
    return replace(plan, prompt_tokens=20)


@broken("document", "total-wrong", "usage/adds-up", protocol="chat")
def _(document: dict[str, Any]) -> dict[str, Any]:
    document["usage"]["total_tokens"] += 1
    return document


@broken("document", "v4-spelling-loses-arguments", "cross/dialects-equal", protocol="parse")
def _(document: dict[str, Any]) -> dict[str, Any]:
    V4_COUNTER[0] += 1  # the parse tier runs each case in both spellings, one after the other
    if V4_COUNTER[0] % 2:
        for call in document["calls"]:
            call["parameters"] = "{}"
    return document


V4_COUNTER = [0]


@broken("document", "parse-index-zero", "parse/tool-index", protocol="parse")
def _(document: dict[str, Any]) -> dict[str, Any]:
    for call in document["calls"]:
        call["tool_index"] = 0
    return document


@broken("document", "parse-other-names", "parse/shape", protocol="parse")
def _(document: dict[str, Any]) -> dict[str, Any]:
    return {"text": document["normal_text"], "calls": document["calls"]}


# errors


@broken("error", "error-flat", "error/envelope")
def _(document: dict[str, Any]) -> dict[str, Any]:
    return {"object": "error", "message": document["error"]["message"], "code": 400}


@broken("error", "error-without-type", "error/envelope", protocol="messages")
def _(document: dict[str, Any]) -> dict[str, Any]:
    return {"error": document["error"]}


@broken("error", "error-with-stack", "error/no-internals")
def _(document: dict[str, Any]) -> dict[str, Any]:
    document["error"]["message"] = 'Traceback: File "/srv/app.py", line 3'
    return document


@broken("error", "error-without-param", "error/param", protocol="chat")
def _(document: dict[str, Any]) -> dict[str, Any]:
    document["error"]["param"] = None
    return document


@broken("error", "error-says-nothing", "expect/message")
def _(document: dict[str, Any]) -> dict[str, Any]:
    document["error"]["message"] = "Bad Request"
    return document


@broken("reply", "error-as-stream", "error/content-type")
def _(reply: Reply) -> Reply:
    if reply.status >= 400:
        reply.headers["content-type"] = "text/event-stream"
    return reply


@broken("reply", "faults-are-500", "expect/status")
def _(reply: Reply) -> Reply:
    return replace(reply, status=500 if reply.status == 400 else reply.status)


@broken("reply", "bad-requests-accepted", "expect/status")
def _(reply: Reply) -> Reply:
    return replace(reply, status=200)


# HTTP and SSE


def _streams(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Reply], Reply]:
    def fault(reply: Reply) -> Reply:
        if reply.headers.get("content-type", "").startswith("text/event-stream"):
            reply.chunks = change(reply.chunks)
        return reply

    return fault


broken("reply", "sse-no-done", "sse/done", protocol="chat")(_streams(lambda c: c[:-1]))
broken("reply", "sse-done-everywhere", "sse/done", protocol="messages")(
    _streams(lambda c: [*c, b"data: [DONE]\n\n"])
)
broken("reply", "sse-not-closed", "sse/ends-whole")(_streams(lambda c: [*c[:-1], c[-1][:-1]]))
broken("reply", "sse-no-names", "sse/event-name", protocol="responses")(
    _streams(lambda c: [x[x.index(b"data:") :] if b"data:" in x else x for x in c])
)
broken("reply", "sse-latin1", "sse/utf8")(
    _streams(lambda c: [x.decode().encode("latin-1", "ignore") for x in c])
)
broken("reply", "sse-python-repr", "sse/json")(
    _streams(lambda c: [x.replace(b"null", b"None") for x in c])
)
broken("reply", "sse-pretty-json", "sse/one-data-line")(
    _streams(lambda c: [x.replace(b'", "', b'",\ndata: "') for x in c])
)
broken("reply", "sse-one-lump", "stream/incremental")(_streams(lambda c: [b"".join(c)]))


@broken("reply", "http-cut", "http/complete")
def _(reply: Reply) -> Reply:
    return replace(reply, fault="RemoteProtocolError: peer closed the connection")


@broken("reply", "http-plain-text", "http/content-type")
def _(reply: Reply) -> Reply:
    if reply.headers["content-type"] == "application/json":
        reply.headers["content-type"] = "text/plain"
    return reply


@broken("reply", "http-two-documents", "http/json-body", "expect/document")
def _(reply: Reply) -> Reply:
    if reply.headers["content-type"] == "application/json" and reply.status == 200:
        reply.chunks = reply.chunks * 2
    return reply


@broken("reply", "http-cached", "http/not-cached")
def _(reply: Reply) -> Reply:
    reply.headers.pop("cache-control", None)
    return reply


@broken("reply", "live-lump-at-the-end", "stream/first-before-last")
def _(reply: Reply) -> Reply:
    if reply.headers["content-type"].startswith("text/event-stream"):
        reply.chunks, reply.pause_s = [b"".join(reply.chunks)], 0.5
    return reply


@broken("engine", "engine-runs-on", "cancel/engine-stops")
def _() -> bool:
    return False


__all__ = ["BROKEN", "broken_chat", "broken_events"]
