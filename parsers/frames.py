"""How each protocol's chunks become SSE frames, how its last chunk is completed, how it fails.

Knows the JSON text of the codec's chunks as far as a search for a key goes; parses none of it
while a reply flows. A quote inside a JSON string is escaped, so a pattern that begins with a bare
quote can only match a key.

A frame's JSON stands on one line for every reader: many split a stream where Python's
``str.splitlines`` does, which the SSE specification does not (florimondmanca/httpx-sse#34).
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from parsers.errors import ClientError, Protocol, error_body, error_object

_DONE = b"data: [DONE]\n\n"
_CHAT_USAGE = re.compile(
    r'(?<!\\)"completion_tokens":(\d+),"total_tokens":(\d+)'
    r'(,"prompt_tokens_details":\{[^{}]*\},"completion_tokens_details":\{[^{}]*\})?'
)
_REASONING = re.compile(r'"reasoning_tokens":(\d+)')
_MESSAGES_USAGE = re.compile(r'(?<!\\)"output_tokens":\d+')
_RESPONSES_USAGE = re.compile(
    r'(?<!\\)"output_tokens":(\d+),("output_tokens_details":\{[^{}]*\}),"total_tokens":(\d+)'
)
_CACHED = re.compile(r'(?<!\\)"input_tokens_details":\{"cached_tokens":\d+(?=\})')
_SEQUENCE = re.compile(r'(?<!\\)"sequence_number":(\d+)')
_BREAKS = re.compile("[\x85\u2028\u2029]")  # the further ones JSON escapes by itself


def data_line(data: str | bytes) -> bytes:
    """Frame JSON; what readers that know more line ends than SSE would split it at is escaped."""
    text = data.decode() if isinstance(data, bytes) else data
    if not text.isascii():
        text = _BREAKS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return f"data: {text}\n\n".encode()


class Tally:
    """The usage of several choices of one reply: the prompt counts once.

    Args:
        choices: how many there are.

    Attributes:
        open: how many have not ended.
        failed: one of them has ended the stream in an error.
    """

    def __init__(self, choices: int) -> None:
        self.open = choices
        self.failed = False
        self._sum: dict[str, Any] = {}

    def add(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Take the usage of a choice that ended; return the sum so far."""
        if not self._sum:
            self._sum = usage
            return usage
        total = self._sum
        total["completion_tokens"] += usage["completion_tokens"]
        total["total_tokens"] += usage["completion_tokens"]
        thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens")
        if thought is not None:
            details = total.setdefault("completion_tokens_details", {"reasoning_tokens": 0})
            details["reasoning_tokens"] += thought
        return total


class ChatFrames:
    """Chat Completions: unnamed events, closed by ``[DONE]``.

    ``usage`` rides on the last chunk with a choice, whatever ``stream_options.include_usage`` says,
    as in the official codec's streams; no chunk without a choice is sent. Of several choices the
    one that ends last carries it.

    Args:
        index: which choice of the reply this is.
        tally: shared by all of them; None for a single one.
        flat: errors in SGLang's form.
        continuous: every chunk tells the usage so far (``continuous_usage_stats``).
    """

    def __init__(
        self,
        *,
        index: int = 0,
        tally: Tally | None = None,
        flat: bool = False,
        continuous: bool = False,
    ) -> None:
        self._usage = "null" if continuous else None
        self._index = f'"choices":[{{"index":{index},' if index else None
        self._tally = tally
        self._flat = flat

    @property
    def closed(self) -> bool:
        """Whether another choice has ended the stream in an error."""
        return self._tally is not None and self._tally.failed

    def spend(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Note the usage so far, for streams that tell it in every chunk."""
        if self._usage is not None:
            self._usage = (
                f'{{"prompt_tokens":{prompt_tokens},"completion_tokens":{completion_tokens},'
                f'"total_tokens":{prompt_tokens + completion_tokens}}}'
            )

    def frames(self, chunks: list[str]) -> list[bytes]:
        """Frame the JSON of chunks."""
        if self._usage is not None:
            chunks = [_told(chunk, self._usage) for chunk in chunks]
        if self._tally is not None:
            if self._tally.failed:
                return []
            if self._index is not None:
                chunks = [c.replace('"choices":[{"index":0,', self._index, 1) for c in chunks]
        return [data_line(chunk) for chunk in chunks]

    def seal(self, chunks: list[str], count: int | None, extension: dict[str, Any] | None) -> None:
        """Complete the last chunk: the engine's count of tokens, the gate's report."""
        chunk = self.seal_body(chunks[-1], count, extension)
        if self._tally is not None:
            at = chunk.rindex('"usage":') + len('"usage":')
            usage, _, rest = chunk[at:].partition(',"bathyal":')
            total = self._tally.add(orjson.loads(usage if rest else usage[:-1]))
            self._tally.open -= 1
            shown = "null" if self._tally.open else orjson.dumps(total).decode()
            chunk = f'{chunk[:at]}{shown},"bathyal":{rest}' if rest else f"{chunk[:at]}{shown}}}"
        chunks[-1] = chunk

    def seal_body(self, body: str, count: int | None, extension: dict[str, Any] | None) -> str:
        """Complete a whole reply likewise."""
        if count is not None:
            body = _CHAT_USAGE.sub(lambda found: _chat_usage(found, count), body, count=1)
        if extension is None:
            return body
        return f'{body[:-1]},"bathyal":{orjson.dumps(extension).decode()}}}'

    def end(self) -> list[bytes]:
        """Close the stream, unless another choice is still open."""
        open_ = self._tally is not None and (self._tally.open or self._tally.failed)
        return [] if open_ else [_DONE]

    def error(self, error: ClientError) -> list[bytes]:
        """End the stream in an error, never a finish reason; nothing of other choices follows."""
        if self.closed:
            return []
        inner = error_object("chat", error, flat=self._flat)
        body = orjson.dumps({"error": inner} if self._flat else inner)
        if self._tally is not None:
            self._tally.failed = True
        return [data_line(body), _DONE]


_NO_USAGE = '"usage":null}'


def _told(chunk: str, usage: str) -> str:
    """Give a chunk that tells no usage the usage so far."""
    return f"{chunk[:-5]}{usage}}}" if chunk.endswith(_NO_USAGE) else chunk


class _NamedFrames:
    """Events with names, which are the ``type`` of their data; nothing closes the stream."""

    closed = False  # there are no other choices that could close it

    def frames(self, chunks: list[str]) -> list[bytes]:
        """Frame the JSON of events; every one begins with its type."""
        return [
            f"event: {chunk[9 : chunk.index(chr(34), 9)]}\n".encode() + data_line(chunk)
            for chunk in chunks
        ]

    def end(self) -> list[bytes]:
        """Close the stream: its last event has been sent."""
        return []


class MessagesFrames(_NamedFrames):
    """Messages.

    Args:
        request_id: told in an error.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def seal(self, chunks: list[str], count: int | None, extension: dict[str, Any] | None) -> None:
        """Complete the ``message_delta`` that ends the message."""
        for i in range(len(chunks) - 1, -1, -1):
            if chunks[i].startswith('{"type":"message_delta"'):
                chunks[i] = self.seal_body(chunks[i], count, extension)
                return

    def seal_body(self, body: str, count: int | None, extension: dict[str, Any] | None) -> str:
        """Complete a whole reply likewise: the last count of tokens in it is the reply's."""
        if count is not None and (found := _last(_MESSAGES_USAGE, body)):
            body = f'{body[: found.start()]}"output_tokens":{count}{body[found.end() :]}'
        if extension is None:
            return body
        return f'{body[:-1]},"bathyal":{orjson.dumps(extension).decode()}}}'

    def error(self, error: ClientError) -> list[bytes]:
        """End the stream in an ``error`` event."""
        body = error_body("messages", error, request_id=self._request_id)
        return [b"event: error\n" + data_line(body)]


class ResponsesFrames(_NamedFrames):
    """Responses; remembers its first and its last event, for the one that tells of a failure."""

    def __init__(self) -> None:
        self._first: str | None = None
        self._latest = ""

    def frames(self, chunks: list[str]) -> list[bytes]:
        """See ``_NamedFrames``."""
        if chunks:
            if self._first is None:
                self._first = chunks[0]
            self._latest = chunks[-1]
        return super().frames(chunks)

    def seal(self, chunks: list[str], count: int | None, extension: dict[str, Any] | None) -> None:
        """Complete the event that ends the response."""
        event = chunks[-1]
        head, response = event.split('"response":', 1)
        chunks[-1] = f'{head}"response":{self.seal_body(response, count, extension)}'

    def seal_body(self, body: str, count: int | None, extension: dict[str, Any] | None) -> str:
        """Complete a response object; text may follow it."""
        if count is not None and (found := _last(_RESPONSES_USAGE, body)):
            total = int(found[3]) - int(found[1]) + count
            usage = f'"output_tokens":{count},{_capped(found[2], count)},"total_tokens":{total}'
            body = body[: found.start()] + usage + body[found.end() :]
        if found := _last(_CACHED, body):
            # The protocol has since gained a field that its types require.
            body = f'{body[: found.end()]},"cache_write_tokens":0{body[found.end() :]}'
        if extension is None:
            return body
        return f'{{"bathyal":{orjson.dumps(extension).decode()},{body[1:]}'

    def error(self, error: ClientError) -> list[bytes]:
        """End the stream in ``response.failed``, or ``error`` where no response was begun."""
        inner = error_object("responses", error)["error"]
        if self._first is None:
            del inner["type"]
            data = {"type": "error", **inner, "sequence_number": 0}
            return super().frames([orjson.dumps(data).decode()])
        number = _last(_SEQUENCE, self._latest)
        response = orjson.loads(self._first)["response"]
        response["status"] = "failed"
        # The protocol knows a closed list of codes; ours is told by the message.
        response["error"] = {"code": "server_error", "message": inner["message"]}
        data = {
            "type": "response.failed",
            "response": response,
            "sequence_number": int(number[1]) + 1 if number else 0,
        }
        return super().frames([orjson.dumps(data).decode()])


Frames = ChatFrames | MessagesFrames | ResponsesFrames


def frames_for(
    protocol: Protocol,
    exchange_id: str,
    *,
    index: int,
    tally: Tally | None,
    flat: bool,
    continuous: bool,
) -> Frames:
    """Return the framing of a reply; what it takes is said at each class."""
    if protocol == "messages":
        return MessagesFrames(exchange_id)
    if protocol == "responses":
        return ResponsesFrames()
    return ChatFrames(index=index, tally=tally, flat=flat, continuous=continuous)


def _chat_usage(found: re.Match[str], count: int) -> str:
    total = int(found[2]) - int(found[1]) + count
    return f'"completion_tokens":{count},"total_tokens":{total}{_capped(found[3] or "", count)}'


def _capped(details: str, count: int) -> str:
    """Token details with no more reasoning than there is output.

    The codec counts reasoning by encoding its text again, and what the gate re-spelled for it can
    take more tokens than the model wrote.
    """
    return _REASONING.sub(lambda m: f'"reasoning_tokens":{min(int(m[1]), count)}', details)


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match: what a client's own names could imitate stands before it."""
    found = None
    for match in pattern.finditer(text):
        found = match
    return found
