"""The native parsing endpoints: SGLang's /parse_function_call and smg's /parse/function_call.

SGLang: {"text", "tools", "tool_call_parser"} -> {"normal_text", "calls": [{tool_index, name,
parameters}]}; smg takes the same and answers {"remaining_text", "tool_calls": [{function: {name,
arguments}}], "success"}. `tool_index` is the position in `tools`, -1 for a tool not listed
(protocol.md 3.5).
"""

from __future__ import annotations

from typing import Any

from conformance.protocols.observation import Call, Observation, count, rows, table, text


def observe(seen: Observation) -> None:
    """Fills `seen` from a reply of either shape."""
    document = seen.document
    if document is None:
        return
    if not seen.answered:
        seen.error = document.get("error", document)
        return
    if "tool_calls" in document:
        _smg(seen, document)
    else:
        _sglang(seen, document)
    seen.finish = "tool_calls" if seen.calls else "stop"
    seen.finishes = 1


def _sglang(seen: Observation, document: dict[str, Any]) -> None:
    if not isinstance(document.get("normal_text"), str) or not isinstance(
        document.get("calls"), list
    ):
        seen.violate("parse/shape", f"expected normal_text and calls, got {sorted(document)}")
    seen.content = text(document.get("normal_text"))
    for raw in rows(document.get("calls")):
        call = Call("", text(raw.get("name")), text(raw.get("parameters")))
        call.index = count(raw.get("tool_index"))
        seen.calls.append(call)
        names = seen.declared
        want = names.index(call.name) if call.name in names else -1
        if call.index != want:
            seen.violate(
                "parse/tool-index",
                f"expected tool_index {want} for {call.name!r}, got {raw.get('tool_index')!r}",
            )


def _smg(seen: Observation, document: dict[str, Any]) -> None:
    if not isinstance(document.get("remaining_text"), str) or document.get("success") is not True:
        seen.violate("parse/shape", "expected remaining_text and success true")
    seen.content = text(document.get("remaining_text"))
    for raw in rows(document.get("tool_calls")):
        function = table(raw.get("function"))
        seen.calls.append(Call("", text(function.get("name")), text(function.get("arguments"))))
