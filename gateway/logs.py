"""Log lines as JSON on stderr, one object a line.

Prompts, replies and keys are never passed to a logger; a request's line holds its call's numbers.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import orjson

from gateway.call import Call

requests = logging.getLogger("gateway.requests")


class JsonLines(logging.Formatter):
    """Formats a record, and the `fields` of its extra, as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def to_stderr(level: str) -> None:
    """Send what the process logs to stderr, from a level on."""
    # what no line tells need not be looked up for each
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # libraries speak up only where something is wrong
    for library in ("asyncio", "httpx", "uvicorn"):
        logging.getLogger(library).setLevel(logging.WARNING)


def log_call(call: Call, route: str, method: str, seconds: float) -> None:
    """Write the line of one call."""
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
    # not `requests.info`: it would look up the caller's file and line, which the line does not tell
    record = logging.LogRecord(requests.name, logging.INFO, "", 0, "request", (), None)
    record.fields = fields
    requests.handle(record)
