"""Responses requests: checks with names, and the changes made before the codec reads them.

Knows the body, the served model, the profile and what a store holds of earlier responses; knows
neither the codec nor tokens. The items are the affair of ``parsers.responses_items``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import orjson

from parsers.body import Body, check_fields, drop_nulls, integer, kind, require, written
from parsers.edits import PATCH, SEARCH
from parsers.errors import ClientError
from parsers.formats import responses_format
from parsers.reasoning import ReasoningStore
from parsers.request import (
    FLAG,
    SAMPLING,
    TOKEN_LIMIT,
    Request,
    Stored,
    check_effort,
    check_model,
    custom_parameters,
    flat,
    function_tool,
    unheeded,
)
from parsers.responses_items import ItemReader
from parsers.rules import Profile
from parsers.values import ServedModel, ToolChoice

_TEXT = kind(str, "a string")
_OBJECT = kind(dict, "an object")


def _is_strings(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


FIELDS = {
    **SAMPLING,
    "stream": FLAG,
    "store": FLAG,
    "background": FLAG,
    "parallel_tool_calls": FLAG,
    "max_output_tokens": TOKEN_LIMIT,
    "top_logprobs": integer(0, 20),
    "instructions": _TEXT,
    "previous_response_id": _TEXT,
    "input": (lambda v: isinstance(v, str | list), "a string or an array of items"),
    "tools": kind(list, "an array of tools"),
    "reasoning": _OBJECT,
    "text": _OBJECT,
    "metadata": (_is_strings, "an object of strings"),
    "include": kind(list, "an array of strings"),
    "user": _TEXT,
}
HONOURED = frozenset(FIELDS) - {"user"} | {"model", "tool_choice"}
NEUTRAL: dict[str, Any] = {
    "truncation": "disabled",
    "service_tier": "auto",
    "stream_options": {"include_obfuscation": False},
}
# What the codec gets to read; the rest is settled here or by whoever keeps a store.
_CODEC_FIELDS = HONOURED - {
    "store",
    "background",
    "previous_response_id",
    "metadata",
    "include",
    "parallel_tool_calls",
}
_UNSUPPORTED = ("conversation", "prompt")
_MODES: dict[str, Literal["none", "auto", "required"]] = {
    "none": "none",
    "auto": "auto",
    "required": "required",
}


def read_responses(
    raw: Body,
    served: ServedModel,
    profile: Profile,
    store: ReasoningStore | None,
    *,
    stateful: bool = False,
    history: bytes | None = None,
    find_item: Callable[[str], bytes | None] | None = None,
) -> Request:
    """Check a Responses body and rewrite it for the codec.

    Args:
        raw: the parsed body; not changed.
        served: the model that will answer.
        profile: the rules.
        store: where missing reasoning may be found.
        stateful: responses are kept, so the body may ask for it.
        history: what is kept of ``previous_response_id``.
        find_item: looks a kept output item up by its id.

    Raises:
        ClientError: a field is missing, has the wrong shape or breaks a rule.
    """
    body = drop_nulls(raw)
    name = check_model(body, served)
    check_fields(body, FIELDS)
    for field in _UNSUPPORTED:
        if field in body:
            raise ClientError(
                f"{field}: not supported by this server", code="unsupported_parameter", param=field
            )
    ignored = list(unheeded(body, HONOURED, NEUTRAL))
    stored = _read_state(body, stateful, history)
    reader = ItemReader(served, profile, store, find_item, ignored)
    items = reader.read(stored.history, stored.items)
    tools = _Tools(body, profile, ignored, reader.found_tools)
    choice = _read_tool_choice(body, tools, profile, ignored)
    summary = _read_reasoning(body)
    if extra := [i for i in body.get("include", []) if i != "reasoning.encrypted_content"]:
        ignored += [f"include.{i}" for i in extra if isinstance(i, str)]

    text = drop_nulls(body.get("text", {}))
    kinds, verbosity = ("low", "medium", "high"), text.get("verbosity", "medium")
    require(verbosity in kinds, "text.verbosity", f"one of {', '.join(kinds)}", verbosity)
    if "text" in body:
        body["text"] = text
    echo = _echo(raw, body, stored, tools, stateful=stateful)
    body["model"] = served.name
    if items or "input" in body:
        require(
            bool(items), "input", "an item that holds something for the model", body.get("input")
        )
        body["input"] = items
    if tools.kept:
        body["tools"] = tools.kept
        body["tool_choice"] = _codec_choice(choice, tools.customs)
    else:
        body.pop("tools", None)
        body.pop("tool_choice", None)
    return Request(
        body={field: value for field, value in body.items() if field in _CODEC_FIELDS},
        model=name,
        tools=tuple(tools.functions),
        tool_choice=choice,
        parallel_calls=body.get("parallel_tool_calls", True),
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        ignored=tuple(sorted(ignored)),
        reply_format=responses_format(text["format"]) if "format" in text else None,
        customs=frozenset(tools.customs),
        searches=tools.searches,
        summary=summary,
        echo=echo,
        stored=stored,
    )


def _read_state(body: Body, stateful: bool, history: bytes | None) -> Stored:
    previous = body.get("previous_response_id")
    if previous is not None and (not stateful or history is None):
        why = "there is no such response" if stateful else "this server keeps no responses"
        raise ClientError(
            f"previous_response_id: {why}; send the whole input",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    background = body.get("background", False)
    if background and not stateful:
        raise ClientError(
            "background: this server keeps no responses to be fetched later",
            code="unsupported_parameter",
            param="background",
        )
    sent = body.get("input", [])
    if isinstance(sent, str):
        part = {"type": "input_text", "text": sent}
        sent = [{"type": "message", "role": "user", "content": [part]}]
    kept: Any = [] if history is None or previous is None else orjson.loads(history)
    if isinstance(kept, dict):
        kept = [*kept["input"], *kept["output"]]
    enough = bool(sent or kept) or ("input" not in body and bool(body.get("instructions")))
    require(enough, "input", "a string or a non-empty array of items", sent)
    written(sent, "input")  # a store has to be able to write it
    for i, item in enumerate(sent):
        require(isinstance(item, dict), f"input[{i}]", "an object", item)
    return Stored(
        wanted=body.get("store", True),
        background=background,
        previous=previous,
        items=tuple(sent),
        history=tuple(kept),
    )


def _read_reasoning(body: Body) -> bool:
    """Check ``reasoning``; returns whether a summary is wanted."""
    reasoning = body.get("reasoning", {})
    if reasoning.get("effort") is not None:
        check_effort(reasoning["effort"], "reasoning.effort")
    kinds = ("auto", "concise", "detailed")
    asked = [(name, reasoning.get(name)) for name in ("summary", "generate_summary")]
    for name, wanted in asked:
        ok = wanted is None or wanted in kinds
        require(ok, f"reasoning.{name}", f"one of {', '.join(kinds)}", wanted)
    return any(wanted is not None for _, wanted in asked)


class _Tools:
    """The tools of a body: for the codec, for the gate, and which of them are special."""

    def __init__(
        self, body: Body, profile: Profile, ignored: list[str], found: list[dict[str, Any]]
    ) -> None:
        self.kept: list[dict[str, Any]] = []
        self.functions: list[dict[str, Any]] = []
        self.customs: set[str] = set()
        self.searches = False
        self.dropped = False
        self._seen: set[str] = set()
        self._profile = profile
        self._ignored = ignored
        for i, tool in enumerate(body.get("tools", [])):
            self._read(tool, f"tools[{i}]")
        for tool in found:  # what a search of the client has brought to light
            name = tool.get("name")
            if isinstance(name, str) and name not in self._seen:
                extra = {key: value for key, value in tool.items() if key != "defer_loading"}
                self._read(extra, f"tool {name!r} of a tool_search_output")

    def _read(self, tool: Any, at: str) -> None:
        require(isinstance(tool, dict), at, "an object", tool)
        if self._profile.lenient_messages:
            tool = flat(tool)
        type_ = tool.get("type")
        require(isinstance(type_, str), f"{at}.type", "a string", type_)
        if type_ == "function":
            self._function(tool, at)
        elif type_ == "custom":
            self._custom(tool, at)
        elif type_ == "namespace":
            self.kept.append(self._namespace(tool, at))
        elif type_ == SEARCH and tool.get("execution") == "client":
            self.searches = True
            schema = tool.get("parameters") or {"type": "object"}
            self._function(
                {
                    "type": "function",
                    "name": SEARCH,
                    "description": tool.get("description"),
                    "parameters": schema,
                },
                at,
            )
        elif type_.startswith("web_search") or self._profile.hosted_tools == "drop":
            # A search of the web is what the official codec drops for every client.
            self.dropped = True
            self._ignored.append(f"{at}.{type_}")
        else:
            raise ClientError(
                f"{at}.type: this server runs no tools itself; {type_!r} cannot be served",
                code="unsupported_tool",
                param=f"{at}.type",
            )

    def _function(self, tool: dict[str, Any], at: str) -> None:
        parameters = tool.get("parameters")
        require(
            parameters is None or isinstance(parameters, dict | bool),
            f"{at}.parameters",
            "a JSON Schema object",
            parameters,
        )
        self.functions.append(
            function_tool(
                tool.get("name"),
                tool.get("description"),
                parameters,
                at,
                self._seen,
                strict=tool.get("strict") is True,
            )
        )
        self.kept.append({key: value for key, value in tool.items() if value is not None})

    def _namespace(self, tool: dict[str, Any], at: str) -> dict[str, Any]:
        """Check what the codec reads of a namespace; its errors have no path."""
        name, inner = tool.get("name"), tool.get("tools")
        require(isinstance(name, str), f"{at}.name", "a string", name)
        require(isinstance(inner, list), f"{at}.tools", "an array of tools", inner)
        assert isinstance(inner, list)
        self._seen.add(str(name))
        kept = []
        for i, part in enumerate(inner):
            where = f"{at}.tools[{i}]"
            require(isinstance(part, dict), where, "an object", part)
            part = drop_nulls(flat(part) if self._profile.lenient_messages else part)
            kinds, type_ = ("function", "custom"), part.get("type")
            require(type_ in kinds, f"{where}.type", f"one of {', '.join(kinds)}", type_)
            name = part.get("name")
            require(isinstance(name, str), f"{where}.name", "a string", name)
            kept.append(part)
        return {**drop_nulls(tool), "tools": kept}

    def _custom(self, tool: dict[str, Any], at: str) -> None:
        text, schema = custom_parameters(tool)
        self.functions.append(function_tool(tool.get("name"), text, schema, at, self._seen))
        name = tool["name"]
        self.customs.add(name)
        if name == PATCH:  # the codec has words of its own for this one
            self.kept.append(tool)
        else:
            function = {"name": name, "description": text, "parameters": schema}
            self.kept.append({"type": "function", **function})


def _read_tool_choice(
    body: Body, tools: _Tools, profile: Profile, ignored: list[str]
) -> ToolChoice:
    choice: Any = body.get("tool_choice", "auto")
    expected = "'none', 'auto', 'required' or one of tools"
    names = frozenset(tool["function"]["name"] for tool in tools.functions)
    if isinstance(choice, str):
        require(choice in _MODES, "tool_choice", expected, choice)
        if choice == "required" and not tools.kept:
            raise ClientError("tool_choice: 'required' needs tools", param="tool_choice")
        return ToolChoice(_MODES[choice])
    require(isinstance(choice, dict), "tool_choice", expected, choice)
    read = flat if profile.lenient_messages else dict[str, Any]
    choice = read(choice)
    type_ = choice.get("type")
    if type_ == "allowed_tools":
        mode, listed = choice.get("mode"), choice.get("tools")
        require(mode in ("auto", "required"), "tool_choice.mode", "'auto' or 'required'", mode)
        require(
            isinstance(listed, list) and bool(listed),
            "tool_choice.tools",
            "a non-empty array",
            listed,
        )
        allowed = [read(tool).get("name") for tool in listed if isinstance(tool, dict)]
        known = names.intersection(name for name in allowed if isinstance(name, str))
        if not known:
            raise ClientError(
                "tool_choice.tools: none of them is one of tools", param="tool_choice.tools"
            )
        return ToolChoice(_MODES[mode], known)
    if type_ in ("function", "custom"):
        name = choice.get("name")
        require(isinstance(name, str), "tool_choice.name", "a tool's name", name)
        if name not in names:
            raise ClientError(
                f"tool_choice.name: no tool of tools is named {name!r}", param="tool_choice.name"
            )
        return ToolChoice("required", frozenset([name]))
    require(isinstance(type_, str), "tool_choice", expected, choice)
    if profile.hosted_tools == "refuse" and not str(type_).startswith("web_search"):
        raise ClientError(
            f"tool_choice.type: this server runs no tools itself; {type_!r} cannot be chosen",
            code="unsupported_tool",
            param="tool_choice.type",
        )
    ignored.append("tool_choice")
    return ToolChoice()


def _codec_choice(choice: ToolChoice, customs: set[str]) -> Any:
    name = choice.only
    if name is None:
        return choice.mode
    return {"type": "custom" if name == PATCH and name in customs else "function", "name": name}


def _echo(
    raw: Body, body: Body, stored: Stored, tools: _Tools, *, stateful: bool
) -> dict[str, Any]:
    """Return the fields of the reply that repeat the request and the codec would get wrong."""
    echo: dict[str, Any] = {}
    if stored.wanted and stateful:
        echo["store"] = True
    if stored.previous is not None:
        echo["previous_response_id"] = stored.previous
    if stored.background:
        echo["background"] = True
    if body.get("metadata"):
        echo["metadata"] = body["metadata"]
    if body.get("parallel_tool_calls") is False:
        echo["parallel_tool_calls"] = False
    if tools.customs or tools.searches or tools.dropped:
        echo["tools"] = raw.get("tools") or []  # all may come from a search of the client
    if isinstance(raw.get("tool_choice"), dict):
        echo["tool_choice"] = raw["tool_choice"]
    return echo
