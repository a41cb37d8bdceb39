"""Reads packed weights from a source: what shares an input is joined, experts are placed.

Where parts cannot be joined as they are stored (a short last FP8 block in the middle), they become
plain matrices of the same values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import Layer, ModelConfig
from engine.kernels.formats import Matrix, dequantise, on_bytes
from engine.model.packed import (
    PackedAttention,
    PackedCompressor,
    PackedDspark,
    PackedEngram,
    PackedHead,
    PackedIndexer,
    PackedIndexKeys,
    PackedLayer,
    PackedMoe,
    PackedMtp,
    PackedSite,
    PackedWeights,
)
from engine.model.placement import Placement
from engine.model.sources import Source


def pack(
    config: ModelConfig,
    source: Source,
    placement: Placement,
    *,
    plain: torch.dtype = torch.bfloat16,
) -> PackedWeights:
    """Read every tensor the backbone runs.

    Args:
        config: of the model.
        source: of the weights.
        placement: where routed experts go.
        plain: dtype of the embedding and the router: bfloat16 beside bfloat16 activations, else
            float32.
    """
    return _Packer(config, source, placement, plain).build()


def pack_dspark(
    config: ModelConfig,
    source: Source,
    placement: Placement,
    *,
    plain: torch.dtype = torch.bfloat16,
) -> PackedDspark:
    """Read the draft stages of a configuration that has DSpark; arguments as `pack`."""
    assert config.dspark is not None
    packer, get = _Packer(config, source, placement, plain), source.value
    last = f"mtp.{config.num_nextn_predict_layers - 1}."
    head = None
    names = ("embed.weight", "head") if config.is_v41 else ("markov_w1.weight", "markov_w2")
    if not config.is_v41:
        fn = get(last + "hc_head_fn") * get(last + "hc_head_scale")
        head = PackedHead(fn, get(last + "hc_head_base"))
    return PackedDspark(
        main_proj=source.matrix("mtp.0.main_proj"),
        main_norm=get("mtp.0.main_norm.weight"),
        stages=tuple(
            packer.layer(
                draft_layer(config, stage), f"mtp.{stage}.", config.dspark.n_routed_experts
            )
            for stage in range(config.num_nextn_predict_layers)
        ),
        norm=get(last + "norm.weight"),
        hc_head=head,
        markov_embed=get(f"{last}markov_head.{names[0]}").to(plain),
        markov_head=source.matrix(f"{last}markov_head.{names[1]}"),
    )


def pack_mtp(
    config: ModelConfig,
    source: Source,
    placement: Placement,
    *,
    plain: torch.dtype = torch.bfloat16,
) -> tuple[PackedMtp, ...]:
    """Read the MTP stages of a configuration without DSpark; arguments as `pack`."""
    packer, get = _Packer(config, source, placement, plain), source.value
    found = []
    for stage in range(config.num_nextn_predict_layers):
        name = f"mtp.{stage}."
        fn = get(name + "hc_head_fn") * get(name + "hc_head_scale")
        found.append(
            PackedMtp(
                e_proj=source.matrix(name + "e_proj"),
                h_proj=source.matrix(name + "h_proj"),
                enorm=get(name + "enorm.weight"),
                hnorm=get(name + "hnorm.weight"),
                layer=packer.layer(draft_layer(config, stage), name, config.n_routed_experts),
                hc_head=PackedHead(fn, get(name + "hc_head_base")),
                norm=get(name + "norm.weight"),
            )
        )
    return tuple(found)


def draft_layer(config: ModelConfig, stage: int) -> Layer:
    """What a draft stage is: a window layer with learned routing, numbered after the backbone."""
    return Layer(
        index=config.num_hidden_layers + stage,
        ratio=0,
        overlap=False,
        kv_source=None,
        index_source=None,
        owns_index_keys=False,
        builds_candidates=False,
        reads_candidates=False,
        hash_routed=False,
        engram=None,
    )


class _Packer:
    def __init__(
        self, config: ModelConfig, source: Source, placement: Placement, plain: torch.dtype
    ) -> None:
        self._config = config
        self._source = source
        self._placement = placement
        self._plain = plain

    def build(self) -> PackedWeights:
        c, get = self._config, self._source.value
        head = None
        if not c.is_v41:
            head = PackedHead(get("hc_head_fn") * get("hc_head_scale"), get("hc_head_base"))
        return PackedWeights(
            embed=get("embed.weight").to(self._plain),
            head=Matrix("plain", get("head.weight").to(self._plain)),
            norm=get("norm.weight"),
            hc_head=head,
            layers=tuple(
                self.layer(layer, f"layers.{layer.index}.", c.n_routed_experts)
                for layer in c.layers
            ),
        )

    def layer(self, layer: Layer, prefix: str, experts: int) -> PackedLayer:
        """Read one block: a backbone layer, or a draft stage."""
        engram = None
        if layer.engram is not None:
            name = prefix + "engram."
            gate = self._source.value(name + "q_weight") * self._source.value(name + "k_weight")
            table = self._source.table(name)
            engram = PackedEngram(table, self._source.matrix(name + "wkv"), gate)
        return PackedLayer(
            attn_site=self._site(prefix, "attn"),
            attn=self._attention(layer, prefix + "attn."),
            ffn_site=self._site(prefix, "ffn"),
            moe=self._moe(layer, prefix + "ffn.", experts),
            engram=engram,
        )

    def _site(self, prefix: str, site: str) -> PackedSite:
        streams, get = self._config.hc_mult, self._source.value
        name = f"{prefix}hc_{site}_"
        scale = get(name + "scale")
        sizes = torch.tensor([streams, streams, streams * streams], device=scale.device)
        spread = scale.repeat_interleave(sizes)
        return PackedSite(
            fn=(get(name + "fn") * spread[:, None]).contiguous(),
            base=get(name + "base"),
            norm=get(f"{prefix}{site}_norm.weight"),
        )

    def _attention(self, layer: Layer, name: str) -> PackedAttention:
        get, matrix = self._source.value, self._source.matrix
        return PackedAttention(
            wq_a_wkv=join([matrix(name + "wq_a"), matrix(name + "wkv")]),
            q_norm=get(name + "q_norm.weight"),
            kv_norm=get(name + "kv_norm.weight"),
            wq_b=matrix(name + "wq_b"),
            wo_a=matrix(name + "wo_a"),
            wo_b=matrix(name + "wo_b"),
            sink=get(name + "attn_sink"),
            compressor=self._compressor(layer, name + "compressor.")
            if layer.owns_entries
            else None,
            indexer=self._indexer(name + "indexer.") if layer.owns_index else None,
            index_keys=self._index_keys(layer, name + "indexer.")
            if layer.owns_index_keys
            else None,
        )

    def _compressor(self, layer: Layer, name: str) -> PackedCompressor:
        parts = [self._source.matrix(name + "wkv")]
        if layer.ratio > 1:
            parts.append(self._source.matrix(name + "wgate"))
        ape = None if self._config.is_v41 else self._source.value(name + "ape")
        return PackedCompressor(join(parts), ape, self._source.value(name + "norm.weight"))

    def _indexer(self, name: str) -> PackedIndexer:
        c = self._config
        scale = c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        weights = self._source.matrix(name + "weights_proj")
        # Only the order of scores counts. A power of two near their scale leaves bfloat16 weights
        # exact; as float32, 64 of them would cost a step of 64 rows as much as a layer does.
        data = weights.data * 2.0 ** math.floor(math.log2(scale))
        return PackedIndexer(self._source.matrix(name + "wq_b"), Matrix("plain", data))

    def _index_keys(self, layer: Layer, name: str) -> PackedIndexKeys:
        if self._config.is_v41:
            norm = self._source.value(name + "k_norm.weight")
            return PackedIndexKeys(None, self._source.matrix(name + "wk"), norm)
        compressor = self._compressor(layer, name + "compressor.")
        return PackedIndexKeys(compressor, None, compressor.norm)

    def _moe(self, layer: Layer, name: str, count: int) -> PackedMoe:
        c, get, matrix = self._config, self._source.value, self._source.matrix
        bias = bias_vl = tid2eid = None
        if layer.hash_routed:
            tid2eid = get(name + "gate.tid2eid").to(torch.int32)
        else:
            bias = get(name + "gate.bias")
            # Drafts hold no image; whether their stages have this bias is not published.
            is_draft = layer.index >= c.num_hidden_layers
            if c.image_token_id is not None and c.is_v41 and not is_draft:
                bias_vl = get(name + "gate.bias_vl")
        shared = name + "shared_experts."
        paged = self._placement.is_paged(layer.index)
        source = self._source.on_host() if paged else self._source

        def read(expert: int) -> tuple[Matrix, Matrix]:
            one = f"{name}experts.{expert}."
            return (
                join([source.matrix(one + "w1"), source.matrix(one + "w3")]),
                source.matrix(one + "w2"),
            )

        return PackedMoe(
            gate=get(name + "gate.weight").to(self._plain),
            bias=bias,
            bias_vl=bias_vl,
            tid2eid=tid2eid,
            experts=self._placement.place(layer.index, read, count, threads=source.threads),
            shared13=join([matrix(shared + "w1"), matrix(shared + "w3")]),
            shared2=matrix(shared + "w2"),
        )


def join(parts: Sequence[Matrix]) -> Matrix:
    """Put matrices of one input below each other, as they are stored if that can be."""
    first = parts[0]
    alike = all(p.kind == first.kind and p.block == first.block for p in parts)
    if alike and first.kind in ("fp8", "fp8_block"):
        alike = all(p.shape[0] % p.block == 0 for p in parts[:-1])
    if not alike:
        wide = any(p.kind == "plain" and p.data.dtype == torch.float32 for p in parts)
        dtype = torch.float32 if wide else torch.bfloat16
        return Matrix("plain", torch.cat([dequantise(p, dtype) for p in parts]))
    if first.kind == "plain":
        wide = any(p.data.dtype == torch.float32 for p in parts)
        dtype = torch.float32 if wide else torch.bfloat16
        return Matrix("plain", torch.cat([p.data.to(dtype) for p in parts]))
    others = [p.tensors for p in parts[1:]]
    return first.of(
        {
            name: on_bytes(_below, tensor, [other[name] for other in others])
            for name, tensor in first.tensors.items()
        }
    )


def _below(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor, *(other.view(tensor.dtype) for other in others)])
