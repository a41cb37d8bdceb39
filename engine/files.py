"""Files that a library writes its own way, written as all others are."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def usual_file(path: Path) -> Iterator[Path]:
    """Give the path to have a file written to; afterwards it has the mode it had, or that of a new one.

    safetensors puts a file of its own, of mode 0600, in the place of what it is given: of a link, too,
    so what is given here is where that leads.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    with target.open("ab") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    yield target
    target.chmod(mode)
