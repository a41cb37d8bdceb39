"""Prefill modes through scheduler, prefix cache and preemption, with a model of hashes.

`exact` must give what `off` gives, token for token. `bounded` must give what a model gives whose
tail's windows are cut at the low of the request's anchor, however the prompt was cut, whatever ran
beside it, was cached or preempted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from engine.api import (
    EngineError,
    FinishReason,
    GenerateRequest,
    PrefillMode,
    SamplingParams,
    TokenDelta,
    Usage,
)
from engine.core import EngineCore
from engine.device.sampler import logprob_of
from engine.options import EngineConfig
from engine.plan import replay
from engine.plan.replay import PromptTail, Replay, Stage, Tail
from engine.plan.scheduler import Scheduler
from tests.engine.replay.symbolic import VOCAB, SymbolicRunner, Twin, logits_of

TAIL = Tail(2, 5, 4)  # bounded: 4 rows; exact: 10
CONTEXT = 60
OPTIONS = EngineConfig(
    device="cpu",
    block_size=4,
    num_blocks=16,
    max_num_seqs=3,
    max_batched_tokens=11,
    max_snapshots=6,
)


def make(
    options: EngineConfig = OPTIONS, default: PrefillMode = "off", tail: Tail = TAIL
) -> tuple[EngineCore, SymbolicRunner]:
    runner = SymbolicRunner(
        tail,
        num_blocks=(options.num_blocks or 0) + 1,
        block_size=options.block_size,
        num_slots=options.resolve_num_slots(),
    )
    core = EngineCore(
        runner, options, max_position_embeddings=CONTEXT, replay=Replay(tail, default)
    )
    return core, runner


def ask(name: str, ids: list[int], count: int = 6, **how: object) -> GenerateRequest:
    return GenerateRequest(name, tuple(ids), SamplingParams(count, 0.0), **how)  # type: ignore[arg-type]


def text(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


class Run:
    """Requests through one engine; what each got, and the anchors its chunks had."""

    def __init__(self, core: EngineCore, runner: SymbolicRunner) -> None:
        self.core, self.runner = core, runner
        self.asked: dict[str, GenerateRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.usage: dict[str, Usage] = {}
        self.first: dict[str, TokenDelta] = {}

    def submit(self, request: GenerateRequest) -> None:
        self.asked[request.id] = request
        self.tokens[request.id] = []
        self.core.submit(request)

    def step(self) -> list[TokenDelta]:
        deltas = self.core.step()
        self.core.check_integrity()
        for delta in deltas:
            assert delta.finish_reason is not FinishReason.ERROR, delta.error
            self.tokens[delta.request_id] += delta.token_ids
            self.first.setdefault(delta.request_id, delta)
            if delta.usage is not None:
                self.usage[delta.request_id] = delta.usage
        return deltas

    def all(self, *requests: GenerateRequest) -> None:
        for request in requests:
            self.submit(request)
        while self.core.has_work:
            self.step()

    def chunks(self, name: str) -> list:  # type: ignore[type-arg]
        return [c for plan in self.runner.plans for c in plan.chunks if c.request_id == name]

    def anchor(self, name: str) -> int:
        """The one anchor that all chunks of a request had."""
        (anchor,) = {chunk.anchor for chunk in self.chunks(name)}
        return anchor

    def wanted(self, name: str) -> list[int]:
        """What the twin says for the request, given its mode and anchor."""
        request, (mode,) = self.asked[name], {chunk.prefill for chunk in self.chunks(name)}
        low = TAIL.low(mode, self.anchor(name), TAIL.first) if mode == "bounded" else 0
        return Twin(TAIL).next_tokens(request.prompt_ids, len(self.tokens[name]), low)


def play(run: Run, seed: int, default: PrefillMode, modes: list[PrefillMode | None]) -> list[str]:
    """Random load with shared beginnings, further turns and aborts; names of those that ended."""
    draw = random.Random(seed)
    texts = [text(draw.randrange(1000), 40) for _ in range(2)]
    waiting = []
    for number in range(7):
        ids = draw.choice(texts)[: draw.randint(1, 40)] + text(number, draw.randint(0, 6))
        waiting.append(ask(f"r{number}", ids, draw.randint(1, 8), prefill=draw.choice(modes)))
    turns = {request.id: draw.randint(0, 2) for request in waiting}
    aborted: set[str] = set()
    while waiting or run.core.has_work:
        if waiting and (not run.core.has_work or draw.random() < 0.4):
            run.submit(waiting.pop(0))
        if draw.random() < 0.03 and run.core.has_work:
            name = draw.choice(list(run.asked))
            run.core.abort(name)
            aborted.add(name)
        for delta in run.step():
            name = delta.request_id
            if delta.finish_reason is None or not turns.get(name, 0):
                continue
            old = run.asked[name]
            ids = [*old.prompt_ids, *run.tokens[name], *text(len(run.tokens), draw.randint(1, 9))]
            if len(ids) < CONTEXT - 9:
                new = replace(old, id=f"{name}+", prompt_ids=tuple(ids))
                turns[new.id] = turns[name] - 1
                waiting.insert(0, new)
    return [name for name in run.tokens if run.tokens[name] and name not in aborted]


def agrees(seed: int, default: PrefillMode, modes: list[PrefillMode | None] | None = None, options: EngineConfig = OPTIONS) -> tuple[bool, Run]:  # fmt: skip
    """Whether every request got what the twin says."""
    run = Run(*make(options, default))
    names = play(run, seed, default, modes or [None])
    return all(run.tokens[name] == run.wanted(name) for name in names), run


@pytest.mark.parametrize("default", ["off", "exact", "bounded"])
@given(seed=st.integers(0, 2**32))
def test_a_mode_gives_what_its_twin_gives(default: PrefillMode, seed: int) -> None:
    """Random prompts, turns, aborts, evictions and preemptions change no token."""
    same, run = agrees(seed, default)

    assert same
    for name, usage in run.usage.items():
        own = [c for c in run.chunks(name) if c.start < usage.prompt_tokens]
        assert usage.prefill == default
        assert usage.tail_rows <= usage.prompt_tokens - usage.cached_tokens
        assert own


@given(seed=st.integers(0, 2**32))
def test_modes_side_by_side(seed: int) -> None:
    """Requests of all modes share steps and memory; none goes on from another mode's state."""
    same, _ = agrees(seed, "exact", ["off", "exact", "bounded", None])

    assert same


def test_the_load_meets_hits_preemptions_and_left_out_rows() -> None:
    """The load above is one that puts the modes to the test."""
    found = []
    for seed in range(40):
        for mode in ("exact", "bounded"):
            run = agrees(seed, mode)[1]
            skipped = sum(
                u.prompt_tokens - u.cached_tokens - u.tail_rows for u in run.usage.values()
            )
            resumed = sum(
                chunk.prefill == "bounded" and 0 < chunk.start <= chunk.anchor + TAIL.window
                for plan in run.runner.plans
                for chunk in plan.chunks
            )
            stats = run.core.stats()
            found.append((stats.prefix_hits, stats.preemptions, stats.evictions, skipped, resumed))

    hits, preemptions, evictions, skipped, resumed = map(sum, zip(*found, strict=True))
    assert hits > 100
    assert preemptions > 10
    assert evictions > 200
    assert skipped > 1000
    assert resumed > 50


@pytest.mark.parametrize("mode", ["exact", "bounded"])
@given(
    seed=st.integers(0, 2**32),
    length=st.sampled_from([1, 2, 3, 4, 5, 9, 10, 11, 12, 40, 50]),
    budget=st.integers(4, 60),
)
def test_the_chunks_change_nothing(mode: PrefillMode, seed: int, length: int, budget: int) -> None:
    """Cold, a prompt of any length, around W and the halo too, cut anyhow, gives the same."""
    options = replace(OPTIONS, max_batched_tokens=budget, prefix_cache=False)
    run = Run(*make(options, mode))

    run.all(ask("r", text(seed, length)))

    assert run.anchor("r") == length - 1
    assert run.tokens["r"] == run.wanted("r")
    low = TAIL.low(mode, length - 1, TAIL.first)
    assert run.usage["r"].tail_rows == length - low


# ------------------------------------------------------------ prefix cache


@pytest.mark.parametrize("mode", ["off", "exact", "bounded"])
@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 9, 10, 20])
def test_the_next_turn_starts_at_the_end_of_the_last(mode: PrefillMode, new: int) -> None:
    """An agent's next turn finds all of its last generation, however short its own part is."""
    run = Run(*make(default=mode))
    run.all(ask("one", text(1, 24), 7))
    ids = [*text(1, 24), *run.tokens["one"], *text(2, new)]

    run.all(ask("two", ids))

    assert run.usage["two"].cached_tokens == 24 + 6  # the last token was never processed
    assert run.tokens["two"] == run.wanted("two")
    rows = min(new + 1, 1 + TAIL.halo(mode)) if mode != "off" else new + 1
    assert run.usage["two"].tail_rows == rows
    short = mode == "bounded" and new + 1 < TAIL.window
    assert run.anchor("two") == (23 if short else 0 if mode == "off" else len(ids) - 1)


@pytest.mark.parametrize("mode", ["exact", "bounded"])
@pytest.mark.parametrize("new", [1, 3, 8])
def test_a_branch_is_found_a_halo_earlier(mode: PrefillMode, new: int) -> None:
    """Prompts that share a beginning go on from a halo before it, with any ending."""
    shared = text(5, 28)
    run = Run(*make(default=mode))
    for number in range(2):
        run.all(ask(f"{number}", [*shared, *text(10 + number, 18)]))

    run.all(ask("late", [*shared, *text(20, new)]))

    want = (28 - TAIL.halo(mode)) // 4 * 4
    assert run.usage["late"].cached_tokens == want
    assert run.tokens["late"] == run.wanted("late")


def test_a_state_without_the_tails_windows_is_no_match_for_a_short_turn() -> None:
    """A snapshot in the middle of a prompt serves those who need no tail row before its end."""
    tail = Tail(2, 5, 4)
    for mode, anchor, length, kept, fits in (
        ("bounded", 39, 36, 50, True),  # its rows are 36 to 39
        ("bounded", 38, 36, 50, False),  # it needs row 35
        ("bounded", 38, 36, 38, True),  # which this one has
        ("bounded", 38, 36, 20, True),
        ("exact", 45, 36, 50, True),
        ("exact", 44, 36, 50, False),
        ("exact", 44, 36, 44, True),
    ):
        got = tail.fits(mode, anchor, length, kept, same=False)  # type: ignore[arg-type]
        assert got is fits, (mode, anchor, length, kept)
    assert not tail.fits("bounded", 38, 36, 20, same=True)
    assert tail.fits("bounded", 38, 36, 38, same=True)


def test_the_fuller_of_two_states_is_kept() -> None:
    """A prompt that ends where another only passed leaves a state that a short turn can use."""
    run = Run(*make(default="bounded"))
    run.all(ask("long", [*text(5, 28), *text(6, 9)], 1))
    run.all(ask("other", [*text(5, 28), *text(7, 9)], 1))  # leaves a state at 24, in passing
    assert 24 in [s.length for s in run.core._scheduler.prefix.snapshots]
    run.all(ask("end", text(5, 24), 1))

    run.all(ask("next", [*text(5, 24), 3, 4]))

    assert run.usage["next"].cached_tokens == 24
    assert run.anchor("next") == 23
    assert run.tokens["next"] == run.wanted("next")


def test_modes_do_not_share_states() -> None:
    """The fingerprint includes the mode: the same prompt in another mode is cold."""
    run = Run(*make())
    modes: list[PrefillMode] = ["off", "exact", "bounded"]
    for mode in modes:
        run.all(ask(mode, text(3, 30), prefill=mode))
        run.all(ask(f"{mode} again", [*text(3, 30), *run.tokens[mode][:2], 1], prefill=mode))

    assert [run.usage[mode].cached_tokens for mode in modes] == [0, 0, 0]
    assert all(run.usage[f"{mode} again"].cached_tokens == 30 for mode in modes)


# ------------------------------------------------------------ prompt log-probabilities, usage


@pytest.mark.parametrize("mode", ["off", "exact", "bounded"])
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(1, 45),
    budget=st.integers(4, 60),
    data=st.data(),
)
def test_scores_are_those_of_off(
    mode: PrefillMode, seed: int, length: int, budget: int, data: st.DataObject
) -> None:
    """I5: every prompt token that is asked for is scored, as without any tail, cache or not."""
    start = data.draw(st.integers(0, length - 1))
    options = replace(OPTIONS, max_batched_tokens=budget)
    run = Run(*make(options, mode))
    ids = text(seed, length)
    run.all(ask("before", ids))

    run.all(ask("r", ids, prompt_logprobs=2, prompt_logprobs_start=start), ask("s", ids, 9))

    x = Twin(TAIL).outputs(ids)
    want = [logprob_of(logits_of(x[p - 1]), ids[p], 2) if p else None for p in range(start, length)]
    assert run.first["r"].prompt_logprobs == tuple(want)
    assert run.first["s"].prompt_logprobs is None
    assert run.tokens["r"] == run.wanted("r")
    usage = run.usage["r"]
    whole = mode == "bounded" and any(want)
    assert usage.prefill == ("exact" if whole else mode)
    reason = f"prompt logprobs from row {max(start, 1) - 1}" if whole else None
    assert usage.prefill_reason == reason
    assert usage.cached_tokens <= max(start - 1, 0) or not any(want)


def test_a_position_outside_the_prompt_is_refused() -> None:
    """Scores from a position that the prompt does not have: which were possible, which was asked."""
    core, _ = make()

    with pytest.raises(EngineError, match="prompt_logprobs_start: expected a position of the prompt of 5 tokens, got 5"):  # fmt: skip
        core.submit(ask("r", text(0, 5), prompt_logprobs=0, prompt_logprobs_start=5))
    with pytest.raises(EngineError, match="expected off or exact together with trainer_parity"):
        core.check(ask("r", text(0, 5), prefill="bounded", trainer_parity=True))


# ------------------------------------------------------------ planted faults


def fails(default: PrefillMode, modes: list[PrefillMode | None] | None = None) -> bool:
    """Whether the comparison above sees a fault within some seeds."""

    def wrong(seed: int) -> bool:
        try:
            return not agrees(seed, default, modes)[0]
        except AssertionError:
            return True

    return any(wrong(seed) for seed in range(12))


def with_stages(monkeypatch: pytest.MonkeyPatch, change: Callable[[Stage], Stage]) -> None:
    right = replay.stages
    monkeypatch.setattr(replay, "stages", lambda *args: tuple(map(change, right(*args))))


@pytest.mark.parametrize("change", [None, -1, 1], ids=["n1", "n2-low", "n2-high"])
def test_a_wrong_floor_is_seen(monkeypatch: pytest.MonkeyPatch, change: int | None) -> None:
    """n1, n2: without its floor, or with one that is off by one, a window reads other rows."""

    def wrong(stage: Stage) -> Stage:
        moved = [f + change if f and change else 0 for f in stage.floors]
        return replace(stage, floors=tuple(moved))

    with_stages(monkeypatch, wrong)

    assert fails("bounded")


def test_a_chunks_own_window_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """n3: the last rows of each chunk instead of the request's, with a floor of their own."""
    right = Scheduler._chunk

    def wrong(self: Scheduler, state: object, size: int, **how: object) -> object:
        found = right(self, state, size, **how)  # type: ignore[arg-type]
        return found._replace(anchor=min(found.anchor, found.end - 1))

    def seen(seed: int) -> bool:
        ids = text(seed, 40)
        runs = [Run(*make(replace(OPTIONS, max_batched_tokens=n), "bounded")) for n in (7, 60)]
        for run in runs:
            run.all(ask("r", ids))
        return runs[0].tokens["r"] != runs[1].tokens["r"]

    assert not any(seen(seed) for seed in range(10))
    monkeypatch.setattr(Scheduler, "_chunk", wrong)
    assert any(seen(seed) for seed in range(10))


def test_missing_entries_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """n4: entries written for the tail's rows alone: what lies before the window is lost."""
    start = SymbolicRunner.__init__

    def wrong(self: SymbolicRunner, *args: object, **how: object) -> None:
        start(self, *args, **how)  # type: ignore[arg-type]
        self.writes_all_entries = False

    monkeypatch.setattr(SymbolicRunner, "__init__", wrong)

    assert fails("bounded")
    assert fails("exact")


@pytest.mark.parametrize("default", ["exact", "bounded"])
def test_a_match_that_is_not_shortened_is_seen(
    monkeypatch: pytest.MonkeyPatch, default: PrefillMode
) -> None:
    """n5: going on from a state whose tail has no rows reads somebody else's."""
    monkeypatch.setattr(PromptTail, "mark", lambda self, position, block_size: position)
    monkeypatch.setattr(Tail, "fits", lambda self, *args, **how: True)

    assert fails(default)


def test_shared_fingerprints_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of all modes under one name: exact goes on from approximate rows."""
    monkeypatch.setattr(PromptTail, "salt", b"")

    assert fails("exact", ["off", "exact", "bounded", None])


def preempted(seed: int) -> Run:
    """A bounded request that loses its memory after another one left a state on its way."""
    run = Run(*make(default="bounded"))
    ids = text(seed, 20)
    run.submit(ask("r", ids, 12))
    run.step()
    run.submit(ask("o", ids[:18], 1))
    while not run.tokens["r"]:
        run.step()
    run.core._scheduler.prefix.clear()  # of its own state at the end of its prompt
    while run.core._scheduler.num_running + run.core._scheduler.num_waiting > 1:
        run.step()
    run.core._scheduler._preempt(run.core._scheduler.get("r"))
    run.all()
    return run


def test_a_preempted_request_has_the_windows_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own state is a function of its anchor; a fuller one of another request is not taken."""
    right = Tail.fits

    def wrong(self: Tail, *args: object, same: bool) -> bool:
        return right(self, *args, same=False)  # type: ignore[arg-type]

    assert all((run := preempted(seed)).tokens["r"] == run.wanted("r") for seed in range(10))
    monkeypatch.setattr(Tail, "fits", wrong)
    assert any((run := preempted(seed)).tokens["r"] != run.wanted("r") for seed in range(10))


def test_a_scored_request_that_is_bounded_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """n8: scores asked for and the tail not whole: the request fails, and the engine lives."""
    right = Replay.resolve

    def wrong(self: Replay, request: GenerateRequest) -> PromptTail:
        found = right(self, request)
        found.mode, found.anchor = "bounded", len(request.prompt_ids) - 1
        return found

    monkeypatch.setattr(Replay, "resolve", wrong)
    core, _ = make(default="bounded")
    core.submit(ask("r", text(1, 30), prompt_logprobs=0))
    deltas = [delta for _ in range(10) for delta in core.step()]

    assert [delta.finish_reason for delta in deltas] == [FinishReason.ERROR]
    core.check_integrity()
