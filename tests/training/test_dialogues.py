"""The generator: deterministic, read back by the codec as meant, held-out words unseen."""

from __future__ import annotations

import re
from collections import Counter

import orjson
import pytest

from training.codec import RoundTripError, calls_of, check, text_segments
from training.dialogues import Dialogue, Split, make
from training.dialogues.catalogue import entries
from training.dialogues.lexicon import POOL_FILES, Lexicon, held_words, parts, read_words
from training.dialogues.results import answer
from training.pack import shipped_codec


def test_a_seed_gives_one_dialogue() -> None:
    """The same seed and split give the same dialogue, other seeds and splits another one."""
    assert make(7).body == make(7).body
    assert make(7).body != make(8).body
    assert make(7).body != make(7, Split.IN_DISTRIBUTION).body


@pytest.mark.parametrize("seed", [-1, 1 << 60])
def test_seeds_of_other_splits_are_refused(seed: int) -> None:
    """A seed outside 0..2**60-1 would reach into another split's range."""
    with pytest.raises(ValueError, match="not within"):
        make(seed)


@pytest.mark.parametrize("split", list(Split))
def test_every_turn_reads_back_as_meant(split: Split) -> None:
    """The codec reads reasoning, content, names, arguments and finish reason back, and each prompt
    is a prefix of the dialogue's ids."""
    codec = shipped_codec()
    for seed in range(250):
        dialogue = make(seed, split)
        check(codec, dialogue, codec.dialogue_ids(dialogue), prompts=True)


def _spoiled(dialogue: Dialogue, fault: str) -> None:
    turn = next(t for t in dialogue.turns if t.kind == "call")
    message = dialogue.body["messages"][turn.index]
    function = message["tool_calls"][0]["function"]
    if fault == "name":
        function["name"] += "x"
    elif fault == "type":
        args = orjson.loads(function["arguments"])
        key = next(k for k, v in args.items() if isinstance(v, int) and not isinstance(v, bool))
        args[key] = str(args[key])
        function["arguments"] = orjson.dumps(args).decode()
    elif fault == "reasoning":
        message["reasoning_content"] += "."
    elif fault == "turns":
        dialogue.turns.append(turn)


@pytest.mark.parametrize("fault", ["name", "type", "reasoning", "turns"])
def test_the_check_sees_a_planted_difference(fault: str) -> None:
    """A dialogue whose ids were made of something else than what is meant is refused."""
    codec = shipped_codec()
    for seed in range(1000):
        dialogue = make(seed)
        calls = [
            args
            for t in dialogue.turns
            if t.kind == "call"
            for _, args in calls_of(dialogue.body["messages"][t.index])[:1]
        ]
        whole = calls and any(type(v) is int for v in calls[0].values())
        if whole and dialogue.thinking:
            break
    ids = codec.dialogue_ids(dialogue)
    check(codec, dialogue, ids)
    _spoiled(dialogue, fault)
    with pytest.raises(RoundTripError):
        check(codec, dialogue, ids)


def _words(text: str) -> set[str]:
    out: set[str] = set()
    for run in re.findall(r"[^\W\d_]+", text):
        out.update(parts(run) if run.isascii() else [run.lower()])
    return out


@pytest.mark.parametrize("split", [Split.TRAIN, Split.IN_DISTRIBUTION, Split.TEACHER])
def test_no_held_out_word_is_rendered_in_training(split: Split) -> None:
    """No text that the codec renders of a training dialogue holds a held-out word."""
    for seed in range(1500):
        for text in text_segments(make(seed, split).body):
            assert not _words(text) & held_words(), (seed, text)


def test_held_out_tools_and_values_are_of_held_out_words() -> None:
    """Names of tools and parameters and string values of the held-out set are of unseen words,
    fixed words of formats (ends of files and hosts, prefixes of codes, times) aside."""
    fixed = set("""txt csv md py json pdf log html yaml toml xml js ts go rs c png jpg sh ini com net
        org io de fr co uk dev edu http https www api docs id a x sku ref ord inv tx v am pm noon
        midnight fn tool and""".split())  # fmt: skip
    seen = unseen = 0
    for seed in range(400):
        for message in make(seed, Split.HELD_OUT).body["messages"]:
            for name, args in calls_of(message):
                words = _words(name)
                for key, value in args.items():
                    words |= _words(key)
                    if isinstance(value, str) and value.isascii():
                        words |= _words(value)
                words = {w for w in words if len(w) > 2} - fixed
                unseen += len(words & held_words())
                seen += len(words - held_words())
    assert unseen > 2000
    assert seen < 0.03 * unseen  # pieces of codes and of words that an accent splits


def test_pools_are_split_by_word() -> None:
    """A held-out word is in no training pool, whatever pool it came from; both are large."""
    train, held = Lexicon(held=False, pieces=()), Lexicon(held=True, pieces=())
    for pool in POOL_FILES:
        ours, theirs = getattr(train, pool), getattr(held, pool)
        assert not {w for p in ours for w in parts(p)} & held_words()
        assert {w for p in theirs for w in parts(p)} <= held_words()
        assert len(theirs) >= 50
        assert len(ours) > 3 * len(theirs)
        assert len(ours) + len(theirs) <= len(read_words(pool))
    assert len(train.plain) > 3500


def test_names_and_values_vary() -> None:
    """Call counts, tool counts, value kinds, thinking and turns all occur as wide as documented."""
    tools, counts, kinds, turns = Counter[int](), Counter[int](), Counter[str](), Counter[str]()
    thinking = 0
    for seed in range(3000):
        dialogue = make(seed)
        tools[dialogue.tags["tools"]] += 1
        thinking += dialogue.thinking
        for turn in dialogue.turns:
            turns[turn.kind] += 1
            counts[len(turn.kinds)] += 1
            kinds.update(k for call in turn.kinds for k in call.values())
    assert set(tools) == set(range(9))
    assert {1, 2, 3} <= set(counts)
    assert set(turns) == {"call", "answer", "chat", "decline"}
    assert 0.6 < thinking / 3000 < 0.9
    assert min(kinds[k] for k in ("boolean", "enum", "integer", "number", "strings", "object")) > 30


def test_the_catalogue_covers_what_people_try_first() -> None:
    """Weather, time, adding, searching, e-mail, calendar and files are heavily in training."""
    assert len(entries()) >= 50
    for key in ("weather", "time", "add", "calculator", "search", "email", "event", "read_file"):
        assert len(entries()[key]["asks"]) >= 20, key


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ('{"temperature": 21, "sky": "clear"}', "The temperature is 21 and the sky is clear."),
        ('{"wind_speed":3.5}', "The wind speed is 3.5."),
        ('{"a": 1, "b": true, "c": null}', "The a is 1, the b is true and the c is null."),
        ('{"a":1,"b":2,"c":3,"d":4,"e":5,"f":6}', "The a is 1, the b is 2, the c is 3, the d is 4 and the e is 5."),
        ('{"error": "not found"}', "The call failed: not found."),
        ("error: no such file", "The call failed: no such file."),
        ('["a", "b"]', "The result is a, b."),
        ('[{"id": 4, "name": "x"}, {"id": 5}]', "The first result: the id is 4 and the name is x."),
        ("42", "The result is 42."),
        ("It is late. Go home.", "It is late."),
        ("12:30", "The result is 12:30."),
        ("{}", "The result is empty."),
        ("{broken", "The result is {broken."),
        ('{"now": {"temp": 3}}', "The now is temp 3."),
    ],
)  # fmt: skip
def test_the_answer_follows_from_the_result(result: str, said: str) -> None:
    """The final answer is a fixed function of the tool's result."""
    assert answer(result) == said
