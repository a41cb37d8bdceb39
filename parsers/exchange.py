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

from parsers.errors import ClientError, Protocol, error_object
from parsers.values import Constraint, Sampling

if TYPE_CHECKING:
    from parsers.codec import Finish, TokenLogprob, Wire

_DONE = b"data: [DONE]\n\n"
_USAGE = re.compile(r'(?<!\\)"completion_tokens":(\d+),"total_tokens":(\d+)')


class Exchange:
    """A request that was accepted, and the writer of its reply.

    Call ``start`` once, ``receive`` for every step, then ``close`` or ``fail``. The bytes of a
    stream are the lists these return, joined; a whole reply is ``body`` after ``close``.

    Attributes:
        prompt_ids: the prompt, encoded by the codec.
        sampling: how to generate.
        constraint: what constrained decoding would enforce, or None.
        stream: whether the client asked for a stream.
        model: the model name the client used.
        ignored: request fields accepted without effect.
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
    ) -> None:
        self.protocol = protocol
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.constraint = constraint
        self.stream = stream
        self.model = model
        self.ignored = ignored
        self._wire = wire
        self._eos = frozenset(eos_token_ids)
        self._ended = False
        self._completion_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """Whether no more tokens are wanted: stop the engine, then call ``close``."""
        return self._ended or self._wire.finished

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
        if not token_ids:
            return []
        return self._frames(self._wire.tokens(token_ids, logprobs))

    def close(self, finish: Finish, completion_tokens: int | None = None) -> list[bytes]:
        """End the reply.

        Args:
            finish: why the engine stopped.
            completion_tokens: its own count of generated tokens, taken over into ``usage``.

        Returns:
            The last frames, ``data: [DONE]`` included; none for a whole reply.
        """
        self._ended = True
        if self._wire.finished:  # a stop sequence had the codec write its last chunk already
            return [_DONE] if self.stream else []
        self._completion_tokens = completion_tokens
        chunks = self._wire.finish(finish)
        if not self.stream:
            return []
        chunks[-1] = self._count(chunks[-1])
        return [*self._frames(chunks), _DONE]

    def fail(self, message: str) -> list[bytes]:
        """End the reply with the protocol's own error; never a finish reason.

        Args:
            message: what failed, fit to be shown to the client.

        Returns:
            The error frame and the end of the stream; none for a whole reply.
        """
        self._ended = True
        self._wire.abandon()
        if not self.stream:
            return []
        error = error_object(ClientError(message, status=500, code="internal_error"))
        return [b"data: " + orjson.dumps({"error": error}) + b"\n\n", _DONE]

    def body(self) -> bytes:
        """Return the whole reply; only after ``close`` and only without a stream."""
        return self._count(self._wire.body()).encode()

    def _count(self, chunk: str) -> str:
        """Put the engine's count into ``usage``: the codec counts neither EOS nor half characters.

        A quote inside a JSON string is escaped, so the pattern can only match a key.
        """
        count = self._completion_tokens
        if count is None:
            return chunk

        def patch(found: re.Match[str]) -> str:
            total = int(found[2]) - int(found[1]) + count
            return f'"completion_tokens":{count},"total_tokens":{total}'

        return _USAGE.sub(patch, chunk, count=1)

    def _frames(self, chunks: list[str]) -> list[bytes]:
        return [f"data: {chunk}\n\n".encode() for chunk in chunks]
