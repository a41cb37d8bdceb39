"""The check at the end of a session sees what a test left behind."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tests.leftovers import children, threads


@pytest.mark.skipif(sys.platform != "linux", reason="children are listed in /proc")
def test_a_child_left_running_is_seen() -> None:
    """A process that nobody ended is listed with what it runs, until it has been waited for."""
    before = children()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    assert next(line for line in children() if line not in before).startswith(f"{child.pid} ")
    child.communicate(b"\n")

    assert children() == before


def test_a_thread_left_running_is_seen() -> None:
    """A thread that keeps the interpreter alive is listed, a daemon is not."""
    ended, before = threading.Event(), threads()
    left = threading.Thread(target=ended.wait)
    daemon = threading.Thread(target=ended.wait, daemon=True)
    left.start()
    daemon.start()

    assert [thread for thread in threads() if thread not in before] == [left]
    ended.set()
    left.join()
    daemon.join()

    assert threads() == before
