"""Shared by all tests: hypothesis profiles, one torch thread per process, Triton's interpreter."""

import gc
import os
from collections.abc import Iterator

# OpenMP reads this once, when torch is loaded, so it comes first. With more threads than free cores
# each small product ends in a wait that spins for the whole time slice of the other thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.leftovers import children, threads

# Kernels run on the GPU where there is one, else in Triton's interpreter. Triton reads this when it
# is imported, and the engine's modules import it, so it is set before any of them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
settings.register_profile(
    "dev", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "ci",
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Servers, engines and compilers end with their tests; what does not is an error of the last one."""
    before = threads()  # the runner's own
    yield
    gc.unfreeze()  # engines that are gone: the thread that reads experts ends with the last of them
    gc.collect()
    left = [thread for thread in threads() if thread not in before]
    for thread in left:
        thread.join(timeout=10)
    assert children() == []
    assert [thread for thread in left if thread.is_alive()] == []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu need an NVIDIA GPU; elsewhere they are skipped with that reason."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
