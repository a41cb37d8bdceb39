"""Makes a client's environment: its packages and nothing else, under e2e/.env/NAME."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from e2e.manifest import Client

NPM = ("npm", "install", "--no-audit", "--no-fund", "--no-save", "--loglevel=error", "--prefix")
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


class InstallError(Exception):
    """The packages could not be installed; the message is the installer's last words."""


def install(client: Client) -> None:
    """Install a client's packages unless they are there.

    Raises:
        InstallError: pip or npm failed, or is not there.
    """
    stamp = client.folder / "packages"
    wanted = "\n".join(client.packages)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    client.folder.mkdir(parents=True, exist_ok=True)
    if client.kind == "python":
        _call(sys.executable, "-m", "venv", str(client.folder / "venv"))
        _call(str(interpreter(client)), *PIP, *client.packages)
    else:
        _call(*NPM, str(client.folder), *client.packages)
    stamp.write_text(wanted)


def interpreter(client: Client) -> Path:
    """The Python of a client's own environment."""
    return client.folder / "venv" / "bin" / "python"


def _call(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InstallError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        last_words = (done.stderr or done.stdout).strip()[-300:]
        raise InstallError(f"{command[0]} ended with {done.returncode}: {last_words}")
