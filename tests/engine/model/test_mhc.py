"""Residual-stream mixing against a slow twin written out element by element.

The golden tensors cannot see two mistakes here, 19 Sinkhorn iterations instead of 20 and a missing
hc_eps in pre, because random mixing logits converge fast and gates stay away from 0. Large logits
make both visible.
"""

from __future__ import annotations

import math

import pytest
import torch

from engine.kernels import reference as ops

EPS = 1e-6


def naive_mhc(streams, fn, base, scale, iterations, hc_eps, rms_eps):
    """(pre, post, comb) of one row, straight from model.md 2.2, in Python floats."""
    count = len(streams)
    z = [value for stream in streams for value in stream]
    rho = (sum(v * v for v in z) / len(z) + rms_eps) ** -0.5
    m = [rho * sum(w * v for w, v in zip(row, z, strict=True)) for row in fn]

    def sigmoid(x):
        return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))

    pre = [sigmoid(m[s] * scale[0] + base[s]) + hc_eps for s in range(count)]
    post = [2 * sigmoid(m[count + s] * scale[1] + base[count + s]) for s in range(count)]
    comb = []
    for i in range(count):
        places = range(2 * count + i * count, 2 * count + (i + 1) * count)
        a = [m[p] * scale[2] + base[p] for p in places]
        e = [math.exp(x - max(a)) for x in a]
        comb.append([x / sum(e) + hc_eps for x in e])

    def divide_by_columns(c):
        sums = [sum(c[i][j] for i in range(count)) + hc_eps for j in range(count)]
        return [[c[i][j] / sums[j] for j in range(count)] for i in range(count)]

    comb = divide_by_columns(comb)
    for _ in range(iterations - 1):
        comb = [[x / (sum(row) + hc_eps) for x in row] for row in comb]
        comb = divide_by_columns(comb)
    return pre, post, comb


def ours(streams, fn, base, scale, iterations, hc_eps, rms_eps, count):
    """The same through the engine's operations, for all rows."""
    tables = ops.SinkhornTables.make(count, hc_eps, streams.dtype, streams.device)
    wide = scale.repeat_interleave(torch.tensor([count, count, count * count]))
    mixes = ops.stream_mixes(streams, fn * wide[:, None], base, rms_eps)
    return ops.hc_coefficients(mixes, count, iterations, tables)


@pytest.fixture(params=[4, 3], ids=["4 streams", "3 streams"])
def case(request):
    """Five rows with logits so large that Sinkhorn has not converged and gates are nearly shut."""
    count, d = request.param, 6
    g = torch.Generator().manual_seed(count)
    mixes = count * (count + 2)
    streams = torch.randn(5, count, d, generator=g, dtype=torch.float64)
    fn = torch.randn(mixes, count * d, generator=g, dtype=torch.float64)
    base = torch.randn(mixes, generator=g, dtype=torch.float64) * 6
    base[:count] -= 12
    scale = torch.tensor([1.5, 0.7, 3.0], dtype=torch.float64)
    return count, (streams, fn, base, scale)


def _largest(got, want):
    return max(
        float((g - torch.tensor(w, dtype=g.dtype)).abs().max())
        for g, w in zip(got, want, strict=True)
    )


def _compare(case, *, iterations, hc_eps, naive_iterations=20, naive_eps=EPS, part=None):
    """Largest difference of the engine (first two) and the twin (last two) over all rows."""
    count, (streams, fn, base, scale) = case
    got = ours(streams, fn, base, scale, iterations, hc_eps, 1e-6, count)
    diffs = []
    for row in range(len(streams)):
        want = naive_mhc(
            streams[row].tolist(),
            fn.tolist(),
            base.tolist(),
            scale.tolist(),
            naive_iterations,
            naive_eps,
            1e-6,
        )
        pairs = [(got[i][row], want[i]) for i in ((0, 1, 2) if part is None else (part,))]
        diffs.append(_largest([g for g, _ in pairs], [w for _, w in pairs]))
    return max(diffs)


@pytest.mark.parametrize("iterations", [1, 2, 6, 20])
def test_mixing_equals_the_slow_twin(case, iterations):
    """pre, post and comb are those of the formulas, at any number of iterations."""
    diff = _compare(case, iterations=iterations, hc_eps=EPS, naive_iterations=iterations)

    assert diff < 1e-12


def test_one_sinkhorn_iteration_fewer_is_seen(case):
    """19 iterations are not 20."""
    assert _compare(case, iterations=19, hc_eps=EPS, part=2) > 1e-5


def test_a_pre_without_eps_is_seen(case):
    """hc_eps is added to pre; with nearly shut gates that is most of its value."""
    count, (streams, fn, base, scale) = case
    pre, _, _ = ours(streams, fn, base, scale, 20, EPS, 1e-6, count)
    bare = torch.sigmoid(torch.logit(pre - EPS))

    assert _compare(case, iterations=20, hc_eps=EPS, part=0) < 1e-12
    assert float((pre - bare).abs().min()) > 0.9 * EPS
    assert float(((pre - bare) / pre).max()) > 0.05
    assert _compare(case, iterations=20, hc_eps=EPS, naive_eps=0.0, part=0) > 0.9 * EPS


def test_sinkhorn_ends_on_the_first_axis(case):
    """Columns (over the source streams) sum to 1, rows only nearly: do not fix it."""
    count, (streams, fn, base, scale) = case
    _, _, comb = ours(streams, fn, base, scale, 20, EPS, 1e-6, count)

    assert float((comb.sum(1) - 1).abs().max()) < 1e-5
    assert float((comb.sum(2) - 1).abs().max()) > 1e-4


def test_collapse_and_expand_follow_the_indices():
    """u = sum_s w_s R_s and R'_j = post_j y + sum_i C[i, j] R_i: the row index is the source."""
    g = torch.Generator().manual_seed(0)
    streams = torch.randn(2, 3, 5, generator=g)
    weights, post = torch.randn(2, 3, generator=g), torch.randn(2, 3, generator=g)
    comb, y = torch.randn(2, 3, 3, generator=g), torch.randn(2, 5, generator=g)
    u, out = ops.collapse(streams, weights), ops.expand(streams, y, post, comb)
    for t in range(2):
        want_u = sum(weights[t, s] * streams[t, s] for s in range(3))
        assert torch.allclose(u[t], want_u, atol=1e-6)
        for j in range(3):
            want = post[t, j] * y[t] + sum(comb[t, i, j] * streams[t, i] for i in range(3))
            assert torch.allclose(out[t, j], want, atol=1e-6)


def test_v41_epsilon_is_honoured_and_zero_rows_stay_zero():
    """rms_norm_eps 1e-20 is neither clamped up nor a division by zero."""
    tiny = torch.full((1, 8), 1e-8)

    assert torch.allclose(ops.rms_norm(tiny, None, 1e-20), torch.ones(1, 8), atol=1e-3)
    assert ops.rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-20).tolist() == [[0.0] * 8]
    zero = ops.stream_mixes(torch.zeros(1, 4, 8), torch.randn(24, 32), torch.arange(24.0), 1e-20)
    assert zero.tolist() == [list(range(24))]
