"""Which tensors the pools are made of: the one table that the pools and the memory plan read.

Shapes follow from the configuration alone (model.md 3). Knows nothing of tensors: no torch here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.config import Layer, ModelConfig
from engine.plan.records import Form, Forms, record_of

Group = Literal[
    "window", "entries", "index_keys", "state", "index_state", "draft", "carry", "history"
]
#: Who drafts tokens, and so needs state of its own: nobody, DSpark's stages or MTP's.
Drafting = Literal["off", "dspark", "mtp"]
#: "cache": what the engine's dtype is; "bytes": records of a narrow form (engine.plan.records);
#: "state": float32 at least, since pending rows are summed up much later and bfloat16 there costs
#: accuracy (model.md 7); "ids": int64.
Kind = Literal["cache", "bytes", "state", "ids"]
#: Where a tensor may begin in the arena, in bytes: kernels load 16 at a time, whole lines are 128.
ALIGNMENT = 256
BLOCK_GROUPS: tuple[Group, ...] = ("entries", "index_keys")


@dataclass(frozen=True, slots=True)
class PoolTensor:
    """One tensor of the pools, without its first dimension.

    Args:
        group: what it holds; see engine.device.kvpool.KVPool.
        layer: its owner, a draft stage for "draft" and "carry"; -1 for the history, which belongs
            to the model.
        shape: of one slot's or one block's part.
        kind: of its elements.
    """

    group: Group
    layer: int
    shape: tuple[int, ...]
    kind: Kind

    @property
    def per_block(self) -> bool:
        """Whether there is one part for each block; else for each slot."""
        return self.group in BLOCK_GROUPS

    def nbytes(self, itemsize: int) -> int:
        """Bytes of one slot's or one block's part.

        Args:
            itemsize: bytes of an element of the engine's dtype.
        """
        size = {"cache": itemsize, "bytes": 1, "state": max(itemsize, 4), "ids": 8}[self.kind]
        return math.prod(self.shape) * size


def ring_rows(layer: Layer) -> int:
    """Pending rows a compressor keeps per slot: its open group and, with overlap, the one before."""
    return layer.ratio * (2 if layer.overlap else 1)


def row_of(config: ModelConfig, form: Form, width: int, itemsize: int) -> tuple[int, Kind]:
    """Size and kind of the elements that one row of cached values takes.

    Args:
        config: of the model.
        form: of the row.
        width: values of the row.
        itemsize: bytes of an element of the engine's dtype.
    """
    record = record_of(form, width, config.qk_rope_head_dim, itemsize)
    return (width, "cache") if record is None else (record.nbytes, "bytes")


def pool_tensors(
    config: ModelConfig,
    block_size: int,
    itemsize: int,
    forms: Forms,
    drafting: Drafting = "off",
    *,
    ring_history: bool = False,
) -> Iterator[PoolTensor]:
    """Every tensor of the pools, layer by layer.

    Args:
        config: of the model.
        block_size: tokens a block covers; a multiple of every compress ratio.
        itemsize: bytes of an element of the engine's dtype.
        forms: of cached values.
        drafting: who drafts tokens.
        ring_history: whether ids of the history lie in a ring, which has a place more.
    """
    head, index = config.head_dim, config.index_head_dim
    window, window_kind = row_of(config, forms.window, head, itemsize)
    entry, entry_kind = row_of(config, forms.entries, head, itemsize)
    key, key_kind = row_of(config, forms.index, index, itemsize)
    for layer in config.layers:
        at = layer.index
        yield PoolTensor("window", at, (config.sliding_window, window), window_kind)
        if not layer.owns_entries:
            continue
        per_block, halves = block_size // layer.ratio, 2 if layer.overlap else 1
        yield PoolTensor("entries", at, (per_block, entry), entry_kind)
        if layer.ratio > 1:
            rows = ring_rows(layer)
            yield PoolTensor("state", at, (rows, 2 * halves * head), "state")
            if layer.owns_index_keys and not config.is_v41:
                yield PoolTensor("index_state", at, (rows, 2 * halves * index), "state")
        if layer.owns_index_keys:
            yield PoolTensor("index_keys", at, (per_block, key), key_kind)
    for stage in range(config.num_nextn_predict_layers if drafting != "off" else 0):
        yield PoolTensor("draft", stage, (config.sliding_window, window), window_kind)
        if drafting == "mtp":
            yield PoolTensor("carry", stage, (config.hc_mult * config.hidden_size,), "cache")
    history = config.engram.history_len + ring_history if config.engram else 0
    yield PoolTensor("history", -1, (history,), "ids")


def arena(
    parts: Sequence[PoolTensor], num_blocks: int, num_slots: int, itemsize: int
) -> tuple[list[int], int]:
    """Place tensors in one run of bytes.

    Args:
        parts: of the pools.
        num_blocks: blocks, the dummy included.
        num_slots: slots, the dummy included.
        itemsize: bytes of an element of the engine's dtype.

    Returns:
        where each begins, a multiple of ALIGNMENT, and the bytes of all: those of the tensors and
        ALIGNMENT for each, whatever is needed of it, so that a block more costs what a block has.
    """
    starts, end, total = [], 0, 0
    for part in parts:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        nbytes = (num_blocks if part.per_block else num_slots) * part.nbytes(itemsize)
        starts.append(start)
        end, total = start + nbytes, total + nbytes + ALIGNMENT
    return starts, total


def layout_fingerprint(config: ModelConfig, block_size: int, dtype: str, forms: Forms) -> bytes:
    """Name how state lies in the pools; differs where a saved slot or block would be misread.

    Args:
        config: of the model.
        block_size: tokens a block covers.
        dtype: of "cache" elements, as torch spells it.
        forms: of cached values.

    Returns:
        32 bytes.
    """
    itemsize = 4 if dtype.endswith("float32") else 2
    parts = tuple(pool_tensors(config, block_size, itemsize, forms))
    text = repr((block_size, dtype, forms, parts))
    return hashlib.blake2b(text.encode(), digest_size=32).digest()
