"""How a broken server is made: each is the correct server with one small fault, and names the checks it proves.

The faults are those seen in the field (docs/conformance.md names the reports behind the checks).
A fault is a function on one layer of the reply: what is going to be said (plan), the frames of a
stream, the document of a whole reply, an error body, or the bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tests.conformance.correct_server import Mutation, Reply
from tests.conformance.correct_wire import Frames, Plan

Layer = Literal["plan", "frames", "document", "error", "reply", "engine"]


@dataclass(frozen=True)
class Broken(Mutation):
    """One fault.

    Attributes:
        name: Name of the fault.
        catches: Slugs of checks that have to see it.
        layer: Where it sits.
        protocol: The protocol it is limited to, "" for all.
        fault: The function; it gets its own copy and returns the changed thing.
    """

    name: str
    catches: tuple[str, ...]
    layer: Layer
    protocol: str
    fault: Callable[..., Any]

    def _at(self, layer: Layer, protocol: str) -> bool:
        return self.layer == layer and self.protocol in ("", protocol)

    def plan(self, plan: Plan, body: dict[str, Any]) -> Plan:
        return self.fault(plan, body) if self.layer == "plan" else plan

    def frames(self, protocol: str, frames: Frames) -> Frames:
        if not self._at("frames", protocol):
            return frames
        return self.fault(copy.deepcopy(frames))

    def document(self, protocol: str, document: dict[str, Any]) -> dict[str, Any]:
        if not self._at("document", protocol):
            return document
        return self.fault(copy.deepcopy(document))

    def error(self, protocol: str, document: dict[str, Any], status: int) -> dict[str, Any]:
        if not self._at("error", protocol):
            return document
        return self.fault(copy.deepcopy(document))

    def reply(self, protocol: str, reply: Reply) -> Reply:
        return self.fault(reply) if self._at("reply", protocol) else reply

    def engine_left(self) -> bool:
        return bool(self.fault()) if self.layer == "engine" else True


BROKEN: dict[str, Broken] = {}


def broken(layer: Layer, name: str, *catches: str, protocol: str = "") -> Callable[..., Any]:
    def register(fault: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in BROKEN
        BROKEN[name] = Broken(name, catches, layer, protocol, fault)
        return fault

    return register


def fragments(frames: Frames) -> list[tuple[int, dict[str, Any]]]:
    """(frame number, tool_calls item) of a chat stream."""
    return [
        (number, part)
        for number, (_, chunk) in enumerate(frames)
        for choice in chunk.get("choices", ())
        for part in choice["delta"].get("tool_calls") or ()
    ]


def opening(frames: Frames) -> list[dict[str, Any]]:
    return [part for _, part in fragments(frames) if "id" in part]


def going_on(frames: Frames) -> list[dict[str, Any]]:
    return [part for _, part in fragments(frames) if "id" not in part]


def of(frames: Frames, kind: str) -> list[dict[str, Any]]:
    return [data for _, data in frames if data.get("type") == kind]


def without(frames: Frames, kind: str) -> Frames:
    return [(name, data) for name, data in frames if data.get("type") != kind]
