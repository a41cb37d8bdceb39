"""The benchmark of the whole engine, on a small Qwen: its rows have what the figures are read from."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest
import torch

from bench import bound, driven, engine, rows
from bench.geometries import QWEN, QWEN3_30B
from engine.device.qwen_pool import QwenPool
from engine.model.qwen3_loading import random_qwen3
from engine.qwen3_config import Qwen3Config

SMALL = QWEN3_30B | {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # twins norm float32 by bfloat16 weights
def test_qwen_goes_through_the_whole_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paces and first tokens of Qwen's shape, with the experts that its own routers choose."""
    monkeypatch.setattr(driven, "QWEN3_30B", SMALL)
    monkeypatch.setattr(bound, "READ_BANDWIDTH", 1e6)  # slow, so that nothing is rounded away
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    command = (
        f"bench.engine --geometry {QWEN} --mode eager --device cpu --what decode,ttft --batch 1,3"
        " --prompt 300 --new-tokens 4 --repeats 1 --context 512 --chunk 512 --tokens 4096 --out found"
    )
    monkeypatch.setattr(sys, "argv", command.split())

    engine.main()

    found = [orjson.loads(line) for line in (tmp_path / "found.jsonl").read_bytes().splitlines()]
    assert [(row["bench"], row.get("batch")) for row in found] == [
        ("start", None), ("decode", 1), ("decode", 3), ("ttft", 1),
    ]  # fmt: skip
    _, one, three, first = found
    assert one["experts_touched"] == [2, 2, 2]
    assert all(2 <= count <= 6 for count in three["experts_touched"])
    assert one["bound_share"] == pytest.approx(one["bound_ms"] / one["ms_step"]["median"], rel=0.01)
    assert first["ttft_ms"]["median"] > 0
    assert first["geometry"] == QWEN


def test_a_step_of_qwen_reads_every_weight_once() -> None:
    """The bound is what is left of all weights without the embedding and the experts not chosen."""
    config = Qwen3Config.from_dict(SMALL)
    model = random_qwen3(config, kernels="torch", device="cpu", max_model_len=64)
    pool = QwenPool(config, num_blocks=3, block_size=16, dtype=torch.bfloat16)
    c, context = config, 20

    d, width = c.hidden_size, c.head_dim * (c.num_attention_heads + 2 * c.num_key_value_heads)
    layer = width * d + d * c.head_dim * c.num_attention_heads + c.num_experts * d
    layer += 2 * d + 2 * c.head_dim + 2 * 3 * d * c.moe_intermediate_size
    numbers = c.num_hidden_layers * layer + c.vocab_size * d + d
    numbers += c.num_hidden_layers * context * 2 * c.num_key_value_heads * c.head_dim

    ms = bound.bound_ms(model, pool, 1, context, [2] * c.num_hidden_layers)
    assert ms * bound.READ_BANDWIDTH / 1e3 == pytest.approx(2 * numbers)
