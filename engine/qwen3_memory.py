"""What a Qwen3-MoE model takes of memory, item by item: its part of engine.memory's plan.

Weights, blocks and buffers are exact; what a pass over prompts takes while it runs is an estimate.
Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.expert_paging import experts_of
from engine.memory_items import ROUTED, Item, step_buffers
from engine.options import EngineConfig
from engine.qwen3_config import Qwen3Config


def block_nbytes(c: Qwen3Config, block_size: int, itemsize: int) -> int:
    """Bytes of a block over all layers: keys and values (engine.device.qwen_pool).

    Args:
        c: of the model.
        block_size: tokens of a block.
        itemsize: bytes of an element of the engine's dtype.
    """
    return 2 * c.num_hidden_layers * block_size * c.num_key_value_heads * c.head_dim * itemsize


def items(
    c: Qwen3Config, options: EngineConfig, *, context: int, num_blocks: int, itemsize: int
) -> Iterator[Item]:
    """Everything that the fast runner, the only one that serves it, holds.

    Experts are counted as if all were on the device; what paging takes away, whoever asks knows.

    Args:
        c: of the model.
        options: how it will be run.
        context: positions of a request.
        num_blocks: blocks, the dummy not counted.
        itemsize: as in block_nbytes.
    """
    yield from _weights(c, itemsize)
    each = block_nbytes(c, options.block_size, itemsize)
    yield Item(
        "blocks",
        "keys and values",
        each * (num_blocks + 1),
        f"{each:,} bytes x ({num_blocks} of {options.block_size} tokens + 1 spare), all layers",
    )
    yield from step_buffers(c.vocab_size, options, context)
    yield Item(
        "steps",
        "rotary tables",
        context * c.head_dim * 4,
        f"cosines and sines of {context:,} positions",
    )
    rows = min(context, options.resolve_max_batched_tokens(on_gpu=itemsize == 2))
    yield Item(
        "prompts",
        f"pass of {rows} rows",
        _pass_nbytes(c, rows, context, itemsize),
        "an estimate: residuals, queries, outputs of experts, a mask, unfolded experts",
    )


def _weights(c: Qwen3Config, itemsize: int) -> Iterator[Item]:
    """All but experts is plain, whatever the checkpoint stores (engine.model.qwen3)."""
    experts = experts_of(c, itemsize)
    layers, d = c.num_hidden_layers, c.hidden_size
    stored = "plain" if c.quantisation is None else c.quantisation.method
    yield Item(
        "weights",
        ROUTED,
        layers * experts.count * experts.nbytes,
        f"{layers} layers of {experts.count}, {experts.nbytes:,} bytes each; {stored}",
    )
    heads = c.num_attention_heads + c.num_key_value_heads  # queries and outputs; keys and values
    why = f"{itemsize} bytes an element"
    for what, count in (
        ("attention", layers * 2 * heads * c.head_dim * d),
        ("embedding and head", 2 * c.vocab_size * d),
        ("routers", layers * c.num_experts * d),
        ("norms", layers * 2 * (d + c.head_dim) + d),
    ):
        yield Item("weights", what, count * itemsize, why)


def _pass_nbytes(c: Qwen3Config, rows: int, context: int, itemsize: int) -> int:
    """Most that lives at once in a pass; an estimate."""
    d, k, dim = c.hidden_size, c.num_experts_per_tok, c.head_dim
    row = 2 * (d + k * d) + (3 * c.num_attention_heads + 2 * c.num_key_value_heads) * dim
    row += k * c.moe_intermediate_size
    plain = 0
    if c.quantisation is not None:  # the experts of a layer, one layer after the other
        plain = c.num_experts * 3 * d * c.moe_intermediate_size
    return itemsize * (rows * row + plain) + rows * context
