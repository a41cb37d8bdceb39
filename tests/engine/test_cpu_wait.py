"""Threads of torch that wait for one another sleep soon."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from engine.cpu_wait import SPIN_TURNS

COMMAND = """
import sys
from gateway.cli import main
assert "torch" not in sys.modules
try:
    main(["--version"])
except SystemExit:
    pass
import torch
"""


def turns_of_openmp(code: str, **environ: str) -> int:
    """Give what OpenMP itself says that it read when torch was loaded."""
    free = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**free, "OMP_DISPLAY_ENV": "VERBOSE", **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    (found,) = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", result.stderr)
    return int(found)


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp comes with torch on Linux")
@pytest.mark.parametrize(
    ("code", "environ", "turns"),
    [
        (COMMAND, {}, SPIN_TURNS),
        (COMMAND, {"GOMP_SPINCOUNT": "7"}, 7),
        (COMMAND, {"OMP_WAIT_POLICY": "passive"}, 0),
    ],
    ids=["left open", "user's turns", "user's policy"],
)
def test_the_command_says_how_long_threads_spin(
    code: str, environ: dict[str, str], turns: int
) -> None:
    """Briefly, unless the user said otherwise; and before torch is loaded."""
    assert turns_of_openmp(code, **environ) == turns


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp comes with torch on Linux")
@pytest.mark.parametrize(
    "code",
    ["import torch", "import torch" + COMMAND.replace("assert", "0 and")],
    ids=["unsaid", "too late"],
)
def test_a_command_that_does_not_say_it_would_be_seen(code: str) -> None:
    """What OpenMP takes by itself is another number."""
    assert turns_of_openmp(code) != SPIN_TURNS
