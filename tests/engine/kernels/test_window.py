"""Window keys and rings: torch against the formulas, kernels against torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.records import pack_torch, unpack_torch
from engine.kernels.rope import rope_table, rotate_torch
from engine.kernels.roundtrip import round_trip
from engine.kernels.window import (
    store_window_torch,
    store_window_triton,
    window_keys_torch,
    window_keys_triton,
)
from tests.engine.kernels.passes import DEVICE, Sequence, noise, poisoned, rows_of

EPS = 1e-6
#: Chunks that start in the middle of a ring, are longer than it, and padding.
CHUNKS = [Sequence(3, 5, 7), Sequence(1, 0, 3), Sequence(0, 0, 1), Sequence(4, 11, 21)]
SINGLES = [Sequence(2, 30, 1), Sequence(5, 0, 1), Sequence(1, 8, 1), Sequence(0, 0, 1)]
FORMS = ["none", "fp8_64_tail", "fp8_32"]


def rows_for(sequences: list[Sequence]):
    return rows_of(sequences, block_size=16, num_blocks=12)


def table(pairs: int, positions: int = 64) -> Tensor:
    return rope_table(reference.rope_frequencies(2 * pairs, 1e4).to(DEVICE), positions)


def inputs(rows, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A strided kv, as it comes out of a joint projection, and a norm weight."""
    joint = noise(rows.num_rows, dim + 32, dtype=dtype, seed=1) * 3
    return joint[:, 32:], 1 + 0.1 * noise(dim, dtype=dtype, seed=2)


def test_table_equals_the_turns_of_the_reference():
    """A table's cosine or sine is off, at any position up to a million."""
    freqs = reference.rope_frequencies(8, 1e4)
    got = rope_table(freqs, 1 << 20)
    at = torch.tensor([0, 1, 77, 65535, 65536, 65537, 999_999, (1 << 20) - 1])
    want = reference.rope_turns(at, freqs, torch.float32)
    assert torch.allclose(got[at, 0], want.real, atol=1e-7)
    assert torch.allclose(got[at, 1], want.imag, atol=1e-7)
    assert not torch.allclose(got[at + (at == 0), 1], want.imag, atol=1e-7)


@pytest.mark.parametrize("heads", [None, 3])
def test_rotation_equals_the_reference(heads):
    """Rotation differs from complex products, or turning back does not undo it."""
    freqs = reference.rope_frequencies(8, 1e4)
    at = torch.tensor([0, 5, 63], dtype=torch.int32)
    x = torch.randn(3, *([heads] if heads else []), 16)
    want = reference.rope_(x.clone(), reference.rope_turns(at.long(), freqs, torch.float32))
    got = rotate_torch(x, rope_table(freqs, 64), at)
    assert torch.allclose(got, want, atol=1e-6)
    assert torch.allclose(rotate_torch(got, rope_table(freqs, 64), at, inverse=True), x, atol=1e-6)
    assert not torch.allclose(got[1], x[1], atol=1e-2)


@pytest.mark.parametrize("form", FORMS)
def test_torch_keys_equal_the_reference(form):
    """Window keys differ from norm, rotation and round trip of the reference."""
    rows, freqs = rows_for(CHUNKS), reference.rope_frequencies(8, 1e4).to(DEVICE)
    kv, norm_w = inputs(rows, 32, torch.float32)
    got = window_keys_torch(kv, norm_w, EPS, table(4), rows, None, form=form, store=False)
    got = unpack_torch(got, form, 32, 8, torch.float32)
    k = reference.rms_norm(kv, norm_w, EPS)
    k = reference.rope_(k, reference.rope_turns(rows.positions.long(), freqs, torch.float32))
    want = round_trip(k, form, tail=8)
    close(got, want)
    with pytest.raises(AssertionError):
        close(got, k + 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dim", "pairs"), [(32, 4), (128, 16)])
def test_kernel_keys_equal_torch(dim, pairs, form, dtype):
    """Keys of the kernel differ from torch by more than the order of a sum."""
    rows = rows_for(CHUNKS)
    kv, norm_w = inputs(rows, dim, dtype)
    args = (kv, norm_w, EPS, table(pairs), rows, None)
    want = window_keys_torch(*args, form=form, store=False)
    got = window_keys_triton(*args, form=form, store=False)
    got, want = (unpack_torch(k, form, dim, 2 * pairs, dtype) for k in (got, want))
    close(got, want)
    other = replace(rows, positions=rows.positions + 1)
    moved = window_keys_torch(*args[:4], other, None, form=form, store=False)
    with pytest.raises(AssertionError):
        close(got, unpack_torch(moved, form, dim, 2 * pairs, dtype))


def close(got: Tensor, want: Tensor) -> None:
    """Equal but for few elements that a rounding moved by one step."""
    got, want = got.float(), want.float()
    wrong = (got - want).abs() > 1e-5 * (1 + want.abs())
    assert wrong.float().mean() < 2e-3
    assert torch.allclose(got, want, atol=0.3, rtol=0.15)
    assert not got.isnan().any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window_keys", [window_keys_torch, window_keys_triton])
def test_store_writes_decode_rows_and_nothing_else(window_keys, form):
    """Storing at once puts a row elsewhere than position mod W, or touches another."""
    rows = rows_for(SINGLES)
    kv, norm_w = inputs(rows, 32, torch.float32)
    plain = torch.bfloat16 if form == "none" else torch.float32
    ring = poisoned(6, 8, 32, dtype=plain, form=form, tail=8)
    k = window_keys(kv, norm_w, EPS, table(4), rows, ring, form=form, store=True)
    assert form != "none" or torch.equal(k, k.bfloat16().float())
    k, ring = (unpack_torch(x, form, 32, 8, torch.float32) for x in (k, ring))
    written = {(2, 30 % 8): 0, (5, 0): 1, (1, 0): 2}
    for slot in range(1, 6):
        for place in range(8):
            if (slot, place) in written:
                assert torch.equal(ring[slot, place], k[written[slot, place]])
            else:
                assert ring[slot, place].isnan().all(), (slot, place)
    assert ring[0].isfinite().all()


@pytest.mark.parametrize("window_keys", [window_keys_torch, window_keys_triton])
def test_storing_a_chunk_at_once_is_refused(window_keys):
    """A chunk is stored while its first rows still need what it replaces."""
    rows = rows_for(CHUNKS)
    kv, norm_w = inputs(rows, 32, torch.float32)
    ring = poisoned(6, 8, 32, dtype=torch.float32)
    for given, of in ((ring, rows), (None, rows_for(SINGLES))):
        with pytest.raises(ValueError, match="store: expected a ring"):
            window_keys(kv, norm_w, EPS, table(4), of, given, form="none", store=True)


@pytest.mark.parametrize("form", ["none", "fp8_64_tail"])
@pytest.mark.parametrize("store_window", [store_window_torch, store_window_triton])
@pytest.mark.parametrize("lengths", [None, [7, 3, 1, 21], [2, 0, 1, 9], [0, 1, 0, 13]])
def test_ring_keeps_the_last_rows_that_count(store_window, lengths, form):
    """After a pass a ring lacks one of the last W counted rows, or holds one that does not count."""
    rows, width = rows_for(CHUNKS), 8
    k = round_trip(noise(rows.num_rows, 32), form, 8)
    ring = poisoned(6, width, 32, dtype=torch.float32, form=form, tail=8)
    given = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    store_window(pack_torch(k, form, 8), rows, ring, given)
    ring = unpack_torch(ring, form, 32, 8, torch.float32)
    want = poisoned(6, width, 32, dtype=torch.float32)
    first = 0
    for sequence, counted in zip(CHUNKS, lengths or [s.length for s in CHUNKS], strict=True):
        for offset in range(counted):  # later rows replace earlier ones
            want[sequence.slot, (sequence.start + offset) % width] = k[first + offset]
        first += sequence.length
    assert torch.equal(ring[1:].isnan(), want[1:].isnan())
    assert torch.equal(ring[1:].nan_to_num(), want[1:].nan_to_num())
    assert ring[0].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows_count", [1, 64, 1000])
@pytest.mark.parametrize("form", ["fp8_64_tail", "fp8_32"])
def test_real_widths(rows_count, form):
    """At real widths the kernel differs from torch."""
    sequences = [Sequence(1 + i, 100 + i, rows_count // 4 or 1) for i in range(4)]
    rows = rows_of(sequences, block_size=256, num_blocks=64)
    kv, norm_w = inputs(rows, 512, torch.bfloat16)
    ring = poisoned(6, 128, 512, dtype=torch.bfloat16, form=form, tail=64)
    args = (kv, norm_w, EPS, table(32, 2048), rows, ring)
    found, want = (
        unpack_torch(k(*args, form=form, store=False), form, 512, 64, torch.bfloat16)
        for k in (window_keys_triton, window_keys_torch)
    )
    close(found, want)
