"""Captured engines take other weights: what was captured over the old ones is gone with them."""

from __future__ import annotations

import random

import pytest

from engine.api import EngineError
from tests.engine.device.engines import requests, run, same
from tests.engine.device.on_gpu import make, runner_of, write_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_products")]


def test_new_weights_act_in_captured_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    """There and back, each time the tokens of an engine that was started with these weights (t6).

    In place is refused, with the reason.
    """
    first, second = (write_checkpoint("v4", tmp_path_factory, seed) for seed in (11, 12))
    load = requests(random.Random(6), 12)
    how = {"kernels": "triton", "max_num_seqs": 8}
    of_second = run(make(second, **how), load)
    core = make(first, **how)
    of_first = run(core, load)
    assert not same(of_first, of_second, load)

    for path, wanted in ((second, of_second), (first, of_first)):
        said = r"in place: decode steps of 4 batch sizes.* are prepared over the weights' addresses"
        with pytest.raises(EngineError, match=said):
            core.update_weights(path, in_place=True)

        core.update_weights(path)

        assert [captured.bucket for captured in runner_of(core).graphs.captured] == [8, 4, 2, 1]
        assert same(run(core, load), wanted, load)
