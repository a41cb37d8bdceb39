"""Renders a case's neutral request to the body of a protocol.

The neutral request is described in docs/conformance.md. What a case wants to be wrong on purpose
it sets by path after the rendering (`set`, `unset`, `body_text`), so that the rest of the body is
right and the reply can be blamed on one thing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from conformance import strict_json
from conformance.client import Request
from conformance.dialect import respell
from conformance.model import Protocol, Switch, Variant
from conformance.protocols import chat, messages, parse, responses
from conformance.protocols.observation import Observation

PATHS: Mapping[Protocol, str] = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "parse": "/parse_function_call",
}
OBSERVERS: Mapping[Protocol, Callable[[Observation], None]] = {
    "chat": chat.observe,
    "responses": responses.observe,
    "messages": messages.observe,
    "parse": parse.observe,
}
# Messages requires a bound: roomy enough to cut no script, small enough for a small context.
MAX_TOKENS = 1536


def render(
    variant: Variant,
    model: str,
    tools: Mapping[str, Mapping[str, Any]],
    switch: Switch = "thinking",
) -> tuple[Request, dict[str, Any]]:
    """Renders one variant.

    Args:
        variant: What to render.
        model: Model name to ask for.
        tools: The tool catalogue, by name.
        switch: The chat field that turns thinking on and off.

    Returns:
        The request, and its body as an object ({} where the case gives a raw body).

    Raises:
        KeyError: If the case names a tool that the catalogue lacks.
    """
    neutral = variant.case.request
    body = copy.deepcopy(dict(neutral.get("body") or {}))
    if not body:
        declared = [_tool(entry, tools) for entry in neutral.get("tools", ())]
        body = _BODIES[variant.protocol](neutral, declared)
        if variant.protocol == "parse":
            output = variant.case.script.output if variant.case.script else ""
            body["text"] = respell(output, variant.dialect or "v4.1")
        else:
            body["stream"] = variant.mode == "stream"
        if variant.protocol == "chat" and switch == "chat_template_kwargs":
            _by_template(body)
        if variant.protocol == "chat" and body["stream"] and neutral.get("usage", True):
            body["stream_options"] = {"include_usage": True}
    if variant.protocol != "parse":
        body = {"model": model} | {k: v for k, v in body.items() if k != "model"}
    for scope in ("*", variant.protocol):
        for path, value in neutral.get("set", {}).get(scope, {}).items():
            assign(body, path, value)
        for path in neutral.get("unset", {}).get(scope, ()):
            remove(body, path)
    headers = {"content-type": "application/json", **neutral.get("headers", {})}
    if variant.protocol == "messages":
        headers.setdefault("anthropic-version", "2023-06-01")
    if variant.case.script is not None and variant.protocol != "parse":
        headers["x-bathyal-script"] = variant.script_name
    content = orjson.dumps(body)
    if "body_text" in neutral:
        # latin-1, so that a case can hold any byte
        content, body = neutral["body_text"].encode("latin-1"), {}
    path = neutral.get("path", PATHS[variant.protocol])
    return Request(neutral.get("method", "POST"), path, headers, content), body


def _by_template(body: dict[str, Any]) -> None:
    """Moves the thinking switch to where vLLM and SGLang look for it (their documentation)."""
    asked = body.pop("thinking", None)
    if asked is not None:
        on = asked["type"] == "enabled"
        body["chat_template_kwargs"] = {"thinking": on, "enable_thinking": on}


def follow(seen: Observation, request: Request) -> tuple[Request, dict[str, Any]]:
    """Renders the second request of a case that follows a stored Responses reply up.

    Args:
        seen: The first reply; its id is named, and `$0` in the case's `follow` means its first
            call's id.
        request: The first request.

    Returns:
        The second request and its body.
    """
    whole = seen.document or next((e["response"] for _, e in seen.events if "response" in e), {})
    turns = orjson.dumps(seen.variant.case.request["follow"]).decode()
    turns = turns.replace("$0", seen.calls[0].id if seen.calls else "")
    body = dict(seen.body) | {
        "previous_response_id": whole.get("id"),
        "input": _responses({"turns": orjson.loads(turns)}, [])["input"],
    }
    return replace(request, body=orjson.dumps(body)), body


def _tool(entry: str | Mapping[str, Any], tools: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return dict(tools[entry]) | {"name": entry} if isinstance(entry, str) else dict(entry)


def _arguments(call: Mapping[str, Any]) -> str:
    value = call.get("arguments", {})
    return value if isinstance(value, str) else strict_json.dumps(value)


def _common(neutral: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {wire: neutral[name] for name, wire in names.items() if name in neutral}


def _chat(neutral: Mapping[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    if "system" in neutral:
        turns.append({"role": "system", "content": neutral["system"]})
    for turn in neutral.get("turns", [{"user": "q"}]):
        if "user" in turn:
            turns.append({"role": "user", "content": turn["user"]})
        elif "developer" in turn:
            turns.append({"role": "developer", "content": turn["developer"]})
        elif "assistant" in turn:
            said = turn["assistant"]
            message: dict[str, Any] = {"role": "assistant", "content": said.get("text")}
            if "reasoning" in said:
                message["reasoning_content"] = said["reasoning"]
            if said.get("calls"):
                message["tool_calls"] = [
                    {
                        "id": call["id"],
                        "type": "function",
                        "function": {"name": call["name"], "arguments": _arguments(call)},
                    }
                    for call in said["calls"]
                ]
            turns.append(message)
        else:
            turns += [
                {"role": "tool", "tool_call_id": result["id"], "content": result["text"]}
                for result in turn["results"]
            ]
    body: dict[str, Any] = {"messages": turns}
    if tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
    choice = neutral.get("tool_choice")
    if choice is not None:
        body["tool_choice"] = (
            {"type": "function", "function": choice} if isinstance(choice, dict) else choice
        )
    if "thinking" in neutral:
        body["thinking"] = {"type": "enabled" if neutral["thinking"] else "disabled"}
    if "json" in neutral:
        schema = neutral["json"]
        body["response_format"] = (
            {"type": "json_object"}
            if schema is True
            else {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
        )
    return body | _common(
        neutral,
        {
            "effort": "reasoning_effort",
            "max_tokens": "max_tokens",
            "temperature": "temperature",
            "top_p": "top_p",
            "stop": "stop",
            "seed": "seed",
            "parallel": "parallel_tool_calls",
        },
    )


def _responses(neutral: Mapping[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for turn in neutral.get("turns", [{"user": "q"}]):
        if "user" in turn:
            items.append({"role": "user", "content": turn["user"]})
        elif "developer" in turn:
            items.append({"role": "developer", "content": turn["developer"]})
        elif "assistant" in turn:
            said = turn["assistant"]
            if said.get("reasoning"):
                thought = {"type": "reasoning_text", "text": said["reasoning"]}
                items.append({"type": "reasoning", "summary": [], "content": [thought]})
            if said.get("text"):
                items.append({"role": "assistant", "content": said["text"]})
            items += [
                {
                    "type": "function_call",
                    "call_id": call["id"],
                    "name": call["name"],
                    "arguments": _arguments(call),
                }
                for call in said.get("calls", ())
            ]
        else:
            items += [
                {"type": "function_call_output", "call_id": result["id"], "output": result["text"]}
                for result in turn["results"]
            ]
    body: dict[str, Any] = {"input": items, "store": False}
    if "system" in neutral:
        body["instructions"] = neutral["system"]
    if tools:
        body["tools"] = [{"type": "function", **tool} for tool in tools]
    choice = neutral.get("tool_choice")
    if choice is not None:
        body["tool_choice"] = {"type": "function", **choice} if isinstance(choice, dict) else choice
    if "effort" in neutral or "thinking" in neutral:
        on = neutral.get("thinking", True)
        body["reasoning"] = {"effort": neutral.get("effort", "high") if on else "none"}
    if "json" in neutral:
        schema = neutral["json"]
        body["text"] = {
            "format": {"type": "json_object"}
            if schema is True
            else {"type": "json_schema", "name": "reply", "schema": schema}
        }
    return body | _common(
        neutral,
        {
            "max_tokens": "max_output_tokens",
            "temperature": "temperature",
            "top_p": "top_p",
            "parallel": "parallel_tool_calls",
        },
    )


def _messages(neutral: Mapping[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for turn in neutral.get("turns", [{"user": "q"}]):
        if "user" in turn:
            turns.append({"role": "user", "content": turn["user"]})
        elif "developer" in turn:
            turns.append({"role": "system", "content": turn["developer"]})
        elif "assistant" in turn:
            said = turn["assistant"]
            blocks: list[dict[str, Any]] = []
            if said.get("reasoning"):
                blocks.append(
                    {"type": "thinking", "thinking": said["reasoning"], "signature": "sig"}
                )
            if said.get("text"):
                blocks.append({"type": "text", "text": said["text"]})
            for call in said.get("calls", ()):
                given = call.get("arguments", {})
                value = strict_json.loads(given) if isinstance(given, str) else given
                blocks.append(
                    {"type": "tool_use", "id": call["id"], "name": call["name"], "input": value}
                )
            turns.append({"role": "assistant", "content": blocks})
        else:
            blocks = [
                {"type": "tool_result", "tool_use_id": result["id"], "content": result["text"]}
                for result in turn["results"]
            ]
            turns.append({"role": "user", "content": blocks})
    body: dict[str, Any] = {"max_tokens": neutral.get("max_tokens", MAX_TOKENS), "messages": turns}
    if "system" in neutral:
        body["system"] = neutral["system"]
    if tools:
        body["tools"] = [
            {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "input_schema": tool.get("parameters", {"type": "object"}),
            }
            for tool in tools
        ]
    choice = neutral.get("tool_choice")
    parallel = {} if neutral.get("parallel", True) else {"disable_parallel_tool_use": True}
    if isinstance(choice, dict):
        body["tool_choice"] = {"type": "tool", **choice, **parallel}
    elif choice is not None or parallel:
        kind = {"required": "any"}.get(choice or "auto", choice or "auto")
        body["tool_choice"] = {"type": kind, **(parallel if kind != "none" else {})}
    if "thinking" in neutral:
        body["thinking"] = (
            {"type": "enabled", "budget_tokens": 1024}
            if neutral["thinking"]
            else {"type": "disabled"}
        )
    if "effort" in neutral:
        body["output_config"] = {"effort": neutral["effort"]}
    if isinstance(neutral.get("json"), dict):
        body.setdefault("output_config", {})["format"] = {
            "type": "json_schema",
            "schema": neutral["json"],
        }
    return body | _common(
        neutral, {"temperature": "temperature", "top_p": "top_p", "stop": "stop_sequences"}
    )


def _parse(_: Mapping[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    declared = [{"type": "function", "function": tool} for tool in tools]
    return {"tools": declared}


_BODIES: Mapping[Protocol, Callable[[Mapping[str, Any], list[dict[str, Any]]], dict[str, Any]]] = {
    "chat": _chat,
    "responses": _responses,
    "messages": _messages,
    "parse": _parse,
}


def assign(body: Any, path: str, value: Any) -> None:
    """Sets `path` ("tools.0.function.name") in a body; a missing object on the way is made."""
    *way, last = path.split(".")
    for key in way:
        body = body[int(key)] if isinstance(body, list) else body.setdefault(key, {})
    if isinstance(body, list):
        if int(last) == len(body):
            body.append(value)
        else:
            body[int(last)] = value
    else:
        body[last] = value


def remove(body: Any, path: str) -> None:
    """Deletes `path` from a body; an absent key is no fault."""
    *way, last = path.split(".")
    for key in way:
        body = body[int(key)] if isinstance(body, list) else body.get(key, {})
    if isinstance(body, list):
        del body[int(last)]
    else:
        body.pop(last, None)
