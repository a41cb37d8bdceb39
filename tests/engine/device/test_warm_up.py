"""What is processed before the first request: within limits, and one of every class."""

from __future__ import annotations

from hypothesis import given, strategies as st

from engine.device.rows import LEAST_END, end_class
from engine.device.warm_up import LENGTHS, TAIL_LENGTHS, warm_chunks, warm_passes


@given(
    longest=st.integers(1, 9000),
    most=st.integers(2, 70_000),
    has_tail=st.booleans(),
    has_ends=st.booleans(),
)
def test_chunks_are_those_that_could_be_served(
    longest: int, most: int, has_tail: bool, has_ends: bool
) -> None:
    """No chunk is longer than a pass or ends behind a context, and all lie in the dummies."""
    longest = min(longest, most)
    for chunk in warm_chunks(longest, most, 16, has_tail=has_tail, has_ends=has_ends):
        assert 1 <= len(chunk.token_ids) <= longest
        assert chunk.start >= 0
        assert chunk.end <= most
        assert len(chunk.block_ids) * 16 >= chunk.end
        assert chunk.slot == 0
        assert not any(chunk.block_ids)
        assert has_tail or chunk.prefill == "off"


def test_every_class_is_there() -> None:
    """Lengths, both ends of the context, every class of ends, and tails of each mode."""
    chunks = list(warm_chunks(8192, 66_000, 256, has_tail=True, has_ends=True))
    lengths = {(len(chunk.token_ids), chunk.prefill) for chunk in chunks}

    assert {(n, "off") for n in (*LENGTHS, 8191, 8192)} <= lengths
    assert {(n, "bounded") for n in (*TAIL_LENGTHS, 8192)} <= lengths
    assert (8192, "exact") in lengths
    assert {end_class(n) for n in range(1, 66_000)} == {end_class(chunk.end) for chunk in chunks}
    for end in (LEAST_END << n for n in range(9)):
        assert {8, 17} <= {len(chunk.token_ids) for chunk in chunks if end_class(chunk.end) == end}


def test_many_rows_are_left_where_some_are_left_out() -> None:
    """One pass has a prompt that every layer processes beside one that late layers cut."""
    passes = list(warm_passes(8192, 66_000, 256, 16, has_tail=True, has_ends=True))
    mixed = [chunks for chunks in passes if len({chunk.prefill for chunk in chunks}) > 1]

    assert [sum(len(chunk.token_ids) for chunk in chunks) for chunks in mixed] == [8192]
    assert {len(chunks) for chunks in passes} >= {1, 2, 9, 16}
    short = [chunks for chunks in passes if [len(each.token_ids) for each in chunks] == [8, 8]]
    assert {end_class(n) for n in range(1, 66_000)} == {end_class(each[0].end) for each in short}
    for chunks in warm_passes(1, 2, 256, 1, has_tail=True, has_ends=True):
        assert all(chunk.token_ids for chunk in chunks)


@given(st.integers(1, 1 << 20))
def test_ends_are_rounded_up_to_few(end: int) -> None:
    """By less than twice, or to the smallest class."""
    found = end_class(end)

    assert end <= found <= max(LEAST_END, 2 * end - 1)
    assert found.bit_count() == 1
