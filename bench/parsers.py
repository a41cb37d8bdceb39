"""Time of the protocol core per delta, without any input or output.

    python -m bench.parsers                        the tokenizer of the checkpoint that ships
    python -m bench.parsers --tokenizer FILE       another tokenizer.json, such as V4's own

One exchange is fed one token id at a time, as an engine's steps give them, and every frame is
taken; the median over the repeats of the mean per delta is told. Rows go to
bench/results/parsers-cpu.jsonl: bench "parsers", and as mode

* "codec": the official codec alone, pushing answer tokens and writing the JSON of its chunks;
* "plain": an exchange without tools, so without a gate;
* "reasoning", "text": the same output with tools and gate;
* "string": inside a string argument, where everything is checked and re-spelled;
* "json": an answer that is to be JSON;
* the same with "x8" behind it: eight ids a delta, per delta.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import deepseek_recipe as recipe
import orjson

from bench.rows import make_rows, spread, write_rows
from engine import TINY_CHECKPOINT
from parsers import Codec, Exchange, ServedModel

WORDS = "the answer is a number of words, each as plain as the next one; "
TOOL = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
OPENED = (
    '</think>\n\n<｜DSML｜{gap}{block}>\n<｜DSML｜{gap}invoke name="write">\n'
    '<｜DSML｜{gap}parameter name="text" string="true">'
)
# mode -> (fields of the request, what comes before the measured text)
MODES: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "</think>"),
    "reasoning": ({"tools": [TOOL]}, ""),
    "text": ({"tools": [TOOL]}, "</think>"),
    "string": ({"tools": [TOOL]}, OPENED),
    "json": ({"response_format": {"type": "json_object"}}, '</think>{"a": "'),
}


def ids_of(codec: Codec, tokens: int) -> list[int]:
    """Give token ids of ordinary text.

    Args:
        codec: whose tokenizer.
        tokens: how many.
    """
    ids = codec.tokenize(WORDS)
    return (ids * (tokens // len(ids) + 1))[:tokens]


def opened(codec: Codec, mode: str) -> Exchange:
    """Open a stream and play it up to where the measurement begins."""
    fields, before = MODES[mode]
    body = {
        "model": codec.model.name,
        "messages": [{"role": "user", "content": "json"}],
        "stream": True,
        **fields,
    }
    exchange = codec.open_exchange("chat", orjson.dumps(body), exchange_id="bench")
    exchange.start(1, 0)
    v4 = codec.model.version == "v4"
    if mode == "string":
        before = before.format(gap="" if v4 else " ", block="tool_calls" if v4 else "calls")
    if before:
        exchange.receive(codec.tokenize(before))
    return exchange


def bare(codec: Codec) -> Callable[[Sequence[int]], list[str]]:
    """Give the official codec alone: push ids, return the JSON of its chunks."""
    body = {"model": codec.model.name, "messages": [{"role": "user", "content": "q"}]}
    version = recipe.ModelVersion
    named = version.DeepseekV4Pro if codec.model.version == "v4" else version.DeepseekV41Flash
    options = recipe.ConversionOptions().with_model_alias(codec.model.name, named)
    converted = recipe.ChatCompletionRequest(orjson.dumps(body)).convert(options)
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(converted, "bench", codec.model.name),
        converted.parsing_options,
        recipe.Tokenizer.from_file(codec.model.tokenizer_path),
    )
    processor.push(recipe.InferenceChunk.ready())
    processor.push(recipe.InferenceChunk.tokens(codec.tokenize("</think>")))
    make = recipe.InferenceChunk.tokens
    return lambda ids: [chunk.to_json() for chunk in processor.push(make(ids))]


def per_delta(receive: Callable[[Sequence[int]], object], steps: Sequence[Sequence[int]]) -> float:
    """Feed steps and return the mean time of one, in microseconds."""
    begin = time.perf_counter()
    for step in steps:
        receive(step)
    return (time.perf_counter() - begin) / len(steps) * 1e6


def measure(codec: Codec, *, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Measure every mode; returns one row each, without what it ran on."""
    ids = ids_of(codec, tokens)
    rows = []
    for size, suffix in ((1, ""), (8, "x8")):
        steps = [ids[i : i + size] for i in range(0, len(ids), size)]
        for mode in ("codec", *MODES):
            times = []
            for _ in range(repeats + 1):
                receive = bare(codec) if mode == "codec" else opened(codec, mode).receive
                times.append(per_delta(receive, steps))
            rows.append(
                {
                    "bench": "parsers",
                    "geometry": codec.model.name,
                    "mode": mode + suffix,
                    "batch": 1,
                    "prompt_tokens": 1,
                    "deltas": len(steps),
                    "us_per_delta": spread(times[1:]),  # the first warms up
                }
            )
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokenizer", type=Path, default=TINY_CHECKPOINT / "tokenizer.json")
    parser.add_argument("--version", choices=("v4", "v4.1"), default="v4.1")
    parser.add_argument("--tokens", type=int, default=20_000, help="generated per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    version: Literal["v4", "v4.1"] = arguments.version
    name = arguments.tokenizer.resolve().parent.name
    model = ServedModel(name, version, str(arguments.tokenizer), 1 << 20, eos_token_ids=(1,))
    figures = measure(Codec.load(model), tokens=arguments.tokens, repeats=arguments.repeats)
    for row in figures:
        print(f"{row['mode']:12} {row['us_per_delta']['median']:8.2f} us a delta")
    print(write_rows("parsers-cpu", make_rows("bench.parsers", "cpu", figures)))


if __name__ == "__main__":
    main()
