"""Reads a checkpoint of the official layout and makes a Model of it.

Only headers are read to judge a checkpoint: every tensor must be expected, of the right shape and
of a type its role accepts, and every expected tensor must be there. All problems are reported
together. Files are mapped, so that a tensor nobody runs costs nothing and Engram tables stay on
disk.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import torch
from torch import Tensor

from engine.api import EngineError, listed
from engine.config import ModelConfig
from engine.model import names, quant
from engine.model.engram import EngramTable, Ints, fold_table
from engine.model.names import ACCEPTED, TensorSpec, scale_name, scale_shape, stored_shape
from engine.model.v4 import Model
from engine.model.weights import Assembler

RoundTrips = Literal["auto", "on", "off"]
#: Pages of each weight file that its fingerprint reads.
SAMPLES = 256
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I64": torch.int64,
    "I32": torch.int32,
}


class CheckpointError(EngineError):
    """A checkpoint that does not hold what its configuration asks for.

    Args:
        path: its folder.
        problems: one sentence per problem: tensor, expected, seen. The text has the first of them.
    """

    def __init__(self, path: Path, problems: Sequence[str]) -> None:
        super().__init__(f"{path}: {listed(problems)}")
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies: file, type in safetensors' spelling, shape, first byte, last + 1."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.end - self.begin


class Checkpoint:
    """The files of a checkpoint folder, mapped on demand.

    Attributes:
        path: the folder.
        config: its configuration.
        tensors: name -> place, of everything the files hold.

    Args:
        path: folder with config.json and model*.safetensors (model.safetensors.index.json is
            checked when present).

    Raises:
        ConfigError: config.json cannot be served.
        CheckpointError: files are absent, damaged, or contradict the index.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = ModelConfig.from_file(self.path)
        files = sorted(self.path.glob("model*.safetensors"))
        if not files:
            raise CheckpointError(self.path, ["expected model*.safetensors, got no such file"])
        self.tensors: dict[str, Stored] = {}
        problems = []
        for file in files:
            for name, stored in _header(self.path, file):
                if name in self.tensors:
                    problems.append(f"{name}: in {self.tensors[name].file.name} and {file.name}")
                self.tensors[name] = stored
        problems += self._index_problems()
        if problems:
            raise CheckpointError(self.path, problems)
        self._maps: dict[Path, np.memmap[Any, np.dtype[np.uint8]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(stored.nbytes for stored in self.tensors.values())

    def fingerprint(self) -> bytes:
        """Name configuration and weights, without reading them all: 32 bytes.

        Covers config.json, tokenizer.json (Engram folds ids by it), every tensor's name, type,
        shape and place, and the bytes of SAMPLES pages spread over each file. Training changes
        every page; a tool that changes single weights and nothing else may go unnoticed.
        """
        digest = hashlib.blake2b(digest_size=32)
        for name in ("config.json", "tokenizer.json"):
            file = self.path / name
            digest.update(file.read_bytes() if file.exists() else b"")
        for name, stored in sorted(self.tensors.items()):
            place = (name, stored.dtype, stored.shape, stored.file.name, stored.begin)
            digest.update(repr(place).encode())
        sample_pages(digest, {stored.file for stored in self.tensors.values()})
        return digest.digest()

    def _index_problems(self) -> Iterator[str]:
        index = self.path / "model.safetensors.index.json"
        if not index.exists():
            return
        try:
            files = orjson.loads(index.read_bytes())["weight_map"]
            entries = list(files.items())
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            yield f"{index.name}: expected an object with weight_map"
            return
        for name, file in entries:
            seen = self.tensors.get(name)
            if seen is None or seen.file.name != file:
                got = "nothing" if seen is None else seen.file.name
                yield f"{name}: expected in {file} by the index, got {got}"

    def problems(self) -> list[str]:
        """Everything that keeps this checkpoint from being loaded, one sentence each."""
        found: list[str] = []
        specs = names.tensor_specs(self.config)
        known = set(specs)
        for name, spec in specs.items():
            stored = self.tensors.get(name)
            if stored is None:
                if not spec.optional:
                    found.append(f"{name}: missing, expected {list(spec.shape)}")
                continue
            found += self._tensor_problems(name, spec, stored)
            if stored.dtype in ("F8_E4M3", "I8"):
                known.add(scale_name(name))
        for name in self.tensors:
            if name not in known and not names.is_vision(name):
                seen = self.tensors[name]
                found.append(f"{name}: unknown, {seen.dtype} {list(seen.shape)}")
        return found

    def _tensor_problems(self, name: str, spec: TensorSpec, stored: Stored) -> Iterator[str]:
        if stored.dtype not in ACCEPTED[spec.role]:
            accepted = ", ".join(ACCEPTED[spec.role])
            yield f"{name}: expected one of {accepted}, got {stored.dtype}"
            return
        shape = stored_shape(spec, stored.dtype)
        if stored.shape != shape:
            yield f"{name}: expected {list(shape)} {stored.dtype}, got {list(stored.shape)}"
        if stored.dtype not in ("F8_E4M3", "I8"):
            return
        block = self.config.weight_block_size
        if block is None:
            yield f"{name}: {stored.dtype} needs quantization_config.weight_block_size, got nothing"
            return
        scale, wanted = self.tensors.get(scale_name(name)), scale_shape(spec, stored.dtype, block)
        if scale is None:
            yield f"{scale_name(name)}: missing, expected {list(wanted)} for {stored.dtype} {name}"
        elif scale.dtype not in names.SCALE_DTYPES or scale.shape != wanted:
            yield (
                f"{scale_name(name)}: expected {list(wanted)} {' or '.join(names.SCALE_DTYPES)}, "
                f"got {list(scale.shape)} {scale.dtype}"
            )

    def unused(self) -> dict[str, str]:
        """Name -> reason of the tensors that are present and not run."""
        specs = names.tensor_specs(self.config)
        found = {}
        for name in self.tensors:
            if names.is_vision(name):
                found[name] = names.VISION_UNUSED
                continue
            weight = name if name in specs else name.removesuffix("scale") + "weight"
            if weight in specs and specs[weight].unused:
                found[name] = specs[weight].unused
        return found

    def raw(self, name: str) -> Tensor:
        """Map a tensor as it is stored; copy it before writing."""
        stored = self.tensors[name]
        if stored.file not in self._maps:
            # Mode "c" maps privately: torch refuses to wrap memory that is read-only.
            self._maps[stored.file] = np.memmap(stored.file, np.uint8, "c")
        data = torch.from_numpy(self._maps[stored.file][stored.begin : stored.end])
        if stored.begin % _DTYPES[stored.dtype].itemsize:
            data = data.clone()  # safetensors promises no alignment
        return data.view(_DTYPES[stored.dtype]).view(stored.shape)

    def get(self, name: str) -> Tensor:
        """Values of a tensor in its logical shape: float32, or integers for ids."""
        raw = self.raw(name)
        if raw.dtype == torch.int8:
            return quant.dequantise_fp4(raw, self.raw(scale_name(name)), names.FP4_GROUP)
        if raw.dtype == quant.E4M3:
            block = self.config.weight_block_size
            assert block is not None
            return quant.dequantise_fp8(raw, self.raw(scale_name(name)), block)
        return raw if not raw.dtype.is_floating_point else raw.float()

    def table(self, prefix: str) -> EngramTable:
        """Engram table of a layer, left on disk."""
        name = prefix + "embed.weight"
        raw = self.raw(name)
        scale = self.raw(scale_name(name)).view(torch.uint8) if raw.dtype == quant.E4M3 else None
        return EngramTable(raw, scale)


def load_model(
    path: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    round_trips: RoundTrips = "auto",
) -> Model:
    """Load a checkpoint of the official layout.

    Args:
        path: its folder.
        device: where the weights go; Engram tables stay mapped on the host.
        dtype: of the linears: float32, bfloat16, or float64 (for tests; all other maths follows).
        round_trips: whether activations, caches and index queries are rounded to FP8/FP4 as the
            official engine does; "auto" does so iff config.json has a quantization_config.

    Raises:
        ConfigError: config.json cannot be served.
        CheckpointError: listing every missing, misshapen, mistyped and unknown tensor.
        EngineError: the dtype is none of the three, or Engram's tokenizer.json is unusable.
    """
    if dtype not in COMPUTE_DTYPES:
        accepted = ", ".join(str(d) for d in COMPUTE_DTYPES)
        raise EngineError(f"dtype: expected one of {accepted}, got {dtype}")
    checkpoint, fold = open_checkpoint(path)
    config = checkpoint.config
    assembler = Assembler(config, checkpoint.get, checkpoint.table, dtype, torch.device(device))
    return Model(
        config,
        assembler.build(),
        fold=fold,
        round_trips=config.is_quantised if round_trips == "auto" else round_trips == "on",
        unused=checkpoint.unused(),
    )


def sample_pages(digest: hashlib.blake2b, files: Iterable[Path]) -> None:
    """Add SAMPLES pages spread over each file to a digest, the files in order of their paths."""
    for file in sorted(files):
        size = file.stat().st_size
        with file.open("rb") as opened:
            for sample in range(SAMPLES):
                opened.seek(size * sample // SAMPLES)
                digest.update(opened.read(4096))


def open_checkpoint(path: Path | str) -> tuple[Checkpoint, Ints | None]:
    """Open a checkpoint to make a model of it.

    Returns:
        the checkpoint, judged, and what Engram folds its token ids to, None without Engram.

    Raises:
        ConfigError: config.json cannot be served.
        CheckpointError: listing every missing, misshapen, mistyped and unknown tensor.
        EngineError: Engram's tokenizer.json is unusable.
    """
    checkpoint = Checkpoint(path)
    if problems := checkpoint.problems():
        raise CheckpointError(checkpoint.path, problems)
    config = checkpoint.config
    if not config.engram:
        return checkpoint, None
    tokenizer, most = checkpoint.path / "tokenizer.json", config.engram.compressed_vocab_size
    return checkpoint, fold_table(tokenizer, config.vocab_size, most)


def _header(folder: Path, file: Path) -> Iterator[tuple[str, Stored]]:
    """Names and places in one safetensors file."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(folder, [f"{file.name}: not a safetensors file"])
        try:
            header = orjson.loads(opened.read(length))
        except orjson.JSONDecodeError:
            raise CheckpointError(folder, [f"{file.name}: not a safetensors file"]) from None
    header.pop("__metadata__", None)
    problems = []
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if dtype in _DTYPES and end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
            problems.append(f"{name}: {file.name} gives {end - begin} bytes for {dtype} {shape}")
        if end > size:
            problems.append(f"{name}: ends at byte {end} of {file.name}, which has {size}")
        yield name, Stored(file, dtype, shape, begin, end)
    if problems:
        raise CheckpointError(folder, problems)
