"""Text to token ids for playing output: any ids whose bytes are the text will do.

A server under test turns ids back into text, so the segmentation need not be the one its model
would choose; the longest piece first is enough, needs no merge table, and is a harder test of
incremental decoding than the usual one. Prompts are not encoded here.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from conformance.dialect import split_special


class VocabularyError(ValueError):
    """A tokenizer file that cannot be used."""


def _byte_letters() -> dict[str, int]:
    """The byte-level BPE alphabet (GPT-2's): printable bytes stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


class Vocabulary:
    """The pieces of a byte-level tokenizer.json.

    Args:
        path: The file.

    Raises:
        VocabularyError: If it is missing or no byte-level BPE.
    """

    def __init__(self, path: Path) -> None:
        try:
            data = orjson.loads(path.read_bytes())
            letters = _byte_letters()
            self._pieces = {
                bytes(letters[c] for c in piece): number
                for piece, number in data["model"]["vocab"].items()
                if all(c in letters for c in piece)
            }
            self._special = {t["content"]: t["id"] for t in data.get("added_tokens", ())}
        except OSError as error:
            raise VocabularyError(f"{path}: {error.strerror}") from None
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise VocabularyError(f"{path}: no byte-level tokenizer.json: {error!r}") from None
        missing = [byte for byte in range(256) if bytes([byte]) not in self._pieces]
        if missing:
            raise VocabularyError(f"{path}: no piece for byte {missing[0]}")
        self._longest = min(32, max(map(len, self._pieces)))

    def encode(self, text: str, *, special: bool = True, insert: bytes = b"") -> list[int]:
        """Ids whose bytes are `text`.

        Args:
            text: Any text.
            special: Whether spellings of special tokens mean those tokens.
            insert: Bytes that take the place of U+FFFD in `text`, one token each; none leaves
                the character as it is.
        """
        ids: list[int] = []
        for piece, is_special in split_special(text) if special else [(text, False)]:
            if is_special and piece in self._special:
                ids.append(self._special[piece])
                continue
            parts = piece.split("\ufffd") if insert else [piece]
            for number, part in enumerate(parts):
                if number:
                    ids += [self._pieces[bytes([byte])] for byte in insert]
                ids += self._plain(part.encode())
        return ids

    def _plain(self, data: bytes) -> list[int]:
        ids = []
        position = 0
        while position < len(data):
            for size in range(min(self._longest, len(data) - position), 0, -1):
                number = self._pieces.get(data[position : position + size])
                if number is not None:
                    ids.append(number)
                    position += size
                    break
        return ids
