"""Faults of Chat Completions streams and replies."""

from __future__ import annotations

import copy
from typing import Any

from tests.conformance.correct_wire import Frames
from tests.conformance.faults import broken, fragments, going_on, opening

# chat streams


@broken("frames", "chat-index-missing", "stream/tool-call/index-present", protocol="chat")
def _(frames: Frames) -> Frames:
    for _, part in fragments(frames):
        del part["index"]
    return frames


@broken("frames", "chat-index-from-one", "stream/tool-call/index-dense", protocol="chat")
def _(frames: Frames) -> Frames:
    for _, part in fragments(frames):
        part["index"] += 1
    return frames


@broken(
    "frames", "chat-index-always-zero", "expect/calls", "stream/tool-call/id-once", protocol="chat"
)
def _(frames: Frames) -> Frames:
    for _, part in fragments(frames):
        part["index"] = 0
    return frames


@broken("frames", "chat-type-missing", "stream/tool-call/opens-complete", protocol="chat")
def _(frames: Frames) -> Frames:
    for part in opening(frames):
        del part["type"]
    return frames


@broken("frames", "chat-id-repeated", "stream/tool-call/id-once", protocol="chat")
def _(frames: Frames) -> Frames:
    for part in going_on(frames):
        part["id"] = "call_again"
    return frames


@broken("frames", "chat-name-repeated", "stream/tool-call/name-once", protocol="chat")
def _(frames: Frames) -> Frames:
    for part in going_on(frames):
        part["function"]["name"] = "get_weather"
    return frames


@broken("frames", "chat-arguments-object", "stream/tool-call/arguments-text", protocol="chat")
def _(frames: Frames) -> Frames:
    for part in going_on(frames):
        part["function"]["arguments"] = {}
    return frames


@broken(
    "frames", "chat-arguments-in-opening", "stream/tool-call/first-arguments-empty", protocol="chat"
)
def _(frames: Frames) -> Frames:
    for part in opening(frames):
        rest = [p for p in going_on(frames) if p["index"] == part["index"]]
        if rest:
            part["function"]["arguments"] = rest[0]["function"]["arguments"]
            rest[0]["function"]["arguments"] = ""
    return frames


@broken("frames", "chat-calls-interleaved", "stream/tool-call/in-turn", protocol="chat")
def _(frames: Frames) -> Frames:
    numbers = [n for n, part in fragments(frames) if "id" not in part and part["index"] == 0]
    second = [n for n, part in fragments(frames) if "id" in part and part["index"] == 1]
    if numbers and second:
        frames.insert(second[0], frames.pop(numbers[-1]))
    return frames


@broken("frames", "chat-object-wrong", "chat/chunk/envelope", protocol="chat")
def _(frames: Frames) -> Frames:
    for _, chunk in frames:
        chunk["object"] = "chat.completion"
    return frames


@broken("frames", "chat-usage-chunk-no-choices", "chat/chunk/envelope", protocol="chat")
def _(frames: Frames) -> Frames:
    for _, chunk in frames:
        if chunk.get("choices") == []:
            del chunk["choices"]
    return frames


@broken("frames", "chat-id-changes", "chat/chunk/same-completion", protocol="chat")
def _(frames: Frames) -> Frames:
    for number, (_, chunk) in enumerate(frames):
        chunk["id"] = f"chatcmpl-{number}"
    return frames


@broken("frames", "chat-choice-index", "chat/chunk/choice-index", protocol="chat")
def _(frames: Frames) -> Frames:
    for _, chunk in frames:
        for choice in chunk.get("choices", ()):
            choice["index"] = 1
    return frames


@broken("frames", "chat-role-everywhere", "chat/chunk/role-once", protocol="chat")
def _(frames: Frames) -> Frames:
    for _, chunk in frames:
        for choice in chunk.get("choices", ()):
            choice["delta"]["role"] = "assistant"
    return frames


@broken("frames", "chat-empty-calls", "chat/chunk/no-empty-calls", protocol="chat")
def _(frames: Frames) -> Frames:
    for _, chunk in frames:
        for choice in chunk.get("choices", ()):
            choice["delta"].setdefault("tool_calls", [])
    return frames


@broken("frames", "chat-finish-unknown", "chat/finish/known", "expect/finish", protocol="chat")
def _(frames: Frames) -> Frames:
    for _, chunk in frames:
        for choice in chunk.get("choices", ()):
            choice["finish_reason"] = choice["finish_reason"] and "eos"
    return frames


@broken("frames", "chat-goes-on-after-finish", "chat/finish/last", protocol="chat")
def _(frames: Frames) -> Frames:
    ends = [
        n
        for n, (_, c) in enumerate(frames)
        if c.get("choices") and c["choices"][0]["finish_reason"]
    ]
    for number in ends:
        frames.insert(number + 1, copy.deepcopy(frames[0]))
        frames[number + 1][1]["choices"][0]["delta"] = {"content": ""}
    return frames


@broken("frames", "chat-content-after-call", "chat/content-before-calls", protocol="chat")
def _(frames: Frames) -> Frames:
    content = [
        n
        for n, (_, c) in enumerate(frames)
        if c.get("choices") and c["choices"][0]["delta"].get("content")
    ]
    calls = [number for number, _ in fragments(frames)]
    if content and calls:
        frames.insert(calls[-1], frames.pop(content[-1]))
    return frames


@broken("frames", "chat-thinking-last", "stream/reasoning-first", protocol="chat")
def _(frames: Frames) -> Frames:
    def thinks(chunk: dict[str, Any]) -> bool:
        return any("reasoning_content" in c["delta"] for c in chunk.get("choices", ()))

    moved = [f for f in frames if thinks(f[1])]
    rest = [f for f in frames if not thinks(f[1])]
    at = next(
        (
            n
            for n, (_, c) in enumerate(rest)
            if c.get("choices") and c["choices"][0]["finish_reason"]
        ),
        len(rest),
    )
    return rest[:at] + moved + rest[at:]


@broken("frames", "chat-usage-on-every-chunk", "usage/once", "usage/chunk-shape", protocol="chat")
def _(frames: Frames) -> Frames:
    for _, chunk in frames:
        if "choices" in chunk:
            chunk["usage"] = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
    return frames


@broken("frames", "chat-summary-at-the-end", "arguments/json", "expect/arguments", protocol="chat")
def _(frames: Frames) -> Frames:
    """Sends all arguments once more (lidge-jun/opencodex#361)."""
    by_index: dict[int, str] = {}
    last: dict[int, dict[str, Any]] = {}
    for part in going_on(frames):
        by_index[part["index"]] = by_index.get(part["index"], "") + part["function"]["arguments"]
        last[part["index"]] = part
    for index, part in last.items():
        part["function"]["arguments"] += by_index[index]
    return frames


@broken("document", "chat-whole-object", "chat/whole/shape", protocol="chat")
def _(document: dict[str, Any]) -> dict[str, Any]:
    return document | {"object": "chat.completion.chunk"}


@broken("document", "chat-whole-empty-calls", "chat/whole/no-empty-calls", protocol="chat")
def _(document: dict[str, Any]) -> dict[str, Any]:
    document["choices"][0]["message"].setdefault("tool_calls", [])
    return document


# several choices, logprobs


@broken("frames", "chat-one-choice-for-two", "choices/all", protocol="chat")
def _(frames: Frames) -> Frames:
    return [
        frame
        for frame in frames
        if not frame[1].get("choices") or frame[1]["choices"][0]["index"] == 0
    ]


@broken("frames", "chat-choices-share-a-parser", "choices/independent", protocol="chat")
def _(frames: Frames) -> Frames:
    for _, chunk in frames:
        for choice in chunk.get("choices", ()):
            if choice["index"] == 1 and "reasoning_content" in choice["delta"]:
                choice["delta"]["content"] = choice["delta"].pop("reasoning_content")
    return frames


@broken("document", "chat-choices-share-ids", "choices/ids-distinct", protocol="chat")
def _(document: dict[str, Any]) -> dict[str, Any]:
    for choice in document["choices"]:
        for call in choice["message"].get("tool_calls", ()):
            call["id"] = "call_00_same"
    return document


def _entries(frames: Frames) -> list[dict[str, Any]]:
    return [
        entry
        for _, chunk in frames
        for choice in chunk.get("choices", ())
        for entry in (choice["logprobs"] or {}).get("content", ())
    ]


@broken("frames", "chat-logprob-is-a-probability", "logprobs/entries", protocol="chat")
def _(frames: Frames) -> Frames:
    for entry in _entries(frames):
        entry["logprob"] = 0.9
    return frames


@broken("frames", "chat-logprobs-cut-characters", "logprobs/join", protocol="chat")
def _(frames: Frames) -> Frames:
    for entry in _entries(frames):
        entry["bytes"] = list(bytes(entry["bytes"]).decode(errors="ignore").encode())
    return frames
