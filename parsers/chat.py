"""Chat Completions requests: checks with names, and the changes made before the codec reads them.

Knows the body, the served model and the profile; knows neither the codec nor tokens. Every change
made here is a rule of issue 2 or 3 and is written beside the line that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from parsers.body import (
    Body,
    check_fields,
    drop_nulls,
    integer,
    is_int,
    is_number,
    is_stop,
    kind,
    require,
)
from parsers.chat_messages import read_messages
from parsers.errors import ClientError
from parsers.formats import chat_format
from parsers.prompt_note import SCORING, read_scoring
from parsers.reasoning import ReasoningStore
from parsers.request import (
    EFFORTS,
    FLAG,
    MOVES,
    SAMPLING,
    TOKEN_LIMIT,
    Request,
    check_effort,
    check_model,
    custom_parameters,
    function_tool,
    nested,
    read_moves,
    read_stream_options,
    unheeded,
)
from parsers.rules import Profile
from parsers.values import NO_MOVES, ServedModel, ToolChoice

FIELDS = {
    **SAMPLING,
    **MOVES,
    **SCORING,
    "stream": FLAG,
    "stream_options": kind(dict, "an object"),
    "max_tokens": TOKEN_LIMIT,
    "max_completion_tokens": TOKEN_LIMIT,
    "n": integer(1),
    "seed": integer(0, 2**63 - 1),
    "logprobs": FLAG,
    "top_logprobs": integer(0, 20),
    "stop": (is_stop, "a non-empty string or at most 16 of them"),
    "tools": kind(list, "an array of tools"),
    "thinking": kind(dict, "an object"),
    "response_format": kind(dict, "an object"),
    "parallel_tool_calls": FLAG,
    "continue_final_message": FLAG,
    "chat_template_kwargs": kind(dict, "an object"),
}

# What the codec is given; any other field is accepted and, unless it is heeded here, reported.
HONOURED = frozenset(FIELDS) - {*MOVES, *SCORING, "chat_template_kwargs"} | {
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
    "store": False,
}

_MODES: dict[str, Literal["none", "auto", "required"]] = {
    "none": "none",
    "auto": "auto",
    "required": "required",
}


def read_chat(
    raw: Body, served: ServedModel, profile: Profile, store: ReasoningStore | None
) -> Request:
    """Check a Chat Completions body and rewrite it for the codec.

    Args:
        raw: the parsed body; not changed.
        served: the model that will answer.
        profile: the rules.
        store: where missing reasoning may be found.

    Raises:
        ClientError: a field is missing, has the wrong shape or breaks a rule.
    """
    body = drop_nulls(raw)
    name = check_model(body, served)
    check_fields(body, FIELDS)
    if body.get("n", 1) > profile.max_n:
        raise ClientError(f"n: expected at most {profile.max_n}, got {body['n']}", param="n")
    # Where the codec's sampling rules, as the hosted API's do, penalties have no effect.
    moves = profile.sampling == "client"
    heeded = HONOURED | SCORING.keys()
    ignored = list(unheeded(body, heeded | MOVES.keys() if moves else heeded, NEUTRAL))
    effort = _read_thinking(body, served, profile, ignored)
    continuous = read_stream_options(body, ignored)
    if continuous:
        body["stream_options"] = {"include_usage": True}  # else chunks have no place for it
    _check_options(body)
    tools, customs = _read_tools(body, profile)
    choice = _read_tool_choice(body, tools, profile)
    messages = read_messages(body, served, profile, store)
    final = body.pop("continue_final_message", False)
    if final:
        _continue_final(messages, bool(tools) and choice.mode != "none")
    elif profile.trailing_assistant == "user" and messages[-1]["role"] == "assistant":
        messages[-1] = {"role": "user", "content": messages[-1].get("content") or ""}

    body |= {"model": served.name, "messages": messages, "n": 1}
    if tools:
        body["tools"] = list(tools)
        body["tool_choice"] = _codec_choice(choice)
    limit = body.pop("max_completion_tokens", None)
    if limit is not None:
        body["max_tokens"] = limit
    return Request(
        body={field: value for field, value in body.items() if field in HONOURED},
        model=name,
        tools=tools,
        tool_choice=choice,
        parallel_calls=body.get("parallel_tool_calls", True),
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        continuous=continuous,
        moves=read_moves(body) if moves else NO_MOVES,
        scoring=read_scoring(body),
        ignored=tuple(sorted(ignored)),
        n=raw.get("n") or 1,
        reply_format=chat_format(body["response_format"]) if "response_format" in body else None,
        customs=customs,
        effort=effort,
    )


def _read_thinking(
    body: Body, served: ServedModel, profile: Profile, ignored: list[str]
) -> int | None:
    """Settle how much is thought; returns a numeric effort, 1-100."""
    if "thinking" in body and not profile.body_thinking:
        del body["thinking"]
        ignored.append("thinking")
    number_: Any = None
    if profile.template_kwargs and "chat_template_kwargs" in body:
        kwargs = body.pop("chat_template_kwargs")
        ignored.remove("chat_template_kwargs")
        number_ = _read_kwargs(kwargs, body, ignored)
    effort = body.get("reasoning_effort")
    if effort is not None and (effort not in EFFORTS) and number_ is None:
        numeric = profile.numeric_effort and served.version == "v4.1"
        if not numeric:
            check_effort(effort, "reasoning_effort", why=f"on {served.version}")
        number_ = _fraction(effort)
    elif number_ is not None and not (profile.numeric_effort and served.version == "v4.1"):
        check_effort(number_, "chat_template_kwargs.reasoning_effort", why=f"on {served.version}")
    if number_ is not None:
        body["reasoning_effort"] = "high"  # the tier whose line the number is put into
    if "thinking" in body:
        switch = body["thinking"].get("type")
        kinds = ("enabled", "adaptive", "disabled")
        require(switch in kinds, "thinking.type", f"one of {', '.join(kinds)}", switch)
    return number_ if number_ is None else int(number_)


def _read_kwargs(kwargs: dict[str, Any], body: Body, ignored: list[str]) -> Any:
    at = "chat_template_kwargs"
    switch = kwargs.get("thinking", kwargs.get("enable_thinking"))
    if switch is not None:
        require(isinstance(switch, bool), f"{at}.thinking", "true or false", switch)
        body.setdefault("thinking", {"type": "enabled" if switch else "disabled"})
    ignored += [
        f"{at}.{name}"
        for name in kwargs
        if name not in ("thinking", "enable_thinking", "reasoning_effort")
    ]
    effort = kwargs.get("reasoning_effort")
    if effort is None or "reasoning_effort" in body:
        return None
    if is_number(effort):
        ok = is_int(effort) and 1 <= effort <= 100
        require(ok, f"{at}.reasoning_effort", "an integer in [1, 100] or a tier", effort)
        return effort
    check_effort(effort, f"{at}.reasoning_effort")
    body["reasoning_effort"] = effort
    return None


def _fraction(effort: Any) -> int:
    """Read a numeric effort as SGLang 0.5.23 does: 0..0.99, a string of it too; 1-100 in all."""
    value = effort
    if isinstance(effort, str):
        try:
            value = float(effort)
        except ValueError:
            value = None
    ok = isinstance(value, float) and 0 <= value <= 0.99
    expected = f"one of {', '.join(EFFORTS)}, or a fraction in [0, 0.99]"
    require(ok, "reasoning_effort", expected, effort)
    assert isinstance(value, float)
    return max(1, round(value * 100))


def _check_options(body: Body) -> None:
    if "top_logprobs" in body and not body.get("logprobs"):
        raise ClientError("top_logprobs: needs logprobs: true", param="top_logprobs")
    first, second = body.get("max_tokens"), body.get("max_completion_tokens")
    if first is not None and second is not None and first != second:
        raise ClientError(
            f"max_completion_tokens: {second} contradicts max_tokens: {first}; send one of them",
            param="max_completion_tokens",
        )


# Tools


def _read_tools(body: Body, profile: Profile) -> tuple[tuple[dict[str, Any], ...], frozenset[str]]:
    seen: set[str] = set()
    customs: set[str] = set()
    tools: list[dict[str, Any]] = []
    for i, tool in enumerate(body.get("tools", [])):
        at = f"tools[{i}]"
        require(isinstance(tool, dict), at, "an object", tool)
        if profile.lenient_messages:
            tool = nested(tool)
        if tool.get("type") == "custom":  # clients.md section 2, row 5: free text as a function
            custom = tool.get("custom")
            require(isinstance(custom, dict), f"{at}.custom", "an object", custom)
            assert isinstance(custom, dict)
            text, schema = custom_parameters(custom)
            tools.append(function_tool(custom.get("name"), text, schema, f"{at}.custom", seen))
            customs.add(custom["name"])
            continue
        require(tool.get("type") == "function", f"{at}.type", "'function'", tool.get("type"))
        function = tool.get("function")
        require(isinstance(function, dict), f"{at}.function", "an object", function)
        assert isinstance(function, dict)
        parameters = function.get("parameters")
        require(
            parameters is None or isinstance(parameters, dict | bool),
            f"{at}.function.parameters",
            "a JSON Schema object",
            parameters,
        )
        strict = function.get("strict")
        ok = strict is None or isinstance(strict, bool)
        require(ok, f"{at}.function.strict", "true or false", strict)
        function_tool(
            function.get("name"), function.get("description"), parameters, f"{at}.function", seen
        )
        tools.append(tool)
    return tuple(tools), frozenset(customs)


def _read_tool_choice(
    body: Body, tools: tuple[dict[str, Any], ...], profile: Profile
) -> ToolChoice:
    choice = body.get("tool_choice", "auto")
    expected = "'none', 'auto', 'required' or a function of tools"
    if isinstance(choice, str):
        require(choice in _MODES, "tool_choice", expected, choice)
        if choice == "required" and not tools:
            raise ClientError("tool_choice: 'required' needs tools", param="tool_choice")
        return ToolChoice(_MODES[choice])
    read = nested if profile.lenient_messages else dict[str, Any]
    if isinstance(choice, dict):
        choice = read(choice)
    type_ = choice.get("type") if isinstance(choice, dict) else None
    if type_ == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), tools, "tool_choice.allowed_tools", read)
    inner = choice.get(type_) if type_ in ("function", "custom") else None
    name = inner.get("name") if isinstance(inner, dict) else None
    require(isinstance(name, str), "tool_choice", expected, choice)
    return ToolChoice("required", frozenset([_known(name, tools, f"tool_choice.{type_}.name")]))


def _known(name: Any, tools: tuple[dict[str, Any], ...], at: str) -> str:
    require(isinstance(name, str), at, "a tool's name", name)
    if name not in {tool["function"]["name"] for tool in tools}:
        raise ClientError(f"{at}: no tool of tools is named {name!r}", param=at)
    return str(name)


def _allowed(
    allowed: Any,
    tools: tuple[dict[str, Any], ...],
    at: str,
    read: Callable[[dict[str, Any]], dict[str, Any]],
) -> ToolChoice:
    """Read a subset of the tools; they all stay in the prompt, so that its prefix stays the same."""
    require(isinstance(allowed, dict), at, "an object", allowed)
    mode, listed = allowed.get("mode"), allowed.get("tools")
    require(mode in ("auto", "required"), f"{at}.mode", "'auto' or 'required'", mode)
    require(isinstance(listed, list) and bool(listed), f"{at}.tools", "a non-empty array", listed)
    names = set()
    for i, tool in enumerate(listed):
        inner = read(tool).get(str(tool.get("type"))) if isinstance(tool, dict) else None
        require(isinstance(inner, dict), f"{at}.tools[{i}]", "a function of tools", tool)
        assert isinstance(inner, dict)
        names.add(_known(inner.get("name"), tools, f"{at}.tools[{i}].name"))
    return ToolChoice(_MODES[mode], frozenset(names))


def _codec_choice(choice: ToolChoice) -> Any:
    name = choice.only
    return choice.mode if name is None else {"type": "function", "function": {"name": name}}


def _continue_final(messages: list[dict[str, Any]], has_tools: bool) -> None:
    """Turn the other servers' spelling of a continuation into the codec's ``prefix``."""
    if has_tools:
        raise ClientError(
            "continue_final_message: cannot be combined with tools", param="continue_final_message"
        )
    if messages[-1]["role"] != "assistant":
        raise ClientError(
            "continue_final_message: the last message must be an assistant message",
            param="continue_final_message",
        )
    messages[-1] = {**messages[-1], "prefix": True}
