"""Makes models of Qwen3-MoE: of a checkpoint's weights, or of weights drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from engine.kernels.ops import Implementation, ops
from engine.model.placement import Placement
from engine.model.qwen3 import Qwen3Model
from engine.model.qwen3_checkpoint import QwenCheckpoint
from engine.model.qwen3_random import QwenRandom
from engine.qwen3_config import Qwen3Config


def load_qwen3(
    path: Path | str,
    *,
    kernels: Implementation,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    max_model_len: int | None = None,
    slots: Mapping[int, int] | None = None,
    host_bytes: int | None = None,
    pins: Mapping[int, Sequence[int]] | None = None,
) -> Qwen3Model:
    """Load a checkpoint of the official layout.

    Args:
        path: its folder.
        kernels: "torch" or "triton".
        device: where the weights go.
        dtype: of weights and activations.
        max_model_len: positions that will be used; the model's own context by default.
        slots: layer -> GPU slots of its experts, for layers whose experts are paged.
        host_bytes: most host memory of their experts; the files serve what exceeds it.
        pins: layer -> experts of a paged layer that stay on the device.

    Raises:
        ConfigError: config.json cannot be served.
        EngineError: the files do not hold what it asks for.
    """
    path, where = Path(path), torch.device(device)
    config = Qwen3Config.from_file(path)
    return Qwen3Model(
        config,
        QwenCheckpoint(path, config, where),
        Placement(slots, device=where, host_bytes=host_bytes, pins=pins),
        ops(kernels),
        max_model_len=max_model_len or config.max_position_embeddings,
        dtype=dtype,
    )


def random_qwen3(
    config: Qwen3Config,
    *,
    kernels: Implementation,
    device: torch.device | str,
    max_model_len: int,
    seed: int = 0,
    slots: Mapping[int, int] | None = None,
    pins: Mapping[int, Sequence[int]] | None = None,
    fp8: bool = False,
) -> Qwen3Model:
    """Draw a model of a shape from a seed; arguments as `load_qwen3` and QwenRandom."""
    where = torch.device(device)
    return Qwen3Model(
        config,
        QwenRandom(config, where, seed, fp8=fp8),
        Placement(slots, device=where, pins=pins),
        ops(kernels),
        max_model_len=max_model_len,
    )
