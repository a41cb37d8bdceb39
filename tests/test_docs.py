"""The README's and the quickstart's commands, run as they stand against a real server."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.readme import PAGES as PAGES_WITH_FIGURES, rewritten

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/quickstart.md")
BLOCK = re.compile(r"```(\w*)\n(.*?)```\n(?:\n```\n(.*?)```)?", re.S)


def blocks() -> Iterator[tuple[str, str, str]]:
    """(language, code, expected output) of each block that talks to the server."""
    for page in PAGES:
        for language, code, output in BLOCK.findall((ROOT / page).read_text()):
            if language == "python" or "curl" in code:
                wanted = output
                if language == "python":
                    wanted = "".join(
                        line.split("# ", 1)[1] + "\n" for line in code.splitlines() if "# " in line
                    )
                yield language, code, wanted


BLOCKS = list(blocks())


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "serve", "--port", str(port)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            assert process.poll() is None, "the server ended"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                    break
            except OSError:
                time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def test_the_pages_show_something_to_run() -> None:
    """The check below is not empty: two Python programs a page at most, and the curl lines."""
    assert {"python", "sh"} == {language for language, _, _ in BLOCKS}
    assert len(BLOCKS) >= 6
    assert all(wanted for _, _, wanted in BLOCKS)


@pytest.mark.parametrize(("language", "code", "wanted"), BLOCKS)
def test_a_page_says_what_happens(server: str, language: str, code: str, wanted: str) -> None:
    """A block prints what the page says it prints."""
    code = code.replace("127.0.0.1:8000", server)
    program = [sys.executable, "-c", code] if language == "python" else ["bash", "-c", code]

    result = subprocess.run(program, capture_output=True, text=True, timeout=120)

    assert wanted.strip() == result.stdout.strip(), result.stderr


def test_figures_are_those_of_the_results() -> None:
    """README and model card show what bench/results holds (`python -m bench.readme`)."""
    for page in PAGES_WITH_FIGURES:
        text, fresh = rewritten(page)

        assert fresh == text, page
