"""Speculative steps over paged experts yield what plain steps over resident ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.checkpoint import Checkpoint
from engine.model.dspark import Dspark
from engine.model.experts import PagedExperts
from engine.model.fast import load_fast_model
from engine.model.packed import CheckpointSource, pack_dspark
from engine.model.placement import Placement
from engine.model.speculate import Speculator
from tests.engine.fast.test_dspark import CPU, load, make_pool
from tests.engine.fast.test_speculate import NEW, one_row, plain, start, wanted
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
    model = load_fast_model(path, kernels="torch", device="cpu", dtype=torch.float32, slots=slots)
    drafts = dict.fromkeys(stages, config.dspark.num_experts_per_tok)
    source = CheckpointSource(Checkpoint(path), CPU, torch.float32)
    placement = Placement(drafts, device=CPU, pin=False)
    draft = Dspark(model, pack_dspark(config, source, placement, plain=torch.float32))
    pool = make_pool(model)
    loaded = model, draft
    found = [start(loaded, pool, ids, temperature)]
    speculator = Speculator(model, draft)
    while len(found) < NEW:
        rows = one_row(found[-1], len(ids) + len(found) - 1)
        step = speculator.step(rows, pool, wanted(len(found), NEW - len(found), temperature))
        found += step.ids[0, : int(step.counts)].tolist()
    assert found == tokens
    for paged in model.experts:
        assert isinstance(paged, PagedExperts)
        paged.check_integrity()
