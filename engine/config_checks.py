"""What the values of a model configuration may be, and how they must fit together.

One sentence per problem, naming the field as config.json does, the value accepted and the value
seen. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import Engram, ModelConfig

#: V4's overlapping compressor, the one with an indexer, is recognised by its ratio alone.
CSA_RATIO = 4
#: V4's compressed layers without an indexer (128 in the published models).
HCA_RATIOS = (8, 16, 32, 64, 128, 256)


def wanted(expected: object, got: object) -> str:
    """Say what a field may hold and what it does."""
    return f"expected {expected}, got {'nothing' if got is None else repr(got)}"


def problems(c: ModelConfig) -> Iterator[str]:
    """Yield what the values contradict, one sentence each."""
    positive = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim "
        "q_lora_rank o_lora_rank o_groups sliding_window n_routed_experts num_experts_per_tok "
        "moe_intermediate_size max_position_embeddings hc_mult hc_sinkhorn_iters index_n_heads "
        "index_head_dim index_topk candidate_topk_blocks candidate_block_size routed_scaling_factor "
        "swiglu_limit rope_theta compress_rope_theta rms_norm_eps hc_eps"
    )
    for name in positive.split():
        if getattr(c, name) <= 0:
            yield f"{name}: {wanted('a positive number', getattr(c, name))}"
    for name in ("num_hash_layers", "num_nextn_predict_layers"):
        if getattr(c, name) < 0:
            yield f"{name}: {wanted('a number >= 0', getattr(c, name))}"
    if c.o_groups > 0 and c.num_attention_heads % c.o_groups:
        yield f"o_groups: {wanted(f'a divisor of the {c.num_attention_heads} heads', c.o_groups)}"
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > c.head_dim:
        yield f"qk_rope_head_dim: {wanted(f'an even number <= {c.head_dim}', c.qk_rope_head_dim)}"
    for name in ("head_dim", "index_head_dim"):
        if getattr(c, name) % 2 and getattr(c, name) != 1:  # 1 stands for "no indexer"
            yield f"{name}: {wanted('an even number', getattr(c, name))}"
    if c.num_experts_per_tok > c.n_routed_experts:
        got = c.num_experts_per_tok
        yield f"num_experts_per_tok: {wanted(f'at most {c.n_routed_experts}', got)}"
    for name, ids in (("eos_token_id", c.eos_token_ids), ("bos_token_id", (c.bos_token_id,))):
        for token in ids:
            if not 0 <= token < c.vocab_size:
                yield f"{name}: {wanted(f'an id below {c.vocab_size}', token)}"
    accepted = (0, 1, 2) if c.is_v41 else (0, CSA_RATIO, *HCA_RATIOS)
    for index, ratio in enumerate(c.compress_ratios):
        if ratio not in accepted:
            yield f"compress_ratios[{index}]: {wanted(f'one of {list(accepted)}', ratio)}"
    yield from _index_problems(c)
    if c.is_v41:
        yield from _source_problems(c)
        if c.num_hash_layers:
            yield f"num_hash_layers: {wanted('0 for V4.1', c.num_hash_layers)}"
    if c.engram:
        yield from _engram_problems(c, c.engram)
    for layer in c.dspark.target_layer_ids if c.dspark else ():
        if not 0 <= layer < c.num_hidden_layers:
            yield f"dspark_target_layer_ids: {wanted(f'ids below {c.num_hidden_layers}', layer)}"


def _index_problems(c: ModelConfig) -> Iterator[str]:
    indexed = bool(c.index_source_layer_ids) if c.is_v41 else CSA_RATIO in c.compress_ratios
    if not indexed:
        return
    if c.index_head_dim < c.qk_rope_head_dim:
        yield f"index_head_dim: {wanted(f'at least {c.qk_rope_head_dim}', c.index_head_dim)}"
    if not c.is_v41 and c.index_head_dim & (c.index_head_dim - 1):
        yield f"index_head_dim: {wanted('a power of two (Hadamard)', c.index_head_dim)}"


def _source_problems(c: ModelConfig) -> Iterator[str]:
    """V4.1's ownership of entries, choices and candidates (model.md 2.9)."""
    ratios, layers = c.compress_ratios, c.num_hidden_layers
    lists = (
        ("kv_source_layer_ids", c.kv_source_layer_ids),
        ("index_source_layer_ids", c.index_source_layer_ids),
    )
    for name, ids in lists:
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < layers for i in ids):
            yield f"{name}: {wanted(f'ascending ids below {layers}', list(ids))}"
            return
        for layer in ids:
            if not ratios[layer]:
                yield f"{name}: {wanted('layers with a compress ratio above 0', layer)}"
    for index, ratio in enumerate(ratios):
        source = max((i for i in c.kv_source_layer_ids if i <= index), default=None)
        if ratio and (source is None or ratios[source] != ratio):
            seen = "none" if source is None else f"layer {source} of ratio {ratios[source]}"
            needed = f"a source of ratio {ratio} for layer {index}"
            yield f"kv_source_layer_ids: expected {needed}, got {seen}"
    index_sources = set(c.index_source_layer_ids)
    if index_sources and not set(c.kv_source_layer_ids) <= index_sources:
        missing = sorted(set(c.kv_source_layer_ids) - index_sources)
        yield f"index_source_layer_ids: expected every KV source among them, got none of {missing}"
    candidate = c.candidate_source_layer_id
    if candidate is not None and candidate not in index_sources:
        yield f"candidate_source_layer_id: {wanted('an index source', candidate)}"
    elif candidate is not None and candidate < max(c.kv_source_layer_ids, default=-1):
        last = max(c.kv_source_layer_ids)
        yield f"candidate_source_layer_id: {wanted(f'a layer >= the last KV source {last}', candidate)}"


def _engram_problems(c: ModelConfig, e: Engram) -> Iterator[str]:
    ids = e.layer_ids
    if list(ids) != sorted(set(ids)) or any(not 0 <= i < c.num_hidden_layers for i in ids):
        yield f"engram_layer_ids: {wanted(f'ascending ids below {c.num_hidden_layers}', list(ids))}"
    for name in ("n_heads", "head_dim", "vocab_size", "compressed_vocab_size"):
        if getattr(e, name) <= 0:
            yield f"engram_{name}: {wanted('a positive integer', getattr(e, name))}"
            return
    if e.max_ngram_size < 2:
        yield f"engram_max_ngram_size: {wanted('at least 2', e.max_ngram_size)}"
        return
    if not 0 <= e.pad_token_id < c.vocab_size:
        yield f"engram_pad_token_id: {wanted(f'an id below {c.vocab_size}', e.pad_token_id)}"
    sums = [sum(primes) for primes in e.primes]
    if list(e.num_embeddings) != sums:
        yield f"engram_num_embeddings: {wanted(f'the sums of the primes {sums}', list(e.num_embeddings))}"
