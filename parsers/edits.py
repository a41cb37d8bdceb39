"""Changes to what the codec writes, for tools and options that it does not know.

Knows the JSON of a protocol's chunks; knows neither tokens nor the gate. Only the few chunks that
a change concerns are parsed; all others pass as the text they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

PATCH = "apply_patch"
"""The one custom tool the codec can write calls of; every custom call goes through it."""
SEARCH = "tool_search"
_PATCH_FUNCTION = "apply_patch_function"

_CALL_INDEX = re.compile(r"call_(\d+)_")
_SEQUENCE = re.compile(r'(?<!\\)"sequence_number":(\d+)')
_UNITS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)
_INPUT = '{"input": "'


class ResponsesEdits:
    """Custom tools of any name, reasoning summaries, and fields that repeat the request.

    A call of a custom tool is written to the codec under the name of the one custom tool it knows,
    and the real name is put back by the number in the call's id.

    Args:
        customs: names of the custom tools.
        functions: names of the other tools.
        searches: the request declares a ``tool_search``.
        summary: repeat the reasoning as a summary. There is no summariser here: it is the text.
        echo: fields of the response object to be set.

    Attributes:
        aliases: names under which calls are to be written to the codec.
        names: the real names of the calls written so far, in order; filled by the writer.
        stand_ins: tools the codec's writer is to believe in; empty where it may see the real ones.
    """

    def __init__(
        self,
        customs: frozenset[str],
        functions: Sequence[str],
        *,
        searches: bool,
        summary: bool,
        echo: dict[str, Any],
    ) -> None:
        self.aliases = dict.fromkeys(customs, PATCH)
        if customs and PATCH in functions and PATCH not in customs:
            self.aliases[PATCH] = _PATCH_FUNCTION
        self.names: list[str] = []
        self.stand_ins: list[dict[str, Any]] = []
        if customs:
            self.stand_ins.append({"type": "custom", "name": PATCH})
        if searches:
            self.stand_ins.append(
                {"type": SEARCH, "execution": "client", "parameters": {"type": "object"}}
            )
        self._summary = summary
        self._echo = echo
        self._shift = 0  # events put in so far

    def chunk(self, chunk: str) -> list[str]:
        """Return what is sent in place of an event."""
        kind = chunk[9 : chunk.index('"', 9)].removeprefix("response.")
        if kind in ("created", "in_progress", "completed", "incomplete"):
            event = orjson.loads(chunk)
            self._response(event["response"])
            chunk = orjson.dumps(event).decode()
        elif kind.startswith("output_item") and (self._summary or self.aliases):
            event = orjson.loads(chunk)
            self._item(event["item"])
            chunk = orjson.dumps(event).decode()
        if not self._summary:
            return [chunk]
        return self._numbered(chunk, kind)

    def body(self, body: str) -> str:
        """Return the whole response that is sent."""
        response = orjson.loads(body)
        self._response(response)
        return orjson.dumps(response).decode()

    def _response(self, response: dict[str, Any]) -> None:
        response.update(self._echo)
        for item in response["output"]:
            self._item(item)

    def _item(self, item: dict[str, Any]) -> None:
        if item["type"] in ("custom_tool_call", "function_call"):
            if item["name"] in (PATCH, _PATCH_FUNCTION) and self.aliases:
                found = _CALL_INDEX.match(item["call_id"])
                index = int(found[1]) if found else len(self.names)
                if index < len(self.names):
                    item["name"] = self.names[index]
        elif item["type"] == "reasoning" and self._summary:
            item["summary"] = [
                {"type": "summary_text", "text": part["text"]} for part in item["content"]
            ]

    def _numbered(self, chunk: str, kind: str) -> list[str]:
        """Put the summary's events behind the ones they repeat, and count on from there."""
        at = list(_SEQUENCE.finditer(chunk))[-1]  # what a client's names could imitate comes before
        number = int(at[1]) + self._shift
        chunk = f'{chunk[: at.start()]}"sequence_number":{number}{chunk[at.end() :]}'
        out = [chunk]
        for made in self._repeated(chunk, kind):
            self._shift += 1
            number += 1
            out.append(orjson.dumps({**made, "sequence_number": number}).decode())
        return out

    def _repeated(self, chunk: str, kind: str) -> list[dict[str, Any]]:
        if kind not in ("content_part.added", "reasoning_text.delta", "reasoning_text.done"):
            return []
        event = orjson.loads(chunk)
        begin = "response.reasoning_summary_"
        at = {
            "item_id": event["item_id"],
            "output_index": event["output_index"],
            "summary_index": event["content_index"],
        }
        if kind == "reasoning_text.delta":
            return [{"type": f"{begin}text.delta", **at, "delta": event["delta"]}]
        if kind == "content_part.added":
            if event["part"]["type"] != "reasoning_text":
                return []
            part = {"type": "summary_text", "text": ""}
            return [{"type": f"{begin}part.added", **at, "part": part}]
        part = {"type": "summary_text", "text": event["text"]}
        return [
            {"type": f"{begin}text.done", **at, "text": event["text"]},
            {"type": f"{begin}part.done", **at, "part": part},
        ]


class ChatEdits:
    """Custom tools in Chat Completions: arguments become the one free text they hold.

    Args:
        customs: names of the custom tools.

    Attributes:
        aliases: see ``ResponsesEdits``; none here.
        names: likewise.
        stand_ins: likewise.
    """

    def __init__(self, customs: frozenset[str]) -> None:
        self.aliases: dict[str, str] = {}
        self.names: list[str] = []
        self.stand_ins: list[dict[str, Any]] = []
        self._customs = customs
        self._open: dict[int, _Input] = {}

    def chunk(self, chunk: str) -> list[str]:
        """Return what is sent in place of a chunk."""
        if '"tool_calls":[' not in chunk:
            return [chunk]
        data = orjson.loads(chunk)
        kept = []
        for call in data["choices"][0]["delta"].get("tool_calls", ()):
            index, function = call["index"], call["function"]
            if function.get("name") in self._customs:
                self._open[index] = _Input()
                custom = {"name": function["name"], "input": ""}
                kept.append({"index": index, "id": call["id"], "type": "custom", "custom": custom})
            elif index in self._open:
                text = self._open[index].feed(function["arguments"])
                if text:
                    kept.append({"index": index, "custom": {"input": text}})
            else:
                kept.append(call)
        if not kept:
            return []
        data["choices"][0]["delta"]["tool_calls"] = kept
        return [orjson.dumps(data).decode()]

    def body(self, body: str) -> str:
        """Return the whole reply that is sent."""
        data = orjson.loads(body)
        message = data["choices"][0]["message"]
        for call in message.get("tool_calls") or ():
            function = call.get("function", {})
            if function.get("name") in self._customs:
                text = _Input().feed(function["arguments"])
                call["type"] = "custom"
                call["custom"] = {"name": function["name"], "input": text}
                del call["function"]
        return orjson.dumps(data).decode()


class _Input:
    """Takes the text out of ``{"input": "..."}`` as it comes; anything else stays as it is."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "before"

    def feed(self, piece: str) -> str:
        self._held += piece
        if self._state == "before":
            if _INPUT.startswith(self._held) and self._held != _INPUT:
                return ""
            self._state = "raw"
            if self._held.startswith(_INPUT):
                self._state = "inside"
                self._held = self._held[len(_INPUT) :]
        if self._state == "raw":
            out, self._held = self._held, ""
            return out
        if self._state == "over":
            return ""
        found = _UNITS.match(self._held)
        assert found is not None
        text, self._held = found[0], self._held[found.end() :]
        if self._held.startswith('"'):
            self._state = "over"
        return str(orjson.loads(f'"{text}"'))


Edits = ResponsesEdits | ChatEdits
