"""The official checkpoint layout: every tensor a configuration asks for, by name.

Pure data derived from ModelConfig (model.md 5.1): the loader, the writer, the converter, `inspect`
and the tests all read this one table. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.config import ModelConfig

Role = Literal["float", "float32", "linear", "expert", "table", "ids"]

FLOATS = ("BF16", "F32")
#: Stored types each role may have, in safetensors' spelling. F8_E4M3 and I8 (two FP4 values per
#: byte) bring a scale tensor along.
ACCEPTED: dict[Role, tuple[str, ...]] = {
    "float": FLOATS,
    "float32": FLOATS,
    "linear": (*FLOATS, "F8_E4M3"),
    "expert": (*FLOATS, "F8_E4M3", "I8"),
    "table": (*FLOATS, "F8_E4M3"),
    "ids": ("I64", "I32"),
}
#: A scale byte e stands for 2**(e - 127); files from before the dtype existed hold plain bytes.
SCALE_DTYPES = ("F8_E8M0", "U8")
#: Elements of one FP4 scale along the input dimension.
FP4_GROUP = 32
#: Elements of one Engram row scale.
TABLE_GROUP = 32

MTP_UNUSED = "MTP draft stage: read where the option speculation is mtp or auto"
DSPARK_UNUSED = "DSpark draft stage: read where the option speculation is dspark or auto"
CONFIDENCE_UNUSED = "DSpark confidence head: drafts always have all their tokens"
VISION_UNUSED = "vision tower: not implemented, images are refused"
BIAS_VL_UNUSED = "routing bias of image tokens: no image token comes there"
VISION_PREFIXES = ("vision.", "aligner.", "image_start", "image_end", "image_newline")

#: Text in a tensor's name -> the part of the checkpoint it belongs to; the first match counts.
_PARTS = {
    "mtp.": "draft stages",
    "vision.": "vision",
    "aligner.": "vision",
    "image_": "vision",
    ".engram.": "Engram",
    ".shared_experts.": "shared experts",
    ".experts.": "routed experts",
    ".gate.": "routers",
    ".attn.": "attention",
    "hc_": "residual streams",
    "embed.": "embedding and head",
    "head.": "embedding and head",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the official layout.

    Args:
        shape: logical shape, [rows, columns] for matrices; packed FP4 halves the columns on disk.
        role: which stored types are accepted and how they are read.
        unused: why the engine does not run it, or only with an option; empty for a tensor that it
            runs.
        optional: whether it may be absent.
    """

    shape: tuple[int, ...]
    role: Role
    unused: str = ""
    optional: bool = False


def tensor_specs(c: ModelConfig) -> dict[str, TensorSpec]:
    """Official name -> what is expected, in file order. Scales are implied by the stored type."""
    return dict(_all(c))


def scale_name(name: str) -> str:
    """Name of the scale that belongs to a quantised weight."""
    return name.removesuffix("weight") + "scale"


def scale_shape(spec: TensorSpec, dtype: str, block: int) -> tuple[int, ...]:
    """Shape of the scale of a tensor stored as `dtype` (F8_E4M3 or I8).

    Args:
        spec: of the weight.
        dtype: how the weight is stored.
        block: FP8 block size of the checkpoint.
    """
    rows, columns = spec.shape
    if dtype == "I8":
        return rows, columns // FP4_GROUP
    if spec.role == "table":
        return rows, -(-columns // TABLE_GROUP)
    return -(-rows // block), -(-columns // block)


def stored_shape(spec: TensorSpec, dtype: str) -> tuple[int, ...]:
    """Shape on disk: packed FP4 holds two values per byte."""
    return (*spec.shape[:-1], spec.shape[-1] // 2) if dtype == "I8" else spec.shape


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision tower or its adapter."""
    return name.startswith(VISION_PREFIXES)


def part(name: str) -> str:
    """Which part of a checkpoint a tensor belongs to, in words."""
    return next((part for mark, part in _PARTS.items() if mark in name), "norms")


def _all(c: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    vocab, d = c.vocab_size, c.hidden_size
    yield "embed.weight", TensorSpec((vocab, d), "float")
    yield "head.weight", TensorSpec((vocab, d), "float")
    yield "norm.weight", TensorSpec((d,), "float")
    if not c.is_v41:
        yield from _hc_head(c, "")
    for layer in c.layers:
        prefix = f"layers.{layer.index}."
        yield from _block(c, prefix)
        yield from _compressed(c, layer.index, prefix + "attn.")
        if layer.hash_routed:
            shape = (vocab, c.num_experts_per_tok)
            yield prefix + "ffn.gate.tid2eid", TensorSpec(shape, "ids")
        else:
            yield from _gate_bias(c, prefix, c.n_routed_experts)
        yield from _moe(c, prefix + "ffn.", c.n_routed_experts)
        if c.engram and layer.engram is not None:
            yield from _engram(c, layer.engram, prefix + "engram.")
    if c.num_nextn_predict_layers:
        reason = DSPARK_UNUSED if c.dspark else MTP_UNUSED
        for name, spec in _draft(c):
            # Whether draft stages have an image bias is not published.
            optional = spec.optional or name.endswith("gate.bias_vl")
            why = CONFIDENCE_UNUSED if "confidence_head" in name else reason
            why = BIAS_VL_UNUSED if name.endswith("gate.bias_vl") else why
            yield name, TensorSpec(spec.shape, spec.role, why, optional)


def _hc_head(c: ModelConfig, prefix: str) -> Iterator[tuple[str, TensorSpec]]:
    yield prefix + "hc_head_fn", TensorSpec((c.hc_mult, c.hc_mult * c.hidden_size), "float32")
    yield prefix + "hc_head_base", TensorSpec((c.hc_mult,), "float32")
    yield prefix + "hc_head_scale", TensorSpec((1,), "float32")


def _block(c: ModelConfig, prefix: str) -> Iterator[tuple[str, TensorSpec]]:
    """Yield what every layer has: two sites and the attention core."""
    d, streams = c.hidden_size, c.hc_mult
    mixes = streams * (streams + 2)
    for site in ("attn", "ffn"):
        yield f"{prefix}{site}_norm.weight", TensorSpec((d,), "float")
        yield f"{prefix}hc_{site}_fn", TensorSpec((mixes, streams * d), "float32")
        yield f"{prefix}hc_{site}_base", TensorSpec((mixes,), "float32")
        yield f"{prefix}hc_{site}_scale", TensorSpec((3,), "float32")
    heads = c.num_attention_heads * c.head_dim
    attn = prefix + "attn."
    yield attn + "wq_a.weight", TensorSpec((c.q_lora_rank, d), "linear")
    yield attn + "q_norm.weight", TensorSpec((c.q_lora_rank,), "float")
    yield attn + "wq_b.weight", TensorSpec((heads, c.q_lora_rank), "linear")
    yield attn + "wkv.weight", TensorSpec((c.head_dim, d), "linear")
    yield attn + "kv_norm.weight", TensorSpec((c.head_dim,), "float")
    grouped = c.o_groups * c.o_lora_rank
    yield attn + "wo_a.weight", TensorSpec((grouped, heads // c.o_groups), "linear")
    yield attn + "wo_b.weight", TensorSpec((d, grouped), "linear")
    yield attn + "attn_sink", TensorSpec((c.num_attention_heads,), "float32")


def _compressed(c: ModelConfig, index: int, attn: str) -> Iterator[tuple[str, TensorSpec]]:
    """Compressor and indexer of a layer that owns entries or a choice."""
    layer, d = c.layers[index], c.hidden_size
    if layer.owns_entries:
        name = attn + "compressor."
        width = c.head_dim * (2 if layer.overlap else 1)
        yield name + "wkv.weight", TensorSpec((width, d), "float")
        if layer.ratio > 1:
            yield name + "wgate.weight", TensorSpec((width, d), "float")
        if not c.is_v41:
            yield name + "ape", TensorSpec((layer.ratio, width), "float32")
        yield name + "norm.weight", TensorSpec((c.head_dim,), "float")
    if layer.owns_index:
        name = attn + "indexer."
        width = c.index_n_heads * c.index_head_dim
        yield name + "wq_b.weight", TensorSpec((width, c.q_lora_rank), "linear")
        yield name + "weights_proj.weight", TensorSpec((c.index_n_heads, d), "float")
    if layer.owns_index_keys and c.is_v41:
        name = attn + "indexer."
        yield name + "wk.weight", TensorSpec((c.index_head_dim, c.head_dim), "float")
        yield name + "k_norm.weight", TensorSpec((c.index_head_dim,), "float")
    elif layer.owns_index_keys:
        name = attn + "indexer.compressor."
        width = 2 * c.index_head_dim
        yield name + "wkv.weight", TensorSpec((width, d), "float")
        yield name + "wgate.weight", TensorSpec((width, d), "float")
        yield name + "ape", TensorSpec((layer.ratio, width), "float32")
        yield name + "norm.weight", TensorSpec((c.index_head_dim,), "float")


def _gate_bias(c: ModelConfig, prefix: str, experts: int) -> Iterator[tuple[str, TensorSpec]]:
    yield prefix + "ffn.gate.bias", TensorSpec((experts,), "float32")
    if c.is_v41:
        image = c.image_token_id is not None
        spec = TensorSpec((experts,), "float32", "" if image else BIAS_VL_UNUSED, not image)
        yield prefix + "ffn.gate.bias_vl", spec


def _moe(c: ModelConfig, ffn: str, experts: int) -> Iterator[tuple[str, TensorSpec]]:
    d, inner = c.hidden_size, c.moe_intermediate_size
    yield ffn + "gate.weight", TensorSpec((experts, d), "float")
    shapes = (("w1", (inner, d)), ("w2", (d, inner)), ("w3", (inner, d)))
    for name, shape in shapes:
        yield f"{ffn}shared_experts.{name}.weight", TensorSpec(shape, "linear")
    for expert in range(experts):
        for name, shape in shapes:
            yield f"{ffn}experts.{expert}.{name}.weight", TensorSpec(shape, "expert")


def _engram(c: ModelConfig, index: int, name: str) -> Iterator[tuple[str, TensorSpec]]:
    assert c.engram is not None
    e, streams, d = c.engram, c.hc_mult, c.hidden_size
    yield name + "embed.weight", TensorSpec((e.num_embeddings[index], e.head_dim), "table")
    width = e.rows_per_token * e.head_dim
    yield name + "wkv.weight", TensorSpec(((streams + 1) * d, width), "linear")
    yield name + "q_weight", TensorSpec((streams, d), "float")
    yield name + "k_weight", TensorSpec((streams, d), "float")


def _draft(c: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    """MTP stage of V4, or DSpark stages (V4.1 and the later V4 releases)."""
    d, last = c.hidden_size, c.num_nextn_predict_layers - 1
    experts = c.dspark.n_routed_experts if c.dspark else c.n_routed_experts
    for stage in range(c.num_nextn_predict_layers):
        prefix = f"mtp.{stage}."
        yield from _block(c, prefix)
        yield from _gate_bias(c, prefix, experts)
        yield from _moe(c, prefix + "ffn.", experts)
        if c.dspark is None:
            yield prefix + "e_proj.weight", TensorSpec((d, d), "linear")
            yield prefix + "h_proj.weight", TensorSpec((d, d), "linear")
            for norm in ("enorm", "hnorm", "norm"):
                yield f"{prefix}{norm}.weight", TensorSpec((d,), "float")
            yield from _hc_head(c, prefix)
    if c.dspark is None:
        return
    taps = len(c.dspark.target_layer_ids) * d
    yield "mtp.0.main_proj.weight", TensorSpec((d, taps), "linear")
    yield "mtp.0.main_norm.weight", TensorSpec((d,), "float")
    prefix = f"mtp.{last}."
    yield prefix + "norm.weight", TensorSpec((d,), "float")
    rank = c.dspark.markov_rank
    markov = (
        ("embed.weight", "head.weight") if c.is_v41 else ("markov_w1.weight", "markov_w2.weight")
    )
    for name in markov:
        yield f"{prefix}markov_head.{name}", TensorSpec((c.vocab_size, rank), "float")
    yield prefix + "confidence_head.proj.weight", TensorSpec((1, d + rank), "float")
    if not c.is_v41:
        yield from _hc_head(c, prefix)
