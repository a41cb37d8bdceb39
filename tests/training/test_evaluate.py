"""Scoring: the right answers score full, each planted fault costs exactly its metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import orjson
import pytest
from tokenizers import Tokenizer

from training.codec import BOS, DSML, EOS, assistant_spans
from training.dialogues import Split, make
from training.dialogues.build import demo_texts
from training.dialogues.lexicon import TOKENIZER
from training.evaluate import (
    DEMO,
    Case,
    Tally,
    cases,
    demo_cases,
    evaluate,
    same,
    score,
    teacher_set,
)
from training.pack import shipped_codec, target_mask


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


def _right(chosen: Sequence[Case]) -> list[list[int]]:
    return [[*case.draft, EOS] for case in chosen]


@pytest.fixture(scope="module")
def held_out() -> list[Case]:
    """Turns of 300 held-out dialogues."""
    return cases(Split.HELD_OUT, 1, 300)


@pytest.mark.parametrize("split", [Split.HELD_OUT, Split.IN_DISTRIBUTION])
def test_what_was_meant_scores_full(split: Split) -> None:
    """The meant outputs are right in every metric, and every metric is counted."""
    chosen = cases(split, 2, 100)
    report = evaluate(lambda prompts: _right(chosen), chosen)
    assert set(report.tallies) == {
        "well_formed", "decision", "tool", "arguments", "argument_order", "value", "final_answer",
        "no_call_answer", "reasoning", "turn",
    }  # fmt: skip
    assert all(report.rate(metric) == 1 for metric in report.tallies)
    assert not report.failures
    assert {g for g in report.tallies["turn"] if g.startswith("tools=")} >= {"tools=1", "tools=5-8"}


def test_sets_are_fixed_and_disjoint() -> None:
    """A seed gives the same cases each time; two seeds share no prompt that has a user's words."""
    one, two = cases(Split.HELD_OUT, 1, 30), cases(Split.HELD_OUT, 2, 30)
    assert one == cases(Split.HELD_OUT, 1, 30)
    assert not {c.prompt for c in one if c.tools} & {c.prompt for c in two if c.tools}


def test_training_seeds_are_not_evaluated() -> None:
    """Asking for cases of the training split is refused."""
    with pytest.raises(ValueError, match="TRAIN"):
        cases(Split.TRAIN, 1, 10)


def _replace(case: Case, old: str, new: str) -> list[int]:
    text = _tokenizer().decode(list(case.draft), skip_special_tokens=False)
    assert old in text
    return [*shipped_codec().tokenizer.encode(text.replace(old, new, 1)), EOS]


def _first(chosen: list[Case], wanted: Callable[[Case], bool]) -> Case:
    return next(case for case in chosen if wanted(case))


def _one_call(case: Case) -> bool:
    return (
        len(case.calls) == 1
        and not case.forced
        and not case.thinking
        and any(type(v) is int for v in case.calls[0][1].values())
    )


def _int_of(case: Case) -> tuple[str, int]:
    return next((k, v) for k, v in case.calls[0][1].items() if type(v) is int)


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        ("name", {"tool", "arguments", "turn"}),
        ("value", {"arguments", "value", "turn"}),
        ("string for integer", {"arguments", "value", "turn"}),
        ("key", {"arguments", "value", "turn"}),
        ("no call", {"decision", "tool", "arguments", "turn"}),
        ("no end", {"well_formed", "arguments", "turn"}),
        ("cut off", {"well_formed", "arguments", "turn", "value"}),
        ("text after the calls", {"well_formed"}),
        ("broken value", {"well_formed", "arguments", "turn"}),
    ],
)
def test_a_wrong_call_is_counted(held_out: list[Case], fault: str, wrong: set[str]) -> None:
    """Each planted fault in a call lowers its metrics and no other."""
    case = _first(held_out, _one_call)
    name, (key, value) = case.calls[0][0], _int_of(case)
    pair = f'"{key}" string="false">{value}<'
    output = {
        "name": lambda: _replace(case, f'"{name}"', f'"{name}x"'),
        "value": lambda: _replace(case, pair, f'"{key}" string="false">{value + 1}<'),
        "string for integer": lambda: _replace(case, pair, f'"{key}" string="true">{value}<'),
        "key": lambda: _replace(case, f'"{key}" string', f'"{key}x" string'),
        "no call": lambda: [*shipped_codec().tokenizer.encode("I have no tool for that."), EOS],
        "no end": lambda: list(case.draft),
        "cut off": lambda: list(case.draft[:-7]),  # just before the value is closed
        "text after the calls": lambda: [*case.draft, *shipped_codec().tokenizer.encode("ok"), EOS],
        "broken value": lambda: _replace(case, pair, f'"{key}" string="false">{value}{value}x<'),
    }[fault]()
    report = score([case], [output])
    low = {m for m in report.tallies if m != "reasoning" and report.rate(m) < 1}
    missing = {"value"} if fault in ("cut off", "broken value") else set()
    assert low - missing == wrong - missing


@pytest.mark.parametrize("kind", ["answer", "chat", "decline"])
def test_a_wrong_text_is_counted(held_out: list[Case], kind: str) -> None:
    """A changed letter in an answer, and a call where none is meant, are wrong."""
    case = _first(held_out, lambda c: c.kind == kind and not c.thinking and c.tools > 0)
    metric = "final_answer" if kind == "answer" else "no_call_answer"
    assert case.content is not None
    changed = _replace(case, case.content, case.content[:-1])
    assert score([case], [changed]).rate(metric) == 0
    call = _first(held_out, lambda c: bool(c.calls) and not c.thinking and not c.forced)
    report = score([case], [[*call.draft, EOS]])
    assert report.rate(metric) == 0
    if kind != "answer":
        assert report.rate("decision") == 0


def test_order_of_arguments_is_counted_apart() -> None:
    """Arguments in another order are right, but not in schema order."""
    chosen = cases(Split.HELD_OUT, 3, 60)
    case = _first(
        chosen, lambda c: len(c.calls) == 1 and len(c.calls[0][1]) == 2 and not c.thinking
    )
    name, args = case.calls[0]
    swapped = Case(**{**_fields(case), "calls": ((name, dict(reversed(args.items()))),)})
    report = score([swapped], [[*case.draft, EOS]])
    assert report.rate("arguments") == 1
    assert report.rate("argument_order") == 0


def _fields(case: Case) -> dict[str, object]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


def test_equality_keeps_types_apart() -> None:
    """1, 1.0, true and "1" are four values; key order matters only on demand."""
    values = [1, 1.0, True, "1"]
    assert [[same(a, b) for b in values] for a in values] == [
        [i == j for j in range(4)] for i in range(4)
    ]
    assert same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1}, ordered=True)


def test_wilson_interval() -> None:
    """The interval of 0 of 10 and 95 of 100 as worked out by hand from Wilson's formula."""
    none = Tally(0, 10).json()
    assert none["low"] == 0
    assert none["high"] == pytest.approx(0.27753, abs=1e-4)
    most = Tally(95, 100).json()
    assert (most["low"], most["high"]) == pytest.approx((0.88825, 0.97846), abs=1e-4)
    assert Tally().json()["rate"] is None


def test_demo_questions_are_answerable_and_unseen() -> None:
    """Each demo question names declared tools and required arguments, and trains nobody."""
    chosen = demo_cases()
    assert len(chosen) >= 2 * 26
    for case in chosen:
        assert case.calls or case.content
    for seed in range(800):
        for message in make(seed).body["messages"]:
            if message["role"] == "user":
                assert message["content"].lower() not in demo_texts()


def test_demo_calls_fit_their_schemas() -> None:
    """The expected arguments of the demo questions validate against the declared schemas."""
    rows = [orjson.loads(line) for line in DEMO.read_bytes().splitlines()]
    assert sum(row["use"] == "newcomer" for row in rows) >= 20
    for row in rows:
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in row["tools"]}
        for call in row["expected"]:
            jsonschema.validate(call["arguments"], schemas[call["name"]])


def test_the_teacher_forced_set_is_of_the_shipped_tokenizer() -> None:
    """The saved set reads back as whole dialogues of known ids, marked where the assistant writes;
    it is small, and made by `training.evaluate --write-teacher`."""
    path = Path(__file__).parents[1] / "data" / "tiny_teacher.npz"
    saved, fresh = np.load(path), teacher_set()
    assert saved.files == list(fresh)
    assert path.stat().st_size < 32_000
    ids, lengths, mask = saved["ids"], saved["lengths"], saved["mask"]
    assert len(lengths) >= 45
    assert lengths.sum() == len(ids) == len(mask)
    assert (mask == target_mask(ids)).all()
    codec = shipped_codec()
    for one in np.split(ids, np.cumsum(lengths)[:-1]):
        assert (one[0], one[-1]) == (BOS, EOS)
        for start, end, think in assistant_spans(one.tolist()):
            message = codec.parse(one[start:end].tolist(), think, DSML in one[:start])
            assert message["finish_reason"] == ("tool_calls" if DSML in one[start:end] else "stop")
