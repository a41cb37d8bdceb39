"""Chat Completions requests: checks with names, and the changes made before the codec reads them.

Knows the body and the served model; knows neither the codec nor tokens. Every change made here is
a rule of issue 2 or 3 and is written beside the line that makes it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from parsers.body import (
    Body,
    check_fields,
    describe,
    drop_nulls,
    fail,
    integer,
    is_number,
    is_stop,
    kind,
    number,
    require,
)
from parsers.errors import ClientError
from parsers.values import ServedModel, ToolChoice

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
PARTS = ("text", "image_url", "file")

FIELDS = {
    "stream": kind(bool, "true or false"),
    "stream_options": kind(dict, "an object"),
    "max_tokens": integer(1, 2**32 - 1),
    "max_completion_tokens": integer(1, 2**32 - 1),
    "temperature": number(0, 2),
    "top_p": ((lambda v: is_number(v) and 0 < v <= 1), "a number in (0, 1]"),
    "n": integer(1),
    "seed": integer(0, 2**63 - 1),
    "logprobs": kind(bool, "true or false"),
    "top_logprobs": integer(0, 20),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "stop": (is_stop, "a non-empty string or at most 16 of them"),
    "tools": kind(list, "an array of tools"),
    "thinking": kind(dict, "an object"),
    "response_format": kind(dict, "an object"),
    "parallel_tool_calls": kind(bool, "true or false"),
    "continue_final_message": kind(bool, "true or false"),
}

# What reaches the prompt, the sampling or the reply; any other field is accepted and reported.
HONOURED = frozenset(FIELDS) - {"presence_penalty", "frequency_penalty"} | {
    "model",
    "messages",
    "tool_choice",
    "reasoning_effort",
}
# Fields whose "off" value asks for nothing, so that leaving them unheeded ignores nothing.
NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
}

_MODES: dict[str, Literal["none", "auto", "required"]] = {
    "none": "none",
    "auto": "auto",
    "required": "required",
}
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked Chat Completions body.

    Args:
        body: what the codec is to read.
        model: the name the client used; replies carry it.
        tools: the declared tools, as sent.
        tool_choice: which calls the reply may hold.
        parallel_calls: whether it may hold more than one.
        temperature: the client's value, None where it sent none.
        top_p: likewise.
        ignored: names of fields accepted without effect, sorted.
    """

    body: Body
    model: str
    tools: tuple[dict[str, Any], ...]
    tool_choice: ToolChoice
    parallel_calls: bool
    temperature: float | None
    top_p: float | None
    ignored: tuple[str, ...]


def read_chat(raw: Body, served: ServedModel) -> ChatRequest:
    """Check a Chat Completions body and rewrite it for the codec.

    Args:
        raw: the parsed body; not changed.
        served: the model that will answer.

    Raises:
        ClientError: a field is missing, has the wrong shape or breaks a rule.
    """
    body = drop_nulls(raw)
    name = check_model(body, served)
    check_fields(body, FIELDS)
    _check_options(body, served)
    tools = _check_tools(body)
    choice = _check_tool_choice(body, tools)
    messages = _check_messages(body, served)
    if body.pop("continue_final_message", False):
        _continue_final(messages, tools, choice)

    ignored = tuple(
        sorted(
            field
            for field, value in body.items()
            if field not in HONOURED and (field not in NEUTRAL or value != NEUTRAL[field])
        )
    )
    body["model"] = served.name
    body["messages"] = messages
    limit = body.pop("max_completion_tokens", None)
    if limit is not None:
        body["max_tokens"] = limit
    return ChatRequest(
        body={field: value for field, value in body.items() if field in HONOURED},
        model=name,
        tools=tools,
        tool_choice=choice,
        parallel_calls=body.get("parallel_tool_calls", True),
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        ignored=ignored,
    )


def check_model(body: Body, served: ServedModel) -> str:
    """Return the requested model name.

    Raises:
        ClientError: it is missing, not a string, or not a name of the served model.
    """
    name = body.get("model")
    names = ", ".join(served.names)
    if not isinstance(name, str):
        raise fail("model", f"one of {names}", name)
    if name not in served.names:
        raise ClientError(
            f"model: expected one of {names}, got {describe(name)}",
            code="model_not_found",
            param="model",
        )
    return name


def _check_options(body: Body, served: ServedModel) -> None:
    effort = body.get("reasoning_effort")
    if is_number(effort):
        # Issue 2: numeric effort on V4 is 400. V4.1 has numbers in its prompt, but the codec takes
        # only the named tiers, so a number is refused there as well.
        raise ClientError(
            f"reasoning_effort: numeric effort is not supported on {served.version}; "
            f"expected one of {', '.join(EFFORTS)}, got {describe(effort)}",
            param="reasoning_effort",
        )
    if effort is not None:
        require(effort in EFFORTS, "reasoning_effort", f"one of {', '.join(EFFORTS)}", effort)
    if "thinking" in body:
        switch = body["thinking"].get("type")
        kinds = ("enabled", "adaptive", "disabled")
        require(switch in kinds, "thinking.type", f"one of {', '.join(kinds)}", switch)
    if "stream_options" in body and not body.get("stream"):
        raise ClientError("stream_options: only allowed with stream: true", param="stream_options")
    if "top_logprobs" in body and not body.get("logprobs"):
        raise ClientError("top_logprobs: needs logprobs: true", param="top_logprobs")
    if body.get("n", 1) != 1:
        raise ClientError(f"n: expected 1, got {body['n']}", param="n")
    first, second = body.get("max_tokens"), body.get("max_completion_tokens")
    if first is not None and second is not None and first != second:
        raise ClientError(
            f"max_completion_tokens: {second} contradicts max_tokens: {first}; send one of them",
            param="max_completion_tokens",
        )


def _check_tools(body: Body) -> tuple[dict[str, Any], ...]:
    tools = body.get("tools", [])
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        require(isinstance(tool, dict), at, "an object", tool)
        require(tool.get("type") == "function", f"{at}.type", "'function'", tool.get("type"))
        function = tool.get("function")
        require(isinstance(function, dict), f"{at}.function", "an object", function)
        assert isinstance(function, dict)
        name = function.get("name")
        require(
            isinstance(name, str) and _TOOL_NAME.match(name) is not None,
            f"{at}.function.name",
            "1-128 of [a-zA-Z0-9_-]",
            name,
        )
        assert isinstance(name, str)
        if name in seen:
            raise ClientError(
                f"{at}.function.name: tool names must be unique, {name!r} is used before",
                param=f"{at}.function.name",
            )
        seen.add(name)
        description = function.get("description")
        require(
            description is None or isinstance(description, str),
            f"{at}.function.description",
            "a string",
            description,
        )
        parameters = function.get("parameters")
        require(
            parameters is None or isinstance(parameters, dict | bool),
            f"{at}.function.parameters",
            "a JSON Schema object",
            parameters,
        )
    return tuple(tools)


def _check_tool_choice(body: Body, tools: tuple[dict[str, Any], ...]) -> ToolChoice:
    choice = body.get("tool_choice", "auto")
    expected = "'none', 'auto', 'required' or a function of tools"
    if isinstance(choice, str):
        require(choice in _MODES, "tool_choice", expected, choice)
        if choice == "required" and not tools:
            raise ClientError("tool_choice: 'required' needs tools", param="tool_choice")
        return ToolChoice(_MODES[choice])
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    ok = isinstance(choice, dict) and choice.get("type") == "function" and isinstance(name, str)
    require(ok, "tool_choice", expected, choice)
    assert isinstance(choice, dict)
    if name not in {tool["function"]["name"] for tool in tools}:
        raise ClientError(
            f"tool_choice.function.name: no tool of tools is named {name!r}",
            param="tool_choice.function.name",
        )
    return ToolChoice("required", name)


def _check_messages(body: Body, served: ServedModel) -> list[dict[str, Any]]:
    messages = body.get("messages")
    require(
        isinstance(messages, list) and bool(messages),
        "messages",
        "a non-empty array of messages",
        messages,
    )
    assert isinstance(messages, list)
    checked: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        require(isinstance(message, dict), at, "an object", message)
        role = message.get("role")
        require(role in ROLES, f"{at}.role", f"one of {', '.join(ROLES)}", role)
        _check_content(message, role, at, served)
        if role == "developer":  # issue 2: rendered as system
            message = {**message, "role": "system"}
        if role == "assistant" and message.get("tool_calls") is not None:
            _check_calls(message["tool_calls"], f"{at}.tool_calls")
        checked.append(message)
    _check_pairs(checked)
    return checked


def _check_content(message: dict[str, Any], role: str, at: str, served: ServedModel) -> None:
    content = message.get("content")
    if content is None:
        if role == "assistant":
            if message.get("tool_calls") is None:
                raise ClientError(
                    f"{at}: an assistant message needs content or tool_calls", param=at
                )
            return
        raise fail(f"{at}.content", "a string or an array of parts", content)
    if isinstance(content, str):
        return
    require(isinstance(content, list), f"{at}.content", "a string or an array of parts", content)
    for j, part in enumerate(content):
        where = f"{at}.content[{j}]"
        require(isinstance(part, dict), where, "an object", part)
        type_ = part.get("type")
        require(type_ in PARTS, f"{where}.type", f"one of {', '.join(PARTS)}", type_)
        if type_ == "text":
            text = part.get("text")
            require(isinstance(text, str), f"{where}.text", "a string", text)
        if type_ == "image_url":
            raise _no_images(where, served)


def _no_images(where: str, served: ServedModel) -> ClientError:
    # The codec would put a visible placeholder into a V4 prompt and fetch nothing on V4.1: the
    # model would answer as if it had seen the image. Issue 2: 400 that names the missing tower.
    reason = (
        "images cannot be passed to its vision tower"
        if served.has_vision
        else "it has no vision tower"
    )
    return ClientError(
        f"{where}: model {served.name!r} cannot take images: {reason}",
        code="image_not_supported",
        param=where,
    )


def _check_calls(calls: Any, at: str) -> None:
    require(isinstance(calls, list) and bool(calls), at, "a non-empty array of calls", calls)
    seen: set[str] = set()
    for k, call in enumerate(calls):
        where = f"{at}[{k}]"
        require(isinstance(call, dict), where, "an object", call)
        id_ = call.get("id")
        require(isinstance(id_, str), f"{where}.id", "a string", id_)
        if id_ in seen:
            raise ClientError(f"{where}.id: {id_!r} is used before", param=f"{where}.id")
        seen.add(id_)
        function = call.get("function")
        require(isinstance(function, dict), f"{where}.function", "an object", function)
        for field in ("name", "arguments"):
            value = function.get(field)
            require(isinstance(value, str), f"{where}.function.{field}", "a string", value)


def _check_pairs(messages: list[dict[str, Any]]) -> None:
    """Each call is answered by the tool messages right after its turn, and nothing else is."""
    open_at, pending = 0, list[str]()
    for i, message in enumerate([*messages, {"role": "end"}]):
        if message["role"] == "tool":
            id_ = message.get("tool_call_id")
            require(isinstance(id_, str), f"messages[{i}].tool_call_id", "a string", id_)
            assert isinstance(id_, str)
            if id_ not in pending:
                raise ClientError(
                    f"messages[{i}].tool_call_id: {id_!r} answers no open call of a preceding "
                    "assistant message",
                    param=f"messages[{i}].tool_call_id",
                )
            pending.remove(id_)
            continue
        if pending:
            raise ClientError(
                f"messages[{open_at}].tool_calls: tool messages must follow for every call; "
                f"unanswered: {', '.join(pending)}",
                param=f"messages[{open_at}].tool_calls",
            )
        if message["role"] == "assistant" and message.get("tool_calls"):
            open_at, pending = i, [call["id"] for call in message["tool_calls"]]


def _continue_final(
    messages: list[dict[str, Any]],
    tools: tuple[dict[str, Any], ...],
    choice: ToolChoice,
) -> None:
    """Turn the other servers' spelling of a continuation into the codec's ``prefix``."""
    if tools and choice.mode != "none":
        raise ClientError(
            "continue_final_message: cannot be combined with tools", param="continue_final_message"
        )
    if messages[-1]["role"] != "assistant":
        raise ClientError(
            "continue_final_message: the last message must be an assistant message",
            param="continue_final_message",
        )
    messages[-1] = {**messages[-1], "prefix": True}
