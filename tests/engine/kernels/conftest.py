"""Which tests of kernels are tests for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

#: Files whose tests are the same, or as good, on a GPU and in the interpreter. Others have tests of
#: real widths, which are marked gpu themselves.
SAME = (
    "accept", "block_attention", "embed", "feed", "fp4", "moe", "records", "roundtrip", "router",
    "weave",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU, kernels run on it: there, tests of these files are marked gpu."""
    files = {Path(__file__).parent / f"test_{name}.py" for name in SAME}
    for item in items:
        if torch.cuda.is_available() and item.path in files:
            item.add_marker("gpu")
