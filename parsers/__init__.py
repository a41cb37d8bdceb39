"""Sans-IO protocol core: request bytes to prompt ids, token ids to wire bytes."""

from __future__ import annotations

from parsers.codec import Codec
from parsers.errors import BootError, ClientError, CodecError, ReplyError, error_body
from parsers.exchange import Exchange
from parsers.values import Constraint, Sampling, ServedModel

__all__ = [
    "BootError",
    "ClientError",
    "Codec",
    "CodecError",
    "Constraint",
    "Exchange",
    "ReplyError",
    "Sampling",
    "ServedModel",
    "error_body",
]
