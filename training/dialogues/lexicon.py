"""Word pools, their split into training and held-out words, and invented words.

The pools under training/words were typed for this project (verbs, nouns, parameter names,
cities, person names, enum values); english.txt begins with everyday words typed here and goes on
with words that occur in at least four docstrings or comments of CPython's standard library, the
most frequent first. held_out.txt is the frozen split: a word in
it occurs in no training pool, whatever pool it came from.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import orjson

T = TypeVar("T")
WORDS = Path(__file__).resolve().parent.parent / "words"
TOKENIZER = WORDS.parent.parent / "engine" / "checkpoints" / "tiny" / "tokenizer.json"
POOL_FILES = ("verbs", "nouns", "params", "cities", "names", "surnames", "enums", "english")
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwxz", "aeiou"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Rng(random.Random):
    """random.Random with the three draws that generation spends its time on made short."""

    def chance(self, p: float) -> bool:
        """True with probability p."""
        return self.random() < p

    def pick(self, items: Sequence[T]) -> T:
        """One item, all equally likely."""
        return items[int(self.random() * len(items))]

    def whole(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + int(self.random() * (high - low + 1))


def read_words(name: str) -> list[str]:
    """Words of training/words/NAME.txt, each once, in the file's order."""
    text = (WORDS / f"{name}.txt").read_text(encoding="utf-8")
    return list(dict.fromkeys(text.split()))


def parts(name: str) -> list[str]:
    """Lower-case words of an identifier: `maxPrice_usd` -> max, price, usd."""
    return [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_A-Za-z]+", name)]


@cache
def held_words() -> frozenset[str]:
    """The frozen held-out words, lower case."""
    return frozenset(read_words("held_out"))


@cache
def vocabulary_pieces() -> tuple[str, ...]:
    """Letter-only tokens of the shipped tokenizer, () before it has been made.

    Words joined from these make every token something that has to be copied.
    """
    if not TOKENIZER.exists():
        return ()
    vocab = orjson.loads(TOKENIZER.read_bytes())["model"]["vocab"]
    return tuple(sorted(t for t in vocab if re.fullmatch(r"[A-Za-z]+", t)))


class Lexicon:
    """The word pools of one split.

    Args:
        held: False for training words, True for the held-out ones.
        pieces: tokens of the vocabulary that invented training words are joined from.
    """

    def __init__(self, held: bool, pieces: tuple[str, ...]) -> None:
        self.held = held
        self.pieces = () if held else pieces
        out = held_words()

        def wanted(word: str) -> bool:
            split = parts(word)
            if held:
                return all(p in out for p in split)
            return not any(p in out for p in split)

        pools = {name: [w for w in read_words(name) if wanted(w)] for name in POOL_FILES}
        self.verbs, self.nouns = pools["verbs"], pools["nouns"]
        self.cities, self.names, self.surnames = pools["cities"], pools["names"], pools["surnames"]
        self.enums, self.english = pools["enums"], pools["english"]
        self.params = pools["params"]
        text = (WORDS / "places.txt").read_text(encoding="utf-8")
        self.places = [] if held else [p for p in text.strip().split(";") if wanted(p)]
        self.plain = list(dict.fromkeys(self.nouns + self.english + self.verbs))

    def coin(self, rng: Rng) -> str:
        """An invented lower-case word (never a held-out one)."""
        while True:
            word = self._coin(rng)
            if held_words().isdisjoint(parts(word)):
                return word

    def _coin(self, rng: Rng) -> str:
        x = rng.random()
        if x < 0.45 and self.pieces:
            word = "".join(rng.pick(self.pieces) for _ in range(rng.whole(1, 3)))
            return word.lower() if rng.chance(0.4) else word
        if x < 0.75:
            return "".join(
                rng.pick(_CONSONANTS)
                + rng.pick(_VOWELS)
                + (rng.pick(_CONSONANTS) if rng.chance(0.3) else "")
                for _ in range(rng.whole(1, 3))
            )
        return "".join(rng.pick(_LETTERS) for _ in range(rng.whole(2, 8)))

    def word(self, rng: Rng) -> str:
        """A lower-case word of any kind: for values and free text."""
        if not self.held and rng.chance(0.35):
            return self.coin(rng)
        return rng.pick(self.plain)
