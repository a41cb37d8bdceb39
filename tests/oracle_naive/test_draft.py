"""The naive draft heads: who sees whom, and which token the Markov head is given."""

import numpy as np
import pytest

from tests.engine.model import build
from tests.oracle_naive.config import Config
from tests.oracle_naive.draft import dspark, mtp_logits
from tests.oracle_naive.model import Naive
from tests.oracle_naive.weights import Weights, from_tensors

IDS = [40, 71, 12, 200, 33, 80, 41, 19, 7, 101, 64]


@pytest.fixture(scope="module")
def v4() -> tuple[Config, Weights]:
    config = build.v4()
    return Config.read(config), from_tensors(build.random_tensors(config, 0))


@pytest.fixture(scope="module")
def v41() -> tuple[Config, Weights]:
    config = build.v41(engram_layer_ids=[])
    return Config.read(config), from_tensors(build.random_tensors(config, 0))


def test_mtp_sees_the_next_token_and_none_after(v4: tuple[Config, Weights]) -> None:
    """A changed next token moves the logits of its position and of later ones only."""
    before = mtp_logits(Naive(*v4, IDS), [*IDS[1:], 50])
    after = mtp_logits(Naive(*v4, IDS), [*IDS[1:6], 51, *IDS[7:], 50])
    moved = abs(after - before).max(axis=1)
    assert before.shape == (len(IDS), 288)
    assert (moved[:5] == 0).all()
    assert (moved[5:] > 1e-6).all()


def test_mtp_reads_the_streams_before_their_collapse(v4: tuple[Config, Weights]) -> None:
    """hc_head of the backbone has no part in it, each stream has."""
    config, weights = v4
    before = mtp_logits(Naive(config, weights, IDS), [*IDS[1:], 50])
    other_head = weights.edited({"hc_head_base": weights["hc_head_base"] + 1})
    np.testing.assert_array_equal(
        mtp_logits(Naive(config, other_head, IDS), [*IDS[1:], 50]), before
    )
    no_hidden = weights.edited({"mtp.0.h_proj.weight": weights["mtp.0.h_proj.weight"] * 0})
    assert abs(mtp_logits(Naive(config, no_hidden, IDS), [*IDS[1:], 50]) - before).max() > 0.1


def test_every_draft_token_sees_all_of_the_block(v41: tuple[Config, Weights]) -> None:
    """Other noise after it moves the first slot's logits."""
    config, weights = v41
    before = dspark(Naive(config, weights, IDS), 50)
    after = dspark(Naive(config.replaced(dspark_noise_token_id=60), weights, IDS), 50)
    assert before.logits.shape == (5, 288)
    assert abs(after.logits[0] - before.logits[0]).max() > 1e-3


def test_the_markov_head_gets_the_token_before(v41: tuple[Config, Weights]) -> None:
    """The sampled token first, then each token drafted."""
    config, weights = v41
    with_head = dspark(Naive(config, weights, IDS), 50)
    last = f"mtp.{config.num_nextn_predict_layers - 1}.markov_head"
    head, embed = weights[f"{last}.head.weight"], weights[f"{last}.embed.weight"]
    bare = dspark(Naive(config, weights.edited({f"{last}.head.weight": head * 0}), IDS), 50)
    given = [50, *with_head.token_ids[:-1]]
    np.testing.assert_allclose(
        with_head.logits, bare.logits + embed[given] @ head.T, rtol=0, atol=1e-12
    )
    assert with_head.token_ids == with_head.logits.argmax(axis=1).tolist()


def test_confidence_is_linear_in_the_collapse_and_the_token_before(
    v41: tuple[Config, Weights],
) -> None:
    """With the part for x set to nought only the Markov embedding is left."""
    config, weights = v41
    last = f"mtp.{config.num_nextn_predict_layers - 1}"
    name = f"{last}.confidence_head.proj.weight"
    proj = weights[name].copy()
    proj[:, : config.hidden_size] = 0
    draft = dspark(Naive(config, weights.edited({name: proj}), IDS), 50)
    embed = weights[f"{last}.markov_head.embed.weight"][[50, *draft.token_ids[:-1]]]
    np.testing.assert_allclose(draft.confidence, embed @ proj[0, config.hidden_size :], atol=1e-12)
    assert abs(draft.confidence - dspark(Naive(config, weights, IDS), 50).confidence).max() > 1e-3


def test_older_tokens_than_the_window_reach_the_draft_only_through_the_backbone(
    v41: tuple[Config, Weights],
) -> None:
    """A ring shorter by one forgets the oldest main_x; the backbone here has window 8 too."""
    config, weights = v41
    deaf = config.replaced(num_hidden_layers=1, compress_ratios=(0, 0, 0))
    deaf = deaf.replaced(dspark_target_layer_ids=(0,) * len(config.dspark_target_layer_ids))
    # taps at the entry of layer 0 are embeddings: position t alone
    drafted, far = (
        dspark(Naive(deaf, weights, [first, *IDS[1:]]), 50).logits for first in (IDS[0], 99)
    )
    np.testing.assert_array_equal(far, drafted)  # 11 tokens, window 8
    near = dspark(Naive(deaf, weights, [*IDS[:3], 99, *IDS[4:]]), 50).logits
    assert abs(near - drafted).max() > 1e-3
