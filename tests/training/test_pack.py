"""Packing: the mask marks what the assistant writes, streams do not overlap."""

from __future__ import annotations

from itertools import islice

import numpy as np

from training import pack
from training.codec import assistant_spans
from training.coverage import target_counts
from training.dialogues import Split, make


def test_generate_is_deterministic_and_keeps_to_the_limit() -> None:
    """Two calls give equal arrays; a dialogue beyond the limit is left out whole."""
    ids, lengths = pack.generate(40, 60)
    again, _ = pack.generate(40, 60)
    assert np.array_equal(ids, again)
    assert ids.dtype == np.uint16
    assert lengths.sum() == len(ids)
    short, fewer = pack.generate(40, 60, max_tokens=300)
    assert fewer.tolist() == [n for n in lengths if n <= 300]
    assert len(short) == fewer.sum()


def test_the_mask_marks_what_the_assistant_writes() -> None:
    """The mask of a flat array equals the spans found dialogue by dialogue."""
    ids, lengths = pack.generate(0, 80, Split.HELD_OUT)
    mask = pack.target_mask(ids)
    for one, marks in zip(
        np.split(ids, np.cumsum(lengths)[:-1]), np.split(mask, np.cumsum(lengths)[:-1]), strict=True
    ):
        expected = np.zeros(len(one), bool)
        for start, end, _ in assistant_spans(one.tolist()):
            expected[start : end + 1] = True  # the EOS is written too
        assert np.array_equal(marks, expected)
        assert marks[-1]


def test_streams_of_two_workers_cover_the_seeds_once() -> None:
    """Blocks of workers (0, 2) and (1, 2) are the blocks of one worker (0, 1)."""
    whole = list(islice(pack.stream(0, 1, block=5), 4))
    halves = [list(islice(pack.stream(w, 2, block=5), 2)) for w in (0, 1)]
    for i, (ids, _) in enumerate(whole):
        assert np.array_equal(ids, halves[i % 2][i // 2][0])


def test_coverage_counts_targets() -> None:
    """The coverage command counts exactly the tokens under the mask."""
    ids, lengths = pack.generate(0, 50)
    counts, dialogues = target_counts(0, 50)
    assert dialogues == len(lengths)
    assert counts.sum() == pack.target_mask(ids).sum()
    word = pack.shipped_codec().tokenizer.encode("I should call ")[0]
    wanted = sum(
        m.get("reasoning_content", "").count("I should call ")
        for seed in range(50)
        for m in make(seed).body["messages"]
        if "tools" in make(seed).body
    )
    assert counts[word] == wanted
