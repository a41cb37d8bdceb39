"""Engram's part of a pass of the fast form: n-grams, their lookup and the gate (model.md 2.10)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.config import Engram, Layer
from engine.kernels.engram import Hashes
from engine.kernels.rows import Rows
from engine.model.engram import Ints, NgramHash
from engine.model.flow import Pass
from engine.model.packed import PackedEngram

if TYPE_CHECKING:
    from engine.model.fast import FastModel


@dataclass(frozen=True, slots=True)
class Ngrams:
    """What token ids become rows of the tables by.

    Args:
        fold: int64 [vocab], token id to folded id.
        pad: folded id of the pad.
        hashes: of each layer with a table.
    """

    fold: Tensor
    pad: int
    hashes: tuple[Hashes, ...]

    @classmethod
    def of(cls, engram: Engram, fold: Ints, device: torch.device) -> Ngrams:
        """Put the tables of a configuration on a device.

        Args:
            engram: of the model.
            fold: int64 [vocab], token id to folded id.
            device: of the model.
        """
        hashes = []
        for index in range(len(engram.layer_ids)):
            tables = NgramHash(engram, index).tables()
            hashes.append(Hashes(*(torch.from_numpy(t).to(device) for t in tables)))
        pad = int(fold[engram.pad_token_id])
        return cls(torch.from_numpy(fold).to(device), pad, tuple(hashes))


def add_engram(
    model: FastModel, layer: Layer, w: PackedEngram, streams: Tensor, state: Pass
) -> Tensor:
    """Add what a layer's table knows of each row's n-grams to its streams [T, S, d]."""
    ngrams = model.ngrams
    assert ngrams is not None
    assert layer.engram is not None
    looked_up = model.ops.engram_lookup(
        state.rows,
        ngrams.fold,
        state.pool.history,
        ngrams.hashes[layer.engram],
        w.table.weight,
        w.table.scale,
        pad=ngrams.pad,
        image=model.image,
        dtype=model.dtype,
    )
    projected = model.ops.linear(looked_up, w.wkv, act_group=model.act_group)
    return model.ops.engram_apply(
        streams,
        projected,
        w.gate,
        state.rows,
        eps=model.config.rms_norm_eps,
        image=model.image,
    )


def store_history(model: FastModel, ngrams: Ngrams, rows: Rows, state: Pass) -> None:
    """Store the folded ids of a pass that all layers have run, now or when its rows count.

    Args:
        model: the backbone.
        ngrams: of the model.
        rows: all that the pass began with, also those left out on the way.
        state: the pass.
    """
    store = model.ops.store_history
    state.store(partial(store, rows, ngrams.fold, state.pool.history, image=model.image))
