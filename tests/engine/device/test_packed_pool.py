"""Pools of a quantised model: records of bytes, of the size the plan says, poison in every form."""

from __future__ import annotations

import math

import pytest
import torch

from engine.config import ModelConfig
from engine.device.kvpool import KVPool
from engine.kernels.records import pack_torch, unpack_torch
from engine.memory import plan_memory
from engine.options import EngineConfig
from engine.plan.records import Form, forms_of
from tests.engine.model import build

BLOCK, BLOCKS, SLOTS = 32, 5, 4


def pool_of(version: str, dtype: torch.dtype = torch.bfloat16) -> KVPool:
    config = ModelConfig.from_dict(getattr(build, version)(quantised=True))
    forms = forms_of(is_v41=config.is_v41, is_quantised=True)
    return KVPool(
        config,
        num_blocks=BLOCKS,
        block_size=BLOCK,
        num_slots=SLOTS,
        dtype=dtype,
        forms=forms,
        ring_history=True,
        drafting="dspark",
    )


def values(pool: KVPool, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """All cached values, by name, as numbers."""
    c = pool.config
    widths: dict[str, tuple[Form, int]] = {
        "window": (pool.forms.window, c.head_dim),
        "draft": (pool.forms.window, c.head_dim),
        "entries": (pool.forms.entries, c.head_dim),
        "index_keys": (pool.forms.index, c.index_head_dim),
    }
    found = {}
    for name, tensor in pool.named_tensors().items():
        group = name.split("[")[0]
        if group in widths:
            form, width = widths[group]
            found[name] = unpack_torch(tensor, form, width, c.qk_rope_head_dim, dtype)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("version", ["v4", "v41"])
def test_poison_is_nan_in_every_form(version: str, dtype: torch.dtype) -> None:
    """Unused rings and blocks read as numbers, or slot 0, block 0 and reset slots do not."""
    pool = pool_of(version, dtype)
    assert all((v == 0).all() for v in values(pool, dtype).values())
    pool.poison(slots=[1, 2], blocks=[1, 3])
    pool.reset_slot(2)
    for name, v in values(pool, dtype).items():
        if name.startswith(("window", "draft")):
            assert v[1].isnan().all()
            assert (v[[0, 2, 3]] == 0).all()
        else:
            assert v[[1, 3]].isnan().all()
            assert (v[[0, 2, 4]] == 0).all()


@pytest.mark.parametrize("version", ["v4", "v41"])
def test_copies_take_whole_records(version: str) -> None:
    """A copied slot or block lacks scales or tails of its source."""
    pool = pool_of(version)
    noise = {n: torch.randn(v.shape, dtype=v.dtype) for n, v in values(pool).items()}
    for name, tensor in pool.named_tensors().items():
        if name in noise:
            group = name.split("[")[0]
            form = {"entries": pool.forms.entries, "index_keys": pool.forms.index}.get(
                group, pool.forms.window
            )
            tensor.copy_(pack_torch(noise[name], form, pool.config.qk_rope_head_dim))
    pool.copy(slots=[(1, 2)], blocks=[(4, 3)])
    for name, v in values(pool).items():
        source, target = (1, 2) if name.startswith(("window", "draft")) else (4, 3)
        assert torch.equal(v[target], v[source]), name
        assert not torch.equal(v[target], v[0]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("version", ["v4", "v41"])
def test_a_token_takes_what_is_planned(version: str, dtype: torch.dtype) -> None:
    """The plan's bytes of a token of context, or of a block, are not those of the pool."""
    pool = pool_of(version, dtype)
    options = EngineConfig(
        block_size=BLOCK, num_blocks=BLOCKS - 1, max_num_seqs=2, max_model_len=100
    )
    plan = plan_memory(pool.config, options, itemsize=dtype.itemsize, budget=None, packed=True)
    blocks = [*pool.entries.values(), *pool.index_keys.values()]
    held = sum(t.nbytes for t in blocks)
    assert plan.block_nbytes * BLOCKS == held
    assert plan.token_nbytes == held / (BLOCKS * BLOCK)
    plain = plan_memory(pool.config, options, itemsize=dtype.itemsize, budget=None)
    assert plan.token_nbytes < plain.token_nbytes


def test_the_models_tokens_are_half_as_large() -> None:
    """Bytes of a token at V4-Flash's widths are not those of its records."""
    ratios = [0, 0, 4, 128]
    config = ModelConfig.from_dict(
        build.v4(
            quantised=True, head_dim=512, qk_rope_head_dim=64, index_head_dim=128,
            compress_ratios=[*ratios, 0], num_hidden_layers=len(ratios),
        )
    )  # fmt: skip
    options = EngineConfig(block_size=256, num_blocks=4, max_num_seqs=2, max_model_len=1000)
    plan = plan_memory(config, options, itemsize=2, budget=None, packed=True)
    assert math.isclose(plan.token_nbytes, (592 + 80) / 4 + 592 / 128)
