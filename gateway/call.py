"""One HTTP call as it is counted and logged: who, what, and how it went.

Written by whoever learns something, read once at the end. Holds numbers, names and ids; never a
prompt, a reply or a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.types import Scope

from parsers import Protocol

_SCOPE_KEY = "bathyal.call"
#: Scope key of the server's own send: what stands before the routes looks at the start of a reply
#: only, so a stream's frames need not pass through it.
BODY_SEND = "bathyal.send"
#: Status of a call whose client left before its reply began, as other servers count it.
CLIENT_LEFT_STATUS = 499


def header(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> str:
    """Return a request header's value, the first of several; empty where it was not sent.

    Args:
        headers: of an ASGI scope, whose names are in lower case.
        name: in lower case.
    """
    return next((value.decode("latin-1") for key, value in headers if key == name), "")


def whole_number(text: str) -> int | None:
    """Read a number of a header or a query.

    Returns:
        None where the text is none, or so long that nothing can be meant by it: Python refuses to
        convert more than some thousand digits.
    """
    return int(text) if text.isdecimal() and len(text) <= 18 else None


@dataclass(slots=True)
class Call:
    """What is known of one call.

    Attributes:
        id: request id, the client's own or a fresh one.
        protocol: whose error shape the caller reads.
        flat_errors: Chat errors are told in SGLang's form.
        path: as it was sent; the scope holds the canonical one.
        key: name of the caller's key.
        salt: of what is kept of the caller's prompts; never logged.
        status: of the reply, 0 while none was sent; `CLIENT_LEFT_STATUS` where nobody was there to take one.
        outcome: how it ended where that was not by itself: `client_left`, `slow_reader` or the code
            of an error.
        notes: further fields of the log line.
    """

    id: str
    protocol: Protocol
    path: str
    flat_errors: bool = False
    key: str = "-"
    salt: str = ""
    status: int = 0
    outcome: str = "done"
    notes: dict[str, Any] = field(default_factory=dict)

    def attach(self, scope: Scope) -> None:
        """Make the call known to whoever sees the scope."""
        scope[_SCOPE_KEY] = self

    @classmethod
    def of(cls, scope: Scope) -> Call:
        """Return the call of a scope that came through `gateway.front.Front`."""
        return cast(Call, scope[_SCOPE_KEY])
