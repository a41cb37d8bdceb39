"""Observes Messages replies (Anthropic's Messages reference; protocol.md 2.10 for the order).

Grammar of a stream, as a state machine: message_start, then blocks one after another (start,
deltas that fit the block's type, stop), one message_delta with stop_reason and usage,
message_stop. `ping` may come anywhere, unknown events are for later versions and pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conformance import strict_json
from conformance.protocols.observation import Call, Observation, Usage, count, rows, table, text

FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "refusal": "content_filter",
}
DELTA_OF = {
    "text": {"text_delta", "citations_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}


def observe(seen: Observation) -> None:
    """Fills `seen` from its frames or its document."""
    if seen.streamed:
        _Machine(seen).run()
    elif seen.document is not None:
        if seen.answered:
            _whole(seen, seen.document)
        else:
            seen.error = seen.document.get("error", seen.document)
            counted = count(seen.document.get("input_tokens"))
            if counted is not None:  # a page of the token counter
                seen.usages.append(Usage(prompt=counted))


def usage(raw: Any) -> Usage:
    """Reads a usage object; input_tokens counts what no cache gave, so cached tokens are added."""
    block = table(raw)
    plain = count(block.get("input_tokens"))
    cached = count(block.get("cache_read_input_tokens")) or 0
    created = count(block.get("cache_creation_input_tokens")) or 0
    return Usage(
        prompt=None if plain is None else plain + cached + created,
        completion=count(block.get("output_tokens")),
        cached=cached,
    )


@dataclass(slots=True)
class _Block:
    index: int
    kind: str
    call: Call | None = None
    signatures: int = 0


class _Machine:
    """Walks the events of one stream once."""

    def __init__(self, seen: Observation) -> None:
        self.seen = seen
        self.block: _Block | None = None
        self.blocks = 0
        self.phase = "start"  # start, blocks, delta, stopped
        self.usage = Usage()

    def run(self) -> None:
        seen = self.seen
        for number, event in seen.events:
            kind = text(event.get("type"))
            if kind == "ping":
                continue
            if kind == "error":
                seen.error = event.get("error")
                continue
            if self.phase == "stopped":
                seen.violate("messages/lifecycle/stop-last", f"{kind} after message_stop", number)
            handler = getattr(self, f"_{kind}", None)
            if self.phase == "start" and kind != "message_start":
                seen.violate(
                    "messages/lifecycle/start-first", f"{kind} before message_start", number
                )
                self.phase = "blocks"
            if handler is not None:
                handler(event, number)
        if self.phase != "stopped" and seen.error is None:
            seen.violate("messages/lifecycle/stop-last", "the stream ends without message_stop")
        if self.usage.prompt is not None or self.usage.completion is not None:
            seen.usages.append(self.usage)

    def _message_start(self, event: dict[str, Any], number: int) -> None:
        seen = self.seen
        if self.phase != "start":
            seen.violate("messages/lifecycle/start-first", "a second message_start", number)
        self.phase = "blocks"
        message = table(event.get("message"))
        ok = (
            message.get("type") == "message"
            and message.get("role") == "assistant"
            and bool(text(message.get("id")))
            and bool(text(message.get("model")))
            and message.get("content") == []
            and message.get("stop_reason") is None
        )
        if not ok:
            seen.violate(
                "messages/start-shape",
                "message_start needs type message, role assistant, id, model, content [] and "
                "stop_reason null",
                number,
            )
        self.usage = usage(message.get("usage"))
        if self.usage.prompt is None:
            seen.violate("messages/usage", "message_start has no usage.input_tokens", number)

    def _content_block_start(self, event: dict[str, Any], number: int) -> None:
        seen = self.seen
        raw = table(event.get("content_block"))
        if self.phase == "delta":
            seen.violate("messages/lifecycle/delta-once", "a block after message_delta", number)
        if self.block is not None:
            seen.violate(
                "messages/block/one-at-a-time", f"block {self.block.index} is still open", number
            )
        index = count(event.get("index"))
        if index != self.blocks:
            seen.violate(
                "messages/block/index-dense",
                f"expected index {self.blocks}, got {event.get('index')!r}",
                number,
            )
        self.block = _Block(self.blocks if index is None else index, text(raw.get("type")))
        self.blocks += 1
        if self.block.kind == "thinking":
            if seen.content or seen.calls:
                seen.violate("stream/reasoning-first", "thinking after the answer began", number)
            seen.add_reasoning(text(raw.get("thinking")))
        elif self.block.kind == "text":
            seen.content += text(raw.get("text"))
        elif self.block.kind == "tool_use":
            self.block.call = Call(text(raw.get("id")), text(raw.get("name")))
            seen.calls.append(self.block.call)
            if not self.block.call.id or not self.block.call.name:
                seen.violate("messages/tool-use/shape", "tool_use without id or name", number)
            if raw.get("input") != {}:
                seen.violate(
                    "messages/tool-use/input-by-deltas",
                    f"content_block_start has input {strict_json.dumps(raw.get('input'))[:60]}, "
                    "expected {}: clients read the deltas only",
                    number,
                )

    def _content_block_delta(self, event: dict[str, Any], number: int) -> None:
        seen = self.seen
        delta = table(event.get("delta"))
        kind = text(delta.get("type"))
        block = self.block
        if block is None or event.get("index") != block.index:
            seen.violate(
                "messages/block/delta-fits",
                f"{kind} for block {event.get('index')!r}, open is "
                f"{block.index if block else 'none'}",
                number,
            )
            return
        if kind not in DELTA_OF.get(block.kind, {kind}):
            seen.violate("messages/block/delta-fits", f"{kind} inside a {block.kind} block", number)
        if kind == "thinking_delta":
            seen.add_reasoning(text(delta.get("thinking")))
        elif kind == "signature_delta":
            block.signatures += bool(text(delta.get("signature")))
        elif kind == "text_delta":
            if text(delta.get("text")) and seen.calls:
                seen.violate("chat/content-before-calls", "text after a tool_use block", number)
            seen.content += text(delta.get("text"))
        elif kind == "input_json_delta" and block.call is not None:
            piece = text(delta.get("partial_json"))
            block.call.arguments += piece
            block.call.fragments += bool(piece)

    def _content_block_stop(self, event: dict[str, Any], number: int) -> None:
        block = self.block
        if block is None or event.get("index") != block.index:
            self.seen.violate(
                "messages/block/one-at-a-time",
                f"content_block_stop for {event.get('index')!r}, open is "
                f"{block.index if block else 'none'}",
                number,
            )
            return
        if block.kind == "thinking" and block.signatures != 1:
            self.seen.violate(
                "messages/thinking-signed",
                f"a thinking block needs one non-empty signature_delta, got {block.signatures}",
                number,
            )
        self.block = None

    def _message_delta(self, event: dict[str, Any], number: int) -> None:
        seen = self.seen
        delta = table(event.get("delta"))
        if self.phase == "delta":
            seen.violate("messages/lifecycle/delta-once", "a second message_delta", number)
        if self.block is not None:
            seen.violate(
                "messages/block/one-at-a-time", f"block {self.block.index} is still open", number
            )
        self.phase = "delta"
        reason = text(delta.get("stop_reason"))
        if reason != "max_tokens" and not all(call.arguments for call in seen.calls):
            seen.violate("messages/tool-use/input-by-deltas", "no input_json_delta came", number)
        _finish(seen, reason, delta.get("stop_sequence"), number)
        final = usage(event.get("usage"))
        self.usage.completion = final.completion
        if final.completion is None:
            seen.violate("messages/usage", "message_delta has no usage.output_tokens", number)

    def _message_stop(self, _: dict[str, Any], number: int) -> None:
        if self.phase != "delta":
            self.seen.violate(
                "messages/lifecycle/delta-once", "message_stop without message_delta", number
            )
        self.phase = "stopped"


def _finish(seen: Observation, reason: str, sequence: Any, number: int | None = None) -> None:
    seen.finishes += 1
    seen.finish = FINISHES.get(reason, reason)
    if reason not in FINISHES:
        seen.violate("messages/stop-reason", f"stop_reason {reason!r}", number)
    if (reason == "stop_sequence") != isinstance(sequence, str):
        seen.violate(
            "messages/stop-reason",
            f"stop_reason {reason!r} with stop_sequence {sequence!r}",
            number,
        )


def _whole(seen: Observation, document: dict[str, Any]) -> None:
    slug = "messages/whole/shape"
    if document.get("type") != "message" or document.get("role") != "assistant":
        seen.violate(slug, f"type {document.get('type')!r}, role {document.get('role')!r}")
    if not text(document.get("id")) or not text(document.get("model")):
        seen.violate(slug, "id or model is missing or empty")
    if not isinstance(document.get("content"), list):
        seen.violate(slug, "content is no list")
    for block in rows(document.get("content")):
        kind = block.get("type")
        if kind == "text":
            seen.content += text(block.get("text"))
        elif kind == "thinking":
            seen.add_reasoning(text(block.get("thinking")))
            if not text(block.get("signature")):
                seen.violate("messages/thinking-signed", "a thinking block without signature")
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                seen.violate("messages/tool-use/shape", "tool_use.input is no object")
            call = Call(text(block.get("id")), text(block.get("name")))
            call.arguments = strict_json.dumps(block.get("input"))
            if not call.id or not call.name:
                seen.violate("messages/tool-use/shape", "tool_use without id or name")
            seen.calls.append(call)
    _finish(seen, text(document.get("stop_reason")), document.get("stop_sequence"))
    if document.get("usage") is not None:
        seen.usages.append(usage(document["usage"]))
