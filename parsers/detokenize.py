"""Token ids to text: what each id stands for, and a decoder that holds back half a character.

Knows a byte-level ``tokenizer.json`` and which ids can begin a marker; knows nothing of DSML's
grammar. The codec's tokenizer only encodes, and its stream decoder cannot be used alone (it
removes ``</think>`` even with parsing off), so this table is ours; the tests compare it with what
the codec writes.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from parsers.dialects import (
    MARK,
    MARK_BEGUN,
    MARK_TEXT,
    PLAIN_MARK,
    THINK_END,
    THINK_END_TEXT,
)
from parsers.errors import BootError

_REPLACEMENT = "\ufffd"
_SENTINELS = {MARK_TEXT: MARK, THINK_END_TEXT: THINK_END}


def _byte_alphabet() -> dict[str, int]:
    """Map the byte-level alphabet: printable bytes are themselves, the rest follow at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if chr(byte) not in table)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(rest)})
    return table


_ALPHABET = _byte_alphabet()


class Vocabulary:
    """What each token id of a tokenizer stands for.

    Args:
        table: bytes per id; None where the id is not used.
        added: ids of the added tokens by spelling.

    Attributes:
        watched: ids that must not pass the parser by: markers, what may begin one, backticks, and
            tokens that are not whole characters.
        blank: ids that are nothing but blanks.
        added: ids of the added tokens by spelling.
        size: all ids are below; not every number below it is one.
    """

    def __init__(self, table: list[bytes | None], added: dict[str, int]) -> None:
        self._table = table
        self.added = added
        self.size = len(table)
        self._texts = [None if raw is None else _whole(raw) for raw in table]
        for spelling, id_ in added.items():
            self._texts[id_] = _SENTINELS.get(spelling, spelling)
        used = [(id_, text) for id_, text in enumerate(self._texts) if table[id_] is not None]
        self.watched = frozenset(id_ for id_, text in used if text is None or _matters(text))
        self.blank = frozenset(id_ for id_, text in used if text is not None and text.isspace())
        self._bytes = {raw[0]: id_ for id_, raw in enumerate(table) if raw and len(raw) == 1}

    @classmethod
    def from_json(cls, raw: bytes, path: str) -> Vocabulary:
        """Read a ``tokenizer.json``.

        Args:
            raw: its contents.
            path: its name, for errors.

        Raises:
            BootError: it is not a byte-level BPE tokenizer with a token for every byte.
        """
        try:
            data: dict[str, Any] = orjson.loads(raw)
            vocab: dict[str, int] = data["model"]["vocab"]
            added = {token["content"]: token["id"] for token in data["added_tokens"]}
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise BootError(f"{path}: is no tokenizer.json: {error!r}") from error
        if (data.get("decoder") or {}).get("type") != "ByteLevel":
            raise BootError(f"{path}: expected a byte-level tokenizer (decoder type ByteLevel)")
        size = max([-1, *vocab.values(), *added.values()]) + 1
        table: list[bytes | None] = [None] * size
        for token, id_ in vocab.items():
            try:
                table[id_] = bytes([_ALPHABET[char] for char in token])
            except KeyError as error:
                # Special tokens may stand in the plain vocabulary as well, spelled as they are.
                if token not in added:
                    raise BootError(f"{path}: token {token!r} is not byte-level") from error
        for token, id_ in added.items():
            table[id_] = token.encode()
        made = cls(table, added)
        missing = [byte for byte in range(256) if byte not in made._bytes and not _never(byte)]
        if missing:
            raise BootError(f"{path}: has no token for the byte 0x{missing[0]:02x}")
        return made

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes of an id; None for an id the tokenizer does not have."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else None

    def text_of(self, token_id: int) -> str | None:
        """Return an id's text in the parser's alphabet; None where it is not whole characters."""
        return self._texts[token_id] if 0 <= token_id < len(self._texts) else None

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids of which each is whole characters, or not known at all."""
        if len(token_ids) == 1:
            return self.text_of(token_ids[0]) or ""
        return "".join([self.text_of(token_id) or "" for token_id in token_ids])

    def special(self, spelling: str) -> int:
        """Return the id of a special token.

        Raises:
            KeyError: the tokenizer has none of this spelling.
        """
        return self.added[spelling]

    def spell(self, text: str) -> list[int]:
        """Return ids for a text, one per byte: as tokens, nothing in it can be a marker."""
        return [self._bytes[byte] for byte in text.encode()]


class Detokenizer:
    """An incremental decoder of one output.

    Does what the codec's does: bytes are held as long as they end in half a character or in one
    that is U+FFFD (which cannot be told apart there), any special token lets them go, and those
    held at the end of the output are dropped.

    Args:
        vocabulary: of the model.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._held: list[str] = []  # what is decided of it, so that no byte is decoded twice

    def push(self, token_id: int) -> str:
        """Return the text an id completes; an id that is not in the vocabulary has none."""
        text = self._vocabulary.text_of(token_id)
        if text is not None:
            if self._held:
                text = f"{''.join(self._held)}{self._decoder.decode(b'', final=True)}{text}"
                self._held = []
            return text
        raw = self._vocabulary.bytes_of(token_id)
        if raw is None:
            return ""
        piece = self._decoder.decode(raw)
        self._held.append(piece)
        undecided, _ = self._decoder.getstate()
        if undecided or piece.endswith(_REPLACEMENT):
            return ""
        text = "".join(self._held)
        self._held = []
        return text

    def text(self, token_ids: Iterable[int]) -> str:
        """Return the text that several ids complete."""
        return "".join(map(self.push, token_ids))


def _whole(raw: bytes) -> str | None:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    return None if text.endswith(_REPLACEMENT) else text


def _matters(text: str) -> bool:
    return (
        "`" in text
        or MARK in text
        or THINK_END in text
        or MARK_BEGUN.search(text) is not None
        or PLAIN_MARK.search(text) is not None
    )


def _never(byte: int) -> bool:
    """Whether a byte cannot occur in UTF-8."""
    return byte in (0xC0, 0xC1) or byte >= 0xF5
