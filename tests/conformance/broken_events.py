"""Faults of Responses and Messages streams and replies."""

from __future__ import annotations

from typing import Any

from tests.conformance.correct_wire import Frames
from tests.conformance.faults import broken, of, without

# Responses streams


@broken("frames", "responses-sequence-gap", "responses/sequence-gapless", protocol="responses")
def _(frames: Frames) -> Frames:
    for _, event in frames[2:]:
        event["sequence_number"] += 1
    return frames


def _renumber(frames: Frames) -> Frames:
    for number, (_, event) in enumerate(frames):
        event["sequence_number"] = number
    return frames


@broken("frames", "responses-no-created", "responses/lifecycle/begin", protocol="responses")
def _(frames: Frames) -> Frames:
    return _renumber(without(frames, "response.created"))


@broken(
    "frames", "responses-no-end", "responses/lifecycle/one-end", "finish/once", protocol="responses"
)
def _(frames: Frames) -> Frames:
    return frames[:-1]


@broken("frames", "responses-bare-object", "responses/envelope", protocol="responses")
def _(frames: Frames) -> Frames:
    """The response itself as the data of lifecycle events (pjq/sap-ai-core-llm-proxy#35)."""
    return [
        (
            name,
            {"type": data["type"], "sequence_number": data["sequence_number"], **data["response"]},
        )
        if "response" in data
        else (name, data)
        for name, data in frames
    ]


@broken("frames", "responses-other-item-id", "responses/item/announced", protocol="responses")
def _(frames: Frames) -> Frames:
    for _, event in frames:
        if "item_id" in event:
            event["item_id"] = "item_x"
    return frames


@broken("frames", "responses-item-not-done", "responses/item/closed", protocol="responses")
def _(frames: Frames) -> Frames:
    return _renumber(without(frames, "response.output_item.done"))


@broken("frames", "responses-item-index", "responses/item/index-dense", protocol="responses")
def _(frames: Frames) -> Frames:
    for _, event in frames:
        if "output_index" in event:
            event["output_index"] = 0
    return frames


@broken("frames", "responses-no-part", "responses/part-bracketed", protocol="responses")
def _(frames: Frames) -> Frames:
    return _renumber(without(frames, "response.content_part.added"))


@broken("frames", "responses-delta-lost", "responses/deltas-join", protocol="responses")
def _(frames: Frames) -> Frames:
    deltas = [n for n, (name, _) in enumerate(frames) if name.endswith(".delta")]
    for number in deltas[-1:]:
        del frames[number]
    return _renumber(frames)


@broken("frames", "responses-final-empty", "responses/final-lists-items", protocol="responses")
def _(frames: Frames) -> Frames:
    if "response" in frames[-1][1]:
        frames[-1][1]["response"]["output"] = []
    return frames


@broken(
    "frames",
    "responses-call-without-id",
    "responses/item/shape",
    "tool-call/id-unique",
    protocol="responses",
)
def _(frames: Frames) -> Frames:
    for _, event in frames:
        event.get("item", {}).pop("call_id", None)
    return frames


@broken("document", "responses-whole-status", "responses/whole/shape", protocol="responses")
def _(document: dict[str, Any]) -> dict[str, Any]:
    del document["status"]
    return document


@broken(
    "document",
    "responses-whole-drops-calls",
    "expect/calls",
    "cross/stream-equals-whole",
    "cross/protocols-equal",
    protocol="responses",
)
def _(document: dict[str, Any]) -> dict[str, Any]:
    """Only text is converted (justlovemaki/AIClient2API#471)."""
    document["output"] = [i for i in document["output"] if i["type"] != "function_call"]
    return document


# Messages streams


@broken("frames", "messages-no-start", "messages/lifecycle/start-first", protocol="messages")
def _(frames: Frames) -> Frames:
    return without(frames, "message_start")


@broken("frames", "messages-two-deltas", "messages/lifecycle/delta-once", protocol="messages")
def _(frames: Frames) -> Frames:
    return [f for frame in frames for f in ([frame] * (1 + (frame[0] == "message_delta")))]


@broken("frames", "messages-no-stop", "messages/lifecycle/stop-last", protocol="messages")
def _(frames: Frames) -> Frames:
    return without(frames, "message_stop")


@broken("frames", "messages-start-with-reason", "messages/start-shape", protocol="messages")
def _(frames: Frames) -> Frames:
    for event in of(frames, "message_start"):
        event["message"]["stop_reason"] = "end_turn"
    return frames


@broken("frames", "messages-index-from-one", "messages/block/index-dense", protocol="messages")
def _(frames: Frames) -> Frames:
    for _, event in frames:
        if "index" in event:
            event["index"] += 1
    return frames


@broken("frames", "messages-block-not-stopped", "messages/block/one-at-a-time", protocol="messages")
def _(frames: Frames) -> Frames:
    return without(frames, "content_block_stop")


@broken("frames", "messages-delta-misfit", "messages/block/delta-fits", protocol="messages")
def _(frames: Frames) -> Frames:
    for event in of(frames, "content_block_delta"):
        if event["delta"]["type"] == "input_json_delta":
            event["delta"] = {"type": "text_delta", "text": event["delta"]["partial_json"]}
    return frames


@broken(
    "frames",
    "messages-signature-on-next-block",
    "messages/block/delta-fits",
    "messages/thinking-signed",
    protocol="messages",
)
def _(frames: Frames) -> Frames:
    """looplj/axonhub#1105."""
    for event in of(frames, "content_block_delta"):
        if event["delta"]["type"] == "signature_delta":
            event["index"] += 1
    return frames


@broken(
    "frames", "messages-input-in-start", "messages/tool-use/input-by-deltas", protocol="messages"
)
def _(frames: Frames) -> Frames:
    """inflaborg/ccrelay#119."""
    for event in of(frames, "content_block_start"):
        if event["content_block"]["type"] == "tool_use":
            event["content_block"]["input"] = {"city": "Paris"}
    return [f for f in frames if f[1].get("delta", {}).get("type") != "input_json_delta"]


@broken(
    "frames",
    "messages-tool-without-id",
    "messages/tool-use/shape",
    "tool-call/id-unique",
    protocol="messages",
)
def _(frames: Frames) -> Frames:
    for event in of(frames, "content_block_start"):
        event["content_block"].pop("id", None)
    return frames


@broken("frames", "messages-thinking-unsigned", "messages/thinking-signed", protocol="messages")
def _(frames: Frames) -> Frames:
    """RunanywhereAI/wally#112."""
    return [f for f in frames if f[1].get("delta", {}).get("type") != "signature_delta"]


@broken("frames", "messages-openai-reason", "messages/stop-reason", protocol="messages")
def _(frames: Frames) -> Frames:
    for event in of(frames, "message_delta"):
        event["delta"]["stop_reason"] = "tool_calls"
    return frames


@broken("frames", "messages-usage-missing", "messages/usage", "usage/counts", protocol="messages")
def _(frames: Frames) -> Frames:
    for event in of(frames, "message_delta"):
        del event["usage"]
    return frames


@broken("document", "messages-whole-type", "messages/whole/shape", protocol="messages")
def _(document: dict[str, Any]) -> dict[str, Any]:
    return document | {"type": "completion"}


@broken(
    "document", "responses-custom-as-function", "responses/item/tool-kind", protocol="responses"
)
def _(document: dict[str, Any]) -> dict[str, Any]:
    for item in document["output"]:
        if item["type"] == "custom_tool_call":
            item["type"], item["arguments"] = "function_call", item.pop("input")
    return document
