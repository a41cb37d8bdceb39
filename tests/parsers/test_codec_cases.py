"""The recorded cases of the official codec, bare and past the gate; every deviation has its rule."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson
import pytest

from parsers import Codec
from tests.parsers.deviations import DEVIATIONS, OUT_OF_REACH
from tests.parsers.support import chunks, each, encode, masked, message, said, whole

DATA = orjson.loads((Path(__file__).parents[1] / "data/codec/codec_cases.json").read_bytes())
CASES = [c for c in DATA["stream_cases"] + DATA["token_cases"] if c["protocol"] == "chat"]
REACHABLE = [c for c in CASES if c["id"] not in OUT_OF_REACH]
EOS = 1


def fed(codec: Codec, case: dict[str, Any]) -> list[int]:
    """The ids of a case; an EOS at the end is left to the exchange to cut."""
    if "model_output" in case:
        return encode(codec, case["model_output"])
    pieces = [f[1] if f[0] == "tok" else encode(codec, f[1]) for f in case["fed"]]
    return [id_ for piece in pieces for id_ in piece]


def play(codec: Codec, case: dict[str, Any], *, stream: bool, size: int = 1) -> Any:
    body = {**case["request"], "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    usage = case["prompt_usage"] or {}
    exchange = codec.open_exchange("chat", orjson.dumps(body), exchange_id="ID")
    frames = exchange.start(usage.get("prompt_tokens", 0), usage.get("prompt_cache_hit_tokens", 0))
    for piece in each(fed(codec, case), size):
        frames += exchange.receive(piece)
    frames += exchange.close("length" if case["backend_finish"] == "length" else "stop")
    return frames if stream else exchange.body()


def recorded_chunks(case: dict[str, Any]) -> list[Any] | None:
    """The chunks the bare codec gave for one id a push, EOS removed."""
    for mode in ("gateway", "as_fed", "token"):
        if mode in case["observed"]:
            return case["observed"][mode].get("chunks")
    return None


def as_recorded(chunk: dict[str, Any]) -> dict[str, Any]:
    (choice,) = chunk["choices"]
    out = {"delta": choice["delta"], "finish_reason": choice["finish_reason"]}
    if choice["logprobs"] is not None:
        out["logprobs"] = choice["logprobs"]
    if chunk.get("usage") is not None:
        out["usage"] = chunk["usage"]
    return out


def is_comparable(case: dict[str, Any]) -> bool:
    """Fed one id a push, without logprobs (test_exchange has those) or an EOS in the middle."""
    stepwise = recorded_chunks(case) is not None and all(
        f[0] == "tok" and len(f[1]) == 1 for f in case.get("fed", ())
    )
    scored = any("logprobs" in chunk for chunk in recorded_chunks(case) or ())
    return stepwise and not scored and DEVIATIONS.get(case["id"], ("",))[0] != STOP_RULE


STOP_RULE = "stop id ends the text"
STEPWISE = [case for case in REACHABLE if is_comparable(case)]


@pytest.mark.parametrize("case", STEPWISE, ids=itemgetter("id"))
def test_without_a_gate_every_chunk_is_the_codecs(bare: Codec, case: dict[str, Any]) -> None:
    """A bare exchange changes nothing of what the codec writes, chunk by chunk."""
    want = recorded_chunks(case)
    assert want is not None

    got = [as_recorded(chunk) for chunk in chunks(play(bare, case, stream=True))]

    assert masked(want) == masked(got)


@pytest.mark.parametrize("case", REACHABLE, ids=itemgetter("id"))
def test_without_a_gate_the_whole_reply_is_the_codecs(bare: Codec, case: dict[str, Any]) -> None:
    """A whole bare reply is the codec's accumulated one."""
    want, got = case["accumulated"], orjson.loads(play(bare, case, stream=False))

    if DEVIATIONS.get(case["id"], ("",))[0] == STOP_RULE:
        return  # listed, and tested past the gate
    assert masked(want["choices"][0]["message"]) == masked(got["choices"][0]["message"])
    assert want["choices"][0]["finish_reason"] == got["choices"][0]["finish_reason"]


@pytest.mark.parametrize("case", REACHABLE, ids=itemgetter("id"))
def test_past_the_gate_only_listed_cases_differ(lenient: Codec, case: dict[str, Any]) -> None:
    """With undeclared tools passed, a reply differs from the codec's only by a rule, and as listed."""
    codec_says = said(whole(orjson.dumps(case["accumulated"])))
    _rule, want = DEVIATIONS.get(case["id"], ("", {}))

    got = said(whole(play(lenient, case, stream=False)))

    assert codec_says | want == got
    assert (got != codec_says) == (case["id"] in DEVIATIONS)


@pytest.mark.parametrize("case", REACHABLE, ids=itemgetter("id"))
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_stream_and_whole_say_the_same(lenient: Codec, case: dict[str, Any], size: int) -> None:
    """The fragments of a stream, in any step size, add up to the whole reply."""
    want = whole(play(lenient, case, stream=False))

    got = message(chunks(play(lenient, case, stream=True, size=size)))

    assert masked(want) == masked(got)


@pytest.mark.parametrize("case", REACHABLE, ids=itemgetter("id"))
def test_arguments_are_json_or_its_beginning(codec: Codec, case: dict[str, Any]) -> None:
    """Delivered arguments are a JSON object, cut only under finish_reason length."""
    reply = whole(play(codec, case, stream=False))

    for _name, arguments, _id in reply["calls"]:
        if reply["finish"] != "length":
            assert isinstance(orjson.loads(arguments), dict)


def test_the_lists_name_known_cases() -> None:
    """No stale entry: every listed case is a recorded one."""
    known = {case["id"] for case in CASES}

    assert set(DEVIATIONS) | set(OUT_OF_REACH) <= known
    assert not set(DEVIATIONS) & set(OUT_OF_REACH)
