"""Engram on the device: the same table rows, gates and history as the host's side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from engine.config import Engram
from engine.kernels import engram, reference as ops
from engine.kernels.rows import Rows
from engine.model import quant
from engine.model.engram import NO_TOKEN, EngramTable, NgramHash, multipliers, ngrams
from tests.engine.kernels.batches import Span, make
from tests.engine.kernels.passes import DEVICE, noise

CONFIG = Engram(
    layer_ids=(1, 3), num_embeddings=(0, 0), max_ngram_size=4, n_heads=2, head_dim=40,
    vocab_size=97, compressed_vocab_size=60, pad_token_id=2,
)  # fmt: skip
VOCAB, IMAGE, PAD, RING, SLOTS = 100, 9, 55, 4, 6
SPANS = {
    "decode": [Span(0, 1), Span(1, 1), Span(7, 1), Span(30, 1)],
    "chunks": [Span(0, 7), Span(2, 3), Span(5, 1), Span(12, 9)],
}
FOLD = np.random.default_rng(0).integers(0, 60, VOCAB)


def tensor(values: object) -> Tensor:
    return torch.tensor(np.array(values), device=DEVICE)


def hashes(index: int) -> tuple[NgramHash, engram.Hashes]:
    """A layer's hash on the host and on the device."""
    primes = np.array(CONFIG.primes[index])
    device = engram.Hashes(
        tensor(multipliers(CONFIG, CONFIG.layer_ids[index])),
        tensor(primes),
        tensor(np.cumsum(primes) - primes),
    )
    return NgramHash(CONFIG, index), device


def table(storage: str) -> EngramTable:
    """A table of all rows of a layer; 40 columns leave the second scale a short group."""
    count = max(sum(primes) for primes in CONFIG.primes)
    values = torch.randn(count, 40, generator=torch.Generator().manual_seed(1))
    if storage != "fp8":
        return EngramTable(values.to(getattr(torch, storage)), None)
    weight, scale = quant.quantise_rows_fp8(values, engram.TABLE_GROUP)
    scale = scale.view(torch.uint8)
    scale[5] = 0  # the smallest power
    return EngramTable(weight, scale)


class Case:
    """A pass over sequences whose past is known, with images in both."""

    def __init__(self, spans: list[Span], seed: int = 0) -> None:
        rows, _ = make(spans, 16, blocks=40)
        rng = np.random.default_rng(seed)
        self.past = [rng.integers(0, VOCAB, s.start) for s in spans]
        self.ids = [rng.integers(0, VOCAB, s.length) for s in spans]
        for ids in (*self.past, *self.ids):
            ids[rng.random(len(ids)) < 0.15] = IMAGE
        self.spans = spans
        self.rows: Rows = replace(rows, ids=tensor(np.concatenate(self.ids)))
        self.history = torch.full((SLOTS, RING), 10**12, dtype=torch.int64, device=DEVICE)
        for i, past in enumerate(self.past):
            for p in range(max(0, len(past) - RING), len(past)):
                self.history[i + 1, p % RING] = int(self.fold(past)[p])

    def fold(self, ids: np.ndarray) -> np.ndarray:
        return np.where(ids == IMAGE, NO_TOKEN, FOLD[ids])

    def ngrams(self) -> np.ndarray:
        """By the host's own function, from each sequence's whole past."""
        found = []
        for past, ids in zip(self.past, self.ids, strict=True):
            before = np.concatenate((np.full(3, NO_TOKEN), self.fold(past)))[-3:]
            found.append(ngrams(before, self.fold(ids), PAD))
        return np.concatenate(found)


def look_up(form: str, case: Case, device: engram.Hashes, stored: EngramTable, **how: object):
    run = getattr(engram, f"engram_lookup_{form}")
    scale = None if stored.scale is None else stored.scale.to(DEVICE)
    options = {"pad": PAD, "image": IMAGE, "dtype": torch.float32, **how}
    weight = stored.weight.to(DEVICE)
    return run(case.rows, tensor(FOLD), case.history, device, weight, scale, **options)


@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize("storage", ["fp8", "bfloat16", "float32"])
@pytest.mark.parametrize("spans", SPANS)
def test_lookup_gives_the_hosts_values(spans, storage, form):
    """Values of every n-gram equal the host's table, hash and history, bit for bit."""
    case, stored = Case(SPANS[spans]), table(storage)
    for index in range(2):
        host, device = hashes(index)
        expect = stored.lookup(host.rows(case.ngrams()), torch.float32)
        found = look_up(form, case, device, stored)
        assert torch.equal(found.cpu(), expect)


@pytest.mark.parametrize("form", ["torch", "triton"])
def test_history_holds_the_last_ids(form):
    """Each sequence's last ids lie at their positions; other slots and rows stay as they are."""
    store = getattr(engram, f"store_history_{form}")
    for spans in SPANS.values():
        case = Case(spans)
        expect = case.history.clone()
        store(case.rows, tensor(FOLD), case.history, image=IMAGE)
        for i, (span, ids) in enumerate(zip(spans, case.ids, strict=True)):
            for offset in range(max(0, span.length - RING), span.length):
                expect[i + 1, (span.start + offset) % RING] = int(case.fold(ids)[offset])
        assert torch.equal(case.history[1:], expect[1:])


@pytest.mark.parametrize("form", ["torch", "triton"])
def test_refused_rows_leave_no_history(form):
    """After a verify pass only accepted ids are remembered."""
    case = Case([Span(5, 4), Span(6, 4), Span(0, 4)])
    accepted = torch.tensor([1, 4, 0], dtype=torch.int32, device=DEVICE)
    expect = case.history.clone()
    for i, count in enumerate(accepted.tolist()):
        for offset in range(count):
            place = (case.spans[i].start + offset) % RING
            expect[i + 1, place] = int(case.fold(case.ids[i])[offset])
    store = getattr(engram, f"store_history_{form}")
    store(case.rows, tensor(FOLD), case.history, image=IMAGE, lengths=accepted)
    assert torch.equal(case.history[1:], expect[1:])


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_any_split_looks_up_the_same(cuts, seed):
    """A sequence in one pass and in any chunks looks up the same values and ends alike."""
    stored, (_, device) = table("float32"), hashes(1)
    whole = Case([Span(0, sum(cuts))], seed)
    expect = look_up("torch", whole, device, stored)
    history, done, found = whole.history.clone(), 0, []
    for cut in cuts:
        part = Case([Span(done, cut)], seed)
        part.rows = replace(part.rows, ids=whole.rows.ids[done : done + cut])
        part.history = history
        found.append(look_up("torch", part, device, stored))
        engram.store_history_torch(part.rows, tensor(FOLD), history, image=IMAGE)
        done += cut
    assert torch.equal(torch.cat(found), expect)
    engram.store_history_torch(whole.rows, tensor(FOLD), whole.history, image=IMAGE)
    assert torch.equal(history[1:], whole.history[1:])


@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_is_the_references(form, dtype):
    """Streams take the reference's share of the value; images take none."""
    case = Case(SPANS["chunks"])
    count, dim = case.rows.num_rows, 48
    streams = noise(count, 4, dim).to(dtype)
    streams[0] = 0  # a zero row has no direction
    projected = noise(count, 5 * dim, seed=1).to(dtype)
    weight = 1 + 0.2 * noise(4, dim, seed=2)
    parts = projected.float().view(count, 5, dim)
    gate = ops.engram_gate(streams.float(), parts[:, :-1], weight, 1e-6)
    gate = gate.masked_fill((case.rows.ids == IMAGE)[:, None], 0.0)
    expect = torch.addcmul(streams.float(), gate[..., None], parts[:, -1:])
    run = getattr(engram, f"engram_apply_{form}")
    found = run(streams, projected, weight, case.rows, eps=1e-6, image=IMAGE)
    assert found.dtype == dtype
    exact = dtype == torch.float32
    torch.testing.assert_close(
        found.float(), expect, atol=2e-6 if exact else 0.02, rtol=1e-5 if exact else 8e-3
    )
    assert torch.equal(found[case.rows.ids == IMAGE], streams[case.rows.ids == IMAGE])


@pytest.mark.parametrize("fault", ["pad", "image", "history", "multipliers", "offsets"])
def test_planted_faults_are_seen(fault):
    """Another pad, images as text, a stale ring, swapped multipliers, no offsets: each shows."""
    case, stored = Case(SPANS["chunks"]), table("float32")
    host, device = hashes(0)
    expect = stored.lookup(host.rows(case.ngrams()), torch.float32)
    how: dict[str, object] = {}
    if fault == "pad":
        how = {"pad": PAD - 1}
    elif fault == "image":
        how = {"image": -1}
    elif fault == "history":
        case.history = case.history.roll(1, 1)
    elif fault == "multipliers":
        device = replace(device, multipliers=device.multipliers.flip(0))
    else:
        device = replace(device, offsets=torch.zeros_like(device.offsets))
    assert not torch.equal(look_up("triton", case, device, stored, **how).cpu(), expect)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["device", "pinned"])
def test_real_widths(place):
    """256 columns of a million rows, on the device and in pinned host memory."""
    config = replace(CONFIG, n_heads=8, vocab_size=41000, compressed_vocab_size=99092)
    host = NgramHash(config, 0)
    primes = np.array(config.primes[0])
    rows, _ = make([Span(3, 900), Span(0, 100), Span(8, 1)], 256, blocks=40)
    rng = np.random.default_rng(1)
    fold = rng.integers(0, 99092, 129280)
    ids = rng.integers(0, 129280, rows.num_rows)
    rows = replace(rows, ids=tensor(ids))
    device = engram.Hashes(
        tensor(multipliers(config, 1)), tensor(primes), tensor(np.cumsum(primes) - primes)
    )
    count = int(primes.sum())
    g = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (count, 256), dtype=torch.uint8, generator=g) & 0xBF
    scale = torch.randint(120, 130, (count, 8), dtype=torch.uint8, generator=g)
    history = tensor(rng.integers(0, 99092, (4, 4)))
    before = [history[i + 1].tolist() for i in range(3)]
    pasts = [[before[0][p % 4] for p in range(3)], [], [before[2][p % 4] for p in range(5, 8)]]
    grams = []
    for past, part in zip(pasts, np.split(ids, [900, 1000]), strict=True):
        carried = np.concatenate((np.full(3, NO_TOKEN), np.array(past, np.int64)))[-3:]
        grams.append(ngrams(carried, fold[part], 2))
    stored = EngramTable(data.view(torch.float8_e4m3fn), scale)
    expect = stored.lookup(host.rows(np.concatenate(grams)), torch.bfloat16)
    weight, scale = (
        (stored.weight.cuda(), scale.cuda())
        if place == "device"
        else (data.pin_memory().view(torch.float8_e4m3fn), scale.pin_memory())
    )
    found = engram.engram_lookup_triton(
        rows, tensor(fold), history, device, weight, scale, pad=2, image=-1, dtype=torch.bfloat16
    )
    assert torch.equal(found.cpu(), expect)
