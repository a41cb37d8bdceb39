"""Writes a checkpoint in the official layout: config.json and sharded safetensors with an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.api import listed
from engine.config import ModelConfig
from engine.files import usual_file
from engine.model import quant
from engine.model.names import (
    FP4_GROUP,
    TABLE_GROUP,
    TensorSpec,
    is_vision,
    scale_name,
    tensor_specs,
)

Storage = Literal["f32", "bf16", "fp8", "fp4"]
_FLOAT = {"f32": torch.float32, "bf16": torch.bfloat16}


def save_checkpoint(
    path: Path | str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    storage: Storage = "bf16",
    shards: int = 1,
) -> None:
    """Write config.json, model-XXXXX-of-YYYYY.safetensors and model.safetensors.index.json.

    mHC tensors, sinks, position biases and routing biases are written in float32, ids in int64.
    What remains depends on `storage`.

    Args:
        path: folder, made if absent.
        config: the content of config.json.
        tensors: official name -> float (or integer ids) tensor of the logical shape, no scales.
        storage: "f32" or "bf16" for everything; "fp8" stores linears, experts and Engram tables in
            e4m3 with scales and the rest in bf16; "fp4" does the same with experts in packed e2m1.
        shards: number of files.

    Raises:
        ConfigError: the configuration cannot be served.
        ValueError: a tensor is missing, unknown or misshapen (all are listed), or FP8/FP4 is asked
            for without quantization_config.weight_block_size.
    """
    path = Path(path)
    parsed = ModelConfig.from_dict(config)
    if storage in ("fp8", "fp4") and parsed.weight_block_size is None:
        raise ValueError(f"storage {storage!r} needs quantization_config.weight_block_size")
    specs = tensor_specs(parsed)
    problems = [
        f"{name}: expected {list(spec.shape)}, got {_shape(tensors.get(name))}"
        for name, spec in specs.items()
        if not (name not in tensors and spec.optional)
        and _shape(tensors.get(name)) != list(spec.shape)
    ]
    problems += [
        f"{name}: unknown" for name in tensors if name not in specs and not is_vision(name)
    ]
    if problems:
        raise ValueError(f"cannot write checkpoint: {listed(problems)}")
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        spec = specs.get(name, TensorSpec(tuple(tensor.shape), "float"))
        stored.update(_store(name, tensor.detach(), spec, storage, parsed.weight_block_size or 1))
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
    _write_shards(path, stored, shards)


def _shape(tensor: Tensor | None) -> list[int] | str:
    return "nothing" if tensor is None else list(tensor.shape)


def _store(
    name: str, tensor: Tensor, spec: TensorSpec, storage: Storage, block: int
) -> dict[str, Tensor]:
    # Copies, because tied tensors must not share memory in a file.
    if spec.role == "ids":
        return {name: tensor.to(torch.int64, copy=True).contiguous()}
    if spec.role == "float32":
        return {name: tensor.to(torch.float32, copy=True).contiguous()}
    if spec.role == "float" or storage in _FLOAT:
        dtype = _FLOAT.get(storage, torch.bfloat16)
        return {name: tensor.to(dtype, copy=True).contiguous()}
    if spec.role == "table":
        weight, scale = quant.quantise_rows_fp8(tensor, TABLE_GROUP)
    elif spec.role == "expert" and storage == "fp4":
        weight, scale = quant.quantise_fp4(tensor, FP4_GROUP)
    else:
        weight, scale = quant.quantise_fp8(tensor, block)
    return {name: weight.contiguous(), scale_name(name): scale.contiguous()}


def _write_shards(path: Path, tensors: Mapping[str, Tensor], shards: int) -> None:
    """Spread the tensors over files in order; a single file gets no index."""
    for old in (*path.glob("model*.safetensors"), *path.glob("model.safetensors.index.json")):
        old.unlink()
    if shards == 1:
        _save(path / "model.safetensors", tensors)
        return
    names = list(tensors)
    size = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = names[number * size : (number + 1) * size]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        _save(path / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    file_path = path / "model.safetensors.index.json"
    file_path.write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with usual_file(path) as target:
        save_file(dict(tensors), target, metadata={"format": "pt"})
