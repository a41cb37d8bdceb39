"""SGLang's native parsing endpoints: a whole model output as text, its parts out.

The same parser and gate as a reply's, over another sink. Here nothing is streamed and the caller
sees every call, so undeclared ones are passed with index -1, as SGLang 0.5.23 does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from parsers.dialects import THINK_BEGIN_TEXT, THINK_END, THINK_END_TEXT, mark_text, spell
from parsers.dsml import DsmlParser
from parsers.gate import ToolGate
from parsers.policy import Action, Doubt, Hold
from parsers.schemas import is_schema
from parsers.toolset import ToolSet
from parsers.values import ToolChoice

if TYPE_CHECKING:
    from parsers.codec import Codec

_PIECE = 4096  # characters fed at once, so that the parser's buffer stays small


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call found in a text.

    Args:
        tool_index: position of the tool in ``tools``, -1 where it is not listed.
        name: the tool it names.
        parameters: the arguments, JSON text; the beginning of it where the text was cut.
    """

    tool_index: int
    name: str
    parameters: str


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """What ``parse_function_call`` found.

    Args:
        normal_text: the text outside of calls.
        calls: the calls, in order.
    """

    normal_text: str
    calls: tuple[ParsedCall, ...]


class _Collector:
    """A sink that keeps everything as text."""

    def __init__(self, text: str) -> None:
        self._source = text
        self._at = 0
        self.text: list[str] = []
        self.calls: list[tuple[str, list[str]]] = []

    def verbatim(self, size: int) -> None:
        self.text.append(self._source[self._at : self._at + size])
        self._at += size

    def drop(self, size: int) -> None:
        self._at += size

    def say(self, text: str) -> None:
        self.text.append(text)

    def end_reasoning(self) -> None:
        raise AssertionError("a text is parsed without a notion of reasoning")

    def open_block(self) -> None:
        pass  # SGLang's reply shows calls, not their block

    def open_call(self, name: str) -> None:
        if not self.calls:  # the codec swallows the newlines before the first call
            self.text = ["".join(self.text).rstrip("\n")]
        self.calls.append((name, []))

    def key(self, name: str, *, first: bool) -> None:
        quoted = orjson.dumps(name).decode()
        self.calls[-1][1].append(f"{'{' if first else ', '}{quoted}: ")

    def value(self, text: str) -> None:
        self.calls[-1][1].append(text)

    def close_call(self, *, empty: bool) -> None:
        self.calls[-1][1].append("{}" if empty else "}")


def parse_function_call(codec: Codec, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedCalls:
    """Find the calls in a text that a model wrote; any spelling of the markers counts.

    Args:
        codec: whose profile mends arguments; what it says of undeclared tools, doubtful blocks
            and stray markers does not apply, for the caller wants to see them.
        text: the output, with or without its reasoning.
        tools: function tools in the Chat Completions form; without any, the text is returned as
            it is. Of one whose parameters are no JSON Schema only the name counts.

    Returns:
        The text around the calls, without ``</think>``, and the calls. Text after the calls is
        left out, and a cut call keeps cut parameters, both as SGLang's endpoint does.
    """
    if not tools:
        return ParsedCalls(text, ())
    policy = replace(
        codec.profile.gate,
        undeclared_tool=Action.PASS,
        doubtful_block=Doubt.CALL,
        stray_marker=Action.PASS,
        hold=Hold.PARAMETER,
    )
    marked = mark_text(text)
    sink = _Collector(marked)
    names = ToolSet([_sound(tool) for tool in tools])
    gate = ToolGate(
        names,
        policy,
        sink,
        reasoning=False,
        choice=ToolChoice(),
    )
    parser = DsmlParser()
    for piece in _pieces(marked):
        for event in parser.feed(piece):
            gate.handle(event)
    gate.close(parser.close(), "length")
    normal = spell("".join(sink.text).replace(THINK_END, ""))
    calls = (ParsedCall(names.index(name), name, "".join(json)) for name, json in sink.calls)
    return ParsedCalls(normal, tuple(calls))


def _sound(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool["function"]
    if function.get("parameters") is None or is_schema(function["parameters"]):
        return tool
    return {"function": {key: value for key, value in function.items() if key != "parameters"}}


def _pieces(text: str) -> Iterator[str]:
    for at in range(0, len(text), _PIECE):
        yield text[at : at + _PIECE]


@dataclass(frozen=True, slots=True)
class Separated:
    """What ``separate_reasoning`` found; the names are those of SGLang's reply.

    Args:
        reasoning_text: the reasoning, without its tags.
        text: the rest, calls included.
    """

    reasoning_text: str
    text: str

    def reply(self, *, blocks: bool) -> dict[str, Any]:
        """Return SGLang's reply; with ``blocks`` also both parts as lists, and in their order."""
        out: dict[str, Any] = {"reasoning_text": self.reasoning_text, "text": self.text}
        if blocks:
            parts = [("reasoning", self.reasoning_text), ("text", self.text)]
            out["reasoning_blocks"] = [self.reasoning_text] if self.reasoning_text else []
            out["text_blocks"] = [self.text] if self.text else []
            out["blocks"] = [{"type": kind, "text": text} for kind, text in parts if text]
        return out


def separate_reasoning(text: str) -> Separated:
    """Split a model's output into reasoning and answer.

    There is reasoning if the text begins with ``<think>`` or holds ``</think>``; without the
    latter all of it is reasoning (SGLang 0.5.23, protocol.md 3.5).

    Args:
        text: the output; calls in it stay as they are.
    """
    opened = text.startswith(THINK_BEGIN_TEXT)
    thought, end, rest = text.removeprefix(THINK_BEGIN_TEXT).partition(THINK_END_TEXT)
    if not opened and not end:
        return Separated("", text)
    return Separated(thought, rest)
