"""The items of a Responses request: messages, reasoning, calls and their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from parsers.body import require, written
from parsers.edits import SEARCH
from parsers.errors import ClientError
from parsers.pairs import ORPHAN, UNANSWERED, Item, distinct, pair
from parsers.reasoning import ReasoningStore
from parsers.request import check_image, read_arguments
from parsers.rules import Profile
from parsers.values import ServedModel

ROLES = ("system", "developer", "user", "assistant")
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
# What servers that run tools themselves leave in a history; it holds no text for the model.
_HOSTED = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "computer_call",
    "computer_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "shell_call",
    "shell_call_output",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
)
# Fields in which an item of any type may hold something that the model is to know.
_CARRIERS = ("content", "text", "summary", "encrypted_content", "input", "output", "tools")

# It asks for a summary of the context, which the client would wait for in vain.
_REFUSED = ("compaction_trigger",)

_Entry = dict[str, Any]


class ItemReader:
    """Reads the items of one request.

    Args:
        served: the model that will answer.
        profile: the rules.
        store: where missing reasoning may be found.
        find_item: looks a kept output item up by its id.
        ignored: takes the paths of items that are left out.

    Attributes:
        found_tools: tools that outputs of a tool search have declared.
    """

    def __init__(
        self,
        served: ServedModel,
        profile: Profile,
        store: ReasoningStore | None,
        find_item: Callable[[str], bytes | None] | None,
        ignored: list[str],
    ) -> None:
        self.found_tools: list[_Entry] = []
        self._served = served
        self._profile = profile
        self._store = store
        self._find_item = find_item
        self._ignored = ignored

    def read(self, history: Sequence[_Entry], items: Sequence[_Entry]) -> list[_Entry]:
        """Return all items as the codec takes them, every output right behind its call.

        Raises:
            ClientError: an item has the wrong shape or breaks a rule; ``param`` is its path.
        """
        read: list[_Entry] = []
        for at, item in [
            *((f"the stored item {i}", item) for i, item in enumerate(history)),
            *((f"input[{i}]", item) for i, item in enumerate(items)),
        ]:
            if (entry := self._item(item, at)) is not None:
                read.append(entry)
        paired = self._paired(read)
        whole = paired if self._store is None else self._restored(paired, self._store)
        return _distinct(whole) if self._profile.pairs == "mend" else whole

    def _item(self, item: _Entry, at: str) -> _Entry | None:
        type_ = item.get("type")
        if type_ is None and "role" in item:
            type_ = "message"
        if type_ == "item_reference":
            item = self._referenced(item, at)
            type_ = item.get("type")
        if type_ == "message":
            return self._message(item, at)
        if type_ == "reasoning":
            return _reasoning(item, at)
        if type_ in _CALLS or type_ in _OUTPUTS:
            return self._call(item, at)
        if type_ in ("tool_search_call", "tool_search_output"):
            return self._search(item, at)
        # The codec leaves out any item that it does not know; a context is not to be lost so.
        silent = (
            self._profile.lenient_messages
            and isinstance(type_, str)
            and type_ not in _REFUSED
            and not any(item.get(name) for name in _CARRIERS)
        )
        if type_ in _HOSTED or silent:
            self._ignored.append(at)
            return None
        raise ClientError(
            f"{at}.type: expected a message, reasoning, a call or its output, got {type_!r}",
            param=f"{at}.type",
        )

    def _referenced(self, item: _Entry, at: str) -> _Entry:
        id_ = item.get("id")
        require(isinstance(id_, str), f"{at}.id", "a string", id_)
        found = None if self._find_item is None else self._find_item(str(id_))
        if found is None:
            raise ClientError(
                f"{at}.id: this server does not keep an item {id_!r}; send it whole",
                code="item_not_found",
                param=f"{at}.id",
            )
        kept: _Entry = orjson.loads(found)
        return kept

    def _message(self, item: _Entry, at: str) -> _Entry:
        role, content = item.get("role"), item.get("content")
        require(role in ROLES, f"{at}.role", f"one of {', '.join(ROLES)}", role)
        if content is None and self._profile.lenient_messages:
            content = ""
        if not isinstance(content, str):
            content = self._parts(content, f"{at}.content")
        if role == "developer":  # issue 3: in all profiles; the codec makes it a user on V4
            role = "system"
        return {"type": "message", "role": role, "content": content}

    def _parts(self, parts: Any, at: str) -> list[_Entry]:
        require(isinstance(parts, list), at, "a string or an array of parts", parts)
        read = []
        for j, part in enumerate(parts):
            where = f"{at}[{j}]"
            require(isinstance(part, dict), where, "an object", part)
            type_ = part.get("type")
            if type_ in ("input_text", "output_text", "text", "refusal", "summary_text"):
                text = part.get("refusal" if type_ == "refusal" else "text")
                require(isinstance(text, str), f"{where}.text", "a string", text)
                kind = "output_text" if type_ in ("output_text", "refusal") else "input_text"
                read.append({"type": kind, "text": text})
            elif type_ in ("input_image", "image_url"):
                image = part.get("image_url")
                check_image(where, self._served, image)
                read.append({"type": "input_image", "image_url": image})
            else:
                require(
                    type_ == "input_file",
                    f"{where}.type",
                    "input_text, output_text or input_file",
                    type_,
                )
                read.append(part)
        return read

    def _call(self, item: _Entry, at: str) -> _Entry:
        id_ = item.get("call_id")
        # A client's own note in the form of an output (openai/codex#42376) answers no call.
        alone = id_ is None and item["type"] in _OUTPUTS and self._profile.pairs == "mend"
        require(alone or isinstance(id_, str), f"{at}.call_id", "a string", id_)
        if item["type"] in _OUTPUTS:
            output = item.get("output")
            if output is None and self._profile.lenient_messages:
                output = ""
            if not isinstance(output, str):
                # A result that was an answer elsewhere: the codec reads input parts only.
                output = [
                    {**part, "type": "input_text"} if part["type"] == "output_text" else part
                    for part in self._parts(output, f"{at}.output")
                ]
            if alone:
                return _alone(output, ORPHAN)
            return {"type": item["type"], "call_id": id_, "output": output}
        field = "arguments" if item["type"] == "function_call" else "input"
        if field == "arguments" and self._profile.lenient_messages:
            item = {**item, field: read_arguments(item.get(field), f"{at}.{field}")}
        for name in ("name", field):
            value = item.get(name)
            require(isinstance(value, str), f"{at}.{name}", "a string", value)
        kept = ("type", "call_id", "name", "namespace", field)
        return {key: item[key] for key in kept if item.get(key) is not None}

    def _search(self, item: _Entry, at: str) -> _Entry | None:
        """Read a client's own search for tools as the function it is to the model."""
        id_ = item.get("call_id")
        if not isinstance(id_, str):  # a search that a server ran
            self._ignored.append(at)
            return None
        if item["type"] == "tool_search_call":
            arguments = item.get("arguments")
            text = arguments if isinstance(arguments, str) else written(arguments, at)
            return {"type": "function_call", "call_id": id_, "name": SEARCH, "arguments": text}
        tools = item.get("tools")
        require(isinstance(tools, list), f"{at}.tools", "an array of tools", tools)
        assert isinstance(tools, list)
        self.found_tools += [tool for tool in tools if isinstance(tool, dict)]
        names = [tool.get("name") for tool in tools if isinstance(tool, dict)]
        text = written({"tools": names}, at)
        return {"type": "function_call_output", "call_id": id_, "output": text}

    def _paired(self, items: list[_Entry]) -> list[_Entry]:
        marks = [
            Item(
                calls=(item["call_id"],) if item["type"] in _CALLS else (),
                answers=item["call_id"] if item["type"] in _OUTPUTS else None,
                joins=item["type"] in _CALLS,
            )
            for item in items
        ]
        placed = pair(marks)
        if self._profile.pairs == "reject":
            missing = [p.call for p in placed if p.kind == "missing"]
            orphans = [p.call for p in placed if p.kind == "orphan"]
            twice = [p.call for p in placed if p.kind == "repeat"]
            faults = []
            if missing:
                faults.append(f"no output was found for the calls {', '.join(missing)}")
            if orphans:
                faults.append(f"no call was found for the outputs {', '.join(orphans)}")
            if twice:
                faults.append(f"there are two outputs of the calls {', '.join(twice)}")
            if faults:
                raise ClientError(f"input: {'; '.join(faults)}", param="input")
        out: list[_Entry] = []
        for place in placed:
            item = items[place.at]
            if place.kind == "item":
                out.append(item)
            elif place.kind == "missing":
                made = "function_call_output"
                if item["type"] == "custom_tool_call":
                    made = "custom_tool_call_output"
                out.append({"type": made, "call_id": place.call, "output": UNANSWERED})
            elif place.kind == "orphan" or item["output"] != items[place.first]["output"]:
                out.append(_alone(item["output"], place.note))
        return out

    @staticmethod
    def _restored(items: list[_Entry], store: ReasoningStore) -> list[_Entry]:
        """Put the reasoning of turns with calls back, where the client dropped it."""
        out: list[_Entry] = []
        begin, thought = 0, False  # of the assistant's turn in ``out``
        for item in items:
            if item["type"] == "reasoning":
                if not item["content"]:
                    continue  # sealed, or dropped by the client: nothing to be read
                thought = True
            elif item["type"] in _CALLS:
                found = None if thought else store.get(item["call_id"])
                if found:
                    part = {"type": "reasoning_text", "text": found}
                    out.insert(begin, {"type": "reasoning", "summary": [], "content": [part]})
                thought = True
            elif item.get("role") != "assistant":
                begin, thought = len(out) + 1, False
            out.append(item)
        return out


def _distinct(items: list[_Entry]) -> list[_Entry]:
    """Give calls whose id occurs again, and their outputs, an id of their own."""
    which = [i for i, item in enumerate(items) if item["type"] in (*_CALLS, *_OUTPUTS)]
    ids = distinct(
        ("call" if items[i]["type"] in _CALLS else "result", items[i]["call_id"]) for i in which
    )
    for i, id_ in zip(which, ids, strict=True):
        items[i] = {**items[i], "call_id": id_}
    return items


def _reasoning(item: _Entry, at: str) -> _Entry:
    """Keep the text; where only the summary came back, it is the text (see ``parsers.edits``)."""
    field = "content" if item.get("content") else "summary"
    parts: Any = item.get(field) or []
    if isinstance(parts, str):
        parts = [{"text": parts}]
    require(isinstance(parts, list), f"{at}.{field}", "an array of parts", parts)
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "summary": [], "content": content}


def _alone(output: Any, note: str) -> _Entry:
    """Show an output that has no call to stand behind as a user's text."""
    parts = [{"type": "input_text", "text": output}] if isinstance(output, str) else output
    content = [{"type": "input_text", "text": note}, *parts]
    return {"type": "message", "role": "user", "content": content}
