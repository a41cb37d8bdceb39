"""The messages of a Chat Completions request: roles, contents, calls and their results."""

from __future__ import annotations

from typing import Any

import orjson

from parsers.body import Body, fail, require
from parsers.errors import ClientError
from parsers.pairs import UNANSWERED, Item, Mark, distinct, pair
from parsers.reasoning import ReasoningStore
from parsers.request import check_image, read_arguments
from parsers.rules import Profile
from parsers.values import ServedModel

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
PARTS = ("text", "image_url", "file")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")


def read_messages(
    body: Body, served: ServedModel, profile: Profile, store: ReasoningStore | None
) -> list[dict[str, Any]]:
    """Check the messages of a Chat body and return them as the codec takes them.

    Args:
        body: the body without its nulls.
        served: the model that will answer.
        profile: the rules.
        store: where missing reasoning may be found.

    Raises:
        ClientError: a message has the wrong shape or breaks a rule; ``param`` is its path.
    """
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
        if profile.lenient_messages:
            message = _lenient(message)
        if role != "assistant" and "tool_calls" in message:  # nobody else calls
            message = {name: value for name, value in message.items() if name != "tool_calls"}
        if message.get("tool_calls") is not None:
            message = _read_calls(message, f"{at}.tool_calls", profile)
            if profile.missing_reasoning == "restore":
                message = _restore(message, store)
        _check_content(message, role, at, served)
        thought = message.get("reasoning_content") if role == "assistant" else None
        ok = thought is None or isinstance(thought, str)
        require(ok, f"{at}.reasoning_content", "a string", thought)
        prefix = message.get("prefix") if role == "assistant" else None
        ok = prefix is None or isinstance(prefix, bool)
        require(ok, f"{at}.prefix", "true or false", prefix)
        if role == "developer":  # issue 2: rendered as system
            message = {**message, "role": "system"}
        if role == "tool":
            id_ = message.get("tool_call_id")
            require(isinstance(id_, str), f"{at}.tool_call_id", "a string", id_)
        checked.append(message)
    if profile.pairs == "mend":
        return _mend_pairs(checked)
    _check_pairs(checked)
    return checked


def _lenient(message: dict[str, Any]) -> dict[str, Any]:
    """Accept what clients of other servers send: null content, their parts, no calls in a list."""
    if isinstance(message.get("content"), list):
        message = _with_parts(message, message["content"])
    if not message.get("tool_calls", True):
        message = {name: value for name, value in message.items() if name != "tool_calls"}
    if message.get("content") is None and not message.get("tool_calls"):
        message = {**message, "content": ""}
    return message


def _with_parts(message: dict[str, Any], parts: list[Any]) -> dict[str, Any]:
    """Read the text parts of Responses, and take thoughts out of an answer's content."""
    kept, thoughts = [], []
    for part in parts:
        type_ = part.get("type") if isinstance(part, dict) else None
        if type_ in ("input_text", "output_text"):
            part = {"type": "text", "text": part.get("text")}
        elif type_ == "file" and isinstance(part.get("file"), dict):
            part = {"type": "file", **part["file"]}  # the codec has it flat
        elif message["role"] == "assistant" and type_ == "refusal":
            part = {"type": "text", "text": part.get("refusal")}
        elif message["role"] == "assistant" and type_ in _THOUGHTS:
            thoughts.append(part)
            continue
        kept.append(part)
    message = {**message, "content": kept}
    if thoughts and not message.get("reasoning_content"):
        message["reasoning_content"] = _texts(thoughts)
    return message


def _texts(parts: Any) -> str:
    """Join the texts of thoughts, in whichever field they are kept."""
    said = (
        part.get("thinking") or part.get("text")
        for part in (parts if isinstance(parts, list) else ())
        if isinstance(part, dict)
    )
    return "".join(text for text in said if isinstance(text, str))


def _restore(message: dict[str, Any], store: ReasoningStore | None) -> dict[str, Any]:
    """Put the reasoning of a turn with calls back, where the client dropped it."""
    if message.get("reasoning_content"):
        return message
    found = message.get("reasoning")  # the names that some clients keep it under
    if not isinstance(found, str) or not found:
        found = _texts(message.get("thinking_blocks")) or _texts(message.get("reasoning_details"))
    if not found:
        known = (store.get(call["id"]) for call in message["tool_calls"]) if store else ()
        found = next(filter(None, known), "")
    return {**message, "reasoning_content": found}


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
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, dict) else None
            check_image(where, served, url)
        data = part.get("file_data") if type_ == "file" else None
        if isinstance(data, str) and data[:11].lower() == "data:image/":  # to the codec, an image
            check_image(where, served, "data:")


def _read_calls(message: dict[str, Any], at: str, profile: Profile) -> dict[str, Any]:
    lenient = profile.lenient_messages
    calls = message["tool_calls"]
    require(isinstance(calls, list) and bool(calls), at, "a non-empty array of calls", calls)
    seen: set[str] = set()
    read = []
    for k, call in enumerate(calls):
        where = f"{at}[{k}]"
        require(isinstance(call, dict), where, "an object", call)
        id_ = call.get("id")
        require(isinstance(id_, str), f"{where}.id", "a string", id_)
        if id_ in seen and profile.pairs == "reject":
            raise ClientError(f"{where}.id: {id_!r} is used before", param=f"{where}.id")
        seen.add(id_)
        if call.get("type") == "custom" and isinstance(call.get("custom"), dict):
            text = call["custom"].get("input")
            require(isinstance(text, str), f"{where}.custom.input", "a string", text)
            arguments: Any = orjson.dumps({"input": text}).decode()
            call = {
                "id": id_,
                "type": "function",
                "function": {"name": call["custom"].get("name"), "arguments": arguments},
            }
        if lenient and call.get("type") is None:
            call = {**call, "type": "function"}
        require(call.get("type") == "function", f"{where}.type", "'function'", call.get("type"))
        function = call.get("function")
        require(isinstance(function, dict), f"{where}.function", "an object", function)
        assert isinstance(function, dict)
        if lenient:
            text = read_arguments(function.get("arguments"), f"{where}.function.arguments")
            function = {**function, "arguments": text}
            call = {**call, "function": function}
        for field in ("name", "arguments"):
            value = function.get(field)
            require(isinstance(value, str), f"{where}.function.{field}", "a string", value)
        read.append(call)
    return {**message, "tool_calls": read}


def _mend_pairs(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items = [
        Item(
            calls=tuple(call["id"] for call in message.get("tool_calls") or ()),
            answers=message["tool_call_id"] if message["role"] == "tool" else None,
        )
        for message in messages
    ]
    out: list[dict[str, Any]] = []
    for placed in pair(items):
        message = messages[placed.at]
        if placed.kind == "item":
            out.append(message)
        elif placed.kind == "missing":
            out.append({"role": "tool", "tool_call_id": placed.call, "content": UNANSWERED})
        elif placed.kind == "orphan" or message["content"] != messages[placed.first]["content"]:
            out.append({"role": "user", "content": _noted(placed.note, message["content"])})
    return _distinct(out)


def _distinct(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give calls whose id occurs again, and their results, an id of their own."""
    marks: list[Mark] = []
    for message in messages:
        if message["role"] == "tool":
            marks.append(("result", message["tool_call_id"]))
        marks += [("call", call["id"]) for call in message.get("tool_calls") or ()]
    ids = iter(distinct(marks))
    out = []
    for message in messages:
        if message["role"] == "tool":
            message = {**message, "tool_call_id": next(ids)}
        elif message.get("tool_calls"):
            calls = [{**call, "id": next(ids)} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        out.append(message)
    return out


def _noted(note: str, content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": note}, *content]
    return f"{note}\n{content}"


def _check_pairs(messages: list[dict[str, Any]]) -> None:
    """Each call is answered by the tool messages right after its turn, and nothing else is."""
    open_at, pending = 0, list[str]()
    for i, message in enumerate([*messages, {"role": "end"}]):
        if message["role"] == "tool":
            id_ = message.get("tool_call_id")
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
