"""Tool calls: how they are opened, continued, named and ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.checks.registry import check, grammar
from conformance.model import PROTOCOLS, Level
from conformance.protocols.observation import Observation, table

for _slug, _why in {
    "stream/tool-call/index-present": "Every tool_calls[] item carries an integer index; clients stitch by it.",
    "stream/tool-call/index-dense": "Calls are numbered 0, 1, 2 … in the order they open.",
    "stream/tool-call/opens-complete": "The first fragment of a call has id, type and name.",
    "stream/tool-call/id-once": "The id is sent once; clients that join strings would double it.",
    "stream/tool-call/name-once": "The name is sent once; clients that join strings would double it.",
    "stream/tool-call/arguments-text": "Argument fragments are strings.",
}.items():
    grammar(_slug, _why, protocols=["chat"], modes=["stream"])
grammar(
    "stream/tool-call/first-arguments-empty",
    "The first fragment has empty arguments, as the official API sends it.",
    level=Level.SHOULD,
    protocols=["chat"],
    modes=["stream"],
)
grammar(
    "stream/tool-call/in-turn",
    "A call is finished before the next one opens, so that clients may run it at once.",
    level=Level.SHOULD,
    protocols=["chat"],
    modes=["stream"],
)


def _has_calls(seen: Observation) -> bool:
    return bool(seen.calls)


@check("tool-call/id-unique", protocols=PROTOCOLS, when=_has_calls)
def id_unique(seen: Observation) -> Iterator[str]:
    """Every call has a non-empty id of its own; results are matched by it."""
    ids = [call.id for call in seen.calls]
    if not all(ids) or len(set(ids)) != len(ids):
        yield f"call ids are {ids}"


@check("tool-call/name-given", when=_has_calls)
def name_given(seen: Observation) -> Iterator[str]:
    """Every call has a name."""
    for number, call in enumerate(seen.calls):
        if not call.name:
            yield f"call {number} has no name"


@check("tool-call/declared", protocols=PROTOCOLS, when=_has_calls)
def declared(seen: Observation) -> Iterator[str]:
    """Only tools that the request declares are called."""
    for call in seen.calls:
        if call.name and call.name not in seen.declared:
            yield f"call of {call.name!r}; declared are {seen.declared}"


def _choice(seen: Observation) -> Any:
    return seen.body.get("tool_choice")


def _kind(seen: Observation) -> str:
    choice = _choice(seen)
    return str(table(choice).get("type", "")) if isinstance(choice, dict) else str(choice)


@check("tool-call/none-means-none", when=lambda seen: _kind(seen) == "none")
def none_means_none(seen: Observation) -> Iterator[str]:
    """tool_choice none gives no call."""
    if seen.calls:
        yield f"tool_choice is none and {seen.calls[0].name!r} was called"


def _forced(seen: Observation) -> bool:
    return (
        _kind(seen) in {"required", "any", "function", "tool"}
        and bool(seen.declared)
        and seen.finish != "length"
        and _script_calls(seen)
    )


def _script_calls(seen: Observation) -> bool:
    script = seen.variant.case.script
    return script is None or "invoke" in script.output


def _named(seen: Observation) -> str | None:
    choice = table(_choice(seen))
    name = choice.get("name") or table(choice.get("function")).get("name")
    return str(name) if name else None


def _chosen(seen: Observation) -> bool:
    return _forced(seen) and (seen.variant.case.tier != "live" or bool(seen.calls))


@check("tool-call/forced", when=_chosen)
def forced(seen: Observation) -> Iterator[str]:
    """A forced tool_choice gives a call, and of the named tool when one is named."""
    name = _named(seen)
    names = [call.name for call in seen.calls]
    if not names or (name and set(names) != {name}):
        yield f"tool_choice {_choice(seen)!r} and the calls are {names}"


@check(
    "live/forced-call",
    level=Level.SHOULD,
    when=lambda seen: seen.variant.case.tier == "live" and _forced(seen),
)
def forced_call(seen: Observation) -> Iterator[str]:
    """A forced choice gives a call; a server that does not constrain decoding cannot promise it."""
    if not seen.calls:
        yield f"tool_choice {_choice(seen)!r} and the model made no call"


def _single(seen: Observation) -> bool:
    disabled = table(_choice(seen)).get("disable_parallel_tool_use") is True
    return seen.body.get("parallel_tool_calls") is False or disabled


@check("tool-call/one-when-not-parallel", when=_single)
def one_when_not_parallel(seen: Observation) -> Iterator[str]:
    """With parallel calls off there is at most one call."""
    if len(seen.calls) > 1:
        yield f"{len(seen.calls)} calls with parallel calls off"


@check("finish/once", protocols=PROTOCOLS, when=lambda seen: seen.error is None and not seen.faulty)
def finish_once(seen: Observation) -> Iterator[str]:
    """The end of the output is declared exactly once."""
    if seen.finishes != 1:
        yield f"{seen.finishes} ends declared"


@check("finish/agrees-with-calls", when=lambda seen: seen.finish is not None)
def finish_agrees(seen: Observation) -> Iterator[str]:
    """tool_calls is said exactly when there are calls; only length and a filter may cut one."""
    # OpenAI's function calling guide: the end of a named choice is stop. Both are in the field.
    if seen.finish == "tool_calls" and not seen.calls:
        yield "the end says tool_calls and there is none"
    if seen.finish == "stop" and seen.calls and _named(seen) is None:
        yield f"the end says stop and there are {len(seen.calls)} calls"
