"""Random tiny checkpoints in the official layout, for every test that needs a model.

`v4()` and `v41()` give the content of a config.json that has every feature of its version in few
layers; keyword arguments replace fields. `write(path, config)` writes the checkpoint with weights
that make every term matter (no zero bias, no unit norm).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models

from engine.config import ModelConfig, primes_from
from engine.model.names import TensorSpec, tensor_specs
from engine.model.writer import Storage, save_checkpoint

YARN = {"factor": 16, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1}
_COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 288,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "sliding_window": 8,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 0.5,  # far below the real 10, so that clamps bite on small random values
    "index_n_heads": 32,  # with few heads ReLU makes many scores exactly 0: ties everywhere
    "index_head_dim": 16,
    "index_topk": 4,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 1024,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 1,
}


def _quantised(block: int) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
    }


def v4(*, quantised: bool = False, **over: Any) -> dict[str, Any]:
    """config.json of a V4 model: window, CSA and HCA layers, hash and learned routing, one MTP stage."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **_COMMON,
        "num_hidden_layers": 5,
        "num_hash_layers": 2,
        "compress_ratios": [0, 4, 16, 4, 16, 0],
        "rope_scaling": {"type": "yarn", **YARN},
        "rms_norm_eps": 1e-6,
    }
    if quantised:
        config["quantization_config"] = _quantised(128)
    return config | over


def v41(*, quantised: bool = False, image: bool = False, **over: Any) -> dict[str, Any]:
    """config.json of a V4.1 model; `over` replaces fields of its text_config.

    Two KV sources of ratio 2 and one of ratio 1, five index sources, candidates of small blocks,
    two Engram layers, two DSpark stages.
    """
    text = {
        "model_type": "deepseek_v41_text",
        **_COMMON,
        "num_hidden_layers": 10,
        "num_hash_layers": 0,
        "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [1, 3, 4],
        "index_source_layer_ids": [1, 3, 4, 6, 8],
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 2,
        "rope_scaling": {"rope_type": "yarn", **YARN},
        "rms_norm_eps": 1e-20,
        "engram_layer_ids": [1, 3],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_vocab_size": 48,
        "engram_compressed_vocab_size": 280,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 3,
        "dspark_target_layer_ids": [7, 8, 9],
        "dspark_markov_rank": 8,
        "dspark_n_routed_experts": 2,
        "dspark_num_experts_per_tok": 1,
        "pad_token_id": 2,
    } | over
    if text.get("engram_layer_ids") and "engram_num_embeddings" not in over:
        primes = primes_from(text["engram_vocab_size"])
        rows = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
        text["engram_num_embeddings"] = [
            sum(next(primes) for _ in range(rows)) for _ in text["engram_layer_ids"]
        ]
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": text,
    }
    if image:
        config["image_token_id"] = 5
    if quantised:
        config["quantization_config"] = _quantised(32)
    return config


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Official name -> random float32 (or int64) tensor of the logical shape."""
    parsed = ModelConfig.from_dict(config)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _random(name, spec, parsed, generator) for name, spec in tensor_specs(parsed).items()
    }


def _random(
    name: str, spec: TensorSpec, config: ModelConfig, generator: torch.Generator
) -> torch.Tensor:
    if spec.role == "ids":
        rows = [
            torch.randperm(config.n_routed_experts, generator=generator)[: spec.shape[1]]
            for _ in range(spec.shape[0])
        ]
        return torch.stack(rows)
    noise = torch.randn(spec.shape, generator=generator)
    if name.endswith(("_scale", "q_weight", "k_weight")):
        return 0.5 + 0.5 * torch.rand(spec.shape, generator=generator)
    if "norm" in name and len(spec.shape) == 1:
        return 1 + 0.1 * noise
    if name.endswith(("gate.bias", "gate.bias_vl")):
        return 0.1 * noise
    if name.endswith(("attn_sink", "ape", "_base")):
        return 0.5 * noise
    return noise if name == "embed.weight" else noise * spec.shape[-1] ** -0.5


def write(
    path: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    storage: Storage = "f32",
    shards: int = 1,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write a checkpoint folder (config, weights, tokenizer.json) and return it.

    Args:
        path: folder to make.
        config: from v4() or v41(); "fp8" and "fp4" storage need `quantised=True` there.
        seed: of the random weights.
        storage: as in save_checkpoint.
        shards: number of weight files.
        tensors: instead of random ones.
    """
    tensors = random_tensors(config, seed) if tensors is None else tensors
    save_checkpoint(path, config, tensors, storage=storage, shards=shards)
    tokenizer(ModelConfig.from_dict(config).vocab_size).save(str(path / "tokenizer.json"))
    return path


def tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level tokenizer whose vocabulary folds: case, accents, blanks, broken UTF-8."""
    special = ["<bos>", "<eos>", "<pad>", "<noise>", "<a>", "<image>"]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = [b for b in range(256) if b not in printable]
    byte_chars = {b: chr(b) for b in printable}
    byte_chars |= {b: chr(256 + i) for i, b in enumerate(spare)}
    words = ["the", "The", "THE", " the", "café", "cafe", " ", "  ", "\n", "\t ", "É", "é", "E"]
    words += [f"{stem}{i}" for i in range(math.ceil(vocab_size / 2)) for stem in ("word", "Word")]
    tokens = [*special, *(byte_chars[b] for b in range(256))]
    tokens += ["".join(byte_chars[b] for b in word.encode()) for word in words]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    vocab = {token: i for token, i in vocab.items() if i < vocab_size}
    built = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([token for token in special if vocab[token] < vocab_size])
    return built
