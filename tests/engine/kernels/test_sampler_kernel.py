"""Sampling on the device: draw for draw what engine.device.sampler draws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from engine.api import SamplingParams
from engine.device import sampler as reference
from engine.kernels import sampler
from tests.engine.kernels.passes import DEVICE

FORMS = {"torch": sampler.sample_torch, "triton": sampler.sample_triton}
#: temperature, top_p
SETTINGS = [(0.0, 1.0), (1.0, 1.0), (0.7, 0.5), (1.3, 0.9), (1.0, 0.02), (2.0, 0.99), (0.0, 0.3)]


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch):
    """Several programs a row, also at small vocabularies."""
    monkeypatch.setattr(sampler, "BLOCK", 128)


def draw(form: str, logits: Tensor, picks: list[tuple[float, float]], seed: int, **how: Tensor):
    """Ids and usable flags of rows with the given settings, seeds seed, seed + 1, ..."""
    count = len(logits)
    picks = [picks[i % len(picks)] for i in range(count)]

    def put(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return FORMS[form](
        logits.to(DEVICE),
        put([p[0] for p in picks], torch.float64),
        put([p[1] for p in picks], torch.float64),
        put([seed + i for i in range(count)], torch.int64),
        put(list(range(count)), torch.int32),
        **how,
    )


def expected(logits: Tensor, picks: list[tuple[float, float]], seed: int) -> list[int | None]:
    """What the reference sampler draws."""
    draws = []
    for i in range(len(logits)):
        temperature, top_p = picks[i % len(picks)]
        params = SamplingParams(
            max_tokens=1, temperature=temperature, top_p=top_p, seed=(seed + i) % (1 << 64)
        )
        draws.append(reference.Draw(params, i))
    return [s.token_id if s else None for s in reference.sample(logits.to(DEVICE), draws)]


def noise(rows: int, vocab: int, seed: int, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vocab", [1, 128, 129, 300])
def test_draws_are_the_references(vocab, form):
    """Every setting, at vocabularies that fill blocks and that do not, draws the same tokens."""
    for seed, spread in ((5, 2.0), (1 << 62, 0.05)):
        logits = noise(7, vocab, seed & 255, spread)
        found, usable = draw(form, logits, SETTINGS, seed)
        assert found.tolist() == expected(logits, SETTINGS, seed)
        assert usable.all()


def test_programs_that_take_several_chunks_draw_the_same(monkeypatch):
    """With fewer programs than chunks of a row, a chunk is left out or counted twice."""
    monkeypatch.setattr(sampler, "_PROGRAMS", 14)  # two for each of seven rows of five chunks
    logits = noise(7, 600, 3, 0.05)
    assert draw("triton", logits, SETTINGS, 9)[0].tolist() == expected(logits, SETTINGS, 9)


@pytest.mark.parametrize("form", FORMS)
def test_ties_go_to_the_lowest_id(form):
    """Equal logits, signed zeros among them: greedy takes the first, a nucleus keeps the first."""
    logits = torch.zeros(4, 200)
    logits[:, ::3] = -0.0
    logits[1, 50] = logits[1, 150] = 3.0
    picks = [(0.0, 1.0), (0.0, 1.0), (1.0, 0.004), (1.0, 0.3)]
    found, _ = draw(form, logits, picks, 11)
    assert found.tolist() == expected(logits, picks, 11)
    assert found.tolist()[:3] == [0, 50, 0]


@pytest.mark.parametrize("form", FORMS)
def test_unusable_rows_say_so(form):
    """A NaN, an infinity and nothing but -inf cannot be drawn from; the row beside them can."""
    logits = noise(8, 150, 3)
    logits[0, 149] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    logits[3, 5:] = -math.inf
    logits[4, 7] = math.nan
    picks = [(1.0, 0.9), (0.0, 1.0), (1.0, 0.5), (1.0, 0.9), (1.0, 1.0), (0.0, 1.0), (1.0, 0.8)]
    found, usable = draw(form, logits, picks, 1)
    assert usable.tolist() == [False, False, False, True, False, True, True, True]
    for token, want in zip(found.tolist(), expected(logits, picks, 1), strict=True):
        assert token == (0 if want is None else want)


def bitmask(allowed: Tensor) -> Tensor:
    """Pack bool [B, V] into int32 words."""
    short = -allowed.shape[1] % 32
    bits = torch.nn.functional.pad(allowed, (0, short)).view(len(allowed), -1, 32).long()
    words = (bits << torch.arange(32)).sum(-1)
    return (words - ((words >> 31) << 32)).int().to(DEVICE)


@pytest.mark.parametrize("form", FORMS)
def test_the_mask_rules_tokens_out(form):
    """Draws under a mask are the reference's draws from logits that have -inf there."""
    for seed in range(2):
        logits = noise(14, 333, seed)
        allowed = torch.rand(14, 333, generator=torch.Generator().manual_seed(seed)) < 0.3
        allowed[:, 31] = allowed[:, 32] = True  # both sides of a word's edge, and the sign bit
        allowed[3] = False
        allowed[3, 63] = True
        masked = logits.masked_fill(~allowed, -math.inf)
        logits[5, ~allowed[5]] = math.nan  # what is ruled out does no harm
        found, usable = draw(form, logits, SETTINGS, seed, mask=bitmask(allowed))
        assert found.tolist() == expected(masked, SETTINGS, seed)
        assert usable.all()
        assert found[3] == 63


@pytest.mark.parametrize("form", FORMS)
def test_forced_tokens_are_taken(form):
    """A forced row takes its token whatever its logits are; -1 draws as if nothing were said."""
    logits = noise(4, 100, 0)
    logits[3] = math.nan
    forced = torch.tensor([-1, 7, 99, 42], dtype=torch.int32, device=DEVICE)
    found, usable = draw(form, logits, SETTINGS, 9, forced=forced)
    assert found.tolist() == [expected(logits, SETTINGS, 9)[0], 7, 99, 42]
    assert usable.tolist() == [True, True, True, False]


@settings(max_examples=8)
@given(
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    temperature=st.floats(0.05, 3),
    top_p=st.floats(0.001, 1),
    levels=st.integers(1, 6),
)
def test_any_setting_draws_the_references_token(seed, temperature, top_p, levels):
    """Few distinct logits, so that ties cross the nucleus's edge: still the same token."""
    logits = torch.randint(
        0, levels, (2, 150), generator=torch.Generator().manual_seed(levels)
    ).float()
    picks = [(temperature, top_p)]
    seed = min(seed, (1 << 63) - 2)
    wanted = expected(logits, picks, seed)
    # A mass that meets top_p to the last bit is decided by the order of a sum.
    scaled = logits.double() / temperature
    masses = scaled.sort(-1, descending=True).values.softmax(-1).cumsum(-1)
    if (masses - top_p).abs().min() < 1e-12:
        return
    for form in FORMS:
        assert draw(form, logits, picks, seed)[0].tolist() == wanted, form


def test_draws_depend_on_their_row_alone():
    """A row draws the same token alone as among others."""
    logits = noise(6, 300, 4)
    together, _ = draw("triton", logits, [(1.0, 0.8)], 100)
    for i in range(6):
        alone, _ = sampler.sample_triton(
            logits[i : i + 1].to(DEVICE),
            torch.ones(1, dtype=torch.float64, device=DEVICE),
            torch.full((1,), 0.8, dtype=torch.float64, device=DEVICE),
            torch.tensor([100 + i], device=DEVICE),
            torch.tensor([i], device=DEVICE),
        )
        assert alone[0] == together[i]


@pytest.mark.parametrize("fault", ["seed", "index", "nucleus", "temperature"])
def test_planted_faults_are_seen(fault):
    """Another seed, another output index, no nucleus, no temperature: some draw differs."""
    logits = noise(12, 300, 8)
    picks = [(1.0, 0.3)]
    wanted = expected(logits, picks, 1)
    if fault == "seed":
        found, _ = draw("triton", logits, picks, 2)
    elif fault == "index":
        found, _ = draw("triton", logits.flip(0), picks, 1)
        found = found.flip(0)
    elif fault == "nucleus":
        found, _ = draw("triton", logits, [(1.0, 1.0)], 1)
    else:
        found, _ = draw("triton", logits, [(0.5, 0.3)], 1)
    assert found.tolist() != wanted


@pytest.mark.gpu
def test_real_vocabulary():
    """129280 tokens, 64 rows of all settings: the same draws as the reference on the same device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "BLOCK", 1024)
        for seed, spread in ((3, 2.0), (4, 0.01)):
            logits = noise(64, 129280, seed, spread)
            found, usable = draw("triton", logits, SETTINGS, seed)
            assert usable.all()
            assert found.tolist() == expected(logits, SETTINGS, seed)


@pytest.mark.gpu
def test_replay_is_eager():
    """A captured sampler, replayed for other logits and settings, draws what an eager one does."""
    count = 7
    logits = noise(count, 5000, 0).cuda()
    heat = torch.ones(count, dtype=torch.float64, device=DEVICE)
    mass = torch.ones(count, dtype=torch.float64, device=DEVICE)
    seeds = torch.arange(count, device=DEVICE)
    index = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    given = (logits, heat, mass, seeds, index)
    sampler.sample_triton(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampler.sample_triton(*given)
    for seed in range(4):
        logits.copy_(noise(count, 5000, seed))
        heat.copy_(torch.tensor([p[0] for p in SETTINGS]).roll(seed))
        mass.copy_(torch.tensor([p[1] for p in SETTINGS]).roll(seed))
        index.add_(1)
        graph.replay()
        eager = sampler.sample_triton(*given)
        assert torch.equal(captured[0], eager[0])
        assert torch.equal(captured[1], eager[1])
