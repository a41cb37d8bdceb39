"""Matches the results of calls to their calls, where a history has lost or moved some.

Knows items that make calls and items that answer one; what they look like is the readers' affair.
The rule (issue 3, profile ``agent``): a result stands right behind the turn that called, in the
order of the results; a call without one is answered by ``UNANSWERED``; a result without a call is
shown to the model as a user's text that begins with ``ORPHAN``; of two results of a call the first
counts, and a further one that says something else is shown likewise, after ``REPEAT``. A call whose id
occurred before (some servers number the calls of each turn from 0) gets an id of its own, and its
result the same: the codec takes an id only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

UNANSWERED = "[no result: this call was not answered]"
ORPHAN = "[result of a call that is no longer in this conversation]"
REPEAT = "[a further result of a call that was answered before]"


class Item(NamedTuple):
    """What one item of a history has to do with calls.

    Args:
        calls: ids of the calls it makes.
        answers: id of the call it answers; None for any other item.
        joins: it belongs to the turn before it, whose results come behind it.
    """

    calls: tuple[str, ...] = ()
    answers: str | None = None
    joins: bool = False


class Placed(NamedTuple):
    """One item of the mended history.

    Args:
        kind: ``item``: as it is; ``missing``: a result to be made for ``call``; ``orphan``: a
            result that answers nothing; ``repeat``: one of a call that has a result.
        at: of the item; for ``missing``, of the item that made the call.
        call: the id in question; empty for an ordinary item.
        first: for ``repeat``: of the result that counts.
    """

    kind: Literal["item", "missing", "orphan", "repeat"]
    at: int
    call: str = ""
    first: int = -1

    @property
    def note(self) -> str:
        """What a result that has no call to stand behind is shown with."""
        return REPEAT if self.kind == "repeat" else ORPHAN


def pair(items: Sequence[Item]) -> list[Placed]:
    """Put every result behind its call.

    Args:
        items: the history in order.

    Returns:
        The history to be rendered; each item occurs once.
    """
    claimed: set[int] = set()
    answered: dict[str, int] = {}  # the latest result of an id
    out: list[Placed] = []
    at = 0
    while at < len(items):
        answers = items[at].answers
        if answers is not None:
            if at not in claimed:
                first = answered.get(answers, -1)
                out.append(Placed("orphan" if first < 0 else "repeat", at, answers, first))
            at += 1
            continue
        turn = [at]
        while items[at].calls and at + 1 < len(items) and items[at + 1].joins:
            at += 1
            turn.append(at)
        at += 1
        out += [Placed("item", index) for index in turn]
        found: list[int] = []
        missing: list[Placed] = []
        for index in turn:
            for call in items[index].calls:
                answer = _answer(items, call, at, claimed)
                if answer is None:
                    missing.append(Placed("missing", index, call))
                else:
                    claimed.add(answer)
                    answered[call] = answer
                    found.append(answer)
        out += [Placed("item", index, items[index].answers or "") for index in sorted(found)]
        out += missing
    return out


def _answer(items: Sequence[Item], call: str, start: int, claimed: set[int]) -> int | None:
    """Find the result of a call: the first after it, but not beyond a call of the same id."""
    for index in range(start, len(items)):
        if call in items[index].calls:
            return None
        if items[index].answers == call and index not in claimed:
            return index
    return None


Mark = tuple[Literal["call", "result"], str]
"""A call or a result, and its id."""


def distinct(ids: Iterable[Mark]) -> list[str]:
    """Give every call an id of its own.

    Args:
        ids: of the calls and their results, each result behind its call.

    Returns:
        Their new ids in the same order; the first call of an id keeps it.
    """
    used: set[str] = set()
    unanswered: dict[str, list[str]] = {}
    out: list[str] = []
    for kind, id_ in ids:
        waiting = unanswered.setdefault(id_, [])
        if kind == "result":
            out.append(waiting.pop(0) if waiting else id_)
            continue
        own, count = id_, 1
        while own in used:
            count += 1
            own = f"{id_}_{count}"
        used.add(own)
        waiting.append(own)
        out.append(own)
    return out
