"""Observes Responses replies (OpenAI's Responses reference; protocol.md 2.10 for the order).

Grammar of a stream, as a state machine: created, in_progress, then items in turn, each bracketed
by output_item.added and .done with its parts and deltas inside, then exactly one of completed,
incomplete, failed. Each event carries its own name as `type` and the next sequence_number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from conformance.protocols.observation import Call, Observation, Usage, count, rows, table, text

TERMINAL = {"response.completed", "response.incomplete", "response.failed"}
REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}
PARTS = {"content_part", "reasoning_summary_part"}
# delta event -> (done event, field of the done event that repeats the joined deltas)
DELTAS = {
    "response.output_text.delta": ("response.output_text.done", "text"),
    "response.reasoning_text.delta": ("response.reasoning_text.done", "text"),
    "response.reasoning.delta": ("response.reasoning.done", "text"),
    "response.reasoning_summary_text.delta": ("response.reasoning_summary_text.done", "text"),
    "response.function_call_arguments.delta": (
        "response.function_call_arguments.done",
        "arguments",
    ),
    "response.custom_tool_call_input.delta": ("response.custom_tool_call_input.done", "input"),
}
DONES = {done: name for name, (done, _) in DELTAS.items()}
ITEM_OF = {
    "response.output_text.delta": "message",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.function_call_arguments.delta": "function_call",
    "response.custom_tool_call_input.delta": "custom_tool_call",
}


def observe(seen: Observation) -> None:
    """Fills `seen` from its frames or its document."""
    if seen.streamed:
        _Machine(seen).run()
    elif seen.document is not None:
        seen.error = seen.document.get("error")
        if seen.answered:
            _shape(seen, seen.document, "responses/whole/shape")
            _take_response(seen, seen.document)
        elif seen.error is None:
            seen.error = seen.document


@dataclass(slots=True)
class _Item:
    index: int
    id: str
    kind: str
    open_part: bool = False
    parts: int = 0
    joined: dict[str, str] = field(default_factory=dict)  # delta event -> text since the part began
    totals: dict[str, str] = field(default_factory=dict)  # delta event -> text of the item
    fragments: int = 0


class _Machine:
    """Walks the events of one stream once."""

    def __init__(self, seen: Observation) -> None:
        self.seen = seen
        self.item: _Item | None = None
        self.done: list[dict[str, Any]] = []
        self.fragments: list[int] = []
        self.ended = False
        self.phase = 0  # 0: created comes next, 1: in_progress comes next, 2: items

    def run(self) -> None:
        seen = self.seen
        for position, (number, event) in enumerate(seen.events):
            kind = text(event.get("type"))
            if event.get("sequence_number") != position:
                seen.violate(
                    "responses/sequence-gapless",
                    f"expected sequence_number {position}, got {event.get('sequence_number')!r}",
                    number,
                )
            if self.ended:
                seen.violate("responses/lifecycle/one-end", f"{kind} after the end", number)
            self._event(kind, event, number)
        if not self.ended and seen.error is None:
            seen.violate("responses/lifecycle/one-end", "no completed, incomplete or failed event")

    def _event(self, kind: str, event: dict[str, Any], number: int) -> None:
        if kind == "error":
            self.seen.error = event.get("error", event)
        elif kind in {"response.created", "response.in_progress", "response.queued"} | TERMINAL:
            self._lifecycle(kind, event, number)
        else:
            if self.phase < 2:
                self.seen.violate(
                    "responses/lifecycle/begin", f"{kind} before response.in_progress", number
                )
                self.phase = 2
            self._inside(kind, event, number)

    def _lifecycle(self, kind: str, event: dict[str, Any], number: int) -> None:
        response = event.get("response")
        if not isinstance(response, dict):
            self.seen.violate("responses/envelope", f"{kind} carries no response object", number)
            response = {}
        else:
            _shape(self.seen, response, "responses/envelope", number)
        if kind in TERMINAL:
            self._end(kind, response, number)
            return
        expected = ("response.created", "response.in_progress", "nothing of the kind")[self.phase]
        if kind != expected and kind != "response.queued":
            self.seen.violate(
                "responses/lifecycle/begin", f"expected {expected}, got {kind}", number
            )
        self.phase = min(2, self.phase + (kind != "response.queued"))

    def _end(self, kind: str, response: dict[str, Any], number: int) -> None:
        seen = self.seen
        self.ended = True
        seen.finishes += 1
        if self.item is not None:
            seen.violate("responses/item/closed", f"item {self.item.index} is still open", number)
        if response.get("status") != kind.removeprefix("response."):
            seen.violate(
                "responses/envelope", f"{kind} says status {response.get('status')!r}", number
            )
        listed = rows(response.get("output"))
        if kind != "response.failed" and listed != self.done:
            seen.violate(
                "responses/final-lists-items",
                f"output of {kind} ({len(listed)} items) differs from the {len(self.done)} items "
                "closed by output_item.done",
                number,
            )
        seen.error = response.get("error") or seen.error
        _take_response(seen, response | {"output": self.done})
        for call, fragments in zip(seen.calls, self.fragments, strict=False):
            call.fragments = fragments

    def _inside(self, kind: str, event: dict[str, Any], number: int) -> None:
        if kind == "response.output_item.added":
            self._added(event, number)
            return
        item = self.item
        if item is None:
            self.seen.violate("responses/item/announced", f"{kind} outside of any item", number)
            return
        index = event.get("output_index")
        identity = event.get("item_id", table(event.get("item")).get("id"))
        if index != item.index or identity != item.id:
            self.seen.violate(
                "responses/item/announced",
                f"{kind} names output_index {index!r} and item {identity!r}; open is "
                f"{item.index} with {item.id!r}",
                number,
            )
        if kind == "response.output_item.done":
            self._closed(item, table(event.get("item")), number)
        elif kind.startswith("response.") and kind.split(".")[1] in PARTS:
            self._part(item, kind, number)
        elif kind in DELTAS:
            self._delta(item, kind, event, number)
        elif kind in DONES:
            expected = item.joined.pop(DONES[kind], "")
            field_name = DELTAS[DONES[kind]][1]
            if event.get(field_name) != expected:
                self.seen.violate(
                    "responses/deltas-join",
                    f"{kind} says {text(event.get(field_name))[:80]!r}, the deltas joined are "
                    f"{expected[:80]!r}",
                    number,
                )

    def _added(self, event: dict[str, Any], number: int) -> None:
        raw = table(event.get("item"))
        if self.item is not None:
            self.seen.violate(
                "responses/item/closed", f"item {self.item.index} is still open", number
            )
        index = count(event.get("output_index"))
        if index != len(self.done):
            self.seen.violate(
                "responses/item/index-dense",
                f"expected output_index {len(self.done)}, got {event.get('output_index')!r}",
                number,
            )
        self.item = _Item(len(self.done) if index is None else index, text(raw.get("id")), "")
        self.item.kind = text(raw.get("type"))
        if not self.item.id or not self.item.kind:
            self.seen.violate("responses/item/shape", "an item without id or type", number)
        if self.item.kind == "function_call":
            if not text(raw.get("call_id")) or not text(raw.get("name")):
                self.seen.violate(
                    "responses/item/shape", "function_call without call_id or name", number
                )
            if raw.get("arguments") not in ("", None):
                self.seen.violate(
                    "responses/item/shape", "arguments are sent in output_item.added", number
                )

    def _part(self, item: _Item, kind: str, number: int) -> None:
        opens = kind.endswith(".added")
        if opens == item.open_part:
            self.seen.violate(
                "responses/part-bracketed",
                f"{kind} while a part is {'open' if item.open_part else 'not open'}",
                number,
            )
        item.open_part = opens

    def _delta(self, item: _Item, kind: str, event: dict[str, Any], number: int) -> None:
        seen = self.seen
        piece = text(event.get("delta"))
        if ITEM_OF[kind] != item.kind:
            seen.violate("responses/item/announced", f"{kind} inside a {item.kind} item", number)
        if item.kind in {"message", "reasoning"} and not item.open_part:
            seen.violate("responses/part-bracketed", f"{kind} outside of a part", number)
        if "reasoning" in kind and (self.done and any(i["type"] != "reasoning" for i in self.done)):
            seen.violate("stream/reasoning-first", "thinking after the answer began", number)
        item.joined[kind] = item.joined.get(kind, "") + piece
        item.totals[kind] = item.totals.get(kind, "") + piece
        item.fragments += bool(piece)

    def _closed(self, item: _Item, raw: dict[str, Any], number: int) -> None:
        seen = self.seen
        if item.open_part:
            seen.violate("responses/part-bracketed", "the item ends inside a part", number)
        for kind in item.joined:
            seen.violate("responses/deltas-join", f"no {DELTAS[kind][0]} after its deltas", number)
        final = {
            "response.output_text.delta": _item_text(raw, "content"),
            "response.reasoning_text.delta": _item_text(raw, "content"),
            "response.reasoning.delta": _item_text(raw, "content"),
            "response.reasoning_summary_text.delta": _item_text(raw, "summary"),
            "response.function_call_arguments.delta": text(raw.get("arguments")),
            "response.custom_tool_call_input.delta": text(raw.get("input")),
        }
        for kind, joined in final.items():
            if ITEM_OF[kind] == item.kind and item.totals.get(kind, joined) != joined:
                seen.violate(
                    "responses/deltas-join",
                    f"item {item.index}: output_item.done says {joined[:80]!r}, the deltas joined "
                    f"are {item.totals[kind][:80]!r}",
                    number,
                )
        if item.kind == "function_call":
            self.fragments.append(item.fragments)
            if text(raw.get("arguments")) and not item.totals:
                seen.violate(
                    "responses/deltas-join", "a call's arguments came without any delta", number
                )
        self.done.append(raw)
        self.item = None


def _shape(
    seen: Observation, response: dict[str, Any], slug: str, number: int | None = None
) -> None:
    if response.get("object") != "response" or not text(response.get("id")):
        seen.violate(
            slug, f"object is {response.get('object')!r}, id {response.get('id')!r}", number
        )
    if not isinstance(response.get("output"), list):
        seen.violate(slug, "output is no list", number)
    if not text(response.get("status")):
        seen.violate(slug, "status is missing", number)


def _item_text(item: dict[str, Any], key: str) -> str:
    return "".join(text(part.get("text")) for part in rows(item.get(key)))


def _take_response(seen: Observation, response: dict[str, Any]) -> None:
    """Reads the final object; for a stream its output is what the stream itself closed."""
    for item in rows(response.get("output")):
        kind = item.get("type")
        if kind == "message":
            seen.content += _item_text(item, "content")
        elif kind == "reasoning":
            seen.add_reasoning(_item_text(item, "content") or _item_text(item, "summary"))
        elif kind in {"function_call", "custom_tool_call"}:
            key = "arguments" if kind == "function_call" else "input"
            declared = next(
                (t for t in rows(seen.body.get("tools")) if t.get("name") == item.get("name")), {}
            )
            if (declared.get("type") == "custom") != (kind == "custom_tool_call") and declared:
                seen.violate(
                    "responses/item/tool-kind",
                    f"a {kind} of {item.get('name')!r}, a tool of type {declared.get('type')!r}",
                )
            if not isinstance(item.get(key), str) or not text(item.get("call_id")):
                seen.violate("responses/item/shape", f"{kind} without call_id or {key} text")
            seen.calls.append(
                Call(text(item.get("call_id")), text(item.get("name")), text(item.get(key)))
            )
    status = text(response.get("status"))
    if status == "completed":
        seen.finish = "tool_calls" if seen.calls else "stop"
    elif status == "incomplete":
        reason = text(table(response.get("incomplete_details")).get("reason"))
        seen.finish = REASONS.get(reason, reason or status)
        if reason not in REASONS:
            seen.violate("responses/envelope", f"incomplete for reason {reason!r}")
    seen.finishes = max(seen.finishes, 1)
    if response.get("usage") is not None:
        block = table(response["usage"])
        seen.usages.append(
            Usage(
                prompt=count(block.get("input_tokens")),
                completion=count(block.get("output_tokens")),
                total=count(block.get("total_tokens")),
                cached=count(table(block.get("input_tokens_details")).get("cached_tokens")),
                reasoning=count(table(block.get("output_tokens_details")).get("reasoning_tokens")),
            )
        )
