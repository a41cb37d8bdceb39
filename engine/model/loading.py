"""Makes fast models: of a checkpoint's weights as they are stored, or of weights drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from engine.config import ModelConfig
from engine.kernels.ops import Implementation, ops
from engine.model.checkpoint import Checkpoint, CheckpointError, RoundTrips
from engine.model.engram import Ints, fold_table
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
    checkpoint = Checkpoint(path)
    problems = checkpoint.problems()
    if problems:
        raise CheckpointError(checkpoint.path, problems)
    config = checkpoint.config
    fold: Ints | None = None
    if config.engram:
        tokenizer = checkpoint.path / "tokenizer.json"
        fold = fold_table(tokenizer, config.vocab_size, config.engram.compressed_vocab_size)
    source = CheckpointSource(checkpoint, torch.device(device), dtype)
    return FastModel(
        config,
        pack(config, source, _placement(slots, device, host_bytes, pins), plain=dtype),
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
    fold = np.arange(config.vocab_size) if config.engram else None
    if config.engram and fold is not None:
        fold %= config.engram.compressed_vocab_size
    return FastModel(
        config,
        pack(config, RandomSource(config, torch.device(device), seed), _placement(slots, device)),
        ops(kernels),
        fold=fold,
        round_trips=config.is_quantised,
        max_model_len=max_model_len,
    )


def _placement(
    slots: Mapping[int, int] | None,
    device: torch.device | str,
    host_bytes: int | None = None,
    pins: Mapping[int, Sequence[int]] | None = None,
) -> Placement:
    where = torch.device(device)
    pin = where.type == "cuda"
    return Placement(slots, device=where, pin=pin, host_bytes=host_bytes, pins=pins)
