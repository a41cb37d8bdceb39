"""The messages of a Messages request: blocks, tool uses and their results."""

from __future__ import annotations

from typing import Any

import orjson

from parsers.body import Body, require
from parsers.errors import ClientError
from parsers.pairs import UNANSWERED, Item, Mark, distinct, pair
from parsers.reasoning import ReasoningStore
from parsers.request import check_image
from parsers.rules import Profile
from parsers.values import ServedModel

ROLES = ("user", "assistant", "system")
FAILED = "[this call failed]"

# Blocks that only a server which runs tools itself, or goes over to another model, makes or reads.
_HOSTED = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload", "fallback")

_Message = dict[str, Any]


def read_messages(
    body: Body,
    served: ServedModel,
    profile: Profile,
    store: ReasoningStore | None,
    ignored: list[str],
) -> list[_Message]:
    """Check the messages of a body and return them as the codec takes them.

    Args:
        body: the body without its nulls.
        served: the model that will answer.
        profile: the rules.
        store: where missing reasoning may be found.
        ignored: takes the paths of blocks that are left out.

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
    reader = _Reader(served, profile, store, ignored)
    checked = [reader.message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    fault = _unpaired(checked)
    if fault is None:
        return checked
    if profile.pairs == "mend":
        return _mended(checked)
    raise fault


class _Reader:
    def __init__(
        self,
        served: ServedModel,
        profile: Profile,
        store: ReasoningStore | None,
        ignored: list[str],
    ) -> None:
        self._served = served
        self._profile = profile
        self._store = store
        self._ignored = ignored

    def message(self, message: Any, at: str) -> _Message:
        require(isinstance(message, dict), at, "an object", message)
        role, content = message.get("role"), message.get("content")
        require(role in ROLES, f"{at}.role", f"one of {', '.join(ROLES)}", role)
        lenient = self._profile.lenient_messages
        if content is None and lenient:
            content = ""
        if isinstance(content, str):
            return {"role": role, "content": content}
        expected = "a string or an array of blocks"
        require(isinstance(content, list), f"{at}.content", expected, content)
        blocks = []
        for j, block in enumerate(content):
            read = self._block(block, f"{at}.content[{j}]")
            if read is not None:
                blocks.append(read)
        if role == "assistant":
            self._restore(blocks)
            if self._profile.pairs == "mend":  # the codec takes nothing behind a turn's calls
                blocks.sort(key=lambda block: block["type"] == "tool_use")
        if not blocks and (content or lenient):
            blocks = [{"type": "text", "text": ""}]
        return {"role": role, "content": blocks}

    def _block(self, block: Any, at: str) -> _Message | None:
        """Check one block; None where it is left out."""
        require(isinstance(block, dict), at, "an object", block)
        type_ = block.get("type")
        require(isinstance(type_, str), f"{at}.type", "a string", type_)
        assert isinstance(type_, str)
        if type_ == "text":
            require(isinstance(block.get("text"), str), f"{at}.text", "a string", block.get("text"))
        elif type_ == "image":
            source = block.get("source")
            inline = isinstance(source, dict) and source.get("type") == "base64"
            check_image(at, self._served, "data:" if inline else None)
        elif type_ == "redacted_thinking":
            return None  # nobody but its maker can read it
        elif type_ == "thinking":
            if block.get("thinking") is None and self._profile.lenient_messages:
                block = {**block, "thinking": ""}  # a server that keeps its thoughts to itself
            text = block.get("thinking")
            require(isinstance(text, str), f"{at}.thinking", "a string", text)
        elif type_ == "tool_use":
            block = self._tool_use(block, at)
        elif type_ == "tool_result":
            return self._tool_result(block, at)
        elif type_ in ("search_result", "document"):
            return _as_text(block)
        elif type_ in _HOSTED or type_.endswith("_tool_result"):
            if self._profile.hosted_tools == "refuse":
                raise ClientError(
                    f"{at}.type: this server runs no tools itself; {type_!r} cannot be read",
                    code="unsupported_tool",
                    param=f"{at}.type",
                )
            self._ignored.append(at)
            return None
        elif type_ != "tool_reference":
            raise ClientError(
                f"{at}.type: expected text, image, document, thinking, tool_use or tool_result, "
                f"got {type_!r}",
                param=f"{at}.type",
            )
        return {key: value for key, value in block.items() if key != "cache_control"}

    def _tool_use(self, block: _Message, at: str) -> _Message:
        for field in ("id", "name"):
            value = block.get(field)
            require(isinstance(value, str), f"{at}.{field}", "a string", value)
        if self._profile.lenient_messages:
            return {**block, "input": _input(block.get("input"))}
        value = block.get("input")
        require(isinstance(value, dict), f"{at}.input", "an object", value)
        return block

    def _tool_result(self, block: _Message, at: str) -> _Message:
        id_ = block.get("tool_use_id")
        require(isinstance(id_, str), f"{at}.tool_use_id", "a string", id_)
        content = block.get("content")
        parts: Any = "" if content is None else content
        if isinstance(parts, list):
            parts = [
                read
                for k, part in enumerate(parts)
                if (read := self._block(part, f"{at}.content[{k}]")) is not None
            ]
        else:
            require(isinstance(parts, str), f"{at}.content", "a string or an array", parts)
        if block.get("is_error") is True and self._profile.mark_tool_errors:
            # The codec's prompt has no trace of the flag (field_bugs.md).
            if isinstance(parts, str):
                parts = f"{FAILED}\n{parts}"
            else:
                parts = [{"type": "text", "text": FAILED}, *parts]
        return {"type": "tool_result", "tool_use_id": id_, "content": parts}

    def _restore(self, blocks: list[_Message]) -> None:
        """Put the reasoning of a turn with calls back, where the client dropped it."""
        if self._store is None or any(
            block["type"] == "thinking" and block.get("thinking") for block in blocks
        ):
            return
        ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
        found = next(filter(None, map(self._store.get, ids)), None)
        if found is not None:
            blocks.insert(0, {"type": "thinking", "thinking": found, "signature": ""})


def _input(value: Any) -> Any:
    """Read the arguments of a call where a client has kept their text, or nothing for none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        try:
            parsed = orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
        return parsed if isinstance(parsed, dict) else value
    return value


def _as_text(block: _Message) -> _Message:
    """Write a search result or a document of text as text; the codec has no place for either."""
    source = block.get("source")
    content = block.get("content")
    if isinstance(source, dict):
        content = source.get("data") if source.get("type") == "text" else source.get("content")
    if isinstance(content, list):
        content = "\n".join(
            part["text"]
            for part in content
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    if not isinstance(content, str):
        return block
    head = [block.get("title"), source if isinstance(source, str) else None]
    lines = [line for line in head if isinstance(line, str)]
    return {"type": "text", "text": "\n".join([*lines, content])}


def _calls(message: _Message) -> list[str]:
    if message["role"] != "assistant" or isinstance(message["content"], str):
        return []
    return [block["id"] for block in message["content"] if block["type"] == "tool_use"]


def _results(message: _Message) -> list[str]:
    if message["role"] != "user" or isinstance(message["content"], str):
        return []
    return [block["tool_use_id"] for block in message["content"] if block["type"] == "tool_result"]


def _unpaired(messages: list[_Message]) -> ClientError | None:
    """Check that each tool use is answered at once in the next message, and nothing else is."""
    pending: list[str] = []
    for i, message in enumerate([*messages, {"role": "user", "content": ""}]):
        results = _results(message)
        missing = [id_ for id_ in pending if id_ not in results]
        if missing:
            return ClientError(
                f"messages[{i - 1}].content: tool_result blocks must follow in the next message "
                f"for every tool_use; unanswered: {', '.join(missing)}",
                param=f"messages[{i - 1}].content",
            )
        orphans = [id_ for id_ in results if id_ not in pending or results.count(id_) > 1]
        if orphans:
            return ClientError(
                f"messages[{i}].content: {orphans[0]!r} answers no tool_use of the message before",
                param=f"messages[{i}].content",
            )
        late = results and any(
            block["type"] != "tool_result" for block in message["content"][: len(results)]
        )
        if late:
            return ClientError(
                f"messages[{i}].content: tool_result blocks come before any other block",
                param=f"messages[{i}].content",
            )
        pending = _calls(message)
        twice = [id_ for id_ in pending if pending.count(id_) > 1]
        if twice:
            return ClientError(
                f"messages[{i}].content: {twice[0]!r} is the id of two tool_use blocks",
                param=f"messages[{i}].content",
            )
    return None


def _mended(messages: list[_Message]) -> list[_Message]:
    """Put every result behind its call (see ``parsers.pairs``)."""
    pieces: list[_Message] = []
    items: list[Item] = []
    for message in messages:
        results = set(_results(message))
        if not results:
            pieces.append(message)
            items.append(Item(calls=tuple(_calls(message))))
            continue
        rest = [block for block in message["content"] if block["type"] != "tool_result"]
        for block in message["content"]:
            if block["type"] == "tool_result":
                pieces.append({"role": "user", "content": [block]})
                items.append(Item(answers=block["tool_use_id"]))
        if rest:
            pieces.append({"role": "user", "content": rest})
            items.append(Item())
    out: list[_Message] = []
    for placed in pair(items):
        piece = pieces[placed.at]
        if placed.kind == "missing":
            made = {"type": "tool_result", "tool_use_id": placed.call, "content": UNANSWERED}
            piece = {"role": "user", "content": [made]}
        elif placed.kind in ("orphan", "repeat"):
            if placed.kind == "repeat" and _said(piece) == _said(pieces[placed.first]):
                continue
            piece = {"role": "user", "content": _noted(placed.note, _said(piece))}
        joins = bool(_results(piece)) and bool(out) and bool(_results(out[-1]))
        if joins or (piece["role"] == "user" and out and _results(out[-1])):
            out[-1] = {"role": "user", "content": [*out[-1]["content"], *_blocks(piece)]}
        else:
            out.append(piece)
    return _distinct(out)


def _distinct(messages: list[_Message]) -> list[_Message]:
    """Give calls whose id occurs again, and their results, an id of their own."""
    fields = {"tool_use": "id", "tool_result": "tool_use_id"}
    blocks = [
        block
        for message in messages
        if not isinstance(message["content"], str)
        for block in message["content"]
        if block["type"] in fields
    ]
    marks: list[Mark] = [
        ("call" if block["type"] == "tool_use" else "result", block[fields[block["type"]]])
        for block in blocks
    ]
    ids = iter(distinct(marks))
    return [
        message
        if isinstance(message["content"], str)
        else {
            **message,
            "content": [
                {**block, fields[block["type"]]: next(ids)} if block["type"] in fields else block
                for block in message["content"]
            ],
        }
        for message in messages
    ]


def _said(piece: _Message) -> Any:
    return piece["content"][0]["content"]


def _noted(note: str, content: Any) -> list[_Message]:
    return [{"type": "text", "text": note}, *_blocks({"content": content})]


def _blocks(message: _Message) -> list[_Message]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
