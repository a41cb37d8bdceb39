"""The benchmark of speculation: its figures add up."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import pytest
import torch

from bench import bound, geometries, speculate

SMALL: dict[str, Any] = {
    "vocab_size": 256, "num_attention_heads": 2, "head_dim": 64, "qk_rope_head_dim": 16,
    "o_lora_rank": 32, "o_groups": 2, "sliding_window": 16, "hidden_size": 64, "q_lora_rank": 32,
    "n_routed_experts": 8, "moe_intermediate_size": 32, "index_n_heads": 2, "index_head_dim": 32,
    "index_topk": 16, "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_hash_layers": 1,
    "compress_ratios": [0, 0, 4, 128],
}  # fmt: skip


def test_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps yield what was asked for on average, and two rows reach more experts than one."""
    small = {**copy.deepcopy(geometries.GEOMETRIES["v4-flash-8l"]), **SMALL}
    monkeypatch.setitem(geometries.GEOMETRIES, "small", small)
    monkeypatch.setattr(speculate, "NEW", 20)
    monkeypatch.setattr(speculate, "PROMPT", 24)
    for module in (bound, speculate):  # slow, so that milliseconds are not rounded away
        monkeypatch.setattr(module, "READ_BANDWIDTH", 1e6)
    args = argparse.Namespace(geometry="small", acceptance=1.8, batch=(1,), repeats=1, device="cpu")
    with torch.inference_mode():
        (row,) = speculate.measure(args, torch.device("cpu"))

    assert (row["drafter"], row["block"]) == ("mtp", 1)
    assert abs(row["acceptance_length"] - 1.8) < 0.2
    assert 1 < row["experts_over_plain"] <= 2
    assert row["bound_ms"] > row["plain_bound_ms"] > 0
    gain = row["acceptance_length"] * row["plain_bound_ms"] / row["bound_ms"]
    assert row["times_plain_at_bound"] == pytest.approx(gain, rel=1e-2)
