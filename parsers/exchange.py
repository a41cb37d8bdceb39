"""One request and its reply: token ids in, wire bytes out.

Knows the order of things: what a reply begins and ends with, where the stop token is cut, when a
forced call is opened for the model, how a fault ends. Everything it writes comes from the codec's
``Wire`` as JSON text, put into a frame unparsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from parsers.answer import AnswerPipeline
from parsers.dialects import THINK_END_TEXT
from parsers.errors import ClientError, Protocol, ReplyError
from parsers.frames import ChatFrames, Frames, Tally
from parsers.invoke import Finish
from parsers.pipeline import Pipeline
from parsers.prompt_note import NO_NOTE, count_scores, write_scores
from parsers.reasoning import ReasoningStore
from parsers.report import Report
from parsers.request import Stored
from parsers.values import Constraint, PromptNote, Sampling

if TYPE_CHECKING:
    from parsers.detokenize import Vocabulary
    from parsers.wire import TokenLogprob, Wire

GATHER = 64
"""Tokens of a whole reply that are worked on at once; a policy's error is seen so much later."""
LONG_STEP = 512
"""Tokens of a step, and rivals told of them, from which on it counts as long: a slow reader's steps are
joined."""
LONG_REPLY = 2048
"""Tokens of a reply, and log-probabilities told in it, from which on its end counts as long."""


@dataclass(frozen=True, slots=True)
class Forced:
    """A call that the reply has to hold.

    Args:
        think_end: id of the token that ends the reasoning.
        opener: ids that open the block of calls, and the call where only one tool is allowed.
        shown: the same without the blank line before it, for an answer that has ended already.
        named: whether the opener opens the call.
        later: whether it has to be opened after free thinking; else the prompt ends in it.
        prompt_ids: the prompt without an opener.
        retries: whether the call is opened once more where the reply ends without one.
    """

    think_end: int
    opener: tuple[int, ...]
    shown: tuple[int, ...]
    named: bool
    later: bool
    prompt_ids: tuple[int, ...]
    retries: bool


@dataclass(frozen=True, slots=True)
class Continuation:
    """A further generation of an exchange whose call has to be opened for the model.

    Args:
        prompt_ids: its whole prompt: that of the first, what was thought, and the opener.
        max_tokens: most tokens it may generate.
        again: it repeats one that failed, so it must not draw the same numbers.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    again: bool = False


class Exchange:
    """A request that was accepted, and the writer of its reply.

    Call ``start`` once, ``receive`` for every step, then ``close`` or ``fail``. The bytes of a
    stream are the lists these return, joined; a whole reply is ``body`` after ``close``.

    A forced tool choice may take up to three generations: the thought, the call, and the call once
    more. The contract of whoever drives the engine::

        generate(exchange.prompt_ids, exchange.sampling) -> receive, until it ends or .finished
        while it did not end for length and (more := exchange.continuation()) is not None:
            abort the generation
            generate(more.prompt_ids, max_tokens=more.max_tokens) -> receive as before
        close(finish, completion_tokens of all)

    ``continuation`` is None for every other request, so the question can always be asked.

    Attributes:
        protocol: whose wire format is written.
        prompt_ids: the prompt, encoded by the codec.
        sampling: how to generate.
        constraint: what constrained decoding would enforce, or None.
        stream: whether the client asked for a stream.
        model: the model name the client used.
        ignored: request fields accepted without effect.
        images: those of the prompt as data URLs, in the order of their placeholders.
        choices: all exchanges of this request, this one among them; one per choice (``n``). Each
            is a generation of its own over the same prompt. The streams' frames are sent as they
            come, in any order; an error of one ends the stream for all. The whole reply is ``body`` of the first after all were closed.
        stored: what the request asks of a store; None but for Responses.
        error: set when a policy says that what the model wrote is an error; a stream has then
            ended in it, and in place of a whole reply it is to be sent.
    """

    def __init__(
        self,
        *,
        protocol: Protocol,
        wire: Wire,
        frames: Frames,
        continuous: bool,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        vocabulary: Vocabulary,
        constraint: Constraint | None,
        stream: bool,
        model: str,
        ignored: tuple[str, ...],
        images: tuple[str, ...],
        eos_token_ids: tuple[int, ...],
        stepwise: bool,
        pipeline: Pipeline | AnswerPipeline | None,
        forced: Forced | None,
        stored: Stored | None,
        reasoning: ReasoningStore | None,
    ) -> None:
        self.protocol = protocol
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.constraint = constraint
        self.stream = stream
        self.model = model
        self.ignored = ignored
        self.images = images
        self.choices: tuple[Exchange, ...] = (self,)
        self.stored = stored
        self.error: ReplyError | None = None
        self._vocabulary = vocabulary
        self._note = NO_NOTE
        self._scores = 0  # log-probabilities of the prompt that are told
        self._ends_heavily = False  # a step may be the last one, which tells them
        self._weight = 1 + (sampling.top_logprobs or 0)
        self._wire = wire
        self._frames = frames
        self._continuous = continuous  # the usage so far is in every chunk (Chat)
        self._prompt_tokens = 0
        # A reply that may end before the engine does is fed token by token: what comes after its
        # end in the same step must leave no trace, in the usage as little as in the report.
        self._stepwise = stepwise
        self._pipeline = pipeline
        self._report = Report() if pipeline is None else pipeline.report
        self._mark = pipeline.mark if isinstance(pipeline, Pipeline) else -1
        self._think_end = vocabulary.special(THINK_END_TEXT)
        self._waiting = wire.halves if pipeline is None else pipeline.waiting
        self._eos = frozenset(eos_token_ids)
        self._ended = False
        self._failed = False
        self._over = False
        self._received = 0
        self._completion_tokens: int | None = None
        self._forced = forced if forced is not None and forced.later else None
        self._owed = forced if forced is not None and forced.retries else None
        # Nobody sees a whole reply grow, and nothing in it but a policy's error can end it early:
        # its steps are gathered, so that each costs an append. Not for JSON without a gate, which
        # the codec writes differently in every split.
        split_shows = pipeline is None and constraint is not None
        self._gathers = not (stream or stepwise or self._forced or split_shows)
        self._gathered: list[int] = []
        self._gathered_logprobs: list[TokenLogprob] = []
        self._marked = False  # a marker is among them
        self._output: list[int] = []  # kept while a call may still have to be opened
        self._late: list[bytes] = []  # frames made between two calls of the driver
        self._reasoning = reasoning
        self._last_event: str | None = None  # the response as it was sent, or the event with it

    @property
    def finished(self) -> bool:
        """Whether no more tokens are wanted: stop the engine, then ask for a continuation."""
        return self._ended or self._over or self._wire.finished or self._frames.closed

    def start(self, prompt_tokens: int, cached_tokens: int) -> list[bytes]:
        """Open the reply.

        Args:
            prompt_tokens: length of the prompt as the engine counts it.
            cached_tokens: how much of it was reused.

        Returns:
            The first frames; none for a whole reply.
        """
        self._prompt_tokens = prompt_tokens
        self._spend()
        return self._frames.frames(self._wire.ready(prompt_tokens, cached_tokens))

    def _spend(self) -> None:
        if self._continuous and isinstance(self._frames, ChatFrames):
            self._frames.spend(self._prompt_tokens, self._received)

    def note_prompt(self, note: PromptNote) -> None:
        """Take what the engine tells of the prompt; the end of the reply shows it."""
        self._note = note
        self._scores = count_scores(note, self.sampling.scoring)
        # a stop sequence ends a stream in the middle of a step
        self._ends_heavily = self.stream and self._stepwise and self._scores >= LONG_REPLY

    def receive(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None
    ) -> list[bytes]:
        """Take what one step generated.

        The first EOS id ends the text: it and all ids after it are dropped.

        Args:
            token_ids: newly generated ids, in any number.
            logprobs: one (logprob, rivals) pair per id, where the request asked for them.

        Returns:
            Frames to send now; none for a whole reply.
        """
        if self.finished:
            return []
        if not self._eos.isdisjoint(token_ids):
            end = next(i for i, id_ in enumerate(token_ids) if id_ in self._eos)
            token_ids, logprobs = token_ids[:end], logprobs and logprobs[:end]
            self._ended = True
        if self._forced is not None:
            if self._forced.think_end in token_ids:
                # The answer is ours to open: what the model wrote of it in this step is dropped.
                end = list(token_ids).index(self._forced.think_end) + 1
                token_ids, logprobs = token_ids[:end], logprobs and logprobs[:end]
                self._ended = True
            self._output += token_ids
        if self.sampling.top_logprobs is None:
            logprobs = None  # the codec writes what it is given, asked for or not
        if self._gathers:
            self._gathered += token_ids
            self._gathered_logprobs += logprobs or ()
            self._marked = self._marked or self._mark in token_ids
            return self._release() if len(self._gathered) >= GATHER else []
        if len(token_ids) == 1 and not self._late:
            self._received += 1
            return self._push(token_ids, logprobs)
        frames, self._late = self._late, []
        if self._stepwise and len(token_ids) > 1:
            for i in range(len(token_ids)):
                frames += self._receive(token_ids[i : i + 1], logprobs and logprobs[i : i + 1])
            return frames
        return frames + self._receive(token_ids, logprobs)

    def gather(self, token_ids: Sequence[int]) -> bool:
        """Take a step that only has to be kept: what most steps of a whole reply come to.

        Returns:
            Whether it was taken; else ``receive`` has to take it.
        """
        full = len(self._gathered) + len(token_ids) >= GATHER
        if not self._gathers or full or self._ended or not self._eos.isdisjoint(token_ids):
            return False
        self._gathered += token_ids
        if self._mark in token_ids:
            self._marked = True
        return True

    def heavy(self, token_ids: Sequence[int]) -> bool:
        """Whether ``receive`` may take some milliseconds: to be asked before, and run in a thread.

        Any token may be the one that lets go all that waits.
        """
        if len(token_ids) * self._weight + len(self._waiting) > LONG_STEP or self._ends_heavily:
            return True
        if self._think_end in token_ids and self._received >= LONG_REPLY:
            return True  # some protocols repeat the whole reasoning at its end
        pipeline = self._pipeline
        if not isinstance(pipeline, Pipeline):
            return False
        if self._marked or pipeline.in_tag or self._mark in token_ids:
            return pipeline.gate.heavy  # a call may end, which is then judged
        return False

    def heavy_close(self, completion_tokens: int) -> bool:
        """Whether ``close`` may: the codec counts the reasoning by encoding it once more."""
        if self._told(completion_tokens) >= LONG_REPLY:
            return True
        pipeline = self._pipeline
        return pipeline is not None and (
            isinstance(pipeline, AnswerPipeline) or pipeline.gate.heavy
        )

    def heavy_body(self, completion_tokens: int) -> bool:
        """Whether ``body`` may, of all choices, whose tokens are given."""
        scores = sum(choice._scores for choice in self.choices[1:])
        return self._told(completion_tokens) + scores >= LONG_REPLY

    def _told(self, completion_tokens: int) -> int:
        """Return how many tokens and log-probabilities a reply tells."""
        return completion_tokens * self._weight + self._scores

    def _release(self) -> list[bytes]:
        """Work on what was gathered."""
        token_ids, logprobs = self._gathered, self._gathered_logprobs
        self._gathered, self._gathered_logprobs, self._marked = [], [], False
        return self._receive(token_ids, logprobs or None)

    def _receive(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> list[bytes]:
        over = self._over or self._wire.finished
        if over or not token_ids:
            return []
        self._received += len(token_ids)
        return self._push(token_ids, logprobs)

    def _push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> list[bytes]:
        if self._continuous:
            self._spend()
        if self._pipeline is None:
            chunks = self._wire.tokens(token_ids, logprobs)
        else:
            chunks = self._pipeline.receive(token_ids, logprobs)
            if self._pipeline.error is not None:
                return self._refuse(chunks, self._pipeline.error)
            self._over = self._pipeline.satisfied
        if chunks and self._wire.finished:  # a stop sequence: the codec wrote its last chunks
            self._seal(chunks)
        return self._frames.frames(chunks)

    def continuation(self) -> Continuation | None:
        """Return the generation that has to follow the one that ended, None where none has to.

        Only to be asked when a generation ended by itself or ``finished`` turned True. The opener
        counts as written by the model: the next ``receive`` goes on behind it.
        """
        forced, self._forced = self._forced, None
        left = self.sampling.max_tokens - self._received
        if left < 1 or self._over or self._wire.finished:
            return None
        if forced is not None and not self._called:
            return self._open(forced, forced.opener, left, again=False)
        return self._second_try(left)

    @property
    def _called(self) -> bool:
        return isinstance(self._pipeline, Pipeline) and self._pipeline.called

    def _second_try(self, left: int) -> Continuation | None:
        """Open the call once more, in place of all that was written instead of it."""
        owed, self._owed = self._owed, None
        if owed is None:
            return None
        if self._gathered:
            self._release()
        assert isinstance(self._pipeline, Pipeline)
        if self._over:
            return None
        chunks = self._pipeline.settle()
        if self._pipeline.error is not None:
            self._late += self._refuse(chunks, self._pipeline.error)
            return None
        self._late += self._frames.frames(chunks)
        if self._pipeline.called:
            return None
        self._pipeline.gate.last_try = True
        return self._open(owed, owed.shown, left, again=True)

    def _open(
        self, forced: Forced, shown: Sequence[int], left: int, *, again: bool
    ) -> Continuation:
        """Open the call: to the model by the opener, to the gate by what is shown of it."""
        assert isinstance(self._pipeline, Pipeline)
        self._ended = False
        if forced.later and forced.think_end not in self._output:
            self._output.append(forced.think_end)
            self._late += self._push((forced.think_end,), None)
        self._pipeline.gate.opened = forced.named
        self._late += self._push(shown, None)
        prompt_ids = (*forced.prompt_ids, *self._output, *forced.opener)
        return Continuation(prompt_ids, left, again)

    def close(self, finish: Finish, completion_tokens: int | None = None) -> list[bytes]:
        """End the reply.

        Args:
            finish: why the engine stopped.
            completion_tokens: its own count of generated tokens, taken over into ``usage``.

        Returns:
            The last frames, ``data: [DONE]`` included where the protocol has it; none for a whole
            reply.
        """
        self._ended = True
        if self._gathered:
            self._release()
        late, self._late = self._late, []
        if self._failed:
            return late
        if self._wire.finished:
            return late + self._frames.end() if self.stream else []
        self._completion_tokens = completion_tokens
        chunks: list[str] = []
        if self._pipeline is not None:
            chunks = self._pipeline.close(finish)
            if self._pipeline.error is not None:
                return late + self._refuse(chunks, self._pipeline.error)
        if not self._wire.finished:  # what was held may have ended in a stop sequence
            chunks += self._wire.finish(finish)
        self._remember()
        if not self.stream:
            return []
        self._seal(chunks)
        return [*late, *self._frames.frames(chunks), *self._frames.end()]

    def _remember(self) -> None:
        if self._reasoning is not None and self._wire.call_ids:
            self._reasoning.put(self._wire.call_ids, self._wire.reasoning())

    def fail(self, message: str, *, code: str = "internal_error", status: int = 500) -> list[bytes]:
        """End the reply with the protocol's own error; never a finish reason.

        Args:
            message: what failed, fit to be shown to the client.
            code: machine-readable reason, such as ``step_timeout``.
            status: the HTTP status it would have had before the headers; some protocols derive the
                error's type from it.

        Returns:
            The error frame and the end of the stream; none for a whole reply.
        """
        return self._end_in(ClientError(message, status=status, code=code))

    def body(self) -> bytes:
        """Return the whole reply; only after ``close`` and only without a stream.

        Raises:
            ReplyError: a policy says that what the model wrote is an error.
        """
        bodies = [choice._body() for choice in self.choices]
        return bodies[0].encode() if len(bodies) == 1 else _merged(bodies)

    def _body(self) -> str:
        if self.error is not None:
            raise self.error
        body = self._frames.seal_body(self._wire.body(), self._count(), self._extension())
        self._last_event = body
        return body

    def record(self) -> bytes:
        """Return what a store keeps of a Responses exchange that ended.

        Only after ``close``, and for a whole reply after ``body``.

        Returns:
            JSON: ``{"input": [items], "output": [items], "response": {...}}``: all items before
            the reply, the history included, those of the reply, and the response as it was sent.
            ``input`` and ``output`` joined are the ``history`` of an exchange that goes on.

        Raises:
            ValueError: it is no Responses exchange, or has not ended well.
        """
        if self.stored is None or self._last_event is None:
            raise ValueError("there is no response to be stored")
        sent = orjson.loads(self._last_event)
        response = sent.get("response", sent)
        items = [*self.stored.history, *self.stored.items]
        return orjson.dumps({"input": items, "output": response["output"], "response": response})

    @property
    def report(self) -> Report:
        """What the gate did to the reply so far."""
        return self._report

    def _refuse(self, chunks: list[str], error: ReplyError) -> list[bytes]:
        self.error, self._over = error, True
        return self._frames.frames(chunks) + self._end_in(error)

    def _end_in(self, error: ClientError) -> list[bytes]:
        self._ended = self._failed = True
        self._wire.abandon()
        late, self._late = self._late, []
        return late + self._frames.error(error) if self.stream else []

    def _count(self) -> int | None:
        """Return the tokens to be told.

        The codec counts neither a stop token nor half a character nor re-spelled markup.
        """
        if self._completion_tokens is None and self._pipeline is not None:
            return self._received
        return self._completion_tokens

    def _extension(self) -> dict[str, Any] | None:
        """The reply's field ``bathyal``: the gate's report, and what is told of the prompt."""
        found = self._report.extension() or {}
        if self._note.prefill is not None:
            found["prefill"] = self._note.prefill
        scoring = self.sampling.scoring
        if scoring is not None and self._note.scores is not None:
            scores = write_scores(self._note, self.prompt_ids, scoring, self._vocabulary)
            found["prompt_logprobs"] = scores
        return found or None

    def _seal(self, chunks: list[str]) -> None:
        """Complete the last chunks: the engine's count, the gate's report."""
        if not self.stream:
            return
        self._frames.seal(chunks, self._count(), self._extension())
        self._last_event = chunks[-1]


def _merged(bodies: Sequence[str]) -> bytes:
    """Join whole chat replies of one choice each: one id, the prompt counted once."""
    replies = [orjson.loads(body) for body in bodies]
    merged, tally = replies[0], Tally(len(replies))
    for index, reply in enumerate(replies):
        (choice,) = reply["choices"]
        choice["index"] = index
        if report := reply.pop("bathyal", None):
            choice["bathyal"] = report
        usage = tally.add(reply["usage"])
    return orjson.dumps({**merged, "choices": [r["choices"][0] for r in replies], "usage": usage})
