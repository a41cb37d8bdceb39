"""What the prefill modes change in a checkpoint's answers: tool calls, a needle, log-probabilities.

    python -m bench.replay_quality                     the shipped checkpoint
    python -m bench.replay_quality --dialogues 10 --needles 4     a quick look

All is greedy and cold: without a prefix cache, every prompt is processed whole in its mode. The
figures are a property of the checkpoint they are taken with and say nothing of another one.

* calls: the turns of held-out dialogues (training/evaluate.py's cases and metrics), by the length
  of the prompt: up to the window of W tokens the modes are the same.
* needle: one held-out request; of many declared tools the one that is meant stands first, and
  further tools are declared behind it until the prompt has the wanted length, at most the longest
  the checkpoint was trained for. The tool's name and arguments must be copied from there.
* logprobs: the right turn is fed token by token; how far the log-probability of each of its tokens
  moves against `off`, how far the logits do as a share of their norm (a checkpoint that is sure of
  itself moves in logits long before it does in probabilities), and how often the most likely token
  changes.

Rows go to bench/results/replay-quality-GEOMETRY.jsonl.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.rows import make_rows, percentile, write_rows
from engine import TINY_CHECKPOINT
from engine.api import PREFILL_MODES, GenerateRequest, PrefillMode, SamplingParams
from engine.core import load_engine
from engine.device.batch import ForwardBatch
from engine.device.kvpool import KVPool
from engine.model.checkpoint import load_model
from engine.model.v4 import Model
from engine.options import EngineConfig
from engine.plan.step import Chunk
from training.codec import EOS, calls_of
from training.dialogues import Split, make
from training.evaluate import MAX_NEW, Case, cases, score
from training.pack import MAX_TOKENS, shipped_codec

#: Upper bounds of the groups of prompt lengths, in tokens.
GROUPS = (128, 256, 512, 1024, 1536)
NEEDLES = (256, 512, 1024, 1440)
#: Needle dialogues are made from here on; evaluation sets begin at multiples of a million.
NEEDLE_SEED = 9_500_000


def write(checkpoint: Path, mode: PrefillMode, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:  # fmt: skip
    """What greedy decoding writes after each prompt, and nothing is cached in between."""
    options = EngineConfig(device="cpu", prefill=mode, prefix_cache=False)
    core = load_engine(checkpoint, options)
    greedy = SamplingParams(max_tokens=MAX_NEW, temperature=0.0, stop_token_ids=(EOS,))
    for number, prompt in enumerate(prompts):
        core.submit(GenerateRequest(str(number), prompt, greedy))
    outputs: list[list[int]] = [[] for _ in prompts]
    while core.has_work:
        for delta in core.step():
            outputs[int(delta.request_id)] += delta.token_ids
    return outputs


def group_of(length: int) -> str:
    """Name the group of a prompt's length."""
    return f"up to {next(most for most in GROUPS if length <= most)}"


def needle_cases(length: int, count: int) -> Iterator[Case]:
    """Requests whose tool is declared first, and others behind it.

    Args:
        length: of the prompt in tokens, met from below as closely as a tool's declaration allows.
        count: how many.
    """
    codec, seed = shipped_codec(), NEEDLE_SEED
    while count:
        seed += 1
        dialogue = make(seed, Split.HELD_OUT)
        first = dialogue.turns[0]
        if first.kind != "call" or first.index != len(dialogue.body["messages"][: first.index]):
            continue
        meant = dialogue.body["messages"][first.index]
        calls = tuple(calls_of(meant))
        tools = {tool["function"]["name"]: tool for tool in dialogue.body["tools"]}
        if len(calls) != 1:
            continue
        name = calls[0][0]
        body = {**dialogue.body, "messages": dialogue.body["messages"][: first.index]}
        body["tools"] = [tools[name]]
        other = random.Random(seed)
        prompt = codec.prompt_ids(body)
        if len(prompt) > length:
            continue
        while True:
            more = make(other.randrange(10**8, 2 * 10**8), Split.HELD_OUT).body.get("tools", [])
            more = [tool for tool in more if tool["function"]["name"] not in tools]
            if not more:
                continue
            tools |= {tool["function"]["name"]: tool for tool in more[:1]}
            longer = codec.prompt_ids({**body, "tools": [*body["tools"], more[0]]})
            if len(longer) > length:
                break
            body["tools"].append(more[0])
            prompt = longer
        count -= 1
        yield Case(
            prompt=tuple(prompt),
            kind="call",
            calls=calls,
            content=meant["content"],
            reasoning=None,
            thinking=dialogue.thinking,
            tools=len(body["tools"]),
            kinds=tuple(first.kinds),
        )


class Teacher:
    """Log-probabilities of given answers, each prompt processed in a mode.

    Args:
        model: the model.
        block_size: of the pool.
    """

    def __init__(self, model: Model, block_size: int = 128) -> None:
        self._model, self._block_size = model, block_size
        blocks = -(-(MAX_TOKENS + MAX_NEW) // block_size)
        self._pool = KVPool(model.config, num_blocks=blocks + 1, block_size=block_size, num_slots=2)
        self._blocks = tuple(range(1, blocks + 1))

    def logits(self, prompt: Sequence[int], answer: Sequence[int], mode: PrefillMode) -> Tensor:
        """float64 [len(answer), V], before each token of the answer."""
        anchor = 0 if mode == "off" else len(prompt) - 1
        chunk = Chunk("", 1, 0, tuple(prompt), self._blocks, True, prefill=mode, anchor=anchor)
        self._pool.reset_slot(1)
        rows = [self._run(chunk)]
        if len(answer) > 1:
            start, ids = len(prompt), tuple(answer[:-1])
            chunk = chunk._replace(start=start, token_ids=ids, wants_logits=False)
            chunk = chunk._replace(scored_from=start, targets=tuple(answer[1:]))
            rows.append(self._run(chunk))
        return torch.cat(rows).double()

    def _run(self, chunk: Chunk) -> Tensor:
        hidden = self._model.hidden(ForwardBatch.build([chunk], tail=self._model.tail), self._pool)
        rows = hidden.batch.scored_rows if chunk.targets else hidden.batch.logit_rows
        return self._model.logits(hidden, rows)


def compare_logprobs(teacher: Teacher, chosen: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Rows: how the log-probabilities of right answers move against `off`, by group and mode."""
    moved: dict[tuple[PrefillMode, str], list[tuple[float, float, float, bool]]] = {}
    for case in chosen:
        if not case.draft:
            continue
        answer = torch.tensor([*case.draft, EOS])
        raw = teacher.logits(case.prompt, answer.tolist(), "off")
        base = raw.log_softmax(-1)
        for mode in PREFILL_MODES[1:]:
            other_raw = teacher.logits(case.prompt, answer.tolist(), mode)
            other = other_raw.log_softmax(-1)
            columns = (
                (other - base).gather(1, answer[:, None])[:, 0].abs(),
                (other_raw - raw).norm(dim=1) / raw.norm(dim=1),
                (base.exp() * (base - other)).sum(1),
                other.argmax(1) != base.argmax(1),
            )
            key = mode, group_of(len(case.prompt))
            lists = [column.tolist() for column in columns]
            moved.setdefault(key, []).extend(zip(*lists, strict=True))
    for (mode, group), rows in moved.items():
        logprobs, logits, divergences, changes = map(list, zip(*rows, strict=True))
        yield {
            "bench": "replay_quality",
            "metric": "difference from off",
            "mode": mode,
            "group": group,
            "tokens": len(rows),
            "logprob": _percentiles(logprobs),
            "logits_share_of_norm": _percentiles(logits),
            "mean_kl": float(f"{sum(divergences) / len(rows):.3g}"),
            "argmax_changed": sum(changes),
        }


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}": float(f"{percentile(values, p):.3g}") for p in (50, 90, 99, 100)}


def scored(name: str, checkpoint: Path, groups: dict[str, list[Case]]) -> Iterator[dict[str, Any]]:
    """Rows: metrics of a set by group and mode, and how many outputs differ from those of off."""
    everything = [case for chosen in groups.values() for case in chosen]
    base: list[list[int]] = []
    for mode in PREFILL_MODES:
        outputs = write(checkpoint, mode, [case.prompt for case in everything])
        base = base or outputs
        at = 0
        for group, chosen in groups.items():
            own, theirs = outputs[at : at + len(chosen)], base[at : at + len(chosen)]
            at += len(chosen)
            report = score(chosen, own).json()
            metrics = ("decision", "tool", "arguments", "final_answer", "turn")
            found = {metric: report[metric]["all"] for metric in metrics if metric in report}
            differing = sum(a != b for a, b in zip(own, theirs, strict=True))
            yield {
                "bench": "replay_quality",
                "metric": name,
                "mode": mode,
                "group": group,
                "cases": len(chosen),
                "outputs_differ_from_off": differing,
                **found,
            }
            rates = {metric: (f["right"], f["total"]) for metric, f in found.items()}
            print(name, mode, group, rates, f"{differing} outputs differ from off", flush=True)


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=TINY_CHECKPOINT)
    parser.add_argument("--dialogues", type=int, default=150)
    parser.add_argument("--needles", type=int, default=40, help="per length")
    args = parser.parse_args()
    model = load_model(args.model)
    if model.tail is None:
        parser.error("; ".join(model.tail_problems))
    chosen = cases(Split.HELD_OUT, 3, args.dialogues)
    figures = list(compare_logprobs(Teacher(model), chosen))
    for row in figures:
        print(row, flush=True)
    by_length: dict[str, list[Case]] = {f"up to {most}": [] for most in GROUPS}
    for case in chosen:
        by_length[group_of(len(case.prompt))].append(case)
    groups = {group: found for group, found in by_length.items() if found}
    figures += scored("calls", args.model, groups)
    needles = {f"{length}": list(needle_cases(length, args.needles)) for length in NEEDLES}
    figures += scored("needle", args.model, needles)
    for row in figures:
        row["geometry"] = args.model.name
    print(write_rows(f"replay-quality-{args.model.name}", make_rows("bench.replay_quality", "cpu", figures)).name)  # fmt: skip


if __name__ == "__main__":
    main()
