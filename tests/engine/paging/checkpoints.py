"""Small Qwen3-MoE checkpoints in every stored form, and quantisers that are the loaders' inverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.kernels.formats import dequantise
from engine.model.quant import to_e2m1
from engine.model.quantised import AWQ_ORDER, read_linear
from engine.model.qwen3_names import tensor_shapes
from engine.qwen3_config import Quantisation, Qwen3Config

GROUP = 32
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
#: Kind -> quantization_config.
STORED: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]},
    "fp8_channel": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        },
    },
    "int8_channel": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
        },
    },
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "int4_awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True},
    "int4_gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
}


def quantise(kind: str, w: Tensor) -> dict[str, Tensor]:
    """The tensors in which a checkpoint of a kind stores a linear float32 [N, K]."""
    rows, columns = w.shape
    if kind == "plain":
        return {"weight": w}
    if kind == "fp8_block":
        tiles = w.view(rows // GROUP, GROUP, columns // GROUP, GROUP)
        scale = tiles.abs().amax((1, 3)) / 448
        codes = (tiles / scale[:, None, :, None]).view(rows, columns)
        return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    if kind.endswith("channel"):
        most = 448 if kind == "fp8_channel" else 127
        scale = w.abs().amax(1, keepdim=True) / most
        codes = w / scale
        if kind == "int8_channel":
            return {"weight": codes.round().to(torch.int8), "weight_scale": scale}
        return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": scale}
    if kind == "nvfp4":
        groups = w.view(rows, columns // 16, 16)
        overall = w.abs().max() / (6 * 448)
        scale = (groups.abs().amax(-1) / 6 / overall).to(torch.float8_e4m3fn)
        codes = to_e2m1((groups / (scale.float() * overall)[..., None]).view(rows, columns))
        packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return {"weight": packed, "weight_scale": scale, "weight_scale_2": overall}
    groups = w.view(rows, columns // GROUP, GROUP)
    if kind == "int4_awq":
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = (high - low) / 15
        zeros = (-low / scale).round().clamp(0, 15)
    else:
        scale = groups.abs().amax(-1) / 7
        zeros = torch.full_like(scale, 7)  # GPTQ stores one less than the middle
    scale = scale.half().float()
    middle = zeros if kind == "int4_awq" else zeros + 1
    codes = ((groups / scale[..., None]).round() + middle[..., None]).clamp(0, 15)
    columns_first = codes.view(rows, columns).to(torch.int32).T.contiguous()  # [K, N]
    zeros_first = zeros.to(torch.int32).T.contiguous()  # [K / g, N]
    scales = scale.T.contiguous().half()
    if kind == "int4_awq":
        return {
            "qweight": _words(columns_first, AWQ_ORDER),
            "qzeros": _words(zeros_first, AWQ_ORDER),
            "scales": scales,
        }
    return {
        "qweight": _words(columns_first.T.contiguous(), tuple(range(8))).T.contiguous(),
        "qzeros": _words(zeros_first, tuple(range(8))),
        "scales": scales,
    }


def _words(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Eight codes along the last dimension in an int32, the order[i]-th at bits 4 * i."""
    eights = codes.unflatten(-1, (-1, 8)).to(torch.int64)
    word = sum(eights[..., column] << (4 * place) for place, column in enumerate(order))
    assert isinstance(word, Tensor)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def method(kind: str) -> Quantisation:
    """What the configuration of a kind is read as."""
    config = Qwen3Config.from_dict(CONFIG | {"quantization_config": STORED[kind]})
    assert config.quantisation is not None
    return config.quantisation


def values(kind: str, stored: dict[str, Tensor]) -> Tensor:
    """What a stored linear is worth, by the loader."""
    return stored["weight"] if kind == "plain" else dequantise(read_linear(method(kind), stored))


def write_qwen(path: Path, kind: str = "plain", **changes: Any) -> Path:
    """Write a random model; experts and attention in the given form."""
    path.mkdir(parents=True, exist_ok=True)
    data = CONFIG | changes
    if STORED[kind] is not None:
        data["quantization_config"] = STORED[kind]
    config = Qwen3Config.from_dict(data)
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            tensors[name] = 1 + 0.1 * noise
        elif "embed" in name:
            tensors[name] = noise
        elif "proj" in name:
            stem = name.removesuffix("weight")
            stored = quantise(kind, noise * shape[-1] ** -0.5)
            tensors |= {stem + n: t for n, t in stored.items()}
        else:
            tensors[name] = noise * shape[-1] ** -0.5
    (path / "config.json").write_bytes(orjson.dumps(data))
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    return path
