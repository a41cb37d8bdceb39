"""Counters that programs of a launch count in, such as who ends last, and leave at zero."""

from __future__ import annotations

import torch
from torch import Tensor

#: By user and device: one set for launches as they come, one for captured ones.
_made: dict[tuple[str, torch.device], Tensor] = {}
_ALIGNED = 4  # numbers: both sets begin at 16 bytes, so that kernels take either


def counters(user: str, count: int, device: torch.device) -> Tensor:
    """Zeros that every launch leaves as zeros.

    Captured launches share one set and others another, so that a replayed graph does not meet what a
    pass of another stream counts. Kernels whose programs wait for one another are to run one at a
    time all the same (engine.kernels.moe_decode). A zero written while a graph is captured would not be there until the
    graph has run, so the first call must come before.

    Args:
        user: the operation; each has its own.
        count: how many, the same for every call of a user.
        device: where.

    Returns:
        int32 [count, rounded up].

    Raises:
        RuntimeError: the first call on a device is under capture.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if (user, device) not in _made:
        if capturing:
            raise RuntimeError(f"{user}: expected a call before the first capture, got none")
        rounded = -(-count // _ALIGNED) * _ALIGNED
        _made[user, device] = torch.zeros(2, rounded, dtype=torch.int32, device=device)
    return _made[user, device][int(capturing)]
