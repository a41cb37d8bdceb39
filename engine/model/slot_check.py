"""Whether slots hold what their tables say: against the host's bytes, and where it has none, a checksum."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.plan.residency import Residency


def byte_sum(row: Tensor) -> int:
    """Checksum (CRC-32) of an expert's bytes, uint8 [bytes]."""
    return zlib.crc32(row.cpu().numpy().data)


def check_slots(
    slots: Tensor,
    residency: Residency,
    pins: Mapping[int, int],
    bytes_of: Callable[[int], Tensor],
) -> None:
    """Check that each slot has its expert's bytes, and that pinned experts are in theirs (J1, J4).

    Args:
        slots: uint8 [K, bytes].
        residency: what is said to lie there.
        pins: expert -> checksum of the bytes it was loaded with, in the order of the first slots.
        bytes_of: gives those of an expert that is not pinned, uint8 [bytes] on the CPU.

    Raises:
        RuntimeError: one has not; a bug.
    """
    residency.check_integrity()
    for slot, expert in enumerate(pins):
        if residency.slot_expert[slot] != expert:
            raise RuntimeError(f"pinned expert {expert} has left slot {slot}")
    for slot, expert in enumerate(residency.slot_expert):
        if expert in pins:
            same = byte_sum(slots[slot]) == pins[expert]
        else:
            same = torch.equal(slots[slot].cpu(), bytes_of(expert))
        if not same:
            raise RuntimeError(f"slot {slot} does not hold the bytes of expert {expert}")
