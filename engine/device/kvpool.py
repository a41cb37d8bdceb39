"""Memory of the requests being served: KV by group and the rolling state beside it.

Knows tensors and their places, nothing of requests or scheduling: the plan side hands out slot and
block ids. Two kinds of memory (model.md 3):

* per *slot*, fixed size: a window ring for every layer, the compressors' pending rows, the n-gram
  history;
* per *block*, growing with the sequence: compressed entries and index keys. A block covers
  `block_size` tokens of every layer at once, so one block table serves all layers.

Cached values are numbers of the engine's dtype, or records of bytes in the narrow forms of a quantised
model (engine.plan.records): FP8 window rings, FP8 or FP4 entries, FP4 index keys. Compressor state is
float32.

All tensors are views of one run of bytes, the arena: one allocation, whose size the memory plan knows
to the byte, so that no memory is lost between tensors and what does not fit fails at once.

A slot may also hold the state of nobody's request, kept by the prefix cache.

Slot 0 and block 0 belong to nobody: padding may read and write them, so they stay finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.model.engram import NO_TOKEN
from engine.plan.layout import Drafting, arena, pool_tensors
from engine.plan.records import Forms


class KVPool:
    """All KV and rolling state of one model.

    Attributes:
        arena: uint8, the memory of all that lies on the device.
        forms: of cached values. A row of D is uint8 [nbytes] where its form is not "none".
        window: per layer [num_slots, W, D]; position p lives in row p mod W.
        entries: per entry-owning layer [num_blocks, block_size // ratio, D], after RoPE.
        index_keys: per layer that owns index keys [num_blocks, block_size // ratio, Di].
        state: per layer that pools tokens [num_slots, ring, 2 * width]: kv | gate score (position
            bias added) of position p in row p mod ring.
        index_state: the same for V4's index compressors.
        draft: per draft stage [num_slots, W, D], as `window`.
        carry: per MTP stage [num_slots, S * d], streams that the next pass's first row needs
            (engine.model.mtp).
        history: [num_slots, n - 1] int64 on the host, folded ids, latest last; n the longest
            n-gram. Zero columns without Engram. With `ring_history` [num_slots, n] on the device,
            position p in row p mod n.

    Args:
        config: of the model.
        num_blocks: blocks, the dummy block 0 included.
        block_size: tokens a block covers; a multiple of every compress ratio.
        num_slots: slots, the dummy slot 0 included.
        device: where the tensors live.
        dtype: of plain rings, entries and index keys; state is in float32 at least.
        forms: of cached values; plain numbers if not given, as the reference model keeps them.
        ring_history: whether the history is the ring that engine.model.fast keeps.
        drafting: whose draft stages to keep state for.

    Raises:
        ValueError: block_size is no multiple of a ratio, or there is no block or slot.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int = 256,
        num_slots: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        forms: Forms | None = None,
        ring_history: bool = False,
        drafting: Drafting = "off",
    ) -> None:
        if num_blocks < 1 or num_slots < 1:
            raise ValueError(f"expected at least 1 block and slot, got {num_blocks}, {num_slots}")
        wrong = sorted({r for r in config.compress_ratios if r and block_size % r})
        if wrong:
            raise ValueError(f"block_size: expected a multiple of {wrong}, got {block_size}")
        self.config = config
        self.forms = forms = forms or Forms()
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_slots = num_slots

        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        window: dict[int, Tensor] = {}
        draft: dict[int, Tensor] = {}
        carry: dict[int, Tensor] = {}
        self.entries: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        self.state: dict[int, Tensor] = {}
        self.index_state: dict[int, Tensor] = {}
        groups = {
            "window": window,
            "entries": self.entries,
            "index_keys": self.index_keys,
            "state": self.state,
            "index_state": self.index_state,
            "draft": draft,
            "carry": carry,
        }
        elements = {"cache": dtype, "bytes": torch.uint8, "state": state_dtype, "ids": torch.int64}
        sizes = (block_size, dtype.itemsize, forms, drafting)
        parts = list(pool_tensors(config, *sizes, ring_history=ring_history))
        if not ring_history:  # the reference's stays on the host
            self.history = torch.zeros((num_slots, *parts.pop().shape), dtype=torch.int64)
        starts, nbytes = arena(parts, num_blocks, num_slots, dtype.itemsize)
        self.arena = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        for part, start in zip(parts, starts, strict=True):
            count = num_blocks if part.per_block else num_slots
            own = self.arena[start : start + count * part.nbytes(dtype.itemsize)]
            tensor = own.view(elements[part.kind]).view(count, *part.shape)
            if part.group == "history":
                self.history = tensor
            else:
                groups[part.group][part.layer] = tensor
        self.window = tuple(window.values())
        self.draft = tuple(draft.values())
        self.carry = tuple(carry.values())
        self._blank = [_blank(s) for s in (*self.state.values(), *self.index_state.values())]
        for slot in range(num_slots):
            self.reset_slot(slot)

    @property
    def _rings(self) -> tuple[Tensor, ...]:
        return (*self.window, *self.draft)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on the device, and of what is between them."""
        return self.arena.nbytes

    def reset_slot(self, slot: int) -> None:
        """Make a slot ready for a new sequence: empty rings, nothing pending, no history.

        Blocks need no reset: an entry is read only after it was written.
        """
        # Fused: each of these is one launch for all layers, where a model has dozens.
        torch._foreach_zero_([ring[slot] for ring in self._rings])
        for carry in self.carry:
            carry[slot] = 0
        states = (*self.state.values(), *self.index_state.values())
        if states:
            torch._foreach_copy_([state[slot] for state in states], self._blank)
        self.history[slot] = NO_TOKEN

    def copy(
        self,
        slots: Sequence[tuple[int, int]] = (),
        blocks: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Copy all that slots and blocks hold, one pair after the other.

        Args:
            slots: (from, to) pairs; a source may be an earlier target.
            blocks: likewise.
        """
        if slots:
            states = (*self.state.values(), *self.index_state.values())
            for tensors in (self._rings, self.carry, states, (self.history,)):
                _copy_rows(tensors, slots)
        if blocks:
            _copy_rows((*self.entries.values(), *self.index_keys.values()), blocks)

    def poison(self, *, slots: Iterable[int] = (), blocks: Iterable[int] = ()) -> None:
        """Fill unused memory with NaN, so that a test sees whoever reads it.

        Raises:
            ValueError: slot 0 or block 0, which must stay finite.
        """
        slots, blocks = list(slots), list(blocks)
        if 0 in slots or 0 in blocks:
            raise ValueError("slot 0 and block 0 must stay finite")
        states = (*self.state.values(), *self.index_state.values())
        for tensor in (*self._rings, *self.carry, *states):
            tensor[slots] = _nan(tensor)
        for tensor in (*self.entries.values(), *self.index_keys.values()):
            tensor[blocks] = _nan(tensor)

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor, by group and layer."""
        groups = {
            "window": dict(enumerate(self.window)),
            "draft": dict(enumerate(self.draft)),
            "carry": dict(enumerate(self.carry)),
            "entries": self.entries,
            "index_keys": self.index_keys,
            "state": self.state,
            "index_state": self.index_state,
        }
        found = {f"{group}[{at}]": t for group, held in groups.items() for at, t in held.items()}
        return found | {"history": self.history}


def _nan(tensor: Tensor) -> float:
    """What makes memory of a pool NaN: in records it is 0xff everywhere, in every form."""
    return 0xFF if tensor.dtype == torch.uint8 else math.nan


def _blank(state: Tensor) -> Tensor:
    """A slot's part of a compressor state in which nothing is pending."""
    kv, score = torch.empty_like(state[0]).chunk(2, -1)
    return torch.cat((torch.zeros_like(kv), torch.full_like(score, -math.inf)), -1)


def _copy_rows(tensors: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy rows of tensors of one type, all of a pair in one launch."""
    if not tensors:
        return
    for source, target in pairs:
        torch._foreach_copy_([t[target] for t in tensors], [t[source] for t in tensors])
