"""Checks, by subject; importing this package registers them all."""

from conformance.checks import (
    arguments,
    choices,
    cross,
    errors,
    expected,
    leak,
    parse,
    tool_calls,
    usage,
    wire,
)
from conformance.checks.registry import CHECKS, Check

__all__ = [
    "CHECKS",
    "Check",
    "arguments",
    "choices",
    "cross",
    "errors",
    "expected",
    "leak",
    "parse",
    "tool_calls",
    "usage",
    "wire",
]
