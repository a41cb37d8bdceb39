"""Token ids to text: a table of bytes per id, and a decoder that holds back half a character.

Knows a byte-level ``tokenizer.json``; knows nothing of DSML's grammar. The codec's tokenizer only
encodes, and its stream decoder cannot be used alone (it removes ``</think>`` even with parsing
off), so this table is ours; the tests compare it with what the codec writes.
"""

from __future__ import annotations

from typing import Any

import orjson

from parsers.errors import BootError


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
    """

    def __init__(self, table: list[bytes | None], added: dict[str, int]) -> None:
        self._table = table
        self.added = added

    @classmethod
    def from_json(cls, raw: bytes, path: str) -> Vocabulary:
        """Read a ``tokenizer.json``.

        Args:
            raw: its contents.
            path: its name, for errors.

        Raises:
            BootError: it is not a byte-level BPE tokenizer.
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
        try:
            for token, id_ in vocab.items():
                table[id_] = bytes([_ALPHABET[char] for char in token])
        except KeyError as error:
            # Special tokens may stand in the plain vocabulary as well, spelled as they are.
            if token not in added:
                raise BootError(f"{path}: token {token!r} is not byte-level: {error}") from error
        for token, id_ in added.items():
            table[id_] = token.encode()
        return cls(table, added)

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes of an id; None for an id the tokenizer does not have."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else None
