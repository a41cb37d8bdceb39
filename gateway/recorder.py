"""Records exchanges to a file, and plays them again: a bug of the field as a file that shows it.

One JSON line per exchange: the body, what a store or the cache of reasoning lent to it, the token
ids of every step, and the reply as it was sent. `replay` opens the body again and feeds the steps to
the parsers as they are now; what differs from the recorded reply is shown. Times and the random
parts of ids, which are fresh in every run, are not compared.

A record holds prompts and replies, so nothing is recorded unless `--record FILE` asks for it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from parsers import (
    ClientError,
    Codec,
    Completion,
    Exchange,
    PromptNote,
    Protocol,
    ReasoningCache,
    ReplyError,
    TokenLogprob,
)

#: What the codec draws afresh for every reply: seconds and the random part of its ids.
_FRESH = (
    (re.compile(rb'("(?:created|created_at|completed_at)":\s?)\d+(?:\.\d+)?'), rb"\g<1>0"),
    (re.compile(rb"(call_\d{2,}_(?:ET_)?)[A-Za-z0-9]{24}"), rb"\g<1>X"),
    (re.compile(rb"((?:msg|rs|fc|ctc|tsc)_)[A-Za-z0-9-]{16,}"), rb"\g<1>X"),
)


class ReplayError(Exception):
    """The file is no record; the message names the line."""


class LentReasoning:
    """A store of reasoning that notes what it was asked for and had.

    Args:
        store: where it is kept.
    """

    def __init__(self, store: ReasoningCache) -> None:
        self._store = store
        self.lent: dict[str, str] = {}

    def get(self, call_id: str) -> str | None:
        """See parsers.ReasoningStore."""
        found = self._store.get(call_id)
        if found is not None:
            self.lent[call_id] = found
        return found

    def put(self, call_ids: Iterable[str], reasoning: str) -> None:
        """See parsers.ReasoningStore."""
        self._store.put(call_ids, reasoning)


@dataclass(slots=True)
class Tape:
    """What is recorded of one exchange while it runs.

    Args:
        protocol: whose body it is; "completions" for the raw route.
        exchange_id: id of the reply.
        profile: the rules it was opened under.
        body: as received.
        history: what the store lent to it.
    """

    protocol: Protocol | Literal["completions"]
    exchange_id: str
    profile: str
    body: bytes
    history: bytes | None = None
    reasoning: dict[str, str] = field(default_factory=dict)
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    reply: list[bytes] = field(default_factory=list)

    def step(
        self,
        choice: int,
        token_ids: tuple[int, ...],
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> None:
        """Take one step of a choice; its log-probabilities where the request asked for them."""
        taken = self._of(choice)
        taken["generations"][-1].append(token_ids)
        if logprobs is not None:
            number = len(taken["generations"]) - 1, len(taken["generations"][-1]) - 1
            taken.setdefault("logprobs", []).append([*number, logprobs])

    def note(self, choice: int, note: PromptNote) -> None:
        """Take what the engine told of the prompt."""
        self._of(choice)["note"] = [note.prefill, note.scores]

    def again(self, choice: int) -> None:
        """A choice goes on in a second generation."""
        self._of(choice)["generations"].append([])

    def end(self, choice: int, finish: str, completion_tokens: int, cached_tokens: int) -> None:
        """A choice has ended."""
        self._of(choice).update(
            finish=finish, completion_tokens=completion_tokens, cached_tokens=cached_tokens
        )

    def line(self, failure: str | None) -> bytes:
        """Write the record; `failure` says why there is no whole reply."""
        return orjson.dumps(
            {
                "time": time.time(),
                "protocol": self.protocol,
                "id": self.exchange_id,
                "profile": self.profile,
                "body": self.body.decode(),
                "history": None if self.history is None else self.history.decode(),
                "reasoning": self.reasoning,
                "choices": [self.choices[i] for i in sorted(self.choices)],
                "failure": failure,
                "reply": b"".join(self.reply).decode(),
            }
        )

    def _of(self, choice: int) -> dict[str, Any]:
        return self.choices.setdefault(choice, {"generations": [[]]})


class Recorder:
    """Appends to a file, one line at a time, from any thread.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def write(self, line: bytes) -> None:
        """Append one record.

        Raises:
            OSError: the file cannot be written.
        """
        with self._lock, self._path.open("ab") as file:
            file.write(line + b"\n")


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replayed exchange differs from its record.

    Args:
        line: of the file, from 1.
        exchange_id: of the reply.
        text: what differs.
    """

    line: int
    exchange_id: str
    text: str


def replay(path: Path, codec: Codec) -> Iterator[Difference | None]:
    """Run every exchange of a record again; yields one item each, None where it came out the same.

    Args:
        path: of the record.
        codec: bound to the model and the profile of the record.

    Raises:
        ReplayError: a line is no record.
        OSError: the file cannot be read.
    """
    for number, row in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not row.strip():
            continue
        try:
            record = orjson.loads(row)
            if not isinstance(record, dict):
                raise TypeError("expected a JSON object")
            found = _again(record, codec)
        except orjson.JSONDecodeError as error:
            raise ReplayError(f"{path}, line {number}: not a record: no JSON: {error}") from None
        except KeyError as error:
            raise ReplayError(f"{path}, line {number}: not a record: it has no {error}") from None
        except (TypeError, AttributeError) as error:
            raise ReplayError(f"{path}, line {number}: not a record: {error}") from None
        yield None if found is None else Difference(number, record["id"], found)


def _again(record: dict[str, Any], codec: Codec) -> str | None:
    if record["profile"] != codec.profile.name:
        return (
            f"recorded under profile {record['profile']!r}, replayed under {codec.profile.name!r}"
        )
    try:
        exchange = _open(record, codec)
    except ClientError as error:
        return f"the request is refused now: {error.message}"
    choices: Sequence[Exchange | Completion] = exchange.choices
    streams = [
        _feed(choice, taken) for choice, taken in zip(choices, record["choices"], strict=False)
    ]
    if record["failure"] is not None or (len(exchange.choices) > 1 and exchange.stream):
        return None  # only that the steps go through: an order of arrival is not repeated
    if exchange.stream:
        reply = b"".join(b"".join(frames) for frames in streams)
    else:
        try:
            reply = exchange.body()
        except ReplyError as error:
            return f"the reply is an error now: {error.message}"
    return _compare(record["reply"].encode(), reply)


def _open(record: dict[str, Any], codec: Codec) -> Exchange | Completion:
    body = record["body"].encode()
    if record["protocol"] == "completions":
        return codec.open_completion(body, exchange_id=record["id"], created=0)
    reasoning = ReasoningCache()
    for call_id, text in record["reasoning"].items():
        reasoning.put([call_id], text)
    history = record["history"]
    return codec.open_exchange(
        record["protocol"],
        body,
        exchange_id=record["id"],
        reasoning=reasoning,
        stateful=True,
        history=None if history is None else history.encode(),
    )


def _feed(exchange: Exchange | Completion, taken: dict[str, Any]) -> list[bytes]:
    frames = exchange.start(len(exchange.prompt_ids), taken.get("cached_tokens", 0))
    if "note" in taken:
        exchange.note_prompt(PromptNote(*taken["note"]))
    logprobs = {
        (generation, step): [(own, [(id_, score) for id_, score in top]) for own, top in found]
        for generation, step, found in taken.get("logprobs", ())
    }
    for number, generation in enumerate(taken["generations"]):
        if number:
            exchange.continuation()
        for at, step in enumerate(generation):
            frames += exchange.receive(step, logprobs.get((number, at)))
    if "finish" in taken:
        finish: Literal["stop", "length"] = "length" if taken["finish"] == "length" else "stop"
        frames += exchange.close(finish, taken["completion_tokens"])
    return frames


def _compare(recorded: bytes, replayed: bytes) -> str | None:
    before, now = _settled(recorded), _settled(replayed)
    if before == now:
        return None
    at = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), None)
    at = min(len(before), len(now)) if at is None else at
    window = slice(max(0, at - 60), at + 60)
    return (
        f"byte {at}:\n    recorded ...{before[window].decode(errors='replace')}..."
        f"\n    replayed ...{now[window].decode(errors='replace')}..."
    )


def _settled(reply: bytes) -> bytes:
    """Take out what is fresh in every run."""
    for pattern, stays in _FRESH:
        reply = pattern.sub(stays, reply)
    return reply
