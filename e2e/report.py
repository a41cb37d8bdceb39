"""Keeps the rows of results, and writes the page that shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from e2e.manifest import FOLDER, Client

ROOT = FOLDER.parent
RESULTS = ROOT / "bench" / "results" / "e2e.json"
PAGE = ROOT / "docs" / "clients.md"

HEAD = """# Clients

Real programs, installed from npm and PyPI as they are published, each driven through a loop against
our server: the model calls a tool that the client declares, the client runs it and sends the result,
the model answers. `make e2e` runs all of them, `make e2e ARGS="codex openai-py"` some, and writes this
page and its rows in `bench/results/e2e.json`. It needs the network to install, and node 20 or later
for what comes from npm; `make test` does without it.

The model is a script (`--backend scripted:FILE`), so that a verdict says nothing of a model. The
server runs with the default profile `agent`, an API key, and nothing set for a particular client.
PASS means all of this:

- the client ended well, and its output has the final answer;
- its tool ran, once asked, with the very arguments of the script (quotes, a backslash, a line break,
  other scripts, a number; for coding agents a shell command);
- the second request carried the tool's result, which nobody knew before the tool ran;
- both requests spoke the protocol in the table, streamed or whole as it says;
- the server logged no warning and answered nothing with 4xx or 5xx. One client asks for a 400: the
  tool runner of anthropic-py first offers a server-side thread, and sends all history once refused.

Each client gets an empty home and no variable of the caller's. Where the system lets an ordinary user
have a network namespace, server and client run in one that has nothing but loopback.

Beside the loops stand 203 bodies that such clients were recorded with (105 runs; longer
texts and all but a few tools were cut there, so schemas that were cut away are put back as
`{"type": "object"}`). Under profile `agent` 200 are accepted; the others are refused by a rule:

| recording | refused | why |
|---|---|---|
| anthropic-py, tool runner, 1st | 400, `thread` | no threads are kept; the SDK reads the code and sends all history, as in its loop above |
| claude-code, image, 3rd; codex, image, 2nd | 400 `image_not_supported` | the model that is served has no vision tower |

`item_reference` is resolved from the store of responses; for an id that is not kept it is 400, with
the field and the words "send it whole". tests/parsers/test_client_requests.py plays the shapes of
these bodies, composed anew, with the same list of refusals.

`reasoning` says whose doing it is that the model sees its earlier reasoning in the second turn: the
client sent it back, the server restored it (by the call's id, or from the response it keeps), or none
did.
"""


def read(path: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows of the last runs."""
    return orjson.loads(path.read_bytes()) if path.is_file() else []


def merged(
    old: Iterable[dict[str, Any]], new: Sequence[dict[str, Any]], clients: dict[str, Client]
) -> list[dict[str, Any]]:
    """Put new rows in the place of their clients' old ones, in the manifest's order."""
    fresh = {row["client"] for row in new}
    rows = [row for row in old if row["client"] not in fresh and row["client"] in clients]
    order = list(clients)
    return sorted([*rows, *new], key=lambda row: order.index(row["client"]))


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Write the page."""
    passed = sum(row["verdict"] == "PASS" for row in rows)
    isolated = sum(row["isolated"] for row in rows)
    lines = [
        HEAD,
        f"{passed} of {len(rows)} loops pass; {isolated} ran in such a namespace.",
        "",
        "| client | version | protocol | driven as | verdict | reasoning | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        way = ", ".join(filter(None, ["stream" if row["stream"] else "whole", row["variant"]]))
        cells = (
            *(row["client"], row["version"], row["protocol"], way),
            *(row["verdict"], row["reasoning"], row["note"]),
        )
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def write(rows: Sequence[dict[str, Any]]) -> None:
    """Write rows and page."""
    RESULTS.write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2) + b"\n")
    PAGE.write_text(page(rows))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
