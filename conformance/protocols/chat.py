"""Observes Chat Completions replies (OpenAI's API reference; protocol.md 2.2 for the field order).

Grammar of a stream: chunks of one completion (same id, created, model), a role in the first delta
only, tool calls opened by a fragment with index, id, type and name and continued by fragments with
index and arguments, one finish_reason, at most one usage-only chunk behind it, then `[DONE]`.
"""

from __future__ import annotations

from typing import Any

from conformance.protocols.observation import Call, Observation, Usage, count, rows, table, text

FINISHES = {"stop", "tool_calls", "length", "content_filter", "function_call"}


def observe(seen: Observation) -> None:
    """Fills `seen` from its frames or its document."""
    if seen.streamed:
        _streams(seen)
    elif seen.document is not None:
        seen.error = seen.document.get(
            "error", seen.document if seen.exchange.status >= 400 else None
        )
        if seen.answered:
            _whole(seen, seen.document)


def usage(raw: Any) -> Usage:
    """Reads a usage object."""
    block = table(raw)
    return Usage(
        prompt=count(block.get("prompt_tokens")),
        completion=count(block.get("completion_tokens")),
        total=count(block.get("total_tokens")),
        cached=count(table(block.get("prompt_tokens_details")).get("cached_tokens")),
        reasoning=count(table(block.get("completion_tokens_details")).get("reasoning_tokens")),
    )


def asked(seen: Observation) -> int:
    """Number of choices the request asks for; a mistaken n counts as one."""
    wanted = count(seen.body.get("n"))
    return wanted if wanted and wanted > 0 else 1


def _streams(seen: Observation) -> None:
    """Walks the stream of each choice by itself: they may interleave as they like."""
    wanted = asked(seen)
    if wanted == 1:
        _stream(seen)
        return
    whole = seen.events
    for index in range(wanted):
        one = seen if index == 0 else Observation(seen.variant, seen.body, seen.exchange)
        one.events = [
            (number, part)
            for number, chunk in whole
            if (part := _of_choice(chunk, index, wanted)) is not None
        ]
        _stream(one)
        if index:
            seen.others.append(one)
            seen.usages += one.usages
            for slug, finding in one.violations:
                seen.violate(slug, f"choice {index}: {finding.message}", finding.frame)
    seen.events = whole


def _of_choice(chunk: dict[str, Any], index: int, wanted: int) -> dict[str, Any] | None:
    """The chunk as a stream of this choice alone has it; None where it says nothing of it."""
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices:
        return chunk if index == 0 else None
    kept = []
    for choice in rows(choices):
        place = choice.get("index")
        if place == index:
            kept.append(choice | {"index": 0})
        elif index == 0 and place not in range(wanted):
            kept.append(choice)  # belongs to nobody, which the first choice's walk reports
    return chunk | {"choices": kept} if kept else None


def _stream(seen: Observation) -> None:
    first: dict[str, Any] | None = None
    by_index: dict[int, Call] = {}
    roles = 0
    current = -1
    finish_frame: int | None = None
    for number, chunk in seen.events:
        if "error" in chunk:
            seen.error = chunk["error"]
            continue
        _envelope(seen, chunk, first, number)
        first = first or chunk
        if chunk.get("usage") is not None:
            seen.usages.append(usage(chunk["usage"]))
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            seen.violate("chat/chunk/envelope", "choices is missing", number)
            continue
        if not choices and chunk.get("usage") is None:
            seen.violate("chat/chunk/envelope", "a chunk without choice and without usage", number)
        if finish_frame is not None and choices:
            seen.violate("chat/finish/last", "a choice after the finish_reason", number)
        for choice in rows(choices):
            if choice.get("index") != 0:
                seen.violate(
                    "chat/chunk/choice-index",
                    f"expected index 0, got {choice.get('index')!r}",
                    number,
                )
            delta = table(choice.get("delta"))
            seen.logprobs += rows(table(choice.get("logprobs")).get("content"))
            if "role" in delta and delta["role"] is not None:
                roles += 1
                if roles > 1:
                    seen.violate("chat/chunk/role-once", "role sent again", number)
                if delta["role"] != "assistant":
                    seen.violate("chat/chunk/role-once", f"role is {delta['role']!r}", number)
            _delta_text(seen, delta, number)
            calls = delta.get("tool_calls")
            if calls == []:
                seen.violate("chat/chunk/no-empty-calls", "tool_calls is []", number)
            for fragment in rows(calls):
                current = _fragment(seen, fragment, by_index, current, number)
            reason = choice.get("finish_reason")
            if reason is not None:
                seen.finishes += 1
                seen.finish = text(reason)
                finish_frame = number
                if reason not in FINISHES:
                    seen.violate("chat/finish/known", f"finish_reason {reason!r}", number)
    if first is not None and roles == 0:
        seen.violate("chat/chunk/role-once", "no delta carries a role")


def _envelope(
    seen: Observation, chunk: dict[str, Any], first: dict[str, Any] | None, number: int
) -> None:
    if chunk.get("object") != "chat.completion.chunk":
        seen.violate("chat/chunk/envelope", f"object is {chunk.get('object')!r}", number)
    if not text(chunk.get("id")) or not text(chunk.get("model")):
        seen.violate("chat/chunk/envelope", "id or model is missing or empty", number)
    if count(chunk.get("created")) is None:
        seen.violate("chat/chunk/envelope", f"created is {chunk.get('created')!r}", number)
    if first is not None:
        for key in ("id", "model", "created"):
            if chunk.get(key) != first.get(key):
                seen.violate(
                    "chat/chunk/same-completion",
                    f"{key} changed from {first.get(key)!r} to {chunk.get(key)!r}",
                    number,
                )


def _delta_text(seen: Observation, delta: dict[str, Any], number: int) -> None:
    reasoning = delta.get("reasoning_content", delta.get("reasoning"))
    if isinstance(reasoning, str):
        if reasoning and (seen.content or seen.calls):
            seen.violate("stream/reasoning-first", "thinking after the answer began", number)
        seen.add_reasoning(reasoning)
    content = delta.get("content")
    if isinstance(content, str):
        if content and seen.calls:
            seen.violate("chat/content-before-calls", "content after a call was opened", number)
        seen.content += content
    elif content is not None:
        seen.violate("chat/chunk/envelope", f"content is a {type(content).__name__}", number)


def _fragment(
    seen: Observation, part: dict[str, Any], by_index: dict[int, Call], current: int, number: int
) -> int:
    """Takes one tool_calls[] item; returns the index that is open afterwards."""
    index = count(part.get("index"))
    if index is None:
        seen.violate("stream/tool-call/index-present", f"index is {part.get('index')!r}", number)
        index = current if not part.get("id") and current >= 0 else current + 1
    function = table(part.get("function"))
    call = by_index.get(index)
    if call is None:
        if index != len(by_index):
            seen.violate(
                "stream/tool-call/index-dense",
                f"expected index {len(by_index)} for a new call, got {index}",
                number,
            )
        call = by_index[index] = Call(text(part.get("id")), text(function.get("name")), "", index)
        seen.calls.append(call)
        if not call.id or not call.name or part.get("type") != "function":
            seen.violate(
                "stream/tool-call/opens-complete",
                "the first fragment needs id, type and name, got "
                f"id={part.get('id')!r} type={part.get('type')!r} name={function.get('name')!r}",
                number,
            )
        if text(function.get("arguments")):
            seen.violate(
                "stream/tool-call/first-arguments-empty",
                f"the first fragment carries arguments {function['arguments'][:40]!r}",
                number,
            )
    else:
        if index < current:
            seen.violate(
                "stream/tool-call/in-turn",
                f"call {index} goes on after call {current} began",
                number,
            )
        for key, value in (("id", part.get("id")), ("name", function.get("name"))):
            if value:
                seen.violate(f"stream/tool-call/{key}-once", f"{key} {value!r} sent again", number)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        call.arguments += arguments
        call.fragments += bool(arguments)
    elif arguments is not None:
        seen.violate(
            "stream/tool-call/arguments-text",
            f"arguments is a {type(arguments).__name__}, expected a string",
            number,
        )
    return max(index, current)


def _whole(seen: Observation, document: dict[str, Any]) -> None:
    slug = "chat/whole/shape"
    if document.get("object") != "chat.completion":
        seen.violate(slug, f"object is {document.get('object')!r}")
    if not text(document.get("id")) or not text(document.get("model")):
        seen.violate(slug, "id or model is missing or empty")
    if count(document.get("created")) is None:
        seen.violate(slug, f"created is {document.get('created')!r}")
    choices = rows(document.get("choices"))
    wanted = asked(seen)
    indexes = [choice.get("index") for choice in choices]
    if indexes != list(range(wanted)):
        seen.violate(slug, f"expected choices {list(range(wanted))}, got {indexes}")
    if document.get("usage") is not None:
        seen.usages.append(usage(document["usage"]))
    for number, choice in enumerate(choices[:wanted]):
        one = seen if number == 0 else Observation(seen.variant, seen.body, seen.exchange)
        _whole_choice(one, choice)
        if number:
            seen.others.append(one)
            seen.violations += one.violations


def _whole_choice(seen: Observation, choice: dict[str, Any]) -> None:
    slug = "chat/whole/shape"
    seen.logprobs += rows(table(choice.get("logprobs")).get("content"))
    message = table(choice.get("message"))
    if message.get("role") != "assistant":
        seen.violate(slug, f"message.role is {message.get('role')!r}")
    if "content" not in message:
        seen.violate(slug, "message.content is missing (null is allowed beside calls)")
    seen.content = text(message.get("content"))
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    seen.reasoning = reasoning if isinstance(reasoning, str) else None
    calls = message.get("tool_calls")
    if calls == []:
        seen.violate("chat/whole/no-empty-calls", "tool_calls is [], expected it to be absent")
    for raw in rows(calls):
        function = table(raw.get("function"))
        if raw.get("type") != "function":
            seen.violate(slug, f"tool_calls[].type is {raw.get('type')!r}")
        if not isinstance(function.get("arguments"), str):
            seen.violate(slug, "tool_calls[].function.arguments is no string")
        seen.calls.append(
            Call(
                text(raw.get("id")),
                text(function.get("name")),
                text(function.get("arguments")),
            )
        )
    if choice.get("finish_reason") is not None:
        seen.finish = text(choice["finish_reason"])
        seen.finishes = 1
        if seen.finish not in FINISHES:
            seen.violate("chat/finish/known", f"finish_reason {seen.finish!r}")
