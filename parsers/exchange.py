"""One request and its reply: token ids in, wire bytes out.

Knows the order of things: what a reply begins and ends with, where the stop token is cut, how a
fault ends. Everything it writes comes from the codec's ``Wire`` as JSON text, put into a frame
unparsed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson

from parsers.errors import ClientError, Protocol, ReplyError, error_body
from parsers.invoke import Finish
from parsers.pipeline import Pipeline
from parsers.report import Report
from parsers.values import Constraint, Sampling

if TYPE_CHECKING:
    from parsers.codec import TokenLogprob, Wire

_DONE = b"data: [DONE]\n\n"
_USAGE = re.compile(r'(?<!\\)"completion_tokens":(\d+),"total_tokens":(\d+)')


class Exchange:
    """A request that was accepted, and the writer of its reply.

    Call ``start`` once, ``receive`` for every step, then ``close`` or ``fail``. The bytes of a
    stream are the lists these return, joined; a whole reply is ``body`` after ``close``.

    ``usage`` rides on the last chunk with a choice, whatever ``stream_options.include_usage`` says,
    as in the official codec's streams; no chunk without a choice is sent.

    Attributes:
        prompt_ids: the prompt, encoded by the codec.
        sampling: how to generate.
        constraint: what constrained decoding would enforce, or None.
        stream: whether the client asked for a stream.
        model: the model name the client used.
        ignored: request fields accepted without effect.
        error: set when a policy says that what the model wrote is an error; a stream has then
            ended in it, and in place of a whole reply it is to be sent.
    """

    def __init__(
        self,
        *,
        protocol: Protocol,
        wire: Wire,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        constraint: Constraint | None,
        stream: bool,
        model: str,
        ignored: tuple[str, ...],
        eos_token_ids: tuple[int, ...],
        stepwise: bool,
        pipeline: Pipeline | None,
    ) -> None:
        self.protocol = protocol
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.constraint = constraint
        self.stream = stream
        self.model = model
        self.ignored = ignored
        self.error: ReplyError | None = None
        self._wire = wire
        # A reply that may end before the engine does is fed token by token: what comes after its
        # end in the same step must leave no trace, in the usage as little as in the report.
        self._stepwise = stepwise
        self._pipeline = pipeline
        self._report = Report() if pipeline is None else pipeline.gate.report
        self._eos = frozenset(eos_token_ids)
        self._ended = False
        self._over = False
        self._received = 0
        self._completion_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """Whether no more tokens are wanted: stop the engine, then call ``close``."""
        return self._ended or self._over or self._wire.finished

    def start(self, prompt_tokens: int, cached_tokens: int) -> list[bytes]:
        """Open the reply.

        Args:
            prompt_tokens: length of the prompt as the engine counts it.
            cached_tokens: how much of it was reused.

        Returns:
            The first frames; none for a whole reply.
        """
        return self._frames(self._wire.ready(prompt_tokens, cached_tokens))

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
        if self.sampling.top_logprobs is None:
            logprobs = None  # the codec writes what it is given, asked for or not
        if self._stepwise and len(token_ids) > 1:
            return [
                frame
                for i in range(len(token_ids))
                for frame in self._receive(token_ids[i : i + 1], logprobs and logprobs[i : i + 1])
            ]
        return self._receive(token_ids, logprobs)

    def _receive(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> list[bytes]:
        over = self._over or self._wire.finished
        if over or not token_ids:
            return []
        self._received += len(token_ids)
        if self._pipeline is None:
            chunks = self._wire.tokens(token_ids, logprobs)
        else:
            chunks = self._pipeline.receive(token_ids, logprobs)
            gate = self._pipeline.gate
            if gate.error is not None:
                return self._refuse(chunks, gate.error)
            self._over = gate.satisfied
        if chunks and self._wire.finished:  # a stop sequence: the codec wrote its last chunk
            chunks[-1] = self._seal(chunks[-1])
        return self._frames(chunks)

    def close(self, finish: Finish, completion_tokens: int | None = None) -> list[bytes]:
        """End the reply.

        Args:
            finish: why the engine stopped.
            completion_tokens: its own count of generated tokens, taken over into ``usage``.

        Returns:
            The last frames, ``data: [DONE]`` included; none for a whole reply.
        """
        self._ended = True
        if self.error is not None:
            return []
        if self._wire.finished:
            return [_DONE] if self.stream else []
        self._completion_tokens = completion_tokens
        chunks: list[str] = []
        if self._pipeline is not None:
            chunks = self._pipeline.close(finish)
            if self._pipeline.gate.error is not None:
                return self._refuse(chunks, self._pipeline.gate.error)
        if not self._wire.finished:  # what was held may have ended in a stop sequence
            chunks += self._wire.finish(finish)
        if not self.stream:
            return []
        chunks[-1] = self._seal(chunks[-1])
        return [*self._frames(chunks), _DONE]

    def fail(self, message: str) -> list[bytes]:
        """End the reply with the protocol's own error; never a finish reason.

        Args:
            message: what failed, fit to be shown to the client.

        Returns:
            The error frame and the end of the stream; none for a whole reply.
        """
        return self._end_in(ClientError(message, status=500, code="internal_error"))

    def body(self) -> bytes:
        """Return the whole reply; only after ``close`` and only without a stream.

        Raises:
            ReplyError: a policy says that what the model wrote is an error.
        """
        if self.error is not None:
            raise self.error
        return self._seal(self._wire.body()).encode()

    @property
    def report(self) -> Report:
        """What the gate did to the reply so far."""
        return self._report

    def _refuse(self, chunks: list[str], error: ReplyError) -> list[bytes]:
        self.error, self._over = error, True
        return self._frames(chunks) + self._end_in(error)

    def _end_in(self, error: ClientError) -> list[bytes]:
        self._ended = True
        self._wire.abandon()
        if not self.stream:
            return []
        return [b"data: " + error_body(self.protocol, error) + b"\n\n", _DONE]

    def _seal(self, chunk: str) -> str:
        """Complete the last chunk or the whole body: the engine's count, the gate's report.

        The codec counts neither a stop token nor half a character nor re-spelled markup. A quote
        inside a JSON string is escaped, so the pattern can only match a key.
        """
        count = self._completion_tokens
        if count is None and self._pipeline is not None:
            count = self._received
        if count is not None:
            chunk = _USAGE.sub(lambda found: _usage(found, count), chunk, count=1)
        extension = self._report.extension()
        if extension is None:
            return chunk
        return f'{chunk[:-1]},"bathyal":{orjson.dumps(extension).decode()}}}'

    def _frames(self, chunks: list[str]) -> list[bytes]:
        return [f"data: {chunk}\n\n".encode() for chunk in chunks]


def _usage(found: re.Match[str], count: int) -> str:
    total = int(found[2]) - int(found[1]) + count
    return f'"completion_tokens":{count},"total_tokens":{total}'
