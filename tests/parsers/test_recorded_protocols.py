"""The recorded cases of the official codec in the two other protocols, and all recorded prompts."""

from __future__ import annotations

import hashlib
from operator import itemgetter
from typing import Any

import orjson
import pytest

from parsers import PROFILES, ClientError, Codec, ServedModel
from tests.parsers import streams
from tests.parsers.support import drive, each, encode, masked, write_tokenizer
from tests.parsers.test_codec_cases import DATA

CASES = [c for c in DATA["stream_cases"] if c["protocol"] != "chat"]
# No engine of ours ends so.
OUT_OF_REACH = {
    "H05": "content_filter",
    "H07": "no finish reason",
    "H16": "no finish reason",
    "H17": "content_filter",
}
REACHABLE = [c for c in CASES if c["id"] not in OUT_OF_REACH]


def stable(value: Any) -> Any:
    """A case without clocks, random ids and the field that the protocol gained since."""
    if isinstance(value, dict):
        dropped = ("__event__", "created_at", "completed_at", "cache_write_tokens")
        return {k: stable(v) for k, v in value.items() if k not in dropped}
    return [stable(v) for v in value] if isinstance(value, list) else value


def play(codec: Codec, case: dict[str, Any], *, stream: bool) -> Any:
    body = {**case["request"], "stream": stream}
    exchange = codec.open_exchange(case["protocol"], orjson.dumps(body), exchange_id="ID")
    usage = case["prompt_usage"]
    frames = exchange.start(usage["prompt_tokens"], usage["prompt_cache_hit_tokens"])
    for id_ in encode(codec, case["model_output"]):
        frames += exchange.receive([id_])
    frames += exchange.close(case["backend_finish"])
    return streams.events(frames) if stream else orjson.loads(exchange.body())


@pytest.mark.parametrize("case", REACHABLE, ids=itemgetter("id"))
def test_without_a_gate_every_event_is_the_codecs(bare: Codec, case: dict[str, Any]) -> None:
    """A bare exchange changes nothing of what the codec writes, event by event."""
    observed = case["observed"].get("gateway") or case["observed"]["token"]
    got = play(bare, case, stream=True)

    assert masked(stable(got)) == masked(stable(observed["chunks"]))
    assert [e["type"] for e in got] == [c["__event__"] for c in observed["chunks"]]


@pytest.mark.parametrize("case", REACHABLE, ids=itemgetter("id"))
def test_past_the_gate_the_message_is_the_codecs(official: Codec, case: dict[str, Any]) -> None:
    """What is said, under profile official; broken arguments (H18) are mended."""
    want = streams.whole(case["protocol"], orjson.dumps(case["accumulated"]))
    got = streams.whole(case["protocol"], orjson.dumps(play(official, case, stream=False)))

    for field in ("content", "reasoning", "finish"):
        assert got[field] == want[field]
    calls = [call[:2] for call in got["calls"]]
    if case["id"] == "H18":
        assert calls != [call[:2] for call in want["calls"]]
        assert got["bathyal"] is not None
    elif case["backend_finish"] == "stop":
        assert calls == [call[:2] for call in want["calls"]]
    else:
        assert [name for name, _ in calls] == [call[0] for call in want["calls"]]


PROMPTS = DATA["prompt_cases"]
# Refused or taken otherwise by a rule of issue 2 or 3.
BY_RULE = {
    "P05-v4": "developer is rendered as system",
    "P05-v41": "developer is rendered as system",
    "P45-v4": "tool_choice required needs tools",
    "P45-v41": "tool_choice required needs tools",
    "P811-v4": "images need a vision tower",
    "P811-v41": "images need a vision tower",
    "P812-v4": "images need a vision tower",
}


@pytest.fixture(scope="module")
def by_model(served: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Codec]:
    official = PROFILES["official"]
    path = tmp_path_factory.mktemp("full") / "tokenizer.json"
    v41_path = write_tokenizer(path, extra=["<｜latest_reminder｜>"])
    spelled = {
        "DeepSeek-V4-Pro": ("v4", served.tokenizer_path),
        "DeepSeek-V4.1-Flash": ("v4.1", v41_path),
    }
    return {
        name: Codec.load(
            ServedModel(name, version, path, max_model_len=500_000, eos_token_ids=(1,)),  # type: ignore[arg-type]
            official,
        )
        for name, (version, path) in spelled.items()
    }


@pytest.mark.parametrize("case", PROMPTS, ids=itemgetter("id"))
def test_every_recorded_prompt_is_the_codecs(
    by_model: dict[str, Codec], case: dict[str, Any]
) -> None:
    """Under profile official: the recorded text, or refused where the codec refused it."""
    body = case["request"]
    codec = by_model.get(body.get("model"), by_model["DeepSeek-V4-Pro"])
    try:
        ids = codec.prompt_ids("chat", orjson.dumps(body))
    except ClientError:
        got = None
    else:
        text = b"".join(codec.vocabulary.bytes_of(i) or b"" for i in ids)
        got = hashlib.sha256(text).hexdigest()

    assert (got == case.get("rendered_prompt_sha256")) == (case["id"] not in BY_RULE)


def test_nothing_is_listed_in_vain(bare: Codec) -> None:
    """Stale entries fail; and the drive of these cases is not empty."""
    assert set(OUT_OF_REACH) < {case["id"] for case in CASES}
    assert set(BY_RULE) <= {case["id"] for case in PROMPTS}
    assert drive(streams.open_any(bare, "messages", stream=True), each(encode(bare, "x")))
