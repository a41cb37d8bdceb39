"""Model shapes that figures are given for: the widths of the published models, fewer layers.

Weights are drawn from a seed (engine.model.sources.RandomSource). Fields that a shape does not name
are those of the official configuration (model.md 1.1).
"""

from __future__ import annotations

from typing import Any

from engine.config import ModelConfig, primes_from

_COMMON: dict[str, Any] = {
    "vocab_size": 129280,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "index_head_dim": 128,
    "index_topk": 512,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 1048576,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 0,
}
_YARN = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}


def _v4_flash(ratios: list[int]) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **_COMMON,
        "hidden_size": 4096,
        "num_hidden_layers": len(ratios),
        "q_lora_rank": 1024,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "num_hash_layers": 3,
        "compress_ratios": ratios,
        "index_n_heads": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "yarn", **_YARN},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }


def _v41(
    ratios: list[int],
    kv_sources: list[int],
    index_sources: list[int],
    candidate_source: int,
    engram_layers: list[int],
    experts: int,
) -> dict[str, Any]:
    text = {
        "model_type": "deepseek_v41_text",
        **_COMMON,
        "hidden_size": 5120,
        "num_hidden_layers": len(ratios),
        "q_lora_rank": 1280,
        "n_routed_experts": experts,
        "moe_intermediate_size": 2304,
        "num_hash_layers": 0,
        "compress_ratios": ratios,
        "kv_source_layer_ids": kv_sources,
        "index_source_layer_ids": index_sources,
        "candidate_source_layer_id": candidate_source,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "index_n_heads": 32,
        "rms_norm_eps": 1e-20,
        "rope_scaling": {"rope_type": "yarn", **_YARN},
        "engram_layer_ids": engram_layers,
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        # 24 primes from here upward: a table of about one million rows
        "engram_vocab_size": 41_600,
        "engram_compressed_vocab_size": 99092,
        "engram_pad_token_id": 2,
        "pad_token_id": 2,
    }
    primes = primes_from(text["engram_vocab_size"])
    text["engram_num_embeddings"] = [sum(next(primes) for _ in range(24)) for _ in engram_layers]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": text,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    }


GEOMETRIES: dict[str, dict[str, Any]] = {
    "v4-flash-8l": _v4_flash([0, 0, 4, 128, 4, 128, 4, 128]),
    "v4-flash-43l": _v4_flash([0, 0, *[4, 128] * 20, 4]),
    "v41-8l": _v41([0, 0, 2, 2, 1, 1, 1, 1], [2, 4], [2, 4, 6], 4, [1], 128),
    "v41-12l": _v41([0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1], [2, 6], [2, 6, 8, 10], 6, [1], 64),
    "v41-40l": _v41(
        [0, 0, *[2] * 18, *[1] * 20],
        [2, 8, 14, 20],
        [2, 8, 14, 20, 24, 28, 32, 36],
        20,
        [1, 14],
        128,
    ),
}


#: The other architecture's shape, which published figures of paged experts are of.
QWEN = "qwen3-30b-a3b"
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def geometry(name: str) -> ModelConfig:
    """Configuration of a shape.

    Raises:
        KeyError: no shape has this name.
    """
    return ModelConfig.from_dict(GEOMETRIES[name])
