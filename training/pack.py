"""Dialogues as arrays of token ids: shards on disk, or a stream for a training loop.

`python -m training.pack OUT_DIR --count N` writes shards with all cores. A training loop rather
calls `stream` in processes of its own (training/feed.py), so that no dialogue is seen
twice. Every dialogue is read back through the codec before it is handed out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.codec import ASSISTANT, EOS, Codec, check
from training.dialogues import Split, make
from training.dialogues.lexicon import TOKENIZER

Ids = NDArray[np.uint16]
MAX_TOKENS = 1536
BLOCK = 500  # dialogues per item of a stream
_PROMPT_CHECKS = 50  # one dialogue in so many also has its prompts encoded


@cache
def shipped_codec() -> Codec:
    """The codec over the shipped tokenizer."""
    return Codec(str(TOKENIZER))


def generate(
    seed: int, count: int, split: Split = Split.TRAIN, max_tokens: int = MAX_TOKENS
) -> tuple[Ids, NDArray[np.int32]]:
    """Dialogues of the seeds from `seed` to `seed + count - 1`, those too long left out.

    Args:
        seed: first seed.
        count: number of seeds.
        split: training or one of the evaluation sets.
        max_tokens: longest dialogue that is kept, in tokens.

    Returns:
        (ids of all dialogues one after the other, their lengths).

    Raises:
        RoundTripError: a dialogue does not read back as meant (a fault of the generator).
    """
    codec = shipped_codec()
    parts: list[list[int]] = []
    for s in range(seed, seed + count):
        dialogue = make(s, split)
        ids = codec.dialogue_ids(dialogue)
        if len(ids) <= max_tokens:
            check(codec, dialogue, ids, prompts=s % _PROMPT_CHECKS == 0)
            parts.append(ids)
    lengths = np.array([len(p) for p in parts], np.int32)
    flat = np.fromiter((i for p in parts for i in p), np.uint16, int(lengths.sum()))
    return flat, lengths


def stream(
    seed: int, stride: int = 1, block: int = BLOCK
) -> Iterator[tuple[Ids, NDArray[np.int32]]]:
    """Endless blocks of training dialogues.

    Args:
        seed: number of the first block; block b holds the seeds from b * block on.
        stride: distance to the next block: worker w of n uses (w, n) and no two overlap.
        block: seeds per block.
    """
    number = seed
    while True:
        yield generate(number * block, block)
        number += stride


def target_mask(ids: Ids) -> NDArray[np.bool_]:
    """Mark the tokens that the assistant writes.

    They come after <｜Assistant｜> and its think mark, up to and including EOS.

    Args:
        ids: one dialogue, or several one after the other, [tokens].

    Returns:
        True for those, of the same shape.
    """
    opened = ids == ASSISTANT
    closed = ids == EOS
    inside = (np.cumsum(opened) - (np.cumsum(closed) - closed)) > 0
    first = np.zeros_like(opened)
    first[1:] = opened[:-1]  # the think mark belongs to the prompt
    mask: NDArray[np.bool_] = inside & ~opened & ~first
    return mask


def _shard(job: tuple[int, int, Path]) -> tuple[int, int]:
    seed, count, path = job
    ids, lengths = generate(seed, count)
    np.savez(path, ids=ids, lengths=lengths)
    return len(lengths), len(ids)


def main() -> None:
    """Write shards `NNNNN.npz` with arrays `ids` and `lengths`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, required=True, help="dialogues, over all shards")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", type=int, default=20_000, help="dialogues per shard")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    args = parser.parse_args()
    if args.count < 1 or args.shard < 1:
        sys.exit("--count and --shard must be at least 1")
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [
        (args.seed + at, min(args.shard, args.count - at), args.out / f"{at // args.shard:05d}.npz")
        for at in range(0, args.count, args.shard)
    ]
    start = time.perf_counter()
    with multiprocessing.Pool(args.processes) as pool:
        done = pool.map(_shard, jobs, chunksize=1)
    dialogues, tokens = sum(d for d, _ in done), sum(t for _, t in done)
    seconds = time.perf_counter() - start
    print(f"{dialogues} dialogues, {tokens} tokens, {dialogues / seconds:.0f} dialogues/s")


if __name__ == "__main__":
    main()
