"""The weights in the form the kernels read them: as stored, packed where the checkpoint packs them.

`engine.model.weights` unfolds everything to one float type for the reference model; here FP8 stays
FP8 and FP4 stays FP4, matrices that share an input lie together, and experts of a layer are one
stack. They come from `engine.model.sources`, put together by `engine.model.packing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

from torch import Tensor

from engine.kernels.formats import Matrix
from engine.model.engram import EngramTable
from engine.model.experts import Experts, PagedExperts, ResidentExperts


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
