"""Engram's arithmetic on token ids: which table rows a position reads.

Everything is an exact integer, so plain Python ints do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.oracle_naive.config import Config


def is_prime(n: int) -> bool:
    divisor = 2
    while divisor * divisor <= n:
        if n % divisor == 0:
            return False
        divisor += 1
    return n > 1


def multipliers(layer: int, count: int, compressed_vocab_size: int) -> list[int]:
    """One odd multiplier per place of the n-gram, the newest token's first."""
    high = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, high, size=count)
    return [int(m) * 2 + 1 for m in drawn]


def table_sizes(config: Config) -> dict[int, list[list[int]]]:
    """layer -> n-gram order (2, 3, ...) -> head -> prime size of that head's table.

    Each (layer, order) walks upward from engram_vocab_size - 1, past what any other has taken.
    """
    taken: set[int] = set()
    sizes: dict[int, list[list[int]]] = {}
    for layer in config.engram_layer_ids:
        sizes[layer] = []
        for _ in range(2, config.engram_max_ngram_size + 1):
            candidate = config.engram_vocab_size - 1
            primes: list[int] = []
            while len(primes) < config.engram_n_heads:
                candidate += 1
                if candidate not in taken and is_prime(candidate):
                    taken.add(candidate)
                    primes.append(candidate)
            sizes[layer].append(primes)
    return sizes


def history(config: Config, ids: Sequence[int], fold: Sequence[int], t: int) -> list[int]:
    """Folded ids of token t and of the engram_max_ngram_size - 1 before it, the newest first.

    Before the start, and from an image token backwards, the folded pad id stands.
    """
    out, blocked = [], False
    for place in range(config.engram_max_ngram_size):
        blocked = blocked or t - place < 0 or ids[t - place] == config.image_token_id
        out.append(fold[config.engram_pad_token_id if blocked else ids[t - place]])
    return out


def rows(config: Config, layer: int, ids: Sequence[int], fold: Sequence[int], t: int) -> list[int]:
    """Rows of the layer's table for position t: orders ascending, heads within each."""
    newest_first = history(config, ids, fold, t)
    mult = multipliers(layer, config.engram_max_ngram_size, config.engram_compressed_vocab_size)
    out, offset = [], 0
    for order, primes in enumerate(table_sizes(config)[layer], start=2):
        mixed = 0
        for place in range(order):
            mixed ^= newest_first[place] * mult[place]
        for prime in primes:
            out.append(offset + mixed % prime)
            offset += prime
    return out
