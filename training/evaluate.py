"""Scores of a model on whole dialogues: `python -m training.evaluate CHECKPOINT`.

Each assistant turn of an evaluation dialogue is one case: the model gets the prompt up to it (with
the true history) and must write it by greedy decoding, unconstrained. What it writes is read by
the codec as a server would read it. The sets:

* `held_out`: every name, parameter and value is made of words that training never uses (digits,
  codes and fixed words such as `true` aside),
* `in_distribution`: training words, new seeds, the common real tools among them,
* `demo`: hand-written questions of training/demo_questions.jsonl, in no training dialogue.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer

from training.codec import DSML, EOS, USER, Codec, Json, assistant_spans, calls_of
from training.dialogues import Dialogue, Split, make
from training.dialogues.build import MODEL
from training.dialogues.lexicon import TOKENIZER
from training.pack import MAX_TOKENS, generate, shipped_codec, target_mask

#: prompts -> what greedy decoding writes after each, up to and including EOS; without EOS it counts
#: as never ended
Generate = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]]
DEMO = Path(__file__).with_name("demo_questions.jsonl")
#: tokens after which an answer is given up; the longest right one is shorter
MAX_NEW = 512
SEED_STEP = 1_000_000  # between evaluation seeds; each set has fewer dialogues
TEACHER_DIALOGUES = 60


@dataclass(frozen=True, slots=True)
class Case:
    """One assistant turn to be written.

    Args:
        prompt: ids of the prompt.
        kind: `call`, `answer`, `chat` or `decline` (see dialogues.build.Turn).
        calls: the calls meant, as (name, arguments in schema order).
        content: the text meant, None where any text will do.
        reasoning: the reasoning meant, None where any will do.
        thinking: the prompt ends with <think>.
        tools: number of declared tools.
        forced: `tool_choice: "required"` opened the calls.
        kinds: kind of value by argument, per call.
        draft: ids of the right turn without EOS, () where several are right; a decoder may use
            them as a draft, never as more.
        tags: groups for the breakdown.
    """

    prompt: tuple[int, ...]
    kind: str
    calls: tuple[tuple[str, Json], ...]
    content: str | None
    reasoning: str | None
    thinking: bool
    tools: int
    forced: bool = False
    kinds: tuple[dict[str, str], ...] = ()
    draft: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()


@dataclass(slots=True)
class Tally:
    """Right ones among all, with a 95 % Wilson interval."""

    right: int = 0
    total: int = 0

    def add(self, right: bool) -> None:
        """Count one."""
        self.right += right
        self.total += 1

    def json(self) -> Json:
        """Counts, rate and interval; rate and interval are null without cases."""
        if not self.total:
            return {"right": 0, "total": 0, "rate": None, "low": None, "high": None}
        n, p, z = self.total, self.right / self.total, 1.959964
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return {
            "right": self.right,
            "total": n,
            "rate": round(p, 5),
            "low": round(max(0.0, centre - half), 5),
            "high": round(min(1.0, centre + half), 5),
        }


# ---- cases


def cases(split: Split, seed: int, dialogues: int) -> list[Case]:
    """All turns of `dialogues` evaluation dialogues; deterministic.

    Args:
        split: HELD_OUT or IN_DISTRIBUTION.
        seed: 1, 2, ...: number of the evaluation seed; their dialogues are disjoint.
        dialogues: how many, at most 1,000,000.

    Raises:
        ValueError: the split is the training one, or too many dialogues.
    """
    if split is Split.TRAIN or not 0 < dialogues <= SEED_STEP:
        raise ValueError(f"no evaluation of {dialogues} dialogues of {split.name}")
    codec = shipped_codec()
    out: list[Case] = []
    at = seed * SEED_STEP
    while dialogues:
        dialogue = make(at, split)
        ids = codec.dialogue_ids(dialogue)
        if len(ids) <= MAX_TOKENS:
            out += _cases_of(codec, dialogue, ids, force=at % 2 == 0)
            dialogues -= 1
        at += 1
    return out


def _cases_of(codec: Codec, dialogue: Dialogue, ids: list[int], force: bool) -> list[Case]:
    body = dialogue.body
    out = []
    for turn, (start, end, think) in zip(dialogue.turns, assistant_spans(ids), strict=True):
        if think != dialogue.thinking:
            continue  # without tools the codec drops earlier reasoning: such a turn is never asked
        meant = body["messages"][turn.index]
        prompt, forced = ids[:start], force and turn.forced
        if forced:
            so_far = {**body, "messages": body["messages"][: turn.index]}
            prompt = codec.prompt_ids({**so_far, "tool_choice": "required"})
        out.append(
            Case(
                tuple(prompt),
                turn.kind,
                tuple(calls_of(meant)),
                meant["content"],
                meant.get("reasoning_content") if think else None,
                think,
                len(body.get("tools", [])),
                forced,
                tuple(turn.kinds),
                tuple(ids[len(prompt) : end]),
                tuple(t for t in ("long", "opaque") if dialogue.tags[t]),
            )
        )
    return out


def demo_cases(path: Path = DEMO) -> list[Case]:
    """The hand-written questions, each with thinking on and off.

    A line holds `messages`, `tools` and `expected` (calls with `name` and `arguments`; [] for
    none); `content` is the exact answer where no call is meant, if there is only one.
    """
    codec = shipped_codec()
    out = []
    for line in path.read_bytes().splitlines():
        row = orjson.loads(line)
        for thinking in (True, False):
            body = {"model": MODEL, "messages": row["messages"]}
            if row["tools"]:
                body["tools"] = row["tools"]
            if not thinking:
                body["thinking"] = {"type": "disabled"}
            calls = tuple((c["name"], c["arguments"]) for c in row["expected"])
            out.append(
                Case(
                    tuple(codec.prompt_ids(body)),
                    "call" if calls else "chat",
                    calls,
                    "" if calls else row.get("content"),
                    None,
                    thinking,
                    len(row["tools"]),
                    kinds=tuple(dict.fromkeys(args, "demo") for _, args in calls),
                    tags=(row["messages"][-1]["content"],),
                )
            )
    return out


# ---- scores


@dataclass(slots=True)
class Report:
    """Tallies by metric and group, and the cases that went wrong."""

    tallies: dict[str, dict[str, Tally]] = field(default_factory=dict)
    failures: list[Json] = field(default_factory=list)

    def add(self, metric: str, groups: Iterable[str], right: bool) -> None:
        """Count one case of a metric, for all and in its groups."""
        table = self.tallies.setdefault(metric, {})
        for group in ("all", *groups):
            table.setdefault(group, Tally()).add(right)

    def rate(self, metric: str, group: str = "all") -> float:
        """Share that is right; KeyError when nothing was counted."""
        tally = self.tallies[metric][group]
        return tally.right / tally.total

    def json(self) -> Json:
        """`{metric: {group: counts}}`, groups sorted."""
        return {
            metric: {group: table[group].json() for group in sorted(table)}
            for metric, table in self.tallies.items()
        }


def same(a: Any, b: Any, ordered: bool = False) -> bool:
    """JSON equality including types (1 is neither 1.0 nor true), of key order only on demand."""
    option = 0 if ordered else orjson.OPT_SORT_KEYS
    return orjson.dumps(a, option=option) == orjson.dumps(b, option=option)


def score(cases: Sequence[Case], outputs: Sequence[Sequence[int]]) -> Report:
    """Compare outputs with what was meant.

    Metrics: `well_formed` (of all outputs that begin a call block), `decision` (call or none, of
    turns that answer a user and are not forced), `tool` and `arguments` (of turns that mean calls:
    all names, all arguments right), `argument_order`, `value` (of the arguments of rightly chosen
    tools, by kind), `final_answer` (after results), `no_call_answer`, `reasoning`, `turn`
    (everything right).

    Args:
        cases: from `cases` or `demo_cases`.
        outputs: ids written for each, with their EOS.

    Raises:
        ValueError: not one output per case.
    """
    if len(cases) != len(outputs):
        raise ValueError(f"{len(outputs)} outputs for {len(cases)} cases")
    report = Report()
    for case, output in zip(cases, outputs, strict=True):
        _score_one(report, case, list(output))
    return report


def _groups(case: Case) -> tuple[str, ...]:
    tools = case.tools if case.tools < 5 else "5-8"
    groups = [f"tools={tools}", "thinking" if case.thinking else "not thinking", *case.tags]
    if case.calls:
        groups.append(f"calls={len(case.calls)}")
    if case.forced:
        groups.append("forced")
    return tuple(groups)


def _score_one(report: Report, case: Case, output: list[int]) -> None:
    codec, groups = shipped_codec(), _groups(case)
    ended = bool(output) and output[-1] == EOS
    got = codec.parse(output[:-1] if ended else output, case.thinking, case.tools > 0, case.forced)
    calls = calls_of(got)
    opened = case.forced or bool(calls) or DSML in output
    if opened:
        objects = all(isinstance(args, dict) for _, args in calls)
        whole = ended and got["finish_reason"] == "tool_calls" and bool(calls) and objects
        report.add("well_formed", groups, whole and _closed_once(codec, output))
    if case.kind != "answer" and not case.forced:
        report.add("decision", groups, bool(calls) == bool(case.calls))
    right = ended
    if case.calls:
        names = [n for n, _ in calls] == [n for n, _ in case.calls]
        args = names and all(same(a, b) for (_, a), (_, b) in zip(calls, case.calls, strict=True))
        report.add("tool", groups, names)
        report.add("arguments", groups, args and ended)
        if args:
            ordered = same([a for _, a in calls], [a for _, a in case.calls], ordered=True)
            report.add("argument_order", groups, ordered)
        _score_values(report, case, calls)
        right = right and args
    else:
        text = (got.get("content") or "").strip()
        right = right and not calls and (text == case.content if case.content else bool(text))
        report.add("final_answer" if case.kind == "answer" else "no_call_answer", groups, right)
    if case.reasoning is not None:
        reasons = (got.get("reasoning_content") or "") == case.reasoning
        report.add("reasoning", groups, reasons)
    report.add("turn", groups, right)
    if not right:
        report.failures.append(
            {
                "kind": case.kind,
                "meant": case.calls or case.content,
                "got": got,
                "prompt": list(case.prompt),
                "output": output,
            }
        )


def _closed_once(codec: Codec, output: list[int]) -> bool:
    """Whether one call block is closed, by the last tokens before EOS.

    The codec ignores what follows the closing mark, so the parsed message would not show it.
    """
    close = [DSML, codec.tokenizer.encode(" calls>")[-1]]
    return output[-3:-1] == close and output.count(close[1]) == 1


def _score_values(report: Report, case: Case, calls: list[tuple[str, Any]]) -> None:
    for i, (name, meant) in enumerate(case.calls):
        if i >= len(calls) or calls[i][0] != name or not isinstance(calls[i][1], dict):
            continue
        for key, value in meant.items():
            kind = case.kinds[i].get(key, "other")
            got = calls[i][1]
            report.add("value", (f"kind={kind}",), key in got and same(got[key], value))


# ---- running


def evaluate(generate_ids: Generate, chosen: Sequence[Case]) -> Report:
    """Have the cases written and score them."""
    return score(chosen, generate_ids([case.prompt for case in chosen]))


def teacher_set() -> dict[str, Any]:
    """The fixed small set of the teacher-forced test.

    Returns:
        Arrays `ids`, `lengths` and `mask` (True where the assistant writes the token).
    """
    ids, lengths = generate(0, TEACHER_DIALOGUES, Split.TEACHER, max_tokens=700)
    return {"ids": ids, "lengths": lengths, "mask": target_mask(ids)}


def engine_generate(checkpoint: Path, batch: int = 16) -> Generate:
    """Greedy decoding by the serving engine.

    Args:
        checkpoint: folder in the official layout.
        batch: requests at once.
    """
    from engine.api import GenerateRequest, SamplingParams
    from engine.core import load_engine
    from engine.options import EngineConfig

    core = load_engine(checkpoint, EngineConfig(max_num_seqs=batch))
    greedy = SamplingParams(max_tokens=MAX_NEW, temperature=0.0, stop_token_ids=(EOS,))

    def run(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in prompts]
        for i, prompt in enumerate(prompts):
            core.submit(GenerateRequest(str(i), tuple(prompt), greedy))
        while core.has_work:
            for delta in core.step():
                out[int(delta.request_id)] += delta.token_ids
        return out

    return run


def main() -> None:
    """Score a checkpoint in the serving engine, or write the teacher-forced set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--set", choices=("held_out", "in_distribution", "demo"), default="demo")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dialogues", type=int, default=100)
    parser.add_argument("--failures", type=int, default=0, help="wrong cases to print")
    parser.add_argument("--write-teacher", type=Path, help="write the teacher-forced set (.npz)")
    args = parser.parse_args()
    if args.write_teacher:
        np.savez_compressed(args.write_teacher, **teacher_set())
        return
    if args.checkpoint is None:
        sys.exit("a checkpoint folder is needed")
    if args.set == "demo":
        chosen = demo_cases()
    else:
        chosen = cases(Split[args.set.upper()], args.seed, args.dialogues)
    report = evaluate(engine_generate(args.checkpoint), chosen)
    vocabulary = Tokenizer.from_file(str(TOKENIZER))
    for failure in report.failures[: args.failures]:
        prompt = failure["prompt"]
        last = len(prompt) - prompt[::-1].index(USER)
        texts = {"asked": prompt[last:], "wrote": failure["output"]}
        shown = {k: vocabulary.decode(ids, skip_special_tokens=False) for k, ids in texts.items()}
        shown |= {k: failure[k] for k in ("kind", "meant")}
        print(orjson.dumps(shown).decode(), file=sys.stderr)
    print(orjson.dumps(report.json(), option=orjson.OPT_INDENT_2).decode())


if __name__ == "__main__":
    main()
