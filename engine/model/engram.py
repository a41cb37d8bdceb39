"""Engram's token side: folding of ids, n-gram hashes, and tables that may stay on disk.

Everything here runs on the host, on ids the scheduler knows anyway: the tables belong in host
memory (model.md 2.10), and a step only moves the few rows it needs.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from engine.api import EngineError
from engine.config import Engram
from engine.model import quant
from engine.model.names import TABLE_GROUP

Ints = NDArray[np.int64]
#: Multipliers of layer l come from numpy's default generator seeded with this times l.
_SEED = 10007
#: Marks a place of a sequence that holds no text token: before its start, or an image token.
NO_TOKEN = -1
_BLANKS = re.compile(r"[ \t\r\n]+")


def fold_text(text: str) -> str:
    """Text without accents and other marks, case and outer blanks; a lone blank stays one."""
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    bare = "".join(char for char in decomposed if unicodedata.category(char)[0] != "M")
    folded = _BLANKS.sub(" ", bare.lower())
    return folded if folded == " " else folded.strip()


def fold_table(tokenizer_json: Path, vocab_size: int, limit: int) -> Ints:
    """Map every token id to the id of its folded class.

    Tokens whose text is the same after `fold_text` share a class. One whose text is empty after
    that keeps its text, and one that is no whole UTF-8 text keeps its vocabulary form. Classes are
    numbered in order of first use.

    Args:
        tokenizer_json: the checkpoint's tokenizer.json.
        vocab_size: ids to map.
        limit: engram_compressed_vocab_size.

    Returns:
        int64 [vocab_size].

    Raises:
        EngineError: the file is absent or unreadable, or there are more classes than `limit`.
    """
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # the binding raises bare Exception
        raise EngineError(
            f"{tokenizer_json}: Engram needs the tokenizer's vocabulary: {error}"
        ) from None
    classes: dict[str, int] = {}
    folded = np.empty(vocab_size, np.int64)
    for token_id in range(vocab_size):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token_id) or text
        else:
            key = fold_text(text) or text
        folded[token_id] = classes.setdefault(key, len(classes))
    if len(classes) > limit:
        raise EngineError(
            f"{tokenizer_json}: expected at most engram_compressed_vocab_size = {limit} folded "
            f"classes, got {len(classes)}"
        )
    return folded


def multipliers(config: Engram, layer_id: int) -> Ints:
    """Odd multipliers of one layer, int64 [max_ngram_size]; the latest token takes the first."""
    bound = max(1, (2**63 - 1) // config.compressed_vocab_size // 2)
    generator = np.random.default_rng(_SEED * layer_id)
    return generator.integers(0, bound, size=config.max_ngram_size, dtype=np.int64) * 2 + 1


class NgramHash:
    """Table rows of one Engram layer.

    Args:
        config: Engram's.
        index: position of the layer in config.layer_ids.
    """

    def __init__(self, config: Engram, index: int) -> None:
        self._multipliers = multipliers(config, config.layer_ids[index])
        self._orders = config.max_ngram_size - 1
        primes = np.array(config.primes[index], np.int64)
        self._primes = primes.reshape(self._orders, config.n_heads)
        self._offsets = (np.cumsum(primes) - primes).reshape(self._orders, config.n_heads)

    def tables(self) -> tuple[Ints, Ints, Ints]:
        """Multipliers [n], then moduli and first table rows [orders * heads], for a device."""
        return self._multipliers, self._primes.flatten(), self._offsets.flatten()

    def rows(self, ngrams: Ints) -> Ints:
        """Rows to look up.

        Args:
            ngrams: folded ids [T, n], the latest token first.

        Returns:
            int64 [T, orders * heads], order by order.
        """
        products = ngrams * self._multipliers
        hashes = np.bitwise_xor.accumulate(products, axis=1)[:, 1:, None]
        return (hashes % self._primes + self._offsets).reshape(len(ngrams), -1)


def ngrams(history: Ints, ids: Ints, pad: int) -> Ints:
    """The n latest ids at each position of a chunk, latest first.

    Args:
        history: folded ids before the chunk [n - 1], latest last, or NO_TOKEN.
        ids: folded ids of the chunk [T], or NO_TOKEN.
        pad: folded id that stands for NO_TOKEN and for everything before it.

    Returns:
        int64 [T, n].
    """
    line = np.concatenate((history, ids))
    windows = np.lib.stride_tricks.sliding_window_view(line, len(history) + 1)[:, ::-1]
    cut = np.logical_or.accumulate(windows == NO_TOKEN, axis=1)
    return np.where(cut, pad, windows)


@dataclass(frozen=True, slots=True)
class EngramTable:
    """Rows of hashed n-grams as the checkpoint stores them, usually mapped from disk.

    Args:
        weight: [rows, width] on the host: e4m3, bfloat16 or float32.
        scale: uint8 [rows, ceil(width / 32)] for e4m3, else None.
    """

    weight: Tensor
    scale: Tensor | None

    def to(self, device: torch.device) -> EngramTable:
        """Give the table with its rows on a device."""
        scale = None if self.scale is None else self.scale.to(device)
        return EngramTable(self.weight.to(device), scale)

    def lookup(self, rows: Ints, dtype: torch.dtype) -> Tensor:
        """Values of rows [T, R] joined per token: [T, R * width], on the host."""
        flat = torch.from_numpy(rows.reshape(-1))
        if self.scale is None:
            values = self.weight.index_select(0, flat)
        else:
            stored = self.weight.view(torch.uint8).index_select(0, flat).view(quant.E4M3)
            scale = self.scale.index_select(0, flat)
            values = quant.dequantise_rows_fp8(stored, scale, TABLE_GROUP)
        return values.to(dtype).view(len(rows), -1)
