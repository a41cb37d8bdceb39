"""Penalties, biases and the salt of the prefix cache: fields of a request that change who gets what."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, strategies as st

from engine.api import EngineError, FinishReason, GenerateRequest, SamplingParams
from engine.core import EngineCore
from engine.device import sampler
from engine.device.sampler import Draw, sample
from engine.options import EngineConfig
from engine.plan.scheduler import Scheduler
from tests.engine.hash_model import HashRunner, next_logits

VOCAB = 40
NUMBERS = st.floats(-2, 2, width=16)


def slow_moves(row: list[float], params: SamplingParams, generated: Sequence[int]) -> list[float]:
    """Token by token, as the OpenAI API states it: mu[j] - c[j] * frequency - (c[j] > 0) * presence."""
    bias = dict(params.logit_bias)
    moved = []
    for token_id, logit in enumerate(row):
        count = list(generated).count(token_id)
        penalty = count * params.frequency_penalty + (count > 0) * params.presence_penalty
        moved.append(logit - penalty + bias.get(token_id, 0.0))
    return moved


@given(
    st.lists(NUMBERS, min_size=6, max_size=6),
    st.lists(st.integers(0, 5), max_size=12),
    NUMBERS,
    NUMBERS,
    st.dictionaries(st.integers(0, 5), st.floats(-100, 100, width=16), max_size=4),
)
def test_moves_are_those_of_the_slow_twin(
    row: list[float],
    generated: list[int],
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    """Every logit moves by its own counts and bias and by nothing else."""
    params = SamplingParams(
        8, presence_penalty=presence, frequency_penalty=frequency, logit_bias=tuple(bias.items())
    )
    logits = torch.tensor(row)
    sampler.move_logits(logits, Draw(params, len(generated), generated=generated))
    torch.testing.assert_close(
        logits, torch.tensor(slow_moves(row, params, generated)), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize(
    ("params", "generated", "expected"),
    [
        ({"logit_bias": ((2, 100.0),)}, (), 2),
        ({"logit_bias": ((0, -100.0),)}, (), 1),
        ({"presence_penalty": 2.0}, (0,), 1),
        ({"frequency_penalty": 0.5}, (0,), 0),
        ({"frequency_penalty": 0.5}, (0, 0, 0), 1),
        ({"presence_penalty": -2.0}, (1,), 1),
        ({}, (0, 0, 0, 0), 0),
    ],
)
def test_a_draw_is_made_from_the_moved_logits(
    params: dict[str, object], generated: tuple[int, ...], expected: int
) -> None:
    """Greedy, so that only the moves can change the token; log-probabilities stay the model's."""
    settings = SamplingParams(8, temperature=0.0, top_logprobs=1, **params)  # type: ignore[arg-type]
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    (drawn,) = sample(logits, [Draw(settings, len(generated), generated=generated)])
    assert drawn is not None
    assert drawn.token_id == expected
    assert drawn.logprob is not None
    assert drawn.logprob.logprob == pytest.approx(logits[0].log_softmax(0)[expected].item())
    assert logits.tolist() == [[1.0, 0.0, -1.0]], "the caller's logits are not changed"


def test_a_neighbours_moves_do_not_spill_over() -> None:
    """In a batch each row moves by its own draw."""
    plain = Draw(SamplingParams(8, temperature=0.0), 0)
    moved = Draw(SamplingParams(8, temperature=0.0, logit_bias=((2, 100.0),)), 0)
    drawn = sample(torch.tensor([[1.0, 0.0, -1.0]] * 3), [plain, moved, plain])
    assert [one and one.token_id for one in drawn] == [0, 2, 0]


def make(**options: int) -> EngineCore:
    config = EngineConfig(
        **{"block_size": 4, "num_blocks": 20, "max_num_seqs": 3, "max_batched_tokens": 8, **options}  # type: ignore[arg-type]
    )
    runner = HashRunner(
        vocab_size=VOCAB, num_blocks=21, block_size=4, num_slots=config.resolve_num_slots()
    )
    return EngineCore(runner, config, max_position_embeddings=32)


def run(core: EngineCore, *requests: GenerateRequest) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        core.submit(request)
    while core.has_work:
        for delta in core.step():
            found[delta.request_id] += delta.token_ids
            assert delta.finish_reason in (None, FinishReason.LENGTH)
    return found


def slowly(request: GenerateRequest) -> list[int]:
    """Generate without an engine, every logit moved by the slow twin."""
    sequence, output = list(request.prompt_ids), []
    for _ in range(request.sampling.max_tokens):
        moved = slow_moves(next_logits(sequence, VOCAB).tolist(), request.sampling, output)
        output.append(max(range(VOCAB), key=lambda i: (moved[i], -i)))
        sequence.append(output[-1])
    return output


def test_the_engine_counts_what_each_request_has_generated() -> None:
    """Side by side, chunked and alone: a request's penalties see its own output and no prompt."""
    settings = {"max_tokens": 12, "temperature": 0.0, "seed": 1}
    requests = [
        GenerateRequest("plain", (1, 2, 3), SamplingParams(**settings)),  # type: ignore[arg-type]
        GenerateRequest(
            "penalised",
            tuple(range(9)),
            SamplingParams(**settings, presence_penalty=2.0, frequency_penalty=1.5),  # type: ignore[arg-type]
        ),
        GenerateRequest(
            "biased",
            (5, 5),
            SamplingParams(**settings, logit_bias=((7, 100.0),), frequency_penalty=2.0),  # type: ignore[arg-type]
        ),
    ]
    found = run(make(), *requests)
    assert found == {request.id: slowly(request) for request in requests}
    assert set(found["biased"]) == {7}


def test_generated_tokens_that_are_not_passed_on_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted fault: an engine that forgets what was generated gives another output."""
    whole = Draw.__init__
    monkeypatch.setattr(
        Draw, "__init__", lambda self, params, index, **_: whole(self, params, index)
    )
    params = SamplingParams(
        12, temperature=0.0, seed=1, logit_bias=((7, 20.0),), frequency_penalty=2.0
    )
    request = GenerateRequest("a", (5, 5), params)
    assert run(make(), request)["a"] != slowly(request)


def test_a_bias_for_a_token_that_the_model_lacks_is_refused() -> None:
    """The request is refused before it is queued, with the id and the size."""
    core = make()
    params = SamplingParams(4, logit_bias=((VOCAB, 1.0),))
    with pytest.raises(
        EngineError, match=f"logit_bias: expected token ids below {VOCAB}, got {VOCAB}"
    ):
        core.submit(GenerateRequest("a", (1,), params))


def cached(core: EngineCore, name: str, salt: str) -> int:
    core.submit(
        GenerateRequest(name, tuple(range(9)), SamplingParams(2, temperature=0.0), cache_salt=salt)
    )
    usages = []
    while core.has_work:
        usages += [delta.usage for delta in core.step() if delta.usage is not None]
    return usages[0].cached_tokens


def test_two_salts_never_share_a_prefix() -> None:
    """A prompt is found again under its own salt only, and none is a salt like another."""
    core = make(max_snapshots=16)
    assert [cached(core, f"1{salt}", salt) for salt in ("a", "b", "")] == [0, 0, 0]
    assert all(cached(core, f"2{salt}", salt) > 0 for salt in ("a", "b", ""))
    assert cached(core, "3", "ab") == 0


def test_a_scheduler_without_the_salt_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: requests whose salt is dropped meet in the cache."""
    add = Scheduler.add

    def without(self: Scheduler, request: GenerateRequest) -> None:
        add(self, GenerateRequest(request.id, request.prompt_ids, request.sampling))

    monkeypatch.setattr(Scheduler, "add", without)
    core = make(max_snapshots=16)
    assert cached(core, "1", "a") == 0
    assert cached(core, "2", "b") > 0
