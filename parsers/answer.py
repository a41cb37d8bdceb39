"""Answers that are to be JSON: what stands around the value is left out, the value is checked.

Takes the place of the codec's JSON mode, whose blanks depend on how the output was split
(protocol.md 2.7). Prose and fences before the value are held until it begins and then dropped, so
is everything behind it. An answer in which no value begins is delivered as it is, and reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING

import orjson

from parsers.detokenize import Detokenizer, Vocabulary
from parsers.dialects import THINK_END, quote, spell
from parsers.errors import ReplyError
from parsers.invoke import Finish
from parsers.jsontext import is_strict
from parsers.policy import Action, GatePolicy
from parsers.report import Report
from parsers.schemas import violation
from parsers.sink import Sink
from parsers.stitch import Stitch
from parsers.toolset import TYPES, types_of
from parsers.values import ReplyFormat

if TYPE_CHECKING:
    from parsers.wire import TokenLogprob


class JsonAnswer:
    """Finds the JSON value in an answer's text.

    Args:
        wanted: what it is to be.
        policy: what is done with an answer that is something else.
        sink: where the decisions go.
        report: where what was done is noted.
    """

    def __init__(self, wanted: ReplyFormat, policy: GatePolicy, sink: Sink, report: Report) -> None:
        self._wanted = wanted
        self._policy = policy
        self._sink = sink
        self._report = report
        schema = wanted.schema
        admitted = {"object"} if schema is None else types_of(schema, schema)
        openers = {"object": "{", "array": "["}
        # A value of another type has no bracket that tells where it begins.
        bracketed = admitted <= set(openers) or admitted == TYPES
        self._openers = "".join(openers[t] for t in openers if t in admitted) if bracketed else ""
        self._held = 0  # characters before the value
        self._depth = 0
        self._in_string = self._escaped = False
        self._begun = not self._openers
        self._over = False
        self._kept: list[str] = []
        self._behind: list[str] = []  # what was left out after the value

    def feed(self, text: str) -> None:
        """Decide a piece of the answer."""
        if not self._begun:
            at = min((i for c in self._openers if (i := text.find(c)) >= 0), default=-1)
            if at < 0:
                self._held += len(text)
                self._kept.append(text)
                return
            self._begun = True
            self._sink.drop(self._held + at)
            self._lose("".join(self._kept) + text[:at])
            self._kept = []
            text = text[at:]
        if self._over:
            self._sink.drop(len(text))
            self._behind.append(text)
            return
        end = self._end(text) if self._openers else len(text)
        self._kept.append(text[:end])
        self._sink.verbatim(end)
        if end < len(text):
            self._sink.drop(len(text) - end)
            self._behind.append(text[end:])

    def _end(self, text: str) -> int:
        """Follow the value's brackets; return where it ends in this piece."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "[{":
                self._depth += 1
            elif char in "]}":
                self._depth -= 1
                if self._depth == 0:
                    self._over = True
                    return i + 1
        return len(text)

    def _lose(self, text: str) -> None:
        if text.strip().strip("`").removeprefix("json").strip():  # a fence is no text
            self._report.lose(quote(text))

    def release(self) -> None:
        """Let go what was held: something else than text comes, or nothing more."""
        if self._held:
            self._sink.verbatim(self._held)
            self._held, self._kept = 0, []

    def close(self, finish: Finish, *, judged: bool = True) -> ReplyError | None:
        """End the answer and judge it; a cut one is not judged.

        Args:
            finish: why the output ended.
            judged: no call came in place of the answer.

        Returns:
            The error to end the reply in, where the policy says so.
        """
        self._lose("".join(self._behind))
        text = spell("".join(self._kept)).strip()
        self.release()
        if finish == "length" or not judged:
            return None
        wrong: str | None = "the answer is no strict JSON"
        if is_strict(text):
            schema = {"type": "object"} if self._wanted.schema is None else self._wanted.schema
            wrong = violation(schema, orjson.loads(text))
        if wrong is None:
            return None
        self._report.unmet = "response_format"
        self._report.violations.append((None, quote(wrong)))
        if self._wanted.strict and self._policy.strict_violation is Action.ERROR:
            return ReplyError(f"response_format is not met: {quote(wrong)}", code="invalid_reply")
        return None


class AnswerPipeline:
    """The way of a reply that is to be JSON and declares no tools.

    Args:
        vocabulary: of the model.
        wanted: what the answer is to be.
        policy: what is done with one that is something else.
        stitch: the sink, over the wire of the reply.
        reasoning: the output starts inside the reasoning.

    Attributes:
        error: the error that the reply has to end in.
        satisfied: see ``Pipeline``; never here.
        waiting: the tokens that wait for a decision.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        wanted: ReplyFormat,
        policy: GatePolicy,
        stitch: Stitch,
        *,
        reasoning: bool,
    ) -> None:
        self.report = Report()
        self.error: ReplyError | None = None
        self.satisfied = False  # the finish reason is the engine's to give
        self._detokenizer = Detokenizer(vocabulary)
        self._stitch = stitch
        self.waiting = stitch.waiting
        self._answer = JsonAnswer(wanted, policy, stitch, self.report)
        self._reasoning = reasoning

    def receive(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> list[str]:
        """Take generated ids (no stop token among them); return the chunks' JSON."""
        text = ""
        for token_id, logprob in zip(token_ids, logprobs or repeat(None), strict=False):
            piece = self._detokenizer.push(token_id)
            self._stitch.hold(token_id, logprob, piece)
            text += piece
        if self._reasoning:
            thought, end, text = text.partition(THINK_END)
            self._stitch.verbatim(len(thought) + len(end))
            self._reasoning = not end
        if text:
            self._answer.feed(text)
        return self._stitch.flush()

    def close(self, finish: Finish) -> list[str]:
        """End the output; return the chunks of what was held."""
        self.error = self._answer.close(finish)
        return self._stitch.flush()
