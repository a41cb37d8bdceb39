"""Weights of Qwen3-MoE drawn from a seed, for benchmarks of geometries that no machine stores."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.model.quant import quantise_fp8
from engine.model.qwen3_names import tensor_shapes
from engine.qwen3_config import Qwen3Config

#: Side of an FP8 block of drawn experts.
FP8_BLOCK = 128


class QwenRandom:
    """Weights drawn from a seed and each tensor's name, about 1 / sqrt(K) wide.

    Args:
        config: of the model.
        device: where tensors go.
        seed: of all draws.
        fp8: whether experts are FP8 in blocks of FP8_BLOCK with power-of-two scales, the form that
            the kernels read; bfloat16 otherwise.
    """

    threads = 1

    def __init__(
        self, config: Qwen3Config, device: torch.device, seed: int = 0, *, fp8: bool = False
    ) -> None:
        self._fp8 = fp8
        self._shapes = tensor_shapes(config)
        self._device = device
        self._seed = seed

    def get(self, name: str) -> Tensor:
        """Draw a tensor, bfloat16."""
        shape = self._shapes[name]
        key = np.frombuffer(f"{self._seed} {name}".encode(), np.uint8)
        seed = int(np.random.SeedSequence(key.tolist()).generate_state(1, np.uint64)[0] >> 1)
        generator = torch.Generator(self._device).manual_seed(seed)
        noise = torch.randn(shape, generator=generator, device=self._device, dtype=torch.bfloat16)
        if len(shape) == 1:
            return 1 + 0.1 * noise
        return noise if name.endswith("embed_tokens.weight") else noise * shape[-1] ** -0.5

    def linear(self, name: str) -> Matrix:
        """Draw a linear."""
        values = self.get(name + ".weight")
        if not (self._fp8 and ".experts." in name):
            return Matrix("plain", values)
        data, scale = quantise_fp8(values.float(), FP8_BLOCK)
        return Matrix("fp8", data, scale.view(torch.uint8), FP8_BLOCK)

    def on_host(self) -> QwenRandom:
        """Itself, as engine.model.sources.RandomSource."""
        return self
