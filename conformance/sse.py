"""Server-sent events, sans I/O: bytes in, frames out.

Follows the event-stream grammar of the WHATWG HTML standard: any of LF, CRLF or CR ends a line, a
leading byte order mark is dropped, lines that begin with a colon are comments, a blank line
dispatches. Works on bytes, so that a character cut between two reads is no special case, and
decodes a field only when its line is complete. Frames keep the byte offset at which they ended:
together with the arrival times of the reads that tells when a frame was there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frame:
    """One dispatched event.

    Attributes:
        event: Value of the last `event:` field, "" when there was none.
        data: The `data:` lines joined by LF.
        end: Offset in the stream just behind the frame, bytes.
        bad_utf8: True when a line of the frame was not UTF-8 (decoded with replacement).
        data_lines: Number of `data:` lines.
    """

    event: str
    data: str
    end: int
    bad_utf8: bool = False
    data_lines: int = 1


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment line, such as a keep-alive.

    Attributes:
        text: What follows the colon.
        end: Offset just behind the line, bytes.
    """

    text: str
    end: int


class Decoder:
    """Turns the bytes of an event stream into frames and comments.

    `feed` takes any split of the stream and gives the same items for each; `close` reports what
    was left over. Text is never an error here: what the bytes mean is for the checks.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._offset = 0  # of the buffer's first byte in the stream
        self._event = ""
        self._data: list[str] = []
        self._bad = False
        self._start = True  # nothing consumed yet: a byte order mark may come

    def feed(self, data: bytes) -> list[Frame | Comment]:
        """Takes the next bytes.

        Args:
            data: Any number of bytes.

        Returns:
            Frames and comments completed by them, in order.
        """
        self._buffer += data
        return self._drain(final=False)

    def close(self) -> tuple[list[Frame | Comment], bytes]:
        """Ends the stream.

        Returns:
            Items that only the end completes (a lone CR is held back until then), and the bytes of
            an event that was begun and not dispatched: the standard says a client drops those.
        """
        items = self._drain(final=True)
        rest = bytes(self._buffer)
        if self._data or self._event:
            rest = "\n".join([self._event, *self._data]).encode() + rest
        return items, rest

    def _drain(self, *, final: bool) -> list[Frame | Comment]:
        items: list[Frame | Comment] = []
        position = 0
        buffer = self._buffer
        if self._start and buffer:
            mark = b"\xef\xbb\xbf"
            if buffer.startswith(mark):
                position = 3
            elif mark.startswith(bytes(buffer)) and not final:
                return items
            self._start = False
        while True:
            line_end = _line_end(buffer, position, final=final)
            if line_end is None:
                break
            stop, following = line_end
            item = self._line(bytes(buffer[position:stop]), self._offset + following)
            if item is not None:
                items.append(item)
            position = following
        del buffer[:position]
        self._offset += position
        return items

    def _line(self, line: bytes, end: int) -> Frame | Comment | None:
        if not line:
            return self._dispatch(end)
        try:
            text = line.decode()
        except UnicodeDecodeError:
            text = line.decode(errors="replace")
            self._bad = True
        if text.startswith(":"):
            return Comment(text[1:], end)
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        return None

    def _dispatch(self, end: int) -> Frame | None:
        event, data, bad = self._event, self._data, self._bad
        self._event, self._data, self._bad = "", [], False
        if not data:
            return None  # the standard: an empty data buffer dispatches nothing
        return Frame(event, "\n".join(data), end, bad, len(data))


def _line_end(buffer: bytearray, start: int, *, final: bool) -> tuple[int, int] | None:
    """Finds the next line: (end of its text, start of the following line), or None."""
    line_feed = buffer.find(b"\n", start)
    carriage = buffer.find(b"\r", start, line_feed if line_feed >= 0 else len(buffer))
    if carriage < 0:
        return None if line_feed < 0 else (line_feed, line_feed + 1)
    if carriage + 1 < len(buffer):
        return carriage, carriage + (2 if buffer[carriage + 1] == 10 else 1)
    return (carriage, carriage + 1) if final else None  # the LF of a CRLF may still come
