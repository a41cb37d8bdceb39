"""Installs clients, drives each through its loops, and writes the results.

    python -m e2e.run             all clients
    python -m e2e.run NAME ...    these; the rows of the others stay

Ends with 0 where every loop passed. Each client is driven in a process of its own, inside a network
namespace with nothing but loopback where the system has them for this user.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

import orjson

from e2e import report
from e2e.drive import drive
from e2e.environments import InstallError, install
from e2e.manifest import FOLDER, Client, clients

ISOLATED = (
    *("unshare", "--map-root-user", "--net", "sh", "-c"),
    *('ip link set lo up && exec "$@"', "sh"),
)


def main(arguments: list[str]) -> int:
    """Run the program; see the module's text.

    Args:
        arguments: without the program's name.

    Returns:
        The exit status.
    """
    known = clients()
    parser = argparse.ArgumentParser(prog="python -m e2e.run", description=__doc__)
    parser.add_argument("names", nargs="*", help="clients to run; all where none is given")
    # how this program calls itself inside the namespace
    parser.add_argument("--loops", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        parser.error(f"no client {unknown[0]!r}; there are {', '.join(known)}")
    if options.loops:
        (name,) = options.names
        for run in known[name].runs:
            sys.stdout.buffer.write(orjson.dumps(drive(known[name], run)) + b"\n")
            sys.stdout.flush()
        return 0
    prefix = ISOLATED if _isolates() else ()
    if not prefix:
        _say("no network namespace here: clients are only told to stay offline")
    passed = True
    for name in options.names or known:
        rows = _rows(known[name], prefix)
        for row in rows:
            passed &= row["verdict"] == "PASS"
            way = f"{row['protocol']} {'stream' if row['stream'] else 'whole'} {row['variant']}"
            _say(f"{row['verdict']} {name} {row['version']} {way.strip()} {row['note']}".strip())
        report.write(report.merged(report.read(), rows, known))  # now: the next may be interrupted
    return 0 if passed else 1


def _rows(client: Client, prefix: tuple[str, ...]) -> list[dict[str, Any]]:
    """Drive all loops of a client; one that cannot be installed or driven fails them all."""
    try:
        install(client)
    except InstallError as error:
        return [{**row, "isolated": False} for row in _failed(client, f"not installed: {error}", 0)]
    command = [*prefix, sys.executable, "-m", "e2e.run", "--loops", client.name]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, check=False)
    rows = [orjson.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        last_words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        rows += _failed(client, f"not driven: {' '.join(last_words)}", len(rows))
    return [{**row, "isolated": bool(prefix)} for row in rows]


def _failed(client: Client, note: str, from_run: int) -> list[dict[str, Any]]:
    return [
        {
            "client": client.name,
            "version": client.version,
            "protocol": run.protocol,
            "stream": run.stream,
            "variant": run.variant,
            "verdict": "FAIL",
            "note": note,
            "reasoning": "none",
            "seconds": 0.0,
        }
        for run in client.runs[from_run:]
    ]


def _isolates() -> bool:
    try:
        return subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
