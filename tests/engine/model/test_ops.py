"""Operations of the model against slow twins written from the formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from engine.kernels import reference as ops

G = torch.Generator


def test_rope_turns_adjacent_pairs_of_the_tail():
    """Pairs (2i, 2i + 1) of the last dimensions turn by position times frequency; the rest stays."""
    freqs = torch.tensor([1.0, 0.25], dtype=torch.float64)
    positions = torch.tensor([0, 3, 70000])
    x = torch.randn(3, 2, 8, generator=G().manual_seed(0))
    turns = ops.rope_turns(positions, freqs, torch.float32)
    got = ops.rope_(x.clone(), turns)
    for t, position in enumerate(positions.tolist()):
        for h in range(2):
            want = x[t, h].tolist()
            for i, freq in enumerate(freqs.tolist()):
                c, s = math.cos(position * freq), math.sin(position * freq)
                a, b = x[t, h, 4 + 2 * i].item(), x[t, h, 5 + 2 * i].item()
                want[4 + 2 * i : 6 + 2 * i] = [a * c - b * s, a * s + b * c]
            assert got[t, h].tolist() == pytest.approx(want, abs=1e-6)
    assert torch.allclose(ops.rope_(got, turns.conj()), x, atol=1e-6)


def test_yarn_matches_the_published_ramp():
    """With V4's numbers pairs up to 15 stay, from 25 on they are divided by 16, between they blend."""
    plain = ops.rope_frequencies(64, 160000.0)
    yarn = ops.rope_frequencies(
        64, 160000.0, factor=16, original_len=65536, beta_fast=32, beta_slow=1
    )
    ratio = (yarn / plain).tolist()

    assert ratio[:16] == pytest.approx([1.0] * 16)
    assert ratio[25:] == pytest.approx([1 / 16] * 7)
    assert ratio[20] == pytest.approx(0.5 + 0.5 / 16)
    assert sorted(ratio[15:26], reverse=True) == ratio[15:26]


@pytest.mark.parametrize("overlap", [False, True])
def test_pooling_equals_the_slow_twin(overlap):
    """Each channel is a softmax-weighted mean over the group; overlap pools A before and B now."""
    ratio, dim = 3, 4
    rows = ratio * (2 if overlap else 1)
    width = dim * (2 if overlap else 1)
    members = torch.randn(2, rows, 2 * width, generator=G().manual_seed(1))
    if overlap:
        members[0, :ratio, width:] = -math.inf  # the first group has none before it
        members[0, :ratio, :width] = 0
    got = ops.pool_entries(members, overlap)
    for n in range(2):
        for channel in range(dim):
            pairs = []
            for row in range(rows):
                at = channel + (dim if overlap and row >= ratio else 0)
                pairs.append((members[n, row, width + at].item(), members[n, row, at].item()))
            weights = [math.exp(score) for score, _ in pairs]
            want = sum(w * kv for w, (_, kv) in zip(weights, pairs, strict=True)) / sum(weights)
            assert got[n, channel].item() == pytest.approx(want, abs=1e-5)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 45), st.integers(0, 2**31))
def test_selection_equals_a_sort_by_score_then_index(rows, entries, k, seed):
    """Best k, ties to the lowest index, invisible ones never, ascending order."""
    g = G().manual_seed(seed)
    scores = torch.randint(-2, 3, (rows, entries), generator=g).float()  # many ties
    scores[torch.rand(rows, entries, generator=g) < 0.3] = -math.inf
    chosen, real = ops.select_entries(scores, k)
    for t in range(rows):
        visible = [j for j in range(entries) if scores[t, j] > -math.inf]
        want = sorted(sorted(visible, key=lambda j: (-scores[t, j].item(), j))[:k])
        assert want == [j for j, r in zip(chosen[t].tolist(), real[t].tolist(), strict=True) if r]


@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(1, 8),
    st.integers(0, 2**31),
)
def test_candidates_equal_the_slow_twin(rows, entries, group, k, seed):
    """The k best groups by maximum, the newest visible entry's group forced, empty ones dropped."""
    g = G().manual_seed(seed)
    scores = torch.randint(-2, 3, (rows, entries), generator=g).float()
    counts = torch.randint(0, entries + 1, (rows,), generator=g)
    scores.masked_fill_(torch.arange(entries) >= counts[:, None], -math.inf)
    got = ops.candidate_entries(scores, counts, group, k)
    for t in range(rows):
        count = int(counts[t])
        best = {}
        for j in range(count):
            best[j // group] = max(best.get(j // group, -math.inf), scores[t, j].item())
        if count:
            best[(count - 1) // group] = math.inf
        kept = sorted(best, key=lambda b: (-best[b], b))[:k]
        want = [j // group in kept for j in range(count)]
        assert want == got[t, :count].tolist()
        if count:
            assert got[t, count - 1]


def test_index_scores_sum_weighted_relus_over_heads():
    """A sum over heads, not a mean; weights may be negative; keys shared or per row."""
    g = G().manual_seed(3)
    q, w = torch.randn(2, 3, 4, generator=g), torch.randn(2, 3, generator=g)
    keys = torch.randn(5, 4, generator=g)
    got = ops.index_scores(q, keys, w)
    for t in range(2):
        for j in range(5):
            dots = [sum((q[t, h] * keys[j]).tolist()) for h in range(3)]
            want = sum(w[t, h].item() * max(dots[h], 0.0) for h in range(3))
            assert got[t, j].item() == pytest.approx(want, abs=1e-5)
    each = keys.expand(2, -1, -1).contiguous()
    assert torch.allclose(ops.index_scores(q, each, w), got, atol=1e-6)


def test_the_sink_takes_probability_and_gives_no_value():
    """p = exp(l - m) / (sum exp(l - m) + exp(a - m)); masked keys do not count."""
    g = G().manual_seed(4)
    q, keys = torch.randn(1, 2, 3, 4, generator=g), torch.randn(1, 6, 4, generator=g)
    keys[:, 0] = 0
    sink = torch.tensor([0.5, -1.0, 3.0])
    mask = torch.zeros(1, 2, 6)
    mask[0, 0, 4:] = -math.inf
    got = ops.sink_attention(q, keys, mask, sink)
    for row, seen in ((0, range(1, 4)), (1, range(1, 6))):
        for h in range(3):
            logits = [float(q[0, row, h] @ keys[0, j]) for j in seen]
            total = sum(map(math.exp, logits)) + math.exp(sink[h].item())
            want = sum(math.exp(x) / total * keys[0, j] for x, j in zip(logits, seen, strict=True))
            assert torch.allclose(got[0, row, h], want, atol=1e-6)


def test_groups_of_heads_are_contiguous():
    """Group g projects heads g * H / G ... with rows g * R ... of wo_a."""
    g = G().manual_seed(5)
    o, wo_a = torch.randn(2, 4, 3, generator=g), torch.randn(2, 5, 6, generator=g)
    got = ops.grouped_output(o, wo_a)
    for t in range(2):
        want = torch.cat([wo_a[i] @ o[t, 2 * i : 2 * i + 2].flatten() for i in range(2)])
        assert torch.allclose(got[t], want, atol=1e-5)


def test_router_scores_survive_extreme_logits():
    """No overflow upward, no zero downward, so weights of hash-routed tokens never become NaN."""
    logits = torch.tensor([-150.0, -100.0, -20.0, 0.0, 20.0, 1e4])
    scores = ops.sqrt_softplus(logits)
    want = [math.exp(-75), math.exp(-50), math.exp(-10), math.log(2) ** 0.5, 20**0.5, 100.0]

    assert scores.tolist() == pytest.approx(want, rel=1e-6)
    low = ops.route(torch.zeros(1, 4), torch.tensor([[0, 2]]), 1.5)
    assert torch.isfinite(low).all()


def test_routing_weights_are_normalised_and_scaled():
    """Chosen scores over their sum, times the scaling factor."""
    weights = ops.route(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[2, 0]]), 1.5)

    assert weights.tolist() == [pytest.approx([1.2, 0.3])]


def test_swiglu_clamps_gate_above_and_up_both_ways():
    """silu(min(g, 1)) * clamp(u, -1, 1), times the routing weight."""
    gate_up = torch.tensor([[3.0, -9.0, 0.5, 5.0, -5.0, 0.25]])

    def silu(x):
        return x / (1 + math.exp(-x))

    want = [silu(1.0) * 1.0, silu(-9.0) * -1.0, silu(0.5) * 0.25]
    assert ops.swiglu(gate_up, 1.0, None)[0].tolist() == pytest.approx(want)
    halved = ops.swiglu(gate_up, 1.0, torch.tensor([0.5]))
    assert halved[0].tolist() == pytest.approx([w / 2 for w in want])


def test_the_hadamard_transform_is_its_own_inverse_and_cancels_in_dot_products():
    """Orthonormal and symmetric, so q . k does not change without rounding."""
    h = ops.hadamard(16, torch.float64, torch.device("cpu"))

    assert torch.allclose(h @ h, torch.eye(16, dtype=torch.float64))
    assert set(h.flatten().tolist()) == {0.25, -0.25}


def test_the_engram_gate_equals_the_formula():
    """sigmoid(sign(d) sqrt(max(|d|, 1e-6))), d the normalised weighted product per stream."""
    g = G().manual_seed(6)
    streams, keys = torch.randn(2, 3, 8, generator=g), torch.randn(2, 3, 8, generator=g)
    keys[0, 0] = 0  # delta 0: sign(0) = 0, gate a half
    weight = torch.rand(3, 8, generator=g) + 0.5
    got = ops.engram_gate(streams, keys, weight, 1e-20)
    for t in range(2):
        for s in range(3):
            r, k = streams[t, s].double(), keys[t, s].double()
            d = float((r * weight[s] * k).sum())
            d *= float((r.square().mean() + 1e-20) ** -0.5 * (k.square().mean() + 1e-20) ** -0.5)
            d /= 8**0.5
            x = math.copysign(max(abs(d), 1e-6) ** 0.5, d) if d else 0.0
            assert got[t, s].item() == pytest.approx(1 / (1 + math.exp(-x)), abs=1e-6)
