"""The fields of config.json that the forward pass reads, under their official names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Config:
    """A V4 config is flat, a V4.1 config has its language model under text_config."""

    v41: bool
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    o_groups: int
    sliding_window: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    num_hash_layers: int
    compress_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    yarn: Mapping[str, float]
    rms_norm_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    # V4.1 only
    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 0
    engram_n_heads: int = 0
    engram_vocab_size: int = 0
    engram_compressed_vocab_size: int = 0
    engram_pad_token_id: int = 0
    image_token_id: int | None = None
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_num_experts_per_tok: int = 0

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Config:
        """From the parsed config.json."""
        text = config.get("text_config", config)
        merged = {**config, **text}
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in merged.items()
            if name in cls.__dataclass_fields__ and value is not None
        }
        fields["v41"] = merged["model_type"].startswith("deepseek_v41")
        fields["yarn"] = merged["rope_scaling"]
        return cls(**fields)

    def replaced(self, **changes: Any) -> Config:
        """The same with some fields changed, unchecked."""
        return replace(self, **changes)
