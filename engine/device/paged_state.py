"""What the runner of steps says of paged experts: what graphs use of them, what they lock, how they fared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from engine.model.experts import PagedExperts


def slot_tensors(layers: Sequence[PagedExperts]) -> dict[str, Tensor]:
    """What graphs read and write of paged experts, by name and number of the layer."""
    found = {}
    for number, paged in enumerate(layers):
        state = paged.state
        for name, tensor in (
            ("store", paged.store),
            ("slots", paged.slots),
            ("slot_expert", state.slot_expert),
            ("expert_slot", state.expert_slot),
            ("last_use", state.last_use),
            ("early", state.early),
            ("counters", state.counters),
            ("moves", state.moves),
        ):
            found[f"{name}[{number}]"] = tensor
    return found


def paging_locks(layers: Sequence[PagedExperts]) -> tuple[str, ...]:
    """Why weights cannot be written in place, as far as experts are paged."""
    if not layers:
        return ()
    slots = sum(paged.num_slots for paged in layers)
    return (
        f"experts of {len(layers)} layers are paged: {slots} of them lie in slots, which"
        " would keep the old weights",
    )


def hit_rates(layers: Sequence[PagedExperts], counts: Sequence[tuple[int, int]]) -> Iterator[str]:
    """How often each layer's experts were found on the device, one line a layer.

    Args:
        layers: paged experts.
        counts: hits and misses of each.
    """
    for number, (paged, (hits, misses)) in enumerate(zip(layers, counts, strict=True)):
        pins = f" ({paged.num_pins} of experts that stay)" if paged.num_pins else ""
        files = "" if paged.cache is None else f"; {paged.cache.figures.told}"
        yield (
            f"paged layer {number}: {paged.num_slots} slots{pins}, {hits} hits, {misses} misses,"
            f" hit rate {hits / max(1, hits + misses):.4f}{files}"
        )
