"""Configuration of Qwen3-MoE, the second architecture: the published paging figures use it.

Token ids and raw completions only; its chat format is none of ours. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.config import ConfigError, read_config_file
from engine.config_checks import wanted

ARCHITECTURE = "Qwen3MoeForCausalLM"

Method = Literal["fp8_block", "fp8_channel", "int8_channel", "nvfp4", "int4_awq", "int4_gptq"]


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How a checkpoint's linears are stored.

    Args:
        method: kind of matrix (engine.kernels.formats).
        group: side of an FP8 block, or columns that share a scale; 0 by channel.
    """

    method: Method
    group: int


@dataclass(frozen=True)
class Qwen3Config:
    """A Qwen3-MoE model. Field names are those of config.json; sizes in elements.

    Grouped-query attention with a norm per head of queries and keys, every layer a mixture of
    experts, softmax over all experts and then the best `num_experts_per_tok`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantisation: Quantisation | None = None

    @classmethod
    def from_file(cls, path: Path | str) -> Qwen3Config:
        """Read config.json, or the config.json of a folder.

        Raises:
            ConfigError: the file is absent, is no JSON object, or cannot be served.
        """
        return read_config_file(path, cls.from_dict)

    @classmethod
    def from_dict(cls, data: Any) -> Qwen3Config:
        """Build from the parsed file.

        Raises:
            ConfigError: listing every missing, mistyped or unsupported field.
        """
        if not isinstance(data, Mapping):
            raise ConfigError("config", [f"expected a JSON object, got {type(data).__name__}"])
        problems: list[str] = []
        for name, accepted in _FIXED.items():
            if data.get(name, accepted[0]) not in accepted:
                expected = " or ".join(map(repr, accepted))
                problems.append(f"{name}: {wanted(expected, data[name])}")
        values: dict[str, Any] = {}
        for name in _INTEGERS:
            value = data.get(name, data.get(_ALSO.get(name, name)))
            if type(value) is not int or value < 1:
                problems.append(f"{name}: {wanted('a positive integer', value)}")
            values[name] = value
        rope = data.get("rope_parameters") or {}
        theta = data.get("rope_theta", rope.get("rope_theta"))
        kind = rope.get("rope_type", "default")
        if kind != "default" or data.get("rope_scaling") is not None:
            problems.append(f"rope_scaling: {wanted('no scaling', data.get('rope_scaling', kind))}")
        for name, value in (("rope_theta", theta), ("rms_norm_eps", data.get("rms_norm_eps"))):
            if isinstance(value, bool) or not isinstance(value, int | float):
                problems.append(f"{name}: {wanted('a number', value)}")
            values[name] = value
        eos = data.get("eos_token_id")
        how = _quantisation(data.get("quantization_config"), problems)
        if problems:
            raise ConfigError("config", problems)
        if values["num_attention_heads"] % values["num_key_value_heads"]:
            problems.append("num_key_value_heads: expected a divisor of num_attention_heads")
        if values["num_experts_per_tok"] > values["num_experts"]:
            problems.append("num_experts_per_tok: expected at most num_experts")
        if problems:
            raise ConfigError("config", problems)
        ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        return cls(
            **values,
            bos_token_id=data.get("bos_token_id"),
            eos_token_ids=ids,
            quantisation=how,
        )


_INTEGERS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "num_experts num_experts_per_tok moe_intermediate_size max_position_embeddings"
).split()
#: Other spellings: what transformers 5 writes.
_ALSO = {"num_experts": "num_local_experts"}
#: Switches, and the only positions in which they are served; the first stands for absence.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3_moe",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "use_sliding_window": (False,),
}


def _quantisation(given: Any, problems: list[str]) -> Quantisation | None:
    """Read quantization_config; notes what is not among the supported ones."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        problems.append(f"quantization_config: {wanted('an object', given)}")
        return None
    method = given.get("quant_method")
    group = given.get("group_size")
    if method == "fp8":
        block = given.get("weight_block_size")
        if isinstance(block, list) and len(block) == 2 and block[0] == block[1]:
            return Quantisation("fp8_block", block[0])
    elif method == "awq" and given.get("bits") == 4 and given.get("zero_point", True) is True:
        if type(group) is int and given.get("version", "gemm") == "gemm":
            return Quantisation("int4_awq", group)
    elif method == "gptq" and given.get("bits") == 4 and given.get("sym") is True:
        if type(group) is int and group > 0 and not given.get("desc_act", False):
            return Quantisation("int4_gptq", group)
    elif method == "modelopt" and given.get("quant_algo") == "NVFP4":
        return Quantisation("nvfp4", 16)
    elif method == "compressed-tensors":
        found = _by_channel(given)
        if found is not None:
            return Quantisation(found, 0)
    problems.append(f"quantization_config: {wanted(f'one of {SUPPORTED}', dict(given))}")
    return None


#: What `quantization_config` may say, in words.
SUPPORTED = (
    "fp8 with a square weight_block_size; awq of 4 bits with zero points, version gemm; gptq of 4"
    " bits, symmetric, without desc_act; modelopt NVFP4; compressed-tensors of 8 bits by channel"
)


def _by_channel(given: Mapping[str, Any]) -> Method | None:
    """Kind of a compressed-tensors checkpoint with one group of 8-bit weights by channel."""
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or weights.get("strategy") != "channel":
        return None
    if weights.get("num_bits") != 8 or weights.get("symmetric", True) is not True:
        return None
    found: dict[Any, Method] = {"float": "fp8_channel", "int": "int8_channel"}
    return found.get(weights.get("type"))
