"""How often each token has to be written: `python -m training.coverage --count N`.

A token that is seldom a copy target in training cannot be copied later (a pilot run got 0 of 43
right that were seen under 30 times, and 98.8 % above). The counts of a sample are scaled to the
size of a training run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.dialogues.lexicon import TOKENIZER
from training.pack import generate, target_mask
from training.tokenizer import SPECIAL, VOCAB_SIZE

WANTED = 300
_BLOCK = 2000


def target_counts(seed: int, count: int) -> tuple[NDArray[np.int64], int]:
    """(times each id is written by the assistant, number of dialogues) over `count` seeds."""
    total, dialogues = np.zeros(VOCAB_SIZE, np.int64), 0
    for at in range(seed, seed + count, _BLOCK):
        ids, lengths = generate(at, min(_BLOCK, seed + count - at))
        total += np.bincount(ids[target_mask(ids)], minlength=VOCAB_SIZE)
        dialogues += len(lengths)
    return total, dialogues


def never_text(tokenizer: Tokenizer) -> Iterator[int]:
    """Ids that no value is made of.

    These are special tokens, phrases and marks that only prompts or calls hold, control
    characters, and bytes that UTF-8 never uses (the byte alphabet spells a byte above 0xA0, save
    0xAD, as the character of that number).
    """
    unused = {chr(b) for b in (0xC0, 0xC1, *range(0xF5, 0x100))}
    for token, i in tokenizer.get_vocab().items():
        text = tokenizer.decode([i], skip_special_tokens=False)
        if len(token) > 1:
            never = not text.isalnum()
        else:
            never = token in unused or not (text.isprintable() or text == "\ufffd")
        if never or i < len(SPECIAL):
            yield i


def main() -> None:
    """Print how many ids fall short and which."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000, help="dialogues to look at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=int, default=250_000, help="dialogues of a training run")
    args = parser.parse_args()
    counts, dialogues = target_counts(args.seed, args.count)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    left_out = set(never_text(tokenizer))
    scaled = counts * (args.run / dialogues)
    copied = [i for i in range(VOCAB_SIZE) if i not in left_out]
    print(f"{dialogues} dialogues, scaled to {args.run}; {len(copied)} ids can be copied")
    for bound in (1, 30, 100, WANTED, 1000, 3000):
        print(f"  written < {bound} times: {sum(scaled[i] < bound for i in copied)}")
    poor = sorted((i for i in copied if scaled[i] < WANTED), key=lambda i: scaled[i])
    for i in poor:
        print(f"  {i:5d} {tokenizer.id_to_token(i)!r} {scaled[i]:.0f}")


if __name__ == "__main__":
    main()
