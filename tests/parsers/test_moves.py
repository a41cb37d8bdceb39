"""Penalties and biases: honoured where the client's sampling counts, named as ignored elsewhere."""

from __future__ import annotations

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
