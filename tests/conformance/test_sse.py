"""The event-stream decoder: any split gives the same items."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from conformance.sse import Comment, Decoder, Frame

STREAMS = [
    (b"data: a\n\ndata: b\n\n", ["a", "b"]),
    (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", ["a", "b", "c"]),
    (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
    (b"data:a\ndata: b\n\n", ["a\nb"]),
    (b"event: x\ndata: {}\nid: 1\nretry: 5\n\n", ["{}"]),
    (b": ping\n\ndata: a\n\n", ["a"]),
    (b"event: only\n\ndata: a\n\n", ["a"]),
    ("data: é日🎉\u2028\u0085x\n\n".encode(), ["é日🎉\u2028\u0085x"]),
    (b"data: a\n\ndata: unfinished\n", ["a"]),
    (b"nonsense\ndata\n\ndata:  two\n\n", ["", " two"]),
]


def decode(pieces: list[bytes]) -> tuple[list[Frame | Comment], bytes]:
    decoder = Decoder()
    items = [item for piece in pieces for item in decoder.feed(piece)]
    last, rest = decoder.close()
    return items + last, rest


@pytest.mark.parametrize(("stream", "want"), STREAMS)
def test_frames_follow_the_standard(stream: bytes, want: list[str]) -> None:
    """Each line end, comment, BOM and field form is read as the standard says."""
    items, _ = decode([stream])

    assert want == [item.data for item in items if isinstance(item, Frame)]


@given(st.sampled_from([s for s, _ in STREAMS]), st.data())
def test_any_split_gives_the_same_items(stream: bytes, data: st.DataObject) -> None:
    """How the bytes were cut does not change what they mean, nor where a frame ended."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)))))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]

    assert decode([stream]) == decode(pieces)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1)))
def test_what_is_written_is_read(texts: list[str]) -> None:
    """Any text without line ends survives the way through a stream."""
    stream = "".join(f"data: {text}\n\n" for text in texts).encode()
    items, rest = decode([stream])

    assert (texts, b"") == ([item.data for item in items if isinstance(item, Frame)], rest)


def test_half_a_frame_is_left_over() -> None:
    """Clients drop a frame that no blank line closed; the decoder says so."""
    assert (b"\ndata" != b"", True) == (decode([b"data: a\n"])[1] != b"", True)
    assert decode([b"data: a\n\n"])[1] == b""


def test_cut_character_is_marked() -> None:
    """A line that is not UTF-8 is marked and does not stop the stream."""
    items, _ = decode([b"data: \xe6\x97\n\ndata: b\n\n"])

    assert [item.bad_utf8 for item in items if isinstance(item, Frame)] == [True, False]


def test_frame_knows_where_it_ends() -> None:
    """The end offset of a frame is the byte behind its blank line."""
    items, _ = decode([b"data: a\n\n", b"data: bc\r\n\r\n"])

    assert [item.end for item in items] == [9, 21]
