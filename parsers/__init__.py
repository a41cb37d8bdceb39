"""Sans-IO protocol core: request bytes to prompt ids, token ids to wire bytes."""

from __future__ import annotations

from parsers.codec import Codec
from parsers.dsml import DsmlParser
from parsers.errors import BootError, ClientError, CodecError, ReplyError, error_body
from parsers.exchange import Exchange
from parsers.native import ParsedCall, ParsedCalls, parse_function_call
from parsers.policy import BARE, Action, Doubt, GatePolicy, Hold
from parsers.report import Repaired, Report, Withheld
from parsers.toolset import ToolSet
from parsers.values import Constraint, Sampling, ServedModel

__all__ = [
    "BARE",
    "Action",
    "BootError",
    "ClientError",
    "Codec",
    "CodecError",
    "Constraint",
    "Doubt",
    "DsmlParser",
    "Exchange",
    "GatePolicy",
    "Hold",
    "ParsedCall",
    "ParsedCalls",
    "Repaired",
    "ReplyError",
    "Report",
    "Sampling",
    "ServedModel",
    "ToolSet",
    "Withheld",
    "error_body",
    "parse_function_call",
]
