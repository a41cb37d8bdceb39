"""Chooses the held-out words: `python -m training.words.split` writes held_out.txt.

Run once; the file is frozen, because scores on held-out words are comparable only while the words
stay the same. Left to training are words that the generator's own sentences, its catalogue or the
codec's fixed texts use, and words that are a token of the shipped vocabulary: those are no unseen
words.
"""

from __future__ import annotations

import hashlib
import re

from training.dialogues import lexicon
from training.tokenizer import FIXED

_SHARE = {"english": 8, "surnames": 5, "names": 5, "cities": 5, "verbs": 5, "nouns": 5, "params": 4, "enums": 4}  # fmt: skip


def main() -> None:
    """Write the list, one line per twelve words."""
    package = lexicon.WORDS.parent / "dialogues"
    used: set[str] = set()
    for source in (*package.glob("*.py"), package / "catalogue.toml"):
        for run in re.findall(r"[A-Za-z_]+", source.read_text(encoding="utf-8")):
            used.update(lexicon.parts(run))
    text = (lexicon.WORDS / "places.txt").read_text(encoding="utf-8")
    used.update(w.lower() for w in re.findall(r"[A-Za-z]+", text))
    for fixed in FIXED:
        used.update(lexicon.parts(fixed))
    used.update(w.lower() for w in lexicon.vocabulary_pieces())
    held: set[str] = set()
    for pool, one_in in _SHARE.items():
        for entry in lexicon.read_words(pool):
            for word in lexicon.parts(entry):
                digest = hashlib.sha256(word.encode()).digest()
                if word not in used and digest[0] % one_in == 0 and len(word) > 2:
                    held.add(word)
    words = sorted(held)
    lines = [" ".join(words[i : i + 12]) for i in range(0, len(words), 12)]
    (lexicon.WORDS / "held_out.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(words)} held-out words")


if __name__ == "__main__":
    main()
