"""The sampler: exact distributions, and draws that depend on nothing but their row."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from engine.api import SamplingParams
from engine.device import sampler
from engine.device.sampler import Draw, Sample, draw_key, gumbel, nucleus, sample

MASK = (1 << 64) - 1


def draw(index: int = 0, **params: float | None) -> Draw:
    settings = {"max_tokens": 10, "temperature": 1.0, "seed": 0, **params}
    return Draw(SamplingParams(**settings), index)  # type: ignore[arg-type]


def ids(samples: list[Sample | None]) -> list[int]:
    return [s.token_id for s in samples if s is not None]


def splitmix64(state: int) -> int:
    """One output of splitmix64 after its state has advanced, on plain integers."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def slow_sample(row: list[float], d: Draw) -> int:
    """The same draw on plain Python numbers, token by token."""
    p = d.params
    if p.temperature == 0:
        return max(range(len(row)), key=lambda i: (row[i], -i))
    scaled = [x / p.temperature for x in row]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    total = sum(weights)
    kept, mass = [], 0.0
    for i in sorted(range(len(row)), key=lambda i: (-scaled[i], i)):
        if mass >= p.top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    golden = 0x9E3779B97F4A7C15
    assert p.seed is not None
    key = splitmix64(splitmix64(p.seed + golden) + (d.index + 1) * golden)
    best: dict[int, float] = {}
    for i in kept:
        uniform = ((splitmix64(key + (i + 1) * golden) >> 12) + 0.5) / 2**52
        best[i] = scaled[i] - math.log(-math.log(uniform))
    return max(kept, key=lambda i: (best[i], -i))


ROWS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30)


@given(
    ROWS,
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0.0917, 0.513, 0.947, 1.0]),  # no k/n: rounding cannot decide
    st.integers(-(2**63), 2**64),
    st.integers(0, 10_000),
)
def test_a_draw_equals_its_slow_twin(
    row: list[float], temperature: float, top_p: float, seed: int, index: int
) -> None:
    """Greedy, temperature, nucleus and hash agree with a token-by-token version."""
    d = draw(index, temperature=temperature, top_p=top_p, seed=seed)

    assert [slow_sample(row, d)] == ids(sample(torch.tensor([row]), [d]))


@given(st.data())
def test_a_draw_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    """Alone, in any company and at any place in the batch, a row gives the same."""
    rows = data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, 50, generator=generator)
    draws = [
        draw(
            data.draw(st.integers(0, 5)),
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0])),
            top_p=data.draw(st.sampled_from([0.5, 0.9, 1.0])),
            seed=data.draw(st.integers(0, 3)),
            top_logprobs=data.draw(st.sampled_from([None, 0, 4])),
        )
        for _ in range(rows)
    ]
    order = data.draw(st.permutations(range(rows)))

    alone = [sample(logits[i : i + 1], [draws[i]])[0] for i in range(rows)]
    together = sample(logits[order], [draws[i] for i in order])

    assert [alone[i] for i in order] == together


def test_sampling_leaves_no_state() -> None:
    """The same call twice gives the same; torch's generators are not touched."""
    logits = torch.randn(3, 100)
    draws = [draw(i, seed=5) for i in range(3)]
    before = torch.random.get_rng_state()

    assert sample(logits, draws) == sample(logits, draws)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_the_lowest_id_wins_a_tie(temperature: float) -> None:
    """Greedy is deterministic where two tokens are equally likely; heat alone breaks ties."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0]])

    got = {ids(sample(logits, [draw(i, temperature=temperature)]))[0] for i in range(50)}

    assert got == ({1} if temperature == 0 else {1, 3, 4})


def chi_square(counts: Counter[int], expected: list[float], total: int) -> float:
    return sum((counts[i] - total * p) ** 2 / (total * p) for i, p in enumerate(expected) if p)


def drawn(logits: Tensor, total: int, **params: float) -> Counter[int]:
    """`total` draws from one row: half over output indices, half over seeds."""
    half = total // 2
    draws = [draw(i, **{**params, "seed": 42}) for i in range(half)]
    draws += [draw(0, **{**params, "seed": i}) for i in range(half)]
    return Counter(ids(sample(logits.expand(total, -1), draws)))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """Over many indices and seeds the frequencies are those of softmax(logits / temperature)."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5, 0.3, -3.0, 2.2]])
    expected = (logits[0].double() / temperature).softmax(-1).tolist()

    counts = drawn(logits, 20_000, temperature=temperature)

    assert chi_square(counts, expected, 20_000) < 24.3  # 7 degrees of freedom, p = 0.001


def test_draws_follow_the_nucleus() -> None:
    """Under top_p nothing outside the nucleus comes, and inside it the ratios stay."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    expected = [4 / 7, 3 / 7, 0.0, 0.0]

    counts = drawn(logits, 20_000, top_p=0.65)

    assert set(counts) == {0, 1}
    assert chi_square(counts, expected, 20_000) < 10.8  # 1 degree of freedom, p = 0.001


def test_neighbouring_draws_are_independent() -> None:
    """Pairs of draws at successive indices fill the square of outcomes evenly."""
    logits = torch.zeros(1, 4)
    draws = [draw(i, seed=1) for i in range(20_001)]
    tokens = ids(sample(logits.expand(len(draws), -1), draws))

    pairs = Counter(4 * a + b for a, b in itertools.pairwise(tokens))

    assert chi_square(pairs, [1 / 16] * 16, 20_000) < 37.7  # 15 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    ("probs", "top_p", "kept"),
    [
        ([0.5, 0.25, 0.125, 0.125], 0.5, [0]),
        ([0.5, 0.25, 0.125, 0.125], 0.51, [0, 1]),
        ([0.5, 0.25, 0.125, 0.125], 0.80, [0, 1, 2]),
        ([0.125, 0.25, 0.125, 0.5], 0.76, [0, 1, 3]),
        ([0.25, 0.25, 0.25, 0.25], 0.5, [0, 1]),
        ([0.1, 0.9], 0.0001, [1]),
        ([1.0, 0.0], 0.999, [0]),
    ],
)
def test_the_nucleus_is_the_smallest_set(probs: list[float], top_p: float, kept: list[int]) -> None:
    """The likeliest tokens up to the mass top_p, with the one that reaches it."""
    logits = torch.tensor([probs], dtype=torch.float64).log()

    mask = nucleus(logits, torch.tensor([top_p], dtype=torch.float64))

    assert kept == mask[0].nonzero().flatten().tolist()


@given(ROWS, st.integers(0, 40), st.sampled_from([0.0, 0.4, 1.0]))
def test_logprobs_are_of_the_unmodified_distribution(
    row: list[float], top: int, temperature: float
) -> None:
    """Temperature and top_p do not change the log-probabilities; ties go low first."""
    top_p = 0.5
    (got,) = sample(
        torch.tensor([row]),
        [draw(temperature=temperature, top_p=top_p, top_logprobs=top)],
    )

    total = math.log(math.fsum(math.exp(x) for x in row))
    want = [x - total for x in row]
    assert got is not None
    assert got.logprob is not None
    assert got.logprob.logprob == pytest.approx(want[got.token_id], abs=1e-9)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:top]
    assert [i for i, _ in got.logprob.top] == order
    assert [p for _, p in got.logprob.top] == pytest.approx([want[i] for i in order], abs=1e-9)


@pytest.mark.parametrize(
    ("values", "usable"),
    [
        ([0.0, math.nan, 1.0], False),
        ([0.0, math.inf, 1.0], False),
        ([-math.inf, -math.inf, -math.inf], False),
        ([-math.inf, 0.0, -math.inf], True),
    ],
    ids=["nan", "inf", "nothing", "masked"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_gives_no_token_and_harms_no_other(
    values: list[float], usable: bool, temperature: float
) -> None:
    """NaN or infinite logits are reported for their row alone; masked tokens are never drawn."""
    good = [1.0, 2.0, 3.0]
    d = draw(temperature=temperature, top_p=0.9)
    healthy = sample(torch.tensor([good]), [d])

    got = sample(torch.tensor([good, values, good]), [d, d, d])

    assert got[0] == got[2] == healthy[0]
    assert got[1] == (Sample(1, None) if usable else None)


def test_a_draw_with_a_temperature_needs_a_seed() -> None:
    """Nobody draws by accident from a seed that was never set."""
    with pytest.raises(ValueError, match="needs a seed"):
        sample(torch.zeros(1, 3), [draw(seed=None)])
    assert ids(sample(torch.zeros(1, 3), [draw(seed=None, temperature=0.0)])) == [0]


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_keys_are_signed_64_bit_integers(seed: int, index: int) -> None:
    """Any seed gives a key torch can hold, and only its low 64 bits count."""
    key = draw_key(draw(index, seed=seed))

    assert -(2**63) <= key < 2**63
    assert key == draw_key(draw(index, seed=seed & MASK))


def test_gumbel_numbers_are_finite_and_of_the_right_shape() -> None:
    """Mean and variance are the distribution's, and no number is infinite."""
    numbers = gumbel(torch.arange(200), 1000)

    assert numbers.shape == (200, 1000)
    assert bool(torch.isfinite(numbers).all())
    assert numbers.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert numbers.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)


def ignore_index(d: Draw) -> int:
    return draw_key(Draw(d.params, 0))


def drop_the_low_bit(d: Draw) -> int:
    return draw_key(Draw(d.params, d.index & ~1))


@pytest.mark.parametrize("fault", [ignore_index, drop_the_low_bit])
def test_the_twin_catches_a_wrong_key(fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that forgets part of the output index is seen by the comparison with the twin."""
    draws = [draw(i) for i in range(64)]
    logits = torch.zeros(64, 16)
    want = [slow_sample([0.0] * 16, d) for d in draws]
    assert want == ids(sample(logits, draws))

    monkeypatch.setattr(sampler, "draw_key", fault)

    assert want != ids(sample(logits, draws))
