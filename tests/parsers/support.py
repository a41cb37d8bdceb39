"""Builds requests, drives exchanges and reads what they wrote; knows no expectation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from parsers import Codec, Completion, Exchange, GatePolicy

SPECIALS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
)
_RANDOM = re.compile(r"(call_\d+_(?:ET_)?)[A-Za-z0-9]{24}")


def write_tokenizer(path: Path, *, without: str | None = None, extra: Sequence[str] = ()) -> str:
    """Write a byte-level tokenizer.json without merges: one token per byte, and the specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [token for token in (*SPECIALS, *extra) if token != without]
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(path))
    return str(path)


def under(codec: Codec, policy: GatePolicy) -> Codec:
    """The same codec with another gate."""
    profile = replace(codec.profile, gate=policy)
    return Codec(codec.model, codec._tokenizer, codec.vocabulary, profile)


def encode(codec: Codec, text: str) -> list[int]:
    """Tokenize model output; spelled markers become the real special tokens."""
    return list(codec._tokenizer.encode(text))


def plainly(codec: Codec, text: str) -> list[int]:
    """Tokenize model output so that no marker in it is real."""
    return codec.vocabulary.spell(text)


def function(name: str, properties: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A function tool; properties given as a type's name stand for ``{"type": name}``."""
    written = {
        key: {"type": value} if isinstance(value, str) else value
        for key, value in (properties or {}).items()
    }
    parameters = {"type": "object", "properties": written}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def request(**fields: Any) -> bytes:
    """A chat body; ``messages`` and ``model`` have defaults."""
    body = {"model": "DeepSeek-V4-Pro", "messages": [{"role": "user", "content": "q"}], **fields}
    return orjson.dumps(body)


def open_chat(codec: Codec, **fields: Any) -> Exchange:
    """Open a chat exchange for the codec's own model."""
    fields.setdefault("model", codec.model.name)
    return codec.open_exchange("chat", request(**fields), exchange_id="ID")


def complete(codec: Codec, **fields: Any) -> Completion:
    """Open a raw completion for the codec's own model."""
    body = {"model": codec.model.name, "prompt": "Say", **fields}
    return codec.open_completion(orjson.dumps(body), exchange_id="ID", created=5)


def drive(
    exchange: Exchange | Completion,
    pieces: Iterable[Sequence[int]],
    finish: str = "stop",
    **close: Any,
) -> list[bytes]:
    """Run a reply to its end and return its frames."""
    frames = exchange.start(10, 4)
    for piece in pieces:
        frames += exchange.receive(piece)
    return frames + exchange.close(finish, **close)  # type: ignore[arg-type]


def each(ids: Sequence[int], size: int = 1) -> list[Sequence[int]]:
    """Cut ids into steps of one size."""
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def chunks(frames: Iterable[bytes]) -> list[dict[str, Any]]:
    """Decode the data frames of a chat stream; ``[DONE]`` is left out."""
    out = []
    for frame in frames:
        assert frame.startswith(b"data: ")
        assert frame.endswith(b"\n\n")
        if frame != b"data: [DONE]\n\n":
            out.append(orjson.loads(frame[6:]))
    return out


def message(stream: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Add up chat chunks as a client does: by index, names once, arguments joined."""
    out: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in stream:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        out["content"] += delta.get("content") or ""
        out["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(out["calls"]):
                assert call["function"]["arguments"] == ""
                assert call["type"] == "function"
                out["calls"].append([call["function"]["name"], "", call["id"]])
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
            out["calls"][call["index"]][1] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            assert out["finish"] is None
            out["finish"] = choice["finish_reason"]
        out["usage"] = chunk.get("usage")
        out["bathyal"] = chunk.get("bathyal")
    return out


def whole(body: bytes) -> dict[str, Any]:
    """Read a whole chat reply into the form of ``message``."""
    reply = orjson.loads(body)
    (choice,) = reply["choices"]
    sent = choice["message"]
    calls = [
        [call["function"]["name"], call["function"]["arguments"], call["id"]]
        for call in sent.get("tool_calls", ())
    ]
    assert [call["index"] for call in sent.get("tool_calls", ())] == list(range(len(calls)))
    return {
        "content": sent["content"] or "",
        "reasoning": sent.get("reasoning_content") or "",
        "calls": calls,
        "finish": choice["finish_reason"],
        "usage": reply.get("usage"),
        "bathyal": reply.get("bathyal"),
    }


def said(reply: dict[str, Any]) -> dict[str, Any]:
    """What a reply says, without ids, usage and report."""
    calls = [(name, arguments) for name, arguments, _ in reply["calls"]]
    return {**{k: reply[k] for k in ("content", "reasoning", "finish")}, "calls": calls}


def talk(
    codec: Codec, output: str | Sequence[int], finish: str = "stop", **fields: Any
) -> dict[str, Any]:
    """Open a stream, play a model output token by token, return the message."""
    ids = encode(codec, output) if isinstance(output, str) else output
    return message(chunks(drive(open_chat(codec, stream=True, **fields), each(ids), finish)))


def masked(value: Any) -> Any:
    """Replace the random part of call ids in anything JSON."""
    return orjson.loads(_RANDOM.sub(r"\1<RANDOM>", orjson.dumps(value).decode()))
