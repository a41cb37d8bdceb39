"""Speculative steps over paged experts yield what plain steps over resident ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.checkpoint import Checkpoint
from engine.model.experts import PagedExperts
from engine.model.speculate import Speculator
from tests.engine.fast.drafts import load, make_pool, one_row, wanted
from tests.engine.fast.test_speculate import NEW, plain, start
from tests.engine.model import build, drive


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("more", [0, 2], ids=["top_k", "more"])
def test_tokens_are_those_of_plain_decoding(tmp_path: Path, temperature: float, more: int) -> None:
    """Rows of a verification are rows like others: in one wave or in several (J5).

    The draft's stages are paged too. Rejected rows bring experts in, which changes no result.
    """
    path = build.write(tmp_path, build.v41())
    ids = drive.tokens(21, 6)
    tokens = plain(load(path), ids, temperature)
    config = Checkpoint(path).config
    assert config.dspark is not None
    layers = range(len(config.layers))
    stages = range(len(config.layers), len(config.layers) + config.num_nextn_predict_layers)
    slots = dict.fromkeys(layers, config.num_experts_per_tok + more)
    drafts = dict.fromkeys(stages, config.dspark.num_experts_per_tok)
    loaded = model, drafter = load(path, slots, drafts)
    pool = make_pool(model)
    found = [start(loaded, pool, ids, temperature)]
    speculator = Speculator(model, drafter)
    results = torch.zeros((1, drafter.num_tokens + 2), dtype=torch.int64)
    while len(found) < NEW:
        rows = one_row(found[-1], len(ids) + len(found) - 1)
        w = wanted(len(found), NEW - len(found), temperature)
        speculator.step(rows, pool, w, results)
        count, *drawn = results[0].tolist()
        found += drawn[:count]
    assert found == tokens
    for paged in model.experts:
        assert isinstance(paged, PagedExperts)
        paged.check_integrity()
