"""Single pieces of the naive forward pass against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from tests.oracle_naive.model import Naive, best, rotary_frequencies, rotate
from tests.oracle_naive.test_engram_ids import V41_FLASH
from tests.oracle_naive.weights import Weights, from_tensors


def test_yarn_leaves_pairs_up_to_15_and_divides_from_25_on() -> None:
    """The real sizes: 32 pairs, original context 65536, beta 32 and 1, factor 16."""
    plain = np.array([160000.0 ** (-2 * i / 64) for i in range(32)])
    ratio = rotary_frequencies(V41_FLASH, 1) / plain
    np.testing.assert_allclose(ratio[:16], 1)
    np.testing.assert_allclose(ratio[25:], 1 / 16)
    np.testing.assert_allclose(ratio[20], 0.5 + 0.5 / 16)
    np.testing.assert_allclose(
        rotary_frequencies(V41_FLASH, 0), [10000.0 ** (-2 * i / 64) for i in range(32)]
    )


def test_rotation_turns_adjacent_pairs_of_the_tail() -> None:
    """A quarter turn sends (1, 0) to (0, 1); what stands before the tail stays."""
    x = np.array([9.0, 1.0, 0.0, 0.0, 1.0])
    quarter = np.array([math.pi / 2, math.pi])
    np.testing.assert_allclose(rotate(x, 1, quarter), [9, 0, 1, 0, -1], atol=1e-15)
    np.testing.assert_allclose(rotate(rotate(x, 3, quarter), -3, quarter), x, atol=1e-14)


def test_best_takes_the_lowest_index_of_equals_and_never_minus_infinity() -> None:
    """Ties and masked entries."""
    assert best([1.0, 2.0, 2.0, 2.0], 2) == {1, 2}
    assert best([-math.inf, 0.0, -math.inf], 2) == {1}


@pytest.mark.parametrize("iterations", [1, 19, 20])
def test_mixing_coefficients_of_large_logits(iterations: int) -> None:
    """Streams of ones make z of rms 1; the comb is done again here entry by entry."""
    rng = np.random.default_rng(1)
    base, scale = rng.standard_normal(24) * 8, np.array([0.5, 2.0, 3.0])
    fn = rng.standard_normal((24, 8))
    weights = Weights({"x_fn": fn, "x_base": base, "x_scale": scale}, frozenset())
    config = V41_FLASH.replaced(hc_sinkhorn_iters=iterations, hc_eps=1e-2)
    mix = Naive(config, weights, []).mix("x", np.ones((4, 2)))

    m = fn.sum(axis=1)
    for s in range(4):
        assert mix.pre[s] == pytest.approx(1 / (1 + math.exp(-m[s] * 0.5 - base[s])) + 1e-2)
        assert mix.post[s] == pytest.approx(2 / (1 + math.exp(-m[4 + s] * 2 - base[4 + s])))
    comb = [
        [math.exp(m[8 + 4 * i + j] * 3 + base[8 + 4 * i + j]) for j in range(4)] for i in range(4)
    ]
    comb = [[v / sum(row) + 1e-2 for v in row] for row in comb]
    for step in range(2 * iterations - 1):
        if step % 2 == 0:
            sums = [sum(row[j] for row in comb) for j in range(4)]
            comb = [[row[j] / (sums[j] + 1e-2) for j in range(4)] for row in comb]
        else:
            comb = [[v / (sum(row) + 1e-2) for v in row] for row in comb]
    np.testing.assert_allclose(mix.comb, comb, rtol=1e-12)


def test_a_sink_takes_its_share_and_gives_nothing() -> None:
    """One key, logit 0, sink log(3): a quarter of the value is left."""
    weights = Weights({"a.attn_sink": np.array([math.log(3)])}, frozenset())
    config = V41_FLASH.replaced(head_dim=2)
    o = Naive(config, weights, []).attend("a", np.zeros((1, 2)), np.array([[4.0, 8.0]]))
    np.testing.assert_allclose(o, [[1.0, 2.0]])


def test_fp8_blocks_and_packed_fp4_are_decoded_with_their_scales() -> None:
    """A last, partial block; a scale byte of 128 means 2."""
    fp8 = torch.ones(40, 33).to(torch.float8_e4m3fn)
    fp8_scale = torch.tensor([[127, 128], [126, 130]], dtype=torch.uint8)
    packed = torch.full((2, 32), 0x21, dtype=torch.int8)  # 0.5, 1.0 and so on
    fp4_scale = torch.tensor([[127, 129], [127, 127]], dtype=torch.uint8)
    weights = from_tensors(
        {
            "a.weight": fp8,
            "a.scale": fp8_scale.view(torch.float8_e8m0fnu),
            "b.weight": packed,
            "b.scale": fp4_scale.view(torch.float8_e8m0fnu),
            "c.weight": torch.tensor([1.5], dtype=torch.bfloat16),
            "hc_attn_scale": torch.tensor([2.0]),
        }
    )
    a, b = weights["a.weight"], weights["b.weight"]
    assert (a[:32, :32] == 1).all()
    assert (a[:32, 32] == 2).all()
    assert (a[32:, :32] == 0.5).all()
    assert (a[32:, 32] == 8).all()
    assert b.shape == (2, 64)
    assert b[0, [0, 1, 32, 33]].tolist() == [0.5, 1.0, 2.0, 4.0]
    assert weights["c.weight"].tolist() == [1.5]
    assert weights["hc_attn_scale"].tolist() == [2.0]
    assert weights.quantised == {"a.weight", "b.weight"}
    assert weights.keys() == {"a.weight", "b.weight", "c.weight", "hc_attn_scale"}
