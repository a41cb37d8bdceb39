"""One reply on its way through the codec, whose objects are handed in by ``parsers.codec``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from parsers.detokenize import Detokenizer, Vocabulary
from parsers.dialects import MARK_TEXT, THINK_END_TEXT
from parsers.edits import Edits
from parsers.errors import CodecError
from parsers.invoke import Finish
from parsers.jsontext import is_strict

TokenLogprob = tuple[float, Sequence[tuple[int, float]]]
"""Natural-log probability of a token, and (id, logprob) of its rivals."""

_LONG_NUMBER = re.compile(r"\d{16}")
_CREATED = re.compile(r'"created":(\d+)')
_CALL_ID = re.compile(r'(?<!\\)"(?:call_)?id":"(call_\d{2,}_(?:ET_)?[A-Za-z0-9]{24})"')


@dataclass(frozen=True, slots=True)
class Chunks:
    """The codec's makers of inference chunks.

    Args:
        chunk: its class of chunks.
        usage: its class of prompt usage.
        finish: its finish reasons by our names.
    """

    chunk: Any
    usage: Any
    finish: Mapping[Finish, Any]


class Wire:
    """One reply on its way through the codec: a stream processor and, for a whole reply, its sum.

    Args:
        processor: the codec's stream processor, fresh.
        chunks: makes what is pushed into it.
        response: the codec's response class for the protocol.
        vocabulary: of the model.
        request_id: id of the reply.
        model: name the reply carries.
        whole: accumulate a body instead of giving out JSON.
        edits: changes what the codec writes; None for nothing.
        thinking: keep the reasoning, from the first token on.
        inputs: the body holds arguments as objects (Messages); their numbers are kept as written.

    Attributes:
        call_ids: ids of the calls written so far; kept along with the reasoning.
        halves: tokens that are kept, since they end in half a character.
        finished: whether the codec has written its last chunk (a stop sequence ends a reply early).
    """

    def __init__(
        self,
        processor: Any,
        chunks: Chunks,
        response: Any,
        vocabulary: Vocabulary,
        *,
        request_id: str,
        model: str,
        whole: bool,
        edits: Edits | None,
        thinking: bool,
        inputs: bool,
    ) -> None:
        self.call_ids: list[str] = []
        self.finished: bool = False
        self.halves: list[int] = []
        self._edits = edits
        self._keeps = thinking
        self._thought: list[int] | None = [] if thinking else None
        self._reasoning_ids: list[int] = []
        self._processor = processor
        self._chunks = chunks
        self._of_text, self._of_tokens = chunks.chunk.text, chunks.chunk.tokens
        self._vocabulary = vocabulary
        self._decoder = Detokenizer(vocabulary)  # of the halves
        self._half_logprobs: list[TokenLogprob] = []
        self._response = response
        self._id = request_id
        self._model = model
        self._whole = whole
        self._sum: Any = None
        self._inputs: dict[int, str] | None = {} if inputs and whole else None
        self._think_end = vocabulary.special(THINK_END_TEXT)
        self._mark = vocabulary.special(MARK_TEXT)

    def ready(self, prompt_tokens: int, cached_tokens: int) -> list[str]:
        """Open the reply; returns the JSON of its first chunk."""
        usage = self._chunks.usage(
            prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=cached_tokens
        )
        return self._push(self._chunks.chunk.ready(prompt_usage=usage))

    def tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None
    ) -> list[str]:
        """Push model tokens as they are; only real special tokens act as markers.

        The codec keeps all of a push that ends in half a character, drops it all should the output
        end there, and decodes all it keeps once more with every push. So halves are kept here, and
        pushed with what makes them whole.
        """
        if self._thought is not None:
            self._keep(token_ids)
        whole = self._vocabulary.text_of(token_ids[-1]) is not None
        if len(token_ids) == 1 and whole and not self.halves:
            return self._push(self._of_tokens(token_ids, logprobs))
        return self._tokens(token_ids, logprobs)

    def _tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> list[str]:
        end = len(token_ids)
        while end and self._vocabulary.text_of(token_ids[end - 1]) is None:
            end -= 1
        out = self._push_halves(token_ids[:end], logprobs and logprobs[:end]) if end else []
        for i in range(end, len(token_ids)):
            if self._decoder.push(token_ids[i]):
                out += self._push_halves(token_ids[i : i + 1], logprobs and logprobs[i : i + 1])
            else:
                self.halves.append(token_ids[i])
                self._half_logprobs += logprobs[i : i + 1] if logprobs else ()
        return out

    def _push_halves(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> list[str]:
        """Push the halves that are kept, and what makes them whole."""
        if self.halves:
            token_ids = [*self.halves, *token_ids]
            logprobs = [*self._half_logprobs, *logprobs] if logprobs else None
            self.halves.clear()
            self._half_logprobs.clear()
            self._decoder = Detokenizer(self._vocabulary)
        if self.finished:
            return []
        return self._push(self._of_tokens(token_ids, logprobs))

    def text(self, text: str, count: int = 0) -> list[str]:
        """Push text, in which spelled markers act as markers; it counts as ``count`` tokens."""
        out = self._push(self._of_text(text, count))
        if self._keeps and not self._whole:
            for chunk in out:
                if "call_" in chunk:
                    self.call_ids += (i for i in _CALL_ID.findall(chunk) if i not in self.call_ids)
        return out

    def finish(self, finish: Finish) -> list[str]:
        """Push the finish reason and flush; returns the last chunks."""
        out = self._push(self._chunks.chunk.finish(self._chunks.finish[finish]))
        out += self._render(self._processor.finish())
        self.finished = self._processor.finished
        if self._keeps and self._whole:
            self.call_ids = list(dict.fromkeys(_CALL_ID.findall(str(self._sum.to_json()))))
        return out

    def abandon(self) -> None:
        """Release the codec's state without the claim of success that ``finish`` makes."""
        self._processor.close()

    def body(self) -> str:
        """Return the JSON of the whole reply."""
        body = str(self._sum.to_json())
        if self._inputs and any(map(_LONG_NUMBER.search, self._inputs.values())):
            body = _with_inputs(body, self._inputs)
        return body if self._edits is None else self._edits.body(body)

    def reasoning(self) -> str:
        """Return the reasoning as the codec delivers it: without newlines around it."""
        kept = self._reasoning_ids if self._thought is None else self._thought
        text = Detokenizer(self._vocabulary).text(kept)
        return text.encode("utf-8", "replace").decode().strip("\n")

    def _keep(self, token_ids: Sequence[int]) -> None:
        """Keep ids of the reasoning up to its end, or to the call that ends it."""
        assert self._thought is not None
        if self._think_end not in token_ids and self._mark not in token_ids:
            self._thought += token_ids
            return
        ends = (self._think_end, self._mark)
        end = next(i for i, id_ in enumerate(token_ids) if id_ in ends)
        self._reasoning_ids = [*self._thought, *token_ids[:end]]
        if token_ids[end] == self._mark:
            text = self._vocabulary.text_of(self._reasoning_ids[-1]) if self._reasoning_ids else ""
            if text is not None and text.endswith("<"):
                self._reasoning_ids.pop()
        self._thought = None

    def _push(self, chunk: Any) -> list[str]:
        try:
            chunks = self._processor.push(chunk)
        except RuntimeError as error:
            raise CodecError(f"the codec refused a {chunk.kind} chunk: {error}") from error
        self.finished = self._processor.finished
        if not chunks:
            return []
        if self._whole or self._edits is not None:
            return self._render(chunks)
        return [chunk.to_json() for chunk in chunks]

    def _render(self, chunks: list[Any]) -> list[str]:
        if not self._whole:
            written = [chunk.to_json() for chunk in chunks]
            if self._edits is None:
                return written
            return [made for chunk in written for made in self._edits.chunk(chunk)]
        for chunk in chunks:
            if self._sum is None:
                # The codec stamps chunks with its own clock and takes the sum's from the caller:
                # they have to agree. Usage is overwritten by the last chunk.
                stamp = _CREATED.search(chunk.to_json())
                created = int(stamp.group(1)) if stamp else 0
                self._sum = self._response(self._id, self._model, created, 0, 0)
            if self._inputs is not None and '"input_json_delta"' in (written := chunk.to_json()):
                event = orjson.loads(written)
                piece, at = event["delta"].get("partial_json", ""), event["index"]
                self._inputs[at] = self._inputs.get(at, "") + piece
            self._sum.accumulate(chunk)
        return []


def _with_inputs(body: str, inputs: Mapping[int, str]) -> str:
    """Put the arguments of calls as they were written in place of those the codec has parsed.

    It reads an integer beyond 64 bits as a float (issue 3 asks for it digit for digit).

    Args:
        body: a whole Messages reply.
        inputs: JSON text by the position of the block; one that was cut is left alone.
    """
    reply = orjson.loads(body)
    for at, text in inputs.items():
        if is_strict(text):
            reply["content"][at]["input"] = orjson.Fragment(text)
    return orjson.dumps(reply).decode()
