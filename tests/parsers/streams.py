"""Reads the streams of all three protocols into one form, checking their grammar on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from parsers import Codec, Exchange
from tests.parsers import support

PROTOCOLS = ("chat", "responses", "messages")


def body_for(protocol: str, **fields: Any) -> dict[str, Any]:
    """A body that asks the same in any protocol.

    ``tools`` are chat function tools; ``prompt`` is the user's text; other fields are as given.
    """
    prompt, tools = fields.pop("prompt", "q"), fields.pop("tools", None)
    body: dict[str, Any] = {"model": "DeepSeek-V4-Pro"}
    if protocol == "responses":
        body["input"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    if tools is not None:
        functions = [tool["function"] for tool in tools]
        if protocol == "chat":
            body["tools"] = tools
        elif protocol == "responses":
            body["tools"] = [{"type": "function", **function} for function in functions]
        else:
            body["tools"] = [
                {
                    **{k: v for k, v in function.items() if k != "parameters"},
                    "input_schema": function["parameters"],
                }
                for function in functions
            ]
    return {**body, **fields}


def open_any(codec: Codec, protocol: str, **fields: Any) -> Exchange:
    """Open a body of ``body_for`` for the codec's own model."""
    body = {**body_for(protocol, **fields), "model": codec.model.name}
    return codec.open_exchange(protocol, orjson.dumps(body), exchange_id="ID")  # type: ignore[arg-type]


def events(frames: Iterable[bytes]) -> list[dict[str, Any]]:
    """Decode named SSE frames; each name is the type of its data."""
    out = []
    for frame in frames:
        name, data, *rest = frame.decode().split("\n")
        assert rest == ["", ""]
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        out.append(event)
    return out


def message(protocol: str, frames: Sequence[bytes]) -> dict[str, Any]:
    """Read a whole stream into the form of ``support.message``."""
    if protocol == "chat":
        assert frames[-1] == b"data: [DONE]\n\n"
        return support.message(support.chunks(frames))
    read = _responses if protocol == "responses" else _messages
    return read(events(frames))


def _empty() -> dict[str, Any]:
    return {"content": "", "reasoning": "", "calls": [], "finish": None}


def _messages(stream: list[dict[str, Any]]) -> dict[str, Any]:
    out, kind, count = _empty(), None, 0
    assert stream[0]["type"] == "message_start"
    assert [e["type"] for e in stream[-2:]] == ["message_delta", "message_stop"]
    for event in stream[1:-2]:
        if event["type"] == "ping":
            continue
        assert event["index"] == count
        if event["type"] == "content_block_start":
            assert kind is None
            block = event["content_block"]
            kind = block["type"]
            if kind == "tool_use":
                assert block["input"] == {}
                out["calls"].append([block["name"], "", block["id"]])
        elif event["type"] == "content_block_stop":
            assert kind is not None
            kind, count = None, count + 1
        else:
            delta = event["delta"]
            if kind == "tool_use":
                out["calls"][-1][1] += delta["partial_json"]
            elif kind == "text":
                out["content"] += delta["text"]
            else:
                assert kind == "thinking"
                out["reasoning"] += delta.get("thinking", "")
                assert delta["type"] == "thinking_delta" or delta["signature"]
    assert kind is None
    last = stream[-2]
    stops = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
    out["finish"] = stops.get(last["delta"]["stop_reason"], last["delta"]["stop_reason"])
    return {**out, "usage": last["usage"], "bathyal": last.get("bathyal")}


def _responses(stream: list[dict[str, Any]]) -> dict[str, Any]:
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert [e["type"] for e in stream[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    deltas: dict[str, str] = {}
    for event in stream[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items) - (kind != "output_item.added")
        if kind == "output_item.added":
            items.append(event["item"])
            deltas[event["item"]["id"]] = ""
        elif kind == "output_item.done":
            assert event["item"]["id"] == items[-1]["id"]
            assert event["item"]["type"] == items[-1]["type"]
            items[-1] = event["item"]
        elif kind.endswith(".delta") and "summary" not in kind:
            deltas[event["item_id"]] += event["delta"]
    last = stream[-1]
    assert last["type"] in ("response.completed", "response.incomplete")
    assert last["response"]["output"] == items
    out = response(last["response"])
    for item in items:
        if item["type"] == "function_call":
            assert deltas[item["id"]] == item["arguments"]
    return out


def response(reply: dict[str, Any]) -> dict[str, Any]:
    """Read a response object."""
    out = _empty()
    for item in reply["output"]:
        if item["type"] == "reasoning":
            out["reasoning"] += "".join(part["text"] for part in item["content"])
        elif item["type"] == "message":
            out["content"] += "".join(part["text"] for part in item["content"])
        else:
            text = item.get("arguments", item.get("input"))
            out["calls"].append([item["name"], text, item["call_id"]])
    out["finish"] = "tool_calls" if out["calls"] else "stop"
    if reply["status"] == "incomplete":
        out["finish"] = "length"
    return {**out, "usage": reply["usage"], "bathyal": reply.get("bathyal")}


def whole(protocol: str, body: bytes) -> dict[str, Any]:
    """Read a whole reply into the same form."""
    if protocol == "chat":
        return support.whole(body)
    reply = orjson.loads(body)
    if protocol == "responses":
        return response(reply)
    out = _empty()
    for block in reply["content"]:
        if block["type"] == "thinking":
            out["reasoning"] += block["thinking"]
        elif block["type"] == "text":
            out["content"] += block["text"]
        else:
            out["calls"].append([block["name"], block["input"], block["id"]])
    stops = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
    out["finish"] = stops.get(reply["stop_reason"], reply["stop_reason"])
    return {**out, "usage": reply["usage"], "bathyal": reply.get("bathyal")}


def talk(
    codec: Codec, protocol: str, output: str | Sequence[int], finish: str = "stop", **fields: Any
) -> dict[str, Any]:
    """Open a stream, play a model output token by token, return the message."""
    ids = support.encode(codec, output) if isinstance(output, str) else output
    exchange = open_any(codec, protocol, stream=True, **fields)
    return message(protocol, support.drive(exchange, support.each(ids), finish))
