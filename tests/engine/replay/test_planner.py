"""Which rows the late layers process: against a slow twin, for any chunking and company."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
from hypothesis import given, strategies as st

from engine.api import PREFILL_MODES, EngineError, GenerateRequest, PrefillMode, SamplingParams
from engine.config import ModelConfig
from engine.plan.replay import Replay, Stage, Tail, stages, tail_of, tail_problems
from engine.plan.step import Chunk
from tests.engine.model import build

TAILS = st.builds(
    lambda first, depth, window: Tail(first, first + depth, window),
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(2, 9),
)
MODES = st.sampled_from(PREFILL_MODES)


def chunk(start: int, end: int, mode: PrefillMode, anchor: int, **more: Any) -> Chunk:
    more = {"wants_logits": False, **more}
    return Chunk("r", 1, start, tuple(range(start, end)), (), prefill=mode, anchor=anchor, **more)


def split(length: int, cuts: list[int]) -> list[tuple[int, int]]:
    """[0, length) in pieces."""
    at = sorted({0, length, *(cut % length for cut in cuts)})
    return list(itertools.pairwise(at))


def rows_of(tail: Tail, found: tuple[Stage, ...], chunks: list[Chunk], number: int, layer: int) -> tuple[range, int]:  # fmt: skip
    """Rows of a chunk that a layer processes, and its floor."""
    stage = next((s for s in reversed(found) if s.layer <= layer), None)
    if stage is None:
        return range(chunks[number].start, chunks[number].end), 0
    return range(stage.firsts[number], chunks[number].end), stage.floors[number]


def needed(tail: Tail, length: int, anchor: int) -> dict[int, set[int]]:
    """By layer, the rows of a prompt whose input some output from the anchor on depends on.

    The slow twin of `Tail.low`: walks from the last layer down, row by row. What decode steps read
    later counts as well: the keys of the last W - 1 rows of every layer.
    """
    found: dict[int, set[int]] = {}
    outputs = set(range(anchor, length))
    for layer in range(tail.num_layers - 1, tail.first - 1, -1):
        reach = {q for p in outputs for q in range(p - tail.window + 1, p + 1) if q >= 0}
        reach |= set(range(max(0, length - tail.window + 1), length))
        found[layer] = outputs = reach
    return found


@given(TAILS, MODES, st.integers(1, 60), st.lists(st.integers(0, 99), max_size=6), st.data())
def test_every_row_from_the_low_on_is_processed_once(
    tail: Tail, mode: PrefillMode, length: int, cuts: list[int], data: st.DataObject
) -> None:
    """I1: over the chunks of a prompt, a layer's rows are those from its low on, each once."""
    anchor = data.draw(st.integers(0, length - 1))
    anchor = 0 if mode == "off" else anchor
    seen: dict[int, list[int]] = {}
    floors: dict[int, set[int]] = {}
    for start, end in split(length, cuts):
        chunks = [chunk(start, end, mode, anchor)]
        found = stages(tail, chunks)
        for layer in range(tail.num_layers):
            rows, floor = rows_of(tail, found, chunks, 0, layer)
            seen.setdefault(layer, []).extend(rows)
            # The lowest position that a window of these rows reaches.
            floors.setdefault(layer, set()).update(max(floor, p - tail.window + 1, 0) for p in rows)

    for layer, rows in seen.items():
        low = tail.low(mode, anchor, layer)
        assert rows == list(range(low, length))
        assert all(floor >= low for floor in floors[layer])
        assert floors[layer] == {max(low, p - tail.window + 1) for p in rows}


@given(TAILS, st.integers(1, 80), st.data())
def test_exact_keeps_what_is_needed_and_no_more(
    tail: Tail, length: int, data: st.DataObject
) -> None:
    """The lows of exact mode are those of the dependencies, walked row by row."""
    anchor = data.draw(st.integers(0, length - 1))

    for layer, rows in needed(tail, length, anchor).items():
        assert rows == set(range(tail.low("exact", anchor, layer), length))


@given(TAILS, st.integers(1, 200), MODES)
def test_decode_finds_its_windows(tail: Tail, length: int, mode: PrefillMode) -> None:
    """I4: after a prompt, the last W - 1 rows of every layer are there, and no floor bites."""
    anchor = 0 if mode == "off" else length - 1
    for layer in range(tail.num_layers):
        assert tail.low(mode, anchor, layer) <= max(0, length - (tail.window - 1))
    for ahead in (0, 1, 5):
        one = [chunk(length + ahead, length + ahead + 1, mode, anchor)]
        assert stages(tail, one) == ()


@given(
    TAILS,
    st.lists(
        st.tuples(MODES, st.integers(0, 60), st.integers(1, 30), st.integers(0, 99)),
        min_size=1,
        max_size=5,
    ),
)
def test_company_changes_nothing(tail: Tail, mix: list[tuple[PrefillMode, int, int, int]]) -> None:
    """In a batch of any modes each chunk's rows and floors are those it has alone; rows only go."""
    chunks = [chunk(start, start + size, mode, anchor) for mode, start, size, anchor in mix]
    together = stages(tail, chunks)

    for number, one in enumerate(chunks):
        alone = stages(tail, [one])
        for layer in range(tail.num_layers):
            assert rows_of(tail, together, chunks, number, layer) == rows_of(
                tail, alone, [one], 0, layer
            )
    layers = [stage.layer for stage in together]
    assert layers == sorted(set(layers))
    assert all(layer >= tail.first for layer in layers)
    for before, after in itertools.pairwise(together):
        assert all(a <= b for a, b in zip(before.firsts, after.firsts, strict=True))


def test_the_published_halo() -> None:
    """V4.1-Flash: 20 tail layers, window 128: 2541 rows in exact mode, 128 in bounded."""
    tail = Tail(20, 40, 128)

    assert tail.halo("exact") + 1 == 128 + 19 * 127 == 2541
    assert tail.halo("bounded") + 1 == 128
    (found, *_) = stages(tail, [chunk(0, 8192, "exact", 8191)])
    assert found == Stage(20, (8192 - 2541,), (8192 - 2541,))
    rows = [8192 - s.firsts[0] for s in stages(tail, [chunk(0, 8192, "exact", 8191)])]
    assert rows == [128 + i * 127 for i in range(19, -1, -1)]


def test_a_wanted_row_that_is_left_out_is_refused() -> None:
    """n8: a request that scores prompt rows, but is planned as bounded, does not pass silently."""
    tail = Tail(1, 4, 8)
    late = chunk(0, 40, "bounded", 39, scored_from=3, targets=tuple(range(4, 40)))

    with pytest.raises(ValueError, match="request r: row 3 is wanted, but the tail of mode bounded with anchor 39 begins at row 32"):  # fmt: skip
        stages(tail, [late])
    assert stages(tail, [chunk(0, 40, "exact", 3, scored_from=3, targets=(4,))]) == ()
    with pytest.raises(ValueError, match="the model has none"):
        stages(None, [chunk(0, 40, "exact", 39)])


def test_modes_are_those_of_the_type() -> None:
    """The tuple of modes is the type's."""
    assert get_args(PrefillMode) == PREFILL_MODES


# ------------------------------------------------------------ preconditions


def problems(config: dict[str, Any], built: int | None = None) -> list[str]:
    parsed = ModelConfig.from_dict(config)
    found = list(tail_problems(parsed, built))
    assert (tail_of(parsed, built) is None) == bool(found)
    return found


def test_v41_has_a_tail() -> None:
    """The tail begins at the last KV source."""
    assert problems(build.v41()) == []
    assert tail_of(ModelConfig.from_dict(build.v41())) == Tail(4, 10, 8)


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (build.v4(), "P1: no layer is named as a KV source (a V4 model without kv_source_layer_ids)"),
        (build.v41(candidate_source_layer_id=6), "P2: candidates come from layer 6, expected 4 or none"),
        (build.v41(compress_ratios=[0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0]), "P3: layer 5 has compress ratio 2, expected 0 or 1"),
        (build.v41(engram_layer_ids=[1, 6]), "P4: layer 6 has an Engram table"),
        (build.v41(engram_layer_ids=[1, 4]), "P4: layer 4 has an Engram table"),
    ],
    ids=["P1", "P2", "P3", "P4", "P4-source"],
)  # fmt: skip
def test_a_model_without_a_tail_says_why(config: dict[str, Any], want: str) -> None:
    """Each precondition that fails is named, with the layer."""
    assert want in problems(config)


def test_a_part_of_a_model_has_no_tail() -> None:
    """P5: streams handed from process to process in the middle of the tail are not served."""
    assert problems(build.v41(), built=10) == []
    assert problems(build.v41(), built=6) == ["P5: 6 of 10 layers run here, expected all of them"]


def test_hash_routing_and_foreign_choices_are_named() -> None:
    """P2 and P4 for what no V4.1 file can say today: a configuration object with it is refused."""
    config = ModelConfig.from_dict(build.v41())
    layers = list(config.layers)
    object.__setattr__(layers[4], "index_source", 3)
    object.__setattr__(layers[7], "hash_routed", True)

    assert list(tail_problems(config)) == [
        "P2: layer 4 reads the choice of layer 3",
        "P4: layer 7 routes experts by token id",
    ]


# ------------------------------------------------------------ a request's mode

TAIL = Tail(2, 5, 4)


def ask(count: int = 20, **how: Any) -> GenerateRequest:
    return GenerateRequest("r", tuple(range(count)), SamplingParams(1), **how)


@pytest.mark.parametrize(
    ("default", "how", "mode", "reason", "anchor"),
    [
        ("off", {}, "off", None, 0),
        ("bounded", {}, "bounded", None, 19),
        ("bounded", {"prefill": "off"}, "off", None, 0),
        ("off", {"prefill": "exact"}, "exact", None, 19),
        ("bounded", {"trainer_parity": True}, "exact", "trainer parity", 19),
        ("off", {"trainer_parity": True}, "off", None, 0),
        ("exact", {"prompt_logprobs": 0}, "exact", None, 0),
        ("off", {"prompt_logprobs": 0}, "off", None, 0),
        ("off", {"prefill": "bounded", "prompt_logprobs": 2, "prompt_logprobs_start": 9}, "exact", "prompt logprobs from row 8", 8),
        ("bounded", {"prompt_logprobs": 2, "prompt_logprobs_start": 19}, "exact", "prompt logprobs from row 18", 18),
    ],
)  # fmt: skip
def test_mode_of_a_request(
    default: PrefillMode, how: dict[str, Any], mode: str, reason: str | None, anchor: int
) -> None:
    """What was asked for, else the server's setting; bounded gives way where rows must be right."""
    got = Replay(TAIL, default).resolve(ask(**how))

    assert (got.mode, got.reason, got.anchor) == (mode, reason, anchor)


def test_one_token_scores_nothing() -> None:
    """Token 0 has nothing before it: a prompt of one token has no row that scores."""
    got = Replay(TAIL, "bounded").resolve(ask(1, prompt_logprobs=0))

    assert (got.mode, got.scored_from, got.anchor) == ("bounded", None, 0)


def test_contradictions_are_refused() -> None:
    """A model without a tail, and bounded with trainer parity: whose fault, what was expected."""
    with pytest.raises(EngineError, match="prefill: exact does not apply to this model: P1: x; P4: y"):  # fmt: skip
        Replay(None, problems=("P1: x", "P4: y")).resolve(ask(prefill="exact"))
    with pytest.raises(EngineError, match="engine options: prefill: bounded does not apply to this model: P1: x"):  # fmt: skip
        Replay(None, "bounded", ["P1: x"])
    with pytest.raises(EngineError, match="expected off or exact together with trainer_parity"):
        Replay(TAIL).resolve(ask(prefill="bounded", trainer_parity=True))
