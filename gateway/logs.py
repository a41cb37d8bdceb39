"""Log lines as JSON on stderr, one object a line.

Prompts, replies and keys are never passed to a logger; a request's line holds its call's numbers.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

from gateway.call import Call

requests = logging.getLogger("gateway.requests")


class JsonLines(logging.Formatter):
    """Formats a record, and the `fields` of its extra, as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the line."""
        line = {
            **_head(record.created, record.levelname.lower(), record.name),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class _Handler(logging.StreamHandler[TextIO]):
    """The process's own; stderr is flushed at every line's end."""


def _head(created: float, level: str, logger: str) -> dict[str, Any]:
    time_ = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
    return {"time": time_, "level": level, "logger": logger}


def to_stderr(level: str) -> None:
    """Send what the process logs to stderr, from a level on."""
    # what no line tells need not be looked up for each
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = _Handler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # libraries speak up only where something is wrong
    for library in ("asyncio", "httpx", "uvicorn"):
        logging.getLogger(library).setLevel(logging.WARNING)


def log_call(call: Call, route: str, method: str, seconds: float) -> None:
    """Write the line of one call: straight to where lines go, where that is known."""
    if not requests.isEnabledFor(logging.INFO):
        return
    fields = {
        "request_id": call.id,
        "key": call.key,
        "method": method,
        "route": route,
        "status": call.status,
        "outcome": call.outcome,
        "ms": round(seconds * 1000, 1),
        **call.notes,
    }
    root = logging.root.handlers
    if len(root) == 1 and isinstance(root[0], _Handler) and not requests.handlers:
        line = {**_head(time.time(), "info", requests.name), "message": "request", **fields}
        root[0].stream.write(orjson.dumps(line, default=str).decode() + "\n")
    else:
        requests.info("request", extra={"fields": fields})
