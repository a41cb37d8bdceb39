"""Bounds: what a decode step must read at least, and what a prompt must compute.

A step reads each weight once, of the experts those that it is routed to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from engine.config import ModelConfig
from engine.device.kvpool import KVPool
from engine.device.qwen_pool import QwenPool
from engine.model.experts import PagedExperts
from engine.model.fast import FastModel
from engine.model.packed import PackedWeights
from engine.model.qwen3 import Qwen3Model

READ_BANDWIDTH = 4.43e12  # bytes per second, measured on an H200


def experts_touched(model: FastModel | Qwen3Model, run: Callable[[], object]) -> list[int]:
    """Distinct experts that each call of a router chooses while something is run once.

    Args:
        model: whose routers are watched.
        run: uses the model.
    """
    touched: list[Tensor] = []
    plain = model.ops

    def spy(*args: Any, **kwargs: Any) -> Any:
        routing = plain.route(*args, **kwargs)
        touched.append(routing.experts.flatten())
        return routing

    def norm_spy(*args: Any, **kwargs: Any) -> Any:
        found = plain.norm_route(*args, **kwargs)
        touched.append(found[-1].experts.flatten())
        return found

    # DeepSeek's layers call the one, Qwen's the other.
    model.ops = dataclasses.replace(plain, route=spy, norm_route=norm_spy)
    run()
    model.ops = plain
    return [int((t[t >= 0]).unique().numel()) for t in touched]  # type: ignore[no-untyped-call]


def bound_ms(
    model: FastModel | Qwen3Model,
    pool: KVPool | QwenPool,
    batch: int,
    context: int,
    touched: Sequence[float],
) -> float:
    """Milliseconds to read what a step must read, at 4.43 TB/s.

    Args:
        model: whose weights are read.
        pool: whose rows are read, as wide as they lie there.
        batch: sequences.
        context: tokens of each.
        touched: experts that each layer reads.
    """
    if isinstance(model, Qwen3Model):
        assert isinstance(pool, QwenPool)
        fixed, kv = _qwen_reads(model, pool, context)
    else:
        assert isinstance(pool, KVPool)
        fixed, kv = _reads(model, pool, context)
    nbytes = fixed + sum(touched) * expert_nbytes(model) + batch * kv
    return nbytes / READ_BANDWIDTH * 1e3


def expert_nbytes(model: FastModel | Qwen3Model) -> float:
    """Bytes of one routed expert; all layers' are alike."""
    experts, gate = model.experts[0], model.gates[0]
    if isinstance(experts, PagedExperts):
        return experts.layout.nbytes
    return experts.nbytes / len(gate)


def _qwen_reads(model: Qwen3Model, pool: QwenPool, context: int) -> tuple[int, int]:
    """Bytes of weights that every step reads, and of a sequence's keys and values."""
    fixed = model.norm.nbytes + model.head.nbytes
    for layer in model.layers:
        norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm)
        fixed += sum(part.nbytes for part in (*norms, layer.qkv, layer.out, layer.gate))
    heads = sum(keys.shape[-2] for keys in (*pool.keys, *pool.values))
    return fixed, context * heads * _row_bytes(pool.keys[0])


def _reads(model: FastModel, pool: KVPool, context: int) -> tuple[int, int]:
    """The same of DeepSeek's models: what layers see of a sequence, by their kind."""
    c, weights = model.config, model.weights
    routed = sum(layer.moe.experts.nbytes for layer in weights.layers)
    tables = sum(
        layer.engram.table.weight.nbytes
        + (0 if layer.engram.table.scale is None else layer.engram.table.scale.nbytes)
        for layer in weights.layers
        if layer.engram
    )
    ids = sum(
        0 if m.tid2eid is None else m.tid2eid.nbytes
        for m in (layer.moe for layer in weights.layers)
    )
    fixed = weights.nbytes - routed - tables - ids - weights.embed.nbytes
    kv = 0
    for layer in c.layers:
        kv += min(context, c.sliding_window) * _row_bytes(pool.window[layer.index])
        if layer.kv_source is not None:
            visible = context // layer.ratio
            seen = visible if layer.index_source is None else min(visible, c.index_topk)
            kv += seen * _row_bytes(pool.entries[layer.kv_source])
            if layer.owns_index and visible > c.index_topk:
                if layer.reads_candidates:
                    visible = min(visible, c.candidate_topk_blocks * c.candidate_block_size)
                kv += visible * _row_bytes(pool.index_keys[layer.kv_source])
    return fixed, kv


def _row_bytes(tensor: Tensor) -> int:
    """Bytes of one row of a pool's tensor [.., row]."""
    return tensor.shape[-1] * tensor.itemsize


def prompt_flops(config: ModelConfig, weights: PackedWeights, length: int) -> float:
    """Floating-point operations of a prompt: products with weights, and attention."""
    c = config
    total = 0.0
    for layer, own in zip(c.layers, weights.layers, strict=True):
        a, m = own.attn, own.moe
        matrices = (a.wq_a_wkv, a.wq_b, a.wo_a, a.wo_b, m.shared13, m.shared2)
        dense = sum(w.shape[-1] * w.shape[-2] for w in matrices)
        routed = c.num_experts_per_tok * 3 * c.hidden_size * c.moe_intermediate_size
        keys = float(min(length, c.sliding_window))
        if layer.ratio:
            visible = length / layer.ratio / 2
            keys += visible if layer.index_source is None else min(visible, c.index_topk)
        attention = 4 * c.num_attention_heads * c.head_dim * keys
        total += length * (2 * (dense + routed) + attention)
    return total
