"""The rows of benchmarks: right sums, and all that is needed to repeat a measurement."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, strategies as st

from bench import rows

FIGURES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(FIGURES, st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    """Our percentile is the one of numpy's default method."""
    assert rows.percentile(values, percent) == pytest.approx(
        float(np.percentile(values, percent)), rel=1e-9, abs=1e-6
    )


def test_a_spread_has_its_count() -> None:
    """Median, p10, p90 and the number of repeats, rounded."""
    assert rows.spread([3.0, 1.0, 2.0, 5.0, 4.00049]) == {
        "median": 3.0,
        "p10": 1.4,
        "p90": 4.6,
        "n": 5,
    }


def test_a_row_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Device, versions, commit, date and command stand in every row; a file is one run."""
    monkeypatch.setattr(sys, "argv", ["whatever", "--repeats", "3", "--model", "a b"])
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    made = rows.make_rows("bench.decode", "cpu", [{"bench": "decode", "batch": 1}])

    rows.write_rows("x", [*made, *made])
    path = rows.write_rows("x", made)

    (line,) = path.read_bytes().splitlines()
    row = orjson.loads(line)
    assert row["command"] == "python -m bench.decode --repeats 3 --model 'a b'"
    assert row["bench"] == "decode"
    assert row["device"]["kind"] == "cpu"
    assert row["device"]["cores"] >= 1
    assert row["device"]["cpu"]
    assert {"python", "torch", "bathyal"} <= set(row["versions"])
    assert len(row["date"]) == 10


def test_the_commit_tells_changed_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of code that is not committed do not pass for the commit's."""

    def git(*args: str) -> None:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *args]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(rows, "ROOT", tmp_path)
    assert rows.commit() == "unknown"
    git("init", "-q")
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    clean = rows.commit()
    (tmp_path / "engine" / "a.py").write_text("2")

    assert len(clean) == 12
    assert rows.commit() == f"{clean}+changes"
