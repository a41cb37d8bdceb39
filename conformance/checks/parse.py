"""Replies of the native parsing endpoints."""

from conformance.checks.registry import grammar

grammar("parse/shape", "The reply has the endpoint's documented fields.", protocols=["parse"])
grammar(
    "parse/tool-index",
    "tool_index is the position of the tool in `tools`, -1 for one that is not listed.",
    protocols=["parse"],
)
