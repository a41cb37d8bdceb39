"""What a memory plan is made of, and the parts of it that every architecture has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.options import EngineConfig, buckets_up_to

#: Name of routed experts among the weights, which are what is paged.
ROUTED = "routed experts"


@dataclass(frozen=True, slots=True)
class Item:
    """One owner of memory.

    Args:
        owner: "weights", "slots", "blocks", "steps" or "prompts"; "host" for what stays out of the
            device's budget.
        what: which part.
        nbytes: its size.
        why: where the size comes from.
    """

    owner: str
    what: str
    nbytes: int
    why: str


def step_buffers(vocab_size: int, options: EngineConfig, context: int) -> Iterator[Item]:
    """What captured decode steps of any model read and write (engine.device.buffers).

    Args:
        vocab_size: V.
        options: how the model will be run.
        context: positions of a request.
    """
    buckets = buckets_up_to(options.max_num_seqs)
    rows = buckets[-1]
    blocks, words = -(-context // options.block_size), -(-vocab_size // 32)
    small = 8 + 4 + 4 + 4 + 8 + 8 + 8 + 4 + 2 * 8 + 4 + 4
    yield Item(
        "steps",
        "input and results",
        rows * (4 * blocks + 4 * words + small) + 8,
        f"{rows} rows: block table, token mask, sampling",
    )
    yield Item(
        "steps",
        "logits",
        sum(buckets) * vocab_size * 4,
        f"float32 of {', '.join(map(str, buckets))} rows",
    )
