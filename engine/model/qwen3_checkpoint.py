"""Reads checkpoints of Qwen3-MoE's official layout, plain or quantised by other publishers' methods.

To judge a checkpoint, headers are read and, of INT4, some experts, which must repack alike in any
company. All problems of tensors are reported together. Files are mapped.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.model.checkpoint import CheckpointError, sample_pages
from engine.model.placement import FILLERS
from engine.model.quantised import read_linear, repack_experts, repacker, stored_shapes
from engine.model.qwen3_names import tensor_shapes
from engine.qwen3_config import Qwen3Config


class QwenCheckpoint:
    """Weights of a folder of safetensors files in the official layout, plain or quantised.

    Args:
        path: the folder.
        config: of the model.
        device: where tensors go.

    Raises:
        CheckpointError: files are absent or damaged, or tensors missing, misshapen or unknown.
        EngineError: experts' stored forms depend on each other.
    """

    threads = FILLERS

    def __init__(self, path: Path, config: Qwen3Config, device: torch.device) -> None:
        self._path = path
        self._device = device
        self._how = config.quantisation
        self._files: dict[str, Any] = {}
        found: dict[str, tuple[int, ...]] = {}
        files = sorted(path.glob("model*.safetensors"))
        if not files:
            raise CheckpointError(path, ["expected model*.safetensors, got no such file"])
        for file in files:
            try:
                # Kept open: mapped, and its header is read once.
                opened: Any = safe_open(file, framework="pt")
            except SafetensorError as error:
                problem = f"{file.name}: not a safetensors file: {error}"
                raise CheckpointError(path, [problem]) from None
            for name in opened.keys():  # noqa: SIM118 - the handle is no mapping
                if not name.endswith(_UNREAD):
                    self._files[name] = opened
                    found[name] = tuple(opened.get_slice(name).get_shape())
        wanted = self._wanted(config, found)
        problems = [
            f"{name}: unknown, {list(shape)}"
            if name not in wanted
            else f"{name}: expected {list(wanted[name])}, got {list(shape)}"
            for name, shape in found.items()
            if wanted.get(name) != shape
        ]
        problems += [
            f"{n}: missing, expected {list(s)}" for n, s in wanted.items() if n not in found
        ]
        if problems:
            raise CheckpointError(path, problems)
        self._prove(config)

    def _wanted(
        self, config: Qwen3Config, found: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """Shapes to expect; a linear that is not there as a plain one is there as quantised."""
        wanted: dict[str, tuple[int, ...]] = {}
        for name, shape in tensor_shapes(config).items():
            linear = name.removesuffix("weight")
            how = self._how
            if how is None or len(shape) != 2 or not self._is_quantised(linear, found):
                wanted[name] = shape
                continue
            stored = stored_shapes(how, *shape)
            # a scalar is stored as [] or [1]
            wanted |= {linear + n: s or found.get(linear + n, ()) for n, s in stored.items()}
        return wanted

    def _is_quantised(self, linear: str, names: Iterable[str]) -> bool:
        assert self._how is not None
        return any(linear + n in names for n in stored_shapes(self._how, 8, 8) if n != "weight")

    def _prove(self, config: Qwen3Config) -> None:
        """Show for some experts that repacking one does not depend on others."""
        if self._how is None or not self._how.method.startswith("int4"):
            return
        count = min(config.num_experts, 2 * _PROOF + 1)
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = [f"model.layers.0.mlp.experts.{e}.{part}" for e in range(count)]
            if self._is_quantised(names[0] + ".", self._files):
                repack_experts(repacker(self._how), [self._raw(n) for n in names], chunk=_PROOF)

    def on_host(self) -> QwenCheckpoint:
        """Give tensors where the files are mapped."""
        other = copy.copy(self)
        other._device = torch.device("cpu")
        return other

    def get(self, name: str) -> Tensor:
        """Read a tensor."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.to(self._device)

    def fingerprint(self) -> bytes:
        """Name configuration and weights, without reading them all: 32 bytes.

        Covers config.json, every tensor's name and shape, and pages spread over each file.
        """
        digest = hashlib.blake2b(digest_size=32)
        digest.update((self._path / "config.json").read_bytes())
        for name in sorted(self._files):
            shape = self._files[name].get_slice(name).get_shape()
            digest.update(f"{name} {shape}".encode())
        sample_pages(digest, self._path.glob("model*.safetensors"))
        return digest.digest()

    def linear(self, name: str) -> Matrix:
        """Read a linear, quantised or plain."""
        if self._how is None or not self._is_quantised(name + ".", self._files):
            return Matrix("plain", self.get(name + ".weight"))
        found = read_linear(self._how, self._raw(name))
        return found.of({n: t.to(self._device) for n, t in found.tensors.items()})

    def _raw(self, name: str) -> dict[str, Tensor]:
        assert self._how is not None
        stored = stored_shapes(self._how, 8, 8)
        return {n: self._files[f"{name}.{n}"].get_tensor(f"{name}.{n}") for n in stored}


#: Tensors of quantised checkpoints that nobody here reads: order of columns (always that of the
#: file), and scales of activations, which are not quantised.
_UNREAD = (".g_idx", ".input_scale")
#: Experts that are repacked together for the proof.
_PROOF = 4
