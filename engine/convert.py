"""Converts a checkpoint with transformers' names into the official layout.

Source: model.md 5.2. transformers' own `save_pretrained` writes neither of the two namings for V4;
what this reads is the state dict's names. Draft stages do not occur there, so the result has none.

A folder may also be *read as* V4.1 where its weights make the two architectures equal (model.md
6.3.1); what V4.1 does not have must then be without effect, and that is checked.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.api import EngineError, listed
from engine.config import Version
from engine.config_checks import CSA_RATIO
from engine.model.writer import save_checkpoint

_GLOBAL = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.kv_proj.weight": "attn.compressor.wkv.weight",
    "self_attn.compressor.gate_proj.weight": "attn.compressor.wgate.weight",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.kv_norm.weight": "attn.compressor.norm.weight",
    "self_attn.compressor.indexer.kv_proj.weight": "attn.indexer.compressor.wkv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "attn.indexer.compressor.wgate.weight",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.kv_norm.weight": "attn.indexer.compressor.norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_SAME = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "qk_rope_head_dim q_lora_rank o_lora_rank o_groups sliding_window n_routed_experts "
    "n_shared_experts num_experts_per_tok moe_intermediate_size scoring_func norm_topk_prob "
    "routed_scaling_factor swiglu_limit index_n_heads index_head_dim index_topk "
    "max_position_embeddings rms_norm_eps hc_mult hc_sinkhorn_iters hc_eps hidden_act "
    "attention_bias tie_word_embeddings bos_token_id eos_token_id pad_token_id"
).split()


class ConvertError(EngineError):
    """A source that cannot be converted; the message lists why."""


def convert(
    source: Path,
    target: Path,
    *,
    architecture: Version = "v4",
    config_name: str = "config.json",
    weights_name: str = "model*.safetensors",
) -> None:
    """Write `source` to `target` in the official layout, with its tokenizer.json if it has one.

    Args:
        source: folder with a transformers config and safetensors of its state dict.
        target: folder to write, made if absent.
        architecture: "v4", or "v4.1" to read the weights as that (see above).
        config_name: file name of the config.
        weights_name: file name or pattern of the weights.

    Raises:
        ConvertError: a file is absent, a name unknown, weights are quantised, or the weights
            cannot be read as V4.1.
        ConfigError: the converted configuration cannot be served.
        ValueError: a tensor is missing or misshapen.
    """
    config_path = source / config_name
    files = sorted(source.glob(weights_name))
    if not config_path.is_file() or not files:
        raise ConvertError(f"{source}: expected {config_name} and {weights_name}")
    try:
        hf = orjson.loads(config_path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConvertError(f"{config_path}: not JSON: {error}") from None
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state |= load_file(file)
        except SafetensorError as error:
            raise ConvertError(f"{file}: not a safetensors file: {error}") from None
    narrow = sorted({str(t.dtype) for t in state.values() if t.dtype.itemsize == 1})
    if narrow:
        raise ConvertError(f"{source}: expected unquantised weights, got {', '.join(narrow)}")
    tensors = official_tensors(state)
    try:
        config = official_config(hf)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConvertError(
            f"{config_path}: expected the config of a transformers DeepseekV4ForCausalLM,"
            f" got one that cannot be read as such: {type(error).__name__} {error}"
        ) from None
    if architecture == "v4.1":
        config, tensors = _as_v41(config, tensors)
    whole = all(t.dtype != torch.bfloat16 for t in state.values())
    save_checkpoint(target, config, tensors, storage="f32" if whole else "bf16")
    if (source / "tokenizer.json").is_file():
        shutil.copy(source / "tokenizer.json", target / "tokenizer.json")


def official_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a transformers state dict; stacked experts become one tensor each.

    Raises:
        ConvertError: listing every unknown name.
    """
    tensors: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in state.items():
        found = dict(_renamed(name, tensor))
        if not found:
            unknown.append(name)
        tensors |= found
    if unknown:
        raise ConvertError(
            f"expected transformers' names of tensors, got {len(unknown)} unknown tensors: "
            + listed(unknown, ", ")
        )
    return tensors


def _renamed(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name in _GLOBAL:
        yield _GLOBAL[name], tensor
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return
    layer, rest = match.groups()
    if rest in _LAYER:
        yield f"layers.{layer}.{_LAYER[rest]}", tensor
    for expert, stacked in enumerate(tensor if rest.startswith("mlp.experts.") else ()):
        prefix = f"layers.{layer}.ffn.experts.{expert}."
        if rest == "mlp.experts.gate_up_proj":
            yield prefix + "w1.weight", stacked.chunk(2)[0]
            yield prefix + "w3.weight", stacked.chunk(2)[1]
        elif rest == "mlp.experts.down_proj":
            yield prefix + "w2.weight", stacked


def official_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the official V4 layout for a transformers DeepseekV4Config."""
    rates = {"sliding_attention": 0, **hf["compress_rates"]}
    rope = hf["rope_parameters"]
    compress = rope["compress"]
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **{name: hf[name] for name in _SAME if name in hf},
        "num_hash_layers": hf["mlp_layer_types"].count("hash_moe"),
        "num_nextn_predict_layers": 0,
        "compress_ratios": [rates[kind] for kind in hf["layer_types"]],
        "rope_theta": rope["main"]["rope_theta"],
        "compress_rope_theta": compress["rope_theta"],
        "rope_scaling": None,
    }
    if compress["rope_type"] == "yarn":
        names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        config["rope_scaling"] = {"type": "yarn"} | {name: compress[name] for name in names}
    return config


def _as_v41(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read V4 weights as V4.1: every compressed layer a KV source, nothing selected."""
    ratios = config["compress_ratios"]
    sources = [layer for layer, ratio in enumerate(ratios) if ratio]
    problems = []
    if CSA_RATIO in ratios or config["num_hash_layers"]:
        problems.append("it has overlapping compressors or hash layers")
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        fixed_mix = name.endswith(("hc_attn_fn", "hc_ffn_fn", "hc_head_fn"))
        if (fixed_mix or name.endswith(".ape")) and tensor.any():
            problems.append(f"{name} is not zero")
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        gate_of_one = layer is not None and ratios[layer] == 1 and "compressor.wgate" in name
        if not (name.startswith("hc_head_") or name.endswith(".ape") or gate_of_one):
            kept[name] = tensor
    bases = [t for name, t in tensors.items() if name.endswith(("hc_attn_base", "hc_ffn_base"))]
    head = tensors["hc_head_base"]
    if any(not torch.equal(base, bases[0]) for base in bases) or not torch.equal(
        head, bases[0][: len(head)]
    ):
        problems.append("the mHC bases differ, so a delayed pre is not the site's own")
    if problems:
        raise ConvertError("cannot be read as V4.1: " + "; ".join(problems))
    text = config | {
        "model_type": "deepseek_v41_text",
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": [],
    }
    del text["architectures"]
    wrapped = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": text,
    }
    return wrapped, kept
