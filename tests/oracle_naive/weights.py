"""Official tensors to float64 arrays: bf16 and fp32 as they are, FP8 and packed FP4 decoded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from tests.oracle_naive.formats import E4M3, Array, ue8m0, unpack_e2m1


class Weights(dict[str, Array]):
    """Name -> float64 array.

    Attributes:
        quantised: names of the matrices that were stored in FP8 or FP4. A linear layer quantises
            its input exactly when its matrix is one of them (wo_a apart).
    """

    def __init__(self, arrays: Mapping[str, Array], quantised: frozenset[str]) -> None:
        super().__init__(arrays)
        self.quantised = quantised

    def edited(self, changes: Mapping[str, Array]) -> Weights:
        return Weights({**self, **changes}, self.quantised)


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.contiguous().view(torch.uint8).numpy()


def _decode(weight: torch.Tensor, scale: torch.Tensor) -> Array:
    codes, factors = _bytes(weight), ue8m0(_bytes(scale))
    if weight.dtype == torch.float8_e4m3fn:
        values = E4M3[codes]
    elif weight.dtype in (torch.int8, torch.uint8):
        values = unpack_e2m1(codes)
    else:
        raise ValueError(f"a scale belongs to FP8 or packed FP4 weights, got {weight.dtype}")
    # the block of a scale: the tensors' own sizes tell it, but for a last, partial block
    block = [
        next(b for b in (1, 16, 32, 64, 128) if -(-size // b) == count)
        for size, count in zip(values.shape, factors.shape, strict=True)
    ]
    wide = factors.repeat(block[0], axis=0).repeat(block[1], axis=1)
    return values * wide[: values.shape[0], : values.shape[1]]


def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Weights:
    arrays, quantised = {}, set()
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        scale = tensors.get(f"{stem}.scale")
        if name.endswith(".scale") and f"{name.removesuffix('.scale')}.weight" in tensors:
            continue  # read with its matrix
        if name.endswith(".weight") and scale is not None:
            arrays[name] = _decode(tensor, scale)
            quantised.add(name)
        else:
            arrays[name] = tensor.to(torch.float64).numpy()
    return Weights(arrays, frozenset(quantised))


def load(directory: Path) -> Weights:
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(shard)
    return from_tensors(tensors)
