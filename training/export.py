"""Official layout from trained shards: `python -m training.export STEM [--out DIR]`.

Unstacks routed experts, stores Engram rows as the e4m3 values they were trained with, and adds the
DSpark stages, which nobody has trained yet: seeded random weights at the usual scales.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import orjson
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.model.names import TensorSpec, tensor_specs
from engine.model.writer import save_checkpoint
from training.model import fp8_rows
from training.train import CONFIG, load_shards

DSPARK_SEED = 20261129


def unstack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts [E, ...] under their official names; Engram rows as their e4m3 round trip."""
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if stem.endswith("ffn.experts"):
            out |= {f"{stem}.{e}.{leaf}.weight": w for e, w in enumerate(value)}
        elif name.endswith("engram.embed.weight"):
            out[name] = fp8_rows(value.float())
        else:
            out[name] = value
    return out


def untrained(name: str, spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """Initial value of a draft stage's tensor: norms one, biases and sinks zero, matrices normal."""
    if name.endswith(("norm.weight", "_scale")):
        return torch.ones(spec.shape)
    if len(spec.shape) == 1:
        return torch.zeros(spec.shape)
    return torch.randn(spec.shape, generator=generator) * spec.shape[-1] ** -0.5


def main() -> None:
    """Write the checkpoint."""
    ap = argparse.ArgumentParser(description="trained shards to the official layout")
    ap.add_argument("stem")
    ap.add_argument("--out", type=Path, default=CONFIG.parent)
    args = ap.parse_args()
    text = CONFIG.read_bytes()
    config = orjson.loads(text)
    tensors = unstack(load_shards(args.stem))
    generator = torch.Generator().manual_seed(DSPARK_SEED)
    for name, spec in tensor_specs(ModelConfig.from_dict(config)).items():
        if name.startswith("mtp.") and not spec.optional:
            tensors[name] = untrained(name, spec, generator)
    save_checkpoint(args.out, config, tensors, storage="bf16")
    (args.out / "config.json").write_bytes(text)  # as it was written by hand
    size = sum(p.stat().st_size for p in args.out.glob("model*.safetensors"))
    print(f"{args.out.name}: {len(tensors)} tensors, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
