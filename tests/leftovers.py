"""What this process still runs: child processes and threads that would outlive a test."""

from __future__ import annotations

import threading
from pathlib import Path


def children() -> list[str]:
    """Command lines of this process's live children; none where the system has no /proc."""
    found = []
    for listing in Path("/proc/self/task").glob("*/children"):
        for pid in listing.read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty: ended, not waited for
            found.append(f"{pid} {command.replace(bytes(1), b' ').decode(errors='replace')}")
    return found


def threads() -> list[threading.Thread]:
    """Threads that keep the interpreter from ending."""
    return [
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.daemon
    ]
