"""Makes fast models: of a checkpoint's weights as they are stored, or of weights drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from engine.config import ModelConfig
from engine.kernels.ops import Implementation, ops
from engine.model.checkpoint import RoundTrips, open_checkpoint
from engine.model.fast import FastModel
from engine.model.packing import pack
from engine.model.placement import Placement
from engine.model.sources import CheckpointSource, RandomSource


def load_fast_model(
    path: Path | str,
    *,
    kernels: Implementation,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    round_trips: RoundTrips = "auto",
    max_model_len: int | None = None,
    slots: Mapping[int, int] | None = None,
    host_bytes: int | None = None,
    pins: Mapping[int, Sequence[int]] | None = None,
) -> FastModel:
    """Load a checkpoint of the official layout, in the form it is stored in.

    Args:
        path: its folder.
        kernels: "torch" or "triton".
        device: where the weights go.
        dtype: of activations: bfloat16 or float32.
        round_trips: as in engine.model.checkpoint.load_model.
        max_model_len: positions that will be used; the model's own context by default.
        slots: layer -> GPU slots of its experts, for layers whose experts are paged.
        host_bytes: most host memory of their experts; the files serve what exceeds it.
        pins: layer -> experts of a paged layer that stay on the device.

    Raises:
        ConfigError: config.json cannot be served.
        CheckpointError: listing every missing, misshapen, mistyped and unknown tensor.
        EngineError: Engram's tokenizer.json is unusable.
    """
    checkpoint, fold = open_checkpoint(path)
    config, where = checkpoint.config, torch.device(device)
    source = CheckpointSource(checkpoint, where, dtype)
    return FastModel(
        config,
        pack(
            config,
            source,
            Placement(slots, device=where, host_bytes=host_bytes, pins=pins),
            plain=dtype,
        ),
        ops(kernels),
        fold=fold,
        round_trips=config.is_quantised if round_trips == "auto" else round_trips == "on",
        max_model_len=max_model_len or config.max_position_embeddings,
        dtype=dtype,
    )


def random_fast_model(
    config: ModelConfig,
    *,
    kernels: Implementation,
    device: torch.device | str,
    max_model_len: int,
    seed: int = 0,
    slots: Mapping[int, int] | None = None,
) -> FastModel:
    """Draw a model of a shape from a seed; token ids are folded to themselves.

    Args:
        config: the shape.
        kernels: "torch" or "triton".
        device: where the weights go.
        max_model_len: positions that will be used.
        seed: of the weights.
        slots: as in load_fast_model.
    """
    where = torch.device(device)
    fold = np.arange(config.vocab_size) if config.engram else None
    if config.engram and fold is not None:
        fold %= config.engram.compressed_vocab_size
    return FastModel(
        config,
        pack(config, RandomSource(config, where, seed), Placement(slots, device=where)),
        ops(kernels),
        fold=fold,
        round_trips=config.is_quantised,
        max_model_len=max_model_len,
    )
