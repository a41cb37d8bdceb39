"""What a client understood of a reply, in words that are the same for every protocol.

An observer (chat.py, responses.py, messages.py) fills an `Observation` the way a tolerant client
would, and notes on the side each place where the reply left the protocol's grammar. Checks read
observations; they never see a protocol's JSON unless their subject is that JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from conformance import sse, strict_json
from conformance.client import Exchange
from conformance.model import Finding, Variant


@dataclass(slots=True)
class Call:
    """A tool call as the client has it at the end.

    Attributes:
        id: Call id ("" if none came).
        name: Tool name.
        arguments: JSON text; for a whole Messages reply, which carries an object, its JSON.
        index: Wire index of the call, None where the protocol has none or it was missing.
        fragments: Number of argument fragments.
    """

    id: str = ""
    name: str = ""
    arguments: str = ""
    index: int | None = None
    fragments: int = 0


@dataclass(slots=True)
class Usage:
    """Token counts of a reply; None where the reply does not say."""

    prompt: int | None = None
    completion: int | None = None
    total: int | None = None
    cached: int | None = None
    reasoning: int | None = None


@dataclass(slots=True)
class Observation:
    """A reply as understood.

    Attributes:
        variant: What was asked.
        body: The request body as an object ({} when it was not one).
        exchange: Raw bytes.
        frames: SSE frames (empty for a whole reply).
        comments: SSE comments.
        rest: Bytes of an unfinished frame at the end.
        events: (frame index, parsed data) of the frames that hold a JSON object.
        document: Parsed body of a whole reply or an error, None if it is no JSON object.
        content: Answer text.
        reasoning: Thinking text, None if the reply shows none.
        calls: Tool calls in order of appearance.
        finish: "stop", "tool_calls", "length", "content_filter", another value as sent, or None.
        finishes: Number of times an end was declared.
        usages: Every usage report, in order.
        logprobs: Entries of choices[].logprobs.content, as sent.
        others: With n > 1, what the choices after the first say, in order.
        engine_left: Whether the engine behind the server saw the reply abandoned; None where
            nobody looked.
        error: The error object, if the reply is one or a stream carried one.
        violations: Breaches of the protocol's grammar: (check slug, finding).
        strings: Every text sent, with a name of its place, for leak checks.
    """

    variant: Variant
    body: Mapping[str, Any]
    exchange: Exchange
    frames: list[sse.Frame] = field(default_factory=list)
    comments: list[sse.Comment] = field(default_factory=list)
    rest: bytes = b""
    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    document: dict[str, Any] | None = None
    content: str = ""
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)
    finish: str | None = None
    finishes: int = 0
    usages: list[Usage] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    others: list[Observation] = field(default_factory=list)
    engine_left: bool | None = None
    error: Any = None
    violations: list[tuple[str, Finding]] = field(default_factory=list)

    @property
    def faulty(self) -> bool:
        """True where the script ends in a fault of the backend."""
        script = self.variant.case.script
        return script is not None and script.finish == "error"

    @property
    def streamed(self) -> bool:
        """True when the reply is an event stream by its content type."""
        return self.exchange.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def answered(self) -> bool:
        """True for a reply that carries model output (status 200, not some other page)."""
        pages = any("document_has" in expect for expect in self.variant.case.expect)
        return self.exchange.status == 200 and not pages

    def violate(self, slug: str, message: str, frame: int | None = None) -> None:
        """Notes a breach of the grammar under the slug of the check that reports it."""
        self.violations.append((slug, Finding(message, frame)))

    def found(self, slug: str) -> Iterator[Finding]:
        """The breaches noted under `slug`."""
        return (finding for name, finding in self.violations if name == slug)

    def add_reasoning(self, text: str) -> None:
        """Appends thinking text."""
        self.reasoning = (self.reasoning or "") + text

    @property
    def strings(self) -> list[tuple[str, str]]:
        """(place, text) of everything the client would show or run."""
        found = [("content", self.content), ("reasoning", self.reasoning or "")]
        for number, call in enumerate(self.calls):
            found += [(f"calls[{number}].name", call.name), (f"calls[{number}].id", call.id)]
            found.append((f"calls[{number}].arguments", call.arguments))
        for number, other in enumerate(self.others, 1):
            found += [(f"choice {number}: {place}", said) for place, said in other.strings]
        return found

    @property
    def declared(self) -> list[str]:
        """Names of the tools the request declares, in order."""
        names = []
        for tool in self.body.get("tools") or ():
            if isinstance(tool, dict):
                spec = tool.get("function") if isinstance(tool.get("function"), dict) else tool
                names.append(str((spec or {}).get("name", "")))
        return names


def read(variant: Variant, body: Mapping[str, Any], exchange: Exchange) -> Observation:
    """Splits a reply into frames or a document; the protocol's observer goes on from here."""
    seen = Observation(variant, body, exchange)
    if seen.streamed:
        decoder = sse.Decoder()
        items: list[sse.Frame | sse.Comment] = []
        for _, piece in exchange.reads:
            items += decoder.feed(piece)
        last, seen.rest = decoder.close()
        for item in items + last:
            if isinstance(item, sse.Comment):
                seen.comments.append(item)
            else:
                seen.frames.append(item)
        for number, frame in enumerate(seen.frames):
            if frame.data.strip() == "[DONE]":
                continue
            try:
                value = orjson.loads(frame.data)
            except orjson.JSONDecodeError as error:
                seen.violate(
                    "sse/json", f"data is not JSON ({error}): {frame.data[:120]!r}", number
                )
                continue
            if isinstance(value, dict):
                seen.events.append((number, value))
            else:
                seen.violate("sse/json", f"data is no JSON object: {frame.data[:120]!r}", number)
    else:
        try:
            value = strict_json.loads(exchange.body.decode()) if exchange.body else None
        except (strict_json.JsonError, UnicodeDecodeError):
            value = None
        seen.document = value if isinstance(value, dict) else None
    return seen


def text(value: Any) -> str:
    """The value if it is a string, else ""."""
    return value if isinstance(value, str) else ""


def table(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object, else {}."""
    return value if isinstance(value, dict) else {}


def rows(value: Any) -> list[dict[str, Any]]:
    """The JSON objects in a list, [] for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def count(value: Any) -> int | None:
    """The value if it is an integer count, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
