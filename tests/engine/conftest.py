"""Fixtures of the engine's tests, and which of them are tests for a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU, kernels run on it: there, their tests are marked gpu.

    Those of a module that knows its DEVICE; where it has tests of real widths, these alone.
    """
    if not torch.cuda.is_available():
        return
    modules = defaultdict(list)
    for item in items:
        modules[getattr(item, "module", None)].append(item)
    for module, own in modules.items():
        if hasattr(module, "DEVICE") and not any(item.get_closest_marker("gpu") for item in own):
            for item in own:
                item.add_marker("gpu")


@pytest.fixture(scope="module")
def exact_products() -> Iterator[None]:
    """TF32 would round the operands of every product on a GPU to 10 bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
