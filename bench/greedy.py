"""The shipped checkpoint's greedy tokens on a GPU, eager, as graphs and fused, against the CPU's.

    python -m bench.greedy --cpu                 the CPU's answers, kept for the comparison
    python -m bench.greedy --prepare decode      compile what decode steps need, no more
    python -m bench.greedy --prepare short       and what short chunks need, and `long` ones: all
                                                 three at once where there are cores for it
    python -m bench.greedy --out greedy-tiny     compare, then 1,000 requests under load

200 prompts, 24 tokens each, float32: the demo's turns, turns of held-out dialogues with tools
(training.evaluate), and random ids of mixed length. They lie beside the CPU's answers in the results, so
that the comparison needs no codec. A request counts as equal up to its first tie: a place where the
CPU's two best log-probabilities lie closer than 1e-3, so that rounding may decide either way. Ties are
listed; so is anything else, which fails.

The load is 1,000 requests, each one of those prompts with a length of its own, at random moments, some
aborted at random: none may be lost, each must get the tokens that its prompt gets (so none is crossed),
and afterwards all memory must be back.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch

from bench.rows import ROOT, make_rows, write_rows
from engine import TINY_CHECKPOINT
from engine.api import GenerateRequest, SamplingParams, TokenDelta
from engine.core import EngineCore, load_engine
from engine.device.fast_runner import FastRunner
from engine.device.kvpool import KVPool
from engine.device.rows import build_rows
from engine.kernels.ops import Implementation
from engine.model.fast import FastModel
from engine.model.loading import load_fast_model
from engine.options import EngineConfig
from engine.plan.step import Chunk

#: Prompts of each kind.
KINDS = {"demo": 60, "dialogue": 100, "random": 40}
NEW = 24
CONTEXT = 1024
BLOCK = 128
STREAMS = 16
CHUNK = 512
TIE = 1e-3
ANSWERS = ROOT / "bench/results/greedy-tiny-cpu.jsonl"
#: Rows of chunks that are processed to compile what chunks of their class need.
LENGTHS = {"short": (1, 20, 40, 70), "long": (100, 200, 400, CHUNK)}
KERNELS: dict[str, Implementation] = {"eager": "torch", "graph": "torch", "fused": "triton"}


def make_prompts() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Kind and ids of each prompt, the same on every machine."""
    from training.dialogues import Split
    from training.evaluate import cases, demo_cases

    yield from (("demo", case.prompt) for case in demo_cases()[: KINDS["demo"]])
    held_out = cases(Split.HELD_OUT, 1, KINDS["dialogue"])
    fitting = [case.prompt for case in held_out if len(case.prompt) + NEW < CONTEXT]
    yield from (("dialogue", ids) for ids in fitting[: KINDS["dialogue"]])
    draw = random.Random(5)
    for _ in range(KINDS["random"]):
        yield "random", tuple(draw.randrange(2048) for _ in range(draw.randint(1, 700)))


def read_answers() -> list[dict[str, Any]]:
    """The prompts and the CPU's answers."""
    return [orjson.loads(line) for line in ANSWERS.read_bytes().splitlines()]


def answer(
    core: EngineCore, prompts: Sequence[Sequence[int]], rivals: int | None = None
) -> list[list[TokenDelta]]:
    """Deltas of all prompts."""
    sampling = SamplingParams(NEW, temperature=0.0, top_logprobs=rivals, ignore_eos=True)
    found: list[list[TokenDelta]] = [[] for _ in prompts]
    for number, ids in enumerate(prompts):
        core.submit(GenerateRequest(str(number), tuple(ids), sampling))
    while core.has_work:
        for delta in core.step():
            if delta.error is not None:
                raise RuntimeError(delta.error)
            found[int(delta.request_id)].append(delta)
    return found


def write_cpu_answers() -> Path:
    """Have the reference runner answer, and keep tokens and the lead of each over its rival."""
    core = load_engine(
        TINY_CHECKPOINT,
        EngineConfig(device="cpu", dtype="float32", max_model_len=CONTEXT, max_num_seqs=STREAMS),
    )
    prompts = list(make_prompts())
    lines = []
    for (kind, ids), deltas in zip(
        prompts, answer(core, [ids for _, ids in prompts], 2), strict=True
    ):
        tops = [delta.logprobs[0].top for delta in deltas if delta.logprobs]
        row = {
            "kind": kind,
            "ids": ids,
            "tokens": [delta.token_ids[0] for delta in deltas],
            "lead": [round(top[0][1] - top[1][1], 6) for top in tops],
        }
        lines.append(orjson.dumps(row) + b"\n")
    ANSWERS.write_bytes(b"".join(lines))
    return ANSWERS


def load_model(mode: str) -> FastModel:
    """The model on the GPU."""
    return load_fast_model(
        TINY_CHECKPOINT,
        kernels=KERNELS[mode],
        device="cuda",
        dtype=torch.float32,
        max_model_len=CONTEXT,
    )


def make_pool(model: FastModel, options: EngineConfig) -> KVPool:
    """Its memory."""
    return KVPool(
        model.config,
        num_blocks=options.resolve_num_blocks(CONTEXT) + 1,
        block_size=BLOCK,
        num_slots=options.resolve_num_slots(),
        device="cuda",
        forms=model.forms,
        ring_history=True,
    )


def options() -> EngineConfig:
    """Sizes of all runs."""
    return EngineConfig(
        max_model_len=CONTEXT,
        max_num_seqs=STREAMS,
        max_batched_tokens=CHUNK,
        block_size=BLOCK,
        num_blocks=160,
        max_snapshots=16,
    )


def make(mode: str) -> EngineCore:
    """An engine of one mode. One bucket: it is the numbers that are looked at, not the time."""
    model, sizes = load_model(mode), options()
    runner = FastRunner(
        model,
        make_pool(model, sizes),
        torch.device("cuda"),
        max_model_len=CONTEXT,
        max_num_seqs=STREAMS,
        captures=mode != "eager",
        buckets=(STREAMS,),
    )
    return EngineCore(runner, sizes, max_position_embeddings=CONTEXT)


def prepare(part: str) -> None:
    """Compile the kernels of one part into Triton's cache."""
    if part == "decode":
        make("fused")
        return
    model = load_model("fused")
    pool = make_pool(model, options())
    for length in LENGTHS[part]:
        chunk = Chunk("", 0, 0, (0,) * length, (0,) * -(-length // BLOCK), wants_logits=True)
        rows, wanted = build_rows([chunk], block_size=BLOCK, device="cuda")
        *_, logits = model.prefill(rows, pool, wanted)
        assert logits is not None
        logits.sum().item()


def compare(core: EngineCore, mode: str) -> dict[str, Any]:
    """Compare one mode's answers with the CPU's."""
    wanted = read_answers()
    begin = time.perf_counter()
    found = answer(core, [row["ids"] for row in wanted])
    ties, equal, tokens, wrong = [], 0, 0, []
    for number, (row, deltas) in enumerate(zip(wanted, found, strict=True)):
        got = [delta.token_ids[0] for delta in deltas]
        at = next(
            (i for i, (a, b) in enumerate(zip(got, row["tokens"], strict=True)) if a != b), NEW
        )
        tokens += at
        if at == NEW:
            equal += 1
        elif row["lead"][at] < TIE:
            ties.append([number, at, row["lead"][at]])
        else:
            wrong.append([number, at, row["lead"][at], got[at], row["tokens"][at]])
    return {
        "bench": "greedy",
        "geometry": "bathyal-tiny",
        "mode": mode,
        "batch": STREAMS,
        "prompts": len(wanted),
        "kinds": dict(Counter(row["kind"] for row in wanted)),
        "equal": equal,
        "ties": ties,
        "otherwise": wrong,
        "tokens_compared": tokens,
        "seconds": round(time.perf_counter() - begin, 2),
    }


def load(core: EngineCore, mode: str, count: int) -> dict[str, Any]:
    """Serve many requests with random aborts and check every one."""
    draw = random.Random(7)
    rows = read_answers()
    open_names: dict[str, dict[str, Any]] = {}
    tokens: dict[str, list[int]] = {}
    crossed, aborted, ended, made = [], 0, 0, 0
    core._scheduler.prefix.clear()
    begin = time.perf_counter()
    while made < count or core.has_work:
        while made < count and len(open_names) < 3 * STREAMS:
            row, name = draw.choice(rows), f"load{made}"
            sampling = SamplingParams(draw.randint(1, NEW), temperature=0.0, ignore_eos=True)
            core.submit(GenerateRequest(name, tuple(row["ids"]), sampling))
            open_names[name], tokens[name] = row, []
            made += 1
        if open_names and draw.random() < 0.2:
            name = draw.choice(sorted(open_names))
            core.abort(name)
            del open_names[name]
            aborted += 1
        for delta in core.step():
            if delta.error is not None:
                raise RuntimeError(delta.error)
            tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                row = open_names.pop(delta.request_id)
                got = tokens[delta.request_id]
                at = next((i for i, (a, b) in enumerate(zip(got, row["tokens"], strict=False)) if a != b), None)  # fmt: skip
                if at is not None and row["lead"][at] >= TIE:
                    crossed.append([delta.request_id, at])
                ended += 1
    core.check_integrity()
    core._scheduler.prefix.clear()
    stats = core.stats()
    return {
        "bench": "load",
        "geometry": "bathyal-tiny",
        "mode": mode,
        "batch": STREAMS,
        "requests": count,
        "ended": ended,
        "aborted": aborted,
        "lost": count - ended - aborted,
        "crossed": crossed,
        "blocks_held_at_the_end": core._scheduler.blocks.num_blocks
        - core._scheduler.blocks.num_free,
        "evictions": stats.evictions,
        "prefix_hits": stats.prefix_hits,
        "seconds": round(time.perf_counter() - begin, 2),
    }


def main() -> int:
    """Run the command; 1 if something is otherwise than on the CPU, lost, crossed or kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="write the CPU's answers and stop")
    parser.add_argument("--prepare", choices=("decode", *LENGTHS), help="compile and stop")
    parser.add_argument("--mode", default="fused,graph,eager", help="comma-separated")
    parser.add_argument("--requests", type=int, default=1000, help="of the load; 0 for none")
    parser.add_argument("--out", default="", help="file of rows under bench/results")
    args = parser.parse_args()
    if args.cpu:
        print(write_cpu_answers())
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.prepare:
        prepare(args.prepare)
        return 0
    rows = []
    for mode in args.mode.split(","):
        core = make(mode)
        rows.append(compare(core, mode))
        print(orjson.dumps(rows[-1]).decode(), flush=True)
        if mode == "fused" and args.requests:
            rows.append(load(core, mode, args.requests))
            print(orjson.dumps(rows[-1]).decode(), flush=True)
        if args.out:  # as it stands: whatever ends the run, what was measured is kept
            write_rows(args.out, make_rows("bench.greedy", "cuda", rows))
    failed = ("otherwise", "lost", "crossed", "blocks_held_at_the_end")
    return int(any(row.get(name) for row in rows for name in failed))


if __name__ == "__main__":
    sys.exit(torch.inference_mode()(main)())
