"""The official layout of Qwen3-MoE: every tensor a configuration asks for, by name. Loads no torch."""

from __future__ import annotations

from engine.qwen3_config import Qwen3Config


def tensor_shapes(c: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Official name -> shape of every tensor of a checkpoint."""
    d, inner, dim = c.hidden_size, c.moe_intermediate_size, c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (c.vocab_size, d),
    }
    for index in range(c.num_hidden_layers):
        name = f"model.layers.{index}."
        shapes |= {
            name + "input_layernorm.weight": (d,),
            name + "post_attention_layernorm.weight": (d,),
            name + "self_attn.q_proj.weight": (c.num_attention_heads * dim, d),
            name + "self_attn.k_proj.weight": (c.num_key_value_heads * dim, d),
            name + "self_attn.v_proj.weight": (c.num_key_value_heads * dim, d),
            name + "self_attn.o_proj.weight": (d, c.num_attention_heads * dim),
            name + "self_attn.q_norm.weight": (dim,),
            name + "self_attn.k_norm.weight": (dim,),
            name + "mlp.gate.weight": (c.num_experts, d),
        }
        for expert in range(c.num_experts):
            one = f"{name}mlp.experts.{expert}."
            shapes |= {
                one + "gate_proj.weight": (inner, d),
                one + "up_proj.weight": (inner, d),
                one + "down_proj.weight": (d, inner),
            }
    return shapes
