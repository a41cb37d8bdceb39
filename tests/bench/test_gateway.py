"""The gateway's benchmark: servers that do not start say why, and its variables are no settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gateway_others as others
from bench.gateway import others_port, server
from gateway.settings import ENV_PREFIX, Settings

SERVE = [sys.executable, "-m", "gateway", "serve", "--port", "0"]


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """What it wrote to stderr stands behind what went wrong, and it has ended."""
    missing = tmp_path / "none.jsonl"
    with (
        pytest.raises(SystemExit, match=r"gateway did not start: bathyal: .*none\.jsonl"),
        server([*SERVE, "--backend", f"scripted:{missing}"], None),
    ):
        pass
    silent = [sys.executable, "-c", "pass"]
    with pytest.raises(SystemExit, match="did not start, and said nothing"), server(silent, None):
        pass
    loud = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(SystemExit, match="does not answer: no such model"),
        others.running(loud, others_port(), "m", None),
    ):
        pass


def test_the_benchmarks_variables_are_no_settings(tmp_path: Path) -> None:
    """They name results and commit, and a server that inherits them starts."""
    given = {"BENCH_RESULTS": str(tmp_path), "BENCH_COMMIT": "abc"}
    assert Settings.load(given, {}) == Settings()
    assert not any(name.startswith(ENV_PREFIX) for name in given)
    show = "from bench import rows; print(rows.RESULTS, rows.commit())"
    found = subprocess.run(
        [sys.executable, "-c", show],
        env=os.environ | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == [str(tmp_path), "abc"]
