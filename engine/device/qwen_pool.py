"""Keys and values of a Qwen3 model's requests, in blocks; nothing is kept per slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.qwen3_config import Qwen3Config


class QwenPool:
    """All KV of one model; the plan side hands out block ids, block 0 is the dummy.

    Attributes:
        keys: per layer [num_blocks, block_size, Hkv, D], after rotation.
        values: likewise.
        arena: [2, layers, num_blocks, block_size, Hkv, D], the memory of both.

    Args:
        config: of the model.
        num_blocks: blocks, the dummy included.
        block_size: tokens a block covers.
        device: where the tensors live.
        dtype: of them.
    """

    def __init__(
        self,
        config: Qwen3Config,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        shape = (2, layers, num_blocks, block_size, heads, config.head_dim)
        self.config = config
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.arena = torch.zeros(shape, dtype=dtype, device=device)
        self.keys, self.values = (half.unbind() for half in self.arena)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.arena.nbytes

    def reset_slot(self, slot: int) -> None:
        """Do nothing: a block's rows are read only after they were written."""

    def copy(
        self,
        slots: Sequence[tuple[int, int]] = (),
        blocks: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Copy what blocks hold, one (from, to) pair after the other; slots hold nothing."""
        for source, target in blocks:
            for tensor in (*self.keys, *self.values):
                tensor[target] = tensor[source]

    def poison(self, *, blocks: Iterable[int]) -> None:
        """Fill unused blocks with NaN, so that a test sees whoever reads them."""
        for tensor in (*self.keys, *self.values):
            tensor[list(blocks)] = torch.nan

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor, by group and layer."""
        groups = {"keys": self.keys, "values": self.values}
        return {f"{name}[{i}]": t for name, held in groups.items() for i, t in enumerate(held)}
