"""JUnit XML, one test case per variant."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

from conformance.report.record import bad_checks

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(data: dict[str, Any]) -> str:
    """The report as XML text.

    Args:
        data: A recorded run.
    """
    suite = ET.Element("testsuite", name="bathyal-conform", time=str(data["elapsed_s"]))
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for result in data["results"]:
        case = ET.SubElement(
            suite,
            "testcase",
            classname=result["case"].replace("/", "."),
            name=result["variant"],
            time=str(result["elapsed_ms"] / 1000),
        )
        totals["tests"] += 1
        bad = bad_checks(result)
        text = _clean("\n".join(f"{c['check']}: {c.get('message', '')}" for c in bad))
        if result["verdict"] == "fail":
            totals["failures"] += 1
            node = ET.SubElement(case, "failure", message=_clean(result["why"]))
            node.text = text + "\n" + _clean(result.get("exchange", {}).get("curl", ""))
        elif result["verdict"] == "error":
            totals["errors"] += 1
            ET.SubElement(case, "error", message=text)
        elif result["verdict"] == "skip":
            totals["skipped"] += 1
            reasons = {c.get("message", "") for c in result["checks"]}
            ET.SubElement(case, "skipped", message=_clean("; ".join(sorted(reasons))))
        elif text:
            ET.SubElement(case, "system-out").text = "warnings:\n" + text
    for entry in data["stale"]:
        case = ET.SubElement(suite, "testcase", classname="expected-failures", name=entry)
        ET.SubElement(case, "failure", message="stale entry of the expected-failures file")
        totals["tests"] += 1
        totals["failures"] += 1
    for name, number in totals.items():
        suite.set(name, str(number))
    ET.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suite, encoding="unicode")


def _clean(text: str) -> str:
    """XML has no form for most control characters; they are shown by their code."""
    return _FORBIDDEN.sub(lambda m: f"\\u{ord(m.group()):04x}", text)
