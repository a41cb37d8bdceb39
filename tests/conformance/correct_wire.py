"""What a server that is right writes: chunks, events and documents of the three protocols."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conformance import strict_json

Frames = list[tuple[str, dict[str, Any]]]


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


def as_json(value: Any) -> bytes:
    return strict_json.dumps(value).encode("utf-8", "surrogatepass")


def frame_bytes(name: str, data: dict[str, Any]) -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + as_json(data) + b"\n\n"


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


def _logprobs(text: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Entries of three bytes each, which do not heed characters."""
    if not body.get("logprobs"):
        return None
    data = text.encode()
    cuts = [data[start : start + 3] for start in range(0, len(data), 3)]
    rivals = body.get("top_logprobs") or 0
    entries = [
        {"token": cut.decode(errors="backslashreplace"), "logprob": -0.5, "bytes": list(cut)}
        for cut in cuts
    ]
    return {"content": [entry | {"top_logprobs": [entry] * rivals} for entry in entries]}


def _own_id(identity: str, choice: int) -> str:
    return identity if choice == 0 else f"{identity[:-1]}{choice}"


def chat_frames(plan: Plan, body: dict[str, Any]) -> Frames:
    """The choices take turns, as engines that run them side by side send them."""
    streams = [_chat_choice(plan, body, number) for number in range(body.get("n") or 1)]
    frames = [
        frame for turn in itertools.zip_longest(*streams) for frame in turn if frame is not None
    ]
    if (body.get("stream_options") or {}).get("include_usage") and not plan.fault:
        frames.append(("", _chat_base(body) | {"choices": [], "usage": _usage(plan)}))
    return frames


def _chat_base(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": body.get("model", "m"),
    }


def _chat_choice(plan: Plan, body: dict[str, Any], number: int) -> Frames:
    def chunk(
        delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return "", base | {"choices": [choice], "usage": None}

    base = _chat_base(body)
    frames = [chunk({"role": "assistant", "content": ""})]
    frames += [chunk({"reasoning_content": piece}) for piece in pieces(plan.reasoning or "")]
    frames += [
        chunk({"content": piece}, logprobs=_logprobs(piece, body)) for piece in pieces(plan.content)
    ]
    if plan.fault:
        error = {"message": "the backend failed", "type": "api_error", "param": None, "code": "api"}
        return [*frames, ("", {"error": error})]
    for index, (identity, name, arguments) in enumerate(plan.calls):
        function = {"name": name, "arguments": ""}
        opening = {
            "index": index,
            "id": _own_id(identity, number),
            "type": "function",
            "function": function,
        }
        frames.append(chunk({"tool_calls": [opening]}))
        for piece in pieces(arguments):
            frames.append(
                chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
            )
    frames.append(chunk({}, plan.finish))
    return frames


def _chat_message(plan: Plan, number: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": plan.content}
    if plan.reasoning is not None:
        message["reasoning_content"] = plan.reasoning
    if plan.calls:
        message["tool_calls"] = [
            {
                "id": _own_id(identity, number),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for identity, name, arguments in plan.calls
        ]
    return message


def chat_document(plan: Plan, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": body.get("model", "m"),
        "choices": [
            {
                "index": number,
                "message": _chat_message(plan, number),
                "logprobs": _logprobs(plan.content, body),
                "finish_reason": plan.finish,
            }
            for number in range(body.get("n") or 1)
        ],
        "usage": _usage(plan),
    }


def _items(plan: Plan, body: dict[str, Any]) -> list[dict[str, Any]]:
    custom = {t["name"] for t in body.get("tools") or () if t.get("type") == "custom"}
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
        kind, key = ("custom_tool_call", "input") if name in custom else _FUNCTION
        items.append(
            {
                "id": f"fc_{number}",
                "type": kind,
                "call_id": identity,
                "name": name,
                key: arguments,
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
        "output": _items(plan, body),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": 4},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


_FUNCTION = ("function_call", "arguments")
_CALL_EVENTS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
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
    for index, item in enumerate([] if plan.fault else _items(plan, body)):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] in _CALL_EVENTS:
            key, name = _CALL_EVENTS[item["type"]]
            emit(
                "response.output_item.added",
                output_index=index,
                item=item | {key: "", "status": "in_progress"},
            )
            for piece in pieces(item[key]):
                emit(f"response.{name}.delta", **place, delta=piece)
            emit(f"response.{name}.done", **place, **{key: item[key]})
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


WRITERS = {"chat": chat_frames, "responses": responses_frames, "messages": messages_frames}
DOCUMENTS = {
    "chat": chat_document,
    "responses": responses_document,
    "messages": messages_document,
}
