"""A small agent on the openai SDK: asks, runs the tools it is told to, asks again until answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import openai
import orjson

Tools = Mapping[str, Callable[..., Any]]


@dataclass
class Turn:
    """One assistant message, however it came."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Any = None


@dataclass
class Conversation:
    """What the loop went through."""

    turns: list[Turn]
    results: list[Any]
    messages: list[dict[str, Any]]

    @property
    def answer(self) -> str:
        return self.turns[-1].content


def ask(client: openai.OpenAI, *, stream: bool, **request: Any) -> Turn:
    """One request, streamed or whole, as one turn."""
    if stream:
        return _stitched(client.chat.completions.create(stream=True, **request))
    completion = client.chat.completions.create(**request)
    (choice,) = completion.choices
    message = choice.message
    return Turn(
        content=message.content or "",
        reasoning=getattr(message, "reasoning_content", None) or "",
        calls=[
            call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls or []
        ],
        finish_reason=choice.finish_reason,
        usage=completion.usage,
    )


def _stitched(chunks: Any) -> Turn:
    """Put the fragments together the way clients do: calls by their index."""
    turn = Turn()
    for chunk in chunks:
        turn.usage = chunk.usage or turn.usage
        for choice in chunk.choices:
            delta = choice.delta
            turn.content += delta.content or ""
            turn.reasoning += getattr(delta, "reasoning_content", None) or ""
            turn.finish_reason = choice.finish_reason or turn.finish_reason
            for piece in delta.tool_calls or []:
                if piece.index == len(turn.calls):
                    function = {"name": piece.function.name, "arguments": ""}
                    turn.calls.append({"id": piece.id, "type": "function", "function": function})
                turn.calls[piece.index]["function"]["arguments"] += piece.function.arguments or ""
    return turn


def run_loop(
    client: openai.OpenAI,
    question: str,
    tools: list[dict[str, Any]],
    implementations: Tools,
    *,
    stream: bool,
    turns: int = 4,
    **request: Any,
) -> Conversation:
    """Ask until the model answers without a call.

    Raises:
        AssertionError: it still calls after `turns` turns.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    conversation = Conversation([], [], messages)
    for _ in range(turns):
        turn = ask(client, stream=stream, messages=messages, tools=tools, **request)
        conversation.turns.append(turn)
        reply: dict[str, Any] = {"role": "assistant", "content": turn.content}
        if turn.reasoning:
            reply["reasoning_content"] = turn.reasoning
        if turn.calls:
            reply["tool_calls"] = turn.calls
        messages.append(reply)
        if not turn.calls:
            return conversation
        for call in turn.calls:
            function = call["function"]
            result = implementations[function["name"]](**orjson.loads(function["arguments"]))
            conversation.results.append(result)
            content = result if isinstance(result, str) else orjson.dumps(result).decode()
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    raise AssertionError(f"no answer after {turns} turns: {conversation.turns}")
