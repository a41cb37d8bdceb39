"""Makes golden_qwen3: a tiny random Qwen3-MoE in the official layout, with logits of transformers.

    python tests/data/oracle/make_golden_qwen3.py

Needs transformers (5.24 was used); nothing else of the project does. Seeded: the same files again.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).parent / "golden_qwen3"


def main() -> None:
    """Write config.json, model.safetensors and golden.safetensors."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(1, 0.1)
            else:
                weight.normal_(0, 1 if "embed" in name else weight.shape[-1] ** -0.5)
        ids = torch.randint(0, 96, (1, 64))
        logits = model(ids).logits[0]
    HERE.mkdir(exist_ok=True)
    model.save_pretrained(HERE)
    save_file({"input_ids": ids[0], "logits": logits.contiguous()}, HERE / "golden.safetensors")


if __name__ == "__main__":
    main()
