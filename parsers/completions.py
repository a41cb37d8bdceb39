"""The raw route: a prompt as text or token ids, and its continuation as text.

For engines and tests (issue 3): nothing is parsed, no template is applied, the codec takes no
part. A completion is driven like an ``Exchange``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from parsers.body import (
    Body,
    check_fields,
    drop_nulls,
    fail,
    integer,
    is_stop,
    kind,
    parse_object,
)
from parsers.detokenize import Detokenizer, Vocabulary
from parsers.dialects import spell
from parsers.errors import ClientError, error_body
from parsers.exchange import LONG_REPLY, LONG_STEP
from parsers.frames import data_line
from parsers.invoke import Finish
from parsers.prompt_note import (
    NO_NOTE,
    SCORING,
    check_scoring,
    count_scores,
    read_scoring,
    write_scores,
)
from parsers.request import (
    FLAG,
    MOVES,
    SAMPLING,
    TOKEN_LIMIT,
    check_bias,
    check_model,
    has_token,
    no_token,
    read_moves,
    read_stream_options,
    unheeded,
)
from parsers.stops import Stops
from parsers.values import PromptNote, Sampling, ServedModel

if TYPE_CHECKING:
    from parsers.wire import TokenLogprob

FIELDS = {
    **SAMPLING,
    **MOVES,
    **SCORING,
    "stream": FLAG,
    "stream_options": kind(dict, "an object"),
    "max_tokens": TOKEN_LIMIT,
    "seed": integer(0, 2**63 - 1),
    "logprobs": integer(0, 20),
    "stop": (is_stop, "a non-empty string or at most 16 of them"),
    "n": integer(1, 1),
    "best_of": integer(1, 1),
    "echo": ((lambda v: v is False), "false: the prompt is not repeated"),
    "suffix": ((lambda v: v == ""), "nothing: no text is filled in"),
}

_DEFAULT_TOKENS = 16  # the protocol's own default
_DONE = b"data: [DONE]\n\n"


class Completion:
    """A completion that was accepted, and the writer of its reply.

    Attributes:
        prompt_ids: the prompt.
        sampling: how to generate.
        stream: whether the client asked for a stream.
        model: the model name the client used.
        ignored: request fields accepted without effect.
        images: none.
        choices: itself; there is one choice.
    """

    def __init__(
        self,
        *,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        stops: Sequence[str],
        vocabulary: Vocabulary,
        eos_token_ids: tuple[int, ...],
        stream: bool,
        continuous: bool,
        model: str,
        ignored: tuple[str, ...],
        exchange_id: str,
        created: int,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.stream = stream
        self._continuous = continuous  # the usage so far is in every chunk
        self.model = model
        self.ignored = ignored
        self.images: tuple[str, ...] = ()
        self.choices = (self,)
        self._vocabulary = vocabulary
        self._note = NO_NOTE
        self._detokenizer = Detokenizer(vocabulary)
        self._stops = Stops(stops)
        self._eos = frozenset(eos_token_ids)
        self._head = {
            "id": exchange_id,
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self._text: list[str] = []
        self._offset = 0
        self._logprobs = _no_logprobs()
        self._received = 0
        self._cached = 0
        self._ended = False
        self._reply = b""

    @property
    def finished(self) -> bool:
        """Whether no more tokens are wanted: stop the engine, then call ``close``."""
        return self._ended or self._stops.met

    def continuation(self) -> None:
        """No completion needs a second generation (see ``Exchange.continuation``)."""

    def start(self, prompt_tokens: int, cached_tokens: int) -> list[bytes]:
        """Open the reply; nothing is sent yet.

        Args:
            prompt_tokens: length of the prompt as the engine counts it.
            cached_tokens: how much of it was reused.
        """
        self._cached = cached_tokens
        return []

    def note_prompt(self, note: PromptNote) -> None:
        """Take what the engine tells of the prompt; the end of the reply shows it."""
        self._note = note

    def receive(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None
    ) -> list[bytes]:
        """Take what one step generated; see ``Exchange.receive``."""
        text = ""
        for i, token_id in enumerate(token_ids):
            if self.finished:
                break
            if token_id in self._eos:
                self._ended = True
                break
            self._received += 1
            if logprobs is not None and self.sampling.top_logprobs is not None:
                self._score(token_id, logprobs[i])
            text += self._stops.feed(spell(self._detokenizer.push(token_id)))
        return self._send(text, None)

    def gather(self, token_ids: Sequence[int]) -> bool:
        """Take no step so; see ``Exchange.gather``."""
        return False

    def heavy(self, token_ids: Sequence[int]) -> bool:
        """Whether ``receive`` may take some milliseconds; see ``Exchange.heavy``."""
        # each stop looks at each character, each rival is spelled
        weight = 1 + self._stops.count + (self.sampling.top_logprobs or 0)
        return len(token_ids) * weight > LONG_STEP

    def heavy_close(self, completion_tokens: int) -> bool:
        """Whether ``close`` may; see ``Exchange.heavy_close``."""
        numbers = completion_tokens * (1 + (self.sampling.top_logprobs or 0))
        return numbers + count_scores(self._note, self.sampling.scoring) >= LONG_REPLY

    def heavy_body(self, completion_tokens: int) -> bool:
        """Whether ``body`` may: it is written by ``close``."""
        return False

    def close(self, finish: Finish, completion_tokens: int | None = None) -> list[bytes]:
        """End the reply; see ``Exchange.close``."""
        self._ended = True
        if completion_tokens is not None:
            self._received = completion_tokens
        reason: Finish = "stop" if self._stops.met else finish
        return [*self._send(self._stops.close(), reason), *([_DONE] if self.stream else [])]

    def fail(self, message: str, *, code: str = "internal_error", status: int = 500) -> list[bytes]:
        """End the reply in an error; see ``Exchange.fail``."""
        self._ended = True
        if not self.stream:
            return []
        error = ClientError(message, status=status, code=code)
        return [data_line(error_body("chat", error)), _DONE]

    def body(self) -> bytes:
        """Return the whole reply; only after ``close`` and only without a stream."""
        return self._reply

    def _score(self, token_id: int, logprob: TokenLogprob) -> None:
        value, rivals = logprob
        self._logprobs["tokens"].append(self._spelled(token_id))
        self._logprobs["token_logprobs"].append(value)
        top = {self._spelled(rival): score for rival, score in rivals}
        self._logprobs["top_logprobs"].append(top)
        self._logprobs["text_offset"].append(self._offset)

    def _spelled(self, token_id: int) -> str:
        return (self._vocabulary.bytes_of(token_id) or b"").decode("utf-8", "replace")

    def _send(self, text: str, finish: Finish | None) -> list[bytes]:
        self._offset += len(text)
        if not self.stream:
            self._text.append(text)
            if finish is not None:
                self._reply = self._written("".join(self._text), finish)
            return []
        if not text and finish is None:
            return []
        return [data_line(self._written(text, finish))]

    def _written(self, text: str, finish: Finish | None) -> bytes:
        scored = self.sampling.top_logprobs is not None
        logprobs, self._logprobs = self._logprobs, _no_logprobs()
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "logprobs": logprobs if scored else None,
            "finish_reason": finish,
        }
        reply = {**self._head, "choices": [choice], "usage": self._usage(finish)}
        if finish is not None:
            scoring = self.sampling.scoring
            if scoring is not None and self._note.scores is not None:
                choice["prompt_logprobs"] = write_scores(
                    self._note, self.prompt_ids, scoring, self._vocabulary
                )
            if self._note.prefill is not None:
                reply["bathyal"] = {"prefill": self._note.prefill}
        return orjson.dumps(reply)

    def _usage(self, finish: Finish | None) -> dict[str, Any] | None:
        if finish is None and not self._continuous:
            return None
        prompt = len(self.prompt_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._received,
            "total_tokens": prompt + self._received,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def read_prompt(body: Body, served: ServedModel, vocabulary: Vocabulary) -> str | tuple[int, ...]:
    """Return a prompt of a body: a text, or token ids; a list of one prompt is that prompt.

    Raises:
        ClientError: it is neither, empty, more than one, or holds ids that the model or its
            tokenizer does not have.
    """
    prompt, at = body.get("prompt"), "prompt"
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            expected = "one prompt, a text or an array of token ids, not several"
            raise fail("prompt", expected, prompt)
        prompt, at = prompt[0], "prompt[0]"
    if isinstance(prompt, str) and prompt:
        return prompt
    expected = "a non-empty text or array of token ids"
    if not isinstance(prompt, list) or not prompt:
        raise fail(at, expected, prompt)
    for i, token_id in enumerate(prompt):
        if not has_token(token_id, served, vocabulary):
            raise no_token(token_id, f"{at}[{i}]", served, vocabulary)
    return tuple(prompt)


def open_completion(
    raw: bytes,
    served: ServedModel,
    vocabulary: Vocabulary,
    encode: Callable[[str], list[int]],
    *,
    exchange_id: str,
    created: int,
) -> Completion:
    """Open a body of ``/v1/completions``; see ``Codec.open_completion``."""
    body = drop_nulls(parse_object(raw))
    name = check_model(body, served)
    check_fields(body, FIELDS)
    ignored: list[str] = []
    continuous = read_stream_options(body, ignored)
    prompt, moves = read_prompt(body, served, vocabulary), read_moves(body)
    check_bias(moves, served, vocabulary)
    prompt_ids = tuple(encode(prompt)) if isinstance(prompt, str) else prompt
    scoring = read_scoring(body)
    check_scoring(scoring, len(prompt_ids))
    max_tokens = body.get("max_tokens", _DEFAULT_TOKENS)
    room = served.max_model_len - len(prompt_ids)
    if room < (max_tokens if "max_tokens" in body else 1):
        raise ClientError(
            f"the prompt has {len(prompt_ids)} tokens, the reply may have {max_tokens}, and the "
            f"context of {served.name!r} holds {served.max_model_len}",
            code="context_length_exceeded",
            param="max_tokens" if room > 0 else "prompt",
        )
    stops = body.get("stop", [])
    return Completion(
        prompt_ids=prompt_ids,
        sampling=Sampling(
            max_tokens=min(max_tokens, room),
            temperature=body.get("temperature", 1.0),
            top_p=body.get("top_p", 1.0),
            seed=body.get("seed"),
            top_logprobs=body.get("logprobs"),
            moves=moves,
            scoring=scoring,
        ),
        stops=[stops] if isinstance(stops, str) else stops,
        vocabulary=vocabulary,
        eos_token_ids=served.eos_token_ids,
        stream=body.get("stream", False),
        continuous=continuous,
        model=name,
        ignored=tuple(sorted([*unheeded(body, {*FIELDS, "model", "prompt"}, {}), *ignored])),
        exchange_id=exchange_id,
        created=created,
    )
