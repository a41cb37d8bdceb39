"""Penalties and biases: honoured where the client's sampling counts, named as ignored elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from parsers import ClientError, Codec, LogitMoves
from parsers.request import MOST_BIASES
from tests.parsers.support import complete, open_chat

ALL = {
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "logit_bias": {"7": 100, "9": -0.5, "11": 0},
}
MOVES = LogitMoves(0.5, -1, ((7, 100), (9, -0.5)))


@pytest.mark.parametrize("profile", ["codec", "sglang"])
def test_a_chats_moves_reach_the_sampling(profile: str, request: pytest.FixtureRequest) -> None:
    """All three are there, a bias of 0 is none, and nothing is named as ignored."""
    exchange = open_chat(request.getfixturevalue(profile), **ALL)

    assert exchange.sampling.moves == MOVES
    assert exchange.ignored == ()
    assert open_chat(request.getfixturevalue(profile)).sampling.moves == LogitMoves()


def test_the_hosted_api_ignores_them_and_so_does_its_profile(official: Codec) -> None:
    """Accepted without effect, and reported."""
    exchange = open_chat(official, **ALL)

    assert exchange.sampling.moves == LogitMoves()
    assert exchange.ignored == ("frequency_penalty", "logit_bias", "presence_penalty")
    assert open_chat(official, presence_penalty=0, logit_bias={}).ignored == ()


def test_a_completions_moves_reach_the_sampling(codec: Codec) -> None:
    """The raw route has the same fields."""
    made = complete(codec, **ALL)

    assert made.sampling.moves == MOVES
    assert made.ignored == ()


WRONG = [
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias"),
    ({"logit_bias": {"1": None}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(MOST_BIASES + 1)}}, "logit_bias"),
    ({"logit_bias": {"999999999": 1}}, "logit_bias.999999999"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_a_move_that_cannot_be_made_is_refused(
    codec: Codec, fields: dict[str, Any], param: str
) -> None:
    """In both protocols, with the field's name."""
    for open_ in (open_chat, complete):
        with pytest.raises(ClientError) as caught:
            open_(codec, **fields)
        assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("protocol", ["responses", "messages"])
def test_protocols_without_these_fields_name_them_as_ignored(codec: Codec, protocol: Any) -> None:
    """Neither vendor's API has them there."""
    fields: dict[str, Any] = (
        {"input": "q"}
        if protocol == "responses"
        else {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9}
    )
    body = orjson.dumps({"model": codec.model.name, **fields, **ALL})
    exchange = codec.open_exchange(protocol, body, exchange_id="ID")

    assert set(exchange.ignored) >= {"frequency_penalty", "logit_bias", "presence_penalty"}
    assert exchange.sampling.moves == LogitMoves()


def _sized(codec: Codec, vocab_size: int) -> Codec:
    """The same tokenizer in front of a model of so many ids."""
    model = replace(codec.model, vocab_size=vocab_size)
    return Codec(model, codec._tokenizer, codec.vocabulary, codec.profile)


def test_an_id_that_is_missing_is_the_models_or_the_tokenizers_fault(codec: Codec) -> None:
    """The two need not agree: which of them lacks it is said, and where it stands."""
    size = codec.vocabulary.size
    tokenizers = f"expected a token id of the model's tokenizer, whose ids are below {size}, got"
    models = f"expected a token id of the model, whose vocab_size is {size - 9}, got"
    cases = [
        (_sized(codec, size + 64), size + 5, tokenizers),
        (codec, size + 5, tokenizers),  # a model whose size is not known
        (_sized(codec, size - 9), size - 5, models),
        (_sized(codec, size - 9), size + 5, models),
    ]
    for served, token_id, expected in cases:
        bias = {"logit_bias": {str(token_id): 1}}
        for open_, fields, at in (
            (open_chat, bias, f"logit_bias.{token_id}"),
            (complete, bias, f"logit_bias.{token_id}"),
            (complete, {"prompt": [5, token_id]}, "prompt[1]"),
        ):
            with pytest.raises(ClientError) as caught:
                open_(served, **fields)  # type: ignore[operator]
            assert caught.value.param == at
            assert str(caught.value) == f"{at}: {expected} the number {token_id}"
    for served in (codec, _sized(codec, size - 9)):
        assert complete(served, prompt=[size - 10]).prompt_ids == (size - 10,)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            ["a", "b"],
            "prompt: expected one prompt, a text or an array of token ids, not several, got",
        ),
        (
            [[1], [2]],
            "prompt: expected one prompt, a text or an array of token ids, not several, got",
        ),
        ([5, "a"], "prompt[1]: expected a token id, got the string 'a'"),
        ([[5, None]], "prompt[0][1]: expected a token id, got null"),
        ([[]], "prompt[0]: expected a non-empty text or array of token ids, got an empty array"),
    ],
)
def test_a_wrong_prompt_is_told_apart(codec: Codec, prompt: list[Any], message: str) -> None:
    """Several prompts, something else than an id, nothing at all."""
    with pytest.raises(ClientError) as caught:
        complete(codec, prompt=prompt)
    assert str(caught.value).startswith(message)
