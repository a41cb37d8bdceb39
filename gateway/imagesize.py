"""Format and size of an image from its first bytes, without decoding it.

Four formats, each a few fields at fixed places (PNG specification 1.2, section 11.2; ITU T.81, annex
B; GIF89a, section 18; WebP container specification). An imaging library would read them too, and be
the largest dependency of a gateway that never looks at a pixel.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class ImageSize(NamedTuple):
    """What an image says of itself.

    Args:
        media_type: such as ``image/png``.
        width: in pixels.
        height: in pixels.
    """

    media_type: str
    width: int
    height: int


#: Markers of JPEG that begin a frame: SOF0..SOF15 without DHT, JPG and DAC.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: Those without a length behind them: TEM, RST0..RST7.
_BARE = frozenset({0x01, *range(0xD0, 0xD8)})


def image_size(data: bytes) -> ImageSize | None:
    """Read an image's head.

    Args:
        data: the image, or as much of its beginning as holds its size.

    Returns:
        None where it is none of the four formats, is cut, or has no pixels.
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        found = _png(data)
    elif data.startswith(b"\xff\xd8\xff"):
        found = _jpeg(data)
    elif data[:6] in (b"GIF87a", b"GIF89a"):
        found = _sized("image/gif", data[6:8], data[8:10], "little")
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        found = _webp(data)
    else:
        return None
    return found if found is not None and found.width and found.height else None


def _sized(
    kind: str, width: bytes, height: bytes, order: Literal["little", "big"], size: int = 2
) -> ImageSize | None:
    if len(width) < size or len(height) < size:
        return None
    return ImageSize(kind, int.from_bytes(width, order), int.from_bytes(height, order))


def _png(data: bytes) -> ImageSize | None:
    if data[12:16] != b"IHDR":
        return None
    return _sized("image/png", data[16:20], data[20:24], "big", 4)


def _jpeg(data: bytes) -> ImageSize | None:
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
        elif marker in _BARE:
            at += 2
        elif marker in _FRAMES:
            return _sized("image/jpeg", data[at + 7 : at + 9], data[at + 5 : at + 7], "big")
        elif marker in (0xD9, 0xDA):  # the end, or a scan before any frame
            return None
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def _webp(data: bytes) -> ImageSize | None:
    kind, head = data[12:16], data[20:30]
    if len(head) < 10:
        return None
    if kind == b"VP8X":
        width, height = head[4:7], head[7:10]
        return ImageSize(
            "image/webp", 1 + int.from_bytes(width, "little"), 1 + int.from_bytes(height, "little")
        )
    if kind == b"VP8 " and head[3:6] == b"\x9d\x01\x2a":
        width_, height_ = (int.from_bytes(head[i : i + 2], "little") & 0x3FFF for i in (6, 8))
        return ImageSize("image/webp", width_, height_)
    if kind == b"VP8L" and head[0] == 0x2F:
        bits = int.from_bytes(head[1:5], "little")
        return ImageSize("image/webp", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    return None
