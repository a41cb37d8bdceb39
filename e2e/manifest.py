"""Reads clients.toml into values, and refuses what it does not know."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent
#: Where environments, homes and scripts live; git ignores it.
WORK = FOLDER / ".env"


class ManifestError(Exception):
    """clients.toml is wrong; the message names the client and the field."""


@dataclass(frozen=True, slots=True)
class Run:
    """One loop of one client; see clients.toml for the fields."""

    protocol: Literal["chat", "responses", "messages"]
    stream: bool
    variant: str = ""
    script: str = "text"
    client_errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Client:
    """One client: what is installed and how it is started; see clients.toml for the fields."""

    name: str
    kind: Literal["python", "node"]
    packages: tuple[str, ...]
    runs: tuple[Run, ...]
    driver: str = ""
    argv: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Its environment."""
        return WORK / self.name

    @property
    def version(self) -> str:
        """That of the first package."""
        return self.packages[0].rpartition("@" if self.kind == "node" else "==")[2]


def load(text: str) -> dict[str, Client]:
    """Read the text of a manifest.

    Returns:
        Clients by name, in the order of the file.

    Raises:
        ManifestError: a field is missing, unknown or has a value that cannot be used.
    """
    clients = {}
    for name, fields in tomllib.loads(text).items():
        try:
            clients[name] = _client(name, fields)
        except (TypeError, ManifestError) as error:
            raise ManifestError(f"{name}: {error}") from error
    return clients


def _client(name: str, fields: dict[str, Any]) -> Client:
    runs = tuple(
        Run(**{**run, "client_errors": tuple(run.get("client_errors", ()))})
        for run in fields.pop("runs")
    )
    client = Client(
        name=name,
        packages=tuple(fields.pop("packages")),
        argv=tuple(fields.pop("argv", ())),
        runs=runs,
        **fields,
    )
    if bool(client.driver) == bool(client.argv):
        raise ManifestError("expected one of driver and argv")
    if client.kind not in ("python", "node"):
        raise ManifestError(f"kind: expected python or node, got {client.kind!r}")
    for run in runs:
        if run.protocol not in ("chat", "responses", "messages"):
            raise ManifestError(f"protocol: expected one of three, got {run.protocol!r}")
    return client


def clients() -> dict[str, Client]:
    """Read clients.toml."""
    return load((FOLDER / "clients.toml").read_text())
