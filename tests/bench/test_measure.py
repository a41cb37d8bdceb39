"""The run of all GPU figures: order, limits, logs and what is left when it is cut."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import pytest

from bench import measure, paged_plot
from bench.measure import Job, Run
from bench.rows import ROOT
from tests.engine.kernels.conftest import SAME


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measure, "LOGS", tmp_path)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    return tmp_path


def work(*jobs: Job, seconds: float = 60) -> Run:
    found = Run(deque(jobs), time.monotonic() + seconds + measure.REST)
    found.lane(0)
    return found


def test_commands_run_in_order_into_their_logs(logs: Path) -> None:
    """Each command's output is in its log under its command line; a failure stops nobody."""
    ended = work(
        Job("first", "calendar 2026 11", 20), Job("bad", "calendar x", 20), Job("last", "this", 20)
    ).ended

    assert [(one.name, one.code) for one in ended] == [("first", 0), ("bad", 2), ("last", 0)]
    lines = (logs / "first.log").read_text().splitlines()
    assert lines[0] == "$ python -m calendar 2026 11"
    assert "November 2026" in lines[1]


def test_a_command_that_takes_too_long_is_cut(logs: Path) -> None:
    """It ends with all it has started, keeps what it wrote, and the next one runs."""
    found = work(Job("long", "timeit -n 1 -r 1 -v 'import time; time.sleep(60)'", 1), Job("next", "this", 20))  # fmt: skip

    assert [(one.name, one.code) for one in found.ended] == [("long", None), ("next", 0)]
    assert not found.running


def test_nothing_begins_when_the_time_is_over(logs: Path) -> None:
    """Commands that no time is left for are named as cut and do not run."""
    found = work(Job("late", "this", 20), seconds=0)

    assert [(one.name, one.code) for one in found.ended] == [("late", None)]
    assert not (logs / "late.log").exists()


def test_logs_of_tests_are_joined(logs: Path) -> None:
    """After each process of tests one file holds all their logs so far."""
    work(Job("tests-2", "calendar 2026 2", 20), Job("tests-1", "calendar 2026 1", 20))

    text = (logs / "gpu-tests.log").read_text()
    assert text.index("January 2026") < text.index("February 2026")


def test_every_command_can_be_chosen() -> None:
    """Words choose by name or its beginning, in their order; unknown ones are refused; names are unique."""
    assert [job.name for job in measure.chosen(["tests"])] == ["tests-1", "tests-2", "tests-3"]
    assert measure.chosen([]) == list(measure.JOBS)
    assert [job.name for job in measure.chosen(["start", "replay", "start"])] == ["start", "replay"]
    assert len({job.name for job in measure.JOBS}) == len(measure.JOBS)
    with pytest.raises(SystemExit, match="beginning of one of engine-v4"):
        measure.chosen(["nothing"])


def test_lanes_share_the_cores() -> None:
    """Each lane has as many cores as any other and none has another one's."""
    assert measure.shares(range(9), 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert measure.shares([3, 5], 1) == [[3, 5]]
    assert measure.shares([7], 4) == [[7]] * 4


def test_gpu_tests_are_run_once() -> None:
    """Files of kernels' tests that one process leaves out are another one's."""
    files = {
        str(file.relative_to(ROOT)) for file in (ROOT / "tests/engine/kernels").glob("test_*.py")
    }
    same = {f"tests/engine/kernels/test_{name}.py" for name in SAME}
    unmarked = {file for file in files if "mark.gpu" not in (ROOT / file).read_text()}
    assert unmarked <= same <= files
    first, others, last = measure.TEST_PARTS
    assert first.split() == ["tests/engine/kernels", *(f"--ignore={f}" for f in sorted(same))]
    assert others == "tests/engine --ignore=tests/engine/kernels"
    assert last.split() == sorted(same)


def test_the_curve_is_drawn_when_its_rows_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that are older than the run leave the picture; without matplotlib nothing is drawn."""
    rows, drawn = tmp_path / "rows.jsonl", list[list[Path]]()
    rows.write_text("")
    monkeypatch.setattr(paged_plot, "sources", lambda: [rows])
    monkeypatch.setattr(paged_plot, "draw", lambda paths, to: drawn.append(paths))

    measure.draw_anew(time.time() + 60)
    assert not drawn
    measure.draw_anew(time.time() - 60)
    assert drawn == [[rows]]
    monkeypatch.setattr(measure, "find_spec", lambda name: None)
    measure.draw_anew(time.time() - 60)
    assert drawn == [[rows]]
    assert "matplotlib is not installed" in capsys.readouterr().out
