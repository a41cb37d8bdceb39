"""Messages requests: checks with names, and the changes made before the codec reads them.

Knows the body, the served model and the profile; knows neither the codec nor tokens. The blocks of
a history are the affair of ``parsers.messages_history``.
"""

from __future__ import annotations

import re
from typing import Any

from parsers.body import Body, check_fields, drop_nulls, kind, require
from parsers.errors import ClientError
from parsers.messages_history import read_messages
from parsers.reasoning import ReasoningStore
from parsers.request import (
    FLAG,
    SAMPLING,
    TOKEN_LIMIT,
    Request,
    check_effort,
    check_model,
    flat,
    function_tool,
    unheeded,
)
from parsers.rules import Profile
from parsers.schemas import check_schema
from parsers.values import ReplyFormat, ServedModel, ToolChoice


def _is_stops(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 16
        and all(isinstance(item, str) and item for item in value)
    )


FIELDS = {
    **SAMPLING,
    "stream": FLAG,
    "max_tokens": TOKEN_LIMIT,
    "system": (lambda v: isinstance(v, str | list), "a string or an array of text blocks"),
    "tools": kind(list, "an array of tools"),
    "tool_choice": kind(dict, "an object"),
    "thinking": kind(dict, "an object"),
    "stop_sequences": (_is_stops, "at most 16 non-empty strings"),
    "output_config": kind(dict, "an object"),
    "metadata": kind(dict, "an object"),
}
HONOURED = frozenset(FIELDS) - {"metadata"} | {"model", "messages"}
NEUTRAL: dict[str, Any] = {"metadata": {}, "mcp_servers": [], "stream_options": {}}

BILLING_LINE = "x-anthropic-billing-header:"

_TEXT = {"type": "string"}
# Tools whose calls the client runs itself, though the protocol does not let it declare them in
# full. The names are the protocol's; the parameters are what its clients read.
_CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Run a command in a shell that stays open between calls; `restart` opens a new one.",
        {
            "type": "object",
            "properties": {"command": _TEXT, "restart": {"type": "boolean"}},
        },
    ),
    "text_editor": (
        "View, create and edit text files.",
        {
            "type": "object",
            "properties": {
                "command": {
                    "type": "string",
                    "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
                },
                "path": _TEXT,
                "file_text": _TEXT,
                "old_str": _TEXT,
                "new_str": _TEXT,
                "insert_line": {"type": "integer"},
                "insert_text": _TEXT,
                "view_range": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["command", "path"],
        },
    ),
    "memory": (
        "Keep notes in files that outlast this conversation.",
        {
            "type": "object",
            "properties": {
                "command": {
                    "type": "string",
                    "enum": ["view", "create", "str_replace", "insert", "delete", "rename"],
                },
                "path": _TEXT,
                "file_text": _TEXT,
                "old_str": _TEXT,
                "new_str": _TEXT,
                "insert_line": {"type": "integer"},
                "insert_text": _TEXT,
                "old_path": _TEXT,
                "new_path": _TEXT,
                "view_range": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["command"],
        },
    ),
}
_DATED = re.compile(r"(.+)_\d{8}\Z")


def read_messages_request(
    raw: Body, served: ServedModel, profile: Profile, store: ReasoningStore | None
) -> Request:
    """Check a Messages body and rewrite it for the codec.

    Args:
        raw: the parsed body; not changed.
        served: the model that will answer.
        profile: the rules.
        store: where missing reasoning may be found.

    Raises:
        ClientError: a field is missing, has the wrong shape or breaks a rule.
    """
    body = drop_nulls(raw)
    if "thread" in body:  # clients.md section 2, row 11: the SDK then sends the whole history
        raise ClientError(
            "thread: this server keeps no threads; send the whole history",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )
    name = check_model(body, served)
    check_fields(body, FIELDS)
    ignored = list(unheeded(body, HONOURED, NEUTRAL))
    _read_system(body, profile)
    wanted = _read_output_config(body)
    tools = _read_tools(body, profile, ignored)
    choice, parallel = _read_tool_choice(body, tools)
    if "thinking" in body:
        switch = body["thinking"].get("type")
        kinds = ("enabled", "adaptive", "disabled")
        require(switch in kinds, "thinking.type", f"one of {', '.join(kinds)}", switch)
    messages = read_messages(body, served, profile, store, ignored)
    prefill = profile.prefill and messages[-1]["role"] == "assistant"
    if prefill and not _speaks(messages[-1]["content"]):
        prefill = False
        messages = messages[:-1] or messages

    body |= {"model": served.name, "messages": messages}
    return Request(
        body={field: value for field, value in body.items() if field in HONOURED},
        model=name,
        tools=tools,
        tool_choice=choice,
        parallel_calls=parallel,
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        ignored=tuple(sorted(ignored)),
        reply_format=wanted,
        prefill=prefill,
    )


def _speaks(content: Any) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(block.get("type") == "text" and block["text"].strip() for block in content)


def _read_system(body: Body, profile: Profile) -> None:
    system = body.get("system")
    if isinstance(system, list):
        for i, block in enumerate(system):
            text = block.get("text") if isinstance(block, dict) else None
            require(isinstance(text, str), f"system[{i}].text", "a text block", block)
        if profile.strip_billing_line and system:
            first = _without_billing(system[0]["text"])
            body["system"] = [*([{**system[0], "text": first}] if first else []), *system[1:]]
    elif isinstance(system, str) and profile.strip_billing_line:
        body["system"] = _without_billing(system)
    if not body.get("system", True):
        del body["system"]


def _without_billing(text: str) -> str:
    line, _, rest = text.partition("\n")
    return rest.lstrip("\n") if line.startswith(BILLING_LINE) else text


def _read_output_config(body: Body) -> ReplyFormat | None:
    config = body.get("output_config", {})
    if config.get("effort") is not None:
        check_effort(config["effort"], "output_config.effort")
    shape = config.get("format")
    if shape is None:
        return None
    at = "output_config.format"
    require(isinstance(shape, dict), at, "an object", shape)
    require(shape.get("type") == "json_schema", f"{at}.type", "'json_schema'", shape.get("type"))
    schema = shape.get("schema")
    require(isinstance(schema, dict), f"{at}.schema", "a JSON Schema object", schema)
    body["output_config"] = {name: value for name, value in config.items() if name != "format"}
    check_schema(schema, f"{at}.schema")
    return ReplyFormat(schema, strict=True)


def _read_tools(body: Body, profile: Profile, ignored: list[str]) -> tuple[dict[str, Any], ...]:
    seen: set[str] = set()
    tools: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    for i, tool in enumerate(body.get("tools", [])):
        at = f"tools[{i}]"
        require(isinstance(tool, dict), at, "an object", tool)
        if tool.get("type") == "function" and profile.lenient_messages:
            tool = _function(flat(tool))
        type_ = tool.get("type")
        if type_ not in (None, "custom"):
            require(isinstance(type_, str), f"{at}.type", "a string", type_)
            found = _client_tool(tool, type_)
            if found is None:
                _refuse_hosted(f"{at}.type", type_, profile, ignored)
                continue
            tool = found
        # "custom" is the protocol's own default: such a tool is the client's.
        tool = {key: value for key, value in tool.items() if key != "type" and value is not None}
        schema = tool.get("input_schema")
        require(
            isinstance(schema, dict | bool), f"{at}.input_schema", "a JSON Schema object", schema
        )
        tools.append(
            function_tool(
                tool.get("name"),
                tool.get("description"),
                schema,
                at,
                seen,
                schema_name="input_schema",
                strict=tool.get("strict") is True,
            )
        )
        kept.append(tool)
    if "tools" in body:
        body["tools"] = kept
        if not kept:
            del body["tools"]
    return tuple(tools)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """Read a function of OpenAI's protocols: it is the client's, not one that a server would run."""
    schema = tool.get("parameters") or {"type": "object", "properties": {}}
    names = ("name", "description", "strict")
    kept: dict[str, Any] = {key: value for key, value in tool.items() if key in names}
    return {**kept, "input_schema": schema}


def _client_tool(tool: dict[str, Any], type_: str) -> dict[str, Any] | None:
    dated = _DATED.match(type_)
    found = _CLIENT_TOOLS.get(dated[1] if dated else type_)
    if found is None:
        return None
    description, schema = found
    return {"name": tool.get("name"), "description": description, "input_schema": schema}


def _refuse_hosted(at: str, type_: str, profile: Profile, ignored: list[str]) -> None:
    if profile.hosted_tools == "refuse":
        raise ClientError(
            f"{at}: this server runs no tools itself; {type_!r} cannot be served",
            code="unsupported_tool",
            param=at,
        )
    ignored.append(f"{at.removesuffix('.type')}.{type_}")


def _read_tool_choice(body: Body, tools: tuple[dict[str, Any], ...]) -> tuple[ToolChoice, bool]:
    """Settle the choice, also in the body; returns it and whether calls may be parallel."""
    choice: Any = drop_nulls(body.pop("tool_choice", {"type": "auto"}))
    type_ = choice.get("type")
    kinds = ("auto", "any", "tool", "none")
    require(type_ in kinds, "tool_choice.type", f"one of {', '.join(kinds)}", type_)
    single = choice.get("disable_parallel_tool_use", False)
    require(
        isinstance(single, bool),
        "tool_choice.disable_parallel_tool_use",
        "true or false",
        single,
    )
    if type_ in ("any", "tool") and not tools:
        raise ClientError(f"tool_choice: {type_!r} needs tools", param="tool_choice")
    if not tools:
        return ToolChoice("none" if type_ == "none" else "auto"), not single
    if type_ == "tool":
        name = choice.get("name")
        require(isinstance(name, str), "tool_choice.name", "a tool's name", name)
        if name not in {tool["function"]["name"] for tool in tools}:
            raise ClientError(
                f"tool_choice.name: no tool of tools is named {name!r}", param="tool_choice.name"
            )
        body["tool_choice"] = {"type": "tool", "name": name}
        return ToolChoice("required", frozenset([name])), not single
    body["tool_choice"] = {"type": "none" if type_ == "none" else "auto"}
    if type_ == "any":
        return ToolChoice("required"), not single
    return ToolChoice("none" if type_ == "none" else "auto"), not single
