"""transformers' names for a V4 checkpoint to the official ones, for the golden data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

GLOBAL = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}
LAYER = {
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
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
}


def official_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name in GLOBAL:
            out[GLOBAL[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        prefix = f"layers.{layer}"
        if rest == "mlp.experts.gate_up_proj":
            for e, both in enumerate(tensor):
                w1, w3 = both.chunk(2)
                out[f"{prefix}.ffn.experts.{e}.w1.weight"] = w1
                out[f"{prefix}.ffn.experts.{e}.w3.weight"] = w3
        elif rest == "mlp.experts.down_proj":
            for e, w2 in enumerate(tensor):
                out[f"{prefix}.ffn.experts.{e}.w2.weight"] = w2
        else:
            out[f"{prefix}.{LAYER[rest]}"] = tensor
    return out


def official_config(hf: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The official config.json of golden data, read as its verify.json says.

    V4.1's golden data has a compressor of its own in every layer with a ratio, and no indexer.
    """
    rates = {"sliding_attention": 0, **hf["compress_rates"]}
    ratios = [rates[kind] for kind in hf["layer_types"]]
    config = {
        **hf,
        "compress_ratios": ratios,
        "num_hash_layers": hf["mlp_layer_types"].count("hash_moe"),
        "rope_scaling": hf["rope_parameters"]["compress"],
    }
    if architecture == "v4.1":
        config["model_type"] = "deepseek_v41"
        config["kv_source_layer_ids"] = [i for i, ratio in enumerate(ratios) if ratio]
        config["index_source_layer_ids"] = []
    return config
