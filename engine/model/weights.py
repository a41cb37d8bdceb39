"""The weights in the form the forward pass wants them: fused, scaled and placed once, at load.

Linears keep the layout [out, in]. Everything that is not a linear's weight is in the work dtype
(float32, or float64 in tests); linears are in the compute dtype, which may be bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import Layer, ModelConfig
from engine.model.engram import EngramTable

Get = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """One mHC site: fn [S * (S + 2), S * d] with its scales multiplied in, base, site norm [d]."""

    fn: Tensor
    base: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """V4's last mixing: fn [S, S * d] with its scale multiplied in, base [S]."""

    fn: Tensor
    base: Tensor


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Projection [width or 2 * width, d] (kv, then gate), position bias [ratio, 2 * width], norm.

    The bias has zeros on the kv half, so that it is added to a row as it is projected.
    """

    proj: Tensor
    ape: Tensor | None
    norm: Tensor


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """A layer's own choice: queries [Hi * Di, q_lora] and head weights [Hi, d], already scaled."""

    wq_b: Tensor
    head_weights: Tensor


@dataclass(frozen=True, slots=True)
class IndexKeyWeights:
    """What makes index keys: V4 has a compressor, V4.1 a projection of the latent and a norm."""

    compressor: CompressorWeights | None
    wk: Tensor | None
    norm: Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Attention core; wq_a and wkv are one matrix [q_lora + D, d], wo_a is [G, R, H / G * D]."""

    wq_a_wkv: Tensor
    q_norm: Tensor
    kv_norm: Tensor
    wq_b: Tensor
    wo_a: Tensor
    wo_b: Tensor
    sink: Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None
    index_keys: IndexKeyWeights | None


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router and experts; the shared expert is the last of w13 [E + 1, 2 * I, d], w2 [E + 1, I, d].

    w2 is transposed, so that all experts together are one matrix as well.
    """

    gate: Tensor
    bias: Tensor | None
    bias_vl: Tensor | None
    tid2eid: Tensor | None
    w13: Tensor
    w2: Tensor


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """Table, wkv [(S + 1) * d, rows * width], and q weight times k weight [S, d]."""

    table: EngramTable
    wkv: Tensor
    gate: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One backbone layer."""

    attn_site: SiteWeights
    attn: AttentionWeights
    ffn_site: SiteWeights
    moe: MoeWeights
    engram: EngramWeights | None


@dataclass(frozen=True, slots=True)
class Weights:
    """The backbone."""

    embed: Tensor
    head: Tensor
    norm: Tensor
    hc_head: HeadWeights | None
    layers: tuple[LayerWeights, ...]


class Assembler:
    """Builds Weights out of named tensors.

    Args:
        config: of the model.
        get: official name -> float32 (or integer) tensor of the logical shape.
        table: layer prefix -> its Engram table.
        compute: dtype of linears.
        device: where everything but the Engram tables goes.
    """

    def __init__(
        self,
        config: ModelConfig,
        get: Get,
        table: Callable[[str], EngramTable],
        compute: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._get = get
        self._table = table
        self._compute = compute
        self._device = device
        self.work = torch.float64 if compute == torch.float64 else torch.float32

    def build(self) -> Weights:
        """Read every tensor the backbone runs."""
        c = self._config
        head = None
        if not c.is_v41:
            fn = self._float("hc_head_fn") * self._float("hc_head_scale")
            head = HeadWeights(fn, self._float("hc_head_base"))
        return Weights(
            embed=self._float("embed.weight"),
            head=self._float("head.weight"),
            norm=self._float("norm.weight"),
            hc_head=head,
            layers=tuple(self._layer(layer) for layer in c.layers),
        )

    def _float(self, name: str) -> Tensor:
        return self._get(name).to(self._device, self.work).contiguous()

    def _linear(self, *names: str) -> Tensor:
        """Linears that share an input, as one matrix."""
        parts = [self._get(name + ".weight").to(self._device, self._compute) for name in names]
        return torch.cat(parts).contiguous()

    def _layer(self, layer: Layer) -> LayerWeights:
        prefix = f"layers.{layer.index}."
        engram = None
        if layer.engram is not None:
            name = prefix + "engram."
            gate = self._float(name + "q_weight") * self._float(name + "k_weight")
            engram = EngramWeights(self._table(name), self._linear(name + "wkv"), gate)
        return LayerWeights(
            attn_site=self._site(prefix, "attn"),
            attn=self._attention(layer, prefix + "attn."),
            ffn_site=self._site(prefix, "ffn"),
            moe=self._moe(layer, prefix + "ffn."),
            engram=engram,
        )

    def _site(self, prefix: str, site: str) -> SiteWeights:
        streams = self._config.hc_mult
        name = f"{prefix}hc_{site}_"
        sizes = torch.tensor([streams, streams, streams * streams], device=self._device)
        scale = self._float(name + "scale").repeat_interleave(sizes)
        return SiteWeights(
            fn=self._float(name + "fn") * scale[:, None],
            base=self._float(name + "base"),
            norm=self._float(f"{prefix}{site}_norm.weight"),
        )

    def _attention(self, layer: Layer, name: str) -> AttentionWeights:
        c = self._config
        return AttentionWeights(
            wq_a_wkv=self._linear(name + "wq_a", name + "wkv"),
            q_norm=self._float(name + "q_norm.weight"),
            kv_norm=self._float(name + "kv_norm.weight"),
            wq_b=self._linear(name + "wq_b"),
            wo_a=self._linear(name + "wo_a").view(c.o_groups, c.o_lora_rank, -1),
            wo_b=self._linear(name + "wo_b"),
            sink=self._float(name + "attn_sink"),
            compressor=self._compressor(layer, name + "compressor.")
            if layer.owns_entries
            else None,
            indexer=self._indexer(name + "indexer.") if layer.owns_index else None,
            index_keys=self._index_keys(layer, name + "indexer.")
            if layer.owns_index_keys
            else None,
        )

    def _compressor(self, layer: Layer, name: str) -> CompressorWeights:
        # Pooling is in float32 whatever the linears are in (model.md 2.5).
        proj, ape = self._float(name + "wkv.weight"), None
        if layer.ratio > 1:
            proj = torch.cat((proj, self._float(name + "wgate.weight")))
        if not self._config.is_v41:
            bias = self._float(name + "ape")
            ape = torch.cat((torch.zeros_like(bias), bias), 1)
        return CompressorWeights(proj, ape, self._float(name + "norm.weight"))

    def _indexer(self, name: str) -> IndexerWeights:
        c = self._config
        scale = c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        return IndexerWeights(
            wq_b=self._linear(name + "wq_b"),
            head_weights=self._float(name + "weights_proj.weight") * scale,
        )

    def _index_keys(self, layer: Layer, name: str) -> IndexKeyWeights:
        if self._config.is_v41:
            norm = self._float(name + "k_norm.weight")
            return IndexKeyWeights(None, self._float(name + "wk.weight"), norm)
        compressor = self._compressor(layer, name + "compressor.")
        return IndexKeyWeights(compressor, None, compressor.norm)

    def _moe(self, layer: Layer, name: str) -> MoeWeights:
        c = self._config
        experts = [f"{name}experts.{e}." for e in range(c.n_routed_experts)]
        experts.append(name + "shared_experts.")
        down = [self._linear(expert + "w2").t() for expert in experts]
        bias = bias_vl = None
        if not layer.hash_routed:
            bias = self._float(name + "gate.bias")
            if c.image_token_id is not None and c.is_v41:
                bias_vl = self._float(name + "gate.bias_vl")
        ids = self._get(name + "gate.tid2eid") if layer.hash_routed else None
        return MoeWeights(
            gate=self._float(name + "gate.weight"),
            bias=bias,
            bias_vl=bias_vl,
            tid2eid=None if ids is None else ids.to(self._device, torch.int64),
            w13=torch.stack([self._linear(e + "w1", e + "w3") for e in experts]),
            w2=torch.stack(down),
        )
