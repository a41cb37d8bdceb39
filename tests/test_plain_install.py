"""What `pip install bathyal` brings is enough to serve: no GPU stack, nothing of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

#: Runs with the names of its first argument absent.
PROBE = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # None: not to be imported, nor found
import importlib, pkgutil
for room in ("gateway", "engine", "parsers", "conformance"):
    for module in pkgutil.walk_packages(importlib.import_module(room).__path__, room + "."):
        # the one module that is pytest's own, and those that run when imported
        if not module.name.endswith(("pytest_plugin", "__main__")):
            importlib.import_module(module.name)
from engine import TINY_CHECKPOINT
from engine.api import GenerateRequest, SamplingParams
from engine.core import load_engine
from engine.options import EngineConfig
for runner in ("reference", "fast"):
    options = EngineConfig(device="cpu", runner=runner, max_model_len=64, max_num_seqs=1)
    core = load_engine(TINY_CHECKPOINT, options)
    core.submit(GenerateRequest("one", (1, 2, 3), SamplingParams(max_tokens=2, temperature=0.0)))
    ids = []
    while core.has_work:
        for delta in core.step():
            assert delta.error is None, delta.error
            ids += delta.token_ids
    core.close()
    print(runner, len(ids) > 0)
"""


def of_a_plain_install() -> set[str]:
    """Distributions that bathyal's dependencies bring, without extras."""
    found: set[str] = set()
    wanted = ["bathyal"]
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in found:
            continue
        found.add(name)
        for line in distribution(name).requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                wanted.append(needed.name)
    return found


def absent() -> set[str]:
    """Top-level names that only the extras and the groups for development bring."""
    plain = of_a_plain_install()
    return {
        name
        for name, owners in packages_distributions().items()
        if not plain.intersection(map(canonicalize_name, owners))
    }


def probe(*more: str) -> subprocess.CompletedProcess[str]:
    """Import every module and serve two tokens without what a plain install lacks."""
    names = ",".join({*absent(), *more})
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", PROBE, names],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_plain_install_serves() -> None:
    """Every module is imported and both forms of the engine draw tokens."""
    assert {"pytest", "openai"} <= absent()

    result = probe()

    assert result.stdout == "reference True\nfast True\n", result.stderr


@pytest.mark.parametrize("missing", ["torch", "orjson"])
def test_a_package_that_is_missing_would_be_seen(missing: str) -> None:
    """The probe ends at what it cannot import."""
    result = probe(missing)

    assert f"ModuleNotFoundError: import of {missing} halted" in result.stderr
    assert result.returncode != 0
