"""`bathyal engine inspect`: what a checkpoint holds, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.api import EngineError
from engine.architectures import read_config
from engine.config_checks import CSA_RATIO
from engine.model.checkpoint import Checkpoint, CheckpointError
from engine.model.names import part
from engine.model.qwen3_checkpoint import QwenCheckpoint
from engine.qwen3_config import Qwen3Config

#: Text in a tensor's name of Qwen's -> part of the checkpoint; the first match counts.
_QWEN_PARTS = {
    "norm": "norms",
    ".experts.": "routed experts",
    ".mlp.gate.": "routers",
    ".self_attn.": "attention",
    "": "embedding and head",
}


def inspect(folder: Path) -> tuple[list[str], list[str]]:
    """Say what a checkpoint holds.

    Args:
        folder: of the checkpoint.

    Returns:
        lines of the description, and what is wrong with it.

    Raises:
        EngineError: its configuration or a file cannot be read.
    """
    config = read_config(folder)
    if isinstance(config, Qwen3Config):
        return _qwen(folder, config)
    checkpoint = Checkpoint(folder)
    config = checkpoint.config
    kinds = Counter(_kind(layer.ratio, config.is_v41) for layer in config.layers)
    sizes: Counter[str] = Counter()
    for name, stored in checkpoint.tensors.items():
        sizes[part(name)] += stored.nbytes
    dtypes = Counter(stored.dtype for stored in checkpoint.tensors.values())
    lines = [
        f"version   {config.version}",
        f"layers    {len(config.layers)}: " + ", ".join(f"{n} {k}" for k, n in kinds.items()),
        *_sizes(config.max_position_embeddings, sizes, dtypes),
    ]
    unused = checkpoint.unused()
    for reason, count in Counter(unused.values()).items():
        lines.append(f"unused    {count} tensors: {reason}")
        lines += [f"  {name}" for name in sorted(n for n, why in unused.items() if why == reason)]
    return lines, checkpoint.problems()


def _qwen(folder: Path, config: Qwen3Config) -> tuple[list[str], list[str]]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise EngineError(f"{folder}: expected model*.safetensors, got no such file")
    sizes: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - the handle is no mapping
                    sizes[_qwen_part(name)] += opened.get_tensor(name).nbytes  # mapped, not read
                    dtypes[opened.get_slice(name).get_dtype()] += 1
        except SafetensorError as error:
            raise EngineError(f"{file}: expected a safetensors file: {error}") from None
    experts = "plain" if config.quantisation is None else config.quantisation.method
    lines = [
        "version   Qwen3-MoE",
        f"layers    {config.num_hidden_layers}: {config.num_experts} experts each, {experts},"
        f" {config.num_experts_per_tok} for a token",
        *_sizes(config.max_position_embeddings, sizes, dtypes),
    ]
    try:
        QwenCheckpoint(folder, config, torch.device("cpu"))
    except CheckpointError as error:
        return lines, list(error.problems)
    except EngineError as error:
        return lines, [str(error)]
    return lines, []


def _sizes(context: int, sizes: Counter[str], dtypes: Counter[str]) -> Iterator[str]:
    yield f"context   {context} tokens"
    yield f"tensors   {dtypes.total()}, {sizes.total():,} bytes"
    for what, size in sizes.most_common():
        yield f"  {what:<20}{size:>18,}"
    yield "types     " + ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())


def _kind(ratio: int, is_v41: bool) -> str:
    if ratio == 0:
        return "window"
    if is_v41:
        return f"ratio {ratio}"
    return "CSA" if ratio == CSA_RATIO else "HCA"


def _qwen_part(name: str) -> str:
    return next(what for text, what in _QWEN_PARTS.items() if text in name)
