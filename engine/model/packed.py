"""The weights in the form the kernels read them: as stored, packed where the checkpoint packs them.

`engine.model.weights` unfolds everything to one float type for the reference model; here FP8 stays
FP8 and FP4 stays FP4, matrices that share an input lie together, and experts of a layer are one
stack. Where parts cannot be joined as they are stored (a short last FP8 block in the middle), they
become plain matrices of the same values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.config import Layer, ModelConfig
from engine.kernels.formats import Matrix, dequantise, on_bytes
from engine.kernels.fp4 import stored_codes, stored_scales
from engine.model.checkpoint import Checkpoint
from engine.model.engram import EngramTable
from engine.model.experts import Experts, PagedExperts, ResidentExperts
from engine.model.names import FP4_GROUP, TABLE_GROUP, TensorSpec, scale_name, tensor_specs
from engine.model.placement import FILLERS, Placement


@dataclass(frozen=True, slots=True)
class PackedSite:
    """One mHC site: fn fp32 [S * (S + 2), S * d] and base [S * (S + 2)], scales multiplied in; norm [d]."""

    fn: Tensor
    base: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class PackedHead:
    """V4's last mixing: fn fp32 [S, S * d] with its scale multiplied in, base [S]."""

    fn: Tensor
    base: Tensor


@dataclass(frozen=True, slots=True)
class PackedCompressor:
    """Projection [width or 2 * width, d] (kv, then gate), gate bias fp32 [ratio, width], norm."""

    proj: Matrix
    ape: Tensor | None
    norm: Tensor


@dataclass(frozen=True, slots=True)
class PackedIndexer:
    """A layer's own choice: queries [Hi * Di, q_lora], head weights [Hi, d].

    The weights are scaled by a power of two near their own factor: only the order of scores counts.
    """

    wq_b: Matrix
    head_weights: Matrix


@dataclass(frozen=True, slots=True)
class PackedIndexKeys:
    """What makes index keys: V4's compressor, or V4.1's projection of the latent and its norm."""

    compressor: PackedCompressor | None
    wk: Matrix | None
    norm: Tensor


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention core; wq_a and wkv are one matrix [q_lora + D, d]; wo_a [G * R, H / G * D]."""

    wq_a_wkv: Matrix
    q_norm: Tensor
    kv_norm: Tensor
    wq_b: Matrix
    wo_a: Matrix
    wo_b: Matrix
    sink: Tensor
    compressor: PackedCompressor | None
    indexer: PackedIndexer | None
    index_keys: PackedIndexKeys | None


@dataclass(frozen=True, slots=True)
class PackedMoe:
    """Router, routed experts where they lie, and the shared one: w13 [2 * I, d], w2 [d, I]."""

    gate: Tensor
    bias: Tensor | None
    bias_vl: Tensor | None
    tid2eid: Tensor | None
    experts: Experts
    shared13: Matrix
    shared2: Matrix


@dataclass(frozen=True, slots=True)
class PackedEngram:
    """Table, wkv [(S + 1) * d, rows * width], q weight times k weight [S, d]."""

    table: EngramTable
    wkv: Matrix
    gate: Tensor


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One backbone layer."""

    attn_site: PackedSite
    attn: PackedAttention
    ffn_site: PackedSite
    moe: PackedMoe
    engram: PackedEngram | None


@dataclass(frozen=True, slots=True)
class PackedDspark:
    """DSpark's draft stages: main_proj [d, targets * d], Markov embedding and head [V, rank]."""

    main_proj: Matrix
    main_norm: Tensor
    stages: tuple[PackedLayer, ...]
    norm: Tensor
    hc_head: PackedHead | None
    markov_embed: Tensor
    markov_head: Matrix


@dataclass(frozen=True, slots=True)
class PackedMtp:
    """One MTP stage: e_proj and h_proj [d, d] and their norms, the block, last mixing and norm."""

    e_proj: Matrix
    h_proj: Matrix
    enorm: Tensor
    hnorm: Tensor
    layer: PackedLayer
    hc_head: PackedHead
    norm: Tensor


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The backbone."""

    embed: Tensor
    head: Matrix
    norm: Tensor
    hc_head: PackedHead | None
    layers: tuple[PackedLayer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.nbytes for tensor in _tensors(self))


class Source(Protocol):
    """Where weights come from.

    Attributes:
        threads: that may read matrices at once.
    """

    threads: int

    def on_host(self) -> Source:
        """The same, for what is to lie on the host: on it already where that spares a transfer."""

    def matrix(self, name: str) -> Matrix:
        """Stored form of the matrix `name` (without .weight), on the device."""

    def value(self, name: str) -> Tensor:
        """Values of a tensor on the device: float32, or integers for ids."""

    def table(self, prefix: str) -> EngramTable:
        """Engram table of a layer."""


class CheckpointSource:
    """Weights of a checkpoint of the official layout.

    Args:
        checkpoint: checked already.
        device: where they go.
        plain: dtype that plain matrices wider than it are narrowed to, bfloat16 or float32.
    """

    threads = FILLERS

    def __init__(self, checkpoint: Checkpoint, device: torch.device, plain: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._plain = plain

    def on_host(self) -> CheckpointSource:
        """Give tensors where the files are mapped."""
        return CheckpointSource(self._checkpoint, torch.device("cpu"), self._plain)

    def matrix(self, name: str) -> Matrix:
        """As stored."""
        weight = name + ".weight"
        raw = self._checkpoint.raw(weight)
        if raw.dtype == torch.int8:
            scale = self._scale(weight)
            codes = stored_codes(raw.view(torch.uint8).to(self._device))
            return Matrix("fp4", codes, stored_scales(scale), FP4_GROUP)
        if raw.dtype == torch.float8_e4m3fn:
            block = self._checkpoint.config.weight_block_size
            assert block is not None
            return Matrix("fp8", raw.to(self._device), self._scale(weight), block)
        narrow = raw.dtype == torch.bfloat16 or self._plain == torch.bfloat16
        dtype = torch.bfloat16 if narrow else torch.float32
        return Matrix("plain", raw.to(self._device, dtype))

    def value(self, name: str) -> Tensor:
        """Unfolded to float32."""
        return self._checkpoint.get(name).to(self._device)

    def table(self, prefix: str) -> EngramTable:
        """On the device, as stored."""
        return self._checkpoint.table(prefix).to(self._device)

    def _scale(self, weight: str) -> Tensor:
        return self._checkpoint.raw(scale_name(weight)).view(torch.uint8).to(self._device)


class RandomSource:
    """Weights drawn from a seed and each tensor's name, for benchmarks of geometries that no machine stores.

    Linears are FP8 and routed experts FP4 as in the official checkpoints (bfloat16 if the
    configuration is not quantised), with a spread of about 1 / sqrt(K).

    Args:
        config: of the model.
        device: where they go.
        seed: of all draws.
    """

    threads = 1

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
        self._config = config
        self._device = device
        self._seed = seed
        self._specs = tensor_specs(config)

    def on_host(self) -> RandomSource:
        """Itself: drawing on the device and copying is quicker than drawing on the host."""
        return self

    def matrix(self, name: str) -> Matrix:
        """Draw a matrix in the form official checkpoints store it."""
        spec = self._specs[name + ".weight"]
        rows, columns = spec.shape
        generator = self._generator(name)
        block = self._config.weight_block_size
        exponent = 127 - round(math.log2(columns) / 2)
        if block is None or spec.role not in ("linear", "expert"):
            noise = torch.randn(spec.shape, generator=generator, device=self._device)
            return Matrix("plain", (noise * columns**-0.5).bfloat16())
        if spec.role == "expert":
            data = self._bytes((rows, columns // 2), generator)
            # e2m1 codes drawn evenly have a root mean square of 2.9, so 2 ** -1.5 too much
            scale = self._scales((rows, columns // FP4_GROUP), exponent - 1, generator)
            return Matrix("fp4", data, scale, FP4_GROUP)
        # clearing bit 6 keeps e4m3 below 2 and free of NaN; the root mean square is then 0.7
        data = (self._bytes((rows, columns), generator) & 0xBF).view(torch.float8_e4m3fn)
        shape = (-(-rows // block), -(-columns // block))
        return Matrix("fp8", data, self._scales(shape, exponent + 1, generator), block)

    def value(self, name: str) -> Tensor:
        """Draw a tensor such that every term of the model matters."""
        spec, c = self._specs[name], self._config
        generator = self._generator(name)
        if spec.role == "ids":
            rows = torch.rand(
                (spec.shape[0], c.n_routed_experts), generator=generator, device=self._device
            )
            return rows.topk(spec.shape[1], -1).indices
        noise = torch.randn(spec.shape, generator=generator, device=self._device)
        return _spread(name, spec, noise)

    def table(self, prefix: str) -> EngramTable:
        """Draw FP8 rows."""
        rows, width = self._specs[prefix + "embed.weight"].shape
        generator = self._generator(prefix)
        data = (self._bytes((rows, width), generator) & 0xBF).view(torch.float8_e4m3fn)
        return EngramTable(data, self._scales((rows, -(-width // TABLE_GROUP)), 123, generator))

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
        return torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little"))

    def _bytes(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Draw bytes; eight at a time, since a model has 10^11 of them."""
        count = math.prod(shape)
        words = torch.empty(-(-count // 8), dtype=torch.int64, device=self._device)
        words.random_(-(2**63), None, generator=generator)
        return words.view(torch.uint8)[:count].view(*shape)

    def _scales(self, shape: Sequence[int], middle: int, generator: torch.Generator) -> Tensor:
        """Draw scale bytes middle - 1 .. middle + 1."""
        return torch.randint(
            middle - 1,
            middle + 2,
            tuple(shape),
            dtype=torch.uint8,
            generator=generator,
            device=self._device,
        )


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


def _spread(name: str, spec: TensorSpec, noise: Tensor) -> Tensor:
    """Give noise the mean and spread that a tensor of this name has."""
    if name.endswith(("_scale", "q_weight", "k_weight")):
        return 0.75 + 0.25 * noise.clamp(-1, 1)
    if "norm" in name and len(spec.shape) == 1:
        return 1 + 0.1 * noise
    if name.endswith(("gate.bias", "gate.bias_vl")):
        return 0.1 * noise
    if name.endswith(("attn_sink", "ape", "_base")):
        return 0.5 * noise
    return noise if name == "embed.weight" else noise * spec.shape[-1] ** -0.5


def _tensors(value: object) -> Iterator[Tensor]:
    """Every device tensor of a tree of the dataclasses above."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, ResidentExperts):
        yield from _tensors((value.w13, value.w2))
    elif isinstance(value, PagedExperts):
        yield value.slots
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
