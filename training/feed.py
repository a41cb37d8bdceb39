"""Endless fresh training batches: generator processes, one batcher process, one queue.

Dialogues are made while the GPU trains, so none is seen twice. The batcher sorts them into length
buckets; a batch is [B, T] with B*T constant, so the model's row functions have one shape.
"""

from __future__ import annotations

import multiprocessing as mp
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess

import numpy as np

from training.codec import PAD
from training.pack import MAX_TOKENS, stream, target_mask

LENGTHS = (128, 192, 256, 320, 384, 480, 512, 640, 768, 1024, 1536)
#: rows of the loss are padded to a multiple of this, so that few shapes occur
ROW_STEP = 4096
#: dialogues a generator process hands over at a time
BLOCK = 250


@dataclass(frozen=True)
class Batch:
    """One batch as numpy: ids [B, T] int16, rows/targets/weight [R] of the loss."""

    ids: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    weight: np.ndarray


def make_batch(seqs: list[np.ndarray], length: int, row_step: int = ROW_STEP) -> Batch:
    """Pad sequences to [B, length] and list the positions whose next token is the assistant's."""
    ids = np.full((len(seqs), length), PAD, np.int64)
    mask = np.zeros((len(seqs), length), bool)
    for b, seq in enumerate(seqs):
        ids[b, : len(seq)] = seq
        mask[b, : len(seq)] = target_mask(seq)
    ahead = np.zeros_like(mask)
    ahead[:, :-1] = mask[:, 1:]
    rows = np.flatnonzero(ahead)
    size = -(-len(rows) // row_step) * row_step
    padded = np.zeros(size, np.int64)
    padded[: len(rows)] = rows
    weight = np.zeros(size, np.float32)
    weight[: len(rows)] = 1
    flat = ids.ravel()
    return Batch(ids, padded, flat[np.minimum(padded + 1, len(flat) - 1)], weight)


def _produce(first_block: int, stride: int, out: mp.Queue) -> None:
    for item in stream(first_block, stride, BLOCK):
        out.put(item)


def _collect(source: mp.Queue, out: mp.Queue, tokens: int, lengths: tuple[int, ...]) -> None:
    buckets: dict[int, list[np.ndarray]] = {n: [] for n in lengths}
    while True:
        ids, sizes = source.get()
        for seq in np.split(ids, np.cumsum(sizes)[:-1]):
            fit = next((n for n in lengths if len(seq) <= n), None)
            if fit is not None:
                buckets[fit].append(seq)
        for n, seqs in buckets.items():
            B = tokens // n
            while len(seqs) >= B:
                out.put(make_batch(seqs[:B], n))
                del seqs[:B]


class Feed:
    """Iterates batches; `close()` ends its processes.

    Args:
        tokens: padded tokens of a batch, a multiple of every bucket length.
        workers: generator processes.
        first_block: dialogues come from the generator's blocks of BLOCK seeds from here on.
        min_length: only buckets of at least this length are served.
    """

    def __init__(self, tokens: int, workers: int, first_block: int, min_length: int = 0) -> None:
        ctx = mp.get_context("spawn")  # never fork a process that may hold a CUDA context
        # kept: a queue that is collected takes its semaphores from children still starting
        self.raw, self.batches = ctx.Queue(workers * 2), ctx.Queue(48)
        lengths = tuple(n for n in LENGTHS if n >= min_length)
        if bad := [n for n in lengths if tokens % n]:
            raise ValueError(f"tokens={tokens} is not a multiple of the bucket lengths {bad}")
        if max(lengths) < MAX_TOKENS:
            raise ValueError(f"the longest bucket {max(lengths)} is under {MAX_TOKENS} tokens")
        self.processes: list[SpawnProcess] = [
            ctx.Process(target=_produce, args=(first_block + w, workers, self.raw), daemon=True)
            for w in range(workers)
        ]
        self.processes.append(
            ctx.Process(
                target=_collect, args=(self.raw, self.batches, tokens, lengths), daemon=True
            )
        )
        for p in self.processes:
            p.start()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            try:
                yield self.batches.get(timeout=120)
            except queue.Empty:
                dead = [p.pid for p in self.processes if not p.is_alive()]
                raise RuntimeError(f"no batch for 120 s; dead processes: {dead}") from None

    def close(self) -> None:
        """End the generator and batcher processes."""
        for p in self.processes:
            p.terminate()
        for p in self.processes:
            p.join(10)
