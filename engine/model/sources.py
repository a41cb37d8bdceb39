"""Where packed weights come from: a checkpoint's tensors in their stored form, or draws from a seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.kernels.formats import Matrix
from engine.kernels.fp4 import stored_codes, stored_scales
from engine.model.checkpoint import Checkpoint
from engine.model.engram import EngramTable
from engine.model.names import FP4_GROUP, TABLE_GROUP, TensorSpec, scale_name, tensor_specs
from engine.model.placement import FILLERS


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
