"""Host memory that threads fill."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from engine.model.hostmem import HostBuffer


def test_threads_may_fill_what_was_made_in_inference_mode() -> None:
    """A store made under inference mode, as a loader runs, is written by threads that are not."""
    with torch.inference_mode():
        buffer = HostBuffer(1 << 16, pin=False)
        table = buffer.tensor.view(16, -1)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda row: table[row].fill_(row), range(16)))
            pool.submit(buffer._touch, 1 << 15, 1 << 16).result()
    assert table[3, 1:].tolist() == [3] * (table.shape[1] - 1)
