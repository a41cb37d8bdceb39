"""Prompts to process before the first request: of every class of shapes, and of nobody.

Kernels are compiled for what is known of numbers and shapes: whether a count of rows is one, few, a
multiple of 16, how many entries may lie before a row, whether windows are cut. What follows has one
prompt for each, in the dummy slot and blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.api import PrefillMode
from engine.device.rows import LEAST_END
from engine.plan.step import Chunk

#: Rows of prompts, one for each class.
LENGTHS = (1, 2, 4, 5, 7, 9, 15, 16, 17, 24, 40, 64, 65, 100, 128, 160, 256, 300, 1024, 1100, 2048)
#: The same where tails' windows are cut.
TAIL_LENGTHS = (2, 8, 16, 32, 128)
#: Rows of prompts whose ends are of each class: scored one by one, and in tiles. Two of the former
#: make a pass of more rows than kernels overlap for.
END_LENGTHS = (8, 17)
#: Prompts of one pass: kernels tell few wanted rows from more, and count sequences in powers of two.
GROUPS = (2, 9, 17, 33)
#: Rows of such a pass: few, and more than any decode step has.
GROUP_ROWS = (2, 70)


def warm_passes(
    longest: int, most: int, block_size: int, most_seqs: int, *, has_tail: bool, has_ends: bool
) -> Iterator[tuple[Chunk, ...]]:
    """Give all passes: of one prompt as `warm_chunks` does, of several as `warm_groups`.

    Where there is a tail, one more: late layers have many rows although some are left out.
    """
    for chunk in warm_chunks(longest, most, block_size, has_tail=has_tail, has_ends=has_ends):
        yield (chunk,)
    yield from warm_groups(most_seqs, most, block_size, has_ends=has_ends)
    half = longest // 2
    if has_tail and half:
        whole, cut = (
            _chunk(half, most - half, block_size),
            _chunk(half, most - half, block_size, "bounded"),
        )
        yield whole, cut


def warm_chunks(
    longest: int, most: int, block_size: int, *, has_tail: bool, has_ends: bool
) -> Iterator[Chunk]:
    """Give prompts, the shorter ones first.

    Args:
        longest: rows of the longest pass.
        most: positions of a request.
        block_size: of the pool.
        has_tail: whether late layers may process fewer rows.
        has_ends: whether passes differ by where they end (engine.device.rows.end_class).
    """
    for length in sorted({min(n, longest) for n in (*LENGTHS, longest - 1, longest)} - {0}):
        for start in sorted({0, most - length}):
            yield _chunk(length, start, block_size)
    for end in _ends(most) if has_ends else ():
        for length in END_LENGTHS:
            rows = min(length, longest, end)
            yield _chunk(rows, end - rows, block_size)
    if has_tail:
        for length in sorted({min(n, longest) for n in TAIL_LENGTHS}):
            yield _chunk(length, most - length, block_size, "bounded")
        for mode in ("exact", "bounded"):
            yield _chunk(longest, most - longest, block_size, mode)


def warm_groups(
    most_seqs: int, most: int, block_size: int, *, has_ends: bool
) -> Iterator[tuple[Chunk, ...]]:
    """Give prompts that are processed in one pass, at their beginning and far behind it.

    Args:
        most_seqs: requests at once.
        most: positions of a request.
        block_size: of the pool.
        has_ends: whether passes differ by where they end.
    """
    for end in _ends(most) if has_ends and most_seqs > 1 else ():
        length = min(END_LENGTHS[0], end)
        yield (_chunk(length, end - length, block_size),) * 2
    for count in sorted({min(n, most_seqs) for n in (*GROUPS, most_seqs)} - {1}):
        for rows in GROUP_ROWS:
            length = min(max(2, -(-rows // count)), most)
            for start in sorted({0, most - length}):
                yield (_chunk(length, start, block_size),) * count


def _ends(most: int) -> Iterator[int]:
    """The largest end of each class."""
    end = LEAST_END
    while end < most:
        yield end
        end *= 2
    yield most


def _chunk(length: int, start: int, block_size: int, mode: PrefillMode = "off") -> Chunk:
    blocks = (0,) * -(-(start + length) // block_size)
    anchor = 0 if mode == "off" else start + length - 1
    return Chunk(
        "", 0, start, (0,) * length, blocks, wants_logits=True, prefill=mode, anchor=anchor
    )
