"""Makes the ground-truth table of the prompt tier for a tokenizer.

    python -m tests.conformance.prompt_table --tokenizer tokenizer.json --version v4.1 \\
        --prefix prompt-mine --out mine.json
    bathyal-conform run --cases mine.json --tier prompt --supported mine-tokenizer ...

The questions are those of `prompt-v4/`; each is rendered and encoded by the official codec, in
every protocol that it accepts, and counted. The cases need the feature "NAME-tokenizer" (here
"mine-tokenizer"), as their counts hold for one template and one vocabulary only. The suite itself
imports no codec; this script stands beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import orjson

from conformance import load
from conformance.model import PROTOCOLS, Case, Protocol, Variant
from conformance.protocols.render import render

VERSIONS: Mapping[str, tuple[Any, Any]] = {
    "v4": (recipe.DeepseekV4Encoding, recipe.ModelVersion.DeepseekV4Pro),
    "v4.1": (recipe.DeepseekV41Encoding, recipe.ModelVersion.DeepseekV41Flash),
}
REQUESTS: Mapping[Protocol, Any] = {
    "chat": recipe.ChatCompletionRequest,
    "responses": recipe.ResponsesRequest,
    "messages": recipe.MessagesRequest,
}
SOURCE_PREFIX = "prompt-v4/"


class Counter:
    """Counts prompt tokens as the official codec makes them.

    Args:
        tokenizer: tokenizer.json of the model.
        version: "v4" or "v4.1".
    """

    def __init__(self, tokenizer: Path, version: str) -> None:
        encoding, self._version = VERSIONS[version]
        self._encoding = encoding().with_tokenizer(recipe.Tokenizer.from_file(str(tokenizer)))
        self._tools = load.load_tools()

    def count(self, case: Case, protocol: Protocol) -> int | None:
        """Prompt tokens of a case in a protocol; None where the codec cannot say.

        It refuses some requests, and in Messages it leaves out a forced choice (`any` is auto) and
        knows no JSON mode without a schema.
        """
        neutral = case.request
        if protocol == "messages" and ("tool_choice" in neutral or neutral.get("json") is True):
            return None
        _, body = render(Variant(case, protocol, "whole", None), "m", self._tools)
        for message in body.get("messages", ()):
            # The codec's chat form knows no developer, which is a system text by another name.
            if message.get("role") == "developer":
                message["role"] = "system"
        options = recipe.ConversionOptions().with_model_alias("m", self._version)
        try:
            converted = REQUESTS[protocol](orjson.dumps(body)).convert(options)
        except (ValueError, recipe.ConversionError):
            return None
        return len(self._encoding.encode(converted.conversation))


def table(tokenizer: Path, version: str, prefix: str) -> dict[str, Any]:
    """The case file: one case for each question and each count that some protocol gives it.

    Args:
        tokenizer: tokenizer.json of the model.
        version: "v4" or "v4.1".
        prefix: First part of the cases' ids.
    """
    counter = Counter(tokenizer, version)
    cases = []
    for case in load.load_cases():
        if not case.id.startswith(SOURCE_PREFIX):
            continue
        by_count: dict[int, list[Protocol]] = {}
        for protocol in PROTOCOLS:
            number = counter.count(case, protocol)
            if number is not None:
                by_count.setdefault(number, []).append(protocol)
        for number, protocols in by_count.items():
            name = case.id.removeprefix(SOURCE_PREFIX)
            ending = f"-{'-'.join(protocols)}" if len(by_count) > 1 else ""
            cases.append(
                {
                    "id": f"{prefix}/{name}{ending}",
                    "why": case.why,
                    "request": dict(case.request),
                    "script": {"output": case.script.output if case.script else "ok"},
                    "expect": {"prompt_tokens": number},
                    "protocols": protocols,
                }
            )
    return {
        "about": f"Ground truth of prompt_tokens for the {version} template and one tokenizer; "
        "made by tests/conformance/prompt_table.py.",
        "defaults": {
            "tier": "prompt",
            "source": "deepseek-recipe 0.2.0",
            "profiles": ["prompt"],
            "modes": ["whole"],
            "needs": [f"{prefix.removeprefix('prompt-')}-tokenizer"],
        },
        "cases": cases,
    }


def dump(data: dict[str, Any]) -> bytes:
    """The file's bytes: one case a line, so that a changed count is a changed line."""
    head = {key: value for key, value in data.items() if key != "cases"}
    rows = b",\n".join(b"    " + orjson.dumps(case) for case in data["cases"])
    return orjson.dumps(head)[:-1] + b',\n  "cases": [\n' + rows + b"\n  ]\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="prompt_tokens ground truth for a tokenizer")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--version", choices=sorted(VERSIONS), required=True)
    parser.add_argument("--prefix", default="prompt-mine", help="first part of the cases' ids")
    parser.add_argument("--out", type=Path, required=True, help="case file to write")
    arguments = parser.parse_args()
    try:
        data = table(arguments.tokenizer, arguments.version, arguments.prefix)
    except RuntimeError as error:
        sys.exit(f"{arguments.tokenizer}: no tokenizer for {arguments.version}: {error}")
    arguments.out.write_bytes(dump(data))
    print(f"{len(data['cases'])} cases in {arguments.out}")


if __name__ == "__main__":
    main()
